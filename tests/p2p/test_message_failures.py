"""Messages that are refused, too long, lost or late; and ranks that die, leave, abort or are interrupted in
the middle of one."""

import os
import threading
import time

import numpy as np
import pytest
from ranks import Died, Ranks, interrupt_a_sender, interrupted, turns, until_there, when_there
from waiting import counted_s

import shmring
from shmring import ANY_SOURCE
from tests.p2p.test_point_to_point import TINY, exchange_arrays

SOON_S = 10
LAST_TAG = 2**31 - 1


def both(comm, first, second):
    """Rank 0 does the first, rank 1 the second."""
    return (first if comm.rank == 0 else second)()


# ---- refused messages -------------------------------------------------------------------------------------


def wrong_arguments(comm):
    x = np.zeros(3)
    wrong = [
        (ValueError, "dest is 2", lambda: comm.send(x, 2)),
        (ValueError, "dest is -1", lambda: comm.send(x, -1)),
        (ValueError, "dest is", lambda: comm.isend(x, 10**30)),
        (TypeError, "dest is", lambda: comm.send(x, "one")),
        (TypeError, "dest is", lambda: comm.send(x, 1.0)),
        (ValueError, "source is 2", lambda: comm.recv(x, 2)),
        (ValueError, "source is -2", lambda: comm.irecv(x, -2)),
        (ValueError, "tag is -1", lambda: comm.send(x, 1, -1)),
        (ValueError, "tag is", lambda: comm.send(x, 1, LAST_TAG + 1)),
        (ValueError, "tag is -2", lambda: comm.recv(x, 1, -2)),
        (TypeError, "tag is", lambda: comm.recv(x, 1, None)),
        (ValueError, "context is 2", lambda: comm.send(x, 1, context=2)),
        (ValueError, "context is -1", lambda: comm.probe(context=-1)),
        (TypeError, "context is", lambda: comm.irecv(x, 1, context=None)),
        (TypeError, "x is", lambda: comm.send(5, 1)),
        (TypeError, "x", lambda: comm.send(np.array([None]), 1)),
        (ValueError, "contiguous", lambda: comm.send(np.zeros(6)[::2], 1)),
        (ValueError, "read-only", lambda: comm.recv(np.frombuffer(b"abcd"[:4], "u1"), 1)),
        (ValueError, "in common", lambda: comm.sendrecv(x, 1, x)),
        (ValueError, "timeout", lambda: comm.send(x, 1, timeout=0)),
        (TypeError, "timeout", lambda: comm.recv(x, 1, timeout="long")),
        (ValueError, "source is", lambda: comm.probe(5)),
        (TypeError, "pickle", lambda: comm.send_object(threading.Lock(), 1)),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()
    exchange_arrays(comm)


def test_wrong_arguments_are_refused_and_harm_nobody(world_of):
    world_of(2)(wrong_arguments)


def test_transfers_are_made_by_calls_only():
    with pytest.raises(TypeError, match="isend"):
        shmring.Transfer()


def receive_into_too_little(comm, count):
    if comm.rank == 0:
        comm.send(np.arange(count), 1, tag=1)
        comm.send(np.array([5]), 1, tag=1)
        comm.send_object("object", 1)
        comm.send(np.arange(3.0), 1, tag=2)
        comm.send(np.zeros((2, 2), order="F"), 1, tag=3)
        comm.send(np.zeros(3, "M8[D]"), 1, tag=4)
        return None
    x = np.full(2, -1)
    with pytest.raises(shmring.Truncated, match=rf"int64\[{count}\].*room for int64\[2\]") as caught:
        comm.recv(x)
    assert isinstance(caught.value, ValueError)
    assert caught.value.rank == 0
    assert (x == -1).all()
    receive = comm.irecv(x)
    assert receive.wait().count == 1
    assert list(x) == [5, -1]
    for wrong, what in (x, "dtype"), (np.zeros(3, "f4"), "dtype"), (np.zeros((2, 2)), "memory order"):
        with pytest.raises(shmring.Mismatch, match=f"both ends need the same {what}") as caught:
            comm.recv(wrong)
        assert caught.value.rank == 0
    calls = caught.value.calls
    with pytest.raises(shmring.Mismatch, match=r"sent 8-byte items\[3\] of another dtype"):
        comm.recv(np.zeros(3, "M8[s]"))
    return calls


@pytest.mark.parametrize("count", [3, 10_000])
def test_a_message_that_does_not_fit_is_an_error_and_only_it_is_lost(world_of, count):
    calls = world_of(2, SHMRING_MESSAGE_RING=TINY)(receive_into_too_little, count)[1]
    assert calls == ("send(float64[4] in Fortran order)", "recv(float64[4])")


def fail_to_receive(comm, count):
    """After the failed receive rank 1 makes no call on messages."""
    for take in (comm.recv, lambda x: comm.irecv(x).wait()):
        for room in (np.empty(count - 1), np.empty(count, "i8")):
            if comm.rank == 0:
                comm.send(np.zeros(count), 1)
            else:
                with pytest.raises((shmring.Truncated, shmring.Mismatch)):
                    take(room)
            comm.barrier()


def test_a_sender_does_not_wait_after_a_receive_that_failed(world_of):
    world_of(2, SHMRING_MESSAGE_RING=TINY, SHMRING_TIMEOUT=15)(fail_to_receive, 1000)


def test_a_sender_on_another_host_does_not_wait_after_a_receive_that_failed(world_over_hosts):
    world_over_hosts([0, 1], SHMRING_TIMEOUT=15)(fail_to_receive, 1_000_000)


def receive_an_object_that_is_none(comm):
    if comm.rank == 0:
        comm.send(np.arange(3), 1)
        return None
    with pytest.raises(shmring.Mismatch, match="stays for recv"):
        comm.recv_object()
    x = np.zeros(3, "i8")
    comm.recv(x)
    return list(x)


def test_an_array_where_an_object_is_awaited_stays(world_of):
    assert world_of(2)(receive_an_object_that_is_none)[1] == [0, 1, 2]


def use_after_close(comm):
    x = np.zeros(2)
    receive = comm.irecv(x)
    comm.close()
    for call in (lambda: comm.send(x, 0), lambda: comm.recv(x), comm.probe, receive.wait, receive.done):
        with pytest.raises(shmring.Closed):
            call()


def test_a_closed_communicator_raises_closed(world_of):
    world_of(2)(use_after_close)


# ---- the end of others ------------------------------------------------------------------------------------


def leave_a_message(comm):
    if comm.rank == 0:
        comm.send(np.arange(4), 1)
        comm.close()
        return None
    time.sleep(0.2)
    x = np.zeros(4, "i8")
    assert comm.recv(x, 0).count == 4
    begin = counted_s()
    with pytest.raises(shmring.RankFailed, match="closed") as caught:
        comm.recv(x, 0)
    assert counted_s() - begin < SOON_S
    return caught.value.rank


def test_messages_sent_before_closing_arrive(world_of):
    assert world_of(2)(leave_a_message)[1] == 0


def never_answer(comm, call, raised):
    x = np.zeros(100_000)
    if comm.rank == 1:
        until_there(raised)
        comm.recv(x)
    calls = {
        "send": lambda: comm.send(x, 1, timeout=0.3),
        "recv": lambda: comm.recv(x, 1, timeout=0.3),
        "recv from any": lambda: comm.recv(x, timeout=0.3),
        "sendrecv": lambda: comm.sendrecv(x, 1, np.zeros(3), timeout=0.3),
        "probe": lambda: comm.probe(1, 7, timeout=0.3),
    }
    try:
        calls[call]()
    finally:
        raised.touch()


@pytest.mark.parametrize("call", ["send", "recv", "recv from any", "sendrecv", "probe"])
def test_a_rank_that_does_not_answer_is_a_timeout(world_of, call, tmp_path):
    errors = world_of(2, SHMRING_MESSAGE_RING=TINY).outcomes(never_answer, call, tmp_path / "raised")
    for error in errors:
        assert isinstance(error, shmring.Timeout), error
        assert isinstance(error, TimeoutError)
        assert "0.3 s" in str(error)
    op = call.split()[0].replace("sendrecv", "send")
    assert [error.op for error in errors] == [op, op]


def receive_from_each_other(comm):
    comm.recv(np.zeros(3), 1 - comm.rank, timeout=0.5 if comm.rank == 0 else 20)


def test_a_timeout_says_that_the_other_rank_waits_too(world_of):
    first, second = world_of(2).outcomes(receive_from_each_other)
    assert isinstance(first, shmring.Timeout)
    assert "it waits in recv for rank 0" in str(first)
    assert str(second) == str(first)


def talk_for_ever(comm, how, path):
    other, x, y = 1 - comm.rank, np.zeros(20_000), np.zeros(20_000)
    for _ in turns(comm, path):
        if how == "one way":
            both(comm, lambda: comm.send(x, other), lambda: comm.recv(y, other))
        elif how == "other way":
            both(comm, lambda: comm.recv(y), lambda: comm.send(x, other))
        else:
            comm.sendrecv(x, other, y)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["one way", "other way", "both ways"])
