"""For the tests of starting: ranks as threads or processes, and peers that connect without the key."""

import contextlib
import socket
import subprocess
import sys
import textwrap
import threading
import time

from ranks import free_port

from shmring._bootstrap import handshake, local
from shmring._bootstrap.framed_socket import FramedSocket
from shmring._bootstrap.handshake import Challenge
from shmring._bootstrap.join import join, world
from shmring._config.settings import parse_address
from shmring._system.deadline import Deadline


def in_threads(*functions):
    """Each function's result or exception, all run at the same time."""
    outcomes = [None] * len(functions)

    def run(at, function):
        try:
            outcomes[at] = function()
        except BaseException as error:
            outcomes[at] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def then_notify(event, function):
    """Call it, then notify those that are `once(event, …)`, whatever the outcome."""

    def call():
        try:
            return function()
        finally:
            event.set()

    return call


def once(event, function):
    return lambda: event.wait(20) and function()


def joining(meeting, rank, *, timeout_s=10.0, node=None, after_s=0.0):
    """The sockets of a rank that joins a world of one host."""
    join_world = coming(meeting, rank, node=node, timeout_s=timeout_s, after_s=after_s)
    return lambda: join_world().local_sockets


def meet(nprocs):
    meeting = world(nprocs)
    sockets = in_threads(*(joining(meeting, rank) for rank in range(nprocs)))
    assert not [error for error in sockets if isinstance(error, BaseException)]
    return sockets


def close(sockets):
    for socks in sockets:
        socks.close()


def soon():
    return Deadline(10)


def nothing():
    """No check."""


def settle(times=1):
    """Let the others get on: in small steps, as a sleep of a machine that stood still is over at once."""
    for _ in range(10 * times):
        time.sleep(0.03)


def knock(meeting):
    """A pending peer's connection to rank 0, as soon as that listens."""
    until = soon()
    while not until.is_over():
        pending = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pending.connect(local.meeting_point(meeting))
            return pending
        except ConnectionRefusedError:
            pending.close()
            time.sleep(0.005)
    raise AssertionError("rank 0 does not listen")


def python(code, *arguments):
    """A process that runs code with the environment of this one."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def world_at(nprocs, host="127.0.0.1"):
    """A world of several nodes."""
    return world(nprocs, address=f"{host}:{free_port()}")


def coming(meeting, rank, *, node=None, timeout_s=20.0, after_s=0.0):
    """Return a rank that joins a world; the names of hosts distinguish them."""
    return lambda: time.sleep(after_s) or join(meeting, rank, deadline=Deadline(timeout_s), node=node)


def meet_on(nodes, meeting=None, **how):
    """Return what every rank of a new world has or raised after the start; rank r is on node nodes[r]."""
    meeting = meeting or world_at(len(nodes))
    return in_threads(*(coming(meeting, rank, node=node, **how) for rank, node in enumerate(nodes)))


def dial(meeting):
    """A pending peer's socket to rank 0 over TCP, as soon as that listens."""
    until = soon()
    while not until.is_over():
        with contextlib.suppress(ConnectionRefusedError):
            return FramedSocket(
                socket.create_connection(parse_address("address", meeting.address), timeout=10)
            )
        time.sleep(0.005)
    raise AssertionError("rank 0 does not listen")


def answer(sock, most_nbytes=4096):
    """Return the next frame on a socket; empty if the other side closed the connection."""
    return sock.await_frame(most_nbytes, soon(), 0.05, nothing)


def prove(sock, request, peer, purpose):
    """Prove to be the request's rank, as a connector does; the frame that follows."""
    hello = request.hello(peer, purpose)
    sock.send(hello.pack())
    challenge = Challenge.unpack(answer(sock))
    sock.send(handshake.pack_proof(request.prove(b"connect", hello, challenge.nprocs, challenge.nonce)))
    return answer(sock)
