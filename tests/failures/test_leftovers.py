"""Nothing is left of a communicator that could not start or that failed in any way: no descriptor, no
mapping, no thread; and no process when ranks and their launcher are killed at any moment."""

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from combinations import first
from leftovers import names_in_shm, until_none
from ranks import free_port

import shmring
from shmring._core import kernels

FORK = multiprocessing.get_context("fork")


def stay(comm):
    time.sleep(30)


def end(comm):
    os._exit(1)


def make_and_end(comm):
    """Everything that lasts, at its end half used."""
    kept = comm.split(0), comm.dup(), comm.empty(60_000), comm.shared(100, locks=3)
    os._exit(len(kept))


def make_and_use(comm):
    group, _, array, _ = comm.split(0), comm.dup(), comm.empty(60_000), comm.shared(100, locks=3)
    array[:] = 1
    works = [group.all_reduce(np.ones(count), async_op=True) for count in (5, 60_000)]
    comm.all_reduce(array)
    for work in works:
        work.result()
    group.barrier(timeout=5)
    comm.barrier(timeout=5)


def leave_transfers(comm):
    receive, send = comm.irecv(np.ones(9), 1), comm.isend(np.ones(3_000_000), 1)
    receive.wait()
    send.wait()


def leave_works(comm):
    works = [comm.all_reduce(np.ones(60_000), async_op=True) for _ in range(3)]
    works[1].fileno()
    works[2].wait()


def too_much(comm):
    comm.empty(1 << 52, "u1")


WAYS = {  # name → what rank 0 does, what rank 1 does, what rank 0 gets
    "all goes well": (make_and_use, make_and_use, None),
    "a death": (lambda c: c.barrier(), end, shmring.RankFailed),
    "a death with all that there is": (make_and_use, make_and_end, shmring.RankFailed),
    "a death of who was sent to": (leave_transfers, end, shmring.RankFailed),
    "a death in the background": (leave_works, end, shmring.RankFailed),
    "a timeout": (lambda c: c.barrier(timeout=0.02), stay, shmring.Timeout),
    "a mismatch": (lambda c: c.barrier(), lambda c: c.dup(), shmring.Mismatch),
    "an abort": (lambda c: c.barrier(), lambda c: c.abort("enough"), shmring.Aborted),
    "a close": (lambda c: c.barrier(), lambda c: c.close(), shmring.RankFailed),
    "no memory": (too_much, too_much, shmring.OutOfMemory),
}


def be_rank_1(world, what, environ):
    os.environ.update(environ)
    with contextlib.suppress(shmring.Error):
        what(shmring.init(world, rank=1, timeout=10))
    os._exit(0)


def fail(way, across):
    """One rank's life in this process; its error's type."""
    own, other, _ = WAYS[way]
    world, places = shmring.world(2), ({}, {})
    if across:
        world = dataclasses.replace(world, address=f"127.0.0.1:{free_port()}")
        places = {"SHMRING_NODE": "a"}, {"SHMRING_NODE": "b"}
    peer = FORK.Process(target=be_rank_1, args=(world, other, places[1]))
    peer.start()
    os.environ.update(places[0])
    try:
        with shmring.init(world, rank=0, timeout=10) as comm:
            own(comm)
    except shmring.Error as error:
        return type(error)
    finally:
        for name in places[0]:
            del os.environ[name]
        peer.kill()
        peer.join()
        peer.close()


def refuse_to_begin(*_):
    with pytest.raises(shmring.Timeout):
        shmring.init(shmring.world(2), rank=0, timeout=0.02)
    os.environ["SHMRING_ISA"] = "sse2" if "neon" in kernels.isas() else "neon"
    with pytest.raises(ValueError, match="SHMRING_ISA"):
        shmring.init(timeout=1)
    del os.environ["SHMRING_ISA"]


