"""Ranks that do not come, stop, die, leave, abort or are interrupted: all other ranks soon raise the same
error, and it names them. Forked children and second threads get an error: the communicator is not theirs."""

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time

import numpy as np
import pytest
from combinations import each_value, first
from ranks import Died, Ranks, turns, until_there, when_there
from snapshots import own_flight, place_once_it_waits, until_given_up
from waiting import counted_s, wait_until

import shmring
from shmring._core import kernels
from shmring._diagnostics.flight_recorder import ALGORITHMS
from shmring._system import procfs
from tests.collectives.test_errors import COUNTS, PATHS, array_for, assert_all, ones

STOPPED_S = 1.5  # the wait for a stopped rank; no other rank may be late
SOON_S = 10  # far below every timeout, on a machine that stalls at times

# ---- ranks that do not come, or stop ----------------------------------------------------------------------


def miss(comm, call, absent):
    if comm.rank == absent:
        until_given_up()
        comm.barrier()
    elif call == "barrier":
        comm.barrier(timeout=1.2)
    else:
        comm.all_reduce(array_for(comm, call), timeout=1.2)


@each_value({"absent": [0, 2], "call": ["barrier", "tiny", "small", "large"]})
def test_a_rank_that_does_not_come_is_a_timeout_naming_it(world_of, call, absent):
    for error in assert_all(world_of(3).outcomes(miss, call, absent), shmring.Timeout):
        assert isinstance(error, TimeoutError)
        assert error.rank == absent
        assert f"rank {absent}" in str(error)
        assert "1.2 s" in str(error)
        assert "timeout=" in str(error)


def call_for_ever(comm, path, algorithm, path_when_running, timeout_s=None):
    """Make calls without end; rank 0 makes a file when they run."""
    x = array_for(comm, path)
    for _ in turns(comm, path_when_running):
        comm.all_reduce(x, "max", algorithm=algorithm, timeout=timeout_s)


CALLS = [
    *((path, "auto") for path in PATHS),
    *(("large", algorithm) for algorithm in ALGORITHMS if algorithm not in ("auto", "direct")),
]


@pytest.mark.parametrize(("path", "algorithm"), first(len(PATHS), CALLS))
def test_a_stopped_rank_is_a_timeout_and_it_raises_the_same_when_it_goes_on(tmp_path, path, algorithm):
    with Ranks(3) as ranks:
        ranks.meet()
        ranks.begin(call_for_ever, path, algorithm, str(tmp_path / "runs"), STOPPED_S)
        when_there(tmp_path / "runs", ranks)
        ranks.kill(1, signal.SIGSTOP)
        others = ranks.answers(among=(0, 2))
        ranks.kill(1, signal.SIGCONT)
        errors = assert_all([*others, *ranks.answers(among=(1,))], shmring.Timeout)
        assert len({str(error) for error in errors}) == 1
        assert errors[0].rank == 1


@each_value({"algorithm": ["bidirectional_ring", "halving_doubling", "double_tree"], "victim": [0, 2, 4]})
def test_of_ranks_that_wait_for_each_other_the_stopped_one_is_named(tmp_path, algorithm, victim):
    with Ranks(5) as ranks:
        ranks.meet()
        ranks.begin(call_for_ever, "large", algorithm, str(tmp_path / "runs"), STOPPED_S)
        when_there(tmp_path / "runs", ranks)
        ranks.kill(victim, signal.SIGSTOP)
        others = ranks.answers(among=tuple(rank for rank in range(5) if rank != victim))
        ranks.kill(victim, signal.SIGCONT)
        errors = assert_all([*others, *ranks.answers(among=(victim,))], shmring.Timeout)
        assert {error.rank for error in errors} == {victim}, errors[0]


def sleep_in_a_handler(comm, algorithm, victim, other):
    """While the victim waits for the other rank, a signal handler begins and does not end in time."""
    x = array_for(comm, "large")
    comm.all_reduce(x, algorithm=algorithm)
    if comm.rank == victim:
        signal.signal(signal.SIGALRM, lambda *_: until_given_up())
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    elif comm.rank == other:
        time.sleep(0.4)
    comm.all_reduce(x, algorithm=algorithm, timeout=STOPPED_S)
    comm.barrier(timeout=STOPPED_S)  # for ranks that need nothing more of the victim


@each_value({"algorithm": ALGORITHMS, "victim": [0, 1, 3], "other": [2, 4]})
def test_a_rank_that_stays_in_a_signal_handler_is_named(world_of, algorithm, victim, other):
    outcomes = world_of(5).outcomes(sleep_in_a_handler, algorithm, victim, other)
    assert {error.rank for error in assert_all(outcomes, shmring.Timeout)} == {victim}, outcomes[0]


