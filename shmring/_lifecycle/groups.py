"""Groups of a communicator's ranks: find the members of each group, and start the groups.

Functions take an engine, the sockets to local ranks, and the InterNodeLinks to other hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from .._arguments import integer
from .._bootstrap.join import World
from .._system.deadline import Deadline
from .._system.limits import explain
from ..errors import Error, Mismatch, RankFailed
from .startup import CommParts, begin, join_and_begin

if TYPE_CHECKING:
    from .._bootstrap.fd_passing import LocalSockets
    from .._bootstrap.framed_socket import Check
    from .._comm.comm import Comm
    from .._config.settings import Settings
    from .._engine.engine import Engine
    from .internode import InterNodeLinks, Invitation

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_WORD = np.iinfo(np.int64)
_ABORT_S = 1.0  # the parent's connection shows a death at most this much later than the group's


def pack_color(color: SupportsIndex | None, key: SupportsIndex) -> Numbers:
    """Return the numbers that a rank sends: 1 if it joins a group, else 0; its color; its key."""
    if color is None:
        return np.array([0, 0, 0], "i8")
    return np.array([1, _word("color", color), _word("key", key)], "i8")


def by_color(packed: Numbers) -> list[list[int]]:
    """Return the groups that the ranks' colors define, in order of color, each ordered by key and rank."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for rank, (wanted, color, key) in enumerate(packed.tolist()):
        if wanted:
            groups.setdefault(color, []).append((key, rank))
    return [[rank for _, rank in sorted(groups[color])] for color in sorted(groups)]


def listed(ranks: Iterable[SupportsIndex], size: int) -> Numbers:
    """Return the ranks of a group, checked."""
    try:
        given = list(ranks)
    except TypeError:
        raise TypeError(f"ranks is {ranks!r:.60}; give a list of ranks") from None
    numbers = [_word("a rank", rank) for rank in given]
    for number in numbers:
        if not 0 <= number < size:
            raise ValueError(f"ranks names {number}; the ranks are 0 to {size - 1}")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"ranks is {numbers}; a rank can be in a group only once")
    return np.array(numbers, "i8")


def check_same(lists: Numbers) -> None:
    """Raise Mismatch unless every rank gave the same list."""
    calls = tuple(f"group({ranks})" for ranks in lists.tolist())
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if other is not None:
        pair = f"rank 0 called {calls[0]}; rank {other} called {calls[other]}"
        text = f"the ranks' groups do not match: {pair}; every rank must give the same list"
        raise Mismatch(text, rank=other, op="group", calls=calls)


def form(
    engine: Engine, local_sockets: LocalSockets, groups: list[list[int]], settings: Settings, timeout_s: float
) -> tuple[CommParts, tuple[int, ...]] | None:
    """Collective over `engine`: return the parts of this rank's group and its ranks, or None.

    If a group cannot start, its ranks raise. If a rank gets no sockets, or dies, all ranks raise.
    """
    own = _introduce(engine, local_sockets, groups, timeout_s)
    if own is None:
        return None
    parts = None
    try:
        ranks = tuple(next(group for group in groups if engine.rank in group))
        parts = begin(own, settings, engine.timeout_s, deadline=Deadline(timeout_s), parent=engine)
        return parts, ranks
    except BaseException as error:
        if parts is not None:
            parts.engine.abandon(parts)
        own.close()
        if isinstance(error, Error):
            own_ranks = f"its ranks 0 to {len(ranks) - 1} are {list(ranks)} of its parent"
            error.add_note(f"while a group began: {own_ranks}")
        raise


def form_across(
    comm: Comm,
    engine: Engine,
    internode: InterNodeLinks,
    groups: list[list[int]],
    settings: Settings,
    timeout_s: float,
) -> tuple[CommParts, tuple[int, ...]] | None:
    """Form groups of ranks on several hosts: each group meets as a world of its own. See `form`."""
    deadline = Deadline(timeout_s)
    ranks = next((group for group in groups if comm.rank in group), [])
    is_leader = ranks[:1] == [comm.rank]
    listener, answer = _invite(internode, settings, len(ranks)) if is_leader else (None, _why_not_to_come(1))
    parts = None
    try:
        with listener or contextlib.nullcontext():
            answers = comm.all_gather_object(answer, timeout=timeout_s)
            if not ranks:
                return None
            for rank in ranks:
                if isinstance(answers[rank], str):
                    raise Error(f"rank {rank} cannot come to its group: {answers[rank]}", rank=rank)
            world = internode.world(len(ranks), answers[ranks[0]])

            with _preferring_the_parents_error(RankFailed, engine.poll):
                parts = join_and_begin(
                    world,
                    ranks.index(comm.rank),
                    settings,
                    engine.timeout_s,
                    deadline=deadline,
                    check=engine.poll,
                    listener=listener,
                    is_invited=True,
                    parent=engine,
                )
                return parts, tuple(ranks)
    except BaseException:
        if parts is not None:
            parts.engine.abandon(parts)
        raise


