"""Events during a call: other threads, signal handlers, garbage collection of communicators, the end of the
interpreter, other interpreters. Each is served in turn or refused, and harms nothing."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from ranks import until_there
from snapshots import signal_in_a_call
from waiting import wait_until

import shmring
from shmring._arrays import allocator
from shmring._system import segments

BUSY = "thread"  # of every refusal


def in_process(code, *arguments, timeout=60):
    """Return the output of another process that runs code."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- threads ----------------------------------------------------------------------------------------------

SEVERAL_STEPS = {
    "empty": lambda c: c.empty(64),
    "shared": lambda c: c.shared(64),
    "split": lambda c: c.split(0),
    "group": lambda c: c.group([0, 1]),
    "broadcast_object": lambda c: c.broadcast_object("object"),
    "all_gather_object": lambda c: c.all_gather_object("object"),
    "all_gather_v": lambda c: c.all_gather_v(np.ones(900)),
    "all_reduce_many": lambda c: c.all_reduce_many([np.ones(900), np.ones(9, "f4")]),
}
REFUSED = {
    **SEVERAL_STEPS,
    "barrier": lambda c: c.barrier(),
    "all_reduce": lambda c: c.all_reduce(np.ones(3)),
    "in the background": lambda c: c.all_reduce(np.ones(3), async_op=True),
    "a wrong argument": lambda c: c.all_reduce("text"),
    "close": lambda c: c.close(),
}


def call_between_the_steps(comm):
    """While one thread is between the steps of a call another one is refused every call."""
    enter, leave = threading.Event(), threading.Event()
    create = allocator.Arrays._create

    def create_late(self, nbytes):
        enter.set()
        leave.wait(20)
        return create(self, nbytes)

    if comm.rank != 0:
        comm.empty(64)
        return comm.all_gather_object(comm.rank)
    allocator.Arrays._create = create_late
    thread = threading.Thread(target=comm.empty, args=(64,))
    thread.start()
    enter.wait(20)
    for call in REFUSED.values():
        with pytest.raises(RuntimeError, match=BUSY):
            call(comm)
    leave.set()
    thread.join()
    allocator.Arrays._create = create
    return comm.all_gather_object(comm.rank)


def test_between_the_steps_of_a_call_other_threads_are_refused(world_of):
    assert world_of(3)(call_between_the_steps) == [[0, 1, 2]] * 3


def call_alike_in_two_threads(comm, name):
    """Each call is whole or refused, whichever thread is first on which rank."""
    together = threading.Barrier(2)

    def call():
        for _ in range(10):
            together.wait(20)
            while True:
                try:
                    SEVERAL_STEPS[name](comm)
                    break
                except shmring.Error:
                    raise
                except RuntimeError:
                    time.sleep(0.0005)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    x = np.ones(9)
    comm.all_reduce(x)
    return float(x[0])


@pytest.mark.parametrize("name", SEVERAL_STEPS)
def test_calls_of_several_steps_in_two_threads_do_not_mix(world_of, name):
    assert world_of(2)(call_alike_in_two_threads, name) == [2.0] * 2


