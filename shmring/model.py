"""The cost model: compute the time of an all-reduce and the efficiency of a training step.

A message of n bytes takes alpha + n/beta seconds (Hockney 1994), and folding n bytes takes n/gamma more
(Thakur, Rabenseifner and Gropp 2005). Every rank has one full-duplex link, so it sends and receives at the
same time. This module is pure arithmetic and uses no communicator.
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
    """A link between ranks. alpha_s: the latency of a message in seconds. beta: the bytes a second that a
    rank sends and, at the same time, receives. gamma: the bytes a second that a rank folds; infinity if
    folding overlaps with transfers or is included in beta."""

    alpha_s: float
    beta: float
    gamma: float = math.inf

    def __post_init__(self) -> None:
        if not (self.alpha_s >= 0 and self.beta > 0 and self.gamma > 0):
            raise ValueError(f"{self}: alpha_s must be 0 or more, beta and gamma more than 0")


@dataclass(frozen=True)
class Cost:
    """The cost of a call on its critical path, the longest chain of dependent steps.

    steps: a step costs alpha once, regardless of the number of concurrent messages. nbytes: the bytes through
    the busiest link, counted once if sending and receiving overlap. folded_nbytes: the bytes folded.
    sent_nbytes: the bytes sent by the rank that sends the most.
    """

    steps: int
    nbytes: float
    folded_nbytes: float
    sent_nbytes: float

    def seconds(self, link: Link) -> float:
        """Return the seconds that the model predicts."""
        return self.steps * link.alpha_s + self.nbytes / link.beta + self.folded_nbytes / link.gamma


# ---- the algorithms ---------------------------------------------------------------------------------------


def ring(nbytes: float, ranks: int) -> Cost:
    """Reduce-scatter and all-gather in a ring (Patarasuk and Yuan 2009): 2(N-1) steps of n/N bytes."""
    part = phase_nbytes(nbytes, ranks)
    return Cost(2 * (ranks - 1), 2 * part, part, 2 * part)


def bidirectional_ring(nbytes: float, ranks: int, links: int = 1) -> Cost:
    """Two opposite rings, each with half of the message. links: 2 if a rank has a link for each
    neighbour, as in a torus, which halves a ring's time for large messages. With 1 the halves share the link,
    and the cost is a ring's."""
    one = ring(nbytes, ranks)
    return Cost(one.steps, one.nbytes / links, one.folded_nbytes, one.sent_nbytes)


def direct(nbytes: float, ranks: int) -> Cost:
    """Reduce-scatter and all-gather in one step each, in which all ranks send to all: shmring's own."""
    part = phase_nbytes(nbytes, ranks)
    return Cost(2 * (ranks > 1), 2 * part, part, 2 * part)


def halving_doubling(nbytes: float, ranks: int) -> Cost:
    """Recursive halving, then doubling (Rabenseifner 2004): 2 log2 N steps if N is a power of two. Else
    ranks beyond the largest power first send all data and at last receive the result: 2 steps and 2n more."""
    _others(ranks)
    power = 1 << (ranks.bit_length() - 1)
    part = phase_nbytes(nbytes, power)
    extra = nbytes * (ranks > power)
    steps = 2 * _levels(power) + 2 * (ranks > power)
    return Cost(steps, 2 * part + 2 * extra, part + extra, 2 * part + extra)


def tree(nbytes: float, ranks: int) -> Cost:
    """Reduce and broadcast along a binomial tree, without chunks: 2 ceil(log2 N) steps of n."""
    levels = _levels(ranks)
    return Cost(2 * levels, 2 * levels * nbytes, levels * nbytes, levels * nbytes)


