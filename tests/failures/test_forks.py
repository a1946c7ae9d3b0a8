"""A forked child that uses its parent's communicator gets an error, or a harmless answer; the parent and the
other ranks notice nothing. Children that never use it, and subprocesses, are no failures."""

import atexit
import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from ranks import when_there

import shmring
from shmring._system import procfs

LONG = 2_000_000  # elements that no ring takes at once


def every_call(c):
    """Return every call of a communicator, by name; those that any process may make are in ANSWERED."""
    x, square, lists = np.ones(8), np.ones((c.size, 2)), [np.ones(3)] * c.size
    last = c.size - 1
    return {
        "all_reduce": lambda: c.all_reduce(x),
        "in the background": lambda: c.all_reduce(x, async_op=True),
        "reduce": lambda: c.reduce(x),
        "scan": lambda: c.scan(x),
        "exscan": lambda: c.exscan(x),
        "reduce_scatter": lambda: c.reduce_scatter(square),
        "broadcast": lambda: c.broadcast(x),
        "scatter": lambda: c.scatter(square, c.rank),
        "gather": lambda: c.gather(x),
        "all_gather": lambda: c.all_gather(x),
        "all_to_all": lambda: c.all_to_all(square),
        "all_gather_v": lambda: c.all_gather_v(x),
        "all_gather_v in the background": lambda: c.all_gather_v(x, async_op=True),
        "gather_v": lambda: c.gather_v(x),
        "scatter_v": lambda: c.scatter_v(lists, c.rank),
        "all_to_all_v": lambda: c.all_to_all_v(lists),
        "all_reduce_many": lambda: c.all_reduce_many([x, square]),
        "barrier": c.barrier,
        "broadcast_object": lambda: c.broadcast_object(1, c.rank),
        "all_gather_object": lambda: c.all_gather_object(1),
        "gather_object": lambda: c.gather_object(1),
        "scatter_object": lambda: c.scatter_object([1] * c.size, c.rank),
        "send": lambda: c.send(x, last),
        "send to itself": lambda: c.send(x, c.rank),
        "recv": lambda: c.recv(x),
        "sendrecv": lambda: c.sendrecv(x, last, x.copy()),
        "isend": lambda: c.isend(x, last),
        "irecv": lambda: c.irecv(x),
        "probe": c.probe,
        "iprobe": c.iprobe,
        "send_object": lambda: c.send_object(1, last),
        "recv_object": c.recv_object,
        "empty": lambda: c.empty(3),
        "full": lambda: c.full(3, 1),
        "copy_of": lambda: c.copy_of(x),
        "shared": lambda: c.shared(3),
        "split": lambda: c.split(0),
        "group": lambda: c.group([0]),
        "dup": c.dup,
        "plan": lambda: c.plan("all_reduce", x),
        "abort": lambda: c.abort("from a child"),
        "a wrong array": lambda: c.all_reduce("x"),
        "a wrong color": lambda: c.split("x"),
        "a wrong shape": lambda: c.empty("x"),
        "what does not pickle": lambda: c.broadcast_object(threading.Lock(), c.rank),
    }


ANSWERED = ["rank", "size", "local_rank", "local_size", "node", "num_nodes", "parent_ranks", "wire"]


def touch(comm, held):
    """Run in the child: return {call: its error}, for each call that must raise Closed and does not."""
    wrong = {}
    for c in (comm, held["group"]):
        for name in ANSWERED:
            getattr(c, name)
        assert "closed" in repr(c)
        c.stats()
        refused = every_call(c)
        if c is comm:
            pending, shared = held["pending"], held["shared"]
            refused |= {
                "a plan's call": held["plan"],
                "wait": pending.wait,
                "result": pending.result,
                "fileno": pending.fileno,
                "a transfer's wait": held["receive"].wait,
                "a transfer's done": held["receive"].done,
                "fence": shared.fence,
                "lock": shared.lock(0).__enter__,
            }
        for name, call in refused.items():
            try:
                wrong[name] = f"returned {call()!r}"
            except shmring.Closed:
                continue
            except BaseException as error:
                wrong[name] = repr(error)
    assert held["done"].done()
    assert held["done"].wait() is None
    assert not held["pending"].done()
    with contextlib.suppress(KeyError), comm:
        raise KeyError("of the child's own")
    held["group"].close()
    comm.close()
    return wrong


