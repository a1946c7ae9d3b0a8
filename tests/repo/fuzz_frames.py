"""Fuzz the parsers of bytes from the network: each gives a valid value or BadFrame, and nothing else.

    python tests/repo/fuzz_frames.py -runs=1000000 [libFuzzer's options]

It needs atheris.
"""

import contextlib
import gc
import socket
import sys
import tempfile
import types
from pathlib import Path

from shmring._bootstrap import framed_socket, handshake, host_map, world
from shmring._bootstrap.handshake import BadFrame, Challenge, Hello
from shmring._config import settings
from shmring._system.deadline import Deadline

ROWS = [host_map.Row(0, host_map.Endpoint("10.0.0.1", 1))]
PARSERS = (
    Hello.unpack,
    Challenge.unpack,
    handshake.unpack_proof,
    handshake.unpack_frame,
    handshake.kind_of,
    host_map.unpack_endpoint,
    lambda packet: host_map.unpack_page(packet, [], 4096),
    lambda packet: host_map.unpack_page(packet, ROWS, 3),
)
KINDS = bytes([handshake.FAILED, handshake.ENDPOINT, handshake.TABLE])


def parse(data):
    """Give the bytes to every parser, alone and after the beginning of a frame of its kind."""
    heads = (b"", handshake.MAGIC, *(handshake.MAGIC + bytes([kind]) for kind in KINDS))
    for parser in PARSERS:
        for head in heads:
            with contextlib.suppress(BadFrame):
                check(parser(head + data))


def check(value):
    """Check that an accepted value is usable: it can be proven and packed again, and its size is allowed."""
    if isinstance(value, Hello) and len(value.identity.encode()) <= handshake.IDENTITY_NBYTES:
        handshake.prove(bytes(32), "id", b"connect", value, 2, bytes(32))
        assert Hello.unpack(value.pack()) == value
    if isinstance(value, host_map.Endpoint):
        assert host_map.unpack_endpoint(host_map.pack_endpoint(value)) == value
    if isinstance(value, tuple) and isinstance(value[1], list):
        assert 1 <= len(value[1]) <= 4096
        numbers = [row.host for row in value[1]]
        host_map.place_of(0, numbers if numbers[0] == 0 else [0, *numbers])


def stream(data):
    """The same bytes from a socket, in two pieces: no frame is longer than asked for, none has no bytes."""
    ours, theirs = socket.socketpair()
    sock, half = framed_socket.FramedSocket(ours), len(data) // 2
    try:
        for piece in (data[:half], data[half:]):
            theirs.send(piece)
            while True:
                frame = sock.receive(handshake.UNPROVEN_NBYTES)
                if not frame:
                    break
                assert len(frame) <= handshake.UNPROVEN_NBYTES
            assert len(sock._begun) < handshake.UNPROVEN_NBYTES + 2
    except BadFrame:
        pass
    finally:
        sock.close()
        theirs.close()


def address(data):
    with contextlib.suppress(ValueError):
        host, port = settings.parse_address("address", data.decode("utf-8", "replace"))
        assert host
        assert 1 <= port <= 65535


def one_input(data):
    parse(data)
    stream(data)
    address(data)


def seeds():
    """Return the real frames, without the part that `parse` puts before them."""
    request = world.JoinRequest(world.world(2), 1, "a" * 64, Deadline(0.0))
    frames = [
        request.hello(0, handshake.COORDINATOR).pack(),
        Challenge(2, bytes(32), bytes(32), bytes(16)).pack(),
        handshake.pack_proof(bytes(32)),
        handshake.pack_frame(handshake.FAILED, TimeoutError("late")),
        host_map.pack_endpoint(host_map.Endpoint("::1", 5000)),
        *host_map.pack_table(ROWS * 4, bytes(16)),
    ]
    return [frame[len(handshake.MAGIC) :] for frame in frames] + [b"[::1]:5000", b"\0\x05hello"]


def main():
    import atheris

    ours = {module.__name__ for module in (handshake, framed_socket, host_map, settings)}
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and function.__module__ in ours:
            atheris.instrument_func(function)  # the fuzzer sees which lines an input reaches
    with tempfile.TemporaryDirectory() as corpus:
        for at, seed in enumerate(seeds()):
            (Path(corpus) / str(at)).write_bytes(seed)
        atheris.Setup([sys.argv[0], "-max_len=2100", corpus, *sys.argv[1:]], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
