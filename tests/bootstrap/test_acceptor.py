"""Over TCP no peer gets in without the key, pending peers cost little, and the log counts each of them."""

import collections
import contextlib
import dataclasses
import logging
import os
import re
import resource
import socket
import time
import tracemalloc

import pytest
from rendezvous import (
    answer,
    close,
    coming,
    dial,
    in_threads,
    prove,
    python,
    settle,
    world_at,
)

from shmring._bootstrap import acceptor as acceptor
from shmring._bootstrap import framed_socket, handshake, host_map
from shmring._bootstrap.framed_socket import FramedSocket
from shmring._bootstrap.handshake import CONTROL, COORDINATOR, DATA, LOCAL, BadFrame, Challenge, Hello
from shmring._bootstrap.host_map import Endpoint
from shmring._bootstrap.mesh import Mesh, _MeshAcceptor, _MeshConnector
from shmring._bootstrap.tcp import Found
from shmring._bootstrap.world import JoinRequest, World, world
from shmring._system.deadline import Deadline
from shmring.errors import Timeout


def request_of(meeting, rank, **how):
    return JoinRequest(meeting, rank, "a" * 64, Deadline(20.0), **how)


@pytest.fixture
def turned_away(caplog):
    """Return the numbers of turned-away connections by kind, as logged at the end."""
    caplog.set_level(logging.INFO, "shmring")

    def kinds():
        counts = collections.Counter()
        for found in re.findall(r"turned away \d+ connections in all \((.*)\)", caplog.text):
            for kind, count in (pair.split(": ") for pair in found.split(", ")):
                counts[kind] += int(count)
        return counts

    return kinds


def hosting(meeting, *intruders, then=1):
    """Start rank 0 and rank 1 on two hosts after the intruders have connected; return the intruders'
    answers."""

    def intrude():
        messages = [intruder() for intruder in intruders]
        time.sleep(0.1)
        return messages, coming(meeting, then, node="b")()

    host, (messages, connector) = in_threads(coming(meeting, 0, node="a"), intrude)
    close([host, connector])
    return messages


def saying(meeting, words, *, and_hang_up=False):
    """Connect, send some bytes, and return the answer: empty if rank 0 closes the connection."""

    def intrude():
        sock = dial(meeting)
        sock.connection.settimeout(10)
        with contextlib.suppress(ConnectionError):
            sock.connection.sendall(words)
        if and_hang_up:
            sock.close()
            return b""
        sock.connection.setblocking(False)
        text = answer(sock)
        sock.close()
        return text

    return intrude


# --- messages of pending peers ---


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "the length of a frame as 18245 bytes"),
        (b"\xff" * 4096, "the length of a frame as 65535 bytes"),
        (b"\0\0", "the length of a frame as 0 bytes"),
        (b"\x01\x01" + bytes(300), "the length of a frame as 257 bytes"),
        (b"\0\x05hello", "5 bytes that are not a frame"),
        (b"\x01\x00" + bytes(256), "256 bytes that are not a frame"),
        (b"\0\x28" + handshake.pack_proof(bytes(32)), "40 bytes that are not a frame"),
    ],
)
def test_invalid_bytes_close_the_connection_and_are_counted(words, expected, turned_away, caplog):
    meeting = world_at(2)
    assert hosting(meeting, saying(meeting, words), saying(meeting, words)) == [b"", b""]
    assert turned_away() == {"nonsense": 2}
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1  # once a kind
    assert expected in warnings[0].message
    assert "127.0.0.1 port" in warnings[0].message


def test_random_bytes_are_hung_up_on(turned_away):
    meeting = world_at(2)
    text = hosting(meeting, *(saying(meeting, os.urandom(400)) for _ in range(30)))
    assert text == [b""] * 30
    assert sum(turned_away().values()) == 30


@pytest.mark.parametrize("nbytes", [1, 2, 10, 141])
def test_a_truncated_frame_is_dropped_when_its_sender_hangs_up(nbytes, turned_away):
    meeting = world_at(2)
    hello = Hello(1, 2, bytes(32), "", COORDINATOR, 0, meeting.tag).pack()
    words = (len(hello).to_bytes(2, "big") + hello)[:nbytes]
    hosting(meeting, saying(meeting, words, and_hang_up=True))
    assert turned_away() == {"hung up": 1}


