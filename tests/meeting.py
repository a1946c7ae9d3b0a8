"""For the tests of meeting: ranks as threads or processes, strangers that knock. May know: bootstrap,
neighbours."""

import socket
import subprocess
import sys
import textwrap
import threading
import time

from shmring import neighbours
from shmring.bootstrap import join, world


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


def joining(meeting, rank, *, timeout_s=10.0, node=None, after_s=0.0):
    """The links of a rank that joins a world of one host."""
    return lambda: time.sleep(after_s) or join(meeting, rank, timeout_s=timeout_s, node=node).links


def meet(nprocs):
    meeting = world(nprocs)
    links = in_threads(*(joining(meeting, rank) for rank in range(nprocs)))
    assert not [error for error in links if isinstance(error, BaseException)]
    return links


def close(links):
    for link in links:
        link.close()


def soon():
    return time.monotonic() + 10


def nothing():
    """No check."""


def settle():
    """Let the others get on: in small steps, as a sleep of a machine that stood still is over at once."""
    for _ in range(10):
        time.sleep(0.03)


def knock(meeting):
    """A stranger's connection to rank 0, as soon as that listens."""
    until = soon()
    while time.monotonic() < until:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            stranger.connect(neighbours.meeting_point(meeting))
            return stranger
        except ConnectionRefusedError:
            stranger.close()
            time.sleep(0.005)
    raise AssertionError("rank 0 does not listen")


def python(code, *arguments):
    """A process that runs code with the environment of this one."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
