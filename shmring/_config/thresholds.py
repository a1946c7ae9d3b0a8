"""The sizes from which one method is faster than another, and the wait policy.

The comments say on which machines the sizes were measured. `python -m shmring.tools.tune` measures most of
them on a machine; if rank 0 of a host has such a table, all ranks of the host use it.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from . import tuning_table
from .settings import CACHE_LINE_NBYTES, LEAST_SINGLE_COPY_NBYTES, Settings

KIB = 1 << 10
MIB = 1 << 20
NEVER = 1 << 40  # as a lower bound: never used; an upper bound of 0 has the same meaning
PAGE_NBYTES = 4096
CACHED_SLOTS = 4  # WINDOW_SLOTS of placement.pxd: the slots of a large reduction that stays in the cache
LINE_NBYTES = 128  # SR_LINE of src/layout.h: the alignment of slots

# Measured with 2 and 4 ranks on 2 cores of a Zen 4 EPYC: each number by the loads of its question in
# shmring.tools.tune, or by the benchmark beside it.
DEFAULTS: dict[str, int] = {
    "small_nbytes": 48 * KIB,
    "small_all_reduce_nbytes": 48 * KIB,
    "far_stream_nbytes": 2 * KIB,
    "one_chunk_nbytes": 1 * MIB,
    "chunk_nbytes": 512 * KIB,
    "depth": 4,
    "cached_chunk_nbytes": 96 * KIB,
    "cached_most_nbytes": 0,
    "exchange_nbytes": 256 * KIB,
    "stream_reduced_nbytes": 16 * MIB,
    "stream_in_place_nbytes": 32 * MIB,
    "stream_out_nbytes": 8 * MIB,  # bench/peers/matrix.py: a gather and an all_to_all take 0.75 of the time
    "fuse_nbytes": 8 * KIB,
    "ping_nbytes": 32 * KIB,  # bench/peers/peers.py: a reading of the clock is not seen from here on
    "single_copy_measured": 1,  # bench/peers/matrix.py; 0: shared arrays always in place
    "single_copy_nbytes": NEVER,  # bench/peers/peers.py --call all_to_all --input both
    "single_copy_scatter_nbytes": NEVER,
    "single_copy_most_nbytes": NEVER,  # as single_copy_nbytes
    "single_copy_message_nbytes": 64 * KIB,  # bench/peers/matrix.py, ping_pong
    "message_ring_nbytes": 2 * MIB,  # ping_pong of 16 and 64 KiB: 0.8 of the time with 1 MiB
    "chain_nbytes": NEVER,
}
# Values that differ, by the first word of the processor's name. Measured with 2 and 4 ranks on 2 cores of a
# Xeon with 2 MiB of L2 each. Its round trips are nearly as long as between an EPYC's chiplets.
# - Streaming stores lose: a third into slots at 128 KiB and a quarter at 1 MiB; into shared arrays in place
#   they take 6 times as long at 1 MiB and 1.5 times at 128 MiB. They gain for large results of reductions
#   out of place: an all_reduce of 4 MiB takes 0.77 of the time, of 16 MiB 0.67; together with writing its x
#   and reading its out 0.97 and 0.87. With 3, 4 and 8 ranks on 2 cores 4 MiB take 0.81 to 0.95. What is only
#   moved takes 0.84 to 0.97 from 8 to 16 MiB, but with writing and reading 1.02 to 1.11.
# - Single copies gain, most with huge pages. An all_to_all of 16 MiB takes 0.64 of the time with huge pages,
#   else 0.75. Where ranks measure which way is faster, the sizes here do not hold: path_choice.pxd,
#   message_path.pxd.
# - A message of 16 KiB and back takes half of the time by a single copy, if it was not written before; of
#   8 KiB as long as through the ring. Beyond that size the sender measures which way is faster, so this is
#   not tuned.
# - In rings of 4 MiB a message of 4 KiB and back takes a tenth longer than in rings of 256 KiB to 1 MiB. In
#   rings of 1 MiB sixteen messages of 4 MiB take up to a fifth longer than in rings of 512 KiB.
OF_PROCESSOR: dict[str, dict[str, int]] = {
    "Intel(R)": {
        "small_nbytes": 64 * KIB,
        "small_all_reduce_nbytes": 64 * KIB,
        "far_stream_nbytes": NEVER,
        "one_chunk_nbytes": 768 * KIB,
        "cached_most_nbytes": NEVER,
        "stream_reduced_nbytes": 3 * MIB,
        "stream_in_place_nbytes": NEVER,
        "stream_out_nbytes": 24 * MIB,
        "single_copy_nbytes": 128 * KIB,
        "single_copy_scatter_nbytes": 1 * MIB,
        "single_copy_most_nbytes": 16 * MIB,
        "single_copy_message_nbytes": 16 * KIB,
        "message_ring_nbytes": 512 * KIB,
    },
}
# Values for at least this many ranks, on any processor ("") or on one kind. Measured on 2 cores of that
# Xeon.
# - In a chain a scan of 4 ranks takes 0.7 to 0.9 of the time and of 8 ranks 0.5; a reduce takes 0.95 and
#   0.8.
# - With few slots of 96 KiB, 3 and 4 ranks take 0.8 of the time at 2 and at 16 MiB in place; with slots of
#   192 KiB 0.93. With 2 ranks, 96 and 128 KiB take equally long, and 192 KiB a tenth longer at 1 MiB out of
#   place.
# - With 5 to 8 ranks few slots gain less, and nothing beyond 16 MiB.
# Measured on 16 cores of such a Xeon, a rank on each:
# - In a small all_reduce each rank reads all other arrays. Beyond these sizes it is faster if each rank
#   reduces a slice: this takes 0.7 of the time with 8 ranks at 4 KiB and with 5 ranks at 8 KiB, and 0.6 with
#   16 ranks at 1 KiB.
#   In a small reduce only the root reads the arrays, and among three ranks and more that is faster up to
#   64 KiB.
# There is a message ring for each pair of ranks, and few of them are used, so those of many ranks are short.
OF_RANKS: dict[tuple[str, int], dict[str, int]] = {
    ("", 4): {"chain_nbytes": 256 * KIB},
    ("", 5): {"chain_nbytes": 128 * KIB, "message_ring_nbytes": 256 * KIB},
    ("", 9): {"message_ring_nbytes": 64 * KIB},
    ("", 65): {"message_ring_nbytes": 16 * KIB},
    ("Intel(R)", 3): {
        "one_chunk_nbytes": 384 * KIB,
        "single_copy_nbytes": 64 * KIB,
        "single_copy_most_nbytes": 4 * MIB,
    },
    ("Intel(R)", 5): {
        "small_all_reduce_nbytes": 24 * KIB,
        "cached_most_nbytes": 16 * MIB,
        "stream_in_place_nbytes": 24 * MIB,
    },
    ("Intel(R)", 8): {"small_all_reduce_nbytes": 6 * KIB},
}
# The limits of a measured table, such that no staging buffer exceeds some tens of MiB.
LIMITS: dict[str, tuple[int, int]] = {
    "small_nbytes": (64, 64 * KIB),  # SR_ALIGN_FOLD_BEYOND_NBYTES of src/kernels/kernels.c: ranks fold alike
    "small_all_reduce_nbytes": (64, 64 * KIB),
    "far_stream_nbytes": (64, NEVER),
    "one_chunk_nbytes": (4 * KIB, 8 * MIB),
    "chunk_nbytes": (4 * KIB, 8 * MIB),
    "depth": (2, 8),
    "cached_chunk_nbytes": (4 * KIB, 1 * MIB),
    "cached_most_nbytes": (0, NEVER),
    "exchange_nbytes": (4 * KIB, 8 * MIB),
    "stream_reduced_nbytes": (64 * KIB, NEVER),
    "stream_in_place_nbytes": (64 * KIB, NEVER),
    "stream_out_nbytes": (64 * KIB, NEVER),
    "fuse_nbytes": (64, 1 * MIB),
    "single_copy_measured": (0, 1),
    "single_copy_nbytes": (64, NEVER),
    "single_copy_scatter_nbytes": (64, NEVER),
    "single_copy_most_nbytes": (64, NEVER),
    "chain_nbytes": (64, NEVER),
}
# Thresholds used before the distance for a call is known, so they are equal for near and far.
OF_BOTH_DISTANCES = ("small_nbytes", "small_all_reduce_nbytes", "depth", "fuse_nbytes", "chain_nbytes")

# Zero-copy needs a second synchronisation: 0.1 us, or, if ranks share CPUs, some context switches.
OVERSUBSCRIBED_ZERO_COPY_NBYTES = 12 * KIB


def tables(settings: Settings, nranks: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the thresholds for near and for far cores in a communicator of `nranks`."""
    found = _measured_table(settings.tuning, nranks)
    both = built_in(nranks) | found.get("any", {})
    near, far = (
        both | found.get(distance, {}) | {name: both[name] for name in OF_BOTH_DISTANCES}
        for distance in ("near", "far")
    )
    return _as_forced(near, settings), _as_forced(far, settings)


