"""Ranks of one host find each other: all of them start, or all raise one typed error."""

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import threading
import time

import pytest
from rendezvous import close, in_threads, joining, meet, nothing, once, python, settle, soon, then_notify

from shmring._bootstrap import connector as connector
from shmring._bootstrap import join as bootstrap
from shmring._bootstrap import local
from shmring._bootstrap.framed_socket import FramedSocket
from shmring._bootstrap.join import World, join, world
from shmring._config.settings import DEFAULT_PORT, parse_address
from shmring._system import segments
from shmring._system.deadline import Deadline
from shmring.errors import Error, Mismatch, Timeout

# --- World ---


def test_a_world_is_fresh_and_picklable_and_hides_its_key():
    first, second = world(3), world(3)
    assert first.id != second.id
    assert first.key != second.key
    assert len(first.key) == 32
    assert pickle.loads(pickle.dumps(first)) == first
    assert repr(first.key) not in repr(first)
    assert first.key.hex() not in repr(first)


@pytest.mark.parametrize("nprocs", ["2", 1.0, None])
def test_nprocs_has_to_be_a_number(nprocs):
    with pytest.raises(TypeError, match="nprocs is"):
        world(nprocs)


@pytest.mark.parametrize("nprocs", [0, -1, 4097])
def test_nprocs_has_to_be_in_range(nprocs):
    with pytest.raises(ValueError, match="allowed: 1 to 4096"):
        world(nprocs)


@pytest.mark.parametrize("epoch", [-1, 1.0, "1"])
def test_epoch_has_to_be_a_number(epoch):
    with pytest.raises(ValueError, match="epoch is"):
        dataclasses.replace(world(1), epoch=epoch)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_has_to_be_in_the_world(rank):
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        join(world(2), rank, deadline=Deadline(1))


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_timeout_has_to_be_positive(timeout_s):
    with pytest.raises(ValueError, match="more than 0"):
        join(world(2), 0, deadline=Deadline(timeout_s))


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("node7:5000", "node7", 5000),
        ("10.0.0.1", "10.0.0.1", DEFAULT_PORT),
        ("[::1]:5000", "::1", 5000),
        ("[fe80::1%eth0]", "fe80::1%eth0", DEFAULT_PORT),
        ("::1", "::1", DEFAULT_PORT),
    ],
)
def test_an_address_is_a_host_and_a_port(address, host, port):
    assert world(2, address=address).address == address
    assert parse_address("address", address) == (host, port)


@pytest.mark.parametrize(
    "address",
    ["", ":5000", "host:", "host:x", "host:0", "host:65536", "[::1", "[::1]5", "a b", "a/b", "0.0.0.0:1"],
)
def test_an_address_has_to_be_one(address):
    with pytest.raises(ValueError, match="allowed: "):
        world(2, address=address)


def test_an_address_has_to_be_text():
    with pytest.raises(TypeError, match="address is 5000"):
        world(2, address=5000)


# --- meeting ---


@pytest.mark.parametrize("nprocs", [1, 2, 3, 8])
def test_all_ranks_meet_and_know_their_place(nprocs):
    sockets = meet(nprocs)
    assert [(socks.rank, socks.size, socks.local_rank, socks.local_size) for socks in sockets] == [
        (rank, nprocs, rank, nprocs) for rank in range(nprocs)
    ]
    assert {(socks.host, socks.num_hosts) for socks in sockets} == {(0, 1)}
    close(sockets)


def test_many_ranks_meet():
    close(meet(48))


def test_two_worlds_do_not_mix():
    one, other = world(2), world(2)
    sockets = in_threads(*(joining(meeting, rank) for meeting in (one, other) for rank in (0, 1)))
    close(sockets)


def test_processes_meet():
    meeting = world(2)
    code = """
        import pickle, sys
        from shmring._bootstrap.join import join
        from shmring._system.deadline import Deadline
        sockets = join(pickle.loads(bytes.fromhex(sys.argv[1])), 1, deadline=Deadline(10)).local_sockets
        fd = sockets.broadcast_fd(None, check=lambda: None, deadline=Deadline(10))
        print(open(fd, "rb").read())
        """
    other = python(code, pickle.dumps(meeting).hex())
    sockets = join(meeting, 0, deadline=Deadline(10)).local_sockets
    fd = segments.create(5, kind="memfd")
    os.pwrite(fd, b"hello", 0)
    assert sockets.broadcast_fd(fd, check=nothing, deadline=soon()) == fd
    out, err = other.communicate(timeout=50)
    assert out.strip() == b"b'hello'", err
    os.close(fd)
    sockets.close()


def test_nothing_is_in_the_file_system():
    before = set(os.listdir("."))
    meeting = world(2)
    sockets = in_threads(joining(meeting, 0), joining(meeting, 1))
    name = local.meeting_point(meeting)[1:].decode()
    with open("/proc/net/unix") as table:
        paths = [line.split()[7] for line in table if name in line]
    assert paths
    assert all(path.startswith("@") for path in paths)  # abstract
    assert set(os.listdir(".")) == before
    close(sockets)


