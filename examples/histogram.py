"""The histogram of an array that may be larger than memory: each rank reads and counts a part of it.

    shmrun -n 4 examples/histogram.py                              of 10 million random numbers
    shmrun -n 4 examples/histogram.py --file big.npy --bins 50     of a file, which is mapped and never loaded
    python examples/histogram.py                                   one rank, the same counts

There are two passes with one call each. all_reduce finds both ends of the range at once: the largest number
is minus the smallest of the negated ones. reduce adds up the counts on rank 0. Counts are whole numbers, and
the bin of a number depends only on the range, so any number of ranks counts exactly what np.histogram does.
The example checks this for up to 2**24 numbers.
"""

import sys

import numpy as np
from terminal import Parser, at_least, with_progress

import shmring

BLOCK = 1 << 18  # numbers that are read together
CHECKED = 1 << 24  # up to so many numbers rank 0 counts alone, too
BAR = 50  # characters


def blocks_of_file(values):
    """Return a function that reads block after block of an array, which may be a mapped file."""
    flat = values.reshape(-1)
    return lambda number: np.asarray(flat[number * BLOCK : (number + 1) * BLOCK], dtype=np.float64)


def blocks_of_chance(elements, seed):
    """Return a function that makes block after block. Each block has its own random stream, on whichever
    rank."""

    def make(number):
        stream = np.random.Generator(np.random.Philox(seed).jumped(number))
        return stream.standard_normal(min(BLOCK, elements - number * BLOCK))

    return make


def ends_of(comm, read, blocks):
    """Return the smallest and the largest number of all ranks; NaN if there is one."""
    ends = np.full(2, np.inf)
    for block in blocks:
        values = read(block)
        ends = np.minimum(ends, [values.min(), -values.max()])
    comm.all_reduce(ends, op="min")
    return ends[0], -ends[1]


def count(comm, read, blocks, ends, bins):
    """Return, on rank 0, the number of values of all ranks in each bin."""
    counts = np.zeros(bins, dtype=np.int64)
    for block in blocks:
        counts += np.histogram(read(block), bins, ends)[0]
    comm.reduce(counts)
    return counts


def part_of(comm, nblocks):
    """Return this rank's blocks: one after the other, since disks are fastest that way."""
    first, end = (-(-nblocks * rank // comm.size) for rank in (comm.rank, comm.rank + 1))
    return range(first, end)


def with_bar(comm, blocks, doing):
    steps = with_progress(len(blocks), comm.rank, doing, "block")
    return (blocks[step] for step in steps)


def show(counts, ends):
    """Print a line for each bin."""
    edges = np.histogram_bin_edges([], len(counts), ends)
    for low, high, number in zip(edges, edges[1:], counts.tolist(), strict=False):
        bar = "#" * round(BAR * number / max(counts.max(), 1))
        print(f"{low:12.5g} to {high:12.5g} {number:12d} {bar}".rstrip())


def passed(counts, read, elements):
    """Compare with np.histogram if it can be asked, and print the outcome; return False if they differ."""
    print(f"{elements} numbers, {counts.sum()} counted")
    if elements > CHECKED:
        print(f"not compared with np.histogram: more than {CHECKED} numbers")
        return bool(counts.sum() == elements)
    whole = np.concatenate([read(block) for block in range(-(-elements // BLOCK))])
    same = np.array_equal(counts, np.histogram(whole, len(counts))[0])
    print(f"the same counts as np.histogram of the whole: {'yes' if same else 'NO'}")
    return same


def open_array(path, parser):
    """Return the array of a .npy file, mapped."""
    try:
        values = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        parser.error(f"--file {path}: {getattr(error, 'strerror', None) or 'no array as np.save writes it'}")
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf" or values.size == 0:
        parser.error(f"--file {path}: it has to be an .npy file with numbers in it")
    return values


def parse_arguments():
    parser = Parser(description="The histogram of a large array.")
    add = parser.add_argument
    add("--file", metavar="FILE.npy", help="whose numbers to count (default: random ones)")
    add("--elements", type=at_least(1), default=10_000_000, help="random numbers to count (%(default)s)")
    add("--bins", type=at_least(1), default=20, help="how many (%(default)s)")
    add("--seed", type=at_least(0), default=1, help="of random numbers (%(default)s)")
    args = parser.parse_args()
    if args.file is None:
        return args.bins, args.elements, blocks_of_chance(args.elements, args.seed)
    values = open_array(args.file, parser)
    return args.bins, values.size, blocks_of_file(values)


def main():
    bins, elements, read = parse_arguments()
    with shmring.init() as comm:
        part = part_of(comm, -(-elements // BLOCK))
        ends = ends_of(comm, read, with_bar(comm, part, "range"))
        if not np.isfinite(ends).all():
            sys.exit("there is a NaN or an infinity among the numbers" if comm.rank == 0 else 1)
        counts = count(comm, read, with_bar(comm, part, "counting"), ends, bins)
        rank, size = comm.rank, comm.size

    if rank == 0:
        print(f"{size} rank(s), {bins} bins from {ends[0]:.6g} to {ends[1]:.6g}")
        show(counts, ends)
        if not passed(counts, read, elements):
            sys.exit("FAILED: see the line above")


if __name__ == "__main__":
    main()