def built_in(nranks: int) -> dict[str, int]:
    """Return the built-in thresholds for `nranks` on this kind of processor."""
    processor = tuning_table.cpu_model().partition(" ")[0]
    table = DEFAULTS | OF_PROCESSOR.get(processor, {})
    for (of_processor, least), values in OF_RANKS.items():
        if of_processor in ("", processor) and nranks >= least:
            table |= values
    return table


def _measured_table(asked: str, nranks: int) -> tuning_table.Table:
    """Return the table that SHMRING_TUNING names; for "auto" that of the user's cache folder, if usable."""
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
    """Return the table with the chunk, the depth, the path and the single copy of the settings.

    With SHMRING_CHUNK, SHMRING_PATH or SHMRING_SINGLE_COPY no path is measured (path_choice.pxd,
    message_path.pxd), so shared arrays are always read in place. The first two also turn single copies off,
    except with SHMRING_PATH=single_copy.
    """
    forced = settings.single_copy_nbytes
    if forced is None and (settings.path != "auto" or settings.chunk_nbytes is not None):
        forced = LEAST_SINGLE_COPY_NBYTES if settings.path == "single_copy" else 0
    if forced is not None:
        table = table | {
            "single_copy_measured": 0,
            "single_copy_nbytes": forced or NEVER,
            "single_copy_scatter_nbytes": forced or NEVER,
            "single_copy_most_nbytes": NEVER,
        }
    if settings.single_copy_nbytes is not None:
        table = table | {"single_copy_message_nbytes": settings.single_copy_nbytes or NEVER}
    if settings.chunk_nbytes is None and settings.depth is None:
        return table
    chunk_nbytes = settings.chunk_nbytes or table["chunk_nbytes"]
    return table | {
        "one_chunk_nbytes": chunk_nbytes,
        "chunk_nbytes": chunk_nbytes,
        "exchange_nbytes": chunk_nbytes,
        "small_nbytes": min(table["small_nbytes"], chunk_nbytes),
        "small_all_reduce_nbytes": min(table["small_all_reduce_nbytes"], chunk_nbytes),
        "cached_chunk_nbytes": LINE_NBYTES,  # as small as possible, since it is not used
        "cached_most_nbytes": 0,
        "chain_nbytes": table["chain_nbytes"] if table["chain_nbytes"] == NEVER else chunk_nbytes,
        "depth": max(settings.depth or table["depth"], 2),
    }


