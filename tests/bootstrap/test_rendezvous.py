"""Ranks of several hosts find each other over TCP: all of them start, or all raise one typed error.

Ranks are threads on loopback that say they are on different hosts.
"""

import collections
import dataclasses
import errno
import os
import pickle
import random
import socket
import threading
import time
import traceback
import types

import pytest
from rendezvous import (
    answer,
    close,
    coming,
    dial,
    free_port,
    in_threads,
    meet_on,
    nothing,
    once,
    python,
    settle,
    soon,
    then_notify,
    world_at,
)
from waiting import counted_s

import shmring
from shmring._bootstrap import acceptor, handshake, host_map
from shmring._bootstrap import connector as connector
from shmring._bootstrap import join as bootstrap
from shmring._bootstrap.framed_socket import FramedSocket
from shmring._bootstrap.join import World, join, world
from shmring._bootstrap.world import JoinRequest
from shmring._config.settings import parse_address
from shmring._lifecycle import startup
from shmring._system import deadline, segments
from shmring._system.deadline import Deadline
from shmring.errors import Aborted, Error, Mismatch, RankFailed, Timeout

# --- meeting ---


def reach_each_other(meetings):
    """Check that each connection of the mesh leads to the rank and serves the purpose that it names."""
    for meeting in meetings:
        for purpose in ("data", "control"):
            for rank, connection in getattr(meeting.mesh, purpose).items():
                connection.send(f"{purpose} from {meeting.place.rank} to {rank}\n".encode())
    for meeting in meetings:
        for purpose in ("data", "control"):
            for rank, connection in getattr(meeting.mesh, purpose).items():
                assert connection.gettimeout() == 0
                connection.settimeout(10)
                assert connection.recv(100).decode() == f"{purpose} from {rank} to {meeting.place.rank}\n"


@pytest.mark.parametrize("names", ["ab", "aab", "aba", "abc", "aabccc", "cabcac", "ababababab"])
def test_all_ranks_meet_and_know_their_place(names):
    meetings = meet_on(names)
    order = sorted(set(names), key=names.index)
    by_node = tuple(tuple(r for r, name in enumerate(names) if name == node) for node in order)
    for rank, meeting in enumerate(meetings):
        local_ranks = by_node[order.index(names[rank])]
        assert meeting.place == host_map.Place(
            rank=rank,
            size=len(names),
            local_rank=local_ranks.index(rank),
            local_size=len(local_ranks),
            host=order.index(names[rank]),
            num_hosts=len(order),
            ranks_of_host=by_node,
        )
        assert (meeting.local_sockets.rank, meeting.local_sockets.size) == (
            local_ranks.index(rank),
            len(local_ranks),
        )
        others = set(range(len(names))) - set(local_ranks)
        assert set(meeting.mesh.data) == set(meeting.mesh.control) == others
    reach_each_other(meetings)
    close(meetings)


def test_the_links_of_a_node_are_its_own():
    meetings = meet_on("abab")
    fds = {rank: segments.create(4096 * (rank + 1), kind="memfd") for rank in (0, 1)}
    got = in_threads(
        *(
            lambda rank=rank, meeting=meeting: meeting.local_sockets.broadcast_fd(
                fds.get(rank), check=nothing, deadline=soon()
            )
            for rank, meeting in enumerate(meetings)
        )
    )
    assert [os.fstat(fd).st_size for fd in got] == [4096, 8192, 4096, 8192]
    for fd in set(got):
        os.close(fd)
    close(meetings)


def test_in_whatever_order_they_come():
    meeting, names = world_at(6), "abcabc"
    waits = [at * 0.05 for at in range(6)]
    random.shuffle(waits)
    ranks = [coming(meeting, rank, node=names[rank], after_s=waits[rank]) for rank in range(6)]
    meetings = in_threads(*ranks)
    reach_each_other(meetings)
    close(meetings)


def test_over_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("needs IPv6")
    meetings = meet_on("aba", world_at(3, host="[::1]"))
    assert {c.family for m in meetings for c in m.mesh.data.values()} == {socket.AF_INET6}
    reach_each_other(meetings)
    close(meetings)


def test_by_name():
    close(meet_on("ab", world_at(2, host="localhost")))


