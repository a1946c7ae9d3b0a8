"""A parameter server: workers push gradients and pull weights, synchronously or asynchronously.

This module uses only a communicator's public API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

import shmring

from .._arguments import integer, refusing
from ..errors import agreed
from .flat import abort_after, check_arrays, check_rule, one_call_to_make
from .rules import SGD, Rule, apply, scratch_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SGD", "ParameterServer"]

_CHUNK = 1 << 16  # elements updated under one lock; they stay in the cache
_ROUND = 1 << 18  # elements of each slice exchanged at once; limits the workers' buffers
_PUSH, _PULL, _LEAVE, _PARAMS = range(4)  # tags
_GONE = 1 << 62  # steps of a worker that has left: no worker waits for it
_FOREVER_S = float("inf")  # ends only when a rank dies
_TOKEN = np.zeros(1, np.uint8)


class ParameterServer:
    """Parameters in slices on `servers`, which sum or apply the gradients of workers (Li et al. 2014).

    Making one is collective. All arguments but params are the same on every rank. Each gradient, or sum of
    gradients, that is applied is one step of the rule.

    `with ParameterServer(…) as server:` closes it at the end. If a rank leaves the block with an exception, a
    rank that waits, or starts to wait, raises Aborted with that exception as the reason. If `push` and `pull`
    are collective, comm has then ended.

    A worker that waits for others in `push` or `pull` raises Timeout after the communicator's timeout, as in
    any collective. Ranks that serve, and `close`, wait for as long as workers take. A wait uses no CPU. When
    a rank dies, a rank that waits, or starts to wait, raises RankFailed, which names the dead rank.

    Parameters
    ----------
    comm : Comm
        The communicator.
    params : numpy.ndarray
        Its shape and dtype (float32 or float64, in C order) are the same on every rank. The parameters begin
        with rank 0's values.
    rule : Rule
        The update: `SGD`, `Adam` or an object with their methods. With a list of servers, only they need it.
    servers : int or list of int
        A number: so many ranks, spread evenly, are servers and work as well. With staleness=0, `push` and
        `pull` are then collective over any number of hosts: gradients are sent to the server of their slice
        and summed there, and the slices are sent to all (as in BytePS with as many servers as ranks). With
        another staleness all ranks must be on one host: params are in memory that the ranks share, workers
        apply their gradients themselves by one-sided access, and the number has no effect.
        A list: these ranks only `serve`, until all other ranks, the workers, have called `leave` or `close`.
        All data are then sent by messages, on one host or several.
    staleness : int or None
        0 is synchronous: every step sums the gradients of all workers in rank order and applies the sum once,
        so the weights are bit by bit those of `all_reduce` and the same rule. k > 0 is the stale synchronous
        parallel model of Ho et al. (2013): each gradient is applied when it arrives, and `pull` waits while
        its worker is more than k steps ahead of the slowest. With None, `pull` never waits.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument of this rank; the other ranks get `Mismatch`. On all ranks, if servers,
        staleness or shapes differ, or if asynchronous workers are on several hosts without a list of servers.
    Error
        As `Comm.broadcast`.

    Examples
    --------
    >>> from shmring.methods.server import SGD, ParameterServer
    >>> weights = np.ones(3)
    >>> with ParameterServer(comm, weights, SGD(0.25)) as server:
    ...     server.step(np.ones(3), weights)  # the sum of two ranks' gradients
    >>> weights
    array([0.5, 0.5, 0.5])
    """

    @one_call_to_make
    def __init__(
        self,
        comm: shmring.Comm,
        params: NDArray[Any],
        rule: Rule,
        *,
        servers: int | Sequence[int] = 1,
        staleness: int | None = 0,
    ) -> None:
        with refusing(comm, "broadcast"):
            _check_array(params)
            _check_staleness(staleness)
            ranks, dedicated = _server_ranks(comm, servers)
            if not dedicated or comm.rank in ranks:
                check_rule(rule)
        self.shape, self.dtype = params.shape, params.dtype
        begin = params.reshape(-1).copy()
        comm.broadcast(begin)
        given = comm.all_gather_object((ranks, dedicated, staleness, params.shape))
        if any(each != given[0] for each in given):
            raise agreed(ValueError("the ranks give different servers, staleness or shapes; give the same"))
        slices = dict(zip(ranks, _split(begin.size, len(ranks)), strict=True))
        self._comm = comm
        self._has_left = self._is_closed = False
        self._serving: _Serving | None = None
        self._way: _Collective | _OneSided | _Remote
        if dedicated:
            self._comm = own = comm.dup()
            self._way = _Remote(own, slices)
            if comm.rank in slices:
                workers = [rank for rank in range(comm.size) if rank not in slices]
                part = _Slice(begin[slices[comm.rank]].copy(), rule)
                self._serving = _Serving(own, part, workers, staleness)
        elif staleness == 0:
            self._way = _Collective(comm, begin, slices, rule)
        elif comm.num_nodes > 1:
            raise agreed(
                ValueError("asynchronous workers of several hosts need ranks that only serve: servers=[0]")
            )
        else:
            self._comm = comm.dup()
            own = self._comm  # an exception in the middle has to end this one, too
            self._way = own.run_steps(lambda: _OneSided(own, begin, rule, _Pace(own, staleness)), begun=True)

    @property
    def serves(self) -> bool:
        """True if this rank only serves: it calls only `serve` and `close`."""
        return self._serving is not None

    @property
    def most_ahead(self) -> int:
        """The most steps that a worker was ahead of the slowest when a `pull` continued.

        On a rank that only serves, of all workers; otherwise of this worker. 0 on workers of ranks that only
        serve.
        """
        return self._way.most_ahead if self._serving is None else self._serving.most_ahead

    @property
    def served_nbytes(self) -> int:
        """Bytes of gradients received and of params sent, on a rank that only serves; 0 on other ranks."""
        return 0 if self._serving is None else self._serving.served_nbytes

    def push(self, gradient: NDArray[Any]) -> None:
        """Send a gradient to the servers: one step of this worker.

        Parameters
        ----------
        gradient : numpy.ndarray
            Contiguous in C order, of params' shape and dtype. Asynchronous workers of one host pass it to the
            rule, which may change it; `SGD` and `Adam` do not.

        Raises
        ------
        TypeError, ValueError
            For a wrong array. If `push` is collective, the other ranks get `Mismatch`.
        Error
            See `ParameterServer`.
        """
        self._check(gradient, "reduce")
        self._run(self._way.push, gradient.reshape(-1))

    def pull(self, out: NDArray[Any]) -> None:
        """Copy the current params to out.

        Parameters
        ----------
        out : numpy.ndarray
            Writable and contiguous in C order, of params' shape and dtype.

        Raises
        ------
        TypeError, ValueError, Error
            As `push`.
        """
        self._check(out, "all_gather", is_written=True)
        self._run(self._way.pull, out.reshape(-1))

    def step(self, gradient: NDArray[Any], out: NDArray[Any]) -> None:
        """Call `push`, then `pull`. Return once `out` has the params.

        With `staleness=0` that is after the pushes of all workers for this step.

        Parameters
        ----------
        gradient, out : numpy.ndarray
            As in `push` and `pull`. They may be the same array.

        Raises
        ------
        TypeError, ValueError, Error
            As `push` and `pull`.
        """
        self.push(gradient)
        self.pull(out)

    def serve(self) -> None:
        """Serve until all workers have left. Only for ranks in a list of servers.

        Raises
        ------
        ValueError
            On a worker.
        Error
            See `ParameterServer`.
        """
        if self._serving is None:
            raise ValueError("this rank is a worker: it pushes and pulls; only ranks in `servers` serve")
        self._serving.serve()

    def leave(self) -> None:
        """Declare that this worker is done: no `pull` and no server waits for it. `close` also does this.

        If `push` and `pull` are collective, it has no effect on other ranks.

        Raises
        ------
        Error
            See `ParameterServer`.
        """
        if self._serving is not None or isinstance(self._way, _Collective):
            self._has_left = True
        elif not self._has_left:
            self._run(self._leave, self._way)

    def close(self) -> None:
        """Leave, and block until all ranks have left. Collective. A second close does nothing.

        Raises
        ------
        Error
            See `ParameterServer`.
        """
        self.leave()
        if not isinstance(self._way, _Collective) and not self._is_closed:
            self._comm.barrier(timeout=_FOREVER_S)
            self._comm.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        abort_after(self._comm, error, f"rank {self._comm.rank} left with {type(error).__name__}: {error}")

    def _leave(self, way: _OneSided | _Remote) -> None:
        """Execute `leave`. An exception must end the communicator: a worker must not leave twice."""
        way.leave()
        self._has_left = True

    def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a method of `_way` as one call, so that an exception in the middle ends the communicator.

        Other ranks may wait for the rest of the call. Messages and one-sided access are no collectives, so
        `begun` says that any exception is in the middle.
        """
        self._comm.run_steps(function, *arguments, begun=not isinstance(self._way, _Collective))

    def _check(
        self, array: NDArray[Any], kind: Literal["reduce", "all_gather"], is_written: bool = False
    ) -> None:
        """Check an argument. kind: the collective that other ranks call, if push and pull are collective."""
        if self._serving is not None:
            raise ValueError("this rank serves; the workers push and pull")
        if self._has_left:  # The other ranks need not be in the call.
            raise ValueError("this worker has left; push and pull before `leave` and `close`")
        try:
            _check_array(array)
            if array.shape != self.shape or array.dtype != self.dtype:
                raise ValueError(
                    f"an array of {array.dtype}{list(array.shape)} for params of "
                    f"{self.dtype}{list(self.shape)}"
                )
            if is_written and not array.flags.writeable:
                raise ValueError("out is read-only; pass a writable array")
        except (TypeError, ValueError):
            if isinstance(self._way, _Collective):
                self._comm.refuse(kind)
            raise


