"""Waiting: no rank leaves a barrier early; a waiting rank costs no CPU and lets threads and signals
through."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from combinations import each_value
from ranks import Ranks, until_there
from snapshots import place_once_it_waits, until_others_call
from waiting import counted_s

import shmring
from shmring._config import thresholds

SOON_S = 10  # far below every timeout, on a machine that stalls at times


def come_late(comm, late, seed):
    """Return when each rank came to the barrier and when it left, on a clock that all processes share."""
    if comm.rank == late:
        time.sleep(0.05)
    times = []
    rng = np.random.default_rng(seed + comm.rank)
    for _ in range(20):
        time.sleep(rng.random() * 0.002)
        came = time.monotonic()
        comm.barrier()
        times.append((came, time.monotonic()))
    return times


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_no_rank_leaves_a_barrier_before_all_have_come(world_of, size):
    for late in {0, size - 1}:
        for turn in zip(*world_of(size)(come_late, late, 1), strict=True):
            assert max(came for came, _ in turn) <= min(left for _, left in turn)


def wait_for_one(comm, call, seconds):
    """(CPU seconds, seconds) of this whole process while it waits for rank 0."""
    x = {"barrier": None, "small": np.ones(500), "large": np.ones(60_000), "shared": comm.empty(60_000)}[call]
    comm.barrier()
    if comm.rank == 0:
        until_others_call(comm)
        time.sleep(seconds)
    before, begin = time.process_time(), time.monotonic()
    comm.barrier() if call == "barrier" else comm.all_reduce(x)
    return time.process_time() - before, time.monotonic() - begin


@each_value({"size": [2, 4], "call": ["barrier", "small", "large", "shared"]})
def test_an_idle_rank_costs_no_cpu(world_of, size, call):
    for used_s, waited_s in world_of(size)(wait_for_one, call, 1.0)[1:]:
        assert waited_s > 0.8
        assert used_s < 0.1 * waited_s


def rest(comm, seconds):
    """CPU seconds of a process that has a communicator and does not use it."""
    comm.all_reduce(np.ones(60_000))
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def test_a_communicator_that_rests_costs_no_cpu(world_of):
    assert max(world_of(2)(rest, 0.5)) < 0.05


def count_meanwhile(comm, call):
    """Count in another thread of this process while this thread waits in a call; return the count."""
    counted, stop = [0], threading.Event()

    def count():
        while not stop.wait(0.01):
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    comm.barrier()
    if comm.rank == 0:
        until_others_call(comm)
        time.sleep(0.5)
    before = counted[0]
    comm.barrier() if call == "barrier" else comm.all_reduce(np.ones(60_000))
    meanwhile = counted[0] - before
    stop.set()
    thread.join()
    return meanwhile


@pytest.mark.parametrize("call", ["barrier", "large"])
def test_other_threads_run_while_a_rank_waits(world_of, call):
    assert min(world_of(3)(count_meanwhile, call)[1:]) > 5


def handle_signals(comm, folder):
    """Run a handler that returns while the call waits; the call goes on."""
    handled = []

    def handle(*_):
        handled.append(time.monotonic())
        (folder / f"handled {len(handled)}").touch()

    signal.signal(signal.SIGUSR1, handle)
    comm.barrier()
    if comm.rank == 0:
        until_there(folder / "handled 3")
    x = np.full(10_000, comm.rank + 1.0)
    comm.all_reduce(x)
    return handled, time.monotonic(), float(x[0])


def test_signal_handlers_run_while_a_rank_waits_and_the_call_goes_on(world_of, tmp_path):
    ranks = world_of(2)
    ranks.begin(handle_signals, tmp_path)
    place_once_it_waits(ranks, 1)
    for number in range(3):
        ranks.kill(1, signal.SIGUSR1)
        until_there(tmp_path / f"handled {number + 1}", ranks)
    _, (handled, over, value) = ranks.answers()
    assert value == 3.0
    assert len(handled) == 3
    assert handled[-1] < over


def interrupted_often(comm, ncalls):
    """Make calls while an interval timer interrupts every wait."""
    count = [0]
    signal.signal(signal.SIGALRM, lambda *_: count.__setitem__(0, count[0] + 1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for turn in range(ncalls):
            x = np.full(1 + 37 * turn, turn + comm.rank, "i8")
            comm.all_reduce(x)
            assert (x == comm.size * turn + sum(range(comm.size))).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return count[0]


def test_calls_are_right_under_a_rain_of_signals(world_of):
    assert min(world_of(3, SHMRING_CHUNK=512)(interrupted_often, 500)) > 10


def interrupt_between(comm):
    """A KeyboardInterrupt outside of any call is Python's own business."""
    comm.barrier()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    x = np.ones(5)
    comm.all_reduce(x)
    return float(x[0])