def test_a_name_is_looked_up_again(monkeypatch):
    """The host of rank 0 starts again with another address, such as a pod of Kubernetes."""
    monkeypatch.setattr(bootstrap.tcp, "_LOOKUP_S", 0.1)
    meeting, lookups, look_up = world_at(2), [], socket.getaddrinfo

    def changing(host, *arguments, **keywords):
        if host == "moved":
            lookups.append(host)
            host = "127.0.0.9" if len(lookups) == 1 else "127.0.0.1"
        return look_up(host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    by_name = dataclasses.replace(meeting, address=meeting.address.replace("127.0.0.1", "moved"))
    close(in_threads(coming(meeting, 0, node="a"), coming(by_name, 1, node="b")))
    assert len(lookups) > 1


def test_a_resolver_that_does_not_answer_takes_a_tenth_of_the_time(monkeypatch):
    now, lookups = [0.0], []

    def unanswered(*arguments, **keywords):
        lookups.append(now[0])
        now[0] += 10.0
        if len(lookups) > 1:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.9", 4711))]

    monkeypatch.setattr(deadline, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(socket, "getaddrinfo", unanswered)
    monkeypatch.setattr(bootstrap.tcp, "connect", lambda *_: OSError(errno.EHOSTUNREACH, "no route"))
    request = JoinRequest(world(2, address="moved:4711"), 1, "b", Deadline(300.0))
    late = bootstrap.tcp._TcpConnector(request, None)
    while not request.is_over():
        assert late._open() is None
        now[0] += 0.05
    assert len(lookups) == 3


def test_all_on_one_node_is_as_without_an_address():
    meetings = meet_on("aaa")
    for rank, meeting in enumerate(meetings):
        assert meeting.mesh is None
        assert (meeting.local_sockets.rank, meeting.local_sockets.size) == (rank, 3)
        assert meeting.place.ranks_of_host == ((0, 1, 2),)
    close(meetings)
    meeting = world_at(2)
    comms = in_threads(*(lambda rank=rank: shmring.init(meeting, rank, timeout=20) for rank in range(2)))
    in_threads(*(comm.barrier for comm in comms))
    close(comms)


def test_without_an_address_there_is_no_tcp(monkeypatch):
    monkeypatch.setattr(bootstrap.tcp, "connect_ranks", None)
    meetings = meet_on("aa", world(2))
    assert [(meeting.mesh, meeting.coordinator) for meeting in meetings] == [(None, None)] * 2
    assert meetings[1].place.ranks_of_host == ((0, 1),)
    close(meetings)


def test_a_world_of_one_needs_nobody():
    with_address = join(world_at(1), 0, deadline=Deadline(5))
    assert with_address.place.size == 1
    assert (with_address.mesh, with_address.coordinator) == (None, None)
    with_address.close()


def test_a_communicator_of_several_nodes_leaves_no_descriptor(monkeypatch):
    def join_on_a_node(world, rank, **how):
        return join(world, rank, **{**how, "node": str(rank)})

    monkeypatch.setattr(startup, "join", join_on_a_node)
    meeting, before = world_at(2), len(os.listdir("/proc/self/fd"))
    comms = in_threads(*(lambda rank=rank: shmring.init(meeting, rank, timeout=20) for rank in range(2)))
    assert [comm.num_nodes for comm in comms] == [2, 2]
    close(comms)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_meeting_is_closed_as_often_as_one_likes():
    meetings = meet_on("aba")
    close(meetings)
    close(meetings)
    assert [meeting.mesh.data for meeting in meetings] == [{}, {}, {}]


def test_worlds_follow_each_other_on_one_port():
    port = free_port()
    worlds = [world(3, address=f"127.0.0.1:{port}") for _ in range(5)]

    def rank_of_all(rank):
        met = []
        for meeting in worlds:
            met.append(join(meeting, rank, deadline=Deadline(30), node=str(rank % 2)))
        return met

    by_rank = in_threads(*(lambda rank=rank: rank_of_all(rank) for rank in range(3)))
    for meetings in zip(*by_rank, strict=True):
        assert [meeting.place.rank for meeting in meetings] == [0, 1, 2]
        close(meetings)


def test_a_rank_that_comes_too_early_waits_for_its_own_world():
    port = free_port()
    first, second = (world(2, address=f"127.0.0.1:{port}") for _ in range(2))
    outcomes = in_threads(
        coming(first, 0, node="a"),
        coming(second, 1, node="b"),  # finds rank 0 of the first world first
        lambda: settle() or join(first, 1, deadline=Deadline(20), node="b"),
        lambda: settle(2) or join(second, 0, deadline=Deadline(20), node="a"),
    )
    assert [outcome.place.rank for outcome in outcomes] == [0, 1, 1, 0]
    close(outcomes)


def test_jobs_that_chose_the_same_id_and_key_keep_apart_on_a_common_host(monkeypatch):
    monkeypatch.setattr(bootstrap, "_used", collections.deque(maxlen=1))  # as in processes of their own
    first = world_at(4)
    second = World(first.id, first.key, 4, world_at(4).address)
    ranks = [(meeting, rank) for rank in range(4) for meeting in (first, second)]
    meetings = in_threads(*(coming(meeting, rank, node="aabb"[rank]) for meeting, rank in ranks))
    reach_each_other(meetings[::2])
    reach_each_other(meetings[1::2])
    close(meetings)


def test_no_rank_listens_after_the_start():
    meeting = world_at(2)
    meetings = meet_on("ab", meeting)
    for connection in meetings[1].mesh.data.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(connection.getpeername(), timeout=5)
    close(meetings)


def test_own_listeners_use_the_ports_that_are_allowed(monkeypatch):
    port = free_port(21)
    monkeypatch.setenv("SHMRING_PORTS", f"{port}-{port + 20}")
    meetings = meet_on("abc")
    (connection,) = [c for rank, c in meetings[2].mesh.data.items() if rank == 1]
    assert port <= connection.getpeername()[1] <= port + 20
    close(meetings)


def test_no_port_left_is_an_error_for_all(monkeypatch):
    with socket.socket() as holder:
        port = free_port()
        holder.bind(("127.0.0.1", port))
        holder.listen()
        monkeypatch.setenv("SHMRING_PORTS", f"{port}-{port}")
        errors = meet_on("ab")
    for error in errors:
        assert type(error) is Error
        assert f"all of SHMRING_PORTS={port}-{port} are taken" in str(error)


# --- failing to meet ---


def test_missing_ranks_are_named_to_all():
    meeting = world_at(4)
    errors = in_threads(*(coming(meeting, rank, node=str(rank), timeout_s=1.5) for rank in (0, 2)))
    for error in errors:
        assert type(error) is Timeout
        assert f"ranks 1, 3 of 4 did not come to {meeting.address} w" in str(error)  # "within", or "while"
        assert "; to wait longer" in str(error)
        assert error.rank == 1


def test_a_long_wait_is_reported_once(monkeypatch, caplog):
    monkeypatch.setattr(acceptor, "SILENCE_S", 0.2)
    meeting = world_at(3)
    in_threads(*(coming(meeting, rank, node=str(rank), timeout_s=1.0) for rank in (0, 2)))
    reported = [record.getMessage() for record in caplog.records]
    assert reported == [
        f"rank 0 has waited 0.2 s at {meeting.address} for rank 1 of 3, and will wait 1 s in all"
    ]


def test_it_is_reported_that_rank_0_cannot_be_reached(monkeypatch, caplog):
    monkeypatch.setattr(connector, "SILENCE_S", 0.2)
    meeting = world_at(2)
    with pytest.raises(Timeout):
        join(meeting, 1, deadline=Deadline(1.0))
    reported = [record.getMessage() for record in caplog.records]
    what = f"rank 1 has tried for 0.2 s to reach rank 0 at {meeting.address} (Connection refused)"
    assert reported == [f"{what}, and will try for 1 s in all"]


def test_a_failed_meeting_shows_what_happened_and_not_the_way_there():
    with pytest.raises(Timeout) as caught:
        shmring.init(world_at(2), 1, timeout=0.2)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames[1:]] == ["init"]
    assert caught.value.__suppress_context__


def test_a_silent_listener_is_not_rank_0():
    meeting = world_at(2)
    with socket.create_server(parse_address("address", meeting.address)), pytest.raises(Timeout) as caught:
        join(meeting, 1, deadline=Deadline(0.3))
    assert "something took the connection, but did not answer" in str(caught.value)


def test_a_rank_that_gives_up_first_takes_the_others_with_it():
    meeting = world_at(3)
    errors = in_threads(
        coming(meeting, 0, node="a", timeout_s=40), coming(meeting, 1, node="b", timeout_s=1.5)
    )
    for error in errors:
        assert type(error) is Timeout
        assert f"rank 2 of 3 did not come to {meeting.address} while rank 1 would wait" in str(error)


def test_rank_0_missing_is_named_with_the_address():
    meeting = world_at(2)
    with pytest.raises(Timeout, match=r"rank 0 of 2 did not come to 127\.0\.0\.1:\d+ .*refused") as caught:
        join(meeting, 1, deadline=Deadline(0.3))
    assert caught.value.rank == 0


def test_an_unknown_name_is_reported(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    meeting = world(2, address="no-such-host.invalid")
    with pytest.raises(Timeout, match="name is not known here"):
        join(meeting, 1, deadline=Deadline(0.2))
    with pytest.raises(Error, match="name is not known here") as caught:
        join(meeting, 0, deadline=Deadline(100))
    assert type(caught.value) is Error


def test_an_address_of_another_host_is_reported_at_once():
    meeting = world(2, address="192.0.2.1:5000")  # an address for documentation: no host has it
    with pytest.raises(Error, match="not an address of this host: give the address of the host") as caught:
        join(meeting, 0, deadline=Deadline(100))
    assert type(caught.value) is Error


def test_a_port_that_is_taken_is_reported_at_once():
    meeting = world_at(2)
    with socket.socket() as holder:
        holder.bind(bootstrap.tcp.parse_address("address", meeting.address))
        holder.listen()
        with pytest.raises(Error, match="is taken, by another program, job or rank 0: choose another"):
            join(meeting, 0, deadline=Deadline(100))


def test_a_name_that_is_loopback_only_here_is_warned_of(caplog):
    bootstrap.tcp._warn_of_loopback("node7:5000", "127.0.1.1")
    assert "node7 is 127.0.1.1 here, which no other host can reach" in caplog.text
    caplog.clear()
    bootstrap.tcp._warn_of_loopback("localhost:5000", "127.0.0.1")
    bootstrap.tcp._warn_of_loopback("node7:5000", "10.0.0.7")
    assert not caplog.text


def test_another_key_is_an_error_there_and_does_not_disturb_the_rest():
    meeting = world_at(2)
    imposter = World(meeting.id, bytes(32), 2, meeting.address)
    turned_away = threading.Event()
    host, wrong, right = in_threads(
        coming(meeting, 0, node="a"),
        then_notify(turned_away, coming(imposter, 1, node="b")),
        once(turned_away, coming(meeting, 1, node="b")),
    )
    assert type(wrong) is Error
    assert "another key" in str(wrong)
    close([host, right])


def test_a_connector_does_not_believe_a_rank_0_with_another_key():
    meeting = world_at(2)
    imposter = World(meeting.id, bytes(32), 2, meeting.address)
    host, connector = in_threads(coming(imposter, 0, node="a", timeout_s=1), coming(meeting, 1, node="b"))
    assert type(connector) is Error
    assert "another key" in str(connector)
    assert type(host) is Timeout


def listening(meeting, speak):
    """Listen at the world's address in place of rank 0, and call `speak` on the first connection."""

    def serve():
        with socket.create_server(bootstrap.tcp.parse_address("address", meeting.address)) as server:
            connection, _ = server.accept()
            sock = FramedSocket(connection)
            speak(sock)
            answer(sock)  # until it hangs up
            sock.close()

    return serve


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (b"\0\x0cshmring\x07more", "another version of shmring"),
        (b"\0\x08shmring\x07", "another version of shmring"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "choose another port"),
        (b"\0\x05hello", "choose another port"),
    ],
)
def test_a_wrong_answer_in_rank_0s_place_is_reported(words, expected):
    meeting = world_at(2)
    _, error = in_threads(
        listening(meeting, lambda sock: sock.connection.send(words)), coming(meeting, 1, after_s=0.1)
    )
    assert type(error) is Error
    assert expected in str(error)


