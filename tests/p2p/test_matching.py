"""Sends that are complete once they are matched, receives that are cancelled, and matched probes."""

import gc
import os
import random
import time
import weakref

import numpy as np
import pytest
from ranks import Died, Ranks, interrupt_a_sender, interrupted

import shmring
from shmring import ANY_SOURCE
from tests.p2p.test_point_to_point import TINY

SOON_S = 10
LENGTHS = [0, 1, 1000]  # the last one does not fit into a tiny ring


def tell(comm, dest, tag=99):
    comm.send(b"", dest, tag)


def hear(comm, source, tag=99):
    comm.recv(bytearray(), source, tag)


# ---- sends with matched=True -------------------------------------------------------------------------------


def match_late(comm, count):
    """A message that is set aside, or probed, is not matched."""
    if comm.rank == 0:
        send = comm.isend(np.arange(count), 1, matched=True)
        tell(comm, 1)
        hear(comm, 1)
        assert not send.done()
        with pytest.raises(TimeoutError, match="goes on"):
            send.wait(0.05)
        tell(comm, 1)
        assert send.wait(SOON_S) is None
        assert send.done()
    else:
        x = np.zeros(count, "i8")
        hear(comm, 0)  # what came before is now set aside
        assert comm.probe(0, 0).count == count
        tell(comm, 0)
        hear(comm, 0)
        assert comm.recv(x, 0, 0).count == count
        assert (x == np.arange(count)).all()
    comm.barrier()


def match_early(comm, count):
    """The engine matches a message while its receiver is elsewhere."""
    for _ in range(20):
        if comm.rank == 0:
            comm.send(np.arange(count), 1, matched=True)
            comm.barrier()
        else:
            x = np.zeros(count, "i8")
            receive = comm.irecv(x, 0)
            comm.barrier()
            assert receive.wait(SOON_S).count == count
            assert (x == np.arange(count)).all()


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("case", [match_late, match_early])
def test_a_matched_send_is_complete_once_it_is_matched(world_of, case, count):
    world_of(2, SHMRING_MESSAGE_RING=TINY)(case, count)


def match_in_any_order(comm, count):
    dice = random.Random(5)
    order = list(range(count))
    dice.shuffle(order)
    if comm.rank == 0:
        sends = [comm.isend(np.array([tag]), 1, tag, matched=True) for tag in range(count)]
        for n, tag in enumerate(order):
            hear(comm, 1, count)
            assert sends[tag].wait(SOON_S) is None
            assert [send.done() for send in sends].count(True) == n + 1
            tell(comm, 1, count)
        return None
    x = np.zeros(1, "i8")
    for tag in order:
        comm.recv(x, 0, tag)
        assert x[0] == tag
        tell(comm, 0, count)
        hear(comm, 0, count)
    return None


def test_each_matched_send_is_complete_for_itself(world_of):
    world_of(2, SHMRING_MESSAGE_RING=TINY)(match_in_any_order, 100)


def send_too_many(comm):
    count = 16383
    if comm.rank == 0:
        sends = [comm.isend(b"", 1, matched=True) for _ in range(count)]
        with pytest.raises(RuntimeError, match="16383 sends to rank 1"):
            comm.isend(b"", 1, matched=True)
        assert comm.isend(b"", 0).wait(SOON_S) is None
        comm.barrier()
        for send in sends:
            send.wait(SOON_S)
        comm.send(b"", 1, 1, matched=True)
    else:
        comm.barrier()
        for _ in range(count):
            hear(comm, 0, 0)
        hear(comm, 0, 1)


def test_too_many_matched_sends_are_refused(world_of):
    world_of(2)(send_too_many)


def match_with_oneself(comm):
    own, x = comm.rank, np.zeros(3, "i8")
    send = comm.isend(np.arange(3), own, matched=True)
    assert not send.done()
    assert comm.probe(own).count == 3
    assert not send.done()
    comm.recv(x, own)
    assert send.done()
    assert list(x) == [0, 1, 2]
    receive = comm.irecv(x, own)
    comm.send(np.arange(3) * 2, own, matched=True)
    assert receive.wait().count == 3
    assert list(x) == [0, 2, 4]
    send = comm.isend(np.arange(3), own, matched=True)
    comm.mprobe(own).recv(x)
    assert send.wait(SOON_S) is None
    comm.isend(np.arange(3), own, matched=True)  # pending when the communicator closes


@pytest.mark.parametrize("size", [1, 2])
def test_a_matched_send_to_oneself(world_of, size):
    world_of(size)(match_with_oneself)


