"""Exceptions at inconvenient moments: two signals in succession, between the steps of a call, in the middle
of a message, in a destructor. A call that raises has either not begun, or ends the communicator on all ranks.
"""

import contextlib
import ctypes
import functools
import mmap
import operator
import os
import signal
import socket
import time
import weakref

import numpy as np
import pytest
from combinations import each_value
from ranks import Ranks, interrupt_a_sender, interrupt_once_there, interrupted, until_stopped, until_there
from snapshots import signal_in_a_call, until_given_up
from waiting import wait_until

import shmring
from shmring._arrays import allocator, shapes
from shmring._diagnostics import failures
from shmring._lifecycle import groups
from shmring.methods import compression, sparse, stepwise
from tests.collectives.test_errors import assert_all

LONG = 1 << 20  # elements: far more than a call does without waiting
TINY = 4096  # bytes of a message ring


def leave(*_):
    raise SystemExit(3)


def wait_for_signals(comm, patient, *signals):
    """Send rank 0 the signals while it waits in a call; the others come after its exception."""
    x = np.full(LONG, 1.0)
    if comm.rank != 0:
        until_given_up()
        return comm.all_reduce(x)
    signal.signal(signal.SIGTERM, leave)
    behind = comm.all_reduce(np.zeros(LONG), async_op=True) if patient == "behind" else None
    send = signal_in_a_call(comm, *signals)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        comm.all_reduce(x)
    send.join()
    assert behind is None or behind.done()
    comm.barrier()
    raise AssertionError("the communicator goes on") from caught.value


@pytest.mark.parametrize("patient", ["plain", "behind"])
@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_two_signals_at_once_end_the_communicator(world_of, patient, signals):
    errors = assert_all(world_of(2).outcomes(wait_for_signals, patient, *signals), shmring.Aborted)
    assert len({str(error) for error in errors}) == 1
    assert errors[0].rank == 0
    assert errors[0].op == "all_reduce"


def interrupt_the_end(comm, name, times, patient):
    """Send rank 0 more signals while it handles its first; each interrupts it at the same place."""
    if comm.rank == 0:
        signal.signal(signal.SIGTERM, leave)
        real = getattr(failures, name)

        def interrupted(*arguments, **keywords):
            nonlocal times
            if times > 0:
                times -= 1
                signal.raise_signal(signal.SIGTERM)
            return real(*arguments, **keywords)

        setattr(failures, name, interrupted)
        try:
            wait_for_signals(comm, patient, signal.SIGINT)
        finally:
            setattr(failures, name, real)
    wait_for_signals(comm, patient)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("patient", ["plain", "behind"])
@pytest.mark.parametrize("name", ["prepare_abort_error", "_error_of", "_snapshot"])
def test_signals_while_a_signal_is_handled_change_nothing(world_of, name, times, patient):
    assert_all(world_of(2).outcomes(interrupt_the_end, name, times, patient), shmring.Aborted)


def notify_in_spite_of(comm, name):
    """As interrupt_the_end, with the other rank waiting for a message on another host."""
    if comm.rank != 0:
        return comm.recv(np.zeros(1), 0)
    return interrupt_the_end(comm, name, 1, "plain")


@pytest.mark.parametrize("name", ["prepare_abort_error", "_error_of"])
def test_ranks_of_other_hosts_are_reported_whatever_comes_between(world_over_hosts, name):
    assert_all(world_over_hosts([0, 1]).outcomes(notify_in_spite_of, name), shmring.Aborted)


# ---- between the steps of a call ---------------------------------------------------------------------------


def broken(error):
    """A function that raises, as a signal handler or the want of memory would there."""

    def raise_it(*_, **__):
        if error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        raise error("between two steps")

    return raise_it


class Breaking:
    """Pickling it, or unpickling it, raises in a process where `broken_step` has the name of that step."""

    broken_step = None
    error = KeyboardInterrupt

    def __init__(self, nbytes):
        self.content = bytes(nbytes)

    def __reduce__(self):
        Breaking.pass_or_raise("pickle")
        return Breaking.rebuilt, (len(self.content), self.content)

    @staticmethod
    def rebuilt(nbytes, content):
        Breaking.pass_or_raise("unpickle")
        return Breaking(nbytes)

    @staticmethod
    def pass_or_raise(step):
        if step == Breaking.broken_step:
            Breaking.broken_step = None
            raise Breaking.error