def test_a_connector_of_another_version_is_reported():
    meeting = world_at(2)

    def other_version():
        sock = dial(meeting)
        sock.send(b"shmring\x07" + bytes(100))
        text = answer(sock)
        sock.close()
        return text

    host, text = in_threads(coming(meeting, 0, timeout_s=1), other_version)
    assert text == handshake.MAGIC
    assert type(host) is Timeout
    assert "sent a frame of another version of shmring" in str(host)


@pytest.mark.parametrize("make", [world, world_at], ids=["on one host", "over TCP"])
def test_ranks_of_different_versions_refuse_each_other(make, caplog):
    meeting = make(2)
    code = """
    import shmring
    shmring.__version__ += ".another"
    """
    other = python(code + JOIN, pickle.dumps(meeting).hex(), "1")

    def check():
        if other.poll() is not None:
            raise Error("the other rank has given up")

    in_threads(lambda: bootstrap.join(meeting, 0, deadline=Deadline(50), check=check))
    out, err = other.communicate(timeout=50)
    text = f"rank 0 runs another version of shmring than rank 1 ({shmring.__version__}.another): install"
    assert out.startswith(f"Error 0 {text}".encode()), err
    assert "sent a frame of another version of shmring" in caplog.text


def test_ranks_that_disagree_about_nprocs_all_say_so():
    meeting = world_at(3)
    smaller = World(meeting.id, meeting.key, 2, meeting.address)
    errors = in_threads(
        coming(meeting, 0, node="a"),
        coming(meeting, 2, node="b"),
        coming(smaller, 1, node="c", after_s=0.5),
    )
    for error in errors:
        assert type(error) is Mismatch
        assert error.rank == 1
        assert "rank 1 on 127.0.0.1 one of 2" in str(error)
        assert "the same --nnodes and -n" in str(error)