def in_child(function, *args, ends_in_order=False):
    """Return the result of function(*args) in a forked child of this process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = "nothing"
        try:
            answer = repr(function(*args))
            if ends_in_order:
                gc.collect()
                atexit._run_exitfuncs()
        except BaseException as error:
            answer = repr(f"{error!r}")
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return {name: target for name, target in found.items() if not target.startswith("/proc")}


def fork_with_everything_under_way(comm, where):
    mine = comm.empty(1000)
    mine[:] = 1
    held = {
        "group": comm.split(0),
        "shared": comm.shared(100, locks=2),
        "plan": comm.plan("all_reduce", np.ones(5)),
        "done": comm.all_reduce(np.ones(4), async_op=True),
    }
    held["done"].wait()
    x = np.full(50_000, comm.rank + 1.0)
    messages = "{}"
    if comm.rank == 0:
        held["pending"] = comm.all_reduce(x, async_op=True)
        held["receive"] = comm.irecv(np.ones(3), 1)
        held["send"] = comm.isend(np.ones(LONG), 1)
        before = descriptors()
        if where == "a thread":
            messages = []
            thread = threading.Thread(target=lambda: messages.append(in_child(touch, comm, held)))
            thread.start()
            thread.join()
            messages = messages[0]
        else:
            messages = in_child(touch, comm, held, ends_in_order=where == "a child that ends in order")
        assert descriptors() == before
        comm.send(b"now", 1, tag=9)
        held["receive"].wait()
        held["send"].wait()
    else:
        comm.recv(bytearray(3), 0, tag=9)
        held["pending"] = comm.all_reduce(x, async_op=True)
        comm.send(np.ones(3), 0)
        long = np.zeros(LONG)
        comm.recv(long, 0)
        assert long.sum() == LONG
    held["pending"].wait()
    assert (x == 3).all()
    comm.all_reduce(mine)
    assert (mine == 2).all()
    held["group"].all_reduce(mine)
    assert (mine == 4).all()
    held["shared"].fence()
    with held["shared"].lock(0):
        pass
    comm.empty(50)
    comm.split(0).close()
    return messages


@pytest.mark.parametrize("where", ["a child", "a child that ends in order", "a thread"])
@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_a_forked_child_is_refused_everything_and_disturbs_nobody(world_over_hosts, world_of, nodes, where):
    ranks = world_of(2) if nodes == [0, 0] else world_over_hosts(nodes)
    for text in ranks(fork_with_everything_under_way, where):
        assert text == "{}", text


def fork_in_a_handler(comm, how, forked):
    """A handler forks while rank 0 waits, and the child comes back to the call. Return its exit code."""
    x = np.full(5000, comm.rank + 1.0)
    calls = {
        "a call": lambda: comm.all_reduce(x),
        "a call in the background": lambda: comm.all_reduce(x, async_op=True).wait(),
        "a receive": lambda: comm.recv(x, 1) if comm.rank == 0 else comm.send(x, 0),
    }
    if comm.rank == 1:
        when_there(forked)
        calls[how]()
        comm.barrier()
        return None
    code = fork_while_waiting(calls[how], forked.touch)
    assert (x == (2 if how == "a receive" else 3)).all()
    comm.barrier()
    return code


@pytest.mark.parametrize("how", ["a call", "a call in the background", "a receive"])
def test_the_child_of_a_signal_handler_does_not_go_on_with_the_call(world_of, tmp_path, how):
    assert world_of(2)(fork_in_a_handler, how, tmp_path / "forked") == [0, None]


def fork_while_waiting_for_a_lock(comm, forked):
    array = comm.shared(1, locks=1)
    if comm.rank == 1:
        with array.lock(0):
            comm.barrier()
            when_there(forked)
        comm.barrier()
        return None

    def take():
        with array.lock(0):
            pass

    comm.barrier()
    code = fork_while_waiting(take, forked.touch)
    comm.barrier()
    return code


def fork_while_getting(comm):
    with shmring.Ring(1 << 16) as ring:
        return fork_while_waiting(ring.get, lambda: ring.put(b"item"))


def fork_while_waiting(wait, end):
    """A handler forks during wait(), and calls end() after the child. Return the exit code of the child."""
    child = None

    def fork(*_):
        nonlocal child
        child = os.fork()
        if child:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            end()

    before = signal.signal(signal.SIGALRM, fork)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    error = _error_of(wait)
    if child == 0:
        os._exit(0 if isinstance(error, shmring.Closed) else 1)
    signal.signal(signal.SIGALRM, before)
    assert error is None
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_child_of_a_signal_handler_gets_no_lock(world_of, tmp_path):
    assert world_of(2)(fork_while_waiting_for_a_lock, tmp_path / "forked") == [0, None]


def test_the_child_of_a_signal_handler_gets_nothing_from_a_ring(world_of):
    assert world_of(1)(fork_while_getting) == [0]


def put_and_fork(comm):
    """A ring's side belongs to the process that used it first."""
    with shmring.Ring(1 << 16) as ring:
        ring.put(b"one")
        text = in_child(lambda: type(_error_of(ring.put, b"two")).__name__)
        ring.put(b"three")
        return text, ring.get(), ring.get()


def _error_of(call, *args):
    try:
        call(*args)
    except BaseException as error:
        return error


def test_a_forked_child_does_not_put_into_its_parents_ring(world_of):
    text, *got = world_of(1)(put_and_fork)[0]
    assert got == [b"one", b"three"]
    assert text != "'NoneType'", "put by two processes"