def test_a_rank_killed_in_the_middle_of_a_message_is_named(tmp_path, how, victim):
    with Ranks(2) as ranks:
        ranks.meet(SHMRING_MESSAGE_RING=TINY)
        ranks.begin(talk_for_ever, how, str(tmp_path / "runs"))
        when_there(tmp_path / "runs", ranks)
        ranks.kill(victim)
        outcomes = ranks.answers()
        assert isinstance(outcomes[victim], Died)
        assert isinstance(outcomes[1 - victim], shmring.RankFailed)
        assert outcomes[1 - victim].rank == victim


def poll(question):
    """Ask until there is an answer, for SOON_S at most."""
    until = counted_s() + SOON_S
    while not question() and counted_s() < until:
        pass


WAYS_TO_AWAIT = {
    "recv": lambda comm, source: comm.recv(np.zeros(3), source),
    "done": lambda comm, source: poll(comm.irecv(np.zeros(3), source).done),
    "iprobe": lambda comm, source: poll(lambda: comm.iprobe(source)),
    "improbe": lambda comm, source: poll(lambda: comm.improbe(source)),
}


def wait_for_the_dead(comm, source, way):
    if comm.rank == 1:
        time.sleep(0.2)
        os._exit(1)
    begin = counted_s()
    try:
        WAYS_TO_AWAIT[way](comm, source)
    except shmring.RankFailed as error:
        return error.rank, counted_s() - begin
    return None, 0.0


