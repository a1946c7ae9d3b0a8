"""Sums and averages of gradients that travel shorter than they are, and what that loses sent the next time.

Owns the formats and their feedback; a user of the public API: what it is handed is a communicator.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

import shmring
from shmring.errors import agreed

from .._comm.error_feedback import Residuals
from .flat import check_in_place, check_op, parts, views

if TYPE_CHECKING:
    from shmring import Comm, Work

__all__ = ["BF16", "FP16", "Compressor", "ErrorFeedback", "Int8", "PowerSGD", "Reduction", "TopK"]

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
Gradient: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
_Op: TypeAlias = Literal["avg", "sum"]
_Steps: TypeAlias = Generator["Work[Any]", None, None]

_BLOCK = 256  # elements that have a scale in common, as in wire="int8"
_LARGEST = 127
_IN_CACHE = 1 << 16  # elements that a product is made of at a time
_SAMPLES = 1 << 13
_PAIR = np.dtype([("index", "u4"), ("value", "f4")])


class Reduction:
    """A compressed all-reduce in the background.

    Its first message is on its way; what comes after that goes when it is waited for. So `wait` is
    collective: all ranks wait for theirs, those on one communicator in one order.
    """

    def __init__(self, comm: Comm, steps: _Steps) -> None:
        self._comm = comm
        self._steps = steps
        self._work = comm.run_steps(self._resumed)

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the arrays hold the result; TimeoutError when a step takes longer."""
        while self._work is not None:
            self._work.wait(timeout)
            self._work = self._comm.run_steps(self._resumed, begun=True)

    def _resumed(self) -> Work[Any] | None:
        """Up to the next message. An overflow is for the caller to see: no warning on one rank alone."""
        with np.errstate(all="ignore"):
            return next(self._steps, None)


class Compressor:
    """What the formats have in common: `all_reduce`, and counts of bytes.

    One serves any number of arrays and calls under way, on one rank; all ranks have theirs, made alike.
    """

    def __init__(self) -> None:
        self._traffic = {"given": 0, "sent": 0}
        self._stages = _Stages()

    @property
    def bytes_given(self) -> int:
        """Of the arrays that were reduced."""
        return self._traffic["given"]

    @property
    def bytes_sent(self) -> int:
        """Of this rank's arrays as they travelled, once; what collectives make of it depends on the ranks."""
        return self._traffic["sent"]

    @property
    def ratio(self) -> float:
        """How many times shorter arrays travelled than they are; NaN before the first."""
        return self.bytes_given / self.bytes_sent if self.bytes_sent else math.nan

    def all_reduce(
        self, comm: Comm, x: Gradient, op: _Op = "avg", *, async_op: bool = False
    ) -> Reduction | None:
        """Collective: about the average or sum of x over the ranks, in place, the same bits on all.

        x: float32 or float64, C-contiguous, of any shape, the same on all ranks; it is worked on in float32.
        op: "avg" unless given, where `Comm.all_reduce` has "sum": this is for gradients.
        async_op: returns a `Reduction` to be waited for; leave x alone until then. Raises TypeError or
        ValueError here and Mismatch elsewhere, or what collectives raise.
        """
        return self.all_reduce_many(comm, [x], op, async_op=async_op)

    def all_reduce_many(
        self, comm: Comm, arrays: Sequence[Gradient], op: _Op = "avg", *, async_op: bool = False
    ) -> Reduction | None:
        """Collective: the same with several arrays together, for about the price of one of their length."""
        arrays = list(arrays)
        try:
            _check(arrays, op)
        except (TypeError, ValueError):
            comm.refuse("all_reduce")
            raise
        if async_op:
            return Reduction(comm, self._steps(comm, arrays, op, None))
        comm.run_steps(self._reduce_now, comm, arrays, op)
        return None

    def _reduce_now(self, comm: Comm, arrays: Sequence[Gradient], op: _Op) -> None:
        Reduction(comm, self._steps(comm, arrays, op, None)).wait()

    def _steps(self, comm: Comm, arrays: Sequence[Gradient], op: _Op, losses: list[Floats] | None) -> _Steps:
        """Begins call after call and yields each, to be continued when that is finished.

        losses: of each array what it lost before, to be added, and set to what is lost now.
        """
        raise NotImplementedError


