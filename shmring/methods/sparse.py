"""Sums of arrays that are mostly zero: only what is not zero somewhere travels.

Owns how that is found, agreed on and put together; a user of the public API: what it is handed is a
communicator.
"""

from __future__ import annotations

import math
import operator
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmring.errors import agreed

from .flat import agree, check_arrays, check_in_place, one_call

if TYPE_CHECKING:
    from shmring import Comm

__all__ = ["SparseAllReduce", "all_reduce_pairs"]

Array = NDArray[Any]

# Where the whole array takes about as long, by bench/methods/bench_sparse.py: shares of blocks on one host
# and over a wire of 1 Gbit/s, and bytes of all ranks' pairs in those of the array.
_BREAK_EVEN, _BREAK_EVEN_ACROSS = 0.1, 0.9
_PAIRS_BREAK_EVEN = 0.5
_FEW = 256  # times as many as there are could be: sorting them takes less time than a pass over marks


class SparseAllReduce:
    """`all_reduce` that skips blocks which are zero on every rank (OmniReduce, Fei et al. 2021).

    Ranks agree on the blocks by one small all_reduce of a bit for each, then reduce those together. What
    comes out has the bits of `Comm.all_reduce`: only blocks of zero bits are skipped, so none with a NaN or a
    -0.0. All ranks make one, collectively, with the same numbers. block: elements. dense_above: the share of
    blocks above which all of the array is reduced instead, 0 to 1; None: as measured for ranks of one host,
    or of several.
    """

    def __init__(self, comm: Comm, *, block: int = 256, dense_above: float | None = None) -> None:
        try:
            if operator.index(block) < 1:
                raise ValueError(f"block is {block}; it takes 1 element or more")
        except (TypeError, ValueError):
            comm.refuse("all_gather")
            raise
        if dense_above is None:
            dense_above = _BREAK_EVEN if comm.num_nodes == 1 else _BREAK_EVEN_ACROSS
        agree(comm, block=block, dense_above=dense_above)
        self._comm = comm
        self._block = block
        self._dense_above = dense_above
        self._density = math.nan
        self._stage = np.empty(0, np.uint8)

    @property
    def density(self) -> float:
        """The share of blocks that were not zero on all ranks in the last call; NaN before the first."""
        return self._density

    @one_call
    def __call__(self, x: Array, op: str = "sum") -> None:
        """Collective: combine x of all ranks elementwise, for every rank, in place.

        x: a contiguous array of NumPy, the same dtype and number of elements on every rank. op: as in
        `Comm.all_reduce`. Raises TypeError or ValueError here and Mismatch elsewhere, or what that raises.
        """
        operation: Any = op
        flat = self._checked(x)
        nblocks = len(flat) // self._block
        whole = flat[: nblocks * self._block].reshape(nblocks, self._block)
        rest = flat[whole.size :]
        bits = np.packbits(_are_not_zero(whole))
        self._comm.all_reduce(bits, "bor")
        chosen = np.flatnonzero(np.unpackbits(bits, count=nblocks))
        self._density = len(chosen) / nblocks if nblocks else 1.0
        if self._density > self._dense_above:
            self._comm.all_reduce(flat, operation)
            return
        packed = self._staged(len(chosen) * self._block + len(rest), flat.dtype)
        blocks = packed[: len(chosen) * self._block].reshape(len(chosen), self._block)
        np.take(whole, chosen, axis=0, out=blocks, mode="clip")  # "raise" would go by way of a copy
        packed[blocks.size :] = rest
        self._comm.all_reduce(packed, operation)
        whole[chosen] = blocks
        rest[:] = packed[blocks.size :]

    def _checked(self, x: Array) -> Array:
        """x in one dimension."""
        try:
            check_in_place(x)
        except (TypeError, ValueError):
            self._comm.refuse("all_reduce")
            raise
        return x.reshape(-1)

    def _staged(self, count: int, dtype: np.dtype[Any]) -> Array:
        nbytes = count * dtype.itemsize
        if nbytes > len(self._stage):
            self._stage = np.empty(nbytes, np.uint8)
        return self._stage[:nbytes].view(dtype)


def _are_not_zero(blocks: Array) -> NDArray[np.bool_]:
    """Whether any bit of a row is set: a -0.0 counts, as a NaN does."""
    words = blocks.view(f"u{math.gcd(blocks.shape[1] * blocks.itemsize, 8)}")
    found: NDArray[np.bool_] = np.bitwise_or.reduce(words, axis=1) != 0
    return found