def come_in_turn(comm, algorithm, victim):
    """The background thread of a rank waits for one flag after another, for some of them in one step."""
    x = array_for(comm, "large")
    comm.all_reduce(x, algorithm=algorithm)
    if comm.rank == victim:
        until_given_up()
    time.sleep(0.1 * comm.rank)
    work = comm.all_reduce(x, algorithm=algorithm, async_op=True, timeout=STOPPED_S)
    while not work.done():
        time.sleep(0.01)
    work.wait()
    comm.barrier(timeout=STOPPED_S)  # for ranks that need nothing more of the victim


@each_value({"algorithm": ALGORITHMS, "victim": [0, 2, 4]})
def test_the_late_rank_of_a_call_in_the_background_is_named(world_of, algorithm, victim):
    outcomes = world_of(5).outcomes(come_in_turn, algorithm, victim)
    assert {error.rank for error in assert_all(outcomes, shmring.Timeout)} == {victim}, outcomes[0]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("path", "algorithm"), CALLS)
def test_a_killed_rank_is_named_by_all_others(tmp_path, path, algorithm, victim):
    with Ranks(3) as ranks:
        ranks.meet()
        ranks.begin(call_for_ever, path, algorithm, str(tmp_path / "runs"))
        when_there(tmp_path / "runs", ranks)
        ranks.kill(victim)
        outcomes = ranks.answers()
        assert isinstance(outcomes.pop(victim), Died)
        for error in assert_all(outcomes, shmring.RankFailed):
            assert error.rank == victim
            assert str(ranks.pid(victim)) in error.cause
            assert error.host == os.uname().nodename
            assert f"rank {victim}" in str(error)


def end(comm, how, path):
    """Return the error about rank 1 and its time; rank 1 writes the time of its end."""
    if comm.rank == 1:
        time.sleep(0.2)
        path.write_text(str(counted_s()))
        if how == "exit":
            os._exit(3)
        if how == "segfault":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "abort":
            faulthandler.disable()  # it would write a traceback
            os.abort()
        if how == "execve":
            os.execv("/bin/sleep", ["sleep", "0.5"])
    try:
        comm.barrier()
    except shmring.RankFailed as error:
        return error, counted_s()
    return None


@pytest.mark.parametrize("how", ["exit", "segfault", "abort", "execve"])
def test_a_rank_that_ends_without_a_word_is_named_soon(how, tmp_path):
    with Ranks(3) as ranks:
        first, _, last = ranks.meet().outcomes(end, how, tmp_path / "ended at")
        ended_s = float((tmp_path / "ended at").read_text())
        for error, told_s in (first, last):
            assert error.rank == 1
            assert 0 <= told_s - ended_s < SOON_S


def test_a_killed_rank_that_waits_for_a_cpu_is_dead(monkeypatch):
    pid, start = os.getppid(), procfs.start_time(os.getppid())
    fields = procfs._stat(pid)
    assert "lives" in procfs.how_it_ended(pid, start)
    fields[28] = str(1 << signal.SIGKILL - 1)  # pending, as proc(5) numbers them from the name on
    monkeypatch.setattr(procfs, "_stat", lambda _: fields)
    assert procfs.how_it_ended(pid, start) == f"process {pid} died"


def call_after_a_death(comm, call):
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    {
        "barrier": comm.barrier,
        "large": lambda: comm.all_reduce(ones(40_000)),
        "empty": lambda: comm.empty(5),
        "plan": lambda: comm.plan("broadcast", ones(3))(),
    }[call]()


@pytest.mark.parametrize("call", ["barrier", "large", "empty", "plan"])
def test_calls_that_begin_after_a_death(call):
    with Ranks(3) as ranks:
        first, _, last = ranks.meet().outcomes(call_after_a_death, call)
        for error in assert_all([first, last], shmring.RankFailed):
            assert error.rank == 1


def test_a_rank_that_cannot_begin_is_not_waited_for():
    begin = counted_s()
    with Ranks(3) as ranks:
        impossible = {"SHMRING_ISA": "sse2" if "neon" in kernels.isas() else "neon"}
        outcomes = ranks.try_to_meet(timeout_s=30, of_rank={1: impossible})
    assert isinstance(outcomes.pop(1), ValueError)
    assert all(isinstance(outcome, shmring.Error) for outcome in outcomes), outcomes
    assert not any(isinstance(outcome, shmring.Timeout) for outcome in outcomes)
    assert counted_s() - begin < 25


