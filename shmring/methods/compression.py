"""Compressed sums and averages of gradients, with error feedback.

This module has the formats and their feedback. It uses a communicator's public API, and the store of
rounding errors that `Comm.wire` uses.
"""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

import shmring
from shmring.errors import agreed

from .._arguments import integer, refusing
from .._comm.error_feedback import Residuals
from .flat import check_in_place, check_op, parts, views, without_feedback

if TYPE_CHECKING:
    from shmring import Comm, Work

__all__ = ["BF16", "FP16", "Compressor", "ErrorFeedback", "Int8", "PowerSGD", "Reduction", "TopK"]

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
Gradient: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
_Op: TypeAlias = Literal["avg", "sum"]
_Steps: TypeAlias = Generator["Work[Any]", None, None]

_BLOCK = 256  # elements that share a scale, as in wire="int8"
_LARGEST = 127
_IN_CACHE = 1 << 16  # elements of a product that are computed at a time
_SAMPLES = 1 << 13
_OP_AND_COUNT = (1 << 40) - 1  # the bits of these in a word
_PAIR = np.dtype([("index", "u4"), ("value", "f4")])


class Reduction:
    """A compressed all-reduce in the background; `Compressor.all_reduce` returns it with async_op=True.

    Only the first of its collectives starts at once; `wait` starts the others. So `wait` is collective: all
    ranks call it, in the same order for all Reductions on one communicator.
    """

    def __init__(self, comm: Comm, steps: _Steps) -> None:
        self._comm = comm
        self._steps = steps
        self._failure: Exception | None = None
        self._work: Work[Any] | None = None  # the last collective that has started; None at the end
        comm.run_steps(self._resume)

    def wait(self, timeout: float | None = None) -> None:
        """Block until the arrays hold the result. Collective.

        Parameters
        ----------
        timeout : float, optional
            Seconds for each collective.

        Raises
        ------
        TimeoutError
            If a collective takes longer. `wait` may then be called again.
        ValueError
            On all ranks, if they gave different ops or numbers of elements.
        Error
            As `Comm.all_reduce`. After a ValueError or an Error, `wait` raises it again; after another
            exception, such as KeyboardInterrupt, it raises Aborted.
        """
        while self._work is not None:
            self._work.wait(timeout)
            self._comm.run_steps(self._resume, begun=True)

    def _resume(self) -> None:
        """Run up to the next collective. NumPy must not warn: an overflow would warn on one rank only.

        Set `_work` here: a signal handler may raise when `run_steps` returns, and its result would be lost.
        The next `wait` would then resume the steps before the collective has finished.
        """
        if self._failure is not None:  # An earlier `wait` failed, so the steps cannot go on.
            raise copy.copy(self._failure)
        try:
            with np.errstate(all="ignore"):
                self._work = next(self._steps, None)
        except BaseException as error:
            # A copy has no traceback. The error's own would refer to this object, and keep its arrays.
            if isinstance(error, (ValueError, shmring.Error)):
                self._failure = copy.copy(error)
            else:  # The communicator then ends: see `Comm.run_steps`.
                self._failure = shmring.Aborted(f"an earlier wait failed: {type(error).__name__}: {error}")
            raise


