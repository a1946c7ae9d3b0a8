"""Ranks that are all stopped for longer than their timeout go on where they were. A single stopped rank is
late as usual."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from combinations import first
from ranks import Ranks, free_port, until_stopped, until_there

import shmring

TIMEOUT_S = 2.0
STOPPED_S = 3.0
FORK = multiprocessing.get_context("fork")


def in_a_call(comm, come):
    x = np.ones(4)
    if comm.rank == 1:
        until_there(come)
    comm.all_reduce(x)
    return float(x[0])


def in_the_background(comm, come):
    x = np.ones(4)
    work = None
    if comm.rank == 0:
        work = comm.all_reduce(x, async_op=True)
    until_there(come)  # the progress thread waits in this time
    work = work or comm.all_reduce(x, async_op=True)
    work.wait()
    return float(x[0])


def in_a_message(comm, come):
    x = np.full(4, 2.0)
    if comm.rank == 1:
        until_there(come)
        comm.send(x, dest=0)
    else:
        comm.recv(x, source=1)
    return float(x[0])


def in_a_lock(comm, come):
    array = comm.shared(8, locks=1)
    if comm.rank == 1:
        with array.lock(0):
            comm.barrier()
            until_there(come)
    else:
        comm.barrier()
        with array.lock(0):
            pass
    return 2.0


def stop_and_continue(pids, stopped_s=STOPPED_S):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        until_stopped(pid)
    time.sleep(stopped_s)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def beside_a_busy_thread(comm, come):
    """Wait beside a thread that holds the GIL: half of the time the wait needs the GIL, to check Python's
    signals."""
    done = threading.Event()

    def compute():
        while not done.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        return in_a_message(comm, come)
    finally:
        done.set()
        thread.join()


WHERE = [in_the_background, beside_a_busy_thread, in_a_lock, in_a_call, in_a_message]


@pytest.mark.parametrize("where", first(2, WHERE))
def test_all_stopped_for_longer_than_the_timeout_go_on(tmp_path, where):
    with Ranks(2) as ranks:
        ranks.meet(timeout_s=TIMEOUT_S)
        ranks.begin(where, tmp_path / "come")
        time.sleep(0.3)  # until rank 0 waits
        stop_and_continue([ranks.pid(0), ranks.pid(1)])
        time.sleep(0.1)  # a continued rank could take the other for late during this time
        (tmp_path / "come").touch()
        assert ranks.answers() == [2.0, 2.0]


def test_across_hosts_too(tmp_path):
    with Ranks(2, nodes=[0, 1]) as ranks:
        ranks.meet(timeout_s=TIMEOUT_S)
        ranks.begin(in_a_call, tmp_path / "come")
        time.sleep(0.3)
        stop_and_continue([ranks.pid(0), ranks.pid(1)])
        time.sleep(0.1)
        (tmp_path / "come").touch()
        assert ranks.answers() == [2.0, 2.0]


def test_one_stopped_alone_is_late_and_named(tmp_path):
    with Ranks(3) as ranks:
        ranks.meet(timeout_s=TIMEOUT_S)
        ranks.kill(1, signal.SIGSTOP)
        until_stopped(ranks.pid(1))
        ranks.begin(shmring.Comm.barrier)
        others = ranks.answers(among=[0, 2])
        ranks.kill(1, signal.SIGCONT)
        for error in [*others, *ranks.answers(among=[1])]:
            assert isinstance(error, shmring.Timeout)
            assert error.rank == 1


def test_a_continued_rank_names_the_rank_that_is_still_stopped(tmp_path):
    with Ranks(2) as ranks:
        ranks.meet(timeout_s=TIMEOUT_S)
        ranks.begin(in_a_call, tmp_path / "come")
        time.sleep(0.3)
        ranks.kill(1, signal.SIGSTOP)
        stop_and_continue([ranks.pid(0)])
        (error,) = ranks.answers(among=[0])
        assert isinstance(error, shmring.Timeout)
        assert error.rank == 1
        assert "stopped" in str(error)
        ranks.kill(1, signal.SIGCONT)
        (tmp_path / "come").touch()
        (error,) = ranks.answers(among=[1])
        assert isinstance(error, shmring.Timeout)


def joins(comm, come, world):
    """Let rank 1 come to another world only after rank 0 has been stopped in it."""
    if comm.rank == 1:
        until_there(come)
    with shmring.init(world, comm.rank, timeout=TIMEOUT_S) as other:
        return other.all_gather_object(other.rank)


@pytest.mark.slow
@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_while_ranks_join(tmp_path, address):
    where = address and f"{address}:{free_port()}"
    with Ranks(2) as ranks:
        ranks.meet(timeout_s=TIMEOUT_S)
        ranks.begin(joins, tmp_path / "come", shmring.world(2, address=where))
        time.sleep(0.3)
        stop_and_continue([ranks.pid(0), ranks.pid(1)])
        time.sleep(0.1)
        (tmp_path / "come").touch()
        assert ranks.answers() == [[0, 1]] * 2


def shrinks(comm, come):
    """Let rank 0 wait in shrink for rank 1, which comes late. Rank 2 has died."""
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(shmring.RankFailed):
        comm.barrier()
    if comm.rank == 1:
        until_there(come)
    with comm.shrink() as smaller:
        return smaller.size


@pytest.mark.slow
def test_while_ranks_shrink(tmp_path):
    with Ranks(3) as ranks:
        ranks.meet(timeout_s=TIMEOUT_S)
        ranks.begin(shrinks, tmp_path / "come")
        time.sleep(0.5)
        stop_and_continue([ranks.pid(0), ranks.pid(1)])
        time.sleep(0.1)
        (tmp_path / "come").touch()
        assert ranks.answers(among=[0, 1]) == [2, 2]


def spawns(pipe, come):
    os.setsid()
    pipe.send(shmring.spawn(in_a_call, args=(come,), nprocs=2, timeout=2 * TIMEOUT_S))


@pytest.mark.slow
def test_spawn_too(tmp_path):
    """The launcher is stopped with its ranks, as Ctrl-Z does it."""
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=spawns, args=(theirs, tmp_path / "come"))
    child.start()
    theirs.close()
    time.sleep(1.0)
    ranks = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    stop_and_continue([child.pid, *ranks], 2 * STOPPED_S)
    time.sleep(0.1)
    (tmp_path / "come").touch()
    assert ours.recv() == [2.0, 2.0]
    child.join()


def get_in_time(ring, pipe):
    try:
        pipe.send(ring.get(TIMEOUT_S))
    except shmring.Error as error:
        pipe.send(error)


def test_a_ring_too():
    ours, theirs = FORK.Pipe()
    with shmring.Ring() as ring:
        child = FORK.Process(target=get_in_time, args=(ring, theirs))
        child.start()
        time.sleep(0.3)
        stop_and_continue([child.pid])
        putter = threading.Timer(0.1, ring.put, args=(b"late",))
        putter.start()
        assert ours.recv() == b"late"
        putter.join()
        child.join()
