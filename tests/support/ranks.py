"""Ranks for tests: processes (or threads) that stay, so that hundreds of cases share one start.

`with Ranks(4) as ranks: ranks.meet(SHMRING_CHUNK=256); ranks(function, *args)` runs function(comm, *args) in
every rank and returns the results by rank.
"""

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
import traceback

from leftovers import state_of
from waiting import is_time_up, wait_until

import shmring

# The communicator's timeout: its own error comes before that of the test, and has more details.
CALL_TIMEOUT_S = 40
# Seconds that the ranks may take in all before they are shown and killed, unless the test's time is up
# before. Beside busy CPUs some take 50.
ANSWER_S = 100
TICK_S = 0.5
PR_SET_PDEATHSIG = 1
FIRST_PORT, PORTS = 29555, 1000  # of worlds over hosts: each has its own, for a while
FORK = multiprocessing.get_context("fork")


def turns(comm, path_when_running):
    """Yield 0, 1, 2 … without end, for calls that a test interrupts; rank 0 makes a file when they run, see
    when_there."""
    for turn in itertools.count():
        if turn == 20 and comm.rank == 0:
            with open(path_when_running, "w"):
                pass
        yield turn


def when_there(path, ranks=None):
    """Return some calls after a rank has made the file. ranks: see wait_until."""
    until_there(path, ranks)
    time.sleep(0.02)


def until_there(path, ranks=None):
    """Block until another process has made the file. ranks: see wait_until."""
    wait_until(lambda: os.path.exists(path), f"there is a file {path}", ranks)


def until_stopped(pid):
    """Block until a process has stopped, as it was or will be ordered to."""
    wait_until(lambda: state_of(pid) in "TZX", f"process {pid} has stopped")
    assert state_of(pid) == "T", f"process {pid} has ended"


def interrupted(call, after_s):
    """Call it, with Ctrl-C after some time."""
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
    return call()


def interrupt_once_there(x):
    """Send this process Ctrl-C once the first element of an array of zeros has come."""

    def watch():
        while not x[0]:
            time.sleep(0.0001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch).start()


def interrupt_a_sender(comm, sender, pid):
    """Send Ctrl-C to rank `sender`, a process, once its message has begun to come."""
    wait_until(lambda: comm.iprobe(sender) is not None, f"a message of rank {sender} begins to come")
    os.kill(pid, signal.SIGINT)


