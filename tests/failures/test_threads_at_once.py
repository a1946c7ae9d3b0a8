"""Several threads on one communicator, or on several at once: refused calls, and places where the interpreter
may switch threads in the middle."""

import contextlib
import os
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import until_there, when_there

import shmring
from shmring._diagnostics.flight_recorder import TraceBuffer


@contextlib.contextmanager
def switches_at_waits():
    """Let the interpreter switch threads only where one waits: none takes the GIL from one that runs."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


def begun(function, *args, ended=None):
    """Return a thread that waits in a function; `raised` is its error. ended: the file that it makes then."""

    def run():
        begins.set()
        try:
            function(*args)
        except BaseException as error:
            thread.raised = error
        finally:
            if ended is not None:
                ended.touch()

    begins, thread = threading.Event(), threading.Thread(target=run)
    thread.raised = None
    with switches_at_waits():
        thread.start()
        begins.wait()
    return thread


@contextlib.contextmanager
def once_this_waits(action):
    """Let another thread do something once this one waits in the block."""

    def run():
        begins.wait()
        action()

    begins, thread = threading.Event(), threading.Thread(target=run)
    with switches_at_waits():
        thread.start()
        begins.set()
        yield
    thread.join()


@switches_at_waits()
def close_while_a_call_begins(comm, begins, ended):
    x, y = np.ones(5000), np.ones(3)
    if comm.rank == 0:
        until_there(begins)
        comm.all_reduce(x)
        until_there(ended)
        comm.all_reduce(y)
        return None
    work = comm.all_reduce(x, async_op=True)
    closing = begun(comm.close, ended=ended)  # waits for the work, and lets other threads run
    with once_this_waits(begins.touch):
        comm.all_reduce(y)
    closing.join()
    work.wait()
    assert (x == 2).all()
    assert (y == 2).all()
    with pytest.raises(RuntimeError, match="another thread is inside a call"):
        raise closing.raised
    comm.close()
    return True


def test_close_does_not_take_a_call_from_another_thread(world_of, tmp_path):
    paths = tmp_path / "begins", tmp_path / "ended"
    assert world_of(2)(close_while_a_call_begins, *paths) == [None, True]


@switches_at_waits()
def close_while_a_receive_begins(comm, begins, ended):
    x, y = np.ones(5000), np.zeros(3)
    if comm.rank == 0:
        until_there(begins)
        comm.all_reduce(x)
        until_there(ended)
        comm.send(np.ones(3), 1)
        comm.barrier()
        return None
    work = comm.all_reduce(x, async_op=True)
    closing = begun(comm.close, ended=ended)
    with once_this_waits(begins.touch):
        comm.recv(y)
    closing.join()
    work.wait()
    assert (y == 1).all()
    with pytest.raises(RuntimeError, match="another thread is inside a call"):
        raise closing.raised
    comm.barrier()
    return True


def test_close_does_not_take_a_receive_from_another_thread(world_of, tmp_path):
    paths = tmp_path / "begins", tmp_path / "ended"
    assert world_of(2)(close_while_a_receive_begins, *paths) == [None, True]


def receive_at_once(comm, refused):
    x, y = np.zeros(3), np.zeros(3)
    if comm.rank == 0:
        when_there(refused)
        comm.send(np.ones(3), 1)
        return None
    receiving = begun(comm.recv, x)
    with pytest.raises(RuntimeError, match="another thread is sending or receiving"):
        comm.recv(y)
    refused.touch()
    receiving.join()
    assert (x == 1).all()
    return receiving.raised


def test_a_second_receive_at_once_is_refused(world_of, tmp_path):
    assert world_of(2)(receive_at_once, tmp_path / "refused") == [None, None]


class Slow:
    """An array whose address is available after an event, while other threads run."""

    def __init__(self, array, event):
        self.array, self.event = array, event

    @property
    def __array_interface__(self):
        self.event.wait()
        return self.array.__array_interface__


@switches_at_waits()
def fuse_at_once(comm, refused):
    arrays = [np.full(count, comm.rank + 1.0) for count in (300, 100)]
    event = threading.Event()

    def fuse_too_late():
        try:
            comm.all_reduce_many([Slow(np.full(300, -7.0), event), np.full(100, -7.0)])
        finally:
            refused.touch()

    if comm.rank == 0:
        when_there(refused)
        comm.all_reduce_many(arrays)
    else:
        late = begun(fuse_too_late)
        event.set()  # the other thread goes on once this one waits in its call
        comm.all_reduce_many(arrays)
        late.join()
        with pytest.raises(RuntimeError, match="another thread is inside a call"):
            raise late.raised
    return all((x == 3).all() for x in arrays)


def test_a_second_fused_call_leaves_the_first_ones_buffer_alone(world_of, tmp_path):
    assert world_of(2)(fuse_at_once, tmp_path / "refused") == [True, True]


@contextlib.contextmanager
def releases_in_another_thread(comm, path):
    """Let another thread do what the release of a shared array does, again and again. Yield the engine."""
    with comm.trace(path) as trace:
        engine = trace._engine
    is_over = threading.Event()

    def release():
        while not is_over.is_set():
            for _ in range(200):
                engine.set_blocks([], engine.blocks_version)
            time.sleep(0)  # lets the other thread have the GIL

    releasing = begun(release)
    try:
        yield engine
    finally:
        is_over.set()
        releasing.join()
    assert releasing.raised is None


def trace_beside_releases(comm, path):
    with releases_in_another_thread(comm, path) as engine:
        for _ in range(20_000):
            buffer = TraceBuffer(16)
            engine.trace_into(buffer)
            engine.stop_trace(buffer)


def test_a_trace_begins_and_ends_beside_releases(world_of, tmp_path):
    world_of(1)(trace_beside_releases, tmp_path / "trace.json")


def advance_beside_releases(comm, folder, turns):
    """Return, on rank 0, how many calls in the background go on only long after the other rank has come.

    Count short sleeps from then on, and not the time: a machine that stands still makes no call late.
    """
    x, nlate = np.ones(3), 0
    if comm.rank == 1:
        for turn in range(turns):
            time.sleep(0.2)
            (folder / f"came {turn}").touch()
            comm.all_reduce(x, "max")
        return None
    with releases_in_another_thread(comm, folder / "trace.json"):
        for turn in range(turns):
            work = comm.all_reduce(x, "max", async_op=True)
            until_there(folder / f"came {turn}")
            nsleeps = 0
            while not work.done():
                time.sleep(0.001)
                nsleeps += 1
            nlate += nsleeps > 100
    return nlate


def test_calls_in_the_background_go_on_beside_releases(world_of, tmp_path):
    assert world_of(2)(advance_beside_releases, tmp_path, 20)[0] <= 1


# Making a thread is slow here, so other threads request the background thread in the meantime.
ISSUE_AT_ONCE = """
import sys, threading, time
sys.path.insert(0, {tests!r})
import numpy as np, shmring
from ranks import Ranks