@pytest.mark.parametrize("way", WAYS_TO_AWAIT)
@pytest.mark.parametrize("source", [1, ANY_SOURCE])
def test_a_rank_that_dies_is_noticed_by_who_waits_for_it(source, way):
    with Ranks(2) as ranks:
        rank, took_s = ranks.meet().outcomes(wait_for_the_dead, source, way)[0]
        assert rank == 1
        assert took_s < SOON_S


def poll_for_one_that_left(comm):
    if comm.rank == 1:
        comm.close()
        return None
    with pytest.raises(shmring.RankFailed) as caught:
        poll(comm.irecv(np.zeros(3), 1).done)
    return caught.value.cause


def look_for_messages_of_one_that_left(comm):
    """A program that empties its queue at the end does not need the others any more."""
    if comm.rank == 1:
        comm.send(np.zeros(3), 0)
        comm.close()
        return None
    comm.recv(np.zeros(3), 1)
    time.sleep(0.2)
    return [comm.iprobe(), comm.improbe(1)]


def test_polls_of_a_rank_that_left(world_of):
    assert "closed" in world_of(2)(poll_for_one_that_left)[0]
    assert world_of(2)(look_for_messages_of_one_that_left)[0] == [None, None]


def give_up_while_others_wait(comm):
    if comm.rank == 0:
        time.sleep(0.2)
        comm.abort("enough")
    comm.recv(np.zeros(3), (comm.rank + 1) % comm.size)


def test_abort_ends_every_wait(world_of):
    for error in world_of(3).outcomes(give_up_while_others_wait):
        assert isinstance(error, shmring.Aborted)
        assert error.reason == "enough"


def interrupt(comm, call):
    x, sender = np.zeros(100_000), comm.broadcast_object(os.getpid())
    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda: comm.recv(x, 1), 0.2) if call == "recv" else comm.send(x, 1)
    elif call == "send":
        interrupt_a_sender(comm, 0, sender)
    comm.barrier()
    exchange_arrays(comm)


def test_ctrl_c_in_recv_harms_nothing(world_of):
    world_of(2, SHMRING_MESSAGE_RING=TINY)(interrupt, "recv")


def test_ctrl_c_in_the_middle_of_a_send_ends_the_communicator(world_of):
    for error in world_of(2, SHMRING_MESSAGE_RING=TINY).outcomes(interrupt, "send"):
        assert isinstance(error, shmring.Aborted)
        assert "in the middle" in error.reason


def interrupt_a_wait(comm):
    x = np.zeros(100_000)
    if comm.rank == 0:
        receive = comm.irecv(x, 1)
        with pytest.raises(KeyboardInterrupt):
            interrupted(receive.wait, 0.2)
        comm.send(b"now", 1)
        return receive.wait().count
    comm.recv(bytearray(3))
    comm.send(x, 0)
    return x.size


def test_ctrl_c_in_the_wait_for_a_transfer_leaves_it_as_it_is(world_of):
    assert world_of(2, SHMRING_MESSAGE_RING=TINY)(interrupt_a_wait) == [100_000, 100_000]


def fork_and_send(comm):
    pid = os.fork()
    if pid == 0:
        try:
            comm.send(b"child", 1)
        except shmring.Closed:
            os._exit(7)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    comm.barrier()
    return code


def test_a_forked_child_has_no_messages(world_of):
    assert world_of(2)(fork_and_send) == [7, 7]


def wait_idly(comm):
    if comm.rank == 1:
        time.sleep(0.8)
        comm.send(b"x", 0)
        return 0
    begin = time.process_time()
    comm.recv(bytearray(1))
    return time.process_time() - begin


def test_a_rank_that_waits_costs_no_cpu(world_of):
    assert world_of(2)(wait_idly)[0] < 0.4
