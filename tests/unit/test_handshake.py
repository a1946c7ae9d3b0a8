"""No peer gets in without the key; pending peers only cost time."""

import contextlib
import os
import pickle
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendezvous import close, in_threads, joining, knock, once, python, then_notify

from shmring._bootstrap import acceptor, handshake, local
from shmring._bootstrap.handshake import Hello
from shmring._bootstrap.join import join, world
from shmring._system.deadline import Deadline
from shmring.errors import Error, Mismatch, OutOfMemory, RankFailed, Timeout

MEETING = ("handshake", "framed_socket", "fd_passing", "acceptor", "connector", "local")
OVER_HOSTS = ("host_map", "coordinator", "tcp", "mesh")


def speak(pending, *packets):
    """Return rank 0's answer to the last packet; None for silence, b"" if it closed the connection."""
    answer = None
    with pending:
        pending.settimeout(3)
        for packet in packets:
            try:
                pending.send(packet)
                answer = pending.recv(4096)
            except TimeoutError:
                return None
            except OSError:
                return b""
    return answer


def test_another_version_is_named():
    meeting = world(2)
    done = in_threads(
        joining(meeting, 0, timeout_s=1), lambda: speak(knock(meeting), b"shmring\x07" + bytes(100))
    )
    assert done[1] == handshake.MAGIC
    assert type(done[0]) is Timeout


# --- pending peers ---


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"\0" * 256,
        b"\xff" * 4096,
        handshake.MAGIC,
        handshake.pack_proof(bytes(32)),
        pickle.dumps(print),
    ],
)
def test_peers_that_talk_nonsense_are_turned_away(packet):
    meeting = world(2)
    turned_away = threading.Event()
    host, answer, connector = in_threads(
        joining(meeting, 0),
        then_notify(turned_away, lambda: speak(knock(meeting), packet)),
        once(turned_away, joining(meeting, 1)),
    )
    assert answer == b""
    close([host, connector])


def test_a_peer_without_the_key_gets_no_further_than_the_challenge():
    meeting = world(2)
    hello = Hello(1, 2, bytes(32), "", tag=meeting.tag).pack()
    turned_away = threading.Event()
    host, answer, connector = in_threads(
        joining(meeting, 0),
        then_notify(turned_away, lambda: speak(knock(meeting), hello, handshake.pack_proof(bytes(32)))),
        once(turned_away, joining(meeting, 1)),
    )
    assert answer == b""
    close([host, connector])


def test_rank_0s_own_proof_cannot_be_sent_back_to_it():
    meeting = world(2)

    def reflect():
        with knock(meeting) as pending:
            pending.settimeout(3)
            pending.send(Hello(1, 2, bytes(32), "", tag=meeting.tag).pack())
            challenge = handshake.Challenge.unpack(pending.recv(4096))
            pending.send(handshake.pack_proof(challenge.proof))
            return pending.recv(4096)

    turned_away = threading.Event()
    host, answer, connector = in_threads(
        joining(meeting, 0), then_notify(turned_away, reflect), once(turned_away, joining(meeting, 1))
    )
    assert answer == b""
    close([host, connector])


def test_silent_peers_delay_no_rank():
    meeting = world(2)
    silent = []

    def flood():
        silent.extend(knock(meeting) for _ in range(15))
        return join(meeting, 1, deadline=Deadline(10)).local_sockets

    host, connector = in_threads(joining(meeting, 0), flood)
    close([host, connector, *silent])


def test_a_flood_of_silent_peers_only_delays(monkeypatch):
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.2)
    meeting = world(2)
    silent = []

    def flood():
        silent.append(knock(meeting))
        for _ in range(300):  # more than rank 0 accepts at once
            pending = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pending.setblocking(False)
            silent.append(pending)
            try:
                pending.connect(local.meeting_point(meeting))
            except BlockingIOError:
                break
        return join(meeting, 1, deadline=Deadline(20)).local_sockets

    host, connector = in_threads(joining(meeting, 0, timeout_s=20), flood)
    close([host, connector, *silent])


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to become another user")
def test_another_user_is_turned_away_even_with_the_key():
    meeting = world(2)
    code = """
        import os, pickle, sys
        meeting = pickle.loads(bytes.fromhex(sys.argv[1]))
        from shmring._bootstrap import join as bootstrap, local
        from shmring._system.deadline import Deadline
        point = local.meeting_point(meeting)
        local.meeting_point = lambda world, suffix=b"": point + suffix
        os.setuid(65534)
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            bootstrap.join(meeting, 1, deadline=Deadline(1))
        except Exception as error:
            print(type(error).__name__, error)
        """
    process = python(code, pickle.dumps(meeting).hex())
    assert process.stdout.readline() == b"ready\n"

    def other_user():
        knock(meeting).close()
        return process.communicate(b"go\n", timeout=50)

    host, (out, err) = in_threads(joining(meeting, 0, timeout_s=2), other_user)
    assert b"another user (uid 0" in out, err
    assert type(host) is Timeout
    assert "another user (uid 65534)" in str(host)


@given(st.binary(max_size=400))
def test_no_packet_confuses_the_parsers(packet):
    for parse in (Hello.unpack, handshake.Challenge.unpack, handshake.unpack_proof, handshake.unpack_frame):
        for whole in (packet, handshake.MAGIC + packet):
            with contextlib.suppress(handshake.BadFrame):
                parse(whole)


@given(st.binary(min_size=200, max_size=200))
def test_every_claim_can_be_checked(body):
    hello = Hello.unpack((handshake.MAGIC + body)[: len(Hello(0, 0, bytes(32), "").pack())])
    if len(hello.identity.encode()) <= handshake.IDENTITY_NBYTES:
        handshake.prove(bytes(32), "id", b"connect", hello, 2, bytes(32))


@pytest.mark.parametrize(
    "error",
    [
        Error("text", rank=3),
        Timeout("late ü", rank=0),
        RankFailed("gone", rank=7),
        Mismatch("differs"),
        OutOfMemory("full", wanted_nbytes=1 << 40, available_nbytes=0),
        Error("long " * 1000),
    ],
)
def test_errors_arrive_in_their_own_type(error):
    kind, there = handshake.unpack_frame(handshake.pack_frame(handshake.FAILED, error))
    assert kind == handshake.FAILED
    assert type(there) is type(error)
    assert there.rank == error.rank
    assert str(error).startswith(str(there))
    if isinstance(error, OutOfMemory):
        assert (there.wanted_nbytes, there.available_nbytes) == (1 << 40, 0)


def test_before_trust_little_is_parsed_and_nothing_unpickled():
    assert max(len(Hello(0, 0, bytes(32), "").pack()), len(handshake.pack_proof(bytes(32)))) <= 256
    for module in MEETING + OVER_HOSTS:
        with open(os.path.join(os.path.dirname(handshake.__file__), f"{module}.py")) as source:
            assert "pickle." not in source.read()
