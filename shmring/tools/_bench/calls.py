"""The collectives that `shmring bench` times: their arrays, the timed statement, NumPy's result.

A size is that of a call's larger array: the result of a gather, the input of a scatter. This file uses only
the public API.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

import shmring

Array = np.ndarray[Any, Any]

PING_PONG, MANY = "ping_pong", "all_reduce_many"
FUSED_ARRAYS = 16  # of all_reduce_many; their sizes sum to the given size
OPS = tuple(op.value for op in shmring.Op)
NUMPY_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
OTHER_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # of ml_dtypes


@dataclass(frozen=True)
class Form:
    """The properties of a call. busbw: bus bandwidth / algorithm bandwidth, for n ranks."""

    busbw: Callable[[int], float]
    x_is_part: bool = False  # x is one rank's part of y
    y_is_part: bool = False  # y is one rank's part of x
    reduces: bool = False
    rooted: bool = False
    in_place: bool = False  # can be in place
    plans: bool = True


def _once(_: int) -> float:
    return 1.0


def _others_part(n: int) -> float:
    return (n - 1) / n


def _there_and_back(n: int) -> float:
    return 2 * (n - 1) / n


# Factors are those of nccl-tests, doc/PERFORMANCE.md, with (n-1)/n for scatter and gather. nccl-tests has no
# scan; as in a reduce, one rank receives all of the array. A ping-pong's two messages give 2 S / t.
FORMS = {
    "all_reduce": Form(_there_and_back, reduces=True, in_place=True),
    "broadcast": Form(_once, rooted=True, in_place=True),
    "reduce": Form(_once, reduces=True, rooted=True, in_place=True),
    "scan": Form(_once, reduces=True, in_place=True),
    "exscan": Form(_once, reduces=True, in_place=True),
    "all_gather": Form(_others_part, x_is_part=True),
    "gather": Form(_others_part, x_is_part=True, rooted=True),
    "scatter": Form(_others_part, y_is_part=True, rooted=True),
    "reduce_scatter": Form(_others_part, y_is_part=True, reduces=True),
    "all_to_all": Form(_others_part),
    "barrier": Form(_once),
    PING_PONG: Form(lambda _: 2.0, plans=False),
    MANY: Form(_there_and_back, reduces=True, in_place=True, plans=False),
}


@dataclass(frozen=True)
class Job:
    """The options of a measurement: picklable, the same on all ranks."""

    call: str
    sizes: tuple[int, ...]
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    algorithm: str | None = None
    async_op: bool = False
    plan: bool = False
    zero_copy: bool = False
    in_place: bool = False
    written: bool = False
    check: bool = True
    seconds: float = 0.3  # time for the calls of each size
    samples: int | None = None  # number of samples, in place of `seconds`

    @property
    def form(self) -> Form:
        return FORMS[self.call]

    @property
    def what(self) -> str:
        """Return a description such as all_reduce(float32, sum)."""
        form = self.form
        words = [] if self.call == "barrier" else [self.dtype]
        words += [self.op] * form.reduces + [f"root {self.root}"] * form.rooted
        words += [f"algorithm {self.algorithm}"] if self.algorithm else []
        ways = {
            "in the background": self.async_op,
            "by a plan": self.plan,
            "zero-copy arrays": self.zero_copy,
            "in place": self.in_place,
            "input written before each call": self.written,
        }
        return f"{self.call}({', '.join(words + [way for way, taken in ways.items() if taken])})"


def dtype_named(name: str) -> np.dtype[Any]:
    """Return a dtype of NumPy or ml_dtypes. Raises ModuleNotFoundError if ml_dtypes is missing."""
    if name in NUMPY_DTYPES:
        return np.dtype(name)
    found: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    return found


def count_of(job: Job, nbytes: int, nranks: int) -> int:
    """Return the items of the larger array: a multiple of nranks if each rank has an equal part."""
    count = nbytes // dtype_named(job.dtype).itemsize
    parted = job.form.x_is_part or job.form.y_is_part or job.call == "all_to_all"
    return max(1, count // nranks) * nranks if parted else count


# ---- inputs and expected results -------------------------------------------------------------------------

# The items repeat with a prime period, so a shift by a chunk is noticed. Each rank has the same items,
# shifted by its rank. The items are small, so results are exact in every dtype and in any order of folding.
_BLOCK = np.array([(31 * i * i + 17 * i) % 1009 % 4 for i in range(1009)])
_SHIFT = 331
_PIECE = 1 << 20  # items compared at once

_LOGICAL = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}
_UFUNCS = {
    "sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


def block_of(rank: int, dtype: np.dtype[Any], op: str) -> Array:
    """Return the block that a rank's x repeats. Factors of a product are 1 and -1, which cannot overflow."""
    values = np.roll(_BLOCK, _SHIFT * rank)
    if op == "prod":
        values = 1 - 2 * (values % 2)
    return (values * (1 + 1j) if dtype.kind == "c" else values).astype(dtype)


