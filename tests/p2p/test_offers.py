"""Large messages that the receiver copies from where they lie: all calls, receivers that are late or cannot
read that memory, memory that changes after an error, and ranks that end in the middle."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from ranks import Died, Ranks, interrupted, turns, until_stopped, until_there, when_there
from unreadable import needs_page_with_the_time, page_with_the_time
from waiting import LONGEST_S

import shmring
from shmring import ANY_SOURCE, ANY_TAG
from shmring._config import thresholds, tuning_table
from tests.p2p.test_point_to_point import TINY

LATE_S = 0.1
ALWAYS = {"SHMRING_SINGLE_COPY": 64}  # whatever is faster, but for receivers that are late
ALL = {"SHMRING_MESSAGE_RING": TINY, **ALWAYS}  # the ring has no room for messages whose receivers are late
NEVER = {"SHMRING_SINGLE_COPY": "off"}
COUNT = 50_000


def in_place(comm):
    return comm.stats()["messages_in_place"]


def skip_unless_allowed(world_of):
    if world_of(2, **ALL)(send_one, "private") != [0, 1]:
        pytest.skip("processes may not read each other's memory here")


def new_array(comm, memory, count=COUNT, dtype="f8"):
    return comm.empty(count, dtype) if memory == "shared" else np.zeros(count, dtype)


def send_one(comm, memory):
    x = new_array(comm, memory)
    x[:] = np.arange(COUNT) + comm.rank
    comm.barrier()
    comm.barrier()
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        assert comm.recv(x, 0).count == COUNT
        assert (x == np.arange(COUNT)).all()
    comm.barrier()
    return in_place(comm)


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_a_large_message_is_read_where_it_lies(world_of, memory):
    skip_unless_allowed(world_of)
    assert world_of(2, **ALL)(send_one, memory) == [0, 1]


def test_only_shared_arrays_are_read_without_the_kernel(world_of):
    assert world_of(2, **NEVER)(send_one, "private") == [0, 0]
    assert world_of(2, **NEVER)(send_one, "shared") == [0, 0]
    assert world_of(2, SHMRING_SINGLE_COPY="4M")(send_one, "private") == [0, 0]


def see_changes(comm, wanted):
    """Send until the path of a message has differed `wanted` times from that of the one before it."""
    x, seen, stop = np.ones(1 << 16), [0, 0], time.monotonic() + LONGEST_S
    while comm.broadcast_object(np.count_nonzero(np.diff(np.diff(seen))), 1) < wanted:
        assert time.monotonic() < stop
        for _ in range(100):
            if comm.rank == 0:
                comm.send(x, 1)
            else:
                comm.recv(x, 0)
            seen.append(in_place(comm))


def test_the_other_path_is_tried_again_and_again(world_of):
    """Else a wrong measurement at the start, when the ring is cold, would hold for ever."""
    skip_unless_allowed(world_of)
    world_of(2, SHMRING_SINGLE_COPY="auto")(see_changes, 4)  # a trial has a begin and an end


def send_by_size(comm):
    for nbytes in (8, 1024, 100_000):
        x = new_array(comm, "private", nbytes, "u1")
        for turn in range(20):
            x[:] = turn
            comm.send(x, 1 - comm.rank)
            comm.recv(x, 1 - comm.rank)
            assert (x == turn).all()
    y = new_array(comm, "shared", 100_000, "u1")
    comm.sendrecv(y, 1 - comm.rank, y.copy(), 1 - comm.rank)
    return comm.stats()["chosen_paths_of_messages"]


def test_stats_have_the_paths_of_messages_by_destination_and_size(world_of):
    for rank, found in enumerate(world_of(2, SHMRING_SINGLE_COPY="auto")(send_by_size)):
        assert list(found) == [1 - rank]
        paths = found[1 - rank]
        assert paths["private"].keys() <= {65536}  # empty if processes may not read each other's memory
        assert set(paths["private"].values()) <= {"ring", "single_copy", "streamed_ring"}
        assert paths["shared"] == {65536: "zero_copy"}
    for settings in (ALWAYS, NEVER, {"SHMRING_PATH": "near"}, {"SHMRING_CHUNK": 4096}):
        assert world_of(2, **settings)(send_by_size) == [{}, {}]


def send_windows(comm, fixed):
    """Each rank sends arrays of many lengths at once, from and to places in the middle of a line."""
    counts = [0, 1, 63, 64, 2047, 2048, 2049, 16_384, 16_385, 40_000, 70_001, 300_000]
    x, rooms = np.arange(300_009, dtype="u2").view("u1")[1:], [np.zeros(n + 9, "u1") for n in counts]
    for turn in range(12):
        places = [room[turn % 9 :][:n] for room, n in zip(rooms, counts, strict=True)]
        receives = [comm.irecv(place, 1 - comm.rank) for place in places]
        sends = [comm.isend(x[turn:][:n], 1 - comm.rank) for n in counts]
        for transfer in receives + sends:
            transfer.wait()
        for place, n in zip(places, counts, strict=True):
            assert (place == x[turn:][:n]).all()
            place[:] = 0
    names = comm.stats()["chosen_paths_of_messages"].get(1 - comm.rank, {}).get("private", {}).values()
    assert set(names) <= {"ring", "single_copy", "streamed_ring"}
    assert in_place(comm) == 0 or not fixed


COPIES = {  # of 300,000 bytes
    "streaming": {"far_stream_nbytes": 64, "stream_out_nbytes": 64 << 10},
    "in turn": {"far_stream_nbytes": thresholds.NEVER, "stream_out_nbytes": thresholds.NEVER},
}


@pytest.mark.parametrize("ring", [16_384, 1 << 21])
@pytest.mark.parametrize("path", ["far", "near", "auto"])
@pytest.mark.parametrize("copies", COPIES)
def test_ways_to_copy_into_and_out_of_the_ring(world_of, tmp_path, copies, path, ring):
    table = tmp_path / "tuning.json"
    tuning_table.save(table, {2: {"any": COPIES[copies]}}, thresholds.LIMITS)
    ranks = world_of(2, SHMRING_TUNING=str(table), SHMRING_PATH=path, SHMRING_MESSAGE_RING=ring)
    ranks(send_windows, path != "auto")


# ---- every call -------------------------------------------------------------------------------------------


def numbers(count, seed):
    return np.arange(count) * 3.0 + seed


def every_call(comm, memory, count):
    other, x, y = 1 - comm.rank, new_array(comm, memory, count), new_array(comm, memory, count)
    for turn in range(3):
        x[:] = numbers(count, comm.rank + turn)
        y[:] = -1
        want = numbers(count, other + turn)
        for how in ("send", "sendrecv", "isend", "matched", "probe", "mprobe", "any", "object"):
            received = exchange(comm, how, x, y, other)
            assert received.nbytes == 8 * count
            assert (y == want).all(), how
            y[:] = -1
    comm.barrier()
    return in_place(comm)


def exchange(comm, how, x, y, other):
    if how == "sendrecv":
        return comm.sendrecv(x, other, y, other)
    if how in ("isend", "matched"):
        sent = comm.isend(x, other, 5, matched=how == "matched")
        received = comm.irecv(y, other, 5).wait(LONGEST_S)
        assert sent.wait(LONGEST_S) is None
        return received
    if how == "object":
        return exchange_objects(comm, x, y, other)
    if comm.rank == 0:
        comm.send(x, other, 7)
    received = receive(comm, how, y, other)
    if comm.rank == 1:
        comm.send(x, other, 7)
    return received


def receive(comm, how, y, other):
    if how == "probe":
        found = comm.probe(other, ANY_TAG)
        assert found.nbytes == y.nbytes
        return comm.recv(y, found.source, found.tag)
    if how == "mprobe":
        return comm.mprobe(other, 7).recv(y)
    if how == "any":
        return comm.recv(y, ANY_SOURCE, ANY_TAG)
    return comm.recv(y, other, 7)


def exchange_objects(comm, x, y, other):
    if comm.rank == 0:
        comm.send_object({"x": x, "name": "one"}, other)
    found, status = comm.recv_object(other, with_status=True)
    if comm.rank == 1:
        comm.send_object({"x": x, "name": "one"}, other)
    assert found["name"] == "one"
    assert status.nbytes > y.nbytes
    y[:] = found["x"]
    return comm.sendrecv(x, other, y, other)


# A tiny ring takes a change of context for every piece: the longest messages would take minutes on busy CPUs.
SHORT, LONG = (8, 5000, 40_000), (8, 5000, 400_000)


@pytest.mark.parametrize(
    ("ring", "count"), [(TINY, count) for count in SHORT] + [(1 << 20, count) for count in LONG]
)
@pytest.mark.parametrize("memory", ["private", "shared"])
def test_every_call(world_of, memory, count, ring):
    for settings in ({}, ALWAYS, NEVER):
        world_of(2, SHMRING_MESSAGE_RING=ring, **settings)(every_call, memory, count)


def test_every_call_reads_in_place_if_told_to(world_of):
    skip_unless_allowed(world_of)
    for found in world_of(2, **ALL)(every_call, "private", 5000):
        assert found == 3 * 9  # of which none fits into the ring


def many_lengths(comm, seed):
    """Messages of one source stay in order, whichever way each of them takes; some receives come late."""
    dice = random.Random(seed)
    lengths = [dice.choice([1, 40, 3000, 20_000, 150_000]) for _ in range(150)]
    late = {dice.randrange(150) for _ in range(8)}
    x, y = np.zeros(150_000, "i4"), np.zeros(150_000, "i4")
    for number, count in enumerate(lengths):
        if comm.rank == 0:
            x[:count] = number
            comm.send(x[:count], 1)
            continue
        if number in late:
            time.sleep(0.005)
        assert comm.recv(y, 0).count == count
        assert (y[:count] == number).all()
    comm.barrier()


@pytest.mark.parametrize("settings", [{}, ALWAYS, {"SHMRING_SINGLE_COPY": "8K"}])
def test_order_is_kept_whichever_way_a_message_takes(world_of, settings):
    for seed in range(4):
        world_of(2, **settings)(many_lengths, seed)
        world_of(2, SHMRING_MESSAGE_RING=8192, **settings)(many_lengths, seed)


# ---- messages that do not match, and what is refused ------------------------------------------------------


def receive_too_little(comm, memory):
    x = new_array(comm, memory)
    if comm.rank == 0:
        x[:] = 5
        comm.send(x, 1)
        comm.send(x, 1)
        comm.send(x[:3], 1)
    else:
        x[:] = 7
        with pytest.raises(shmring.Truncated):
            comm.recv(x[:-1], 0)
        with pytest.raises(shmring.Mismatch):
            comm.recv(x.view("i8"), 0)
        assert (x == 7).all()
        assert comm.recv(x, 0).count == 3
        assert list(x[:4]) == [5, 5, 5, 7]
    comm.barrier()


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_a_receive_that_does_not_match_loses_that_message_only(world_of, memory):
    world_of(2, **ALL)(receive_too_little, memory)


def receive_later_ones_first(comm):
    x = np.zeros(COUNT)
    if comm.rank == 0:
        sends = [comm.isend(np.full(COUNT, float(tag)), 1, tag) for tag in range(5)]
        for send_of in sends:
            send_of.wait(LONGEST_S)
    else:
        for tag in (4, 2, 3, 0, 1):
            assert comm.recv(x, 0, tag).tag == tag
            assert (x == tag).all()
    comm.barrier()


def test_messages_that_no_receive_waits_for_are_kept(world_of):
    for ring in (TINY, 1 << 20):
        world_of(2, SHMRING_MESSAGE_RING=ring, **ALWAYS)(receive_later_ones_first)


def drop_a_probed_one(comm):
    x = np.zeros(COUNT)
    if comm.rank == 0:
        comm.send(np.full(COUNT, 1.0), 1)
        comm.send(np.full(COUNT, 2.0), 1)
    else:
        taken = comm.mprobe(0)
        assert taken.status.count == COUNT
        del taken
        gc.collect()
        comm.recv(x, 0)
        assert (x == 2).all()
    comm.barrier()


def test_a_taken_message_may_be_dropped(world_of):
    world_of(2, **ALL)(drop_a_probed_one)


def send_what_the_kernel_cannot_read(comm):
    """Send a page that no other process may read; then something else."""
    x, y = page_with_the_time(), np.zeros(4096, "u1")
    if comm.rank == 0:
        comm.send(x, 1)
        comm.send(np.arange(4096, dtype="u1"), 1)
    else:
        assert comm.recv(y, 0).count == 4096
        assert y.any()
        comm.recv(y, 0)
        assert (y == np.arange(4096, dtype="u1")).all()
    comm.barrier()
    return in_place(comm)


@needs_page_with_the_time
@pytest.mark.parametrize("ring", [TINY, 1 << 20])
def test_memory_that_the_kernel_cannot_read_goes_through_the_ring(world_of, ring):
    assert world_of(2, SHMRING_MESSAGE_RING=ring, **ALWAYS)(send_what_the_kernel_cannot_read)[0] == 0


# ---- receivers that are late ------------------------------------------------------------------------------


def both_send_first(comm, memory):
    other, x, y = 1 - comm.rank, new_array(comm, memory), new_array(comm, memory)
    x[:] = comm.rank
    for _ in range(20):
        comm.send(x, other)
        comm.recv(y, other)
        assert (y == other).all()


@pytest.mark.parametrize("settings", [{}, ALWAYS])
@pytest.mark.parametrize("memory", ["private", "shared"])
def test_ranks_may_both_send_first_what_fits_into_a_ring(world_of, memory, settings):
    world_of(2, **settings)(both_send_first, memory)


def count_in_place(comm, number, memory="private"):
    x, counts = new_array(comm, memory, 1 << 16, "u1"), []
    for _ in range(number):
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0)
        counts.append(in_place(comm))
    comm.barrier()
    return counts


@pytest.mark.parametrize(
    ("memory", "expected"), [("private", [0] * 16 + [1, 2, 3]), ("shared", [*range(1, 17), 16, 16, 16])]
)
def test_the_other_path_is_tried_after_sixteen_messages(world_of, memory, expected):
    """The ring has no room for these messages, so none is late. Three at least are tried."""
    skip_unless_allowed(world_of)
    assert world_of(2, SHMRING_MESSAGE_RING=8192)(count_in_place, 60, memory)[1][:19] == expected


def be_late(comm, sent_path):
    x = np.zeros(COUNT)
    if comm.rank == 0:
        comm.send(np.arange(float(COUNT)), 1)
        sent_path.touch()
    else:
        until_there(sent_path)
        comm.recv(x, 0)
        assert (x == np.arange(COUNT)).all()
    comm.barrier()
    return in_place(comm)


def test_a_message_whose_receiver_is_late_goes_through_the_ring(world_of, tmp_path):
    for turn, settings in enumerate(({}, ALWAYS)):
        assert world_of(2, **settings)(be_late, tmp_path / f"{turn}")[1] == 0


def change_at_once(comm, memory):
    """A message belongs to its sender again as soon as the send returns, also if it is received later."""
    x = new_array(comm, memory)
    for turn in range(30):
        if comm.rank == 0:
            x[:] = turn
            if turn % 3 == 0:
                comm.isend(x, 1).wait()
            else:
                comm.send(x, 1)
            x[:] = -1
        else:
            if turn % 5 == 0:
                time.sleep(0.005)
            comm.recv(x, 0)
            assert (x == turn).all()
    comm.barrier()


@pytest.mark.parametrize("settings", [{}, ALWAYS])
@pytest.mark.parametrize("memory", ["private", "shared"])
def test_arrays_are_the_callers_again_as_soon_as_a_send_returns(world_of, memory, settings):
    world_of(2, **settings)(change_at_once, memory)


def compute_meanwhile(comm):
    """Transfers advance while neither rank makes a call."""
    x = np.full(3_000_000, 3.0)
    if comm.rank == 0:
        transfer = comm.isend(x, 1)
    else:
        x[:] = 0
        transfer = comm.irecv(x, 0)
    comm.barrier()
    deadline = time.monotonic() + LONGEST_S
    while "not complete" in repr(transfer):  # which advances nothing
        assert time.monotonic() < deadline
        time.sleep(0.001)
    transfer.wait(LONGEST_S)
    assert (x == 3).all()


def test_transfers_of_large_messages_advance(world_of):
    world_of(2, **ALWAYS)(compute_meanwhile)


def leave_with_a_transfer(comm, count):
    if comm.rank == 0:
        comm.isend(np.arange(count), 1)
        comm.close()
        return None
    time.sleep(LATE_S)
    x = np.zeros(count, "i8")
    try:
        comm.recv(x, 0)
    except shmring.RankFailed:
        return "lost"
    assert (x == np.arange(count)).all()
    return "received"


def test_what_fits_into_the_ring_arrives_after_its_sender_has_closed(world_of):
    for settings in ({}, ALWAYS):
        assert world_of(2, **settings)(leave_with_a_transfer, COUNT)[1] == "received"
        assert world_of(2, SHMRING_MESSAGE_RING=TINY, **settings)(leave_with_a_transfer, COUNT)[1] == "lost"


FULL = 127  # messages of a byte to 55 bytes in a ring of 8 KiB: a line is left


def pid_of(comm):
    return os.getpid()


def close_behind_a_full_ring(comm, pid_of_sender):
    """There is no room for the offer until the sender has stopped. Then it closes before its progress thread
    can put the offer into the ring: that thread runs only if nothing else does on its CPU."""
    one, x = np.zeros(8, "u1"), (np.arange(3000) % 251).astype("u1")
    if comm.rank == 0:
        for _ in range(FULL):
            comm.send(one, 1)
        comm.isend(x, 1)
        time.sleep(0.12)  # until the progress thread rests
        cpu = {min(os.sched_getaffinity(0))}
        for thread in map(int, os.listdir("/proc/self/task")):
            os.sched_setaffinity(thread, cpu)
            if thread != os.getpid():
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
            os.kill(os.getpid(), signal.SIGSTOP)
            comm.close()
            busy.kill()
        return "closed"
    until_stopped(pid_of_sender)
    for _ in range(FULL):
        comm.recv(one, 0)
    os.kill(pid_of_sender, signal.SIGCONT)
    y = np.zeros(3000, "u1")
    time.sleep(LATE_S)
    comm.recv(y, 0)
    return bool((y == x).all())


def test_a_message_whose_offer_found_no_room_arrives_after_its_sender_has_closed():
    for _ in range(10):
        with Ranks(2) as ranks:
            ranks.meet(SHMRING_MESSAGE_RING=8192, **ALWAYS)
            pids = ranks(pid_of)
            assert ranks(close_behind_a_full_ring, pids[0]) == ["closed", True]


def leave_while_the_other_reads(comm, seed):
    """The memory of a message is freed, and used for something else, when its sender closes."""
    dice = random.Random(seed)
    if comm.rank == 0:
        x = np.full(2_000_000, 1.0)
        comm.isend(x, 1)
        comm.isend(x[:1], 1)  # not before the first one
        comm.barrier()
        time.sleep(dice.random() * 0.003)
        comm.close()
        x[:] = 2
        return "closed"
    y = np.zeros(2_000_000)
    comm.barrier()
    try:
        comm.recv(y, 0)
    except shmring.RankFailed:
        return "lost"
    assert (y == 1).all()
    return "received"


def test_no_byte_is_taken_that_the_sender_has_changed_after_close(world_of):
    for seed in range(12):
        found = world_of(2, **ALL)(leave_while_the_other_reads, seed)
        assert found[0] == "closed"


# ---- shared arrays that come and go -----------------------------------------------------------------------


def allocate_meanwhile(comm):
    """One thread sends shared arrays, another one makes and frees others, which moves the table of them."""
    x, y = comm.empty(COUNT, "f8"), comm.empty(COUNT, "f8")
    x[:] = comm.rank

    def exchange_for_ever():
        for _ in range(300):
            comm.sendrecv(x, 1 - comm.rank, y, 1 - comm.rank)
            if not (y == 1 - comm.rank).all():
                wrong.append(y.copy())

    wrong = []
    thread = threading.Thread(target=exchange_for_ever)
    thread.start()
    while True:
        arrays = [comm.empty(100, "f8") for _ in range(3)]
        alive = np.array([float(thread.is_alive())])
        comm.all_reduce(alive)
        del arrays
        if alive[0] < comm.size:
            break
    thread.join()
    comm.barrier()
    assert not wrong


def test_shared_arrays_are_made_and_freed_meanwhile(world_of):
    world_of(2, **ALWAYS)(allocate_meanwhile)


def free_while_it_is_sent(comm):
    """A transfer keeps its array."""
    x = comm.empty(COUNT, "f8")
    x[:] = 5
    y = np.zeros(COUNT)
    comm.barrier()
    if comm.rank == 0:
        sent = comm.isend(x, 1)
    del x
    gc.collect()
    comm.empty(10, "f8")  # unmaps what all ranks have freed
    if comm.rank == 0:
        sent.wait(LONGEST_S)
    else:
        comm.recv(y, 0)
        assert (y == 5).all()


def test_a_shared_array_stays_until_it_is_received(world_of):
    world_of(2, **ALL)(free_while_it_is_sent)


# ---- errors in the middle ---------------------------------------------------------------------------------


def send_interrupted(comm, after_s, memory):
    """After an error the sender changes its array. The other rank gets the message as it was, or an error."""
    x = new_array(comm, memory, 4_000_000)
    x[:] = 1
    comm.barrier()
    if comm.rank == 0:
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            comm.send(x, 1)
            timer.join()
            time.sleep(0.2)
        except KeyboardInterrupt:
            x[:] = 2
            comm.abort("interrupted")  # if that was before the send, the other rank would wait
            return "interrupted"
        return "sent"
    time.sleep(0.02)
    y = np.zeros(4_000_000)
    try:
        comm.recv(y, 0)
    except shmring.Error:
        return "lost"
    assert (y == 1).all()
    return "received"


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_no_byte_is_taken_that_the_sender_has_changed_after_an_error(world_of, memory):
    for turn in range(8):
        found = world_of(2, **ALL).outcomes(send_interrupted, 0.015 + 0.003 * turn, memory)
        assert found[1] in ("lost", "received"), found
        assert found[0] in ("interrupted", "sent") or isinstance(found[0], KeyboardInterrupt), found
        assert found[1] == "received" or found[0] == "interrupted", found


def receive_interrupted(comm):
    """Receive without end until Ctrl-C; the sender gets an error."""
    x = np.ones(20_000_000)  # longer than what is copied before the first look at signals
    comm.barrier()
    if comm.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda: without_end(comm.recv, x, 0), 0.1)
        comm.abort("between two messages")
    without_end(comm.send, x, 1)


def without_end(call, *arguments):
    while True:
        call(*arguments)


def test_ctrl_c_in_the_middle_of_a_copy_ends_the_communicator(world_of):
    reasons = set()
    for _ in range(5):
        sender, receiver = world_of(2, **ALL).outcomes(receive_interrupted)
        assert isinstance(sender, shmring.Aborted)
        assert receiver is None or isinstance(receiver, shmring.Error), receiver
        reasons.add(sender.reason)
    assert any("in the middle of a message from rank 0" in reason for reason in reasons), reasons


def never_answer(comm, raised, memory):
    x = new_array(comm, memory)
    if comm.rank == 1:
        until_there(raised)
        comm.recv(x)
    try:
        comm.send(x, 1, timeout=0.3)
    finally:
        raised.touch()


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_a_receiver_that_never_comes_is_a_timeout(world_of, tmp_path, memory):
    ranks = world_of(2, **ALL)
    for error in ranks.outcomes(never_answer, tmp_path / "raised", memory):
        assert isinstance(error, shmring.Timeout), error
        assert "0.3 s" in str(error)


def talk_for_ever(comm, how, memory, path):
    other, x, y = 1 - comm.rank, new_array(comm, memory, 1_000_000), new_array(comm, memory, 1_000_000)
    x[:] = comm.rank
    for _ in turns(comm, path):
        if how == "both ways":
            comm.sendrecv(x, other, y)
        elif (how == "to the other") == (comm.rank == 0):
            comm.send(x, other)
        else:
            comm.recv(y, other)
            assert (y == other).all()


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("how", ["to the other", "from the other", "both ways"])
def test_a_rank_killed_in_the_middle_of_a_copy_is_named(tmp_path, how, memory):
    for turn in range(4):
        with Ranks(2) as ranks:
            ranks.meet(**ALWAYS)
            path = tmp_path / f"{turn}"
            ranks.begin(talk_for_ever, how, memory, str(path))
            when_there(path)
            time.sleep(0.001 * turn)
            ranks.kill(1)
            outcomes = ranks.answers()
            assert isinstance(outcomes[1], Died)
            assert isinstance(outcomes[0], shmring.RankFailed), outcomes
            assert outcomes[0].rank == 1
