"""Closing a communicator over several hosts: sent messages arrive, whatever their sender does next; nothing
is received into memory that has been returned to its owner; no rank is waited for in vain."""

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from combinations import each_value
from ranks import Died, Ranks, interrupt_once_there, until_there
from waiting import counted_s

import shmring

SOON_S = 10  # before a call's timeout
APART = [0, 1]
MANY_RANKS = [0, 1, 2, 3, 4]
RING = 1 << 20
MUCH_NBYTES = 900_000  # fits into the ring, so a send returns; does not fit into a socket's buffer
LATE_S = 1.5


def bytes_of(nbytes):
    return np.arange(nbytes, dtype="u4").astype("u1")


# ---- sent messages arrive ---------------------------------------------------------------------------------


def send_and_close(comm, nbytes, late_s, how="send"):
    """Rank 0 leaves behind its message to the last one, which receives it late."""
    last = comm.size - 1
    if comm.rank == 0:
        transfer = comm.isend(bytes_of(nbytes), last) if how == "isend" else comm.send(bytes_of(nbytes), last)
        if transfer is not None:
            transfer.wait()
        comm.close()
    if comm.rank != last:
        return None
    time.sleep(late_s)
    x = np.zeros(nbytes, "u1")
    comm.recv(x, 0)
    assert (x == bytes_of(nbytes)).all()
    with pytest.raises(shmring.RankFailed, match="closed") as caught:
        comm.recv(x, 0)
    return caught.value.rank


@each_value(
    {
        "nodes, nbytes": [(APART, 1000), (APART, 60_000), (APART, MUCH_NBYTES), (MANY_RANKS, 200_000)],
        "late_s": [0, LATE_S, 0.1],
    }
)
def test_what_was_sent_comes_though_its_sender_closes(world_over_hosts, nodes, nbytes, late_s):
    ranks = world_over_hosts(nodes, SHMRING_MESSAGE_RING=RING)
    assert ranks(send_and_close, nbytes, late_s)[-1] == 0


def test_what_isend_sent_comes_though_its_sender_closes(world_over_hosts):
    ranks = world_over_hosts(APART, SHMRING_MESSAGE_RING=RING)
    assert ranks(send_and_close, MUCH_NBYTES, LATE_S, "isend")[1] == 0


def test_what_was_sent_comes_over_a_network(world_over):
    for nbytes in (4, MUCH_NBYTES):
        ranks = world_over(APART, SHMRING_MESSAGE_RING=RING)
        assert ranks(send_and_close, nbytes, LATE_S)[1] == 0


def receive_many_and_answer(comm, count, nbytes):
    """Close rank 0 with unread messages of rank 1: nothing is destroyed by that."""
    if comm.rank == 1:
        comm.send(bytes_of(nbytes), 0, tag=1)
        comm.recv(np.zeros(1), 0, tag=3)
        time.sleep(LATE_S)
        for _ in range(count):
            x = np.zeros(nbytes, "u1")
            comm.recv(x, 0, tag=2)
            assert (x == bytes_of(nbytes)).all()
        return True
    comm.send(np.zeros(1), 1, tag=3)
    for _ in range(count):
        comm.send(bytes_of(nbytes), 1, tag=2)
    comm.close()
    return None


def test_what_was_sent_comes_though_its_sender_leaves_a_message_unread(world_over_hosts):
    ranks = world_over_hosts(APART, SHMRING_MESSAGE_RING=RING)
    assert ranks(receive_many_and_answer, 3, 300_000)[1]


# ---- no wait in vain ---------------------------------------------------------------------------------------


def send_and_close_at_once(comm):
    """Nobody receives anything; how long closing took."""
    comm.send(bytes_of(MUCH_NBYTES), 1 - comm.rank)
    begin = counted_s()
    comm.close()
    return counted_s() - begin


def test_ranks_that_close_at_once_do_not_wait_for_each_other(world_over_hosts):
    assert max(world_over_hosts(APART, SHMRING_MESSAGE_RING=RING)(send_and_close_at_once)) < SOON_S


def begin_to_send_and_close(comm):
    """Return how long closing takes with a message that cannot leave completely: it is lost, and not waited
    for."""
    if comm.rank == 1:
        return 0
    comm.isend(bytes_of(4 * RING), 1)
    time.sleep(0.2)
    begin = counted_s()
    comm.close()
    return counted_s() - begin


def test_a_rank_that_closes_does_not_wait_for_a_message_half_sent(world_over_hosts):
    ranks = world_over_hosts(APART, SHMRING_MESSAGE_RING=RING)
    assert ranks(begin_to_send_and_close)[0] < SOON_S


def send_and_close_though(comm, what):
    """Rank 1 is in no call, or is stopped; how long rank 0's closing took."""
    comm.barrier()
    if comm.rank == 1:
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(LATE_S)
        return 0
    comm.send(bytes_of(MUCH_NBYTES), 1)
    if what == "aborted":
        comm.abort("enough")
    begin = counted_s()
    comm.close()
    return counted_s() - begin