# ---- storage of params ----------------------------------------------------------------------------------


class _Slice:
    """A slice of the params with the rule's state."""

    def __init__(self, params: NDArray[Any], rule: Rule) -> None:
        self.params = params
        self._rule, self._steps = rule, 0
        self._state = [np.zeros_like(params) for _ in range(rule.num_states)]
        self._scratch = scratch_for(params.dtype)

    def apply(self, gradient: NDArray[Any]) -> None:
        self._steps += 1
        apply(self._rule, self.params, gradient, self._state, self._scratch, self._steps)


class _Collective:
    """Synchronous: send gradients to the server of their slice, sum in rank order, send the slices to all."""

    most_ahead = 0

    def __init__(
        self, comm: shmring.Comm, params: NDArray[Any], slices: dict[int, slice], rule: Rule
    ) -> None:
        self._comm = comm
        self._parts = [slices.get(rank, slice(0, 0)) for rank in range(comm.size)]
        self._own = _Slice(params[self._parts[comm.rank]].copy(), rule)
        self._sum = np.empty_like(self._own.params)
        self._root = next(iter(slices)) if len(slices) == 1 else None
        longest = max(part.stop - part.start for part in self._parts)
        self._rounds = list(_chunks(longest, _ROUND)) if self._root is None else []
        self._inboxes = np.empty((comm.size, min(_ROUND, longest) if self._rounds else 0), params.dtype)

    def push(self, gradient: NDArray[Any]) -> None:
        if self._root is not None:
            self._comm.reduce(gradient, root=self._root, out=self._sum if self._sum.size else None)
        for chunk in self._rounds:
            total = self._sum[chunk]
            inboxes = list(self._inboxes[:, : total.size])
            inboxes[0] = total
            self._comm.all_to_all_v([gradient[part][chunk] for part in self._parts], out=inboxes)
            for more in inboxes[1:]:
                np.add(total, more, out=total)
        self._own.apply(self._sum)

    def pull(self, out: NDArray[Any]) -> None:
        if self._root is None:
            self._comm.all_gather_v(self._own.params, out=[out[part] for part in self._parts])
        elif self._comm.rank == self._root:
            self._comm.broadcast(self._own.params, self._root, out=out)
        else:
            self._comm.broadcast(out, self._root)