def test_a_frame_may_come_byte_by_byte():
    ours, theirs = socket.socketpair()
    sock = FramedSocket(ours)
    frames = [b"x" * 256, b"y"]
    for frame in frames:
        for byte in len(frame).to_bytes(2, "big") + frame:
            assert sock.receive(256) is None
            theirs.send(bytes([byte]))
        assert sock.receive(256) == frame
    theirs.close()
    assert sock.receive(256) == b""
    sock.close()


def test_not_a_byte_is_read_beyond_a_frame():
    ours, theirs = socket.socketpair()
    sock = FramedSocket(ours)
    FramedSocket(theirs).send(b"proof")
    theirs.send(b"what the next owner of the socket is to read")
    assert sock.receive(256) == b"proof"
    assert ours.recv(100) == b"what the next owner of the socket is to read"
    sock.close()
    theirs.close()


def test_lengths_are_capped_before_anything_is_kept():
    ours, theirs = socket.socketpair()
    sock = FramedSocket(ours)
    theirs.send(b"\x01\x01" + bytes(1000))
    with pytest.raises(BadFrame, match="257 bytes"):
        sock.receive(256)
    assert len(sock._begun) == 2
    sock.close()
    theirs.close()


# --- keys, roles, ranks ---


def test_another_key_is_counted(turned_away):
    meeting = world_at(2)
    imposter = request_of(World(meeting.id, bytes(32), 2), 1)

    def intrude():
        sock = dial(meeting)
        text = prove(sock, imposter, 0, COORDINATOR)
        sock.close()
        return text

    assert hosting(meeting, intrude) == [b""]
    assert turned_away() == {"another key": 1}


def test_a_recorded_handshake_is_worth_nothing(turned_away):
    meeting = world_at(2)
    own = request_of(meeting, 1)
    hello = own.hello(0, COORDINATOR)
    recorded = []

    def record():
        sock = dial(meeting)
        sock.send(hello.pack())
        challenge = Challenge.unpack(answer(sock))
        # The proof that rank 1 would have sent, to a rank 0 that cannot receive it yet.
        recorded.append(handshake.pack_proof(own.prove(b"connect", hello, 2, challenge.nonce)))
        sock.close()

    def replay():
        sock = dial(meeting)
        sock.send(hello.pack())
        assert answer(sock)
        sock.send(recorded[0])
        text = answer(sock)
        sock.close()
        return text

    assert hosting(meeting, record, replay) == [None, b""]
    assert turned_away() == {"another key": 1, "hung up": 1}


def test_a_proof_of_rank_0_cannot_be_sent_back_to_it(turned_away):
    meeting = world_at(2)

    def reflect():
        sock = dial(meeting)
        sock.send(request_of(meeting, 1).hello(0, COORDINATOR).pack())
        sock.send(handshake.pack_proof(Challenge.unpack(answer(sock)).proof))
        text = answer(sock)
        sock.close()
        return text

    assert hosting(meeting, reflect) == [b""]
    assert turned_away() == {"another key": 1}


@pytest.mark.parametrize(
    "what", [{"rank": 0}, {"nprocs": 3}, {"identity": "b"}, {"purpose": CONTROL}, {"peer": 1}]
)
def test_a_proof_holds_for_what_was_said_only(what):
    own = request_of(world(2), 1)
    hello, nonce = own.hello(0, COORDINATOR), bytes(32)
    proof = own.prove(b"connect", hello, 2, nonce)
    assert handshake.proves(proof, own.prove(b"connect", hello, 2, nonce))
    other = dataclasses.replace(hello, **what)
    assert not handshake.proves(proof, own.prove(b"connect", other, 2, nonce))
    assert not handshake.proves(proof, own.prove(b"accept", hello, 2, nonce))
    assert not handshake.proves(proof, own.prove(b"connect", hello, 3, nonce))
    assert not handshake.proves(proof, request_of(world(2), 1).prove(b"connect", hello, 2, nonce))