class Compressor:
    """The base class of the formats, with `all_reduce` and counts of bytes.

    A Compressor serves any number of arrays, and several calls at once (async_op=True), of one thread. Each
    rank makes its own, with the same arguments.
    """

    def __init__(self) -> None:
        self._traffic = {"given": 0, "sent": 0}
        self._stages = _Stages()

    @property
    def bytes_given(self) -> int:
        """Bytes of the arrays that were reduced."""
        return self._traffic["given"]

    @property
    def bytes_sent(self) -> int:
        """Compressed bytes of this rank's arrays. Collectives may send them more than once."""
        return self._traffic["sent"]

    @property
    def ratio(self) -> float:
        """bytes_given / bytes_sent; NaN before the first call."""
        return self.bytes_given / self.bytes_sent if self.bytes_sent else math.nan

    def all_reduce(
        self, comm: Comm, x: Gradient, op: _Op = "avg", *, async_op: bool = False
    ) -> Reduction | None:
        """Compute the approximate average or sum of x over the ranks in place; return None. Collective.

        All ranks get the same bits.

        Parameters
        ----------
        comm : Comm
            The communicator.
        x : numpy.ndarray
            float32 or float64, contiguous in C order, of any shape, the same on all ranks. The computation is
            in float32.
        op : str
            "avg" or "sum". The default is "avg", as for gradients (`Comm.all_reduce` has "sum").
        async_op : bool
            True: return a `Reduction`. Do not touch x until its `wait` has returned.

        Returns
        -------
        None or Reduction
            A `Reduction` with async_op=True.

        Raises
        ------
        TypeError, ValueError
            For a wrong argument of this rank. The other ranks get `Mismatch`. Different ops or numbers of
            elements raise Mismatch or ValueError on all ranks.
        Error
            As `Comm.all_reduce`.

        Examples
        --------
        >>> from shmring.methods.compression import BF16
        >>> compressor, x = BF16(), np.full(1000, comm.rank, "f4")
        >>> compressor.all_reduce(comm, x)
        >>> float(x[0]), compressor.ratio
        (0.5, 2.0)
        """
        return self.all_reduce_many(comm, [x], op, async_op=async_op)

    def all_reduce_many(
        self, comm: Comm, arrays: Sequence[Gradient], op: _Op = "avg", *, async_op: bool = False
    ) -> Reduction | None:
        """Reduce several arrays in one call, at about the cost of one of their total size. Collective.

        Parameters
        ----------
        comm : Comm
            The communicator.
        arrays : list of numpy.ndarray
            Each as x in `all_reduce`, in the same order on all ranks.
        op, async_op
            As in `all_reduce`.

        Returns
        -------
        None or Reduction
            As `all_reduce`.

        Raises
        ------
        TypeError, ValueError, Error
            As `all_reduce`. Arrays of other sizes, also in another order, raise Mismatch or ValueError on all
            ranks, even if there are as many elements in total.
        """
        with refusing(comm, "all_reduce"):
            arrays = list(arrays)
            _check(arrays, op)
        if async_op:
            return Reduction(comm, self._steps(comm, arrays, op, None))
        comm.run_steps(self._reduce_now, comm, arrays, op)
        return None

    def _reduce_now(self, comm: Comm, arrays: Sequence[Gradient], op: _Op) -> None:
        Reduction(comm, self._steps(comm, arrays, op, None)).wait()

    def _steps(self, comm: Comm, arrays: Sequence[Gradient], op: _Op, losses: list[Floats] | None) -> _Steps:
        """Start one call after another and yield each; the caller resumes after that call has finished.

        losses: the error of each array's last call, which is added, then replaced by the error of this call.
        """
        raise NotImplementedError


class _Vector(Compressor):
    """The base class of formats that treat all arrays as one vector."""

    def _steps(self, comm: Comm, arrays: Sequence[Gradient], op: _Op, losses: list[Floats] | None) -> _Steps:
        sizes = [x.size for x in arrays]
        count = sum(sizes)
        self._traffic["given"] += sum(x.nbytes for x in arrays)
        if count == 0:  # a call nevertheless: ranks that have elements raise Mismatch
            yield comm.all_reduce(np.empty(0, np.float32), op, async_op=True)
            return
        room = self._count_with_padding(count, comm.size)
        with self._stages.borrow(room) as vector, self._stages.borrow(room if losses else 0) as lost:
            vector[count:] = 0
            _join(arrays, losses, vector)
            yield from self._reduce(comm, op, sizes, vector, lost if losses else None)
            _part(vector, arrays)
            if losses:
                _keep(losses, lost)

    def _count_with_padding(self, count: int, size: int) -> int:
        return count

    def _reduce(self, comm: Comm, op: _Op, sizes: list[int], vector: Floats, lost: Floats | None) -> _Steps:
        """Reduce vector over the ranks in place; set lost to what this rank's vector lost in compression.

        sizes: of the arrays in vector. Raise an error on all ranks if they or the op differ between ranks.
        """
        raise NotImplementedError