def staging_nbytes(tables: tuple[dict[str, int], ...], nranks: int) -> int:
    """Return the bytes of one rank's staging buffer, in whole pages.

    The buffer has room for `depth` slots, for two of the largest slots, for the CACHED_SLOTS of a reduction
    that stays in the cache, and for a line for each rank. It exceeds a private L2, so that a line is not
    written again while another core holds it, and is a small part of an L3.
    """
    nbytes = nranks * LINE_NBYTES
    for table in tables:
        largest = max(table["one_chunk_nbytes"], table["exchange_nbytes"])
        nbytes = max(nbytes, table["depth"] * _slot_nbytes(table["chunk_nbytes"]), 2 * _slot_nbytes(largest))
        nbytes = max(nbytes, CACHED_SLOTS * _slot_nbytes(table["cached_chunk_nbytes"]))
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _slot_nbytes(chunk_nbytes: int) -> int:
    # Data begin less than a cache line after their slot: `skew` of src/layout.h.
    return -(-(chunk_nbytes + CACHE_LINE_NBYTES) // LINE_NBYTES) * LINE_NBYTES


def wait_policy(nranks: int, *, oversubscribed: bool, one_group: bool) -> dict[str, int]:
    """Return the wait policy and the interval of distance measurements.

    A rank makes long pauses only if every rank has a CPU of its own. If ranks share CPUs, it yields the CPU:
    after some pauses if the awaited rank runs on another CPU, at once if the awaited rank needs this CPU.

    The distance is measured again because virtual CPUs move within seconds. A measurement takes 3 to 11 us
    for a pair of ranks, less than a thousandth of the time, and a hundred times as long if ranks share a
    CPU.

    poll_ns is the interval of liveness checks in waits that do not sleep; a check is one load for each rank.

    `one_group`: the scheduler accounts the ranks' time together. If not, for example because each rank has a
    session of its own (torchrun), a yielding rank gets as much time as a working rank, so it sleeps sooner.
    """
    both: dict[str, int] = {
        "sleep_ns": 5_000_000,  # the interval of signal checks, so that both are one wake-up
        "poll_ns": 50_000,
        "oversubscribed": oversubscribed,
    }
    if not oversubscribed:
        return both | {
            "pauses": 1500,
            "brief_pauses": 60,
            "brief_yields": 0,
            "yield_ns": 200_000,
            "ping_interval_ns": 20_000_000 * (nranks - 1),
            "zero_copy_nbytes": 0,
        }
    return both | {
        "pauses": 60,
        "brief_pauses": 100,
        "brief_yields": 4,
        "yield_ns": 1_000_000 if one_group else 20_000,
        "ping_interval_ns": 5_000_000_000,
        "zero_copy_nbytes": OVERSUBSCRIBED_ZERO_COPY_NBYTES,
    }