class _OneSided:
    """Asynchronous on one host: params in shared memory, updated by the worker that has a gradient.

    No messages are sent to servers. Plain SGD is an addition, which `accumulate` does range by range. Other
    rules read the values that they change, so each chunk has a lock, which `pull` takes as well.
    """

    def __init__(self, comm: shmring.Comm, params: NDArray[Any], rule: Rule, pace: _Pace) -> None:
        self._chunks = list(_chunks(params.size, _CHUNK))
        self._comm = comm
        self._params = comm.shared(params.size, params.dtype, locks=len(self._chunks))
        self._state = [comm.shared(params.size, params.dtype) for _ in range(rule.num_states)]
        self._steps = comm.shared(1, "i8")  # of all workers
        self._rule, self._scratch = rule, scratch_for(params.dtype)
        self._plain = rule if type(rule) is SGD and not rule.momentum else None
        self._addition = np.empty_like(params) if self._plain else params
        self._pace = pace
        if comm.rank == 0:
            self._params.put(..., params)
        self._params.fence()

    @property
    def most_ahead(self) -> int:
        return self._pace.most_ahead

    def push(self, gradient: NDArray[Any]) -> None:
        if self._plain:
            np.multiply(gradient, -self._plain.lr, out=self._addition)
            self._params.accumulate(..., self._addition)
        else:
            step = int(self._steps.fetch_and_add(0, 1)) + 1
            for number, chunk in enumerate(self._chunks):
                with self._params.lock(number):
                    state = [each[chunk] for each in self._state]
                    apply(self._rule, self._params[chunk], gradient[chunk], state, self._scratch, step)
        self._pace.advance(1)

    def pull(self, out: NDArray[Any]) -> None:
        self._pace.keep()
        if self._plain:
            self._params.get(out=out)
        else:
            for number, chunk in enumerate(self._chunks):
                with self._params.lock(number):
                    out[chunk] = self._params[chunk]

    def leave(self) -> None:
        self._pace.advance(_GONE)