class _Halves(_Vector):
    """The base class of 16-bit formats. The engine adds in float32.

    The sum is rounded once on one host, between hosts of one rank each, and in calls of up to 16,384
    elements. Otherwise each host also rounds the sum of its ranks: `wire="native"` would send that sum as
    float32, without rounding but with twice the bytes.
    """

    _dtype: str
    _wire: Literal["fp16", "bf16"]
    _exponent: int  # its bits; all are set in an infinity and in a NaN

    def _reduce(self, comm: Comm, op: _Op, sizes: list[int], vector: Floats, lost: Floats | None) -> _Steps:
        count = len(vector)
        with self._stages.borrow(count, np.uint16) as halves:
            self._encode(vector, halves)
            if lost is not None:
                self._decode(halves, lost)
                np.subtract(vector, lost, out=lost)
            self._traffic["sent"] += halves.nbytes
            # Pass a Memory, for which the wire keeps no rounding errors. `without_feedback` cannot make it:
            # NumPy has no bfloat16.
            memory = shmring.Memory(halves.ctypes.data, count, self._dtype, owner=halves)
            yield from _checked(
                comm, sizes, op, lambda: comm.all_reduce(memory, op, wire=self._wire, async_op=True)
            )
            # All ranks have the same bits, so all of them make the second call, or none.
            if comm.size > comm.num_nodes > 1 and self._has_overflow(halves):
                self._encode(vector, halves)
                yield comm.all_reduce(memory, op, wire="native", async_op=True)
            self._decode(halves, vector)

    def _has_overflow(self, halves: NDArray[np.uint16]) -> bool:
        """Return whether a value is infinite or NaN. The sum of one host's ranks may have overflowed."""
        return bool(np.bitwise_and(halves, self._exponent).max() == self._exponent)

    def _encode(self, vector: Floats, halves: NDArray[np.uint16]) -> None:
        raise NotImplementedError

    def _decode(self, halves: NDArray[np.uint16], vector: Floats) -> None:
        raise NotImplementedError


class FP16(_Halves):
    """Half precision: a significand of 11 bits, rounded to nearest even.

    Values and results of 65,520 and above become infinite, those up to 2**-25 (3e-8) become 0.

    On several hosts, some of which have several ranks, a call of more than 16,384 elements also rounds the
    sum of each host's ranks. If a result is then infinite or NaN, all ranks repeat the call without that
    rounding, with twice the bytes between hosts. So an average overflows only if it does on one host.
    """

    _dtype, _wire, _exponent = "float16", "fp16", 0x7C00

    def _encode(self, vector: Floats, halves: NDArray[np.uint16]) -> None:
        np.copyto(halves.view(np.float16), vector, casting="same_kind")

    def _decode(self, halves: NDArray[np.uint16], vector: Floats) -> None:
        np.copyto(vector, halves.view(np.float16))


class BF16(_Halves):
    """bfloat16: float32's range with a significand of 8 bits, rounded to nearest even.

    The sum of each host's ranks is rounded as in `FP16`.
    """

    _dtype, _wire, _exponent = "bfloat16", "bf16", 0x7F80

    def _encode(self, vector: Floats, halves: NDArray[np.uint16]) -> None:
        bits = vector.view(np.uint32)
        with self._stages.borrow(len(vector), np.uint32) as rounded:
            np.right_shift(bits, 16, out=rounded)
            rounded &= 1
            rounded += 0x7FFF
            rounded += bits
            rounded >>= 16
            np.copyto(halves, rounded, casting="same_kind")
        halves[np.isnan(vector)] = 0x7FC0

    def _decode(self, halves: NDArray[np.uint16], vector: Floats) -> None:
        np.left_shift(halves, 16, out=vector.view(np.uint32), dtype=np.uint32)