def free_port(count=1):
    """Return the first of `count` ports on which no process listens.

    They are below those that the kernel gives to outgoing connections, and no two workers of pytest
    get the same: of two that find a port free at the same moment, one would find it taken later.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = 10000 // workers
    while True:
        first = 20000 + worker * share + random.randrange(share - count + 1)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + count):
                probe = probes.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first


class Died:
    """The answer of a rank that was killed: its exit code, negative for a signal."""

    def __init__(self, exitcode):
        self.exitcode = exitcode

    def __repr__(self):
        return f"Died({self.exitcode})"


class Ranks:
    """A world of `size` ranks that do what the test orders; `environ` goes to their environment.

    on: by rank, its host of hosts.py; worlds then have an address, on rank 0's host. nodes: by rank, its
    number of a pretended host.
    """

    def __init__(self, size, *, threads=False, on=None, nodes=None):
        assert not threads or (on is None and nodes is None)
        assert len(on or nodes or range(size)) == size
        self.size = size
        self.hosts = on
        self.nodes = nodes
        self._worlds = itertools.count()
        self._threads = threads
        self._environ = {}
        self._answer_s = ANSWER_S
        self._owing = set()  # ranks whose answer the test has not had
        self._answered = {}  # by rank: its answer to the last order, once it is there
        self._pipes = []
        self._ranks = []

    def __enter__(self):
        for rank in range(self.size):
            ours, theirs = FORK.Pipe()
            start = threading.Thread if self._threads else FORK.Process
            host = self.hosts[rank] if self.hosts else None
            self._ranks.append(start(target=_serve, args=(rank, theirs, self._threads, host)))
            self._ranks[-1].start()
            self._pipes.append(ours)
            if not self._threads:
                theirs.close()  # or the end of this rank would not be seen: its siblings would hold it open
        return self

    def __exit__(self, *_):
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        until = time.monotonic() + 10
        for rank in self._ranks:
            rank.join(max(0.0, until - time.monotonic()))
            if not self._threads and rank.is_alive():
                rank.kill()
                rank.join()
        for pipe in self._pipes:
            pipe.close()

    def meet(self, *, timeout_s=CALL_TIMEOUT_S, address=None, **environ):
        """Every rank leaves its communicator, if it has one, and joins a new world with the others.

        timeout_s: of their calls; to meet they have CALL_TIMEOUT_S at least. address: over hosts, another
        than the first of rank 0's. environ: the SHMRING_* variables that the ranks shall have now, and no
        others.
        """
        self._environ = {name: str(value) for name, value in environ.items()}
        outcomes = self.try_to_meet(timeout_s=max(timeout_s, CALL_TIMEOUT_S), address=address)
        self._raise_first(dict(enumerate(outcomes)))
        if timeout_s < CALL_TIMEOUT_S:
            self(_set_timeout, timeout_s)
        return self

    def try_to_meet(self, *, timeout_s=CALL_TIMEOUT_S, address=None, of_rank=None):
        """By rank: None, or the exception that joining raised. of_rank: {rank: its own variables}."""
        world, of_rank = self._world(address), of_rank or {}
        self._answer_s = max(ANSWER_S, 2 * timeout_s)
        self._order(lambda rank: ("meet", world, timeout_s, self._environ_of(rank) | of_rank.get(rank, {})))
        return self.answers()

    def _environ_of(self, rank):
        return self._environ | ({"SHMRING_NODE": f"node {self.nodes[rank]}"} if self.nodes else {})

    def _world(self, address):
        world = shmring.world(self.size)
        if self.nodes:
            return dataclasses.replace(world, address=address or f"127.0.0.1:{free_port()}")
        if not self.hosts:
            return world
        port = FIRST_PORT + next(self._worlds) % PORTS
        return dataclasses.replace(world, address=address or f"{self.hosts[0].address}:{port}")

    def are_idle(self):
        """Return whether all ranks live and none has an answer outstanding."""
        return not self._owing and (self._threads or all(rank.is_alive() for rank in self._ranks))

    def pid(self, rank):
        return self._ranks[rank].pid

    def kill(self, rank, sig=signal.SIGKILL):
        os.kill(self.pid(rank), sig)

    def begin(self, function, *args):
        """Let every rank call function(comm, *args); `answers` waits for the results."""
        self._order(lambda rank: ("call", function, args))

    def _order(self, order_of):
        self._owing = set(range(self.size))
        self._answered = {}
        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(BrokenPipeError):
                pipe.send(order_of(rank))

    def answers(self, among=None):
        """Return by rank: its result, the exception that it raised, or Died."""
        # Count waits, not the clock, as the watchdog does: a machine may stand still for a minute.
        ticks = iter(range(int(self._answer_s / TICK_S)))
        return [self._answer(rank, ticks) for rank in (range(self.size) if among is None else among)]

    def check_early_answers(self):
        """Raise the first error that a rank has answered. Return whether all ranks have answered."""
        self._receive_what_is_there()
        self._raise_first({rank: self._answered[rank] for rank in self._owing & self._answered.keys()})
        return len(self._answered) == self.size

    def outcomes(self, function, *args):
        """Like a call of this object, but exceptions are returned in place of results."""
        self.begin(function, *args)
        return self.answers()

    def __call__(self, function, *args):
        """The results of function(comm, *args) by rank; the first exception is raised."""
        outcomes = self.outcomes(function, *args)
        self._raise_first(dict(enumerate(outcomes)))
        return outcomes

    def _answer(self, rank, ticks):
        while not self._receive(rank, TICK_S):
            if next(ticks, None) is None or is_time_up():
                self._receive_what_is_there()
                self.show_and_kill()
                raise AssertionError(
                    f"rank {rank} of {self.size} has not answered in time; all: {self._answered!r:.1500}"
                )
        self._owing.discard(rank)
        return self._answered[rank]

    def _receive_what_is_there(self):
        for rank in range(self.size):
            self._receive(rank, 0)

    def _receive(self, rank, timeout_s):
        """Return whether the rank has answered, after waiting for it."""
        if rank not in self._answered:
            if not self._pipes[rank].poll(timeout_s):
                return False
            try:
                self._answered[rank] = self._pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                self._ranks[rank].join(5)
                self._answered[rank] = Died(self._ranks[rank].exitcode)
        return True

    def _raise_first(self, outcomes):
        """Raise the first exception among the outcomes by rank."""
        for rank, outcome in outcomes.items():
            if isinstance(outcome, (BaseException, Died)):
                failure = outcome
                if not isinstance(outcome, Exception):  # a rank's KeyboardInterrupt would end the test run
                    failure = AssertionError("\n".join([repr(outcome), *getattr(outcome, "__notes__", [])]))
                everything = list(outcomes.values())
                failure.add_note(
                    f"in rank {rank} of {self.size} with {self._environ}; all: {everything!r:.1500}"
                )
                raise failure

    def show_and_kill(self):
        """Let the ranks print their stacks, and end them. Threads stay."""
        if self._threads:
            return
        # The first makes the ranks print their position, through faulthandler.
        for sig in (signal.SIGABRT, signal.SIGKILL):
            for rank in self._ranks:
                if rank.is_alive():
                    os.kill(rank.pid, sig)
            time.sleep(0.5)


def _serve(rank, pipe, in_thread, host):
    """Run one rank: carry out the orders from the pipe until None comes."""
    if host is not None:
        host.enter()
    if not in_thread:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (order := pipe.recv()) is not None:
            try:
                if order[0] == "meet":
                    comm = _meet(comm, rank, *order[1:])
                    answer = None
                else:
                    answer = order[1](comm, *order[2])
            except BaseException as error:
                answer = _without_frames(error)
            _send(pipe, answer)
    if comm is not None:
        comm.close()
    pipe.close()


def _meet(comm, rank, world, timeout_s, environ):
    if comm is not None:
        comm.close()
    gc.collect()  # frees what tracebacks of the test before keep, such as a duplicate of its communicator
    for name in [name for name in os.environ if name.startswith("SHMRING_")]:
        del os.environ[name]
    os.environ.update(environ)
    return shmring.init(world, rank=rank, timeout=timeout_s)


def _set_timeout(comm, timeout_s):
    comm.timeout_s = timeout_s


def _without_frames(error):
    """An exception that crosses a pipe, with its traceback as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def _send(pipe, answer):
    try:
        pipe.send(answer)
    except (OSError, EOFError):
        raise
    except Exception as error:
        pipe.send(AssertionError(f"{answer!r:.300} cannot be sent: {error}"))


def raised(call, *arguments, **keywords):
    """Return the error that a call on a rank raises, in words; None if it returns."""
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