class SlowToBegin(threading.Thread):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.name == "shmring-progress":
            time.sleep(0.2)

def issue(comm):
    x = np.ones(3000)
    for work in [comm.all_reduce(x[:1000 * (i + 1)], async_op=True) for i in range(3)]:
        work.wait()

if __name__ == "__main__":
    with Ranks(4, threads=True) as ranks:
        ranks.meet()
        threading.Thread = SlowToBegin
        ranks(issue)
    print(sum(thread.name == "shmring-progress" for thread in threading.enumerate()))
"""


def test_a_process_has_one_thread_in_the_background(tmp_path):
    script = tmp_path / "issue_at_once.py"
    script.write_text(ISSUE_AT_ONCE.format(tests=str(Path(__file__).parents[1] / "support")))
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "1\n", ran.stderr


# While this thread starts the thread in the background, another one closes the communicator, or begins a
# compound call.
MEANWHILE = """
import sys, threading
import numpy as np, shmring

class SlowToBegin(threading.Thread):
    def start(self):
        if self.name == "shmring-progress":
            other.start()
            has_begun.wait()
        super().start()

def close():
    comm.close()
    has_begun.set()

def hold():
    has_begun.set()
    may_end.wait()

has_begun, may_end = threading.Event(), threading.Event()
comm = shmring.init()
what = dict(target=close) if sys.argv[1] == "close" else dict(target=comm.run_steps, args=(hold,))
other = threading.Thread(**what)
threading.Thread = SlowToBegin
try:
    comm.all_reduce(np.ones(3), async_op=True)
except (RuntimeError, shmring.Closed) as error:
    print(type(error).__name__, error)
may_end.set()
other.join()
if sys.argv[1] != "close":
    work = comm.all_reduce(np.ones(3), async_op=True)
    work.wait()
    print(comm.stats()["calls"])
"""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("close", ["Closed the communicator is closed"]),
        (
            "call",
            [
                "RuntimeError another thread is inside a call of this communicator; give each thread its own",
                "1",
            ],
        ),
    ],
)
def test_what_another_thread_does_while_the_thread_in_the_background_starts(what, expected):
    ran = subprocess.run([sys.executable, "-c", MEANWHILE, what], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines() == expected, ran.stderr


class Closing:
    """An array whose destructor closes a communicator."""

    def __init__(self, array, comm):
        self.array, self.comm = array, comm

    @property
    def __array_interface__(self):
        return self.array.__array_interface__

    def __del__(self):
        self.comm.close()


def close_in_a_destructor(comm, issued):
    if comm.rank == 0:
        when_there(issued)
        comm.all_reduce(np.ones(5000))
        return None
    interval_s = sys.getswitchinterval()
    try:
        work = comm.all_reduce(Closing(np.ones(5000), comm), async_op=True)
        issued.touch()
        # The thread in the background finishes the call, but does not release its array.
        sys.setswitchinterval(100)
        while not work.done():
            pass
        del work
        with pytest.raises(shmring.Closed):
            comm.all_reduce(np.ones(3), async_op=True)
    finally:
        sys.setswitchinterval(interval_s)
    return True


def test_a_destructor_closes_as_a_call_is_issued(world_of, tmp_path):
    assert world_of(2)(close_in_a_destructor, tmp_path / "issued") == [None, True]


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs free-threaded CPython")
def test_a_communicator_enables_the_gil_again():
    environ = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    command = [sys.executable, "-c", "import sys, shmring; shmring.Comm; print(sys._is_gil_enabled())"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "True\n", ran.stderr
    assert "The global interpreter lock (GIL) has been enabled" in ran.stderr