class Int8(_Vector):
    """Integers from -127 to 127 with a scale for each 256 elements: a quarter of float32's bytes.

    Each rank owns a slice. It adds all ranks' values of the slice in rank order, and rounds the sum again.
    `ErrorFeedback` feeds both rounding errors back. An infinity or a NaN turns all elements of its block of
    256 into NaN.

    Parameters
    ----------
    stochastic : bool
        True: stochastic rounding, up or down at random without bias, as in QSGD (Alistarh et al. 2017).
        False: rounding to nearest even.
    seed : int
        0 or more: seeds the random numbers together with the rank. Ignored without stochastic=True.

    Raises
    ------
    TypeError, ValueError
        For a seed that is no integer, or negative.

    Examples
    --------
    >>> from shmring.methods.compression import Int8
    >>> x = np.full(1000, comm.rank + 1, "f4")
    >>> Int8().all_reduce(comm, x, "sum")
    >>> float(x[0])
    3.0
    """

    def __init__(self, *, stochastic: bool = False, seed: int = 0) -> None:
        super().__init__()
        self._seed = integer("seed", seed, "0") if stochastic else None
        self._random: np.random.Generator | None = None

    def _count_with_padding(self, count: int, size: int) -> int:
        return -(-count // (_BLOCK * size)) * _BLOCK * size

    def _reduce(self, comm: Comm, op: _Op, sizes: list[int], vector: Floats, lost: Floats | None) -> _Steps:
        word = _word_of(sizes, op)
        if self._random is None and self._seed is not None:
            self._random = np.random.default_rng([self._seed, comm.rank])
        length = len(vector) // comm.size  # length of a slice
        width = _packed_nbytes(length)
        borrow = self._stages.borrow
        self._traffic["sent"] += _packed_nbytes(sum(sizes))
        with (
            borrow(comm.size * width, np.uint8) as room,
            borrow(comm.size * width, np.uint8) as arrived_room,
            borrow(len(vector)) as scratch,
        ):
            packed, arrived = room.reshape(comm.size, width), arrived_room.reshape(comm.size, width)
            self._pack(vector, packed, word, scratch)
            if lost is not None:
                _unpack(packed, lost)
                np.subtract(vector, lost, out=lost)
            yield comm.all_to_all(packed, out=arrived, async_op=True)
            _check_words(arrived[:, -8:].view(np.uint64).ravel())
            own, one = vector[:length], scratch[:length]
            own[:] = 0
            for rank in range(comm.size):
                _unpack(arrived[rank : rank + 1], one)
                own += one
            self._pack(own, packed[:1], word, one)
            if lost is not None:
                _unpack(packed[:1], one)
                np.subtract(own, one, out=one)
                lost[comm.rank * length :][:length] += one
            yield comm.all_gather(packed[0], out=arrived, async_op=True)
            _unpack(arrived, vector)
            if op == "avg":
                vector /= comm.size

    def _pack(self, values: Floats, packed: Bytes, word: int, scratch: Floats) -> None:
        """Pack blocks of codes, each followed by its scale; the last 8 bytes of a row hold `word`."""
        codes, scales = _codes_and_scales(packed)
        blocks, scaled = values.reshape(codes.shape), scratch[: len(values)].reshape(codes.shape)
        np.maximum(blocks.max(axis=-1), -blocks.min(axis=-1), out=scales)
        scales /= _LARGEST
        np.divide(blocks, np.where(scales > 0, scales, 1)[..., None], out=scaled)
        if self._random is None:
            np.rint(scaled, out=scaled)
        else:
            scaled += self._random.random(scaled.shape, np.float32)
            np.floor(scaled, out=scaled)
        np.clip(scaled, -_LARGEST, _LARGEST, out=scaled)
        np.copyto(codes, scaled, casting="unsafe")
        scales[~np.isfinite(scales)] = np.nan
        packed[:, -8:].view(np.uint64)[:] = word


def _packed_nbytes(count: int) -> int:
    """Return the bytes of a row: whole blocks with their scales, and the word."""
    return -(-count // _BLOCK) * (_BLOCK + 4) + 8


def _codes_and_scales(packed: Bytes) -> tuple[NDArray[np.int8], Floats]:
    """Return views of the codes, shape (rows, blocks, 256), and of the scales, shape (rows, blocks)."""
    blocks = packed[:, :-8].reshape(len(packed), -1, _BLOCK + 4)
    return blocks[..., :_BLOCK].view(np.int8), blocks[..., _BLOCK:].view(np.float32)[..., 0]


def _unpack(packed: Bytes, values: Floats) -> None:
    codes, scales = _codes_and_scales(packed)
    np.multiply(codes, scales[..., None], out=values.reshape(codes.shape))


class TopK(_Vector):
    """The largest elements and their indices, as in Deep Gradient Compression (Lin et al. 2018).

    Use it with `ErrorFeedback` (Stich et al. 2018); otherwise most elements are never sent. Every rank
    receives every rank's elements, which is ratio * 8 * size bytes for each element of the array; in a
    float32 all-reduce it is about 8.

    Parameters
    ----------
    ratio : float
        Above 0, at most 1: the share of a call's elements that a rank sends, rounded up to a whole number of
        elements. Each takes 8 bytes.

    Raises
    ------
    TypeError, ValueError
        For another ratio.

    Examples
    --------
    >>> from shmring.methods.compression import ErrorFeedback, TopK
    >>> x = np.zeros(1000, "f4")
    >>> x[comm.rank] = 2
    >>> ErrorFeedback(TopK(0.001)).all_reduce(comm, x)
    >>> x[:3].tolist()
    [1.0, 1.0, 0.0]
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio is {ratio}; it must be above 0 and at most 1, as in 0.01")
        self._ratio = float(ratio)  # a number of NumPy would round the product with a large count

    def _reduce(self, comm: Comm, op: _Op, sizes: list[int], vector: Floats, lost: Floats | None) -> _Steps:
        count = len(vector)
        if count > np.iinfo(_PAIR["index"]).max:
            raise ValueError(
                f"{count} elements in a call are too many for 4 bytes of index; reduce them in parts"
            )
        nsent = math.ceil(self._ratio * count)
        with (
            self._stages.borrow(nsent + 1, _PAIR) as pairs,
            self._stages.borrow(comm.size * (nsent + 1), _PAIR) as everyones,
        ):
            with self._stages.borrow(count) as magnitudes:
                chosen = _largest(np.abs(vector, out=magnitudes), nsent)
            pairs["index"][:nsent], pairs["value"][:nsent] = chosen, vector[chosen]
            pairs[nsent:].view(np.uint64)[:] = _word_of(sizes, op)
            if lost is not None:
                np.copyto(lost, vector)
                lost[chosen] = 0
            self._traffic["sent"] += pairs.nbytes
            yield comm.all_gather(pairs.view(np.uint8), out=everyones.view(np.uint8), async_op=True)
            by_rank = everyones.reshape(comm.size, nsent + 1)
            _check_words(np.ascontiguousarray(by_rank[:, nsent]).view(np.uint64))
            vector[:] = 0
            for own in by_rank[:, :nsent]:
                vector[own["index"]] += own["value"]
            if op == "avg":
                vector /= comm.size


def _largest(sizes: Floats, count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` largest sizes, sorted. A NaN counts as larger than all numbers.

    A sample gives a threshold with a margin. If too few elements reach it, all elements are examined.
    """
    sample = np.sort(sizes[:: 1 + len(sizes) // _SAMPLES])
    margin = min(len(sample), 8 + 2 * len(sample) * count // len(sizes))
    least = sample[-margin]
    places = np.flatnonzero(sizes if least == 0 else ~(sizes < least))
    if len(places) < count:
        places = np.arange(len(sizes))
    first = len(places) - count
    return np.sort(places[np.argpartition(sizes[places], first)[first:]])


class PowerSGD(Compressor):
    """A low-rank approximation: two narrow factors of each matrix (Vogels, Karimireddy and Jaggi 2019).

    An array is a matrix of n rows, its first dimension, and m columns, all others. Its factors take
    rank * (n + m) * 4 bytes. An array is sent uncompressed if it has fewer than two dimensions, or if its
    factors are not smaller. A call makes one power iteration, which starts from the last call's factor: pass
    the same arrays each time, and use `ErrorFeedback`. Rank 0 orthogonalises the columns, and products are
    added column by column, so that all ranks get the same bits with any linear algebra libraries.

    Parameters
    ----------
    rank : int
        1 or more: the rank of the approximation, which is the width of the factors.
    seed : int
        0 or more: seeds the first factor.

    Raises
    ------
    TypeError, ValueError
        For numbers that are no integers, or too small.

    Examples
    --------
    >>> from shmring.methods.compression import ErrorFeedback, PowerSGD
    >>> compressor, gradient = ErrorFeedback(PowerSGD(rank=1)), np.full((100, 100), comm.rank, "f4")
    >>> compressor.all_reduce(comm, gradient)
    >>> round(compressor.ratio)
    50
    """

    def __init__(self, rank: int = 2, *, seed: int = 0) -> None:
        super().__init__()
        self._rank, self._seed = integer("rank", rank, "1"), integer("seed", seed, "0")
        self._right_factors = Residuals()  # of the last call; kept as long as the array exists

    def _steps(self, comm: Comm, arrays: Sequence[Gradient], op: _Op, losses: list[Floats] | None) -> _Steps:
        chosen = [number for number, x in enumerate(arrays) if self._pays(x)]
        plain = [x for number, x in enumerate(arrays) if number not in chosen]
        self._traffic["given"] += sum(x.nbytes for x in arrays)
        self._traffic["sent"] += sum(x.nbytes for x in plain)
        uncompressed = comm.all_reduce_many(plain, op, async_op=True) if plain or not chosen else None
        try:
            if chosen:
                kept = None if losses is None else [losses[number] for number in chosen]
                yield from self._factorise(comm, [arrays[number] for number in chosen], op, kept)
        except ValueError:  # the ranks' matrices differ
            if uncompressed is not None:  # it writes to the other arrays
                yield uncompressed
            raise
        if uncompressed is not None:
            yield uncompressed

    def _pays(self, x: Gradient) -> bool:
        return x.ndim > 1 and self._rank * sum(_shape_of(x)) < x.size

    def _factorise(
        self, comm: Comm, arrays: Sequence[Gradient], op: _Op, losses: list[Floats] | None
    ) -> _Steps:
        shapes = [_shape_of(x) for x in arrays]
        nrows, ncolumns = (self._rank * sum(counts) for counts in zip(*shapes, strict=True))
        self._traffic["sent"] += 4 * (nrows + ncolumns)
        borrow = self._stages.borrow
        with (
            borrow(sum(x.size for x in arrays)) as vector,
            borrow(nrows) as all_left,
            borrow(ncolumns) as all_right,
        ):
            _join(arrays, losses, vector)
            matrices = parts(vector, shapes)
            lefts = parts(all_left, [(n, self._rank) for n, _ in shapes])
            rights = parts(all_right, [(self._rank, m) for _, m in shapes])
            firsts = [self._first_factor(x) for x in arrays]
            for matrix, first, left in zip(matrices, firsts, lefts, strict=True):
                np.matmul(matrix, first.T, out=left)
            yield from _checked(
                comm, shapes, op, lambda: comm.reduce(without_feedback(all_left), async_op=True)
            )
            if comm.rank == 0:
                for left in lefts:
                    left[:] = np.linalg.qr(left)[0]
            yield comm.broadcast(all_left, async_op=True)
            for matrix, left, right in zip(matrices, lefts, rights, strict=True):
                np.matmul(left.T, matrix, out=right)
            if losses is not None:
                for matrix, left, right in zip(matrices, lefts, rights, strict=True):
                    matrix -= left @ right
            yield comm.all_reduce(without_feedback(all_right), op, async_op=True)
            if losses is not None:
                _keep(losses, vector)
            for x, first, left, right in zip(arrays, firsts, lefts, rights, strict=True):
                first[:] = right
                _multiply(left, right, x.reshape(len(left), -1))

    def _first_factor(self, x: Gradient) -> Floats:
        """Return the right factor of the last call, or a random one at first; the same on all ranks."""
        n, m = _shape_of(x)
        kept = self._right_factors.of(x, (x.ctypes.data, n, m), self._rank * m)  # x may change its shape
        factor = np.zeros(self._rank * m, np.float32) if kept is None else kept
        if not factor.any() or not np.isfinite(factor).all():
            factor[:] = np.random.default_rng([self._seed, n, m]).standard_normal(len(factor), np.float32)
        return factor.reshape(self._rank, m)


def _shape_of(x: Gradient) -> tuple[int, int]:
    """Return the shape of x as a matrix."""
    return x.shape[0], x.size // max(1, x.shape[0])


def _multiply(left: Floats, right: Floats, product: Gradient) -> None:
    """Compute left @ right in float32 in a fixed order of roundings, the same on every processor."""
    nrows = max(1, _IN_CACHE // right.shape[1])
    term = np.empty((min(nrows, len(left)), right.shape[1]), np.float32)
    for begin in range(0, len(left), nrows):
        rows, some = left[begin : begin + nrows], product[begin : begin + nrows]
        np.multiply(rows[:, :1], right[0], out=some)
        for column in range(1, len(right)):
            np.multiply(rows[:, column : column + 1], right[column], out=term[: len(rows)])
            np.add(some, term[: len(rows)], out=some, dtype=np.float32, casting="same_kind")


class ErrorFeedback(Compressor):
    """Add the compression error of an array to its values in the next call (Karimireddy et al. 2019).

    An array is identified by its memory, and its error is discarded when that memory is freed: keep gradients
    in the same arrays. An array over a bare buffer has no feedback, since Python does not report when the
    buffer is freed. `FP16` and `BF16` also round sums; that error is not fed back.

    Parameters
    ----------
    compressor : Compressor
        The format, such as `TopK(0.01)`. Both objects have the same byte counts.

    Raises
    ------
    TypeError
        For another object, also for another `ErrorFeedback`.

    Examples
    --------
    See `TopK`.
    """

    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        if not isinstance(compressor, Compressor) or isinstance(compressor, ErrorFeedback):
            raise TypeError(f"{compressor!r} is not a format; give one, as in ErrorFeedback(TopK(0.01))")
        self._compressor = compressor
        self._traffic = compressor._traffic
        self._residuals = Residuals()

    def _steps(self, comm: Comm, arrays: Sequence[Gradient], op: _Op, losses: list[Floats] | None) -> _Steps:
        kept = [self._residuals.of(x, (x.ctypes.data, x.dtype.num, x.size), x.size) for x in arrays]
        all_kept = [
            np.zeros(x.size, np.float32) if lost is None else lost
            for x, lost in zip(arrays, kept, strict=True)
        ]
        yield from self._compressor._steps(comm, arrays, op, all_kept)


class _Stages:
    """Buffers for compressed data, each in use by a call or free for the next call.

    The buffers of a failed call are not reused, since a peer may still write to them.
    """

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    @contextlib.contextmanager
    def borrow(self, count: int, dtype: DTypeLike = np.float32) -> Iterator[NDArray[Any]]:
        nbytes = count * np.dtype(dtype).itemsize
        found = [number for number, room in enumerate(self._free) if len(room) >= nbytes]
        smallest = min(found, key=lambda number: len(self._free[number]), default=None)
        room = np.empty(nbytes, np.uint8) if smallest is None else self._free.pop(smallest)
        yield room[:nbytes].view(dtype)
        self._free.append(room)


def _check(arrays: Sequence[Gradient], op: _Op) -> None:
    check_op(op)
    for x in arrays:
        check_in_place(x)
        if x.dtype not in (np.float32, np.float64):
            raise TypeError(f"x is {x.dtype}; only float32 and float64 can be compressed")


def _word_of(shapes: Sequence[int | tuple[int, int]], op: _Op) -> int:
    """Encode the arguments that must be equal on all ranks, to be sent with the data.

    Bit 0 has the op, bits 1 to 39 the number of elements, and bits 40 to 63 a checksum of the shapes.
    """
    count = sum(math.prod(shape) if isinstance(shape, tuple) else shape for shape in shapes)
    return (zlib.crc32(repr(shapes).encode()) << 40 | count << 1 | (op == "avg")) & (1 << 64) - 1


def _check_words(words: NDArray[np.uint64]) -> None:
    """Raise the same ValueError on all ranks unless all words are equal."""
    if (words == words[0]).all():
        return
    given = [word & _OP_AND_COUNT for word in words.tolist()]
    if len(set(given)) == 1:
        raise agreed(ValueError("ranks gave arrays of different sizes; give the same ones in the same order"))
    shown = ", ".join(f"{'avg' if word & 1 else 'sum'} of {word >> 1}" for word in given)
    raise agreed(ValueError(f"ranks gave different ops or numbers of elements: by rank {shown}"))


def _checked(
    comm: Comm, shapes: Sequence[int | tuple[int, int]], op: _Op, start: Callable[[], Work[Any]]
) -> _Steps:
    """Start a collective and yield it. It compares only totals, so compare the shapes of several arrays too.

    Both collectives start before the first wait, so the larger one runs in the background from the start.
    """
    if len(shapes) == 1:
        yield start()
        return
    words = np.empty((comm.size, 1), np.uint64)
    exchange = comm.all_gather(np.array([_word_of(shapes, op)], np.uint64), out=words, async_op=True)
    work = start()
    yield exchange
    yield work
    _check_words(words.ravel())


def _join(arrays: Sequence[Gradient], losses: Sequence[Floats] | None, vector: Floats) -> None:
    """Concatenate the arrays in vector as float32, each with its last error added."""
    for number, (x, part) in enumerate(zip(arrays, views(vector, arrays), strict=True)):
        if losses is None:
            np.copyto(part, x, casting="same_kind")
        else:
            np.add(x, losses[number].reshape(x.shape), out=part, casting="same_kind")


def _part(vector: Floats, arrays: Sequence[NDArray[Any]]) -> None:
    for x, part in zip(arrays, views(vector, arrays), strict=True):
        np.copyto(x, part)


def _keep(losses: Sequence[Floats], lost: Floats) -> None:
    """Keep the errors for the next call, but no infinity or NaN, which would recur in every call."""
    lost[~np.isfinite(lost)] = 0
    _part(lost, losses)
