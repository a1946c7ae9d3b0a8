"""Sums of sparse arrays: only the parts that are nonzero on some rank are sent.

This module uses only a communicator's public API.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmring.errors import agreed

from .._arguments import integer, refusing
from .flat import agree, check_arrays, check_in_place, one_call, without_feedback

if TYPE_CHECKING:
    from shmring import Comm

__all__ = ["SparseAllReduce", "all_reduce_pairs"]

Array = NDArray[Any]

# Above these values it is faster to reduce the whole array, by bench/methods/bench_sparse.py: the share of
# nonzero blocks, on one host and over 1 Gbit/s; the bytes of all ranks' pairs / the bytes of the array.
_BREAK_EVEN, _BREAK_EVEN_ACROSS = 0.1, 0.9
_PAIRS_BREAK_EVEN = 0.5
_LONGEST = np.iinfo(np.int64).max
_FEW = 256  # if length / indices exceeds this, sorting the indices is faster than a pass over marks


class SparseAllReduce:
    """`all_reduce` that skips blocks that are zero on every rank (OmniReduce, Fei et al. 2021).

    Making one is collective, with the same numbers on all ranks. The ranks agree on the blocks by a small
    all_reduce of one bit for each block, then reduce the nonzero blocks together. The result has the bits of
    `Comm.all_reduce`: a block is skipped only if all its bits are zero on all ranks, so a block with a NaN or
    a -0.0 is not. If `Comm.wire` is not "native", the packed blocks are rounded, without error feedback.

    Parameters
    ----------
    comm : Comm
        The communicator.
    block : int
        Elements of a block.
    dense_above : float, optional
        The share of nonzero blocks, 0 to 1, above which the whole array is reduced instead. None: a measured
        value, for one host or for several.

    Raises
    ------
    TypeError, ValueError
        For a wrong number of this rank; the other ranks get `Mismatch`. On all ranks, if a number differs.
    Error
        As `Comm.all_gather`.

    Examples
    --------
    >>> from shmring.methods.sparse import SparseAllReduce
    >>> reduce, x = SparseAllReduce(comm), np.zeros(4 * 256)
    >>> x[0] = comm.rank + 1
    >>> reduce(x)
    >>> float(x[0]), reduce.density
    (3.0, 0.25)
    """

    def __init__(self, comm: Comm, *, block: int = 256, dense_above: float | None = None) -> None:
        with refusing(comm, "all_gather"):
            block = integer("block", block, "1 element")
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
        """The share of blocks nonzero on some rank in the last call; NaN before the first."""
        return self._density

    @one_call
    def __call__(self, x: Array, op: str = "sum") -> None:
        """Combine x of all ranks elementwise and in place on every rank; return None. Collective.

        Parameters
        ----------
        x : numpy.ndarray
            Contiguous in C order and writable, with the same dtype and number of elements on every rank.
        op : str or Op
            As in `Comm.all_reduce`.

        Raises
        ------
        TypeError, ValueError
            For a wrong argument of this rank. The other ranks get `Mismatch`.
        Error
            As `Comm.all_reduce`.
        """
        operation: Any = op
        flat = self._checked(x)
        nblocks = len(flat) // self._block
        whole = flat[: nblocks * self._block].reshape(nblocks, self._block)
        rest = flat[whole.size :]
        # n | m == n and ~n | ~m == ~n hold only for m == n. So if the lengths differ, these bytes change on
        # every rank. All ranks then reduce the whole arrays, which is a Mismatch.
        length = np.array([len(flat), ~len(flat)], np.int64).view(np.uint8)
        bits = np.concatenate([np.packbits(_are_not_zero(whole)), length])
        self._comm.all_reduce(bits, "bor")
        are_alike = (bits[-len(length) :] == length).all()
        chosen = np.flatnonzero(np.unpackbits(bits, count=nblocks))
        self._density = len(chosen) / nblocks if nblocks else 1.0
        if self._density > self._dense_above or not are_alike:
            self._comm.all_reduce(flat, operation)
            return
        packed = self._staged(len(chosen) * self._block + len(rest), flat.dtype)
        blocks = packed[: len(chosen) * self._block].reshape(len(chosen), self._block)
        np.take(whole, chosen, axis=0, out=blocks, mode="clip")  # mode "raise" would make a copy
        packed[blocks.size :] = rest
        self._comm.all_reduce(without_feedback(packed), operation)
        whole[chosen] = blocks
        rest[:] = packed[blocks.size :]

    def _checked(self, x: Array) -> Array:
        """Return x in one dimension, after checking it."""
        with refusing(self._comm, "all_reduce"):
            check_in_place(x)
            if x.dtype.hasobject or x.itemsize == 0:  # their bits cannot be read
                raise TypeError(f"x is {x.dtype}; pass an array of numbers")
        return x.reshape(-1)

    def _staged(self, count: int, dtype: np.dtype[Any]) -> Array:
        nbytes = count * dtype.itemsize
        if nbytes > len(self._stage):
            self._stage = np.empty(nbytes, np.uint8)
        return self._stage[:nbytes].view(dtype)


def _are_not_zero(blocks: Array) -> NDArray[np.bool_]:
    """Return for each row whether any bit is set, as in -0.0 and NaN."""
    words = blocks.view(f"u{math.gcd(blocks.shape[1] * blocks.itemsize, 8)}")
    found: NDArray[np.bool_] = np.bitwise_or.reduce(words, axis=1) != 0
    return found


@one_call
def all_reduce_pairs(
    comm: Comm, indices: Array, values: Array, length: int, *, dense_above: float = _PAIRS_BREAK_EVEN
) -> tuple[NDArray[np.int64], Array]:
    """Return the sum of arrays given by indices and values (SparCML, Renggli et al. 2019). Collective.

    A rank's own values of an index are added in their order, then the ranks' sums in rank order. Both sums of
    float16 are computed in float32 and rounded once. No sum is -0.0. All ranks get the same bits.

    Parameters
    ----------
    comm : Comm
        The communicator.
    indices : numpy.ndarray
        Integers from 0 to length - 1, in any order, with repeats, of shape (k,). k may differ between ranks.
    values : numpy.ndarray
        Integers, floats or complex numbers, of shape (k, *row). The dtype and the row are the same on all
        ranks.
    length : int
        Length of the arrays, the same on all ranks.
    dense_above : float
        If the pairs of all ranks take more than this many times the bytes of an array of `length` rows, such
        an array is reduced instead, unless its rows are empty. Over several hosts, the ranks of a host are
        then folded first. The same on all ranks.

    Returns
    -------
    tuple of numpy.ndarray
        The indices that any rank has, int64, sorted and unique, of shape (n,); and their sums, of shape
        (n, *row) and the dtype of values.

    Raises
    ------
    TypeError, ValueError, OverflowError
        For a wrong argument of this rank; the other ranks get `Mismatch`. On all ranks, if length, dtype or
        row differ.
    Error
        As `Comm.all_gather_v`.

    Examples
    --------
    >>> from shmring.methods.sparse import all_reduce_pairs
    >>> indices, sums = all_reduce_pairs(comm, np.array([7, comm.rank]), np.ones(2), length=100)
    >>> indices.tolist(), sums.tolist()
    ([0, 1, 7], [1.0, 1.0, 2.0])
    """
    with refusing(comm, "all_gather"):
        length, dense_above = integer("length", length), float(dense_above)
        _check_pairs(indices, values, length)
    with np.errstate(all="ignore"):  # an error on one rank would leave the others waiting
        own, sums = _each_once(indices, values, length)
        row_nbytes = values.itemsize * math.prod(values.shape[1:])
        form = zlib.crc32(f"{values.shape[1:]} {values.dtype}".encode())
        npairs = _counts_of_all(comm, len(own), length, form).sum()
        sent = np.dtype(np.uint32 if length <= 1 << 32 else np.int64)
        # Rows without bytes stay sparse: a whole array has none to compare, but takes a mark for each row.
        if row_nbytes and npairs * (sent.itemsize + row_nbytes) > dense_above * length * row_nbytes:
            return _reduced_whole(comm, own, sums, length)
        theirs = comm.all_gather_v(own.astype(sent), async_op=True)
        return _added_by_rank(values=comm.all_gather_v(sums), indices=theirs.result(), length=length)


def _each_once(indices: Array, values: Array, length: int) -> tuple[Array, Array]:
    """Return a rank's unique sorted indices, and for each the sum of its values in their order."""
    if (np.diff(indices.astype(np.int64, copy=False)) > 0).all():
        return indices, np.ascontiguousarray(values)
    found, places = _distinct(indices, length)
    sums = np.zeros((len(found), *values.shape[1:]), _wide(values.dtype))
    np.add.at(sums, places, values)
    return found, sums.astype(values.dtype, copy=False)