def all_but_one_are_killed(comm):
    comm.all_reduce(ones(5))
    if comm.rank != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(shmring.RankFailed):
        comm.all_reduce(ones(50_000))
    return True


def test_the_last_survivor_raises_as_well():
    with Ranks(5) as ranks:
        assert ranks.meet().outcomes(all_but_one_are_killed)[0] is True


# ---- leaving, giving up, interrupting ---------------------------------------------------------------------


def use_closed(comm):
    x = comm.full(5000, 1.0)
    comm.barrier()
    comm.close()
    comm.close()
    for call in (
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce(np.ones(3)),
        lambda: comm.broadcast(np.ones(3)),
        lambda: comm.barrier(),
        lambda: comm.empty(3),
        lambda: comm.plan("barrier"),
        lambda: comm.abort("too late"),
    ):
        with pytest.raises(shmring.Closed) as caught:
            call()
        assert caught.value.rank == comm.rank
    assert "closed" in repr(comm)
    return comm.rank, comm.size


def test_a_closed_communicator_raises_closed(world_of):
    assert world_of(2)(use_closed) == [(0, 2), (1, 2)]


def leave_early(comm):
    if comm.rank == 1:
        comm.close()
        return
    comm.barrier()


def test_a_rank_that_leaves_while_others_wait(world_of):
    first, left, last = world_of(3).outcomes(leave_early)
    assert left is None
    for error in assert_all([first, last], shmring.RankFailed):
        assert error.rank == 1
        assert "closed" in error.cause


def leave_after_the_last_call(comm, path):
    """Close right after the last call; the other ranks still finish it."""
    x = array_for(comm, path)
    comm.all_reduce(x)
    comm.close()
    return float(x.sum())


@pytest.mark.parametrize("path", PATHS)
def test_no_rank_waits_for_the_others_to_leave(world_of, path):
    for _ in range(10):
        for size in (2, 3):
            assert world_of(size)(leave_after_the_last_call, path) == [float(size * COUNTS[path])] * size


def fail_inside_with(comm, path):
    with comm:
        x = array_for(comm, path)
        comm.all_reduce(x)
        if comm.rank == 1:
            raise KeyError("what was looked for")
        comm.all_reduce(x)


@pytest.mark.parametrize("path", PATHS)
def test_an_exception_inside_with_is_reported_to_the_others(world_of, path):
    first, own, last = world_of(3).outcomes(fail_inside_with, path)
    assert isinstance(own, KeyError)
    for error in assert_all([first, last], shmring.Aborted):
        assert error.rank == 1
        assert "KeyError in rank 1" in error.reason
        assert "what was looked for" in error.reason
        assert error.reason in str(error)


def be_interrupted_inside_with(comm):
    with comm:
        if comm.rank == 1:
            raise KeyboardInterrupt
        comm.barrier()


def test_an_empty_message_is_shown_without_a_colon(world_of):
    error, own = world_of(2).outcomes(be_interrupted_inside_with)
    assert isinstance(own, KeyboardInterrupt)
    assert error.reason == "KeyboardInterrupt in rank 1"


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


def fail_oddly(comm, what):
    with comm:
        if comm.rank == 1:
            raise {"surrogates": FileNotFoundError("no file \udcff"), "no text": Unspeakable()}[what]
        comm.barrier()


@pytest.mark.parametrize(("what", "kind"), [("surrogates", FileNotFoundError), ("no text", Unspeakable)])
def test_exceptions_with_odd_texts_are_reported_as_well(world_of, what, kind):
    first, own, last = world_of(3).outcomes(fail_oddly, what)
    assert isinstance(own, kind)
    for error in assert_all([first, last], shmring.Aborted):
        assert kind.__name__ in error.reason


def exit_inside_with(comm, path):
    with comm:
        comm.all_reduce(array_for(comm, path))
        sys.exit(0)


def test_an_orderly_exit_inside_with_is_no_failure(world_of):
    for _ in range(20):
        for outcome in world_of(3).outcomes(exit_inside_with, "large"):
            assert isinstance(outcome, SystemExit)


def give_up(comm, reason):
    if comm.rank == 1:
        time.sleep(0.2)
        comm.abort(reason)
    comm.barrier()


@pytest.mark.parametrize("reason", ["no convergence", "", "długi powód " * 40, "a\nb\0c"])
def test_abort_ends_everybodys_call_with_the_reason(world_of, reason):
    for error in assert_all(world_of(3).outcomes(give_up, reason), shmring.Aborted):
        assert error.rank == 1
        assert error.reason.startswith(reason.split("\0")[0][:30])