@pytest.mark.parametrize(("peer", "purpose"), [(1, COORDINATOR), (0, DATA), (0, LOCAL), (0, b"")])
def test_a_misdirected_hello_gets_no_challenge(peer, purpose, turned_away):
    meeting = world_at(2)
    hello = request_of(meeting, 1).hello(peer, purpose).pack()
    assert hosting(meeting, saying(meeting, len(hello).to_bytes(2, "big") + hello)) == [b""]
    assert turned_away() == {"misled": 1}


def test_another_worlds_rank_is_reported_which_world_it_is_and_no_more(turned_away, caplog):
    meeting = world_at(2)
    hello = request_of(world(2), 1).hello(0, COORDINATOR).pack()
    (text,) = hosting(meeting, saying(meeting, len(hello).to_bytes(2, "big") + hello))
    challenge = Challenge.unpack(text)
    assert (challenge.tag, challenge.nprocs, challenge.proof) == (meeting.tag, 0, bytes(32))
    assert turned_away() == {"another world": 1}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def accepting(meeting, names, rank):
    """Return a rank's results of the rendezvous, its mesh, and the acceptor that fills the mesh."""
    listener = framed_socket.listen(socket.AF_INET, ("127.0.0.1", 0))
    place = host_map.place_of(rank, host_map.number_hosts(names))
    endpoints = [Endpoint(*listener.getsockname())] * len(names)
    found = Found(None, place, endpoints, bytes(16), 0, listener)
    mesh = Mesh()
    acceptor = _MeshAcceptor(request_of(meeting, rank), found, mesh)
    return found, mesh, acceptor


@pytest.mark.parametrize(
    ("rank", "nprocs", "purpose", "why"),
    [
        (1, 4, DATA, "on the same host"),
        (9, 4, DATA, "none of this world's 4 ranks"),
        (3, 5, DATA, "none of this world's 4 ranks"),
        (2, 4, DATA, "has joined already"),  # for the second time
        (3, 4, COORDINATOR, "has joined already"),
    ],
)
def test_the_key_without_a_claim_is_refused(rank, nprocs, purpose, why, turned_away, caplog):
    meeting = world(4)
    found, mesh, acceptor = accepting(meeting, "aabb", 0)
    held = []

    def come(rank, purpose):
        sock = _MeshConnector(request_of(meeting, rank), 0, purpose, found).connect()
        held.append(sock)

    def intrude():
        come(2, DATA)
        sock = FramedSocket(socket.create_connection(found.listener.getsockname()))
        text = prove(sock, request_of(World(meeting.id, meeting.key, nprocs), rank), 0, purpose)
        sock.close()
        for rest in ((2, CONTROL), (3, DATA), (3, CONTROL)):
            come(*rest)
        return text

    _, text = in_threads(acceptor.accept_all, intrude)
    kind, error = handshake.unpack_frame(text)
    assert kind == handshake.FAILED
    assert why in str(error)
    assert sorted(mesh.data) == sorted(mesh.control) == [2, 3]
    acceptor.close()
    assert turned_away() == {"refused": 1}
    assert f"holds the key but was refused: rank {rank}" in caplog.text
    mesh.close()
    close([found.listener, *held])


def test_a_lower_rank_does_not_connect():
    meeting = world(3)
    found, mesh, acceptor = accepting(meeting, "abc", 1)

    def intrude():
        sock = FramedSocket(socket.create_connection(found.listener.getsockname()))
        text = prove(sock, request_of(meeting, 0), 1, DATA)
        sock.close()
        return text, [
            _MeshConnector(request_of(meeting, 2), 1, purpose, found).connect() for purpose in (DATA, CONTROL)
        ]

    _, (text, held) = in_threads(acceptor.accept_all, intrude)
    assert "this rank connects to it" in str(handshake.unpack_frame(text)[1])
    acceptor.close()
    mesh.close()
    close([found.listener, *held])


# --- many of them ---


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.3)


def test_silence_is_hung_up_on_and_counted(hasty, turned_away):
    meeting = world_at(2)
    assert hosting(meeting, saying(meeting, b""), saying(meeting, b"\0")) == [b"", b""]
    assert turned_away() == {"silent": 2}


FLOOD = """
    import socket, sys, time
    where = sys.argv[1], int(sys.argv[2])
    silent = []
    for _ in range(1000):
        pending = socket.socket()
        pending.setblocking(False)
        pending.connect_ex(where)
        silent.append(pending)
    print("here", flush=True)
    time.sleep(100)
    """


