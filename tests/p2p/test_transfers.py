"""isend and irecv: the promises of a Transfer, what it keeps alive, and progress without a waiting rank."""

import asyncio
import gc
import random
import threading
import time
import weakref

import numpy as np
import pytest
from waiting import wait_until

import shmring
from tests.p2p.test_point_to_point import TINY

SOON_S = 10


def wait_too_briefly(comm):
    if comm.rank == 0:
        x = np.zeros(3)
        receive = comm.irecv(x, 1)
        assert not receive.done()
        with pytest.raises(TimeoutError, match="goes on") as caught:
            receive.wait(timeout=0.05)
        assert not isinstance(caught.value, shmring.Error)
        comm.send(b"now", 1)
        assert receive.wait(SOON_S).count == 3
        assert receive.result().source == 1
        assert "complete" in repr(receive)
        return (x == 1).all()
    comm.recv(bytearray(3))
    send = comm.isend(np.ones(3), 0)
    return send.wait(SOON_S) is None and send.done()


def test_a_wait_that_comes_too_early_harms_nothing(world_of):
    assert all(world_of(2)(wait_too_briefly))


def wait_for_no_time(comm):
    x = np.zeros(2)
    receive = comm.irecv(x, comm.rank)
    with pytest.raises(TimeoutError, match="goes on"):
        receive.wait(0)
    comm.send(np.ones(2), comm.rank)
    assert receive.result(0).count == 2
    for wrong in (-1, float("nan"), "1", True):  # refused, although it is complete
        with pytest.raises((TypeError, ValueError), match="timeout is"):
            receive.wait(wrong)
    return x.tolist()


def test_a_wait_of_no_time_only_asks(world_of):
    assert world_of(1)(wait_for_no_time) == [[1.0, 1.0]]


def forget_transfers(comm):
    x, y = np.ones(1000), np.zeros(1000)
    comm.irecv(y)
    alive = weakref.ref(y)
    del y
    gc.collect()
    assert alive() is not None, "the communicator keeps what is on its way"
    comm.barrier()
    comm.isend(x, 1 - comm.rank)

    def is_dropped():
        comm.iprobe()
        return alive() is None

    wait_until(is_dropped, "the array is no longer kept")
    return True


def test_arrays_are_kept_while_they_are_on_their_way_and_no_longer(world_of):
    assert all(world_of(2, SHMRING_MESSAGE_RING=TINY)(forget_transfers))


class SlowToGo:
    """An array whose destructor takes a moment, and lets other threads run meanwhile."""

    def __init__(self, array, is_going):
        self.__array_interface__ = array.__array_interface__
        self.array, self.is_going = array, is_going

    def __del__(self):
        self.is_going.set()
        time.sleep(0.3)


def receive_while_the_background_drops(comm):
    """Rank 0 waits for a message that comes after a collective, which only the background can advance."""
    x, y, is_going = np.ones(200_000), np.ones(3), threading.Event()
    if comm.rank == 0:
        comm.irecv(SlowToGo(np.zeros(3), is_going), 1, tag=7)
        works = [comm.all_reduce(x, async_op=True)]
        works += [comm.all_gather_v(x, async_op=True) for _ in range(2)]  # filled with the GIL held
        comm.send(y, 1)
        assert is_going.wait(SOON_S), "the background has dropped the array"
        comm.recv(y, 1, tag=1)
        return [work.done() for work in works]
    comm.recv(y, 0)
    comm.send(y, 0, tag=7)
    time.sleep(0.1)
    comm.all_reduce(x)
    for _ in range(2):
        comm.all_gather_v(x)
    comm.send(y, 0, tag=1)
    return None


def test_a_receive_does_not_hold_up_the_background_that_drops_arrays(world_of):
    done, _ = world_of(2)(receive_while_the_background_drops)
    assert done[:2] == [True, True]


def await_transfers(comm):
    async def main():
        x, out = np.full(10_000, comm.rank), np.zeros(10_000, "i8")
        receive = comm.irecv(out)
        send = comm.isend(x, 1 - comm.rank)
        status = await receive
        await send
        return status.count, int(out[0])

    return asyncio.run(main())


def test_transfers_can_be_awaited(world_of):
    assert world_of(2, SHMRING_MESSAGE_RING=TINY)(await_transfers) == [(10_000, 1), (10_000, 0)]


# ---- in the background ------------------------------------------------------------------------------------


def meet_after_a_large_send(comm, how):
    """Continue a transfer while its sender, or its receiver, is in a collective, as MPI programs do."""
    x, out = np.full(300_000, comm.rank), np.zeros(300_000, "i8")
    other = 1 - comm.rank
    if comm.rank == 0:
        transfer = comm.isend(x, other) if how == "isend" else comm.irecv(out)
        comm.barrier()
    else:
        comm.recv(out) if how == "isend" else comm.send(x, other)
        comm.barrier()
        transfer = None
    if transfer is not None:
        transfer.wait(SOON_S)
    assert how != "isend" or comm.rank == 0 or (out == 0).all()
    assert how == "isend" or comm.rank == 1 or (out == 1).all()


@pytest.mark.parametrize("how", ["isend", "irecv"])
def test_transfers_go_on_while_a_rank_is_in_a_collective(world_of, how):
    ranks = world_of(2, SHMRING_MESSAGE_RING=4096)
    for _ in range(5):
        ranks(meet_after_a_large_send, how)


def leave_it_to_the_background(comm):
    """Leave transfers to the background thread: it keeps unexpected messages, and releases arrays."""
    other, x, y = 1 - comm.rank, np.full(50_000, 7), np.zeros(3)
    comm.isend(x, other, tag=1)
    comm.isend(np.ones(3), other, tag=2)
    comm.irecv(y, other, tag=2)
    alive = weakref.ref(y)
    del y
    wait_until(lambda: alive() is None, "the background has released the array")
    out = np.zeros(50_000, "i8")
    comm.recv(out, other, 1)
    comm.barrier()
    return bool((out == 7).all())


def test_the_background_does_it_alone(world_of):
    ranks = world_of(2, SHMRING_MESSAGE_RING=TINY)
    for _ in range(3):
        assert all(ranks(leave_it_to_the_background))


def transfer_in_many_threads_worth(comm, count):
    """Transfers that the caller and the background carry on in turn."""
    other, dice = 1 - comm.rank, random.Random(comm.rank)
    receives, sends = [], []
    for i in range(count):
        sends.append(comm.isend(np.full(dice.randrange(3000), i), other, tag=i % 5))
        out = np.zeros(3000, "i8")
        receives.append((i, out, comm.irecv(out, other, tag=i % 5)))
        if dice.random() < 0.05:
            time.sleep(0.004)
    for i, out, receive in receives:
        status = receive.wait()
        assert (out[: status.count] == i).all()
        assert (out[status.count :] == 0).all()
    for send in sends:
        send.wait()
    comm.barrier()


def test_caller_and_background_take_turns(world_of):
    ranks = world_of(2, SHMRING_MESSAGE_RING=4096)
    for _ in range(5):
        ranks(transfer_in_many_threads_worth, 200)
