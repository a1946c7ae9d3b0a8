"""Rank 0's descriptors reach all ranks, or all ranks get the reason why not."""

import contextlib
import os
import resource
import threading
import time

import pytest
from rendezvous import close, in_threads, meet, nothing, soon, then_notify

import shmring
from shmring._bootstrap import handshake
from shmring._bootstrap.fd_passing import LocalSockets
from shmring._system import segments
from shmring._system.deadline import Deadline
from shmring.errors import Aborted, Error, OutOfMemory, RankFailed, Timeout

# --- descriptors ---


def broadcasting(sockets, fd=None, *, check=nothing, deadline=None):
    return lambda: sockets.broadcast_fd(fd, check=check, deadline=deadline or soon())


def test_a_descriptor_reaches_all_as_one_of_their_own():
    sockets = meet(4)
    fd = segments.create(4096, kind="memfd")
    fds = in_threads(broadcasting(sockets[0], fd), *(broadcasting(socks) for socks in sockets[1:]))
    assert fds[0] == fd
    assert len(set(fds)) == 4
    for other in fds[1:]:
        assert os.path.sameopenfile(fd, other)
        assert not os.get_inheritable(other)
    for one in fds:
        os.close(one)
    close(sockets)


def test_descriptors_arrive_in_order():
    sockets = meet(3)
    fds = [segments.create(4096 * (at + 1), kind="memfd") for at in range(20)]
    for fd in fds:
        sockets[0].broadcast_fd(fd, check=nothing, deadline=soon())
    for socks in sockets[1:]:
        for at in range(20):
            got = socks.broadcast_fd(None, check=nothing, deadline=soon())
            assert os.fstat(got).st_size == 4096 * (at + 1)
            os.close(got)
    for fd in fds:
        os.close(fd)
    close(sockets)


def test_rank_0_has_to_give_one():
    sockets = meet(2)
    with pytest.raises(ValueError, match="rank 0"):
        sockets[0].broadcast_fd(None, check=nothing, deadline=soon())
    close(sockets)


@pytest.mark.parametrize(
    ("reported", "kind"),
    [
        (Error("no memory here", rank=0), Error),
        (OutOfMemory("full", wanted_nbytes=5), OutOfMemory),
        (KeyboardInterrupt(), Aborted),
        (ValueError("odd"), Aborted),
    ],
)
def test_rank_0_tells_why_there_is_none(reported, kind):
    sockets = meet(3)
    sockets[0].fail_fd(reported)
    for socks in sockets[1:]:
        with pytest.raises(kind) as caught:
            socks.broadcast_fd(None, check=nothing, deadline=soon())
        assert type(caught.value) is kind
    close(sockets)


def test_the_check_is_called_often_and_may_raise():
    sockets = meet(2)
    begin = time.monotonic()

    def check():
        if time.monotonic() - begin > 0.1:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        sockets[1].broadcast_fd(None, check=check, deadline=soon())
    close(sockets)


def test_the_deadline_holds():
    sockets = meet(2)
    with pytest.raises(Timeout, match="rank 0") as caught:
        sockets[1].broadcast_fd(None, check=nothing, deadline=Deadline(0.1))
    assert caught.value.rank == 0
    close(sockets)


def test_a_receiver_that_never_takes_them_is_named_by_the_deadline():
    sockets = meet(2)
    fd = segments.create(4096, kind="memfd")

    def never_taken():
        while True:
            sockets[0].broadcast_fd(fd, check=nothing, deadline=Deadline(0.1))

    with pytest.raises(Timeout, match="rank 1 did not receive") as caught:
        never_taken()
    assert caught.value.rank == 1
    os.close(fd)
    close(sockets)


def test_a_closed_peer_is_a_failed_rank():
    sockets = meet(3)
    fd = segments.create(4096, kind="memfd")
    sockets[2].close()
    with pytest.raises(RankFailed) as caught:
        sockets[0].broadcast_fd(fd, check=nothing, deadline=soon())
    assert caught.value.rank == 2
    sockets[0].close()
    os.close(sockets[1].broadcast_fd(None, check=nothing, deadline=soon()))  # that one was sent
    with pytest.raises(RankFailed) as caught:
        sockets[1].broadcast_fd(None, check=nothing, deadline=soon())
    assert caught.value.rank == 2  # rank 0 could still send the reason
    with pytest.raises(RankFailed) as caught:
        sockets[1].broadcast_fd(None, check=nothing, deadline=soon())
    assert caught.value.rank == 0
    os.close(fd)
    close(sockets)


def test_no_room_for_a_descriptor_says_so():
    sockets = meet(2)
    fd = segments.create(4096, kind="memfd")
    sockets[0].broadcast_fd(fd, check=nothing, deadline=soon())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    blockers, limit = [], max(map(int, os.listdir("/proc/self/fd"))) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                blockers.append(os.dup(fd))
        with pytest.raises(Error, match="ulimit -n"):
            sockets[1].broadcast_fd(None, check=nothing, deadline=soon())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for blocker in (*blockers, fd):
            os.close(blocker)
    close(sockets)