class _Pace:
    """The steps of each worker, and the workers that wait for the slowest, in shared memory.

    A worker sets its wait flag under the lock that protects the step counts, then sleeps in a receive. The
    worker that makes it ready clears the flag and sends the message. So no worker polls, and the death of a
    rank ends the receive.
    """

    def __init__(self, comm: shmring.Comm, staleness: int | None) -> None:
        self._comm = comm
        self._staleness = _GONE if staleness is None else staleness
        self._shared = comm.shared((2, comm.size), "i8", locks=1)
        self._steps, self._waits = np.asarray(self._shared)
        self.most_ahead = 0

    def advance(self, steps: int) -> None:
        """Count steps, and let the workers continue that waited for them."""
        with self._shared.lock(0):
            self._steps[self._comm.rank] += steps
            ready = np.flatnonzero(self._waits & (self._steps - self._steps.min() <= self._staleness))
            self._waits[ready] = 0
        for rank in ready.tolist():
            self._comm.send(_TOKEN, rank)

    def keep(self) -> None:
        """Block until this worker may continue."""
        if (ahead := self._ahead()) > self._staleness:
            self._comm.recv(np.empty_like(_TOKEN))
            ahead = self._ahead()
        self.most_ahead = max(self.most_ahead, ahead)

    def _ahead(self) -> int:
        """Return the steps that this worker is ahead of the slowest; set its wait flag if it must wait."""
        with self._shared.lock(0):
            ahead = int(self._steps[self._comm.rank] - self._steps.min())
            self._waits[self._comm.rank] = ahead > self._staleness
        return ahead


# ---- by messages ----------------------------------------------------------------------------------------


class _Remote:
    """A worker whose servers are ranks that only serve."""

    most_ahead = 0

    def __init__(self, comm: shmring.Comm, slices: dict[int, slice]) -> None:
        self._comm = comm
        self._slices = slices

    def push(self, gradient: NDArray[Any]) -> None:
        _finish([self._comm.isend(gradient[part], server, _PUSH) for server, part in self._slices.items()])

    def pull(self, out: NDArray[Any]) -> None:
        coming = [self._comm.irecv(out[part], server, _PARAMS) for server, part in self._slices.items()]
        for server in self._slices:
            self._comm.send(_TOKEN, server, _PULL)
        _finish(coming)

    def leave(self) -> None:
        for server in self._slices:
            self._comm.send(_TOKEN, server, _LEAVE)


