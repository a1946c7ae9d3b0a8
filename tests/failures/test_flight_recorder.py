"""The records of every rank after a failure or during a long wait: its position, the rank that it waits for,
its Python stacks, the warning about a late rank."""

import contextlib
import copy
import ctypes
import itertools
import logging
import os
import pickle
import re
import signal
import threading
import time

import numpy as np
import pytest
from ranks import Ranks, until_stopped, until_there
from snapshots import own_flight, place_once_it_waits
from waiting import wait_until

import shmring
from shmring.tools import _attach


def dream(path):
    """A name to be found in a stack."""
    until_there(path)


# ---- positions --------------------------------------------------------------------------------------------


def miss_a_barrier(comm, raised):
    """Let rank 1 come after all others have raised, as files in a folder show."""
    comm.all_reduce(np.ones(4, "f4"))
    if comm.rank == 1:
        wait_until(lambda: len(list(raised.iterdir())) == comm.size - 1, "all others have raised")
    try:
        comm.barrier(timeout=1)
    finally:
        (raised / str(comm.rank)).touch()


def test_a_timeout_says_where_everybody_was(world_of, tmp_path):
    errors = world_of(3).outcomes(miss_a_barrier, tmp_path)
    for error in errors:
        assert isinstance(error, shmring.Timeout)
        assert len(error.where) == 3
        for rank in (0, 2):
            assert error.where[rank].startswith("in barrier() #2, wait")
            assert error.where[rank].endswith("s for rank 1")
    assert (
        errors[0].where[1] == "after all_reduce(float32[4], sum) #1"
    )  # it has come since, as its own record shows


def test_a_note_puts_those_together_that_are_at_the_same_place(world_of, tmp_path):
    error = world_of(4).outcomes(miss_a_barrier, tmp_path)[0]
    (note,) = [note for note in error.__notes__ if note.startswith("where they were: ")]
    where = (
        r"ranks 0, 2-3 in barrier\(\) #2, waited [\d.]+ s.*; rank 1 after all_reduce\(float32\[4\], sum\) #1"
    )
    assert re.search(where, note), note


def test_where_survives_a_pickle():
    error = shmring.Timeout("late", rank=1, seq=12)
    assert error.where == ()
    error.add_note("of the user's")
    error.attach_snapshot(lambda: (("in barrier() #12", "dead"), "where they were"))
    again = pickle.loads(pickle.dumps(error))
    assert again.where == error.where == ("in barrier() #12", "dead")
    assert again.__notes__ == error.__notes__ == ["where they were", "of the user's"]
    again.__notes__ = ["another"]
    assert again.__notes__ == ["another"]
    copy.copy(error).add_note("of the copy's")
    assert error.__notes__ == ["where they were", "of the user's"]


def test_where_comes_out_of_spawn(tmp_path):
    with pytest.raises(shmring.Timeout) as caught:
        shmring.spawn(miss_a_barrier, 2, (tmp_path,))
    assert caught.value.where[0].startswith("in barrier() #2, waited")


def die_or_wait(comm):
    comm.all_reduce(np.ones(4, "f4"))
    if comm.rank == 1:
        others = [0, 2]
        wait_until(
            lambda: {own_flight().last_of(rank)["kind"] for rank in others} == {"broadcast"},
            "the other ranks are in the broadcast",
        )
        os.kill(os.getpid(), signal.SIGKILL)
    comm.broadcast(np.ones(40_000), root=1)


def test_a_dead_rank_is_dead_where_it_was_last():
    with Ranks(3) as ranks:
        for error in (
            outcome for rank, outcome in enumerate(ranks.meet().outcomes(die_or_wait)) if rank != 1
        ):
            assert isinstance(error, shmring.RankFailed)
            assert error.where[1] == "dead after all_reduce(float32[4], sum) #1"
            assert error.where[0].startswith("in broadcast(float64[40000], root=1) #2")


def leave_or_wait(comm):
    comm.barrier()
    if comm.rank == 1:
        comm.close()
    else:
        comm.barrier()


def test_a_rank_that_has_left_is_closed(world_of):
    error, left = world_of(2).outcomes(leave_or_wait)
    assert left is None
    assert error.where[1] == "closed after barrier() #1"


def wait_for_message(comm, how, path):
    comm.barrier()
    if comm.rank == 1:
        until_there(path)
        comm.send(np.ones(4), 0)
    elif how == "recv":
        comm.recv(np.empty(4), source=1)
    else:
        comm.recv(np.empty(4))


