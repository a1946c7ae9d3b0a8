"""Every wait, in collectives and elsewhere: it ends when the awaited rank dies or stops, and with Ctrl-C. The
error names that rank, its last action and its state."""

import asyncio
import contextlib
import functools
import os
import signal
import threading
import time

import numpy as np
import pytest
from ranks import CALL_TIMEOUT_S, Died, Ranks, until_stopped
from waiting import counted_s

import shmring
from tests.collectives.test_errors import ones

LATE_S = 0.25
SOON_S = 10
LONG = 3_000_000


async def _await(awaitable):
    return await awaitable


def _background(c, count):
    return c.all_reduce(ones(count), async_op=True)


COLLECTIVES = {
    "barrier": lambda c: c.barrier(),
    "all_reduce": lambda c: c.all_reduce(ones(60_000)),
    "reduce": lambda c: c.reduce(ones(60_000)),
    "broadcast": lambda c: c.broadcast(ones(60_000), 1),
    "scatter": lambda c: c.scatter(None, 1, like=ones(3)),
    "gather": lambda c: c.gather(ones(3)),
    "reduce_scatter": lambda c: c.reduce_scatter(ones((c.size, 9000))),
    "all_gather": lambda c: c.all_gather(ones(9000)),
    "all_to_all": lambda c: c.all_to_all(ones((c.size, 9000))),
    "all_gather_v": lambda c: c.all_gather_v(ones(9000)),
    "gather_v": lambda c: c.gather_v(ones(9)),
    "scatter_v": lambda c: c.scatter_v(None, 1, like=ones(3)),
    "all_to_all_v": lambda c: c.all_to_all_v([ones(9)] * c.size),
    "all_reduce_many": lambda c: c.all_reduce_many([ones(3), ones(400)]),
    "broadcast_object": lambda c: c.broadcast_object(None, 1),
    "all_gather_object": lambda c: c.all_gather_object(1),
    "gather_object": lambda c: c.gather_object(1),
    "scatter_object": lambda c: c.scatter_object(None, 1),
    "plan": lambda c: c.plan("all_reduce", ones(9))(),
}
OTHERS = {
    "empty": lambda c: c.empty(5),
    "shared": lambda c: c.shared(5),
    "split": lambda c: c.split(0),
    "group": lambda c: c.group([0, 1]),
    "dup": lambda c: c.dup(),
    "wait": lambda c: _background(c, 60_000).wait(),
    "result of a small one": lambda c: _background(c, 9).result(),
    "a call behind another": lambda c: (_background(c, 9), c.barrier()),
    "await": lambda c: asyncio.run(_await(_background(c, 9))),
    "recv": lambda c: c.recv(ones(3), 1),
    "recv from any": lambda c: c.recv(ones(3)),
    "probe": lambda c: c.probe(1),
    "send": lambda c: c.send(ones(LONG), 1),
    "sendrecv": lambda c: c.sendrecv(ones(3), 1, ones(2), 1),
    "a receive's wait": lambda c: c.irecv(ones(3), 1).wait(),
    "a send's wait": lambda c: c.isend(ones(LONG), 1).wait(),
    "await a receive": lambda c: asyncio.run(_await(c.irecv(ones(3), 1))),
    "recv_object": lambda c: c.recv_object(1),
}
OF_ONE_HOST = {"lock": None, "fence": None}
WAITS = COLLECTIVES | OTHERS | OF_ONE_HOST
# A call that goes on in the background after its caller has stopped waiting, so that close waits for it.
CLOSING = {"close": lambda c: (_background(c, 9), c.close())}


def begin_to_wait(comm, name, rank_1, *args, stops=None):
    """Rank 0 waits for rank 1, which does something else; stops: its process, if it stops itself."""
    array = comm.shared(10, locks=1, timeout=CALL_TIMEOUT_S) if name in OF_ONE_HOST else None
    comm.barrier(timeout=CALL_TIMEOUT_S)
    if comm.rank == 1:
        with array.lock(0) if name == "lock" else contextlib.nullcontext():
            if name == "lock":
                comm.barrier(timeout=CALL_TIMEOUT_S)
            return rank_1(comm, *args)
    if name == "lock":
        comm.barrier(timeout=CALL_TIMEOUT_S)
    if stops is not None:
        until_stopped(stops)
    if name == "lock":
        return array.lock(0).__enter__()
    return array.fence() if name == "fence" else (WAITS | CLOSING)[name](comm)