def give_up_without_a_reason(comm):
    with pytest.raises(TypeError, match="reason"):
        comm.abort(None)
    return comm.all_reduce(1)


def test_a_reason_is_a_text(world_of):
    assert world_of(2)(give_up_without_a_reason) == [2, 2]


def first_error_counts(comm):
    """Make further errors after the first: they change nothing."""
    if comm.rank == 0:
        comm.abort("the first")
    comm.abort(f"rank {comm.rank} too") if comm.rank == 0 else time.sleep(0.3)
    comm.barrier()


def test_the_first_error_is_everybodys(world_of):
    for error in assert_all(world_of(3).outcomes(first_error_counts), shmring.Aborted):
        assert error.reason == "the first"


def wait_for_interrupt(comm, path):
    x = array_for(comm, path)
    if comm.rank == 0:
        time.sleep(30)
    comm.all_reduce(x) if path != "tiny" else comm.barrier()


@pytest.mark.parametrize("path", PATHS)
def test_ctrl_c_ends_a_wait_at_once_and_tells_the_others(path):
    with Ranks(3) as ranks:
        ranks.meet(timeout_s=40)
        ranks.begin(wait_for_interrupt, path)
        place_once_it_waits(ranks, 1)
        begin = counted_s()
        ranks.kill(1, signal.SIGINT)
        own, other = ranks.answers(among=(1, 2))
        took_s = counted_s() - begin
        ranks.kill(0)
        assert isinstance(own, KeyboardInterrupt)
        assert_all([other], shmring.Aborted)
        assert "KeyboardInterrupt in rank 1" in other.reason
        assert took_s < SOON_S


# ---- forks, threads, pickles ------------------------------------------------------------------------------


def use_in_child(comm):
    """Return the errors of a forked child, and check that the parent's communicator still works."""
    x = comm.full(5000, 1.0)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        messages = []
        for call in (lambda: comm.all_reduce(x), lambda: comm.barrier(), lambda: comm.empty(3)):
            try:
                call()
                messages.append("nothing")
            except BaseException as error:
                messages.append(type(error).__name__)
        comm.close()
        os.write(writer, " ".join(messages).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    messages = os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    comm.all_reduce(x)
    comm.all_reduce(np.ones(5))
    y = comm.full(5000, 2.0)
    comm.all_reduce(y)
    return messages, float(x[0]), float(y[0])


def test_a_forked_child_must_not_use_its_parents_communicator(world_of):
    assert world_of(2)(use_in_child) == [("Closed Closed Closed", 2.0, 4.0)] * 2


def two_threads(comm, path):
    """While one thread waits in a call, another one is refused every call, and nothing is harmed."""
    x = np.full(20_000, comm.rank + 1.0)
    if comm.rank != 0:
        until_there(path)
        comm.all_reduce(x)
    else:
        waiting = threading.Thread(target=comm.all_reduce, args=(x,))
        waiting.start()
        try:
            be_refused(comm)
        finally:
            path.touch()
            waiting.join()
    y = np.full(9, 2.0)
    comm.all_reduce(y)
    return float(x[0]), float(x[-1]), float(y[0])


def be_refused(comm):
    wait_until(lambda: own_flight().last_of(comm.rank)["outcome"] == "under way", "the other thread calls")
    for call in (
        lambda: comm.barrier(),
        lambda: comm.all_reduce(np.ones(3)),
        lambda: comm.all_reduce(np.ones(30_000)),
        lambda: comm.all_reduce("text"),
        lambda: comm.broadcast(np.ones(30_000)),
        lambda: comm.empty(3),
        lambda: comm.empty("text"),
        lambda: comm.plan("barrier")(),
        lambda: comm.close(),
    ):
        with pytest.raises(RuntimeError, match="thread"):
            call()


def test_two_threads_at_once_are_refused_and_nothing_is_corrupted(world_of, tmp_path):
    assert world_of(2)(two_threads, tmp_path / "refused") == [(3.0, 3.0, 4.0)] * 2


def threads_in_turn(comm):
    """One after the other is fine, whichever thread made the communicator."""
    x = np.ones(9)
    for _ in range(3):
        thread = threading.Thread(target=comm.all_reduce, args=(x,))
        thread.start()
        thread.join()
    return float(x[0])


def test_threads_may_take_turns(world_of):
    assert world_of(2)(threads_in_turn) == [8.0] * 2


def test_a_communicator_cannot_be_pickled():
    with shmring.init() as comm:
        for thing in (comm, comm.plan("barrier")):
            with pytest.raises(TypeError, match="belongs to its process"):
                pickle.dumps(thing)
