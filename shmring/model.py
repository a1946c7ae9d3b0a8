"""The cost model: compute the time of an all-reduce and the efficiency of a training step.

A message of n bytes takes alpha + n/beta seconds (Hockney 1994), and folding n bytes takes n/gamma more
(Thakur, Rabenseifner and Gropp 2005). Every rank has one full-duplex link, so it sends and receives at the
same time. This module is pure arithmetic and uses no communicator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ._arguments import integer

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
    """A link between ranks.

    Parameters
    ----------
    alpha_s : float
        The latency of a message, in seconds.
    beta : float
        The bandwidth: bytes per second that a rank sends, and at the same time receives.
    gamma : float
        Bytes per second that a rank folds; infinity if folding overlaps with transfers or is included in
        beta.

    Raises
    ------
    ValueError
        For a negative latency, or a rate that is not positive.

    Examples
    --------
    >>> from shmring import model
    >>> wire = model.Link(alpha_s=50e-6, beta=125e6)  # 1 Gbit/s
    >>> round(model.ring(1 << 20, 8).seconds(wire), 4)
    0.0154
    """

    alpha_s: float
    beta: float
    gamma: float = math.inf

    def __post_init__(self) -> None:
        if not (self.alpha_s >= 0 and self.beta > 0 and self.gamma > 0):
            raise ValueError(f"{self}: alpha_s must be 0 or more, beta and gamma more than 0")


@dataclass(frozen=True)
class Cost:
    """The cost of a call on its critical path, the longest chain of dependent steps.

    Parameters
    ----------
    steps : int
        Number of steps. A step costs alpha once, regardless of the number of concurrent messages.
    nbytes : float
        Bytes through the busiest link, counted once if sending and receiving overlap.
    folded_nbytes : float
        Bytes folded.
    sent_nbytes : float
        Bytes sent by the rank that sends the most.

    Examples
    --------
    >>> from shmring import model
    >>> model.ring(1000, 4)
    Cost(steps=6, nbytes=1500.0, folded_nbytes=750.0, sent_nbytes=1500.0)
    """

    steps: int
    nbytes: float
    folded_nbytes: float
    sent_nbytes: float

    def seconds(self, link: Link) -> float:
        """Return the seconds that the model predicts.

        Parameters
        ----------
        link : Link
            The link.

        Returns
        -------
        float
            Seconds.
        """
        return self.steps * link.alpha_s + self.nbytes / link.beta + self.folded_nbytes / link.gamma


# ---- the algorithms ---------------------------------------------------------------------------------------


def ring(nbytes: float, ranks: int) -> Cost:
    """Return the cost of reduce-scatter and all-gather in a ring (Patarasuk and Yuan 2009).

    It takes 2(N - 1) steps of n/N bytes.

    Parameters
    ----------
    nbytes : float
        Bytes of the message, n.
    ranks : int
        Number of ranks, N.

    Returns
    -------
    Cost
        The cost of an all-reduce.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or less than 1.

    Examples
    --------
    >>> from shmring import model
    >>> model.ring(1000, 4).steps
    6
    """
    part = phase_nbytes(nbytes, ranks)
    return Cost(2 * _others(ranks), 2 * part, part, 2 * part)


def bidirectional_ring(nbytes: float, ranks: int, links: float = 1) -> Cost:
    """Return the cost of two opposite rings, each with half of the message.

    Parameters
    ----------
    nbytes, ranks
        As in `ring`.
    links : float
        2 if a rank has a link to each neighbour, as in a torus; the time for large messages is then half of a
        ring's. 1 if both halves share a link; the cost is then a ring's. 1.5 if two links together have the
        bandwidth of 1.5.

    Returns
    -------
    Cost
        The cost of an all-reduce.

    Raises
    ------
    TypeError, ValueError
        For a number of ranks that is not whole, or less than 1, or links that are not more than 0.

    Examples
    --------
    >>> from shmring import model
    >>> model.bidirectional_ring(1000, 4, links=2).nbytes
    750.0
    """
    if not links > 0:
        raise ValueError(f"{links} links; there must be more than 0")
    one = ring(nbytes, ranks)
    return Cost(one.steps, one.nbytes / float(links), one.folded_nbytes, one.sent_nbytes)


def direct(nbytes: float, ranks: int) -> Cost:
    """Return the cost of shmring's own algorithm: a reduce-scatter and an all-gather, each in one step.

    In a step, every rank sends to all others.

    Parameters
    ----------
    nbytes, ranks
        As in `ring`.

    Returns
    -------
    Cost
        The cost of an all-reduce.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or less than 1.

    Examples
    --------
    >>> from shmring import model
    >>> model.direct(1000, 4).steps
    2
    """
    part = phase_nbytes(nbytes, ranks)
    return Cost(2 * min(1, _others(ranks)), 2 * part, part, 2 * part)


def halving_doubling(nbytes: float, ranks: int) -> Cost:
    """Return the cost of recursive halving and doubling (Rabenseifner 2004).

    It takes 2 log2(N) steps if N is a power of two. Otherwise the ranks beyond the largest power of two send
    all their data before, and receive the result afterwards: 2 steps and 2n bytes more.

    Parameters
    ----------
    nbytes, ranks
        As in `ring`.

    Returns
    -------
    Cost
        The cost of an all-reduce.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or less than 1.

    Examples
    --------
    >>> from shmring import model
    >>> model.halving_doubling(1000, 4).steps
    4
    """
    ranks = _number("ranks", ranks)
    power = 1 << (ranks.bit_length() - 1)
    part = phase_nbytes(nbytes, power)
    extra = nbytes * (ranks > power)
    steps = 2 * _levels(power) + 2 * (ranks > power)
    return Cost(steps, 2 * part + 2 * extra, part + extra, 2 * part + extra)


def tree(nbytes: float, ranks: int) -> Cost:
    """Return the cost of a reduce and a broadcast along a binomial tree, without chunks.

    They take 2 ceil(log2(N)) steps of n bytes.

    Parameters
    ----------
    nbytes, ranks
        As in `ring`.

    Returns
    -------
    Cost
        The cost of an all-reduce.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or less than 1.

    Examples
    --------
    >>> from shmring import model
    >>> model.tree(1000, 4).steps
    4
    """
    levels = _levels(ranks)
    return Cost(2 * levels, 2 * levels * nbytes, levels * nbytes, levels * nbytes)


def double_tree(nbytes: float, ranks: int, chunks: int = 1) -> Cost:
    """Return the cost of two binary trees, each with half of the message (Sanders, Speck and Träff 2009).

    No rank has children in both trees. Chunks pass up, then down, in a pipeline of
    2(ceil(log2(N)) + chunks - 1) steps. With one chunk the cost is that of a tree; with many chunks the time
    tends to 2n/beta. With two ranks a parent has one child instead of two, so the bytes are half as many.

    Parameters
    ----------
    nbytes, ranks
        As in `ring`.
    chunks : int
        Number of chunks of each half.

    Returns
    -------
    Cost
        The cost of an all-reduce.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or less than 1.

    Examples
    --------
    >>> from shmring import model
    >>> model.double_tree(1000, 4, chunks=10).steps
    22
    """
    ranks, chunks = _number("ranks", ranks), _number("chunks", chunks)
    children = min(2, ranks - 1)
    steps = _levels(ranks) + chunks - 1 if ranks > 1 else 0
    half = steps * children * nbytes / (2 * chunks)
    sent_halves = {1: 0, 2: 2, 3: 3}.get(ranks, 4)  # two halves up, two down to the children
    return Cost(2 * steps, 2 * half, half, sent_halves * nbytes / 2)


def master(nbytes: float, ranks: int) -> Cost:
    """Return the cost if all ranks send all data to rank 0 and receive the result from rank 0.

    Parameters
    ----------
    nbytes, ranks
        As in `ring`.

    Returns
    -------
    Cost
        The cost of an all-reduce.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or less than 1.

    Examples
    --------
    >>> from shmring import model
    >>> model.master(1000, 4).steps
    2
    """
    all_others = _others(ranks) * nbytes
    return Cost(2 * min(1, _others(ranks)), 2 * all_others, all_others, all_others)


def parameter_server(nbytes: float, workers: int, servers: int = 1) -> Cost:
    """Return the cost if workers push to ranks that only serve, and pull from them (Li et al. 2014).

    Each of S servers has its part of the message. Nn/S bytes first enter a server's link, then as many leave
    it, since the sum must be complete first. A worker's link carries n bytes each way, which is more if there
    are more servers than workers.

    Parameters
    ----------
    nbytes : float
        Bytes of the message, n.
    workers, servers : int
        Numbers of workers, N, and of servers, S.

    Returns
    -------
    Cost
        The cost of a push and a pull.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or less than 1.

    Examples
    --------
    >>> from shmring import model
    >>> model.parameter_server(1000, 4).nbytes
    8000.0
    """
    part = _number("workers", workers) * nbytes / _number("servers", servers)
    busiest = max(part, nbytes)
    return Cost(2, 2 * busiest, part, busiest)


def hierarchical(nbytes: float, hosts: int, ranks: int) -> tuple[Cost, Cost]:
    """Return the two costs of a hierarchical all-reduce: inside each host, and between hosts.

    The ranks of a host reduce-scatter in memory, the ranks of different hosts that own the same slice
    exchange it, and the ranks of a host all-gather. The second cost is for a host's link, which its ranks
    share. One after the other, they take the sum of both times; if they overlap, as in shmring, they take
    little more than the longer of them.

    Parameters
    ----------
    nbytes : float
        Bytes of the message.
    hosts : int
        Number of hosts.
    ranks : int
        Number of ranks on each host.

    Returns
    -------
    tuple of Cost
        Inside a host, between hosts.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or less than 1.

    Examples
    --------
    >>> from shmring import model
    >>> inside, between = model.hierarchical(1000, hosts=2, ranks=4)
    >>> between.nbytes
    1000.0
    """
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
    """Return the cost of an algorithm. A double tree gets the best number of chunks.

    Parameters
    ----------
    algorithm : str
        One of ALGORITHMS.
    nbytes, ranks
        As in `ring`.
    link : Link
        The link.

    Returns
    -------
    Cost
        The cost of an all-reduce.

    Raises
    ------
    TypeError, ValueError
        For another algorithm, or as `ring`.

    Examples
    --------
    >>> from shmring import model
    >>> model.all_reduce("tree", 1000, 4, model.Link(1e-6, 1e9)).steps
    4
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}; the model has {', '.join(ALGORITHMS)}")
    if algorithm == "double_tree":
        return double_tree(nbytes, ranks, _best_chunks(nbytes, ranks, link))
    return ALGORITHMS[algorithm](nbytes, ranks)


