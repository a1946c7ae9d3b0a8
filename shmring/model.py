"""The cost model: how long an all-reduce takes by arithmetic, and what a training step gets out of it.

A message of n bytes takes alpha + n/beta seconds (Hockney 1994), and n bytes more of folding n/gamma (Thakur,
Rabenseifner and Gropp 2005). Every rank has one full-duplex link, so it sends and receives at the same time.
Pure arithmetic: it knows no communicator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "ALGORITHMS",
    "Cost",
    "Link",
    "Training",
    "all_reduce",
    "bidirectional_ring",
    "crossover",
    "direct",
    "double_tree",
    "fit",
    "halving_doubling",
    "hierarchical",
    "master",
    "message",
    "parameter_server",
    "phase_bound_s",
    "phase_nbytes",
    "redundant_nbytes",
    "ring",
    "seconds",
    "tree",
]


@dataclass(frozen=True)
class Link:
    """What joins ranks. alpha_s: seconds that any message takes, however short. beta: bytes a second that a
    rank sends and, at the same time, receives. gamma: bytes a second that it folds; infinity, where that is
    hidden behind beta or counted in it."""

    alpha_s: float
    beta: float
    gamma: float = math.inf

    def __post_init__(self) -> None:
        if not (self.alpha_s >= 0 and self.beta > 0 and self.gamma > 0):
            raise ValueError(f"{self}: alpha_s must be 0 or more, beta and gamma more than 0")


@dataclass(frozen=True)
class Cost:
    """What a call asks for on its longest way, where one step waits for the other.

    steps: in each a rank pays alpha once, however many messages leave side by side. nbytes: that pass through
    the busiest link, counted once where sending and receiving overlap. folded_nbytes: that are folded.
    sent_nbytes: all that the rank sends that sends the most.
    """

    steps: int
    nbytes: float
    folded_nbytes: float
    sent_nbytes: float

    def seconds(self, link: Link) -> float:
        """By the model."""
        return self.steps * link.alpha_s + self.nbytes / link.beta + self.folded_nbytes / link.gamma


# ---- the algorithms ---------------------------------------------------------------------------------------


def ring(nbytes: float, ranks: int) -> Cost:
    """Reduce-scatter and all-gather in a ring (Patarasuk and Yuan 2009): 2(N-1) steps of n/N bytes."""
    part = phase_nbytes(nbytes, ranks)
    return Cost(2 * (ranks - 1), 2 * part, part, 2 * part)


def bidirectional_ring(nbytes: float, ranks: int, links: int = 1) -> Cost:
    """Two opposite rings, each with half of the message. links: 2 where a rank has one for each neighbour, as
    in a torus: half of a ring's time for large messages. On 1 the halves share it: a ring's cost."""
    one = ring(nbytes, ranks)
    return Cost(one.steps, one.nbytes / links, one.folded_nbytes, one.sent_nbytes)


def direct(nbytes: float, ranks: int) -> Cost:
    """Reduce-scatter and all-gather, each in one step, where everybody sends to everybody: shmring's own."""
    part = phase_nbytes(nbytes, ranks)
    return Cost(2 * (ranks > 1), 2 * part, part, 2 * part)


def halving_doubling(nbytes: float, ranks: int) -> Cost:
    """Recursive halving, then doubling (Rabenseifner 2004): 2 log2 N steps for N a power of two. Else those
    beyond the last power first hand in all they have, and get the result at the end: 2 steps and 2n more."""
    _others(ranks)
    power = 1 << (ranks.bit_length() - 1)
    part = phase_nbytes(nbytes, power)
    extra = nbytes * (ranks > power)
    steps = 2 * _levels(power) + 2 * (ranks > power)
    return Cost(steps, 2 * part + 2 * extra, part + extra, 2 * part + extra)


def tree(nbytes: float, ranks: int) -> Cost:
    """Reduce to rank 0, then broadcast, along a binomial tree, not in chunks: 2 ceil(log2 N) steps of n."""
    levels = _levels(ranks)
    return Cost(2 * levels, 2 * levels * nbytes, levels * nbytes, levels * nbytes)