def test_the_name_of_the_meeting_point_does_not_show_the_id():
    meeting = world(2)
    assert meeting.id.encode() not in local.meeting_point(meeting)


# --- failing to meet ---


def test_missing_ranks_are_named_to_all():
    meeting = world(4)
    errors = in_threads(joining(meeting, 0, timeout_s=1.5), joining(meeting, 2, timeout_s=1.5))
    for error in errors:
        assert type(error) is Timeout
        assert isinstance(error, TimeoutError)
        assert "ranks 1, 3 of 4" in str(error)
        assert error.rank == 1


def test_a_verdict_that_crosses_with_giving_up_is_heard():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.send(b"verdict")
    here.send(b"giving up")
    there.close()  # with something unread
    sock = FramedSocket(here)
    assert sock.receive(100) == b"verdict"
    assert sock.receive(100) == b""
    here.close()


def test_a_rank_that_gives_up_first_learns_who_is_missing_and_takes_the_others_with_it():
    meeting = world(3)
    errors = in_threads(joining(meeting, 0, timeout_s=100), joining(meeting, 1, timeout_s=2))
    for error in errors:
        assert type(error) is Timeout
        assert "rank 2 of 3 did not come while rank 1 would wait" in str(error)


def test_rank_0_missing_is_named():
    with pytest.raises(Timeout, match=r"rank 0 of 2 did not come within 0\.2 s .*SHMRING_TIMEOUT") as caught:
        join(world(2), 1, deadline=Deadline(0.2))
    assert caught.value.rank == 0


def test_a_long_wait_for_rank_0_is_reported_once(monkeypatch, caplog):
    monkeypatch.setattr(connector, "SILENCE_S", 0.1)
    with pytest.raises(Timeout):
        join(world(2), 1, deadline=Deadline(2))
    reported = [record.getMessage() for record in caplog.records]
    what = "rank 1 has tried for 0.1 s to reach rank 0 (it has not come yet)"
    assert reported == [f"{what}, and will try for 2 s in all"]


def test_another_key_is_an_error_there_and_does_not_disturb_the_rest():
    meeting = world(2)
    imposter = World(meeting.id, bytes(32), 2)
    turned_away = threading.Event()
    host, wrong, right = in_threads(
        joining(meeting, 0),
        then_notify(turned_away, joining(imposter, 1)),
        once(turned_away, joining(meeting, 1)),
    )
    assert type(wrong) is Error
    assert "another key" in str(wrong)
    close([host, right])


def test_a_connector_does_not_believe_a_rank_0_with_another_key():
    meeting = world(2)
    host, connector = in_threads(
        joining(World(meeting.id, bytes(32), 2), 0, timeout_s=1), joining(meeting, 1)
    )
    assert type(connector) is Error
    assert type(host) is Timeout
    assert "hung up before it had proven" in str(host)


def test_ranks_that_disagree_about_nprocs_all_say_so():
    meeting = world(3)
    smaller = World(meeting.id, meeting.key, 2)
    errors = in_threads(joining(meeting, 0), joining(meeting, 2), joining(smaller, 1, after_s=0.5))
    for error in errors:
        assert type(error) is Mismatch
        assert "world of 3 ranks, rank 1 one of 2" in str(error)
        assert error.rank == 1


def test_a_rank_that_comes_twice_ends_it_for_all():
    meeting = world(3)
    errors = in_threads(joining(meeting, 0), joining(meeting, 1), joining(meeting, 1))
    for error in errors:
        assert type(error) is Error
        assert "rank 1 joined twice" in str(error)
        assert error.rank == 1


def test_two_rank_0():
    meeting = world(2)
    turned_away = threading.Event()
    two = [then_notify(turned_away, joining(meeting, 0)) for _ in range(2)]
    outcomes = in_threads(*two, once(turned_away, joining(meeting, 1)))
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [type(error) for error in errors] == [Error]
    assert "single-use" in str(errors[0])
    close(outcome for outcome in outcomes if outcome not in errors)


@contextlib.contextmanager
def held_by_nobody_of_ours(name, *, listens=True):
    """Hold the socket name from another user's process; anyone who knows the job's name can compute it."""
    held, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgid(65534)
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
            squatter.bind(name)
            if listens:
                squatter.listen(5)
            os.write(tell, b"!")
            time.sleep(100)
        os._exit(0)
    os.close(tell)
    try:
        assert os.read(held, 1) == b"!"
        yield pid
    finally:
        os.close(held)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may become another user")


@needs_root
@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_point_of_another_user_is_named_as_such(rank):
    meeting = world(2)
    with (
        held_by_nobody_of_ours(local.meeting_point(meeting)) as pid,
        pytest.raises(Error, match=rf"another user \(uid 65534, process {pid}\)"),
    ):
        join(meeting, rank, deadline=Deadline(20))