def test_a_rank_that_has_given_up_closes_soon(world_over_hosts):
    assert world_over_hosts(APART, SHMRING_MESSAGE_RING=RING)(send_and_close_though, "aborted")[0] < SOON_S


def test_a_rank_that_closes_waits_for_one_that_is_stopped_no_longer_than_for_a_call():
    with Ranks(2, nodes=APART) as ranks:
        ranks.meet(SHMRING_MESSAGE_RING=RING, timeout_s=2)
        begin_s = time.monotonic()
        ranks.begin(send_and_close_though, "stopped")
        (took_s,) = ranks.answers(among=[0])
        assert time.monotonic() - begin_s > 1.5
        assert took_s < SOON_S
        ranks.kill(1, signal.SIGCONT)
        assert ranks.answers(among=[1]) == [0]


def kill_oneself_later(comm):
    """Rank 0 waits in close, and sees the other one die."""
    if comm.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return send_and_close_at_once(comm)


def test_a_rank_that_closes_sees_one_die():
    with Ranks(2, nodes=APART) as ranks:
        ranks.meet(SHMRING_MESSAGE_RING=RING)
        took_s, other = ranks.outcomes(kill_oneself_later)
        assert took_s < SOON_S
        assert isinstance(other, Died)


def give_up_later(comm):
    """Abort on the other rank while rank 0 waits in close."""
    if comm.rank == 0:
        return send_and_close_at_once(comm)
    time.sleep(0.3)
    comm.abort("enough")
    time.sleep(LATE_S)  # the sockets stay full
    return 0


def test_a_rank_that_closes_learns_that_it_is_over(world_over_hosts):
    assert max(world_over_hosts(APART, SHMRING_MESSAGE_RING=RING)(give_up_later)) < SOON_S


def connections():
    """Return the number of TCP connections of this process."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was the one that lists them, or only listens
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as line:
                    count += line.family == socket.AF_INET and bool(line.getpeername())
    return count


def wait_in_close(comm, meanwhile, over):
    """Return the result of meanwhile(), which runs while rank 0 waits in close and rank 1 does not poll."""
    if comm.rank == 1:
        until_there(over)
        comm.close()
        return None
    before, found = connections(), []
    comm.send(bytes_of(MUCH_NBYTES), 1)
    thread = threading.Timer(0.3, lambda: [found.append(meanwhile()), over.touch()])

    def close():
        thread.start()
        comm.close()

    with pytest.raises(KeyboardInterrupt) if meanwhile is interrupt else contextlib.nullcontext():
        close()
    comm.close()
    thread.join()
    assert connections() == before - 2  # of data and of control
    return before, found[0]


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def count_in_a_child():
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(connections())


def test_ctrl_c_ends_the_wait_of_a_rank_that_closes(world_over_hosts, tmp_path):
    world_over_hosts(APART, SHMRING_MESSAGE_RING=RING)(wait_in_close, interrupt, tmp_path / "over")


def test_a_child_that_is_forked_from_a_rank_that_closes_has_none_of_its_connections(
    world_over_hosts, tmp_path
):
    ranks = world_over_hosts(APART, SHMRING_MESSAGE_RING=RING)
    before, in_child = ranks(wait_in_close, count_in_a_child, tmp_path / "over")[0]
    assert in_child == before - 2


# ---- memory that is its owner's again ----------------------------------------------------------------------

HUGE_NBYTES = 10**8  # memory of a mapping of its own: a write there after it is freed kills the process


def close_in_the_middle(comm, how):
    """Let rank 1 begin to receive, and close while more arrives."""
    if comm.rank == 0:
        with contextlib.suppress(shmring.RankFailed, shmring.Aborted):  # the latter after Ctrl-C there
            comm.send(np.ones(HUGE_NBYTES, "u1"), 1)
        return True
    x = np.zeros(HUGE_NBYTES, "u1")
    if how == "irecv":
        comm.irecv(x, 0)
        while not x[0]:
            time.sleep(0.0001)
    else:
        interrupt_once_there(x)
        with pytest.raises(KeyboardInterrupt):
            comm.recv(x, 0)
    del x
    comm.close()
    return True


@pytest.mark.parametrize("how", ["irecv", "recv"])
def test_nothing_is_received_into_memory_that_was_freed(world_over_hosts, how):
    for _ in range(3):
        assert world_over_hosts(APART)(close_in_the_middle, how) == [True, True]


# ---- calls after a close ----------------------------------------------------------------------------------


def call_after_close(comm):
    """Return the ranks that the errors of calls on a closed communicator name."""
    comm.barrier()
    comm.close()
    calls = [comm.barrier, lambda: comm.all_reduce(np.ones(2)), lambda: comm.send(np.ones(2), 0)]
    named = []
    for call in calls:
        with pytest.raises(shmring.Closed) as caught:
            call()
        named.append(caught.value.rank)
    return named


@pytest.mark.parametrize("nodes", [APART, [0, 1, 1, 0]])
def test_a_call_after_close_names_this_rank(world_over_hosts, nodes):
    assert world_over_hosts(nodes)(call_after_close) == [[rank] * 3 for rank in range(len(nodes))]