def break_a_call(comm, where, error):
    """Rank 1 raises between two steps of a call that rank 0 makes as well."""
    calls = {
        "empty": lambda: comm.empty(LONG),
        "small object": lambda: comm.broadcast_object(Breaking(5)),
        "object": lambda: comm.broadcast_object(Breaking(LONG)),
    }
    real = allocator._Block
    if comm.rank == 0:
        calls[where]()
    else:
        if where == "empty":
            allocator._Block = broken(error)
        else:
            Breaking.broken_step, Breaking.error = "unpickle", error
        with pytest.raises(error):
            calls[where]()
        allocator._Block = real
    comm.barrier()


@each_value(
    {
        "error": [KeyboardInterrupt, MemoryError, ZeroDivisionError],
        "where": ["object", "small object", "empty"],
    }
)
def test_an_exception_between_two_steps_ends_the_communicator(world_of, where, error):
    errors = assert_all(world_of(2).outcomes(break_a_call, where, error), shmring.Aborted)
    assert all(error.rank == 1 for error in errors)
    assert all(str(error) == str(errors[0]) for error in errors)


def break_before(comm):
    """Nothing has happened before the first step."""
    if comm.rank == 1:
        Breaking.broken_step, Breaking.error = "pickle", KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            comm.all_gather_object(Breaking(comm.rank))
    return [len(each.content) for each in comm.all_gather_object(Breaking(comm.rank))]


def test_an_exception_before_the_first_step_is_as_if_there_was_no_call(world_of):
    assert world_of(2)(break_before) == [[0, 1], [0, 1]]


def lack_memory(comm):
    """Leave rank 1 without memory for the result: its arguments are right, and the others get an error about
    it."""
    real = shapes.empty_joined
    if comm.rank == 1:
        shapes.empty_joined = broken(MemoryError)
        with pytest.raises(MemoryError):
            comm.all_gather(np.ones(LONG))
        shapes.empty_joined = real
    comm.all_gather(np.ones(LONG))


def test_no_memory_for_a_result_ends_the_communicator(world_of):
    for error in assert_all(world_of(2).outcomes(lack_memory), shmring.Aborted):
        assert "MemoryError in rank 1" in error.reason


# ---- plans and adopted arrays ------------------------------------------------------------------------


def adopted(comm):
    array = np.frombuffer(mmap.mmap(-1, 1 << 20), "u1")
    return comm.adopt(shmring.Memory(array.ctypes.data, array.nbytes, "uint8", owner=array)), array.view("f4")


def plan_and_let_go(comm, way, in_background):
    adoption, x = adopted(comm)
    plan = comm.plan("all_reduce", x, async_op=in_background)

    def total():
        x[:] = comm.rank + 1
        comm.barrier()
        work = plan()
        if in_background:
            work.wait()
        return set(x.tolist()), comm.stats()["path"]

    found = [total()]
    if way == "release":
        adoption.release()
        found.append(total())
    del adoption
    kept = comm.zeros(1000)  # this releases dropped arrays, and unmaps them
    found.append(total())
    again, _ = comm.adopt(shmring.Memory(x.ctypes.data, x.nbytes, "uint8", owner=x)), kept
    found.append(total())
    again.release()
    found.append(total())
    return found


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("way", ["release", "drop"])
def test_a_plan_outlives_the_adoption_of_its_array(world_of, way, in_background):
    for found in world_of(2)(plan_and_let_go, way, in_background):
        assert all(values == {3.0} for values, _ in found)
        assert found[0][1] == found[-2][1] == "zero_copy"
        assert found[-1][1] != "zero_copy"


def plan_of_a_group(comm):
    """The array is adopted by the world, the plan is a group's, and the other way round."""
    group = comm.dup()
    found = []
    for one, other in ((comm, group), (group, comm)):
        adoption, x = adopted(one)
        plan = other.plan("all_reduce", x)
        for _ in range(2):
            x[:] = comm.rank + 1
            other.barrier()
            plan()
            found.append(set(x.tolist()))
            adoption.release()
    return found


def test_a_plan_of_a_group_does_not_mind_what_its_parent_adopts(world_of):
    for found in world_of(2)(plan_of_a_group):
        assert found == [{3.0}] * 4