def double_tree(nbytes: float, ranks: int, chunks: int = 1) -> Cost:
    """Two binary trees, each with half of the message (Sanders, Speck and Träff 2009). No rank has
    children in both. Chunks pass up, then down, in a pipeline: 2(ceil(log2 N) + chunks - 1) steps. With one
    chunk the cost is a tree's; with many it is 2n/beta. Of two ranks, one has a child and half the
    bytes."""
    children = min(2, _others(ranks))
    steps = _levels(ranks) + chunks - 1 if ranks > 1 else 0
    half = steps * children * nbytes / (2 * chunks)
    sent_halves = {1: 0, 2: 2, 3: 3}.get(ranks, 4)  # two halves up, two down to the children
    return Cost(2 * steps, 2 * half, half, sent_halves * nbytes / 2)


def master(nbytes: float, ranks: int) -> Cost:
    """All ranks send all data to rank 0 and receive the result from rank 0."""
    all_others = _others(ranks) * nbytes
    return Cost(2 * (ranks > 1), 2 * all_others, all_others, all_others)


def parameter_server(nbytes: float, workers: int, servers: int = 1) -> Cost:
    """Workers push to ranks that only serve, and pull from them (Li et al. 2014). Each server has its
    part of the message. Nn/servers bytes enter a server's link, then leave it, since the sum must be complete
    first. A worker's link carries n bytes, which is more if there are more servers than workers."""
    _others(workers)
    if servers < 1:
        raise ValueError(f"{servers} servers; there must be 1 or more")
    part = workers * nbytes / servers
    busiest = max(part, nbytes)
    return Cost(2, 2 * busiest, part, busiest)


def hierarchical(nbytes: float, hosts: int, ranks: int) -> tuple[Cost, Cost]:
    """Costs inside each host, and between hosts. `ranks` on each of `hosts` reduce-scatter in memory,
    counterparts exchange their slices, and each host gathers. The second cost is for a host's link, which its
    ranks share. One after the other they take the sum of both times; if they overlap, as in shmring, they
    take
    little more than the larger one."""
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
    """Return the cost of an algorithm, one of ALGORITHMS; a double tree has the best number of chunks."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}; the model has {', '.join(ALGORITHMS)}")
    if algorithm == "double_tree":
        return double_tree(nbytes, ranks, _best_chunks(nbytes, ranks, link))
    return ALGORITHMS[algorithm](nbytes, ranks)


def seconds(algorithm: str, nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-reduce of nbytes."""
    return all_reduce(algorithm, nbytes, ranks, link).seconds(link)


def _best_chunks(nbytes: float, ranks: int, link: Link) -> int:
    """Return the best k: each chunk costs 2 alpha; filling the pipeline takes (levels - 1)/k transfers."""
    bytes_s = min(2, _others(ranks)) * nbytes * (1 / link.beta + 1 / (2 * link.gamma))
    filling_s = max(_levels(ranks) - 1, 0) * bytes_s
    chunks = math.sqrt(filling_s / (2 * link.alpha_s)) if link.alpha_s else nbytes
    return max(1, min(round(chunks), int(nbytes)))


def crossover(ranks: int, link: Link, *, short: str = "tree", long: str = "ring") -> float:
    """Return the bytes from which on `long` is faster: 0 if it always is, infinity if it never is. The time
    of both algorithms must be linear in the bytes: all but double_tree."""
    if "double_tree" in (short, long):
        raise ValueError("the time of a double_tree is not linear in the bytes: compare `seconds`")
    bare = Link(0, link.beta, link.gamma)
    later_s = seconds(long, 0, ranks, link) - seconds(short, 0, ranks, link)
    gained_s = seconds(short, 1, ranks, bare) - seconds(long, 1, ranks, bare)  # per byte
    if gained_s > 0:
        return max(0.0, later_s / gained_s)
    return 0.0 if later_s <= 0 == gained_s else math.inf


# ---- lower bounds of all algorithms -----------------------------------------------------------------------


def phase_nbytes(nbytes: float, ranks: int) -> float:
    """Return V(p-1)/p: the least that each rank sends in a reduce-scatter or all-gather of nbytes."""
    return nbytes * _others(ranks) / ranks