def test_a_thousand_silent_connections_only_delay(turned_away, monkeypatch):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1100:
        pytest.skip("needs 1100 descriptors")
    monkeypatch.setattr(acceptor, "_FULL_S", 0.25)
    most = []
    listen = acceptor.Acceptor._listen

    def counting(self, room):
        most.append((len(self._pending), len(os.listdir("/proc/self/fd"))))
        listen(self, room)

    monkeypatch.setattr(acceptor.Acceptor, "_listen", counting)
    meeting, before = world_at(3), len(os.listdir("/proc/self/fd"))

    def flood():
        dial(meeting).close()
        host, port = meeting.address.split(":")
        flooding = python(FLOOD, host, port)
        assert flooding.stdout.readline() == b"here\n"
        settle()
        tracemalloc.start()
        try:
            connectors = in_threads(*(coming(meeting, rank, node=str(rank), timeout_s=50) for rank in (1, 2)))
            return connectors, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            flooding.kill()
            flooding.communicate()

    host, (connectors, peak_nbytes) = in_threads(coming(meeting, 0, node="0", timeout_s=50), flood)
    close([host, *connectors])
    num_pending, descriptors = map(max, zip(*most, strict=True))
    assert num_pending <= acceptor.most_pending(4)  # four connections are awaited at rank 0 in the end
    assert num_pending > 100  # it was a flood
    assert descriptors <= before + num_pending + 40  # those of three ranks in this process
    assert peak_nbytes < 4 << 20
    assert turned_away()["silent"] > 500


def test_room_is_made_sooner_when_others_wait(monkeypatch):
    monkeypatch.setattr(acceptor, "_MOST_PENDING", 2)
    monkeypatch.setattr(acceptor, "_FULL_S", 0.1)
    meeting = world_at(2)
    silent = []

    def crowd():
        silent.extend(dial(meeting) for _ in range(6))
        return coming(meeting, 1, node="b", timeout_s=4.5)()  # less than the 5 s that each could stay

    host, connector = in_threads(coming(meeting, 0, node="a"), crowd)
    close([host, connector, *silent])


def test_no_descriptor_left_waits_for_pending_peers_to_go(monkeypatch):
    """Peers that take all descriptors do not end the start: descriptors of pending peers are freed again."""
    monkeypatch.setattr(acceptor, "_FULL_S", 0.2)
    meeting = world_at(2)
    silent, refused = [], []
    accept = socket.socket.accept

    def scarce(self):
        if silent and not refused:
            refused.append(True)
            raise OSError(24, "Too many open files")
        return accept(self)

    def crowd():
        silent.append(dial(meeting))
        settle()
        monkeypatch.setattr(socket.socket, "accept", scarce)
        return coming(meeting, 1, node="b", timeout_s=20)()

    host, connector = in_threads(coming(meeting, 0, node="a"), crowd)
    assert refused
    close([host, connector, *silent])


def test_who_was_turned_away_is_named_with_who_is_missing():
    meeting = world_at(2)

    def intrude():
        for _ in range(5):
            saying(meeting, b"GET / HTTP/1.1\r\n\r\n")()

    error, _ = in_threads(coming(meeting, 0, timeout_s=4), intrude)
    assert type(error) is Timeout
    missing = f"rank 1 of 2 did not come to {meeting.address} within 4 s"
    assert str(error).startswith(f"{missing}; 2 other connections were turned away; 127.0.0.1 port ")
    assert str(error).count("sent the length of a frame as 18245 bytes") == 3


def test_a_rank_that_gives_up_as_the_last_one_joins_ends_nothing():
    """Its frame may be handled after the last rank has joined: all of them are about to begin."""
    request = request_of(world_at(3), 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gathering = acceptor.Gathering(request, listener, [1, 2], COORDINATOR)
        giving_up = handshake.pack_frame(handshake.GIVING_UP)
        gathering._joined[1] = FramedSocket(socket.socket())
        with pytest.raises(Timeout, match="rank 2 of 3 did not come"):
            gathering._handle_frame(1, giving_up)
        gathering._joined[2] = FramedSocket(socket.socket())
        gathering._handle_frame(1, giving_up)
        gathering.close()