def test_a_rank_that_comes_twice_ends_it_for_all():
    meeting = world_at(3)
    errors = in_threads(*(coming(meeting, rank, node=str(rank)) for rank in (0, 1, 1)))
    for error in errors:
        assert type(error) is Error
        assert "rank 1 joined twice on 127.0.0.1 and on 127.0.0.1: each process" in str(error)
        assert "a --node-rank of its own" in str(error)


def test_a_failed_meeting_closes_everything():
    before = len(os.listdir("/proc/self/fd"))
    meeting = world_at(3)
    in_threads(*(coming(meeting, rank, node=str(rank), timeout_s=0.5) for rank in (0, 1)))
    assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_costs_no_cpu():
    meeting = world_at(3)
    begin = time.process_time()
    in_threads(*(coming(meeting, rank, node=str(rank), timeout_s=1.5) for rank in (0, 1)))
    assert time.process_time() - begin < 0.5


# --- failing in the middle ---


@pytest.fixture
def weaving(monkeypatch):
    """Call a function on one rank at the point where it would connect to other hosts."""

    def on(rank, action):
        original = bootstrap.connect_mesh

        def instead(request, found):
            if request.rank == rank:
                action(request, found)
            return original(request, found)

        monkeypatch.setattr(bootstrap, "connect_mesh", instead)

    return on