def issue_from_two_threads(comm):
    works = [], []

    def issue(mine):
        for _ in range(200):
            mine.append(comm.all_reduce(np.ones(2000), async_op=True))

    threads = [threading.Thread(target=issue, args=(mine,)) for mine in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waiters = [threading.Thread(target=lambda mine=mine: [work.wait() for work in mine]) for mine in works]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    return sum(work.done() for mine in works for work in mine)


def test_calls_of_two_threads_in_the_background(world_of):
    assert world_of(2)(issue_from_two_threads) == [400] * 2


def collect_in_another_thread(comm, before):
    for _ in range(5):
        group = [comm.split(0)]
        group[0].all_reduce(np.ones(5000), async_op=True)
        thread = threading.Thread(target=group.clear)
        thread.start()
        thread.join()
    # The last is released with its call, once the background has finished that.
    wait_until(lambda: count_segments(comm) <= before, "the groups are released")


def count_segments(comm):
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("memfd:shmring" in line for line in maps)


def test_a_communicator_may_be_collected_in_another_thread(world_of):
    ranks = world_of(2)
    before = max(ranks(count_segments))  # more than 1 if an earlier test has left an array
    ranks(collect_in_another_thread, before)


# ---- signals ----------------------------------------------------------------------------------------------


def handle_while_waiting(comm, handled_path, name):
    """A handler that returns lets the call go on; one that calls the communicator itself is refused."""
    messages = []

    def handler(*_):
        for call in (comm.barrier, lambda: comm.empty(3), comm.close):
            try:
                call()
                messages.append("nothing")
            except shmring.Error as error:
                messages.append(repr(error))
            except RuntimeError:
                messages.append("refused")
        handled_path.touch()

    signal.signal(signal.SIGUSR1, handler)
    if comm.rank == 1:
        until_there(handled_path)
    else:
        signal_in_a_call(comm, signal.SIGUSR1)
    x = np.full(9000, 1.0)
    if name == "all_reduce":
        comm.all_reduce(x)
    elif name == "behind another":
        comm.all_reduce(np.ones(60_000), async_op=True)
        comm.all_reduce(x)
    else:
        comm.all_reduce_many([x, np.ones(3)])
    comm.barrier()
    return float(x[0]), messages


@pytest.mark.parametrize("name", ["all_reduce", "behind another", "all_reduce_many"])
def test_a_handler_that_calls_the_communicator_is_refused(world_of, tmp_path, name):
    first, second = world_of(2)(handle_while_waiting, tmp_path / "handled", name)
    assert first == (2.0, ["refused"] * 3)
    assert second == (2.0, [])


def handle_while_arrays_are_made(comm, handled_path):
    """In a compound call another one is refused as well."""
    messages = []

    def handler(*_):
        for call in (lambda: comm.empty(3), lambda: comm.split(0), comm.close):
            try:
                call()
            except RuntimeError as error:
                messages.append(type(error).__name__)
        handled_path.touch()

    signal.signal(signal.SIGUSR1, handler)
    other = comm.broadcast_object(os.getpid(), 1)
    create = allocator.Arrays._create

    def create_late(self, nbytes):
        os.kill(other, signal.SIGUSR1)  # rank 1 has begun the call, and waits for this step
        until_there(handled_path)
        return create(self, nbytes)

    if comm.rank == 0:
        allocator.Arrays._create = create_late
    array = comm.full(100, 1.0)
    allocator.Arrays._create = create
    comm.all_reduce(array)
    return float(array[0]), messages


def test_a_handler_between_the_steps_of_a_call_is_refused_another(world_of, tmp_path):
    first, second = world_of(2)(handle_while_arrays_are_made, tmp_path / "handled")
    assert first == (2.0, [])
    assert second == (2.0, ["RuntimeError"] * 3)


def interrupt_the_first_long_call(comm):
    """It allocates the staging buffer; handlers of signals run meanwhile."""
    allocate, refused = segments.allocate, []

    def allocate_late(*arguments, **keywords):
        segments.allocate = allocate
        for call in (comm.close, comm.shrink, lambda: comm.all_reduce(np.ones(99))):
            with pytest.raises(RuntimeError, match=BUSY) as caught:
                call()
            refused.append(caught.type)
        allocate(*arguments, **keywords)

    if comm.rank == 0:
        segments.allocate = allocate_late
    x = np.ones(999)
    comm.all_reduce(x)
    return float(x[0]), refused


def test_nothing_comes_between_while_the_first_long_call_allocates(world_of):
    first, second = world_of(2)(interrupt_the_first_long_call)
    assert first == (2.0, [RuntimeError] * 3)
    assert second == (2.0, [])


# ---- the interpreter's end, and others ---------------------------------------------------------------------


@pytest.mark.parametrize("call", ["comm.all_reduce(x)", "comm.recv(x, 1)", "comm.empty(5)"])
def test_the_interpreter_may_end_with_daemon_threads_inside_a_call(call):
    """The other ranks then see that its rank has ended."""
    text = in_process(
        """
        import multiprocessing, sys, threading, time
        import numpy as np, shmring

        def other(world, call):
            comm = shmring.init(world, rank=0, timeout=20)
            x = np.ones(60_000)
            comm.all_reduce(x, async_op=True).wait()
            threading.Thread(target=lambda: eval(call), daemon=True).start()
            time.sleep(0.1)
            sys.exit(0)

        if __name__ == "__main__":
            world = shmring.world(2)
            rank = multiprocessing.get_context("fork").Process(target=other, args=(world, sys.argv[1]))
            rank.start()
            comm = shmring.init(world, rank=1, timeout=20)
            comm.all_reduce(np.ones(60_000))
            rank.join()
            try:
                comm.barrier()
            except shmring.Error as error:
                print(rank.exitcode, type(error).__name__, error.rank)
        """,
        call,
    )
    assert text == "0 RankFailed 0"


@pytest.mark.parametrize("kind", ["isolated", "legacy"])
def test_another_interpreter_says_that_it_cannot(kind):
    """An isolated one is refused by Python from 3.12 on. A legacy one shares everything, as in C programs."""
    text = in_process(
        """
        import sys
        if sys.version_info >= (3, 13):
            import _interpreters as interpreters
            number = interpreters.create(sys.argv[1])
        else:
            import _xxsubinterpreters as interpreters
            number = interpreters.create(isolated=sys.argv[1] == "isolated")
        error = interpreters.run_string(number, '''if True:
            import warnings
            warnings.simplefilter("ignore")
            try:
                import shmring
                shmring.Comm
            except ImportError as error:
                print(error, flush=True)
            ''')
        assert error is None, error
        """,
        kind,
    )
    by_python = kind == "isolated" and sys.version_info >= (3, 12)
    assert ("subinterpreters" if by_python else "only in the main interpreter") in text