def fill(x: Array, block: Array) -> None:
    """Fill x with repetitions of the block."""
    whole = len(x) - len(x) % len(block)
    x[:whole].reshape(-1, len(block))[:] = block
    x[whole:] = block[: len(x) - whole]


def _is_small_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind not in "biuc" and dtype.itemsize < 4


def fold(op: str, blocks: Sequence[Array]) -> Array:
    """Fold the blocks with NumPy in rank order; 8- and 16-bit floats in float32, rounded once."""
    dtype = blocks[0].dtype
    if op in _LOGICAL:
        return np.asarray(reduce(_LOGICAL[op], [block.astype(bool) for block in blocks]).astype(dtype))
    if _is_small_float(dtype):
        blocks = [block.astype(np.float32) for block in blocks]
    total = reduce(_UFUNCS[op], blocks)
    if op == "avg":
        parts = total.real.dtype  # NumPy's division of complex numbers rounds twice
        total = (total.view(parts) / parts.type(len(blocks))).view(total.dtype)
    return np.asarray(total.astype(dtype))


def differing(y: Array, block: Array, rounding: float = 0.0) -> int:
    """Count items of y that differ from the repeated block. rounding: the relative error that is allowed."""
    piece = _PIECE - _PIECE % len(block)
    return sum(_unlike(y[at : at + piece], block, rounding) for at in range(0, len(y), piece))


def _unlike(y: Array, block: Array, rounding: float) -> int:
    want = np.resize(block, len(y))
    unlike = y != want
    if unlike.any():
        unlike &= ~((y != y) & (want != want))  # all NaNs are equal
        if rounding:
            wide, right = y.astype(np.float64), want.astype(np.float64)
            unlike &= ~(abs(wide - right) <= rounding * abs(right))
    return int(np.count_nonzero(unlike))


# ---- the call --------------------------------------------------------------------------------------------