def test_an_interrupt_outside_of_calls_harms_nothing(world_of):
    assert world_of(2)(interrupt_between) == [2.0] * 2


def ignore_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.slow
def test_ctrl_c_can_be_tested_where_it_is_ignored():
    """Run with SIGINT ignored, as in the background of a script."""
    tests = (
        "bootstrap/test_bootstrap.py::test_ctrl_c_ends_the_wait",  # in a program
        "p2p/test_ring.py::test_ctrl_c",  # here
        "launch/test_run.py::test_a_second_ctrl_c_kills",
    )
    here = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", *(str(here / test) for test in tests)],
        preexec_fn=ignore_ctrl_c,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def on_one_cpu(comm):
    """Bind all ranks to one CPU: without yielding no rank would make progress."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        for turn in range(100):
            x = np.full((1, 300, 9000)[turn % 3], turn, "i4")
            comm.all_reduce(x)
            assert (x == comm.size * turn).all()
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_that_share_one_cpu_get_on(world_of, size):
    world_of(size)(on_one_cpu)


def time_out_in(comm, seconds):
    if comm.rank == 0:
        time.sleep(seconds + 1)
        return None
    begin_s, begin = time.monotonic(), counted_s()
    with pytest.raises(shmring.Timeout):
        comm.barrier(timeout=seconds)
    return time.monotonic() - begin_s, counted_s() - begin


def test_a_timeout_is_not_early(world_of):
    _, (took_s, counted) = world_of(2)(time_out_in, 0.5)
    assert took_s > 0.45
    assert counted < SOON_S


def default_timeout(comm):
    if comm.rank == 1:
        with pytest.raises(shmring.Timeout, match=r"1.5 s"):
            comm.barrier()


def test_the_timeout_of_init_holds_for_every_call():
    with Ranks(2) as ranks:
        assert ranks.try_to_meet(timeout_s=1.5) == [None, None]
        ranks(default_timeout)


def very_long_timeouts(comm):
    for timeout in (1e9, 1e300, float("inf"), 1 << 80, np.float32(5)):
        comm.barrier(timeout=timeout)
        comm.all_reduce(np.ones(2000), timeout=timeout)


def test_timeouts_may_be_as_long_as_one_likes(world_of):
    world_of(2)(very_long_timeouts)


def test_ranks_whose_time_is_counted_apart_sleep_sooner_and_only_where_they_take_turns():
    for oversubscribed in (True, False):
        together, apart = (
            thresholds.wait_policy(2, oversubscribed=oversubscribed, one_group=one) for one in (True, False)
        )
        assert (apart["yield_ns"] < together["yield_ns"]) == oversubscribed
        assert apart | {"yield_ns": 0} == together | {"yield_ns": 0}


def in_a_session_of_its_own(rank, world, path):
    if rank % 2:
        os.setsid()
    with shmring.init(world, rank=rank) as comm:
        x = np.arange(50_000.0)
        for _ in range(20):
            comm.all_reduce(x, "max")
            root = comm.gather(x, 1)
        assert root is None or (root == np.arange(50_000.0)).all()
        np.save(f"{path}/{rank}", x)


def test_ranks_in_sessions_of_their_own(tmp_path):
    world, fork = shmring.world(4), multiprocessing.get_context("fork")
    ranks = [fork.Process(target=in_a_session_of_its_own, args=(r, world, str(tmp_path))) for r in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    for rank in range(4):
        assert np.array_equal(np.load(tmp_path / f"{rank}.npy"), np.arange(50_000.0))