def holdings():
    """(descriptors, segments mapped, other writable memory in MiB, threads) of this process."""
    gc.collect()
    segments = writable = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            is_segment = "memfd:shmring" in line or "/dev/shm" in line
            segments += is_segment
            writable += (last - first) >> 20 if line.split()[1].startswith("rw") and not is_segment else 0
    names = [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
    return len(names), segments, writable, threading.active_count()


def assert_nothing_stays(attempt, times):
    for _ in range(
        2 + times // 10
    ):  # two rounds more for one-time allocations: the background thread, malloc's caches
        attempt()
    before = settled_holdings()
    for _ in range(times):
        attempt()
    after = settled_holdings()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + max(300, 2 * times)  # which malloc keeps at first, and no more later
    assert after[3] == before[3]


def settled_holdings():
    """Return the holdings after the background thread has released its last call."""
    until_none(lambda: holdings()[1] > 0, seconds=3)
    return holdings()


def attempts(way, across):
    def attempt():
        if way == "no beginning":
            refuse_to_begin()
        else:
            assert fail(way, across) is WAYS[way][2]

    return attempt


@pytest.mark.parametrize("way", first(6, [*WAYS, "no beginning"]))
def test_nothing_stays_of_a_communicator(way):
    assert_nothing_stays(attempts(way, False), 4)


@pytest.mark.parametrize("way", first(1, ["a death with all that there is", "all goes well", "a timeout"]))
def test_nothing_stays_of_a_communicator_over_hosts(way):
    assert_nothing_stays(attempts(way, True), 3)


@pytest.mark.soak
@pytest.mark.limit(600)
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("way", [*WAYS, "no beginning"])
def test_nothing_stays_of_a_hundred_communicators(way, across):
    assert_nothing_stays(attempts(way, across), 100)


# ---- killed while it begins -------------------------------------------------------------------------------

LAUNCHED = """
import numpy as np, shmring, sys, time
def work(comm):
    while True:
        comm.all_reduce(comm.full(100, 1.0))
        comm.split(0).close()
if __name__ == "__main__":
    if "spawn" in sys.argv:
        shmring.spawn(work, 2, method="fork")
    else:
        with shmring.init() as comm:
            work(comm)
"""


def kill_soon(script, how, kind, after_s):
    """Start ranks, kill the launcher alone or with all of them; the processes that are there after it."""
    command = [sys.executable, "-m", "shmring.run", "-n", "2", script]
    if how.startswith("spawn"):
        command = [sys.executable, script, "spawn"]
    environ = os.environ | {"SHMRING_SEGMENT": kind}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen(command, env=environ, start_new_session=True, **quiet)
    time.sleep(after_s)
    if how.endswith("and all"):
        for pid in in_session(launcher.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    launcher.kill()
    launcher.wait()
    return until_none(lambda: in_session(launcher.pid), seconds=15)


def in_session(sid):
    """Living processes of a session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
            state, _, _, session, *_ = stat.read().rpartition(")")[2].split()
            if int(session) == sid and state not in "ZX":
                found.append(int(name))
    return found


LAUNCHERS = ("shmrun", "shmrun and all", "spawn", "spawn and all")


def kill_often(tmp_path, times):
    script, before = tmp_path / "script.py", names_in_shm()
    script.write_text(LAUNCHED)
    chance = random.Random(times)
    for number in range(times):
        how = LAUNCHERS[number % len(LAUNCHERS)]
        kind = ("memfd", "posix")[(number + number // len(LAUNCHERS)) % 2]
        left = kill_soon(str(script), how, kind, chance.uniform(0.05, 1.0))
        assert not left, (how, kind, left)
        assert not names_in_shm() - before


def test_nothing_is_left_after_a_kill_during_the_start(tmp_path):
    kill_often(tmp_path, len(LAUNCHERS))


@pytest.mark.soak
@pytest.mark.limit(900)
def test_nothing_is_left_long_after_a_kill_during_the_start(tmp_path):
    kill_often(tmp_path, 200)