def die(comm):
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def stop_for_a_while(comm):
    os.kill(os.getpid(), signal.SIGSTOP)


def assert_a_death_ends_it(ranks, name):
    begin = counted_s()
    error, dead = ranks.outcomes(begin_to_wait, name, die)
    assert isinstance(dead, Died)
    assert isinstance(error, shmring.RankFailed), error
    assert error.rank == 1
    assert error.cause
    assert error.host
    assert counted_s() - begin < SOON_S


@pytest.mark.parametrize("name", WAITS)
def test_a_death_ends_every_wait(name):
    with Ranks(2) as ranks:
        assert_a_death_ends_it(ranks.meet(), name)


@pytest.mark.parametrize("name", [*OTHERS, "all_to_all_v", "scatter_object", "plan"])
def test_a_death_ends_every_wait_for_another_host(name):
    with Ranks(2, nodes=[0, 1]) as ranks:
        assert_a_death_ends_it(ranks.meet(), name)


def assert_a_stop_ends_it(ranks, name):
    ranks.begin(functools.partial(begin_to_wait, stops=ranks.pid(1)), name, stop_for_a_while)
    error = ranks.answers(among=[0])[0]
    ranks.kill(1, signal.SIGCONT)
    ranks.answers(among=[1])
    assert isinstance(error, shmring.Timeout), error
    assert isinstance(error, TimeoutError)
    assert error.rank == 1
    for words in ("rank 1", "0.25 s", "" if name in OF_ONE_HOST else "#1"):
        assert words in str(error), error
    return str(error)


# A receive from any rank waits for no particular one.
STOPPED = [name for name in (*OTHERS, *OF_ONE_HOST, "all_to_all_v", "plan") if name != "recv from any"]


@pytest.mark.parametrize("name", STOPPED)
def test_a_rank_that_stops_ends_every_wait_and_is_described(world_of, name):
    assert "it is stopped" in assert_a_stop_ends_it(world_of(2, timeout_s=LATE_S), name)


ELSEWHERE = "wait", "await", "recv", "probe", "send", "a receive's wait", "await a receive", "all_to_all_v"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_rank_of_another_host_that_stops_ends_every_wait_and_is_described(world_over_hosts, name):
    assert "it runs on 127.0.0.1" in assert_a_stop_ends_it(world_over_hosts([0, 1], timeout_s=LATE_S), name)


# ---- Ctrl-C -----------------------------------------------------------------------------------------------


def stay_away(comm):
    time.sleep(0.3)


def interrupt_wait(comm, name):
    """Seconds from the signal to the exception."""
    sent_s = []

    def interrupt():
        sent_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.1, interrupt)
    if comm.rank == 0:
        timer.start()
    try:
        begin_to_wait(comm, name, stay_away)
    except KeyboardInterrupt:
        took_s = time.monotonic() - sent_s[0]
        timer.join()
        return took_s


SOME = "empty", "shared", "split", "gather_v", "await", "probe", "fence", "close"


@pytest.mark.parametrize("name", SOME)
def test_ctrl_c_ends_a_wait(world_of, name):
    assert isinstance(world_of(2).outcomes(interrupt_wait, name)[0], float)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["one host", "two hosts"])
def test_ctrl_c_ends_every_wait_at_once(world_of, world_over_hosts, layout):
    took_s = {}
    for name in WAITS | CLOSING:
        if layout == "two hosts" and name in OF_ONE_HOST:
            continue
        ranks = world_of(2) if layout == "one host" else world_over_hosts([0, 1])
        took_s[name] = ranks.outcomes(interrupt_wait, name)[0]
        assert isinstance(took_s[name], float), (name, took_s[name])
    # Most of them, as the machine may stand still at times.
    assert np.median(list(took_s.values())) < 0.1, took_s
