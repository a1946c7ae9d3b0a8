"""Cases for the tests of collectives: arrays in memory of every kind, and their expected results, bit for
bit."""

import itertools
import zlib

import numpy as np

from shmring._config import thresholds
from shmring._core import kernels
from tests.unit.test_kernels import DTYPES, SMALL_FLOATS, assert_same, expected, numbers

__all__ = ["DTYPES", "assert_same", "expected", "numbers"]  # and the names below

MEMORIES = ("private", "unaligned", "shared", "slice", "mixed")
GUARD = 0xA5
AROUND_NBYTES = 24  # on either side of a slice: no multiple of a cache line
SMALL_NBYTES = thresholds.built_in(2)["small_nbytes"]
# For certain; from smaller sizes if each rank has a CPU.
ZERO_COPY_NBYTES = thresholds.OVERSUBSCRIBED_ZERO_COPY_NBYTES


# ---- arrays -----------------------------------------------------------------------------------------------


def rng_of(*what):
    """The same random numbers for the same words, in every process."""
    return np.random.default_rng(zlib.crc32(repr(what).encode()))


def inputs(row, size):
    """Each rank's values of a case."""
    return [numbers(row["dtype"], count_of(row), rng_of(sorted(row.items()), rank)) for rank in range(size)]


def count_of(row):
    """Return the elements of a case whose size is a number of elements, or (bytes, elements more or less)."""
    if isinstance(row["size"], int):
        return row["size"]
    nbytes, more = row["size"]
    return max(0, nbytes // DTYPES[row["dtype"]].itemsize + more)


class Placed:
    """A copy of `values` in memory of a kind; collective for the kinds that are not private to a rank.

    room_nbytes: the most bytes of any rank's values, if they differ in length.
    """

    def __init__(self, comm, values, memory, room_nbytes=0):
        around = AROUND_NBYTES if memory in ("slice", "unaligned") else 0
        begin = around + (memory == "unaligned")
        nbytes = max(values.nbytes, room_nbytes) + begin + around
        room = comm.empty(nbytes, np.uint8) if memory in ("shared", "slice", "mixed") else None
        if room is None or (memory == "mixed" and comm.rank % 2 == 1):
            room = np.empty(nbytes, np.uint8)
        room[...] = GUARD
        self._around = room[:begin], room[begin + values.nbytes :]
        self.array = room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
        self.array[...] = values

    def assert_surroundings(self):
        for guard in self._around:
            assert (guard == GUARD).all(), "written outside of the array"


def same_bytes(a, b):
    return a.tobytes() == b.tobytes()


# ---- results ----------------------------------------------------------------------------------------------


def all_reduced(name, op, arrays, algorithm="auto", nodes=None):
    """Return the fold of the ranks' arrays in the order, and with the roundings, of an algorithm.

    nodes: by rank, if there are several hosts, which have an order of their own.
    """
    if nodes is not None and len(set(nodes)) > 1:
        return _by_hosts(name, op, arrays, nodes)
    if len(arrays) > 1 and algorithm in _ORDERS:
        return _ORDERS[algorithm](name, op, arrays)
    return expected(name, op, arrays, len(arrays))


def _by_hosts(name, op, arrays, nodes):
    """Each host in rank order, then hosts in the order of their lowest ranks; one rounding at the end."""
    if name in SMALL_FLOATS:
        wide = [array.astype(np.float32) for array in arrays]
        return _by_hosts("float32", op, wide, nodes).astype(DTYPES[name])
    partials = [
        expected(name, _hop(op, last=False), [x for x, at in zip(arrays, nodes, strict=True) if at == node])
        for node in dict.fromkeys(nodes)
    ]
    return expected(name, op, partials, len(arrays))


def _ring(name, op, arrays):
    """Fold slice j from rank j - 1 down to rank j; each hop rounds."""
    n = len(arrays)
    out = np.empty_like(arrays[0])
    for j, (begin, end) in enumerate(kernels.slice_bounds(len(out), n)):
        partial = arrays[(j - 1) % n][begin:end]
        for hop in range(2, n + 1):
            own = arrays[(j - hop) % n][begin:end]
            partial = expected(name, _hop(op, last=hop == n), [partial, own], n)
        out[begin:end] = partial
    return out


def _two_rings(name, op, arrays):
    """Fold one half around the ring, the other half in the other direction."""
    one, other = _halves(arrays)
    mirrored = [other[-rank] for rank in range(len(other))]
    return np.concatenate([_ring(name, op, one), _ring(name, op, mirrored)])


def _halving(name, op, arrays):
    """Ranks half a power of two apart, in their order, then partial results half as far apart, ..."""
    n = len(arrays)
    distance = 1 << (n.bit_length() - 2)
    parts = arrays
    while distance > 0:
        last = distance == 1
        parts = [expected(name, _hop(op, last=last), parts[rank::distance], n) for rank in range(distance)]
        distance //= 2
    return parts[0]


def _tree(name, op, arrays, rank=0):
    """A rank folds its own values, then its children's partial results, and rounds."""
    n = len(arrays)
    parts, step = [arrays[rank]], 1
    while step < n and not rank & step:
        if rank + step < n:
            parts.append(_tree(name, op, arrays, rank + step))
        step *= 2
    return expected(name, _hop(op, last=rank == 0), parts, n)


def _two_trees(name, op, arrays):
    trees = zip(_halves(arrays), kernels.double_tree(len(arrays)), strict=True)
    return np.concatenate([_subtree(name, op, half, children) for half, children in trees])


def _subtree(name, op, arrays, children, rank=None):
    """Fold as _tree does, from the root on, which has no parent."""
    is_root = rank is None
    if is_root:
        (rank,) = set(range(len(arrays))) - set(itertools.chain(*children))
    parts = [arrays[rank], *(_subtree(name, op, arrays, children, child) for child in children[rank])]
    return expected(name, _hop(op, last=is_root), parts, len(arrays)) if children[rank] else arrays[rank]


def _halves(arrays):
    half = len(arrays[0]) - len(arrays[0]) // 2
    return [x[:half] for x in arrays], [x[half:] for x in arrays]


_ORDERS = {
    "ring": _ring,
    "bidirectional_ring": _two_rings,
    "halving_doubling": _halving,
    "tree": _tree,
    "double_tree": _two_trees,
}


def _hop(op, *, last):
    return "sum" if op == "avg" and not last else op


def assert_all_reduced(results, row, arrays):
    """Every rank has the same bits, and they are the right ones."""
    want = all_reduced(row["dtype"], row["op"], arrays, row.get("algorithm", "auto"))
    with np.errstate(all="ignore"):
        assert_same(np.frombuffer(results[0], want.dtype), want.ravel(), row["op"], row)
    for rank, result in enumerate(results):
        assert result == results[0], f"rank {rank} has other bits than rank 0: {row}"


# ---- rows -------------------------------------------------------------------------------------------------


def environment(row):
    """Return the environment variables that a row needs."""
    names = ("chunk", "depth", "path", "segment", "isa", "single_copy")
    return {f"SHMRING_{name.upper()}": row[name] for name in names if row.get(name) is not None}


def root_of(row, size):
    return {"first": 0, "last": size - 1, "middle": size // 2}[row["root"]]


# ---- refusals ---------------------------------------------------------------------------------------------


def refusals_of(comm, attempts):
    """Return the error of each attempt, by name; all ranks refuse the same, without any other effect."""
    text = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (TypeError, ValueError) as error:
            text[name] = f"{type(error).__name__}: {error}"
    comm.barrier()
    return text