def double_tree(nbytes: float, ranks: int, chunks: int = 1) -> Cost:
    """Two binary trees, each with half of the message, in which nobody has children twice (Sanders, Speck and
    Träff 2009), up and then down in a pipeline of so many chunks: 2(ceil(log2 N) + chunks - 1) steps. In one
    chunk it is a tree's cost; in many, 2n/beta. Of two ranks one has a child, and half of the bytes."""
    children = min(2, _others(ranks))
    steps = _levels(ranks) + chunks - 1 if ranks > 1 else 0
    half = steps * children * nbytes / (2 * chunks)
    sent_halves = {1: 0, 2: 2, 3: 3}.get(ranks, 4)  # up twice, and down to two children
    return Cost(2 * steps, 2 * half, half, sent_halves * nbytes / 2)


def master(nbytes: float, ranks: int) -> Cost:
    """Everybody sends all to rank 0 and gets the result from there."""
    all_others = _others(ranks) * nbytes
    return Cost(2 * (ranks > 1), 2 * all_others, all_others, all_others)


def parameter_server(nbytes: float, workers: int, servers: int = 1) -> Cost:
    """Workers push to ranks that do nothing else, and pull (Li et al. 2014); each server has its part of the
    message. Nn/servers bytes pass a server's link in, and then out, as nobody gets what is not summed; a
    worker's n, which are more where there are more servers than workers."""
    _others(workers)
    if servers < 1:
        raise ValueError(f"{servers} servers; there must be 1 or more")
    part = workers * nbytes / servers
    busiest = max(part, nbytes)
    return Cost(2, 2 * busiest, part, busiest)


def hierarchical(nbytes: float, hosts: int, ranks: int) -> tuple[Cost, Cost]:
    """Inside each host, and between hosts: `ranks` on each of `hosts` reduce-scatter in memory, counterparts
    exchange their slices, and each host gathers. The second is of a host's link, which its ranks share. One
    after the other they take the sum; where they overlap, as in shmring, little more than the larger one."""
    return direct(nbytes, ranks), direct(nbytes, hosts)


ALGORITHMS: Mapping[str, Callable[[float, int], Cost]] = {
    "direct": direct,
    "ring": ring,
    "bidirectional_ring": bidirectional_ring,
    "halving_doubling": halving_doubling,
    "tree": tree,
    "double_tree": double_tree,
    "master": master,
}


def all_reduce(algorithm: str, nbytes: float, ranks: int, link: Link) -> Cost:
    """Of an algorithm by its name, one of ALGORITHMS; a double tree in as many chunks as are best here."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}; the model has {', '.join(ALGORITHMS)}")
    if algorithm == "double_tree":
        return double_tree(nbytes, ranks, _best_chunks(nbytes, ranks, link))
    return ALGORITHMS[algorithm](nbytes, ranks)


def seconds(algorithm: str, nbytes: float, ranks: int, link: Link) -> float:
    """Of an all-reduce of nbytes by as many ranks."""
    return all_reduce(algorithm, nbytes, ranks, link).seconds(link)


def _best_chunks(nbytes: float, ranks: int, link: Link) -> int:
    """Each of k chunks costs 2 alpha, and filling the pipeline (levels - 1)/k of what all bytes take."""
    bytes_s = min(2, _others(ranks)) * nbytes * (1 / link.beta + 1 / (2 * link.gamma))
    filling_s = max(_levels(ranks) - 1, 0) * bytes_s
    chunks = math.sqrt(filling_s / (2 * link.alpha_s)) if link.alpha_s else nbytes
    return max(1, min(round(chunks), int(nbytes)))


def crossover(ranks: int, link: Link, *, short: str = "tree", long: str = "ring") -> float:
    """Bytes from which on `long` is the faster one: 0 where it always is, infinity where it never is. Of
    algorithms whose time is a straight line over the bytes: all but double_tree."""
    if "double_tree" in (short, long):
        raise ValueError("the time of a double_tree is no straight line over the bytes: compare `seconds`")
    bare = Link(0, link.beta, link.gamma)
    later_s = seconds(long, 0, ranks, link) - seconds(short, 0, ranks, link)
    gained_s = seconds(short, 1, ranks, bare) - seconds(long, 1, ranks, bare)  # by each byte
    if gained_s > 0:
        return max(0.0, later_s / gained_s)
    return 0.0 if later_s <= 0 == gained_s else math.inf


# ---- what no algorithm can do without --------------------------------------------------------------------


def phase_nbytes(nbytes: float, ranks: int) -> float:
    """V(p-1)/p: what each rank sends at least in a reduce-scatter, or an all-gather, of nbytes."""
    return nbytes * _others(ranks) / ranks


def phase_bound_s(nbytes: float, ranks: int, beta: float) -> float:
    """V(p-1)/(p beta): the least that a reduce-scatter or an all-gather takes. However many ranks there are,
    it is less than V/beta. An all-reduce is both."""
    return phase_nbytes(nbytes, ranks) / beta


def redundant_nbytes(nbytes: float, ranks: int) -> float:
    """(p-1)V: what all ranks hold together beyond one copy when each has all of V bytes. An all-gather, which
    brings it about, moves as much, and so does a reduce-scatter, which takes it away."""
    return _others(ranks) * nbytes


# ---- a data-parallel step ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A step: compute_s seconds, then an all-reduce of gradient_nbytes that nothing hides.

    beta: as a Link's. ranks: also math.inf, for what it tends to.
    """

    gradient_nbytes: float
    compute_s: float

    def __post_init__(self) -> None:
        if not (self.gradient_nbytes >= 0 and self.compute_s > 0):
            raise ValueError(f"{self}: gradient_nbytes must be 0 or more, compute_s more than 0")

    def transfer_s(self, ranks: float, beta: float) -> float:
        """T_t = 2D(n-1)/(nS)."""
        return 2 * self.gradient_nbytes * (1 - 1 / ranks) / beta

    def step_s(self, ranks: float, beta: float) -> float:
        """T_p = T_s + T_t."""
        return self.compute_s + self.transfer_s(ranks, beta)

    def efficiency(self, ranks: float, beta: float) -> float:
        """P = 1/(1 + T_t/T_s): the part of a step in which it computes."""
        return 1 / (1 + self.transfer_s(ranks, beta) / self.compute_s)

    def transfer_s_at(self, efficiency: float) -> float:
        """T_t = (1-P)/P T_s: the most that the transfer may take for that efficiency, 0 to 1."""
        if not 0 < efficiency < 1:
            raise ValueError(f"efficiency is {efficiency}; it must be more than 0 and less than 1")
        return (1 - efficiency) / efficiency * self.compute_s

    def beta_for(self, efficiency: float, ranks: float) -> float:
        """S = 2DP(n-1)/(n(1-P)T_s): the bytes a second that it takes."""
        return self.transfer_s(ranks, self.transfer_s_at(efficiency))