def form_of_callers(
    rank: int,
    engine: Engine,
    internode: InterNodeLinks | None,
    ranks: tuple[int, ...],
    secret: bytes,
    share: Callable[[Any], Any],
    settings: Settings,
    timeout_s: float,
) -> CommParts:
    """Form a group whose ranks alone call this: they meet as a world of their own.

    rank: this rank's number in the parent. secret: the same bytes on all ranks of the group, for this group
    only. share: returns the value that ranks[0] passes, on each rank of the group.
    """
    deadline, check = Deadline(timeout_s), _check_of(engine)
    key, address, listener, parts = secret, None, None, None
    # After an error a rank waits for the parent's error. ranks[0] waits _ABORT_S, and then ends the parent.
    within_s = _ABORT_S if rank == ranks[0] else 2 * _ABORT_S
    try:
        with _preferring_the_parents_error(Error, check, within_s):
            if internode is not None and len(ranks) > 1:
                # The secret may have been sent over the network.
                key = hashlib.sha256(internode.key + secret).digest()
                listener, address = _meeting_point(internode, settings, ranks, rank == ranks[0], share)
            world = World(hashlib.sha256(b"group" + secret).hexdigest(), key, len(ranks), address)
            parts = join_and_begin(
                world,
                ranks.index(rank),
                settings,
                engine.timeout_s,
                deadline=deadline,
                check=check,
                listener=listener,
                is_invited=address is not None,
                parent=engine,
            )
            return parts
    except BaseException:
        if parts is not None:
            parts.engine.abandon(parts)
        raise
    finally:
        if listener is not None:
            listener.close()


def _check_of(engine: Engine) -> Check:
    """Return a function that raises if a rank of the engine has ended. Other threads may be inside calls."""

    def check() -> None:
        try:
            engine.poll()
        except Error:
            raise
        except RuntimeError:
            pass  # another thread is inside a call, which notices the end of a rank itself

    return check


def _meeting_point(
    internode: InterNodeLinks,
    settings: Settings,
    ranks: tuple[int, ...],
    is_leader: bool,
    share: Callable[[Any], Any],
) -> tuple[socket.socket | None, str]:
    """Return the address at which the leader of a group listens, and on the leader also the listener."""
    listener = None
    if is_leader:
        listener, answer = _invite(internode, settings, len(ranks))
    else:
        answer = None
    try:
        answer = share(answer)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    if isinstance(answer, str):
        raise Error(f"rank {ranks[0]} cannot come to its group: {answer}", rank=ranks[0])
    return listener, answer[1]


@contextlib.contextmanager
def _preferring_the_parents_error(
    kind: type[Error], check: Check, within_s: float = _ABORT_S
) -> Iterator[None]:
    """Replace an error of this kind by the parent's error, if the parent reports one in time.

    All ranks of the parent then raise it. The parent may notice a death later than the group.
    """
    try:
        yield
    except kind:
        raise_soon(check, within_s)
        raise


def raise_soon(check: Check, within_s: float = _ABORT_S) -> None:
    """Raise the error that `check` raises within a time, if it raises one."""
    deadline = Deadline(within_s)
    while not deadline.is_over():
        try:
            check()
        except Error as error:
            raise error from None  # without context: it is the same failure
        time.sleep(0.005)


def _invite(
    internode: InterNodeLinks, settings: Settings, nranks: int
) -> tuple[socket.socket | None, Invitation | str]:
    """Return a listener and its invitation, or None and the reason why this rank cannot listen.

    The listener stays open until the group has met, so that no other process takes the port.
    """
    try:
        lacking = _why_not_to_come(nranks + 2)  # the listener, its epoll, and one for each rank
        return (None, lacking) if lacking else internode.listen(settings.ports)
    except Error as error:
        return None, str(error)


def _why_not_to_come(ndescriptors: int) -> str | None:
    """Return why this rank could not connect to the others (too few descriptors), else None."""
    sockets: list[socket.socket | None] = [None] * ndescriptors
    try:
        for number in range(ndescriptors):
            sockets[number] = socket.socket()
    except OSError as error:
        return str(explain(error, "connecting to the other ranks"))
    finally:
        for each in sockets:
            if each is not None:
                each.close()
    return None


def _introduce(
    engine: Engine, local_sockets: LocalSockets, groups: list[list[int]], timeout_s: float
) -> LocalSockets | None:
    """Return this rank's sockets in its group, once every rank has its own."""
    own, deadline = None, Deadline(timeout_s)
    try:
        own, failure = local_sockets.introduce(groups, check=engine.check, deadline=deadline)
        if engine.all_agree(failure is None, timeout_s):
            return own
    except BaseException as error:
        if own is not None:
            own.close()
        engine.abort_outside_call(error)
        raise
    if own is not None:
        own.close()
    rank = engine.world_rank(engine.rank)
    raise failure or Error(
        f"a rank other than {rank} could not open its sockets for its group: the error of that rank says why "
        "and what to do"
    )


def _word(what: str, number: SupportsIndex) -> int:
    found = integer(what, number)
    if not _WORD.min <= found <= _WORD.max:
        raise ValueError(f"{what} is {found}; it must fit into 64 bits")
    return found