def test_closing_twice_is_fine_and_closes_everything():
    before = len(os.listdir("/proc/self/fd"))
    sockets = meet(3)
    close(sockets)
    close(sockets)
    assert len(os.listdir("/proc/self/fd")) == before


# --- sockets for groups, and coming together ---


def introducing(sockets, groups):
    return lambda: sockets.introduce(groups, check=nothing, deadline=soon())


def readying(sockets, deadline=None):
    return lambda: sockets.all_ready(check=nothing, deadline=deadline or soon())


def test_groups_get_stars_of_their_own():
    sockets, before = meet(6), len(os.listdir("/proc/self/fd"))
    groups = [[4, 0, 2], [5], [1, 3]]
    coordinators = [
        found for found, failure in in_threads(*(introducing(socks, groups) for socks in sockets))
    ]
    close(sockets)
    assert [(coordinator.rank, coordinator.size) for coordinator in coordinators] == [
        (1, 3),
        (0, 2),
        (2, 3),
        (1, 2),
        (0, 3),
        (0, 1),
    ]
    for group in groups:
        fd = segments.create(4096, kind="memfd")
        own = [coordinators[rank] for rank in group]
        assert in_threads(*(readying(coordinator) for coordinator in own)) == [None] * len(own)
        fds = in_threads(broadcasting(own[0], fd), *(broadcasting(coordinator) for coordinator in own[1:]))
        assert all(os.path.sameopenfile(fd, other) for other in fds)
        for one in fds:
            os.close(one)
    close(coordinators)
    assert len(os.listdir("/proc/self/fd")) == before - 11  # both ends of five sockets, the marker


def test_ranks_in_no_group_get_none():
    sockets = meet(3)
    found = in_threads(*(introducing(socks, [[1]]) for socks in sockets))
    assert [coordinator is None for coordinator, _ in found] == [True, False, True]
    close(sockets)


@pytest.mark.parametrize("failing", [0, 2])
def test_why_one_cannot_begin_reaches_all_that_wait(failing):
    sockets = meet(4)

    def fail():
        sockets[failing].fail_fd(OutOfMemory("full", wanted_nbytes=7))
        sockets[failing].close()

    others = [readying(socks) for at, socks in enumerate(sockets) if at != failing]
    outcomes = in_threads(fail, *others)
    for error in outcomes[1:]:
        assert isinstance(error, OutOfMemory)
        assert error.wanted_nbytes == 7
    close(sockets)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_ends_before_it_is_ready_is_named_to_all(gone):
    sockets = meet(4)
    outcomes = in_threads(
        sockets[gone].close, *(readying(socks) for at, socks in enumerate(sockets) if at != gone)
    )
    for error in outcomes[1:]:
        assert isinstance(error, RankFailed)
        assert error.rank == gone
    close(sockets)


def test_of_the_others_none_raises_if_a_rank_ends_after_it_was_ready():
    sockets = meet(4)
    sockets[2]._peers[0].send(handshake.pack_frame(handshake.READY))
    sockets[2].fail_fd(KeyboardInterrupt())
    sockets[2].close()
    outcomes = in_threads(*(readying(sockets[rank]) for rank in (0, 1, 3)))
    assert outcomes == [None] * 3
    close(sockets)


@pytest.mark.parametrize("how", [KeyboardInterrupt, ValueError])
def test_a_rank_that_ends_after_it_was_ready_is_named_by_all(monkeypatch, how):
    world, has_left = shmring.world(3), threading.Event()
    all_ready, await_ready = LocalSockets.all_ready, LocalSockets._await_ready

    def late(sockets, **arguments):
        assert sockets.rank != 1 or has_left.wait(20)
        all_ready(sockets, **arguments)

    def leave(sockets, *arguments):
        if sockets.rank == 2:
            raise how
        await_ready(sockets, *arguments)

    def begin(rank):
        with shmring.init(world, rank, timeout=20) as comm:
            comm.barrier()

    monkeypatch.setattr(LocalSockets, "all_ready", late)
    monkeypatch.setattr(LocalSockets, "_await_ready", leave)
    first, second, third = in_threads(
        lambda: begin(0), lambda: begin(1), then_notify(has_left, lambda: begin(2))
    )
    assert type(third) is how
    for error in first, second:
        assert isinstance(error, RankFailed)
        assert error.rank == 2


def test_a_rank_that_is_never_ready_is_named_by_the_deadline():
    sockets = meet(3)
    late = Deadline(0.1)
    outcomes = in_threads(readying(sockets[0], late), readying(sockets[2]))
    for error in outcomes:
        assert isinstance(error, Timeout)
        assert error.rank == 1
    close(sockets)