class _Vector(Compressor):
    """Formats that take all arrays for one vector."""

    def _steps(self, comm: Comm, arrays: Sequence[Gradient], op: _Op, losses: list[Floats] | None) -> _Steps:
        count = sum(x.size for x in arrays)
        self._traffic["given"] += sum(x.nbytes for x in arrays)
        if count == 0:  # a call all the same: ranks that have elements are told
            yield comm.all_reduce(np.empty(0, np.float32), op, async_op=True)
            return
        room = self._count_with_padding(count, comm.size)
        with self._stages.borrow(room) as vector, self._stages.borrow(room if losses else 0) as lost:
            vector[count:] = 0
            _join(arrays, losses, vector)
            yield from self._reduce(comm, op, count, vector, lost if losses else None)
            _part(vector, arrays)
            if losses:
                _keep(losses, lost)

    def _count_with_padding(self, count: int, size: int) -> int:
        return count

    def _reduce(self, comm: Comm, op: _Op, count: int, vector: Floats, lost: Floats | None) -> _Steps:
        """vector becomes the sum or average over the ranks, lost what this rank has not sent of its own."""
        raise NotImplementedError


class _Halves(_Vector):
    """Added by shmring itself, in float32 and rounded once; two bytes between hosts as well."""

    _dtype: str
    _wire: Literal["fp16", "bf16"]

    def _reduce(self, comm: Comm, op: _Op, count: int, vector: Floats, lost: Floats | None) -> _Steps:
        with self._stages.borrow(count, np.uint16) as halves:
            self._encode(vector, halves)
            if lost is not None:
                self._decode(halves, lost)
                np.subtract(vector, lost, out=lost)
            self._traffic["sent"] += halves.nbytes
            # A Memory, which has no feedback of the wire's own: the stage is another array's the next time.
            memory = shmring.Memory(halves.ctypes.data, count, self._dtype, owner=halves)
            yield comm.all_reduce(memory, op, wire=self._wire, async_op=True)
            self._decode(halves, vector)

    def _encode(self, vector: Floats, halves: NDArray[np.uint16]) -> None:
        raise NotImplementedError

    def _decode(self, halves: NDArray[np.uint16], vector: Floats) -> None:
        raise NotImplementedError


class FP16(_Halves):
    """Half precision: 11 bits of mantissa; sums beyond 65,504 are infinite, below 6e-8 nothing."""

    _dtype, _wire = "float16", "fp16"

    def _encode(self, vector: Floats, halves: NDArray[np.uint16]) -> None:
        np.copyto(halves.view(np.float16), vector, casting="same_kind")

    def _decode(self, halves: NDArray[np.uint16], vector: Floats) -> None:
        np.copyto(vector, halves.view(np.float16))