def test_a_rank_that_waits_for_a_message_says_so(world_of, tmp_path):
    ranks = world_of(2)
    ranks.begin(wait_for_message, "recv", tmp_path / "seen")
    place = place_once_it_waits(ranks, 0)
    (tmp_path / "seen").touch()
    assert ranks.answers() == [None, None]
    assert place.startswith("in recv, waiting ")
    assert place.endswith(" s for rank 1")


def test_a_rank_that_waits_for_any_message_waits_for_nobody(world_of, tmp_path):
    ranks = world_of(2)
    ranks.begin(wait_for_message, "any", tmp_path / "seen")
    place = place_once_it_waits(ranks, 0)
    (tmp_path / "seen").touch()
    assert ranks.answers() == [None, None]
    assert place.endswith(" s for a message")


def take_a_lock_in_turn(comm, path):
    array = comm.shared(4, locks=1)
    comm.barrier()
    while comm.rank == 1 and array[0] == 0:  # rank 0 has it
        time.sleep(0.005)
    with array.lock(0):
        if comm.rank == 0:
            array[0] = 1
            until_there(path)
    comm.barrier()


def test_a_rank_at_a_lock_waits_for_who_has_it(world_of, tmp_path):
    ranks = world_of(2)
    ranks.begin(take_a_lock_in_turn, tmp_path / "seen")

    def place_at_a_lock():
        (segment,) = [one for one in _attach.of_processes([ranks.pid(1)]) if one.flight]
        place = _attach.rank_state(segment.flight, 1)["where"]
        return place if "lock" in place else None

    place = wait_until(place_at_a_lock, "rank 1 waits for the lock", ranks)
    (tmp_path / "seen").touch()
    assert ranks.answers() == [None, None]
    assert place.startswith("at a lock of a shared array, waiting ")
    assert place.endswith(" s for rank 0")


def issue_and_go_away(comm, path):
    work = comm.all_reduce(np.ones(100_000), async_op=True) if comm.rank == 0 else None
    until_there(path)
    if work is not None:
        work.wait()
    else:
        comm.all_reduce(np.ones(100_000))


def test_a_call_in_the_background_waits_for_all_to_see(world_of, tmp_path):
    ranks = world_of(2)
    ranks.begin(issue_and_go_away, tmp_path / "seen")
    place = place_once_it_waits(ranks, 0)
    (tmp_path / "seen").touch()
    assert ranks.answers() == [None, None]
    assert place.startswith("in all_reduce(float64[100000], sum) #1, waiting ")
    assert place.endswith(" for rank 1")


def test_ranks_of_another_host_are_there(world_over_hosts, tmp_path):
    for rank, error in enumerate(world_over_hosts([0, 0, 1]).outcomes(miss_a_barrier, tmp_path)):
        assert isinstance(error, shmring.Timeout)
        assert [text == "on another host" for text in error.where] == [
            (rank == 2) != (i == 2) for i in range(3)
        ]
        if rank == 0:
            assert "(ranks of this host)" in error.__notes__[0]
            assert error.where[0].startswith("in barrier() #2")


# ---- records ----------------------------------------------------------------------------------------------


def call_often(comm, times):
    for turn in range(times):
        comm.all_reduce(np.ones(turn % 7 + 1, "f4"))
    comm.all_reduce(np.ones(3), async_op=True).wait()
    with contextlib.suppress(ValueError):
        comm.broadcast(np.ones(3), root=99)
    return own_flight().records_of(comm.rank)


@pytest.mark.parametrize("first_seq", [0, 2**32 - 30, 2**64 - 30])
def test_the_last_64_calls_are_recorded_in_order(world_of, first_seq):
    for records in world_of(2, SHMRING_FIRST_SEQ=first_seq)(call_often, 90):
        assert len(records) == 64
        assert [record["number"] for record in records] == list(range(29, 93))
        assert [record["count"] for record in records[:-2]] == [turn % 7 + 1 for turn in range(28, 90)]
        assert {record["outcome"] for record in records} == {"complete"}
        assert [record["invalid"] for record in records[-2:]] == [False, True]


def call_across(comm):
    comm.all_reduce(np.ones(5, "f4"), wire="bf16")
    comm.all_reduce(np.ones(50_000, "f4"), wire="int8")
    return own_flight().last_of(comm.local_rank)


@pytest.mark.parametrize("layout", [[0, 1], [0, 0, 1, 1]])
def test_a_call_over_hosts_is_recorded_as_one_call(world_over_hosts, layout):
    for record in world_over_hosts(layout)(call_across):
        assert (record["kind"], record["count"], record["wire"]) == ("all_reduce", 50_000, "int8")
        assert (record["number"], record["outcome"]) == (2, "complete")


