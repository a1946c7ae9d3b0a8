"""The connections between ranks of different hosts: which side accepts, unreachable ranks, and cut
connections."""

import errno
import os
import socket
import threading

import pytest
from rendezvous import close, coming, free_port, in_threads, meet_on, nothing, soon, then_notify, world_at

from shmring._bootstrap import framed_socket, host_map, mesh
from shmring._bootstrap import join as joining
from shmring._bootstrap.framed_socket import FramedSocket
from shmring._bootstrap.host_map import Endpoint
from shmring._bootstrap.mesh import Mesh, connect_mesh
from shmring._bootstrap.tcp import Found
from shmring._bootstrap.world import JoinRequest, world
from shmring._system.deadline import Deadline
from shmring.errors import WAIT_LONGER, Error, RankFailed, Timeout


def request_of(meeting, rank, timeout_s=20.0, **how):
    return JoinRequest(meeting, rank, "a" * 64, Deadline(timeout_s), **how)


def found_by(rank, names, port):
    """Return a rank's results of the rendezvous, in which all others listen at one port of this host."""
    listener = framed_socket.listen(socket.AF_INET, ("127.0.0.1", 0))
    place = host_map.place_of(rank, host_map.number_hosts(names))
    return Found(None, place, [Endpoint("127.0.0.1", port)] * len(names), bytes(16), 0, listener)


def test_connections_are_ready_for_use():
    meetings = meet_on("ab")
    for meeting in meetings:
        for connection in (*meeting.mesh.data.values(), *meeting.mesh.control.values()):
            assert not connection.getblocking()
            assert not os.get_inheritable(connection.fileno())
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    close(meetings)


def test_a_rank_that_cannot_be_reached_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(mesh, "_REFUSED_S", 0.1)
    found = found_by(1, "ab", free_port())
    with pytest.raises(Error, match=r"rank 1 cannot connect to rank 0 .*refused; .*SHMRING_PORTS"):
        connect_mesh(request_of(world(2), 1), found)
    found.listener.close()


def test_a_rank_that_does_not_answer_is_waited_for_to_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = found_by(1, "ab", silent.getsockname()[1])
        with pytest.raises(Timeout, match=r"connect to rank 0 .*no answer within 0\.3 s.*TIMEOUT") as caught:
            connect_mesh(request_of(world(2), 1, timeout_s=0.3), found)
    assert caught.value.rank == 0
    found.listener.close()


def test_ranks_that_do_not_connect_are_named_with_who_did_instead():
    found = found_by(0, "abbc", 1)
    pending = FramedSocket(socket.create_connection(found.listener.getsockname()))
    pending.send(b"hello")
    with pytest.raises(Timeout) as caught:
        connect_mesh(request_of(world(4), 0, timeout_s=0.5), found)
    assert "ranks 1, 2, 3 did not connect to rank 0 within 0.5 s; 127.0.0.1 port" in str(caught.value)
    assert str(caught.value).endswith(WAIT_LONGER)
    close([pending, found.listener])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_message_of_the_coordinator_ends_the_wait(rank):
    def check():
        raise RankFailed("rank 7 ended", rank=7)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = found_by(rank, "ab", silent.getsockname()[1])
        with pytest.raises(RankFailed, match="rank 7 ended"):
            connect_mesh(request_of(world(2), rank, timeout_s=100, check=check), found)
    found.listener.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_callers_check_ends_the_wait(monkeypatch, rank):
    """As when another rank has ended the communicator that grows, but keeps its connections open."""
    meeting, is_waiting, is_over = world_at(2), threading.Event(), threading.Event()

    def connect(request, found):
        if request.rank == rank:
            is_waiting.set()
        else:
            is_over.wait(20)
        return connect_mesh(request, found)

    def check():
        if is_waiting.is_set():
            raise RankFailed("rank 7 ended", rank=7)

    def come():
        return joining.join(meeting, rank, deadline=Deadline(5), node="ab"[rank], check=check)

    monkeypatch.setattr(joining, "connect_mesh", connect)
    other = coming(meeting, 1 - rank, node="ab"[1 - rank])
    for outcome in in_threads(then_notify(is_over, come), other):
        assert isinstance(outcome, RankFailed)
        assert outcome.rank == 7


def test_ranks_of_one_host_are_not_connected():
    found = found_by(1, "aaa", 1)
    assert connect_mesh(request_of(world(3), 1), found) == Mesh()
    found.listener.close()


def test_a_connection_that_met_itself_is_none(monkeypatch):
    with socket.socket() as lonely:
        lonely.bind(("127.0.0.1", 0))
        lonely.connect(lonely.getsockname())  # as when the kernel gives a caller the port that it calls
        assert framed_socket._has_met_itself(lonely)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = framed_socket.connect(socket.AF_INET, server.getsockname(), soon(), 0.05, nothing)
        assert not framed_socket._has_met_itself(there)
        there.close()
        monkeypatch.setattr(framed_socket, "_has_met_itself", lambda connection: True)
        refused = framed_socket.connect(socket.AF_INET, server.getsockname(), soon(), 0.05, nothing)
    assert refused.errno == errno.ECONNREFUSED
