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

# Measured with bench/peers.py and bench/tune_all_reduce.py, 2 and 4 ranks on 2 cores of a Zen 4 EPYC.
DEFAULTS: dict[str, int] = {
    "small_nbytes": 8 * KIB,
    "far_stream_nbytes": 2 * KIB,
    "one_chunk_nbytes": 1 * MIB,
    "chunk_nbytes": 256 * KIB,
    "near_ring_nbytes": 2 * MIB,
    "far_ring_nbytes": 4 * MIB,
    "lookahead": 4,
    "zero_copy_nbytes": 8 * KIB,
    "stream_out_nbytes": 16 * MIB,
    "zero_copy_stream_nbytes": 16 * MIB,
    "ping_nbytes": 32 * KIB,
    "ping_interval_ns": 1_000_000_000,
}


def forced_chunk_nbytes(settings: Settings) -> int:
    """The chunk that the environment asks for, 0 when it leaves that to the engine."""
    if settings.chunk_nbytes is None and settings.depth is None:
        return 0
    return settings.chunk_nbytes or DEFAULTS["chunk_nbytes"]


def ring_nbytes(settings: Settings) -> int:
    """Of one rank's staging ring as it is laid out: whole pages, a power of two, room for any path."""
    chunk_nbytes = forced_chunk_nbytes(settings)
    if not chunk_nbytes:
        return max(DEFAULTS["near_ring_nbytes"], DEFAULTS["far_ring_nbytes"])
    return max(PAGE_NBYTES, _ring_for(chunk_nbytes, settings.depth or 4))


def _ring_for(chunk_nbytes: int, depth: int) -> int:
    slot_nbytes = -(-chunk_nbytes // LINE_NBYTES) * LINE_NBYTES
    return max(4 * LINE_NBYTES, 1 << (slot_nbytes * max(depth, 2) - 1).bit_length())


def tuning(forced_chunk_nbytes: int, forced_depth: int) -> dict[str, int]:
    """The table for a communicator whose chunks and rings were fixed, or not (0), by rank 0."""
    table = dict(DEFAULTS)
    if forced_chunk_nbytes:
        nbytes = _ring_for(forced_chunk_nbytes, forced_depth or 4)
        table["near_ring_nbytes"] = table["far_ring_nbytes"] = nbytes
        table["one_chunk_nbytes"] = table["chunk_nbytes"] = forced_chunk_nbytes
        table["small_nbytes"] = min(table["small_nbytes"], forced_chunk_nbytes)
    return table


def patience(nranks: int, allowed_cpus: int) -> dict[str, int]:
    """How to wait: long pauses only when every rank has a CPU of its own, else the CPU is handed on at once.

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
        }
    return {
        "pauses": 20,
        "brief_pauses": 5,
        "brief_yields": 2,
        "yield_ns": 1_000_000,
        "sleep_ns": 4_000_000,
        "look_ns": 200_000,
    }