@needs_root
def test_a_name_that_another_user_does_not_listen_at_may_be_anybodys():
    meeting = world(2)
    with (
        held_by_nobody_of_ours(local.meeting_point(meeting), listens=False),
        pytest.raises(Error, match=r"or another user's process holds the name"),
    ):
        join(meeting, 0, deadline=Deadline(20))


@needs_root
def test_a_marker_of_another_user_says_nothing():
    meeting = world(2)
    with held_by_nobody_of_ours(local.meeting_point(meeting, b".met")):
        close(in_threads(joining(meeting, 0), joining(meeting, 1)))


def test_a_world_is_single_use_in_one_process():
    meeting = world(2)
    sockets = in_threads(joining(meeting, 0), joining(meeting, 1))
    close(sockets)
    for rank in (0, 1):
        with pytest.raises(Error, match="single-use"):
            join(meeting, rank, deadline=Deadline(1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_latecomer_to_a_world_that_has_met_is_reported_at_once(rank, monkeypatch):
    meeting = world(2)
    sockets = in_threads(joining(meeting, 0), joining(meeting, 1))
    monkeypatch.setattr(bootstrap, "_used", [])  # as in another process
    with pytest.raises(Error, match="already met"):
        join(meeting, rank, deadline=Deadline(100))
    close(sockets)


def test_different_nodes_need_an_address():
    meeting = world(2)
    errors = in_threads(joining(meeting, 0, node="a"), joining(meeting, 1, node="b"))
    for error in errors:
        assert type(error) is Error
        assert "'a'" in str(error)
        assert "'b'" in str(error)
    close(in_threads(*(joining(meeting, rank, node="a") for rank in (0, 1))))


def test_a_failed_meeting_closes_everything():
    before = len(os.listdir("/proc/self/fd"))
    meeting = world(3)
    in_threads(joining(meeting, 0, timeout_s=0.2), joining(meeting, 1, timeout_s=0.2))
    assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_costs_no_cpu():
    meeting = world(2)
    begin = time.process_time()
    in_threads(joining(meeting, 0, timeout_s=1))
    assert time.process_time() - begin < 0.5


# --- deaths ---

VISIT = """
    import pickle, sys
    from shmring._bootstrap.join import join
    from shmring._system.deadline import Deadline
    try:
        join(pickle.loads(bytes.fromhex(sys.argv[1])), int(sys.argv[2]), deadline=Deadline(100))
    except Exception as error:
        print(type(error).__name__, error.rank, error, flush=True)
    """


def visitor(meeting, rank):
    return python(VISIT, pickle.dumps(meeting).hex(), str(rank))


def wait_for_connections(meeting, count):
    """Until so many connections to the meeting point stand."""
    name = "@" + local.meeting_point(meeting)[1:].decode()
    until = soon()
    while not until.is_over():
        with open("/proc/net/unix") as table:
            if sum(line.endswith(name + "\n") for line in table) > count:  # the listener is one
                return
        time.sleep(0.01)
    raise AssertionError("nobody came")


def test_rank_0_killed_while_ranks_meet_is_noticed_at_once():
    meeting = world(4)
    host = visitor(meeting, 0)
    others = [visitor(meeting, rank) for rank in (1, 2)]
    wait_for_connections(meeting, 2)
    host.kill()
    for other in others:
        out, err = other.communicate(timeout=50)
        assert out.startswith(b"RankFailed 0 rank 0 ended"), err
    host.communicate()


def test_a_rank_killed_while_ranks_meet_is_named_to_all():
    meeting = world(4)
    host, other, doomed = (visitor(meeting, rank) for rank in (0, 1, 3))
    wait_for_connections(meeting, 2)
    settle(4)  # to be in takes a moment
    doomed.kill()
    for process in (host, other):
        out, err = process.communicate(timeout=50)
        assert out.startswith(b"RankFailed 3 rank 3 ended"), err
    doomed.communicate()


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_the_wait(rank):
    code = """
        import sys, threading, time
        from shmring._bootstrap.join import join, world
        from shmring._system.deadline import Deadline
        try:
            print("waiting", flush=True)
            join(world(2), int(sys.argv[1]), deadline=Deadline(100))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    process = python(code, str(rank))
    assert process.stdout.readline() == b"waiting\n"
    settle()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=50)
    assert out == b"interrupted\n"


def test_ctrl_c_on_rank_0_is_reported_to_the_others():
    meeting = world(3)
    host, connector = visitor(meeting, 0), visitor(meeting, 1)
    wait_for_connections(meeting, 1)
    settle(4)  # to be in takes a moment
    host.send_signal(signal.SIGINT)
    out, err = connector.communicate(timeout=50)
    assert out.startswith(b"Aborted 0 rank 0 gave up: KeyboardInterrupt"), err
    host.communicate()