def receive_into_too_little(comm):
    if comm.rank == 0:
        comm.send(np.arange(3), 1, matched=True)
        comm.send_object("object", 1, matched=True)
    else:
        with pytest.raises(shmring.Truncated):
            comm.recv(np.zeros(2, "i8"))
        assert comm.recv_object() == "object"


def test_a_message_that_does_not_fit_is_matched(world_of):
    world_of(2)(receive_into_too_little)


def never_match(comm, how):
    if how == "other" and comm.rank == 1:
        time.sleep(0.6)  # the error comes by the next call
        hear(comm, 0, 7)
    comm.send(b"lost", 1 if how == "other" else comm.rank, matched=True, timeout=0.2)


@pytest.mark.parametrize("how", ["other", "oneself"])
def test_a_send_that_is_never_matched_is_a_timeout(world_of, how):
    errors = world_of(2).outcomes(never_match, how)
    assert any(isinstance(error, shmring.Timeout) and "0.2 s" in str(error) for error in errors)
    assert all(isinstance(error, shmring.Timeout) for error in errors)


def end_without_a_match(comm, how):
    if comm.rank == 1:
        comm.probe(0)
        if how == "dies":
            os._exit(1)
        comm.close()
        return None
    with pytest.raises(shmring.RankFailed) as caught:
        comm.send(b"lost", 1, matched=True)
    return caught.value.rank


@pytest.mark.parametrize("how", ["dies", "closes"])
def test_the_end_of_the_receiver_ends_a_matched_send(how):
    with Ranks(2) as ranks:
        outcomes = ranks.meet().outcomes(end_without_a_match, how)
        assert outcomes[0] == 1
        assert how == "closes" or isinstance(outcomes[1], Died)


def match_and_close(comm):
    if comm.rank == 1:
        hear(comm, 0)
        comm.close()
        return
    comm.send(b"", 1, 99, matched=True)


def test_a_receiver_may_close_after_the_match(world_of):
    for _ in range(10):
        world_of(2)(match_and_close)


def interrupt_a_matched_send(comm):
    sender = comm.broadcast_object(os.getpid())
    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            comm.send(b"", 1, matched=True)
    else:
        interrupt_a_sender(comm, 0, sender)
    comm.barrier()


def test_ctrl_c_in_a_matched_send_ends_the_communicator(world_of):
    for error in world_of(2).outcomes(interrupt_a_matched_send):
        assert isinstance(error, shmring.Aborted)
        assert "in the middle of a send to rank 1" in error.reason


# ---- cancelled receives ------------------------------------------------------------------------------------


def cancel_receives(comm):
    other = 1 - comm.rank
    x, y = np.zeros(1000, "i8"), np.zeros(1000, "i8")
    receive = comm.irecv(x, other, 1)
    alive = weakref.ref(x)
    assert receive.cancel()
    assert receive.cancel()
    assert receive.done()
    assert receive.wait() is None
    assert receive.result() is None
    assert "cancelled" in repr(receive)
    del x
    gc.collect()
    assert alive() is None
    comm.barrier()
    send = comm.isend(np.arange(1000), other, 1)
    assert not send.cancel()
    received = comm.irecv(y, other, 1)
    comm.barrier()
    assert not send.cancel()
    assert received.wait(SOON_S).count == 1000
    assert not received.cancel()
    assert (y == np.arange(1000)).all()
    send.wait(SOON_S)
    assert not send.cancel()
    first, second = comm.irecv(y[:1], other), comm.irecv(y[1:2], other)
    assert first.cancel()
    comm.barrier()
    comm.send(np.array([5]), other)
    assert second.wait(SOON_S).source == other
    assert list(y[:2]) == [0, 5]
    last = comm.irecv(y, other)
    comm.close()
    with pytest.raises(shmring.Closed):
        last.cancel()


def test_receives_are_cancelled_until_they_match(world_of):
    world_of(2, SHMRING_MESSAGE_RING=TINY)(cancel_receives)


# ---- matched probes ----------------------------------------------------------------------------------------