def raising(error):
    def action(request, found):
        raise error

    return action


@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize("kind", [Error, Timeout, Mismatch])
def test_what_one_rank_raises_all_raise(weaving, rank, kind):
    weaving(rank, raising(kind("no luck here", rank=rank)))
    errors = meet_on("ababc", timeout_s=100)
    for error in errors:
        assert type(error) is kind
        assert str(error) == "no luck here"
        assert error.rank == rank


@pytest.mark.parametrize("rank", [0, 2])
def test_other_exceptions_are_reported_as_aborted(weaving, rank):
    weaving(rank, raising(KeyboardInterrupt()))
    errors = meet_on("aba", timeout_s=100)
    assert type(errors.pop(rank)) is KeyboardInterrupt
    for error in errors:
        assert type(error) is Aborted
        assert f"rank {rank} gave up: KeyboardInterrupt" in str(error)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_ends_in_the_middle_is_named_to_all(weaving, rank):
    def end(request, found):
        found.coordinator.close()
        found.listener.close()
        raise SystemExit

    weaving(rank, end)
    errors = meet_on("abc", timeout_s=100)
    assert type(errors.pop(rank)) is SystemExit
    for error in errors:
        assert type(error) is RankFailed
        assert error.rank == rank
        assert f"rank {rank} ended while the ranks were meeting" in str(error)


@pytest.mark.parametrize("rank", [0, 2])
def test_there_is_one_deadline_for_everything(weaving, rank):
    weaving(rank, lambda request, found: request.pause(100))  # at most to its end
    begin = counted_s()
    errors = meet_on("abc", timeout_s=1.0)
    assert counted_s() - begin < 10
    assert {type(error) for error in errors} == {Timeout}
    assert len(set(map(str, errors))) == 1


def test_ranks_that_fail_at_once_raise_the_same(monkeypatch):
    together = threading.Barrier(4)

    def fail(request, found):
        together.wait(timeout=30)
        raise Error(f"rank {request.rank}'s own reason", rank=request.rank)

    monkeypatch.setattr(bootstrap, "connect_mesh", fail)
    errors = meet_on("abcd")
    assert len(set(map(str, errors))) == 1


JOIN = """
    import pickle, sys
    from shmring._bootstrap.join import join
    from shmring._system.deadline import Deadline
    meeting, rank = pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2]
    try:
        join(meeting, int(rank), deadline=Deadline(100), node=rank)
    except Exception as error:
        print(type(error).__name__, error.rank, error, flush=True)
    """


@pytest.mark.parametrize("doomed", [0, 2])
def test_a_rank_killed_while_ranks_meet_is_named_to_all(doomed):
    meeting = world_at(4)
    processes = {rank: python(JOIN, pickle.dumps(meeting).hex(), str(rank)) for rank in (0, 1, 2)}
    dial(meeting).close()
    settle(8)  # to be in takes a moment
    processes[doomed].kill()
    for rank, process in processes.items():
        out, err = process.communicate(timeout=50)
        if rank != doomed:
            assert out.startswith(f"RankFailed {doomed} rank {doomed} ended".encode()), err