# ---- no false alarms --------------------------------------------------------------------------------------


def run_a_program(*_):
    return subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).returncode


def spawn_a_program(*_):
    pid = os.posix_spawn("/bin/true", ["true"], os.environ)
    return os.waitpid(pid, 0)[1]


def fork_and_exec(*_):
    pid = os.fork()
    if pid == 0:
        os.execv("/bin/true", ["true"])
    return os.waitpid(pid, 0)[1]


def fork_and_end(*_):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def fork_and_leave_it(*_):
    pid = os.fork()
    if pid == 0:
        time.sleep(1.5)
        os._exit(0)
    return 0


def use_a_pool(*_):
    # Not `with`: its terminate() may kill a worker that holds the queue's lock, and then waits for ever.
    pool = multiprocessing.get_context("fork").Pool(2)
    total = sum(pool.map(abs, range(5)))
    pool.close()
    pool.join()
    return total - 10


CHILDREN = (run_a_program, spawn_a_program, fork_and_exec, fork_and_end, fork_and_leave_it, use_a_pool)


def call_beside(comm, child):
    """Rank 0 has a child while the others wait for it."""
    x = np.ones(5000)
    for _ in range(3):
        code = child() if comm.rank == 0 else 0
        comm.all_reduce(x, "max")
        works = [comm.all_reduce(x, "max", async_op=True) for _ in range(3)]
        code = code or (child() if comm.rank == 0 else 0)
        for work in works:
            work.wait()
    return code, float(x[0])


@pytest.mark.parametrize("child", CHILDREN)
def test_children_are_no_failures(world_of, child):
    assert world_of(3)(call_beside, child) == [(0, 1.0)] * 3


def fork_a_child_that_leaves(comm, how):
    """The child leaves the function that spawn runs. Return its exit code."""
    pid = os.fork()
    if pid == 0:
        if how == "exit":
            sys.exit(3)
        return "the child's"
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    comm.barrier()
    return code


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("return", 0)])
def test_what_a_forked_child_returns_is_not_its_ranks(how, code):
    assert shmring.spawn(fork_a_child_that_leaves, 2, args=(how,), method="fork", timeout=30) == [code] * 2


def join_in_a_thread_that_ends(world, rank, answers):
    comms = []
    thread = threading.Thread(target=lambda: comms.append(shmring.init(world, rank=rank, timeout=20)))
    thread.start()
    thread.join()
    gc.collect()
    x = np.ones(5000)
    for count in (5, 500, 5000):
        for _ in range(50):
            comms[0].all_reduce(x[:count], "max")
        time.sleep(0.1)
        another = threading.Thread(target=comms[0].all_reduce, args=(x,))
        another.start()
        another.join()
    answers.send(float(x[0]))
    comms[0].close()


def leave_the_main_thread(world, rank, answers):
    """End the main thread and go on in another one; the entry of the process in /proc is a zombie's."""
    import ctypes

    def go_on():
        time.sleep(0.2)
        comm = shmring.init(world, rank=rank, timeout=20)
        x = np.ones(5000)
        comm.all_reduce(x)
        time.sleep(0.3)
        comm.all_reduce(x)
        answers.send(float(x[0]))
        comm.close()
        os._exit(0)

    threading.Thread(target=go_on).start()
    ctypes.CDLL(None).pthread_exit(None)


@pytest.mark.parametrize(("how", "result"), [(join_in_a_thread_that_ends, 8.0), (leave_the_main_thread, 4.0)])
def test_a_thread_that_ends_is_no_failure(how, result):
    context = multiprocessing.get_context("fork")
    world, (ours, theirs) = shmring.world(2), context.Pipe()
    ranks = [context.Process(target=how, args=(world, rank, theirs)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    got = [ours.recv() if ours.poll(30) else None for _ in ranks]
    for rank in ranks:
        rank.join(20)
    assert got == [result] * 2


def test_a_process_that_has_anothers_number_is_not_that_one():
    own = os.getpid(), procfs.start_time(os.getpid())
    assert procfs.state(*own) not in ("gone", "dead")
    assert procfs.state(own[0], own[1] + 1) == "gone"


def put_without_a_main_thread(ring):
    import ctypes

    def go_on():
        time.sleep(0.4)
        for number in range(3):
            ring.put(bytes([number]))
            time.sleep(0.2)
        ring.close()
        os._exit(0)

    threading.Thread(target=go_on).start()
    ring.put(b"first")
    ctypes.CDLL(None).pthread_exit(None)


def test_a_putter_without_its_main_thread_is_not_gone():
    with shmring.Ring(1 << 16) as ring:
        putter = multiprocessing.get_context("fork").Process(target=put_without_a_main_thread, args=(ring,))
        putter.start()
        assert [ring.get(timeout=20) for _ in range(4)] == [b"first", b"\0", b"\1", b"\2"]
        putter.join()