def take_messages(comm, count):
    """A message that is taken is found by its object only; messages behind it pass."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    assert comm.improbe() is None
    comm.barrier()
    numbers = [np.full(count, number) for number in range(4)]
    sends = [comm.isend(numbers[number], after, 7, matched=number == 1) for number in range(4)]
    x, y, z = (np.full(count, -1) for _ in range(3))
    first = comm.mprobe()
    assert (first.status.source, first.status.tag, first.status.count) == (before, 7, count)
    second = None
    while second is None:
        second = comm.improbe(before, 7)
    assert comm.recv(y, before, 7).count == count
    assert (y == 2).all()
    assert comm.recv(y).count == count
    assert (y == 3).all()
    assert comm.iprobe() is None
    assert comm.improbe() is None
    comm.barrier()
    assert not sends[1].done()
    comm.barrier()
    transfer = second.irecv(z)
    status = first.recv(x)
    assert (status.source, status.tag, status.count) == (before, 7, count)
    assert transfer.wait(SOON_S).count == count
    assert (x == 0).all()
    assert (z == 1).all()
    for taken in (first, second):
        with pytest.raises(RuntimeError, match="has been received"):
            taken.recv(x)
    assert "received" in repr(first)
    for send in sends:
        send.wait(SOON_S)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("count", LENGTHS)
def test_a_matched_probe_takes_a_message(world_of, size, count):
    world_of(size, SHMRING_MESSAGE_RING=TINY)(take_messages, count)


def take_objects(comm):
    other = (comm.rank + 1) % comm.size
    comm.send_object({"a": np.arange(5)}, other, 3)
    comm.send(np.arange(2), other, 4)
    taken = comm.mprobe(tag=3)
    array = comm.mprobe(ANY_SOURCE, 4)
    with pytest.raises(shmring.Mismatch, match="stays for recv"):
        array.recv_object()
    x = np.zeros(2, "i8")
    assert array.recv(x).count == 2
    assert list(x) == [0, 1]
    item = taken.recv_object()
    with pytest.raises(RuntimeError):
        taken.recv_object()
    return list(item["a"])


def test_a_matched_probe_takes_an_object(world_of):
    assert world_of(2)(take_objects) == [[0, 1, 2, 3, 4]] * 2


def receive_wrongly(comm):
    """A wrong argument harms nothing; a message that does not fit is lost, as in recv."""
    if comm.rank == 0:
        for tag in range(2):
            comm.send(np.arange(3), 1, tag)
        return
    first, second = comm.mprobe(0, 0), comm.mprobe(0, 1)
    x = np.zeros(3, "i8")
    with pytest.raises(TypeError):
        first.recv(None)
    with pytest.raises(ValueError, match="timeout"):
        first.recv(x, timeout=-1)
    assert first.recv(x).count == 3
    with pytest.raises(shmring.Truncated):
        second.recv(x[:2])
    with pytest.raises(RuntimeError):
        second.recv(x)
    with pytest.raises(TypeError, match="mprobe"):
        shmring.ProbedMessage()


def test_a_taken_message_is_received_as_others_are(world_of):
    world_of(2)(receive_wrongly)


def drop_messages(comm, count):
    """A message that is taken and never received is discarded, also while it arrives."""
    other = 1 - comm.rank
    x = np.zeros(count, "i8")
    for number in range(5):
        sends = [
            comm.isend(np.full(count, -1), other, 1, matched=True),
            comm.isend(np.full(count, number), other, 1),
        ]
        taken = comm.mprobe(other, 1)
        del taken
        assert comm.recv(x, other, 1).count == count
        assert (x == number).all()
        for send in sends:
            send.wait(SOON_S)
    comm.barrier()
    comm.isend(x, other, 1)
    kept = comm.mprobe(other, 1)
    comm.close()
    with pytest.raises(shmring.Closed):
        kept.recv(x)


@pytest.mark.parametrize("count", [*LENGTHS, 100_000])
def test_a_taken_message_that_is_dropped_is_discarded(world_of, count):
    world_of(2, SHMRING_MESSAGE_RING=TINY)(drop_messages, count)


def drop_a_message_and_receive_no_more(comm):
    """Its sender waits for nothing else of this rank."""
    if comm.rank == 0:
        comm.send(np.ones(100_000), 1)
    else:
        taken = comm.mprobe(0)
        del taken
        assert comm.iprobe() is None
    comm.barrier()


def test_the_rest_of_a_dropped_message_needs_no_other_call(world_of):
    ranks = world_of(2, SHMRING_MESSAGE_RING=TINY, SHMRING_SINGLE_COPY="off")
    for _ in range(2):  # the first time the progress thread knows nothing of messages yet
        ranks(drop_a_message_and_receive_no_more)


def interrupt_the_receive_of_a_taken_message(comm):
    """Its object keeps a message whose receive was interrupted."""
    x = np.zeros(100_000)
    if comm.rank == 1:
        send = comm.isend(np.ones(100_000), 0)
        hear(comm, 0)
        send.wait(SOON_S)
        return None
    taken = comm.mprobe(1)
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: comm.recv(x, 1, 5), 0.2)
    tell(comm, 1)
    assert comm.iprobe() is None
    return taken.recv(x).count == 100_000 and bool((x == 1).all())


def test_an_interrupt_beside_a_taken_message(world_of):
    assert world_of(2, SHMRING_MESSAGE_RING=TINY)(interrupt_the_receive_of_a_taken_message)[0]
