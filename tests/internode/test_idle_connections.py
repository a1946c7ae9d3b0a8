"""Connections between hosts that carry nothing for a while: a late rank is waited for, a cut link is noticed.
test_cut_connections has the effect of a cut on calls with a short timeout."""

import asyncio
import time

import numpy as np
import pytest
from combinations import first
from ranks import Ranks
from waiting import counted_s

import shmring
from shmring._bootstrap import framed_socket
from tests.collectives.test_errors import assert_all

CUT_S = 1  # instead of 20 s, for waiting ranks
MUCH = 4 << 20  # elements: more than sockets take while the other end does not read
MUCH_IN_RING = 140_000  # bytes: more than a rank receives while it does not poll
SOON_S = 15


def notice_cuts_sooner(comm):
    framed_socket.CUT_S = CUT_S


def come_late(comm, late_s):
    """Come late to calls and messages that are longer than what can be received before: buffers are full."""
    last = comm.size - 1
    x, y = np.full(MUCH, float(comm.rank), "f4"), np.empty(MUCH, "f4")
    total = sum(range(comm.size))
    for call in ("all_reduce", "broadcast", "send", "in background"):
        if comm.rank == last:
            time.sleep(late_s)
        if call == "all_reduce":
            comm.all_reduce(x, out=y)
            assert (y == total).all()
        elif call == "broadcast":
            comm.broadcast(y, 0)
        elif call == "send" and comm.rank == 0:
            comm.send(x, last)
        elif call == "send" and comm.rank == last:
            comm.recv(y, 0)
            assert (y == 0).all()
        elif call == "in background":
            comm.all_reduce(x, out=y, async_op=True).wait()
            assert (y == total).all()
    comm.barrier()


@pytest.fixture
def meet_over(networks):
    """meet_over([0, 1]) → Ranks on hosts of their own that soon take a silent link for cut."""
    crews = []

    def meet(places, timeout_s):
        network = networks(max(places) + 1, who="links")
        ranks = Ranks(len(places), on=[network[place] for place in places]).__enter__()
        crews.append(ranks)
        ranks.meet()(notice_cuts_sooner)
        ranks.meet(timeout_s=timeout_s, SHMRING_MESSAGE_RING=1 << 20)
        return ranks

    yield meet
    for ranks in crews:
        for host in ranks.hosts:
            host.up()
        ranks.__exit__()


@pytest.mark.parametrize("places", first(1, [[0, 0, 1, 1], [0, 1]]))
def test_a_rank_that_comes_late_is_waited_for(meet_over, places):
    meet_over(places, timeout_s=60)(come_late, 1.6 * CUT_S)


def be_cut_off(comm, call):
    x, y = np.ones(MUCH, "f4"), np.empty(MUCH, "f4")
    comm.barrier()
    while True:
        if call == "all_reduce":
            comm.all_reduce(x, out=y)
        elif comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0)


@pytest.mark.parametrize("call", first(1, ["all_reduce", "messages"]))
def test_a_cut_link_is_noticed_long_before_the_timeout(meet_over, call):
    ranks = meet_over([0, 1], timeout_s=100)
    ranks.begin(be_cut_off, call)
    time.sleep(0.5)
    begin = counted_s()
    ranks.hosts[1].down()
    outcomes = ranks.answers()
    took_s = counted_s() - begin
    for rank, error in enumerate(assert_all(outcomes, shmring.RankFailed)):
        assert error.rank == 1 - rank, outcomes
    assert took_s < SOON_S


def poll_while_cut_off(comm, how):
    """Rank 0 sends when the link is cut, and only polls."""
    comm.barrier()
    time.sleep(1)
    if comm.rank == 1:
        return None
    transfer = comm.isend(np.ones(MUCH_IN_RING, "u1"), 1)
    if how == "await":

        async def wait():
            return await transfer

        return asyncio.run(wait())
    while not transfer.done():
        time.sleep(0.001)
    return None


@pytest.mark.parametrize("how", ["await", "done"])
def test_a_rank_that_polls_a_send_notices_a_cut_link(meet_over, how):
    ranks = meet_over([0, 1], timeout_s=100)
    ranks.begin(poll_while_cut_off, how)
    time.sleep(0.5)
    begin = counted_s()
    ranks.hosts[1].down()
    (error,) = ranks.answers(among=[0])
    assert isinstance(error, shmring.RankFailed), error
    assert error.rank == 1
    assert counted_s() - begin < SOON_S


def close_while_cut_off(comm):
    """Rank 0 has sent more than the other host takes; how long it waits for that when it closes."""
    if comm.rank == 1:
        return 0
    comm.send(np.ones(MUCH_IN_RING, "u1"), 1)
    time.sleep(1)  # by then the link is cut
    begin = counted_s()
    comm.close()
    return counted_s() - begin


def test_a_rank_that_closes_takes_a_cut_link_for_cut(meet_over):
    ranks = meet_over([0, 1], timeout_s=100)
    ranks.begin(close_while_cut_off)
    time.sleep(0.5)
    ranks.hosts[1].down()
    begin_s = time.monotonic()
    (took_s,) = ranks.answers(among=[0])
    assert time.monotonic() - begin_s > CUT_S / 2
    assert took_s < SOON_S