class _Serving:
    """A rank that only serves: its slice, and the steps of each worker."""

    def __init__(
        self, comm: shmring.Comm, own: _Slice, workers: Iterable[int], staleness: int | None
    ) -> None:
        self._comm = comm
        self._own = own
        self._staleness = _GONE if staleness is None else staleness
        self._steps = dict.fromkeys(workers, 0)  # workers that have not left
        self._waiting: list[int] = []
        self._inbox, self._sum = np.empty_like(own.params), np.empty_like(own.params)
        self.most_ahead = self.served_nbytes = 0

    def serve(self) -> None:
        self._comm.run_steps(self._serve, begun=True)

    def _serve(self) -> None:
        while self._steps:
            if self._staleness == 0:
                self._take_in_step()
            else:
                found = self._comm.probe(timeout=_FOREVER_S)
                self._take(found.source, found.tag)
                self._let_go_on()

    def _take_in_step(self) -> None:
        """Receive one message of every worker, in rank order; sum the gradients, then apply the sum."""
        first: tuple[int, int] | None = None  # the first worker that has not left, and its tag
        for worker in tuple(self._steps):
            tag = self._comm.probe(worker, timeout=_FOREVER_S).tag
            if first is not None and tag not in (_LEAVE, first[1]):
                self._refuse_round((first, (worker, tag)))
            if tag != _PUSH:
                self._take(worker, tag)
            elif first is None:
                self._receive(self._sum, worker)
            else:
                self._receive(self._inbox, worker)
                np.add(self._sum, self._inbox, out=self._sum)
            if first is None and tag != _LEAVE:
                first = worker, tag
        if first is not None and first[1] == _PUSH:
            self._own.apply(self._sum)
        self._let_go_on()

    def _refuse_round(self, given: Iterable[tuple[int, int]]) -> None:
        """Abort: a worker pushes while another one pulls, so their steps are no longer the same."""
        shown = ", ".join(f"worker {worker} {'pushes' if tag == _PUSH else 'pulls'}" for worker, tag in given)
        self._comm.abort(f"the workers' calls do not match: {shown}; with staleness=0 they must")
        self._comm.iprobe()  # raises it

    def _take(self, worker: int, tag: int) -> None:
        if tag == _PUSH:
            self._receive(self._inbox, worker)
            self._own.apply(self._inbox)
            self._steps[worker] += 1
            return
        self._comm.recv(np.empty_like(_TOKEN), worker, tag)
        if tag == _PULL:
            self._waiting.append(worker)
        else:
            del self._steps[worker]

    def _receive(self, gradient: NDArray[Any], worker: int) -> None:
        self._comm.recv(gradient, worker, _PUSH)
        self.served_nbytes += gradient.nbytes

    def _let_go_on(self) -> None:
        slowest = min(self._steps.values(), default=_GONE)
        for worker in tuple(self._waiting):
            ahead = self._steps[worker] - slowest
            if ahead <= self._staleness:
                self.most_ahead = max(self.most_ahead, ahead)
                self._waiting.remove(worker)
                self._comm.send(self._own.params, worker, _PARAMS)
                self.served_nbytes += self._own.params.nbytes


# ---- arguments ------------------------------------------------------------------------------------------


def _check_staleness(staleness: int | None) -> None:
    if staleness is not None and integer("staleness", staleness) < 0:
        raise ValueError(f"staleness is {staleness}; it must be 0 or more steps, or None for any number")


def _server_ranks(comm: shmring.Comm, servers: int | Sequence[int]) -> tuple[list[int], bool]:
    """Return the ranks that have a slice, and True if they only serve."""
    if not isinstance(servers, Iterable):
        count = integer("servers", servers)
        if not 1 <= count <= comm.size:
            raise ValueError(f"servers is {count}; allowed: 1 to {comm.size}, the number of ranks, or a list")
        return [number * comm.size // count for number in range(count)], False
    ranks = [integer("a server", rank) for rank in servers]
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < comm.size for rank in ranks):
        raise ValueError(f"servers is {ranks}; it must name one or more of {comm.size} ranks, each once")
    if len(ranks) == comm.size:
        raise ValueError("every rank is in the list of servers, so there is no worker: leave one out")
    return ranks, True


def _split(count: int, parts: int) -> list[slice]:
    return [slice(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def _chunks(count: int, most: int) -> Iterator[slice]:
    return (slice(begin, min(count, begin + most)) for begin in range(0, count, most))


def _finish(transfers: Iterable[shmring.Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _check_array(array: NDArray[Any]) -> None:
    check_arrays([array])
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(
            f"params and gradients are arrays of float32 or float64; this one is of {array.dtype}"
        )
    if not array.flags.c_contiguous:
        raise ValueError("this array is not contiguous in C order; pass a copy, np.array(x, order='C')")