def interrupt_an_adoption(comm):
    """Raise when the adoption is known to the process, and its Adoption is not made yet."""

    class Interrupted(set):
        def add(self, block):
            super().add(block)
            raise KeyboardInterrupt

    array = np.frombuffer(mmap.mmap(-1, 1 << 20), "u1")
    memory = shmring.Memory(array.ctypes.data, array.nbytes, "uint8", owner=array)
    if comm.rank == 0:
        known, allocator._adopted = allocator._adopted, Interrupted()
        with pytest.raises(KeyboardInterrupt):
            comm.adopt(memory)
        known.update(allocator._adopted)
        allocator._adopted = known
    else:
        comm.adopt(memory)
    with pytest.raises(shmring.Aborted):
        comm.barrier()
    again = comm.shrink()
    adoption = again.adopt(memory)
    array[:] = again.rank + 1
    again.all_reduce(array)
    adoption.release()
    return set(array.tolist())


def test_an_interrupted_adoption_leaves_the_array_free(world_of):
    assert world_of(2)(interrupt_an_adoption) == [{3}, {3}]


# ---- groups over hosts -------------------------------------------------------------------------------


class Interrupted(socket.socket):
    def __exit__(self, *_):
        self.close()
        raise KeyboardInterrupt


def interrupt_a_complete_group(comm):
    """Raise in rank 0 when its group has begun, while it stops to listen."""
    if comm.rank == 0:
        invite = groups._invite

        def invite_once(*arguments):
            groups._invite = invite
            listener, answer = invite(*arguments)
            return Interrupted(fileno=listener.detach()), answer

        groups._invite = invite_once
        with pytest.raises(KeyboardInterrupt):
            comm.split(0)
    else:
        with contextlib.suppress(shmring.Aborted):  # may come before the end of the call, or after it
            comm.split(0)
    with pytest.raises(shmring.Aborted):
        comm.barrier()
    x = np.full(3, comm.rank + 1.0)
    comm.shrink().all_reduce(x)
    return set(x.tolist())


def test_an_interrupt_after_a_group_began_ends_its_parent(world_over_hosts):
    assert world_over_hosts([0, 1])(interrupt_a_complete_group) == [{3.0}, {3.0}]


# ---- messages ----------------------------------------------------------------------------------------


def interrupt_a_receive(comm):
    """Send Ctrl-C when rank 0 has a part of a message: the next receive would otherwise get the message
    behind it."""
    sender = comm.broadcast_object(os.getpid(), 1)
    if comm.rank == 0:
        x = np.zeros(LONG)
        until_stopped(sender)
        interrupt_once_there(x)
        with pytest.raises(KeyboardInterrupt):
            comm.recv(x, 1)
        os.kill(sender, signal.SIGCONT)
        comm.recv(x, 1)
    else:
        transfer = comm.isend(np.full(LONG, 1.0), 0)
        os.kill(sender, signal.SIGSTOP)
        transfer.wait()
        comm.send(np.full(LONG, 2.0), 0)


def test_ctrl_c_in_the_middle_of_a_receive_ends_the_communicator(world_of):
    # Without single copies: a receiver would copy the whole message while its sender is stopped.
    ranks = world_of(2, SHMRING_MESSAGE_RING=TINY, SHMRING_SINGLE_COPY="off")
    for error in assert_all(ranks.outcomes(interrupt_a_receive), shmring.Aborted):
        assert "in the middle" in error.reason


def send_and_wait(comm):
    """Interrupt the receiving half after rank 1 has rank 0's data: the sending half cannot be undone."""
    x, first = np.zeros(4), comm.broadcast_object(os.getpid())
    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            comm.sendrecv(np.ones(4), 1, x, 1)
    else:
        comm.recv(x, 0)
        os.kill(first, signal.SIGINT)
        until_given_up()
    comm.barrier()


def test_ctrl_c_after_the_first_half_of_a_sendrecv_ends_the_communicator(world_of):
    for error in assert_all(world_of(2).outcomes(send_and_wait), shmring.Aborted):
        assert "in the middle" in error.reason


def send_from_a_destructor(comm, way):
    """The array of a transfer is dropped by the progress thread, or in a call: that sends a message."""

    class Owned(np.ndarray):
        pass

    if comm.rank == 1:
        got = np.empty(LONG)
        time.sleep(0.2)  # so that the transfer is not complete in isend
        comm.recv(got, 0, 1)
        return comm.recv(got, 0, 2).count
    x = np.zeros(LONG).view(Owned)
    destructor = weakref.finalize(x, lambda: comm.send(np.zeros(3), 1, 2))
    transfer = comm.isend(x, 1, 1)
    del x
    if way == "wait":
        transfer.wait()
    del transfer
    wait_until(lambda: not destructor.alive, "what was sent is destroyed")
    return 3


