"""The sizes at which one way of doing it overtakes another, and how long to wait in which way.

Every figure names where it was measured. On this machine `python -m shmring.tools.tune` measures most of them
again; rank 0's table of that, if there is one, holds for all ranks.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from . import tuning_table
from .settings import Settings

KIB = 1 << 10
MIB = 1 << 20
NEVER = 1 << 40  # of what is done from some length on; of what is done up to one: 0
PAGE_NBYTES = 4096
CACHED_SLOTS = 4  # WINDOW_SLOTS of staging.pxd: how many a large reduction keeps to that is to stay cached
LINE_NBYTES = 128  # SR_LINE of src/layout.h: slots begin on it
CACHE_LINE_NBYTES = 64  # SR_CACHE_LINE: room that a slot has beyond its chunk

# Measured with bench/ (peers, bench_fusion) and shmring.tools.tune, 2 and 4 ranks on 2 cores of a Zen 4 EPYC.
DEFAULTS: dict[str, int] = {
    "small_nbytes": 48 * KIB,
    "far_stream_nbytes": 2 * KIB,
    "one_chunk_nbytes": 1 * MIB,
    "chunk_nbytes": 512 * KIB,
    "depth": 4,
    "cached_chunk_nbytes": 96 * KIB,
    "cached_most_nbytes": 0,
    "exchange_nbytes": 256 * KIB,
    "stream_out_nbytes": 16 * MIB,
    "stream_in_place_nbytes": 32 * MIB,
    "zero_copy_stream_nbytes": 16 * MIB,
    "fuse_nbytes": 8 * KIB,
    "ping_nbytes": 32 * KIB,
    "single_copy_nbytes": NEVER,
    "single_copy_scatter_nbytes": NEVER,
    "single_copy_all_gather_nbytes": NEVER,
    "single_copy_most_nbytes": NEVER,
    "single_copy_reduce_nbytes": NEVER,
    "single_copy_reduce_most_nbytes": NEVER,
    "single_copy_in_place_nbytes": NEVER,
    "single_copy_in_place_most_nbytes": NEVER,
    "chain_nbytes": NEVER,
}
# Where it is otherwise, by the first word of the processor's name: 2 and 4 ranks on 2 cores of a Xeon with
# 2 MiB of L2 each. Round trips are nearly as long there as between an EPYC's chiplets, but streaming loses:
# into slots a third at 128 KiB and a quarter at 1 MiB, into shared arrays in place 6 times at 1 MiB and 1.5
# at 128. It gains on its way to large results elsewhere (half, private ones of 40 MiB and shared ones of
# 24); and single copies do, most where pages are huge: an all_to_all of 16 MiB takes 0.64 of the time then,
# else 0.75; an all_reduce of 20 MiB to another place 0.85 with huge ones, with small ones as long as through
# slots, which are faster from 24 MiB on, below 4 and in place. Pieces of an all_gather below 256 KiB, and of
# two ranks' all_to_all below 128, go through slots, too: in half to three quarters of the time where they
# were written before each call, while those that stay as they are take up to 1.4 times as long.
OF_PROCESSOR: dict[str, dict[str, int]] = {
    "Intel(R)": {
        "small_nbytes": 64 * KIB,
        "far_stream_nbytes": NEVER,
        "one_chunk_nbytes": 768 * KIB,
        "cached_most_nbytes": NEVER,
        "stream_out_nbytes": 24 * MIB,
        "stream_in_place_nbytes": NEVER,
        "zero_copy_stream_nbytes": 3 * MIB,
        "single_copy_nbytes": 128 * KIB,
        "single_copy_scatter_nbytes": 1 * MIB,
        "single_copy_all_gather_nbytes": 256 * KIB,
        "single_copy_most_nbytes": 16 * MIB,
        "single_copy_reduce_nbytes": 6 * MIB,
        "single_copy_reduce_most_nbytes": 24 * MIB,
    },
}
# And of so many ranks or more, on any processor or on one kind: on 2 cores of that Xeon a scan of 4 takes
# 0.7 to 0.9 of the time in a chain, one of 8 half of it, a reduce 0.95 and 0.8. Few slots of 96 KiB take 3
# and 4 ranks 0.8 of the time at 2 and at 16 MiB in place, of 192 KiB 0.93; 2 ranks as long by 96 as by 128,
# and a tenth longer by 192 at 1 MiB to another place. Single copies to another place are faster from 4 MiB
# on with huge pages. With 5 to 8 ranks few slots gain less, and beyond 16 MiB nothing.
OF_RANKS: dict[tuple[str, int], dict[str, int]] = {
    ("", 4): {"chain_nbytes": 256 * KIB},
    ("", 5): {"chain_nbytes": 128 * KIB},
    ("Intel(R)", 3): {
        "one_chunk_nbytes": 384 * KIB,
        "stream_out_nbytes": 12 * MIB,
        "single_copy_nbytes": 64 * KIB,
        "single_copy_most_nbytes": 4 * MIB,
        "single_copy_reduce_nbytes": 4 * MIB,
        "single_copy_reduce_most_nbytes": 8 * MIB,
    },
    ("Intel(R)", 5): {"cached_most_nbytes": 16 * MIB, "stream_in_place_nbytes": 24 * MIB},
}
# What a measured table may say: no staging buffer grows beyond some tens of MiB by it.
LIMITS: dict[str, tuple[int, int]] = {
    "small_nbytes": (64, 64 * KIB),  # SR_ALIGN_FOLD_BEYOND_NBYTES of src/kernels/kernels.c: all fold alike
    "far_stream_nbytes": (64, NEVER),
    "one_chunk_nbytes": (4 * KIB, 8 * MIB),
    "chunk_nbytes": (4 * KIB, 8 * MIB),
    "depth": (2, 8),
    "cached_chunk_nbytes": (4 * KIB, 1 * MIB),
    "cached_most_nbytes": (0, NEVER),
    "exchange_nbytes": (4 * KIB, 8 * MIB),
    "stream_out_nbytes": (64 * KIB, NEVER),
    "stream_in_place_nbytes": (64 * KIB, NEVER),
    "zero_copy_stream_nbytes": (64 * KIB, NEVER),
    "fuse_nbytes": (64, 1 * MIB),
    "single_copy_nbytes": (64, NEVER),
    "single_copy_scatter_nbytes": (64, NEVER),
    "single_copy_all_gather_nbytes": (64, NEVER),
    "single_copy_most_nbytes": (64, NEVER),
    "single_copy_reduce_nbytes": (64, NEVER),
    "single_copy_reduce_most_nbytes": (64, NEVER),
    "single_copy_in_place_nbytes": (64, NEVER),
    "single_copy_in_place_most_nbytes": (64, NEVER),
    "chain_nbytes": (64, NEVER),
}
# Known before a call begins, when the distance that will hold then is not: the same near and far.
OF_BOTH_DISTANCES = ("small_nbytes", "depth", "fuse_nbytes", "chain_nbytes")

# Zero-copy has a second synchronisation: a matter of 0.1 us, or of some switches between processes.
OVERSUBSCRIBED_ZERO_COPY_NBYTES = 12 * KIB


def tables(settings: Settings, nranks: int) -> tuple[dict[str, int], dict[str, int]]:
    """What holds for near and for far cores in a communicator that this rank begins for `nranks`."""
    found = _measured_table(settings.tuning, nranks)
    both = built_in(nranks) | found.get("any", {})
    near, far = (
        both | found.get(distance, {}) | {name: both[name] for name in OF_BOTH_DISTANCES}
        for distance in ("near", "far")
    )
    return _as_forced(near, settings), _as_forced(far, settings)


def built_in(nranks: int) -> dict[str, int]:
    """What holds for `nranks` on this kind of processor where nothing was measured."""
    processor = tuning_table.cpu_model().partition(" ")[0]
    table = DEFAULTS | OF_PROCESSOR.get(processor, {})
    for (of_processor, least), values in OF_RANKS.items():
        if of_processor in ("", processor) and nranks >= least:
            table |= values
    return table


def _measured_table(asked: str, nranks: int) -> tuning_table.Table:
    """By SHMRING_TUNING: that file's, of the user's cache folder if it can be used ("auto"), or none."""
    if asked == "none":
        return {}
    path = tuning_table.default_path() if asked == "auto" else Path(asked)
    try:
        return tuning_table.load(path, LIMITS).get(nranks, {})
    except tuning_table.Unusable as error:
        if asked != "auto":
            raise ValueError(f"SHMRING_TUNING is {asked!r}, a table that cannot be used: {error}") from error
        if isinstance(error, tuning_table.Absent):
            return {}
        warnings.warn(
            f"the tuning table {path} is not used: {error}; "
            "measure again with python -m shmring.tools.tune, or set SHMRING_TUNING=none",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def _as_forced(table: dict[str, int], settings: Settings) -> dict[str, int]:
    """With the chunk and the depth that the environment asks for, and the single copy.

    Who asks for a chunk or a path wants to see data go through slots.
    """
    asks_for_slots = settings.chunk_nbytes is not None or settings.path != "auto"
    if settings.single_copy_nbytes is not None or asks_for_slots:
        least = settings.single_copy_nbytes or NEVER
        table = table | {
            "single_copy_nbytes": least,
            "single_copy_scatter_nbytes": least,
            "single_copy_all_gather_nbytes": least,
            "single_copy_most_nbytes": NEVER,
            "single_copy_reduce_nbytes": least,
            "single_copy_reduce_most_nbytes": NEVER,
            "single_copy_in_place_nbytes": least,
            "single_copy_in_place_most_nbytes": NEVER,
        }
    if settings.chunk_nbytes is None and settings.depth is None:
        return table
    chunk_nbytes = settings.chunk_nbytes or table["chunk_nbytes"]
    return table | {
        "one_chunk_nbytes": chunk_nbytes,
        "chunk_nbytes": chunk_nbytes,
        "exchange_nbytes": chunk_nbytes,
        "small_nbytes": min(table["small_nbytes"], chunk_nbytes),
        "cached_chunk_nbytes": LINE_NBYTES,  # its slots take no room
        "cached_most_nbytes": 0,
        "chain_nbytes": table["chain_nbytes"] if table["chain_nbytes"] == NEVER else chunk_nbytes,
        "depth": max(settings.depth or table["depth"], 2),
    }


def ring_nbytes(tables: tuple[dict[str, int], ...], nranks: int) -> int:
    """Of one rank's staging buffer, in whole pages: so many slots as it is deep, two of the largest there
    are, those of a reduction that keeps to a few.

    More than a private L2, so that a line is not written again while another holds it; little of an L3. A
    line for each rank has to fit.
    """
    nbytes = nranks * LINE_NBYTES
    for table in tables:
        largest = max(table["one_chunk_nbytes"], table["exchange_nbytes"])
        nbytes = max(nbytes, table["depth"] * _slot_nbytes(table["chunk_nbytes"]), 2 * _slot_nbytes(largest))
        nbytes = max(nbytes, CACHED_SLOTS * _slot_nbytes(table["cached_chunk_nbytes"]))
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _slot_nbytes(chunk_nbytes: int) -> int:
    return -(-(chunk_nbytes + CACHE_LINE_NBYTES) // LINE_NBYTES) * LINE_NBYTES


def wait_policy(nranks: int, *, oversubscribed: bool, one_group: bool) -> dict[str, int]:
    """How to wait: long pauses only when every rank has a CPU of its own; else, where ranks share CPUs, the
    CPU is handed on, after some pauses where the rank that is awaited runs on another one, at once where it
    needs this one.

    And how often to measure the distance, since virtual CPUs move within seconds: it takes 3 to 11 us a pair
    of ranks, less than a thousandth of the time, and a hundred times as much where ranks take turns on a CPU.

    poll_ns is for waits that do not sleep: to look whether the others live is a load for each.

    `one_group`: the scheduler counts their time together. If it does not, as where each has a session of its
    own (torchrun), a rank that yields takes as much time as the one that works: it had better sleep soon.
    """
    if not oversubscribed:
        return {
            "pauses": 1500,
            "brief_pauses": 60,
            "brief_yields": 0,
            "yield_ns": 200_000,
            "sleep_ns": 4_000_000,
            "poll_ns": 50_000,
            "ping_interval_ns": 20_000_000 * (nranks - 1),
            "zero_copy_nbytes": 0,
            "oversubscribed": False,
        }
    return {
        "pauses": 60,
        "brief_pauses": 100,
        "brief_yields": 4,
        "yield_ns": 1_000_000 if one_group else 20_000,
        "sleep_ns": 4_000_000,
        "poll_ns": 50_000,
        "ping_interval_ns": 5_000_000_000,
        "zero_copy_nbytes": OVERSUBSCRIBED_ZERO_COPY_NBYTES,
        "oversubscribed": True,
    }