def seconds(algorithm: str, nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-reduce of nbytes.

    Parameters
    ----------
    algorithm, nbytes, ranks, link
        As in `all_reduce`.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    TypeError, ValueError
        For another algorithm, or as `ring`.

    Examples
    --------
    >>> from shmring import model
    >>> model.seconds("direct", 0, 4, model.Link(alpha_s=1e-6, beta=1e9))
    2e-06
    """
    return all_reduce(algorithm, nbytes, ranks, link).seconds(link)


def _best_chunks(nbytes: float, ranks: int, link: Link) -> int:
    """Return the best k: each chunk costs 2 alpha, filling the pipeline takes (levels - 1)/k transfers."""
    bytes_s = min(2, _others(ranks)) * nbytes * (1 / link.beta + 1 / (2 * link.gamma))
    filling_s = max(_levels(ranks) - 1, 0) * bytes_s
    chunks = math.sqrt(filling_s / (2 * link.alpha_s)) if link.alpha_s else nbytes
    return max(1, min(round(chunks), int(nbytes)))


def crossover(ranks: int, link: Link, *, short: str = "tree", long: str = "ring") -> float:
    """Return the size from which on `long` is faster than `short`: 0 if always, infinity if never.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    link : Link
        The link.
    short, long : str
        Two of ALGORITHMS whose time is linear in the bytes: all but double_tree.

    Returns
    -------
    float
        Bytes.

    Raises
    ------
    ValueError
        For "double_tree", or for another algorithm.

    Examples
    --------
    >>> from shmring import model
    >>> round(model.crossover(8, model.Link(alpha_s=50e-6, beta=125e6)))
    11765
    """
    if "double_tree" in (short, long):
        raise ValueError("the time of a double_tree is not linear in the bytes: compare `seconds`")
    bare = Link(0, link.beta, link.gamma)
    later_s = seconds(long, 0, ranks, link) - seconds(short, 0, ranks, link)
    gained_s = seconds(short, 1, ranks, bare) - seconds(long, 1, ranks, bare)  # per byte
    if gained_s > 0:
        return max(0.0, later_s / gained_s)
    return 0.0 if gained_s == 0 and later_s <= 0 else math.inf


# ---- lower bounds of all algorithms -----------------------------------------------------------------------


def phase_nbytes(nbytes: float, ranks: int) -> float:
    """Return V(p - 1)/p: the fewest bytes that a rank can send in a reduce-scatter or an all-gather.

    Parameters
    ----------
    nbytes : float
        Bytes of all ranks' parts, V.
    ranks : int
        Number of ranks, p.

    Returns
    -------
    float
        Bytes.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or less than 1.

    Examples
    --------
    >>> from shmring import model
    >>> model.phase_nbytes(1000, 4)
    750.0
    """
    ranks = _number("ranks", ranks)
    return nbytes * (ranks - 1) / ranks


def phase_bound_s(nbytes: float, ranks: int, beta: float) -> float:
    """Return V(p - 1)/(p beta): the least time of a reduce-scatter or an all-gather.

    It is less than V/beta for any number of ranks. An all-reduce consists of both calls.

    Parameters
    ----------
    nbytes, ranks
        As in `phase_nbytes`.
    beta : float
        As in `Link`.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    TypeError, ValueError
        As `phase_nbytes`.

    Examples
    --------
    >>> from shmring import model
    >>> model.phase_bound_s(1e9, 4, beta=1e9)
    0.75
    """
    return phase_nbytes(nbytes, ranks) / beta


def redundant_nbytes(nbytes: float, ranks: int) -> float:
    """Return (p - 1)V: the bytes beyond one copy if each of p ranks holds all of V bytes.

    An all-gather makes these copies and moves as many bytes. So does a reduce-scatter, which removes them.

    Parameters
    ----------
    nbytes, ranks
        As in `phase_nbytes`.

    Returns
    -------
    float
        Bytes.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or less than 1.

    Examples
    --------
    >>> from shmring import model
    >>> model.redundant_nbytes(1000, 4)
    3000
    """
    return _others(ranks) * nbytes


# ---- a data-parallel step ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A data-parallel training step: the computation, then an all-reduce of the gradient by a ring.

    Parameters
    ----------
    gradient_nbytes : float
        Bytes of the gradient, D.
    compute_s : float
        Seconds of the computation, T_s. The all-reduce does not overlap with it.

    Raises
    ------
    ValueError
        For a negative number of bytes, or a time that is not positive.

    Examples
    --------
    >>> from shmring import model
    >>> training = model.Training(gradient_nbytes=1e9, compute_s=1.0)
    >>> training.efficiency(ranks=4, beta=1e9)
    0.4
    """

    gradient_nbytes: float
    compute_s: float

    def __post_init__(self) -> None:
        if not (self.gradient_nbytes >= 0 and self.compute_s > 0):
            raise ValueError(f"{self}: gradient_nbytes must be 0 or more, compute_s more than 0")

    def transfer_s(self, ranks: float, beta: float) -> float:
        """Return the transfer time T_t = 2D(n - 1)/(nS).

        Parameters
        ----------
        ranks : float
            Number of ranks, n; math.inf gives the limit.
        beta : float
            The bandwidth of a link, S, as in `Link`.

        Returns
        -------
        float
            Seconds.
        """
        return 2 * self.gradient_nbytes * (1 - 1 / ranks) / beta

    def step_s(self, ranks: float, beta: float) -> float:
        """Return the time of a step T_p = T_s + T_t.

        Parameters
        ----------
        ranks, beta
            As in `transfer_s`.

        Returns
        -------
        float
            Seconds.
        """
        return self.compute_s + self.transfer_s(ranks, beta)

    def efficiency(self, ranks: float, beta: float) -> float:
        """Return P = 1/(1 + T_t/T_s): the share of a step spent computing.

        Parameters
        ----------
        ranks, beta
            As in `transfer_s`.

        Returns
        -------
        float
            0 to 1.
        """
        return 1 / (1 + self.transfer_s(ranks, beta) / self.compute_s)

    def transfer_s_at(self, efficiency: float) -> float:
        """Return T_t = (1 - P)/P T_s: the longest transfer time for this efficiency.

        Parameters
        ----------
        efficiency : float
            P, more than 0 and less than 1.

        Returns
        -------
        float
            Seconds.

        Raises
        ------
        ValueError
            For another efficiency.
        """
        if not 0 < efficiency < 1:
            raise ValueError(f"efficiency is {efficiency}; it must be more than 0 and less than 1")
        return (1 - efficiency) / efficiency * self.compute_s

    def beta_for(self, efficiency: float, ranks: float) -> float:
        """Return S = 2DP(n - 1)/(n(1 - P)T_s): the bandwidth that this efficiency needs.

        Parameters
        ----------
        efficiency : float
            As in `transfer_s_at`.
        ranks : float
            As in `transfer_s`.

        Returns
        -------
        float
            Bytes per second.

        Raises
        ------
        ValueError
            For another efficiency.
        """
        return self.transfer_s(ranks, self.transfer_s_at(efficiency))


# ---- from measurements ------------------------------------------------------------------------------------


def message(nbytes: float) -> Cost:
    """Return the cost of one message from one rank to another.

    Parameters
    ----------
    nbytes : float
        Bytes of the message.

    Returns
    -------
    Cost
        The cost of one step.

    Examples
    --------
    >>> from shmring import model
    >>> model.message(1000).steps
    1
    """
    return Cost(1, nbytes, 0, nbytes)


def fit(sizes: Sequence[float], measured_s: Sequence[float], cost: Callable[[float], Cost] = message) -> Link:
    """Fit alpha and beta to the measured seconds of calls of these sizes.

    The fit minimises the sum of the squares of relative errors, so that small calls count as much as large
    ones. beta includes the folding. If the best alpha is negative, alpha is 0; if the best beta is negative,
    beta is infinity.

    Parameters
    ----------
    sizes : list of float
        Bytes.
    measured_s : list of float
        The seconds of a call of each size.
    cost : callable
        The cost of a call by its bytes, such as `lambda nbytes: ring(nbytes, 4)`; by default a single
        message.

    Returns
    -------
    Link
        The link.

    Raises
    ------
    ValueError
        For fewer than two sizes, another number of seconds than of sizes, seconds that are not positive, or
        calls that all have the same ratio of steps to bytes.

    Examples
    --------
    >>> from shmring import model
    >>> link = model.fit([1000, 2000], [3e-6, 5e-6])
    >>> round(link.alpha_s * 1e6, 6), round(link.beta / 1e6)
    (1.0, 500)
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


def _number(what: str, given: Any) -> int:
    """Return a number of ranks, servers and so on as an int of Python, which has no largest value."""
    is_whole = isinstance(given, Real) and given % 1 == 0
    number = int(given) if is_whole else integer(what, given)
    if number < 1:
        raise ValueError(f"{number} {what}; there must be 1 or more")
    return number


def _others(ranks: int) -> int:
    return _number("ranks", ranks) - 1


def _levels(ranks: int) -> int:
    """Return ceil(log2 N)."""
    return _others(ranks).bit_length()
