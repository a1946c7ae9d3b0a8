"""The sizes at which one way of doing it overtakes another, and how long to wait in which way.

Every figure names where it was measured. May know: limits, settings.
"""

from __future__ import annotations

from .limits import usable_cpus
from .settings import Settings

KIB = 1 << 10
MIB = 1 << 20
PAGE_NBYTES = 4096
LINE_NBYTES = 128  # SR_LINE of src/layout.h: slots begin on it
CACHE_LINE_NBYTES = 64  # SR_CACHE_LINE: room that a slot has beyond its chunk

# Measured with bench/ (peers, bench_fusion, tune_all_reduce), 2 and 4 ranks on 2 cores of a Zen 4 EPYC.
DEFAULTS: dict[str, int] = {
    "small_nbytes": 48 * KIB,
    "far_stream_nbytes": 2 * KIB,
    "one_chunk_nbytes": 1 * MIB,
    "chunk_nbytes": 512 * KIB,
    "depth": 4,
    "exchange_nbytes": 256 * KIB,
    "stream_out_nbytes": 16 * MIB,
    "zero_copy_stream_nbytes": 16 * MIB,
    "fuse_nbytes": 8 * KIB,
    "ping_nbytes": 32 * KIB,
}

# Zero-copy has a second synchronisation: a matter of 0.1 us, or of some switches between processes.
OVERSUBSCRIBED_ZERO_COPY_NBYTES = 12 * KIB


def forced_chunk_nbytes(settings: Settings) -> int:
    """The chunk that the environment asks for, 0 when it leaves that to the engine."""
    if settings.chunk_nbytes is None and settings.depth is None:
        return 0
    return settings.chunk_nbytes or DEFAULTS["chunk_nbytes"]


def ring_nbytes(settings: Settings, nranks: int) -> int:
    """Of one rank's staging ring, in whole pages: so many slots as it is deep, two if they are the largest.

    More than a private L2, so that a line is not written again while another holds it; little of an L3. A
    line for each rank has to fit.
    """
    chunk_nbytes = forced_chunk_nbytes(settings)
    if chunk_nbytes:
        nbytes = max(settings.depth or DEFAULTS["depth"], 2) * _slot_nbytes(chunk_nbytes)
    else:
        chunks_nbytes = DEFAULTS["depth"] * _slot_nbytes(DEFAULTS["chunk_nbytes"])
        nbytes = max(chunks_nbytes, 2 * _slot_nbytes(DEFAULTS["one_chunk_nbytes"]))
    nbytes = max(nbytes, nranks * LINE_NBYTES)
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _slot_nbytes(chunk_nbytes: int) -> int:
    return -(-(chunk_nbytes + CACHE_LINE_NBYTES) // LINE_NBYTES) * LINE_NBYTES


def tuning(forced_chunk_nbytes: int) -> dict[str, int]:
    """The table for a communicator whose chunks were fixed by rank 0, or not (0)."""
    table = {name: value for name, value in DEFAULTS.items() if name != "depth"}
    if forced_chunk_nbytes:
        table["one_chunk_nbytes"] = table["chunk_nbytes"] = forced_chunk_nbytes
        table["exchange_nbytes"] = forced_chunk_nbytes
        table["small_nbytes"] = min(table["small_nbytes"], forced_chunk_nbytes)
    return table


def patience(nranks: int, allowed_cpus: int) -> dict[str, int]:
    """How to wait: long pauses only when every rank has a CPU of its own; else the CPU is handed on, after
    some pauses where the rank that is awaited runs on another one, at once where it needs this one.

    And how often to measure the distance, since virtual CPUs move within seconds: it takes 3 to 11 us a pair
    of ranks, less than a thousandth of the time, and a hundred times as much where ranks take turns on a CPU.

    `allowed_cpus` is how many CPUs the ranks may run on, all together: each may be pinned to one of them.
    """
    if nranks <= usable_cpus(allowed_cpus):
        return {
            "pauses": 1500,
            "brief_pauses": 60,
            "brief_yields": 0,
            "yield_ns": 200_000,
            "sleep_ns": 4_000_000,
            "look_ns": 100_000,
            "ping_interval_ns": 20_000_000 * (nranks - 1),
            "zero_copy_nbytes": 0,
            "crowded": False,
        }
    return {
        "pauses": 60,
        "brief_pauses": 100,
        "brief_yields": 4,
        "yield_ns": 1_000_000,
        "sleep_ns": 4_000_000,
        "look_ns": 200_000,
        "ping_interval_ns": 1_000_000_000,
        "zero_copy_nbytes": OVERSUBSCRIBED_ZERO_COPY_NBYTES,
        "crowded": True,
    }