# ---- from measurements ------------------------------------------------------------------------------------


def message(nbytes: float) -> Cost:
    """One message from one rank to another."""
    return Cost(1, nbytes, 0, nbytes)


def fit(sizes: Sequence[float], measured_s: Sequence[float], cost: Callable[[float], Cost] = message) -> Link:
    """alpha and beta of calls of these sizes, in bytes, that took so long: least squares of relative errors,
    so that small calls count as much as large ones. The folding is in beta.

    cost: of such a call, as in `lambda nbytes: ring(nbytes, 4)`; single messages unless given. A number that
    would come out negative is 0 (beta: infinity).
    """
    if len(sizes) != len(measured_s) or len(set(sizes)) < 2:
        raise ValueError("fit needs calls of two sizes or more, and the seconds of each")
    if min(measured_s) <= 0:
        raise ValueError("fit needs calls that took more than 0 seconds")
    costs = [cost(nbytes) for nbytes in sizes]
    # steps alpha + nbytes / beta = measured, divided by measured: the normal equations of that.
    steps = [one.steps / took_s for one, took_s in zip(costs, measured_s, strict=True)]
    loads = [one.nbytes / took_s for one, took_s in zip(costs, measured_s, strict=True)]
    ss, sl, ll = _dot(steps, steps), _dot(steps, loads), _dot(loads, loads)
    determinant = ss * ll - sl * sl
    if determinant <= 1e-12 * ss * ll:
        raise ValueError("all calls have one ratio of steps to bytes: alpha and beta cannot be told apart")
    alpha_s = (sum(steps) * ll - sum(loads) * sl) / determinant
    byte_s = (sum(loads) * ss - sum(steps) * sl) / determinant
    if alpha_s < 0:
        alpha_s, byte_s = 0.0, sum(loads) / ll
    elif byte_s < 0:
        alpha_s, byte_s = sum(steps) / ss, 0.0
    return Link(alpha_s, 1 / byte_s if byte_s else math.inf)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _others(ranks: int) -> int:
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; there must be 1 or more")
    return ranks - 1


def _levels(ranks: int) -> int:
    """ceil(log2 N)."""
    return _others(ranks).bit_length()