# ---- stacks -----------------------------------------------------------------------------------------------


def dream_or_wait(comm, path):
    comm.barrier()
    if comm.rank == 1:
        dream(path)
    comm.barrier()
    return comm.rank


def stacks_of(ranks):
    (segment,) = _attach.of_processes([ranks.pid(0)])
    return _attach.stacks_of(segment)


def test_a_rank_in_user_code_is_named_with_its_function(world_of, tmp_path):
    ranks = world_of(3)
    ranks.begin(dream_or_wait, tmp_path / "seen")
    place_once_it_waits(ranks, 0)
    stacks = stacks_of(ranks)
    (tmp_path / "seen").touch()
    assert ranks.answers() == [0, 1, 2]
    assert ", in dream\n" in stacks[1]
    assert all(text.startswith("Thread MainThread (most recent call first):\n") for text in stacks.values())
    assert all("in dream_or_wait\n" in text for text in stacks.values())
    assert "shmring-life" not in stacks[1]


def hold_the_gil(comm, pipe):
    """Rank 1 does, until there is something in the pipe."""
    comm.barrier()
    if comm.rank == 1:
        with open(pipe, "r+b", buffering=0) as reader:  # for writing too, so that open() does not block
            assert ctypes.PyDLL(None).read(reader.fileno(), ctypes.create_string_buffer(1), 1) == 1
    comm.barrier()
    return comm.rank


def test_a_rank_that_holds_the_gil_has_no_stacks(world_of, tmp_path):
    ranks = world_of(2)
    os.mkfifo(tmp_path / "seen")
    ranks.begin(hold_the_gil, tmp_path / "seen")
    place_once_it_waits(ranks, 0)
    stacks = stacks_of(ranks)
    (tmp_path / "seen").write_bytes(b"x")
    assert ranks.answers() == [0, 1]  # requests that came too late have no effect
    assert stacks[1].startswith("(no answer within 1 s")
    assert "GIL" in stacks[1]
    assert "in hold_the_gil" in stacks[0]


def test_a_stopped_rank_has_no_stacks(world_of, tmp_path):
    ranks = world_of(2)
    ranks.begin(dream_or_wait, tmp_path / "seen")
    ranks.kill(1, signal.SIGSTOP)
    until_stopped(ranks.pid(1))
    stacks = stacks_of(ranks)
    ranks.kill(1, signal.SIGCONT)
    (tmp_path / "seen").touch()
    assert stacks[1] == "(it is stopped)"
    assert ranks.answers() == [0, 1]


def many_threads(comm):
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, name=f"with a long name {i} " * 10) for i in range(60)]
    for thread in threads:
        thread.start()
    (segment,) = _attach.of_processes([os.getpid()])
    comm.barrier()
    reported = _attach.stacks_of(segment)[comm.rank] if comm.rank == 0 else ""
    comm.barrier()
    done.set()
    for thread in threads:
        thread.join()
    return reported


def test_stacks_that_are_too_long_are_cut_with_a_note(world_of):
    reported = world_of(2)(many_threads)[0]
    assert 7000 < len(reported.encode()) < 8192
    assert reported.endswith("\n(and so on)\n")
    assert reported.startswith("Thread MainThread")


def close_often(comm, times):
    for _ in range(times):
        comm.dup().close()
    return True


def test_a_rank_that_gets_a_request_while_leaving_leaves(world_of):
    ranks = world_of(2)
    ranks.begin(close_often, 40)
    for _ in range(40):
        for segment in _attach.of_processes([ranks.pid(0)]):
            _attach.stacks_of(segment) if segment.flight and all_here(segment) else None
    assert ranks.answers() == [True, True]


def all_here(segment):
    return all(segment.flight.presence_of(rank) == "here" for rank in range(segment.flight.nranks))


def test_the_death_of_a_rank_that_was_asked_is_seen(tmp_path):
    os.mkfifo(tmp_path / "nothing comes")
    with Ranks(2) as ranks:
        ranks.meet().begin(hold_the_gil, tmp_path / "nothing comes")
        place_once_it_waits(ranks, 0)
        stacks_of(ranks)  # its liveness thread waits for the GIL now
        ranks.kill(1)
        error = ranks.answers()[0]
    assert isinstance(error, shmring.RankFailed)
    assert error.rank == 1


# ---- the warning of a late rank ---------------------------------------------------------------------------


