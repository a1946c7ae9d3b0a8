"""All ranks agree through the coordinator, or all raise the same error."""

import socket

import pytest
from rendezvous import close, in_threads, settle, soon

from shmring._bootstrap import handshake
from shmring._bootstrap.coordinator import Coordinator
from shmring._bootstrap.framed_socket import FramedSocket
from shmring._system.deadline import Deadline
from shmring.errors import Error, Mismatch, RankFailed, Timeout


def coordinators(size):
    """A coordinator of TCP connections."""
    ends = [[], []]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(size - 1):
            ends[0].append(FramedSocket(socket.create_connection(server.getsockname())))
            ends[1].append(FramedSocket(server.accept()[0]))
    connectors = [Coordinator(rank, size, {0: sock}) for rank, sock in enumerate(ends[0], 1)]
    return [Coordinator(0, size, dict(enumerate(ends[1], 1))), *connectors]


def readying(coordinator, error=None, within_s=10.0):
    def begin():
        with coordinator.together():
            if error is not None:
                raise error
            coordinator.all_ready(deadline=Deadline(within_s))

    return begin


def test_all_are_ready_as_often_as_they_like():
    ranks = coordinators(4)
    for _ in range(20):
        assert in_threads(*map(readying, ranks)) == [None] * 4
    close(ranks)
    ranks[0].close()


def test_one_that_cannot_tells_all():
    ranks = coordinators(3)
    reasons = [None, Mismatch("differs", rank=1), None]
    outcomes = in_threads(*map(readying, ranks, reasons))
    assert [(type(error), str(error), error.rank) for error in outcomes] == [(Mismatch, "differs", 1)] * 3
    close(ranks)


def test_one_that_never_is_ready_is_named_to_all():
    ranks = coordinators(3)
    outcomes = in_threads(readying(ranks[0], within_s=0.5), readying(ranks[1], within_s=0.5))
    for error in outcomes:
        assert type(error) is Timeout
        assert error.rank == 2
    close(ranks)


def test_one_that_has_gone_is_named_to_all():
    ranks = coordinators(3)
    ranks[2].close()
    outcomes = in_threads(readying(ranks[0]), readying(ranks[1]))
    for error in outcomes:
        assert type(error) is RankFailed
        assert error.rank == 2
    close(ranks)


@pytest.mark.parametrize("frame", [b"x" * 50, handshake.pack_frame(handshake.GIVING_UP)])
def test_what_is_out_of_turn_is_an_error(frame):
    ranks = coordinators(2)
    ranks[1]._socks[0].send(frame)
    with pytest.raises(Error, match="rank 1 sent"):
        ranks[0].all_ready(deadline=soon())
    close(ranks)


def test_a_look_costs_nothing_and_sees_what_came():
    ranks = coordinators(3)
    for rank in ranks:
        rank.check()
    ranks[2]._socks[0].send(handshake.pack_frame(handshake.READY))  # it may be ahead
    settle()
    ranks[0].check()
    ranks[1].close()
    settle()
    with pytest.raises(RankFailed) as caught:
        ranks[0].check()
    assert caught.value.rank == 1
    close(ranks)