@one_call
def all_reduce_pairs(
    comm: Comm, indices: Array, values: Array, length: int, *, dense_above: float = _PAIRS_BREAK_EVEN
) -> tuple[NDArray[np.int64], Array]:
    """Collective: the sum of arrays given by indices and values (SparCML, Renggli et al. 2019).

    indices: (k,), whole numbers of 0 to length - 1, in any order, also several times; k may differ by rank.
    values: (k, *row), the same dtype and row on all ranks. Returns the indices that any rank has, int64 and
    sorted, each once, and their sums: of a rank's own in their order, then over the ranks in rank order, each
    with one rounding of 16-bit floats, and never -0.0. The same bits on every rank.

    dense_above: where all ranks' pairs have more than so many times the bytes of an array of `length` rows,
    such an array is reduced instead; over several hosts, that folds host by host. Raises TypeError or
    ValueError here and Mismatch elsewhere, or ValueError on all ranks where their arrays are unlike.
    """
    try:
        _check_pairs(indices, values, length)
    except (TypeError, ValueError):
        comm.refuse("all_gather")
        raise
    own, sums = _each_once(indices, values, length)
    row_nbytes = values.itemsize * math.prod(values.shape[1:])
    form = zlib.crc32(f"{values.shape[1:]} {values.dtype}".encode())
    npairs = _counts_of_all(comm, len(own), length, form).sum()
    sent = np.dtype(np.uint32 if length <= 1 << 32 else np.int64)
    if npairs * (sent.itemsize + row_nbytes) > dense_above * length * row_nbytes:
        return _reduced_whole(comm, own, sums, length)
    theirs = comm.all_gather_v(own.astype(sent), async_op=True)
    return _added_by_rank(values=comm.all_gather_v(sums), indices=theirs.result(), length=length)


def _each_once(indices: Array, values: Array, length: int) -> tuple[Array, Array]:
    """A rank's own: each index once, sorted, with its values added in their order."""
    if (np.diff(indices.astype(np.int64, copy=False)) > 0).all():
        return indices, np.ascontiguousarray(values)
    found, places = _distinct(indices, length)
    sums = np.zeros((len(found), *values.shape[1:]), _wide(values.dtype))
    np.add.at(sums, places, values)
    return found, sums.astype(values.dtype, copy=False)


def _added_by_rank(indices: list[Array], values: list[Array], length: int) -> tuple[NDArray[np.int64], Array]:
    """Of pairs that each rank has once: each index, sorted, with its values added in rank order."""
    found, places = _distinct(np.concatenate(indices), length)
    dtype = values[0].dtype
    sums = np.zeros((len(found), *values[0].shape[1:]), _wide(dtype))
    begin = 0
    for some in values:
        sums[places[begin : begin + len(some)]] += some
        begin += len(some)
    return found.astype(np.int64), sums.astype(dtype, copy=False)


def _distinct(indices: Array, length: int) -> tuple[Array, Array]:
    """The distinct ones, sorted, and where among them each index is; few by sorting, many by marks."""
    if len(indices) * _FEW < length:
        return np.unique(indices, return_inverse=True)
    is_there, number = np.zeros(length, bool), np.empty(length, np.int64)
    is_there[indices] = True
    found = np.flatnonzero(is_there)
    number[found] = np.arange(len(found))
    return found, number[indices]


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In what sums are kept."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _counts_of_all(comm: Comm, count: int, *form: int) -> NDArray[np.int64]:
    """How many pairs each rank has; ValueError on all of them where lengths, rows or dtypes differ."""
    everyones: Array = comm.all_gather(np.array([count, *form], np.int64))
    others = np.flatnonzero((everyones[:, 1:] != everyones[0, 1:]).any(axis=1))
    if len(others):
        raise agreed(ValueError(f"ranks {others.tolist()} gave another length, dtype or row than rank 0"))
    return everyones[:, 0]


def _reduced_whole(comm: Comm, own: Array, sums: Array, length: int) -> tuple[NDArray[np.int64], Array]:
    whole, is_there = np.zeros((length, *sums.shape[1:]), sums.dtype), np.zeros(length, bool)
    whole[own], is_there[own] = sums, True
    bits = np.packbits(is_there)
    comm.all_reduce(whole)
    comm.all_reduce(bits, "bor")
    found = np.flatnonzero(np.unpackbits(bits, count=length))
    return found, whole[found] + sums.dtype.type(0)  # of -0.0 that makes 0.0, as adding pairs does


def _check_pairs(indices: Array, values: Array, length: int) -> None:
    check_arrays([indices, values])
    if operator.index(length) < 0:
        raise ValueError(f"length is {length}; an array has 0 rows or more")
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise TypeError(f"indices is {indices.dtype} of {indices.ndim} dimensions; pass integers in one")
    if values.dtype.kind not in "iufc":
        raise TypeError(f"values is {values.dtype}; pass numbers")
    if values.ndim == 0 or len(values) != len(indices):
        raise ValueError(
            f"values has shape {values.shape}; there are {len(indices)} indices, each with a row"
        )
    if len(indices) and not 0 <= indices.min() <= indices.max() < length:
        raise ValueError(f"indices are {indices.min()} to {indices.max()}; they must be 0 to {length - 1}")