def _added_by_rank(indices: list[Array], values: list[Array], length: int) -> tuple[NDArray[np.int64], Array]:
    """Return the unique sorted indices of all ranks, and for each the sum of its values in rank order."""
    found, places = _distinct(np.concatenate(indices), length)
    dtype = values[0].dtype
    sums = np.zeros((len(found), *values[0].shape[1:]), _wide(dtype))
    begin = 0
    for some in values:
        sums[places[begin : begin + len(some)]] += some
        begin += len(some)
    return found.astype(np.int64), sums.astype(dtype, copy=False)


def _distinct(indices: Array, length: int) -> tuple[Array, Array]:
    """Return the distinct indices, sorted, and the position of each index among them."""
    if len(indices) * _FEW < length:
        return np.unique(indices, return_inverse=True)
    is_there, number = np.zeros(length, bool), np.empty(length, np.int64)
    is_there[indices] = True
    found = np.flatnonzero(is_there)
    number[found] = np.arange(len(found))
    return found, number[indices]


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which sums are accumulated."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _counts_of_all(comm: Comm, count: int, *form: int) -> NDArray[np.int64]:
    """Return each rank's number of pairs. Raises ValueError on all if lengths, rows or dtypes differ."""
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
    return found, whole[found] + sums.dtype.type(0)  # turns -0.0 into 0.0, as adding pairs does


def _check_pairs(indices: Array, values: Array, length: int) -> None:
    check_arrays([indices, values])
    if not 0 <= length <= _LONGEST:
        raise ValueError(f"length is {length}; it must be 0 to {_LONGEST} rows")
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise TypeError(f"indices is {indices.dtype}{list(indices.shape)}; pass integers in one dimension")
    if values.dtype.kind not in "iufc":
        raise TypeError(f"values is {values.dtype}; pass numbers")
    if values.ndim == 0 or len(values) != len(indices):
        raise ValueError(
            f"values has shape {values.shape}; give a row for each of the {len(indices)} indices"
        )
    if len(indices) and not 0 <= indices.min() <= indices.max() < length:
        raise ValueError(f"indices are {indices.min()} to {indices.max()}; they must be 0 to {length - 1}")
