"""Pi by Monte Carlo: every block of points has a random stream of its own, on whichever rank.

    shmrun -n 4 examples/monte_carlo_pi.py          four ranks
    python examples/monte_carlo_pi.py               one rank, the same digits

A round is a number of blocks, which the ranks share. Block b takes its points from stream b, which begins
2**128 draws after stream b - 1 (Philox.jumped), so that no two overlap. Hits are whole numbers, so any number
of ranks comes to exactly the same count. While the hits of one round are summed in the background
(async_op=True), the ranks already draw the points of the next.
"""

import math
import sys

import numpy as np
from terminal import Parser, at_least, with_progress

import shmring

ALLOWED = 5.0  # standard errors: by chance once in two million seeds


def hits_in(block, args):
    """Return the number of points of this block inside the quarter of a circle."""
    stream = np.random.Generator(np.random.Philox(args.seed).jumped(block))
    x, y = stream.random((2, args.points))
    return np.count_nonzero(x * x + y * y < 1.0)


class Estimate:
    """Pi from the points drawn so far."""

    def __init__(self):
        self.hits = self.points = 0

    def add(self, hits, points):
        self.hits += int(hits)
        self.points += points

    @property
    def value(self):
        return 4.0 * self.hits / self.points

    @property
    def error(self):
        """Return one standard error of the value: hits are binomial."""
        share = self.hits / self.points
        return 4.0 * math.sqrt(share * (1.0 - share) / self.points)

    def __str__(self):
        return f"{self.value:.6f} ± {self.error:.6f}" if self.points else ""


def throw(comm, estimate, rounds, args):
    """Add round after round to the estimate, each while the next is in progress."""
    work = sums = None
    for number in rounds:
        first = number * args.blocks
        mine = range(first + comm.rank, first + args.blocks, comm.size)
        hits = np.array(sum(hits_in(block, args) for block in mine))
        if work is not None:
            work.wait()
            estimate.add(sums, args.blocks * args.points)
        sums, work = hits, comm.all_reduce(hits, async_op=True)
    work.wait()
    estimate.add(sums, args.blocks * args.points)


def passed(estimate):
    """Print the results; return whether the value is plausible for pi."""
    print(f"{estimate.hits} of {estimate.points} points hit")
    distance = abs(estimate.value - math.pi) / estimate.error if estimate.error else math.inf
    print(f"pi is about {estimate}, {distance:.1f} standard errors off")
    return distance <= ALLOWED


def parse_arguments():
    parser = Parser(description="Pi by Monte Carlo, with independent random streams.")
    add = parser.add_argument
    add("--rounds", type=at_least(1), default=100, help="each ends with a sum over all ranks (%(default)s)")
    add("--blocks", type=at_least(1), default=24, help="in a round, over all ranks (%(default)s)")
    add("--points", type=at_least(1), default=1 << 16, help="in a block (%(default)s)")
    add("--seed", type=at_least(0), default=1, help="of all streams (%(default)s)")
    return parser.parse_args()


def main():
    args = parse_arguments()
    estimate = Estimate()
    with shmring.init() as comm:
        rounds = with_progress(args.rounds, comm.rank, "throwing", "round", note=lambda: str(estimate))
        throw(comm, estimate, rounds, args)
        rank, size = comm.rank, comm.size

    if rank == 0:
        print(f"{size} rank(s), {args.rounds * args.blocks} streams of {args.points} points")
        if not passed(estimate):
            sys.exit("FAILED: this is not pi")


if __name__ == "__main__":
    main()