def warned(comm, how, words=None):
    """Return this rank's log messages while the last rank sleeps: until all have logged two, or for half a
    second.

    words: a folder for files that announce them.
    """
    reported = []

    def emit(record):
        reported.append((record.levelname, record.getMessage()))
        (words / f"{len(reported)} of rank {comm.rank}").touch()
        if len(list(words.iterdir())) == 2:
            (words / "enough").touch()

    handler = logging.Handler()
    handler.emit = emit if words else reported.append
    comm.barrier()
    logging.getLogger("shmring").addHandler(handler)
    try:
        if comm.rank == comm.size - 1:
            dream(words / "enough") if words else time.sleep(0.5)
        WAYS[how](comm)
    finally:
        logging.getLogger("shmring").removeHandler(handler)
    return reported


def wait_in_background(comm):
    comm.all_reduce(np.ones(3), async_op=True).wait()


def receive(comm):
    if comm.rank == comm.size - 1:
        for rank in range(comm.size - 1):
            comm.send(np.ones(3), rank)
    else:
        comm.recv(np.empty(3), source=comm.size - 1)


def leave_it_to_the_background(comm):
    work = comm.all_reduce(np.ones(3), async_op=True)
    while not work.done():
        time.sleep(0.01)


WAYS = {
    "barrier": shmring.Comm.barrier,
    "waited for": wait_in_background,
    "in the background": leave_it_to_the_background,
    "recv": receive,
}


class Failing(logging.Handler):
    """A handler that raises, after it has recorded that it was called."""

    def __init__(self, error, path):
        super().__init__()
        self.error, self.path = error, path

    def emit(self, record):
        self.path.touch()
        raise self.error


def be_warned_by(comm, error, path):
    """Return the sum of two calls with a long wait of rank 0 between them, or their error."""
    handler = Failing(error, path)
    x = np.ones(5)
    if comm.rank == 0:
        logging.getLogger("shmring").addHandler(handler)
    try:
        comm.all_reduce(x)
        if comm.rank == 1:
            until_there(path)
        comm.all_reduce(x)
    finally:
        logging.getLogger("shmring").removeHandler(handler)
    return x.sum()


def test_what_a_handler_raises_is_no_error_of_the_call(world_of, tmp_path):
    ranks = world_of(2, SHMRING_STALL=0.1)
    assert ranks(be_warned_by, ValueError("as bad"), tmp_path / "warned") == [20.0, 20.0]


def interrupt_while_it_warns(comm, warned_path, ended_path):
    """Let rank 1 call only after the interrupt has ended the call of rank 0."""
    # Sooner it may return the sum: rank 0 has already contributed its array.
    try:
        be_warned_by(comm, KeyboardInterrupt(), ended_path if comm.rank else warned_path)
    finally:
        ended_path.touch()


def test_an_interrupt_while_it_warns_ends_the_call_for_all(world_of, tmp_path):
    ranks = world_of(2, SHMRING_STALL=0.1)
    paths = tmp_path / "warned", tmp_path / "ended"
    own, other = ranks.outcomes(interrupt_while_it_warns, *paths)
    assert isinstance(own, KeyboardInterrupt)
    assert isinstance(other, shmring.Aborted)
    assert "KeyboardInterrupt in rank 0" in other.reason


@pytest.mark.parametrize("how", WAYS)
def test_one_rank_warns_of_a_late_one_at_doubling_times(world_of, tmp_path, how):
    reported = world_of(3, SHMRING_STALL=0.5)(warned, how, tmp_path)
    assert reported[2] == []
    texts = [text for level, text in reported[0] + reported[1]]
    assert {level for level, text in reported[0] + reported[1]} == {"WARNING"}
    for text in texts:
        assert " for rank 2 in " in text
        assert "; rank 2 is after barrier() #1; its process " in text
        assert re.search(r" is (sleeping|running) and does:\nThread MainThread", text), text
        assert ", in dream\n" in text
    waited_s = sorted(float(re.search(r"has waited ([\d.]+) s", text)[1]) for text in texts)
    assert len(waited_s) >= 2
    assert all(later >= 1.5 * sooner for sooner, later in itertools.pairwise(waited_s)), waited_s


def test_no_rank_warns_where_it_is_off_or_soon_enough(world_of):
    for stall in (0, 60):
        assert world_of(2, SHMRING_STALL=stall)(warned, "barrier") == [[], []]


def test_of_a_rank_on_another_host_its_name_is_reported(world_over_hosts, tmp_path):
    reported = world_over_hosts([0, 0, 1], SHMRING_STALL=0.2)(warned, "barrier", tmp_path)
    texts = [text for rank in reported for _, text in rank]
    assert texts
    assert any("for rank 2 in barrier() #2; it runs on 127.0.0.1" in text for text in texts), texts
    assert not any("dream" in text for text in texts)