class Turn:
    """A call at one size on one rank: arrays, timed statement, check. Making a Turn is collective."""

    def __init__(self, comm: shmring.Comm, job: Job, count: int) -> None:
        self._comm, self._job, self._dtype = comm, job, dtype_named(job.dtype)
        form, part = job.form, count // comm.size
        make = comm.empty if job.zero_copy else np.empty
        self.x: Array = make(part if form.x_is_part else count, self._dtype)
        in_place = job.in_place or job.call == "barrier"
        self.y: Array = self.x if in_place else make(part if form.y_is_part else count, self._dtype)
        self.statement, self.names = self._call()
        self.names["write"] = self.x.fill
        self.refill()

    def refill(self) -> None:
        """Restore the input and clear the result."""
        self.y.view(np.uint8).fill(0)
        fill(self.x, block_of(self._comm.rank, self._dtype, self._job.op))

    def call(self) -> None:
        """Make the call once, untimed."""
        exec(self.statement, self.names)

    def wrong(self) -> int:
        """Make the call once more and count the items of this rank's result that differ from NumPy's."""
        self.refill()
        self.call()
        parts = self._results()
        length = len(self.y) // max(1, len(parts))
        pieces = (self.y[at * length : (at + 1) * length] for at in range(len(parts)))
        return sum(differing(y, block, self._rounding()) for y, block in zip(pieces, parts, strict=True))

    def _call(self) -> tuple[str, dict[str, Any]]:
        """Return the statement and its names. Names are plain: attribute lookups would be timed as well."""
        comm, job, form = self._comm, self._job, self._job.form
        if job.call == PING_PONG:
            return self._ping_pong()
        arguments, keywords = self._arguments()
        keywords |= {"op": job.op} if job.op != "sum" else {}
        keywords |= {"root": job.root} if form.rooted and job.root else {}
        keywords |= {"algorithm": job.algorithm} if job.algorithm else {}
        keywords |= {"async_op": True} if job.async_op else {}
        wait = ".wait()" if job.async_op else ""
        if job.plan:
            kind: Any = job.call
            return f"call(){wait}", {"call": comm.plan(kind, *arguments, **keywords)}
        names = {"call": getattr(comm, job.call), "x": arguments[0] if arguments else None} | keywords
        passed = ["x"] * len(arguments) + [f"{name}={name}" for name in keywords]
        return f"call({', '.join(passed)}){wait}", names

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the call's positional and keyword arguments: x and out."""
        job, is_root = self._job, self._comm.rank == self._job.root
        if job.call == "barrier":
            return [], {}
        x = None if job.call == "scatter" and not is_root else self.x
        out = None if job.call in ("gather", "reduce") and not is_root else self.y
        if job.call == MANY:
            arrays = [np.array_split(array, min(FUSED_ARRAYS, len(array))) for array in (self.x, self.y)]
            return [arrays[0]], {} if job.in_place else {"out": arrays[1]}
        return [x], {} if job.in_place or out is None else {"out": out}

    def _ping_pong(self) -> tuple[str, dict[str, Any]]:
        comm, a = self._comm, self._job.async_op
        names = {"x": self.x, "y": self.y, "peer": 1 - comm.rank}
        names |= {"send": comm.isend if a else comm.send, "recv": comm.irecv if a else comm.recv}
        halves = [f"send(x, peer){'.wait()' * a}", f"recv(y, peer){'.wait()' * a}"]
        if comm.rank > 1:
            return "pass", names
        return "; ".join(halves if comm.rank == 0 else reversed(halves)), names

    def _rounding(self) -> float:
        """Return the relative error to allow: size * eps if an algorithm rounds at each hop, else 0."""
        if self._job.algorithm in (None, "auto", "direct", "master") or not _is_small_float(self._dtype):
            return 0.0
        names = importlib.import_module("ml_dtypes" if self._job.dtype in OTHER_DTYPES else "numpy")
        return self._comm.size * float(names.finfo(self._dtype).eps)

    def _results(self) -> list[Array]:
        """Return the expected block of each part of y; empty if the call leaves nothing to check."""
        comm, job = self._comm, self._job
        everybody = range(comm.size)
        own = comm.rank * (len(self.y) if job.form.y_is_part else len(self.x) // comm.size)
        if job.call == "barrier" or (job.call in ("reduce", "gather") and comm.rank != job.root):
            return []
        if job.call in ("all_gather", "gather"):
            return [self._given(rank) for rank in everybody]
        if job.call == "all_to_all":
            return [self._given(rank, own) for rank in everybody]
        if job.call in ("broadcast", "scatter"):
            return [self._given(job.root, own if job.call == "scatter" else 0)]
        if job.call == PING_PONG:
            return [self._given(1 - comm.rank)] if comm.rank < 2 else []
        givers = {"scan": range(comm.rank + 1), "exscan": range(comm.rank)}.get(job.call, everybody)
        if not givers:
            return []  # rank 0's exscan
        folded = fold(job.op, [self._given(rank) for rank in givers])
        return [np.roll(folded, -own) if job.form.y_is_part else folded]

    def _given(self, rank: int, first: int = 0) -> Array:
        """Return the block that a rank's x repeats, from item `first` on."""
        return np.roll(block_of(rank, self._dtype, self._job.op), -first)