@pytest.mark.parametrize("way", ["background", "wait"])
def test_a_destructor_of_what_was_sent_may_send(world_of, way):
    assert world_of(2)(send_from_a_destructor, way) == [3, 3]


# ---- wrappers of a communicator ---------------------------------------------------------------------------


def break_a_method(comm, which, error):
    """Rank 1 raises in a method between two of its calls; rank 0 makes the same call."""
    x = np.ones(100_000, np.float32)
    make = {
        "sparse": lambda: sparse.SparseAllReduce(comm, block=64),
        "pairs": lambda: lambda x: sparse.all_reduce_pairs(comm, np.arange(3), np.ones(3), 10**6),
        "int8": lambda: lambda x: compression.Int8().all_reduce(comm, x),
        "int8 later": lambda: lambda x: compression.Int8().all_reduce(comm, x, async_op=True).wait(),
    }[which]
    call = make()
    if comm.rank == 0:
        call(x)
    else:
        module, name = METHODS[which]
        real = getattr(module, name)
        setattr(module, name, broken(error))
        try:
            with pytest.raises(error):
                call(x)
        finally:
            setattr(module, name, real)
    comm.barrier()


METHODS = {
    "sparse": (np, "flatnonzero"),
    "pairs": (sparse, "_added_by_rank"),
    "int8": (compression, "_check_words"),
    "int8 later": (compression, "_check_words"),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("which", METHODS)
def test_an_exception_between_the_calls_of_a_method_ends_the_communicator(world_of, which, error):
    errors = assert_all(world_of(2).outcomes(break_a_method, which, error), shmring.Aborted)
    assert {error.rank for error in errors} == {1}


def agree_on_an_error(comm):
    with pytest.raises(ValueError, match="different ops or numbers"):
        compression.Int8().all_reduce(comm, np.ones(100_000 + comm.rank, np.float32))
    with pytest.raises(ValueError, match="another length"):
        sparse.all_reduce_pairs(comm, np.arange(3), np.ones(3), 10 + comm.rank)
    return comm.all_gather(np.array([comm.rank])).ravel().tolist()


def test_an_error_that_all_ranks_raise_leaves_the_communicator(world_of):
    assert world_of(2)(agree_on_an_error) == [[0, 1], [0, 1]]


def interrupt_messages_of_a_method(comm, interrupted_path):
    both, other = stepwise.Stepwise(comm), comm.broadcast_object(os.getpid(), 1)
    x = np.ones(100_000, np.float32)
    if comm.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            both.all_reduce(x, algorithm="ring")
        interrupted_path.touch()
    else:
        interrupt_a_sender(both._comm, 1, other)
        until_there(interrupted_path)
    both.all_reduce(x, algorithm="ring")


def test_ctrl_c_among_the_messages_of_a_method_ends_its_communicator(world_of, tmp_path):
    outcomes = world_of(2).outcomes(interrupt_messages_of_a_method, tmp_path / "interrupted")
    assert_all(outcomes, shmring.Aborted)


# ---- buckets ----------------------------------------------------------------------------------------------


def interrupt_a_wait_for_buckets(comm):
    arrays_to_add = [np.full(1000, comm.rank + 1.0) for _ in range(4)]
    buckets = shmring.Bucketer(comm, nbytes=8000, op="sum")
    for array in arrays_to_add[: 4 if comm.rank == 0 else 0]:
        buckets.add(array)
    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            interrupted(buckets.wait, 0.2)
        comm.send(b"interrupted", 1)
    else:
        comm.recv(bytearray(11))
        for array in arrays_to_add:
            buckets.add(array)
    buckets.wait()
    return [set(array.tolist()) for array in arrays_to_add]


def test_a_wait_for_buckets_can_be_repeated_after_ctrl_c(world_of):
    assert world_of(2)(interrupt_a_wait_for_buckets) == [[{3.0}] * 4] * 2


def lose_a_bucket(comm):
    """Rank 1 raises when a bucket was taken out: the next one, of the same shape, would be taken for it."""
    real = shmring.Bucketer._agree
    buckets = shmring.Bucketer(comm, nbytes=8000, op="sum", delay_s=1.0)
    if comm.rank == 1:
        shmring.Bucketer._agree = broken(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            buckets.add(np.ones(1000))
        shmring.Bucketer._agree = real
    for _ in range(2):
        buckets.add(np.ones(1000))
    buckets.wait()


def test_an_exception_in_a_bucket_ends_the_communicator(world_of):
    assert_all(world_of(2).outcomes(lose_a_bucket), shmring.Aborted)


class InterruptedList(list):
    def append(self, item):
        super().append(item)
        raise KeyboardInterrupt


def lose_a_count(comm):
    """Rank 1 raises when the bucket has an array that is not counted: its next bucket would have one more."""
    buckets = shmring.Bucketer(comm, nbytes=16000, op="sum")
    if comm.rank == 1:
        buckets._bucket = InterruptedList()
        with pytest.raises(KeyboardInterrupt):
            buckets.add(np.ones(1000))
        buckets._bucket = list(buckets._bucket)
    for _ in range(2):
        buckets.add(np.ones(1000))
    buckets.wait()


def test_an_exception_before_an_array_is_counted_ends_the_communicator(world_of):
    assert_all(world_of(2).outcomes(lose_a_count), shmring.Aborted)


def raise_in_a_step_of_a_step(comm):
    """A call that changes something before its first collective is a step of a larger call."""

    def change():
        if comm.rank == 0:
            raise KeyboardInterrupt

    def call():
        comm.run_steps(change, begun=True)

    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            comm.run_steps(call)
    with pytest.raises(shmring.Aborted, match="KeyboardInterrupt in rank 0"):
        comm.barrier()


def test_a_begun_step_of_a_larger_call_ends_the_communicator(world_of):
    world_of(2)(raise_in_a_step_of_a_step)


ALONE = {"lock": shmring.Timeout, "message": shmring.Truncated, "own": shmring.Closed}
ALONE["other"] = shmring.RankFailed  # of a communicator that rank 1 has left
ALONE["group"] = shmring.OutOfMemory  # on all ranks of a group that rank 1 is not in


def fail_alone(comm, kind):
    """Rank 0 gets an error of its own between two calls; rank 1 makes the second one."""
    table, other, group = comm.shared(1, locks=1), comm.dup(), comm.split(comm.rank)
    if comm.rank == 1:
        comm.send(np.zeros(2), 0)
    if comm.rank == {"own": 0, "other": 1}.get(kind):
        other.close()
    held = table.lock(0) if comm.rank == 1 and kind == "lock" else contextlib.nullcontext()

    def steps():
        comm.barrier()
        if comm.rank == 0 and kind == "lock":
            table.lock(0, timeout=0.01).__enter__()
        elif comm.rank == 0 and kind == "message":
            comm.recv(np.zeros(1))
        elif comm.rank == 0 and kind == "group":
            group.empty(1 << 60)
        elif comm.rank == 0:
            other.barrier()
        comm.all_reduce(1)

    with held, pytest.raises(ALONE[kind] if comm.rank == 0 else shmring.Aborted):
        comm.run_steps(steps)
    comm.barrier()


@pytest.mark.parametrize("kind", ALONE)
def test_an_error_of_shmring_on_one_rank_alone_ends_a_larger_call(world_of, kind):
    errors = assert_all(world_of(2).outcomes(fail_alone, kind), shmring.Aborted)
    assert {error.rank for error in errors} == {0}


def fail_on_all_ranks(comm):
    def steps(make, *arguments):
        comm.barrier()
        make(*arguments)

    with pytest.raises(shmring.OutOfMemory):
        comm.run_steps(steps, comm.empty, 1 << 60)
    with pytest.raises(shmring.Mismatch):
        comm.run_steps(steps, comm.shared, (1 + comm.rank, 2 - comm.rank))
    return comm.all_reduce(1)


def test_an_error_of_shmring_on_all_ranks_leaves_the_communicator(world_of):
    assert world_of(2)(fail_on_all_ranks) == [2, 2]


def drop_during_a_signal(comm):
    """Drop a communicator, and leave by a signal that comes in the first Python code of its destructor."""
    made = [comm.dup()]
    signal.signal(signal.SIGTERM, leave)
    both = functools.partial(ctypes.CDLL(None)["raise"], int(signal.SIGTERM)), made.clear
    with pytest.raises(SystemExit):
        list(map(operator.call, both))  # no bytecode runs between the two
    comm.barrier()


def test_a_signal_in_a_destructor_raises_after_it():
    """It ended the process at once, without running any finally clause."""
    with Ranks(2) as ranks:
        ranks.meet()(drop_during_a_signal)