class BF16(_Halves):
    """bfloat16: float32's range with 8 bits of mantissa, rounded to nearest even."""

    _dtype, _wire = "bfloat16", "bf16"

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
    """Whole numbers of -127 to 127 times a scale for each 256 elements, a quarter of float32's bytes.

    Each rank adds the slice that it owns, in rank order, and rounds it once more; both losses are fed back.
    stochastic: rounded up or down by chance, right on average (QSGD, Alistarh et al. 2017); else to nearest.
    seed: of that chance, with the rank. An infinity or a NaN makes NaNs of all 256 elements.
    """

    def __init__(self, *, stochastic: bool = False, seed: int = 0) -> None:
        super().__init__()
        self._seed = seed if stochastic else None
        self._random: np.random.Generator | None = None

    def _count_with_padding(self, count: int, size: int) -> int:
        return -(-count // (_BLOCK * size)) * _BLOCK * size

    def _reduce(self, comm: Comm, op: _Op, count: int, vector: Floats, lost: Floats | None) -> _Steps:
        if self._random is None and self._seed is not None:
            self._random = np.random.default_rng([self._seed, comm.rank])
        length = len(vector) // comm.size  # of a slice
        width = _packed_nbytes(length)
        borrow = self._stages.borrow
        self._traffic["sent"] += _packed_nbytes(count)
        with (
            borrow(comm.size * width, np.uint8) as room,
            borrow(comm.size * width, np.uint8) as arrived_room,
            borrow(len(vector)) as scratch,
        ):
            packed, arrived = room.reshape(comm.size, width), arrived_room.reshape(comm.size, width)
            self._pack(vector, packed, _word_of(count, op), scratch)
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
            self._pack(own, packed[:1], _word_of(count, op), one)
            if lost is not None:
                _unpack(packed[:1], one)
                np.subtract(own, one, out=one)
                lost[comm.rank * length :][:length] += one
            yield comm.all_gather(packed[0], out=arrived, async_op=True)
            _unpack(arrived, vector)
            if op == "avg":
                vector /= comm.size

    def _pack(self, values: Floats, packed: Bytes, word: int, scratch: Floats) -> None:
        """Codes, behind each block of them a scale, and at the end of a row what is reduced, and how."""
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
    """Of elements in whole blocks, with what is at the end."""
    return -(-count // _BLOCK) * (_BLOCK + 4) + 8


def _codes_and_scales(packed: Bytes) -> tuple[NDArray[np.int8], Floats]:
    """Views of rows, (rows, blocks, 256) and (rows, blocks)."""
    blocks = packed[:, :-8].reshape(len(packed), -1, _BLOCK + 4)
    return blocks[..., :_BLOCK].view(np.int8), blocks[..., _BLOCK:].view(np.float32)[..., 0]


def _unpack(packed: Bytes, values: Floats) -> None:
    codes, scales = _codes_and_scales(packed)
    np.multiply(codes, scales[..., None], out=values.reshape(codes.shape))


class TopK(_Vector):
    """The largest elements and their places, as in Deep Gradient Compression (Lin et al. 2018).

    ratio: of the elements of a call, 0 to 1, those that are sent, 8 bytes each and at least one; use it with
    `ErrorFeedback` (Stich et al. 2018), or most elements are never heard of. Every rank gets every rank's
    elements, so it takes ratio * 8 * size bytes where a float32 takes about 8.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio is {ratio}; it must be above 0 and at most 1, as in 0.01")
        self._ratio = ratio

    def _reduce(self, comm: Comm, op: _Op, count: int, vector: Floats, lost: Floats | None) -> _Steps:
        if count > np.iinfo(_PAIR["index"]).max:
            raise ValueError(
                f"{count} elements in a call are too many for 4 bytes of index; reduce them in parts"
            )
        nsent = math.ceil(self._ratio * count)
        with (
            self._stages.borrow(nsent + 1, _PAIR) as pairs,
            self._stages.borrow(comm.size * (nsent + 1), _PAIR) as everyones,
        ):
            with self._stages.borrow(count) as sizes:
                chosen = _largest(np.abs(vector, out=sizes), nsent)
            pairs["index"][:nsent], pairs["value"][:nsent] = chosen, vector[chosen]
            pairs[nsent:].view(np.uint64)[:] = _word_of(count, op)
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
    """The places of so many; a NaN is larger than all numbers.

    A sample says above what size to look, with a margin: if there are too few after all, everywhere.
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
    """Each matrix as a product of two narrow ones, which are what travels (Vogels, Karimireddy, Jaggi 2019).

    rank: how narrow. An array of n rows (its first dimension) and m columns (the others) takes
    rank * (n + m) * 4 bytes; one with fewer than two dimensions, or of no more bytes than that, goes as it
    is. One power iteration a call, which begins with the last call's: so give the same arrays each time, and
    use `ErrorFeedback`. seed: of the first. Rank 0 makes the columns orthogonal and products are added column
    by column, so that no library for linear algebra has a say in whether ranks agree.
    """

    def __init__(self, rank: int = 2, *, seed: int = 0) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank is {rank}; it must be 1 or more")
        self._rank, self._seed = rank, seed
        self._right_factors = Residuals()  # of the last call, for as long as there is the array

    def _steps(self, comm: Comm, arrays: Sequence[Gradient], op: _Op, losses: list[Floats] | None) -> _Steps:
        chosen = [number for number, x in enumerate(arrays) if self._pays(x)]
        plain = [x for number, x in enumerate(arrays) if number not in chosen]
        self._traffic["given"] += sum(x.nbytes for x in arrays)
        self._traffic["sent"] += sum(x.nbytes for x in plain)
        going_as_it_is = comm.all_reduce_many(plain, op, async_op=True) if plain or not chosen else None
        if chosen:
            kept = None if losses is None else [losses[number] for number in chosen]
            yield from self._factorise(comm, [arrays[number] for number in chosen], op, kept)
        if going_as_it_is is not None:
            yield going_as_it_is

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
            yield comm.reduce(all_left, async_op=True)
            if comm.rank == 0:
                for left in lefts:
                    left[:] = np.linalg.qr(left)[0]
            yield comm.broadcast(all_left, async_op=True)
            for matrix, left, right in zip(matrices, lefts, rights, strict=True):
                np.matmul(left.T, matrix, out=right)
            if losses is not None:
                for matrix, left, right in zip(matrices, lefts, rights, strict=True):
                    matrix -= left @ right
                _keep(losses, vector)
            yield comm.all_reduce(all_right, op, async_op=True)
            for x, first, left, right in zip(arrays, firsts, lefts, rights, strict=True):
                first[:] = right
                _multiply(left, right, x.reshape(len(left), -1))

    def _first_factor(self, x: Gradient) -> Floats:
        """By columns, what the last call came to; the same on all ranks, by chance where there is none."""
        n, m = _shape_of(x)
        kept = self._right_factors.of(x, _place_of(x), self._rank * m)
        factor = np.zeros(self._rank * m, np.float32) if kept is None else kept
        if not factor.any() or not np.isfinite(factor).all():
            factor[:] = np.random.default_rng([self._seed, n, m]).standard_normal(len(factor), np.float32)
        return factor.reshape(self._rank, m)


def _shape_of(x: Gradient) -> tuple[int, int]:
    """As a matrix."""
    return x.shape[0], x.size // max(1, x.shape[0])


def _multiply(left: Floats, right: Floats, product: Gradient) -> None:
    """left @ right, in float32 with one rounding after another, whatever processor and product it is."""
    nrows = max(1, _IN_CACHE // right.shape[1])
    term = np.empty((min(nrows, len(left)), right.shape[1]), np.float32)
    for begin in range(0, len(left), nrows):
        rows, some = left[begin : begin + nrows], product[begin : begin + nrows]
        np.multiply(rows[:, :1], right[0], out=some)
        for column in range(1, len(right)):
            np.multiply(rows[:, column : column + 1], right[column], out=term[: len(rows)])
            np.add(some, term[: len(rows)], out=some, dtype=np.float32, casting="same_kind")


class ErrorFeedback(Compressor):
    """What is lost of an array is added to what that holds the next time (Karimireddy et al. 2019).

    An array is known by its memory, and what it lost is forgotten with that: keep gradients in the same
    arrays. Those whose end Python does not show (over a bare buffer) have no feedback. The counts are the
    compressor's. What the sum of halves is rounded by, on all ranks alike, is not fed back.
    """

    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        if not isinstance(compressor, Compressor) or isinstance(compressor, ErrorFeedback):
            raise TypeError(f"{compressor!r} is no format; give one, as in ErrorFeedback(TopK(0.01))")
        self._compressor = compressor
        self._traffic = compressor._traffic
        self._residuals = Residuals()

    def _steps(self, comm: Comm, arrays: Sequence[Gradient], op: _Op, losses: list[Floats] | None) -> _Steps:
        kept = [self._residuals.of(x, _place_of(x), x.size) for x in arrays]
        all_kept = [
            np.zeros(x.size, np.float32) if lost is None else lost
            for x, lost in zip(arrays, kept, strict=True)
        ]
        yield from self._compressor._steps(comm, arrays, op, all_kept)


class _Stages:
    """Memory for what travels: in use by a call, or waiting for the next one.

    What a failed call had is not used again: it may still be written to.
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
            raise TypeError(f"x is {x.dtype}; compressed are arrays of float32 and float64")


def _word_of(count: int, op: _Op) -> int:
    """What ranks have to give alike, as it travels."""
    return count << 1 | (op == "avg")


def _check_words(words: NDArray[np.uint64]) -> None:
    """The same on all ranks, who raise alike."""
    if (words != words[0]).any():
        told = ", ".join(f"{'avg' if word & 1 else 'sum'} of {word >> 1}" for word in words.tolist())
        raise agreed(ValueError(f"ranks gave other ops, or other numbers of elements: by rank {told}"))


def _join(arrays: Sequence[Gradient], losses: Sequence[Floats] | None, vector: Floats) -> None:
    """The arrays one behind the other in float32, each with what it lost before."""
    for number, (x, part) in enumerate(zip(arrays, views(vector, arrays), strict=True)):
        if losses is None:
            np.copyto(part, x, casting="same_kind")
        else:
            np.add(x, losses[number].reshape(x.shape), out=part, casting="same_kind")


def _part(vector: Floats, arrays: Sequence[NDArray[Any]]) -> None:
    for x, part in zip(arrays, views(vector, arrays), strict=True):
        np.copyto(x, part)


def _keep(losses: Sequence[Floats], lost: Floats) -> None:
    """Until the next call; an overflow is not to come back with every one."""
    lost[~np.isfinite(lost)] = 0
    _part(lost, losses)


def _place_of(x: Gradient) -> tuple[int, int, int]:
    return x.ctypes.data, x.dtype.num, x.size
