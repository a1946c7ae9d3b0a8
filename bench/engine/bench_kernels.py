"""The reduction loops of one core against plain copying:
python bench/engine/bench_kernels.py [--dtype … --isa …]

A fold of nsrc sources into ndst destinations reads and writes nsrc + ndst arrays. The limit is the time that
a copy takes to read and write as many bytes. A fold and the copies run in turn in one process. With --casts,
so do a cast or wire format and a copy of the float32 that it reads or writes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from shmring._core import kernels

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size

SAMPLE_S = 0.002
LINE_NBYTES = 64
SIZES = [16 << 10, 256 << 10, 4 << 20, 64 << 20]
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
SMALL_COUNTS = (1, 2, 3, 4, 7, 8, 12, 15, 16)


@dataclass(frozen=True)
class Shape:
    """The numbers of sources and destinations of a fold, and the kind of stores."""

    isa: str
    dtype: str
    op: str
    nsrc: int
    ndst: int
    streamed: bool

    def __str__(self) -> str:
        stores = "streaming" if self.streamed else "ordinary"
        return f"{self.isa:7} {self.dtype:13} {self.op:5} {self.nsrc:3}→{self.ndst} {stores:9}"


def arrays_apart(number: int, nbytes: int) -> list[np.ndarray]:
    """Return arrays of ones (as bytes) that begin at different offsets in their pages."""
    stride = nbytes + 4 * LINE_NBYTES
    pool = np.ones(number * stride + LINE_NBYTES, np.uint8)
    first = -pool.ctypes.data % LINE_NBYTES
    return [pool[first + i * stride :][:nbytes] for i in range(number)]


def fold(shape: Shape, arrays: list[np.ndarray]) -> Callable[[int], float]:
    srcs = arrays[: shape.nsrc]
    dsts = arrays[shape.nsrc : shape.nsrc + shape.ndst]
    stream = (1 << shape.ndst) - 1 if shape.streamed else 0
    return partial(kernels.fold, shape.dtype, shape.op, srcs, dsts, shape.isa, shape.nsrc, stream)


def copies(shape: Shape, arrays: list[np.ndarray], streamed: bool) -> Callable[[int], float]:
    """Return a copy that reads and writes as many bytes as the fold: it copies half of the arrays to the
    other half."""
    number = shape.nsrc + shape.ndst
    srcs, dsts = arrays[0 : number - 1 : 2], arrays[1:number:2]
    if number % 2:
        half = len(arrays[0]) // 2
        srcs.append(arrays[number - 1][:half])
        dsts.append(arrays[number - 1][half : 2 * half])
    return partial(kernels.copy, dsts, srcs, shape.isa if streamed else "memcpy", int(streamed))


def loops_for(run: Callable[[int], float]) -> int:
    """Return the number of calls in a sample."""
    loops = 1
    while (seconds := run(loops)) < SAMPLE_S / 8:
        loops *= 4
    return max(1, round(loops * SAMPLE_S / seconds))


def sample(run: Callable[[int], float], loops: int) -> float:
    """Return the seconds of one call. The arrays are where such calls leave them: streaming stores evict
    them."""
    run(1)
    return run(loops) / loops


def medians(contestants: list[Callable[[int], float]], rounds: int) -> list[float]:
    """Return the median seconds of one call of each contestant; all run in turn in every round."""
    loops = [loops_for(run) for run in contestants]
    samples = [[sample(run, n) for run, n in zip(contestants, loops, strict=True)] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def print_sizes(shapes: list[Shape], sizes: list[int], rounds: int) -> None:
    """Print one line for each shape and size: ns, GB/s read and written, and the ratio to both ways of
    copying."""
    print(f"{'bytes':>10} {'shape':45} {'ns':>12} {'GB/s':>7} {'/ memcpy':>9} {'/ streamed copy':>16}")
    for nbytes in sizes:
        arrays = arrays_apart(max(s.nsrc + s.ndst for s in shapes), nbytes)
        for shape in shapes:
            contestants = [fold(shape, arrays), copies(shape, arrays, False), copies(shape, arrays, True)]
            time_s, memcpy_s, streamed_s = medians(contestants, rounds)
            rate = (shape.nsrc + shape.ndst) * nbytes / time_s / 1e9
            print(f"{nbytes:10} {shape!s:45} {time_s * 1e9:12.1f} {rate:7.1f} {time_s / memcpy_s:9.2f} "
                  f"{time_s / streamed_s:16.2f}")  # fmt: skip


def print_small(isa: str, dtype: str, op: str, rounds: int) -> None:
    """Print the ns of calls with few items, by items and sources."""
    sources = (1, 2, 3, 4, 8)
    print(f"\nns a call, {isa} {dtype} {op}, by items and sources")
    print(" " * 6 + "".join(f"{n:8}" for n in sources))
    for count in SMALL_COUNTS:
        arrays = arrays_apart(max(sources) + 1, count * kernels.dtypes()[dtype])
        times = medians([fold(Shape(isa, dtype, op, n, 1, False), arrays) for n in sources], rounds)
        print(f"{count:6}" + "".join(f"{t * 1e9:8.1f}" for t in times))


def casts(isa: str, nbytes: int) -> list[tuple[str, int, Callable[[int], float]]]:
    """Return every cast and wire format for `nbytes` of float32: its name, the bytes it moves, and its
    function."""
    wide, narrow, residual = arrays_apart(3, nbytes)
    wide[:] = np.random.default_rng(1).normal(size=nbytes // 4).astype(np.float32).view(np.uint8)
    rows: list[tuple[str, int, Callable[[int], float]]] = []
    for dtype in NARROW:
        items = narrow[: nbytes // 4 * kernels.dtypes()[dtype]]
        moved = nbytes + len(items)
        rows.append((f"narrow {dtype}", moved, partial(kernels.narrow, dtype, items, wide, isa)))
        rows.append((f"widen {dtype}", moved, partial(kernels.widen, dtype, residual, items, isa)))
    for name in kernels.wire_formats():
        needed = kernels.encoded_nbytes(name, nbytes // 4)
        sent = narrow[:needed]
        encode = partial(kernels.encode, name, sent, wide)
        rows.append((f"encode {name}", nbytes + needed, partial(encode, None, isa)))
        rows.append((f"encode {name}, feedback", 3 * nbytes + needed, partial(encode, residual, isa)))
        rows.append((f"decode {name}", nbytes + needed, partial(kernels.decode, name, residual, sent, isa)))
    return rows


def print_casts(isas: list[str], sizes: list[int], rounds: int) -> None:
    """Print one line for each cast or wire format and size: ns, GB/s read and written, the ratio to a copy.
    """
    print(f"{'bytes':>10} {'cast':30} {'isa':7} {'ns':>12} {'GB/s':>7} {'/ memcpy':>9}")
    for nbytes in sizes:
        copied, copy = arrays_apart(2, nbytes)
        memcpy = partial(kernels.copy, [copy], [copied], "memcpy", 0)
        for rows in zip(*(casts(isa, nbytes) for isa in isas), strict=True):
            for isa, (name, moved, run) in zip(isas, rows, strict=True):
                time_s, memcpy_s = medians([run, memcpy], rounds)
                print(f"{nbytes:10} {name:30} {isa:7} {time_s * 1e9:12.1f} {moved / time_s / 1e9:7.1f} "
                      f"{time_s / memcpy_s:9.2f}")  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    isas, dtypes = kernels.isas(), list(kernels.dtypes())
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--isa", type=comma_separated(str, isas), default=isas[:1], help=",".join(isas))
    parser.add_argument("--dtype", type=comma_separated(str, dtypes), default=["float32"])
    parser.add_argument("--op", type=comma_separated(str), help="default: sum; with --everything: all")
    parser.add_argument("--sizes", type=comma_separated(parse_size), default=SIZES)
    parser.add_argument("--sources", type=comma_separated(int), default=[2])
    parser.add_argument("--destinations", type=comma_separated(int), default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="calls with a handful of items instead")
    parser.add_argument("--casts", action="store_true", help="casts and wire formats of float32 instead")
    parser.add_argument("--everything", action="store_true", help="all dtypes, ops and ISAs at 64 KiB")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.everything:
        arguments.isa, arguments.dtype = kernels.isas(), list(kernels.dtypes())
        arguments.sizes, arguments.destinations = [64 << 10], [1]
    shapes = [
        Shape(isa, dtype, op, nsrc, ndst, streamed)
        for dtype in arguments.dtype
        for op in arguments.op or (kernels.ops(dtype) if arguments.everything else ["sum"])
        for isa in arguments.isa
        for nsrc in arguments.sources
        for ndst in arguments.destinations
        for streamed in ([False] if arguments.everything else [False, True])
    ]
    if arguments.casts:
        print_casts(arguments.isa, arguments.sizes, arguments.rounds)
    elif arguments.small:
        for isa, dtype, op in dict.fromkeys((s.isa, s.dtype, s.op) for s in shapes):
            print_small(isa, dtype, op, arguments.rounds)
    else:
        print_sizes(shapes, arguments.sizes, arguments.rounds)


if __name__ == "__main__":
    main()