def phase_bound_s(nbytes: float, ranks: int, beta: float) -> float:
    """Return V(p-1)/(p beta): the least time of a reduce-scatter or an all-gather. It is less than V/beta for
    any number of ranks. An all-reduce needs both."""
    return phase_nbytes(nbytes, ranks) / beta


def redundant_nbytes(nbytes: float, ranks: int) -> float:
    """Return (p-1)V: the bytes beyond one copy if each rank holds all of V bytes. An all-gather, which makes
    these copies, moves as many bytes, and so does a reduce-scatter, which removes them."""
    return _others(ranks) * nbytes


# ---- a data-parallel step ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A training step: compute_s seconds, then an all-reduce of gradient_nbytes without overlap.

    beta: as in a Link. ranks: math.inf gives the limit.
    """

    gradient_nbytes: float
    compute_s: float

    def __post_init__(self) -> None:
        if not (self.gradient_nbytes >= 0 and self.compute_s > 0):
            raise ValueError(f"{self}: gradient_nbytes must be 0 or more, compute_s more than 0")

    def transfer_s(self, ranks: float, beta: float) -> float:
        """Return the transfer time T_t = 2D(n-1)/(nS)."""
        return 2 * self.gradient_nbytes * (1 - 1 / ranks) / beta

    def step_s(self, ranks: float, beta: float) -> float:
        """Return the time of a step T_p = T_s + T_t."""
        return self.compute_s + self.transfer_s(ranks, beta)

    def efficiency(self, ranks: float, beta: float) -> float:
        """Return P = 1/(1 + T_t/T_s): the share of a step spent computing."""
        return 1 / (1 + self.transfer_s(ranks, beta) / self.compute_s)

    def transfer_s_at(self, efficiency: float) -> float:
        """Return T_t = (1-P)/P T_s: the longest transfer for this efficiency, 0 to 1."""
        if not 0 < efficiency < 1:
            raise ValueError(f"efficiency is {efficiency}; it must be more than 0 and less than 1")
        return (1 - efficiency) / efficiency * self.compute_s

    def beta_for(self, efficiency: float, ranks: float) -> float:
        """Return S = 2DP(n-1)/(n(1-P)T_s): the bytes a second that this efficiency needs."""
        return self.transfer_s(ranks, self.transfer_s_at(efficiency))


# ---- from measurements ------------------------------------------------------------------------------------


def message(nbytes: float) -> Cost:
    """Return the cost of one message from one rank to another."""
    return Cost(1, nbytes, 0, nbytes)


def fit(sizes: Sequence[float], measured_s: Sequence[float], cost: Callable[[float], Cost] = message) -> Link:
    """Fit alpha and beta to the measured seconds of calls of these sizes, in bytes.

    The fit minimises the squares of relative errors, so that small calls count as much as large ones. beta
    includes the folding.

    cost: the cost of a call, such as `lambda nbytes: ring(nbytes, 4)`; by default a single message. A result
    that would be negative is 0 (for beta: infinity).
    """
    if len(sizes) != len(measured_s) or len(set(sizes)) < 2:
        raise ValueError("fit needs calls of two sizes or more, and the seconds of each")
    if min(measured_s) <= 0:
        raise ValueError("fit needs calls that took more than 0 seconds")
    costs = [cost(nbytes) for nbytes in sizes]
    # The normal equations of steps alpha + nbytes / beta = measured, divided by measured.
    steps = [one.steps / took_s for one, took_s in zip(costs, measured_s, strict=True)]
    loads = [one.nbytes / took_s for one, took_s in zip(costs, measured_s, strict=True)]
    ss, sl, ll = _dot(steps, steps), _dot(steps, loads), _dot(loads, loads)
    determinant = ss * ll - sl * sl
    if determinant <= 1e-12 * ss * ll:
        raise ValueError("all calls have one ratio of steps to bytes: alpha and beta cannot be separated")
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
    """Return ceil(log2 N)."""
    return _others(ranks).bit_length()
