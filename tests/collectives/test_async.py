"""Collectives in the background: the results of the foreground, in the order of the calls, with every way to
wait. Errors reach every rank without any rank waiting."""

import asyncio
import gc
import os
import select
import signal
import threading
import time
import weakref
from fractions import Fraction

import numpy as np
import pytest
from combinations import each_pair
from leftovers import until_none
from ranks import Died, Ranks, interrupted, turns, until_there
from waiting import counted_s, wait_until

import shmring
from tests.collectives.test_errors import assert_all

SOON_S = 10  # far below every timeout, on a machine that stalls at times
TINY = {"SHMRING_CHUNK": 256, "SHMRING_DEPTH": 2}  # every ring wraps, every wait is exercised
COUNTS = (0, 1, 5, 100, 4_000, 70_000)


# ---- results ----------------------------------------------------------------------------------------------


def calls_of(comm, count):
    """(method, arguments) of one call of each kind; the arrays are made anew each time."""
    x = np.arange(count, dtype="f8") + comm.rank
    rows = np.stack([x + 10 * rank for rank in range(comm.size)])
    root = comm.size - 1
    return [
        ("all_reduce", (x.copy(),), {}),
        ("reduce", (x.copy(), "max", root), {}),
        ("scan", (x.copy(),), {}),
        ("exscan", (x.copy(),), {}),
        ("broadcast", (x.copy(), root), {}),
        ("reduce_scatter", (rows.copy(),), {}),
        ("scatter", (rows.copy() if comm.rank == root else None, root), {"like": x}),
        ("gather", (x.copy(), root), {}),
        ("all_gather", (x.copy(),), {}),
        ("all_to_all", (rows.copy(),), {}),
        ("all_reduce", (x.copy(),), {"algorithm": "ring"}),
        ("barrier", (), {}),
    ]


def seen_after(comm, calls, run):
    """Return the result of each call, and the contents of its arrays afterwards."""
    results = run(comm, calls)
    arrays = [value for _, arguments, _ in calls for value in arguments if isinstance(value, np.ndarray)]
    returned = [None if result is None else result.tobytes() for result in results]
    return returned + [x.tobytes() for x in arrays]


def in_foreground(comm, calls):
    return [getattr(comm, name)(*arguments, **keywords) for name, arguments, keywords in calls]


def issued(comm, calls):
    return [getattr(comm, name)(*arguments, **keywords, async_op=True) for name, arguments, keywords in calls]


def in_background(comm, calls):
    works = issued(comm, calls)
    return [work.result() for work in works]


def waited_for_backwards(comm, calls):
    works = issued(comm, calls)
    return [work.result() for work in reversed(works)][::-1]


def polled_for(comm, calls):
    works = issued(comm, calls)
    wait_until(lambda: all(work.done() for work in works), "all calls are done")
    return [work.result() for work in works]


def by_plan(comm, calls):
    plans = [comm.plan(name, *arguments, **keywords, async_op=True) for name, arguments, keywords in calls]
    return [work.result() for work in [plan() for plan in plans]]


def by_turns(comm, calls):
    """One in the background, one in the foreground."""
    results = []
    for turn, (name, arguments, keywords) in enumerate(calls):
        results.append(getattr(comm, name)(*arguments, **keywords, async_op=turn % 2 == 0))
    return [result.result() if isinstance(result, shmring.Work) else result for result in results]


def by_asyncio(comm, calls):
    async def gathered():
        return await asyncio.gather(*issued(comm, calls))

    return asyncio.run(gathered())


WAYS = (in_background, waited_for_backwards, polled_for, by_plan, by_turns, by_asyncio)


def differing(comm, way, counts):
    return [
        count
        for count in counts
        if seen_after(comm, calls_of(comm, count), way)
        != seen_after(comm, calls_of(comm, count), in_foreground)
    ]


@each_pair({"size": [1, 2, 3, 8], "way": WAYS, "environ": [{}, TINY]})
def test_every_call_has_the_result_that_it_has_in_the_foreground(world_of, size, way, environ):
    counts = COUNTS if size < 8 and not environ else COUNTS[:-1]
    assert world_of(size, **environ)(differing, way, counts) == [[]] * size


def reduce_shared(comm, count):
    arrays = [comm.full(count, comm.rank + turn, "f4") for turn in range(4)]
    works = [comm.all_reduce(array, async_op=True) for array in arrays]
    another = comm.full(count, 1.0, "f4")  # while calls are under way
    for work in works:
        work.wait()
    comm.all_reduce(another)
    return [float(array[-1]) for array in (*arrays, another)]


@pytest.mark.parametrize("count", [20, 5_000, 300_000])
def test_shared_arrays(world_of, count):
    for sums in world_of(3)(reduce_shared, count):
        assert sums == [3.0, 6.0, 9.0, 12.0, 3.0]


def issue_many(comm, calls):
    arrays = [np.array([turn + comm.rank, 0.0]) for turn in range(calls)]
    works = [comm.all_reduce(array, async_op=True) for array in arrays]
    works[-1].wait()
    assert all(work.done() for work in works)  # in order
    return [float(array[0]) for array in arrays]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_thousands_of_calls_in_flight(world_of, size):
    want = [size * turn + size * (size - 1) / 2 for turn in range(3_000)]
    assert world_of(size)(issue_many, 3_000) == [want] * size


def forget_works(comm):
    out = [np.zeros(5_000) for _ in range(20)]
    for array in out:
        comm.all_reduce(np.ones(5_000), out=array, async_op=True)  # neither x nor the Work is kept here
        gc.collect()
    comm.barrier()
    return all((array == comm.size).all() for array in out)


def test_the_queue_keeps_what_is_needed(world_of):
    assert all(world_of(3, **TINY)(forget_works))


class Tracked(np.ndarray):
    """An array that can be referenced weakly."""


def wait_and_forget(comm):
    left = []
    for _ in range(20):
        x = np.ones(200_000).view(Tracked)
        left.append(weakref.ref(x))
        comm.all_reduce(x, async_op=True).wait()
        del x
    return sum(reference() is not None for reference in left)


def test_the_queue_keeps_nothing_of_calls_that_were_waited_for(world_of):
    assert world_of(2)(wait_and_forget) == [0, 0]


# ---- waiting threads --------------------------------------------------------------------------------------


def go_on_alone(comm):
    """Finish calls that no thread waits for."""
    works = [comm.all_reduce(np.ones(count), async_op=True) for count in (10, 100_000, 500_000)]
    wait_until(works[-1].done, "the last call is done")
    return [work.done() for work in works]


@pytest.mark.parametrize("size", [2, 4])
def test_calls_go_on_while_no_rank_waits(world_of, size):
    assert world_of(size)(go_on_alone) == [[True] * 3] * size


def wait_briefly(comm, folder):
    """Let rank 0 come late: the others' waits time out without any other effect."""
    x = np.ones(50_000)
    if comm.rank == 0:
        for rank in range(1, comm.size):
            until_there(folder / f"{rank} waits")
    work = comm.all_reduce(x, async_op=True)
    timeouts = 0
    while True:
        try:
            work.wait(Fraction(1, 50))
            break
        except shmring.Error:  # a Timeout of the call would be one
            raise
        except TimeoutError:
            timeouts += 1
            if timeouts == 3:
                (folder / f"{comm.rank} waits").touch()
    comm.barrier()
    return timeouts, float(x[0])


def test_a_wait_that_times_out_harms_nothing(world_of, tmp_path):
    (_, first), *others = world_of(3)(wait_briefly, tmp_path)
    assert first == 3.0
    for timeouts, value in others:
        assert timeouts >= 3
        assert value == 3.0


def wait_in_threads(comm):
    """A thread for each of several calls, in no order."""
    arrays = [np.full(count, 1.0) for count in (10, 40_000, 3, 200_000, 1_000, 0)]
    works = [comm.all_reduce(array, async_op=True) for array in arrays]
    threads = [threading.Thread(target=work.wait) for work in works[::-1]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [work.done() for work in works], [set(array.tolist()) for array in arrays]


@pytest.mark.parametrize("size", [2, 4])
def test_threads_wait_for_calls_of_one_communicator(world_of, size):
    for done, values in world_of(size)(wait_in_threads):
        assert all(done)
        assert values == [{float(size)}] * 5 + [set()]


def descriptors():
    """Return the descriptors of this process, without the one that lists them."""
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")}


def cancel_awaiting(comm, cancelled_path):
    async def cancelled(work):
        task = asyncio.ensure_future(result_of(work))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def result_of(work):
        return await work

    before = descriptors()
    if comm.rank == 0:
        until_there(cancelled_path)
    x = np.ones(1_000)
    work = comm.all_reduce(x, async_op=True)
    if comm.rank != 0:
        asyncio.run(cancelled(work))
        cancelled_path.touch()
    work.wait()
    comm.barrier()
    del work  # the background thread may hold a reference until its next turn
    return float(x[0]), until_none(lambda: descriptors() - before)


def test_cancelling_who_awaits_does_not_touch_the_call(world_of, tmp_path):
    world = world_of(2)
    world(cancel_awaiting, tmp_path / "first")  # asyncio's own descriptors
    assert world(cancel_awaiting, tmp_path / "second") == [(2.0, set())] * 2


def await_unwatched(comm):
    """The event loop cannot watch one more descriptor."""

    def refuse(*_):
        raise OSError("no space left")

    async def awaited(work):
        asyncio.get_running_loop().add_reader = refuse
        work.fileno()
        before = descriptors()
        with pytest.raises(OSError, match="no space left"):
            await work
        return descriptors() == before

    work = comm.barrier(async_op=True) if comm.rank == 0 else None
    found = asyncio.run(awaited(work)) if work is not None else True
    comm.sendrecv(b"", 1 - comm.rank, bytearray(0), 1 - comm.rank)  # rank 1 comes only now
    if work is None:
        comm.barrier()
    else:
        work.wait()
    return found


def test_a_failed_await_leaves_no_descriptor(world_of):
    assert world_of(2)(await_unwatched) == [True, True]


def select_on(comm):
    poll = select.poll()
    if comm.rank == 0:
        time.sleep(0.2)
    work = comm.all_gather(np.array([comm.rank]), async_op=True)
    poll.register(work, select.POLLIN)
    ready = poll.poll(SOON_S * 1000)
    again = comm.barrier(async_op=True)
    again.wait()
    poll.register(again, select.POLLIN)  # of a call that is finished already
    return len(ready), work.done(), len(poll.poll(SOON_S * 1000))


def test_a_work_can_be_selected_on(world_of):
    assert world_of(2)(select_on) == [(1, True, 2)] * 2


def ask_twice_for_the_descriptor(comm):
    """Another thread asks for it while this one creates it."""
    eventfd, found = os.eventfd, []

    def eventfd_late(*arguments):
        os.eventfd = eventfd
        found.append(work.fileno())
        return eventfd(*arguments)

    if comm.rank == 0:
        before = descriptors()
        work = comm.barrier(async_op=True)
        os.eventfd = eventfd_late
        found.append(work.fileno())
        ready, _, _ = select.select([work], [], [], 0)
        found += [len(ready), len(descriptors() - before)]
    comm.sendrecv(b"", 1 - comm.rank, bytearray(0), 1 - comm.rank)  # rank 1 comes only now
    if comm.rank == 0:
        work.wait()
    else:
        comm.barrier()
    return found


def test_two_threads_ask_for_the_descriptor_of_a_work(world_of):
    first, second, nready, ndescriptors = world_of(2)(ask_twice_for_the_descriptor)[0]
    assert (first, nready, ndescriptors) == (second, 0, 1)


def interrupt_a_wait(comm, interrupted_path):
    x = np.ones(1_000)
    if comm.rank == 0:
        until_there(interrupted_path)
    work = comm.all_reduce(x, async_op=True)
    if comm.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            interrupted(work.wait, 0.3)
        interrupted_path.touch()
    work.wait()
    return float(x[0])


def test_ctrl_c_ends_a_wait_and_not_the_call(world_of, tmp_path):
    assert world_of(2)(interrupt_a_wait, tmp_path / "interrupted") == [2.0, 2.0]


def rest(comm):
    """Return the CPU seconds of a process whose background calls are finished."""
    comm.all_reduce(np.ones(100_000), async_op=True).wait()
    comm.barrier()
    before = time.process_time()
    time.sleep(1.0)
    return time.process_time() - before


def test_nothing_to_do_costs_no_cpu(world_of):
    assert max(world_of(2)(rest)) < 0.05


def wait_long(comm):
    if comm.rank == 0:
        time.sleep(1.5)
    work = comm.all_reduce(np.ones(100_000), async_op=True)
    before = time.process_time()
    time.sleep(1.0)
    used = time.process_time() - before
    work.wait()
    return used


def test_calls_that_cannot_go_on_cost_hardly_any_cpu(world_of):
    assert max(world_of(3)(wait_long)) < 0.15


# ---- errors -----------------------------------------------------------------------------------------------


def differ(comm, waits):
    works = [comm.all_reduce(np.ones(10), async_op=True)]
    works.append(comm.all_reduce(np.ones(10 + comm.rank), async_op=True))
    works.append(comm.all_reduce(np.ones(10), async_op=True))
    works[0].wait()
    if waits:
        works[1].wait()
    time.sleep(0.5)
    with pytest.raises(shmring.Mismatch):
        works[2].wait()
    comm.barrier()


@pytest.mark.parametrize("waits", [True, False])
def test_mismatched_calls(world_of, waits):
    calls = [f"all_reduce(float64[{10 + rank}], sum)" for rank in range(3)]
    for error in assert_all(world_of(3).outcomes(differ, waits), shmring.Mismatch):
        for reported, call in zip(error.calls, calls, strict=True):
            assert reported in (call, "nothing yet")  # its calls were behind then
        assert error.calls.count("nothing yet") < 2


def refuse(comm, when):
    """A wrong argument on one rank, behind a call that is under way or not."""
    works = []
    if comm.rank == 0:
        time.sleep(0.3)
    if when == "behind":
        works.append(comm.all_reduce(np.ones(1_000), async_op=True))
    if comm.rank == 1:
        with pytest.raises(TypeError):
            comm.all_reduce("no array", async_op=True)
    else:
        works.append(comm.all_reduce(np.ones(3), async_op=True))
    for work in works:
        work.wait()
    comm.barrier()


@pytest.mark.parametrize("when", ["alone", "behind"])
def test_a_refused_call_is_a_mismatch_elsewhere(world_of, when):
    for error in assert_all(world_of(3).outcomes(refuse, when), shmring.Mismatch):
        assert "all_reduce with arguments that it refused" in error.calls


def refuse_everywhere(comm):
    """Wrong alike on all ranks: nothing is harmed."""
    x = np.ones(2_000)
    work = comm.all_reduce(x, async_op=True)
    for _ in range(3):
        with pytest.raises(ValueError, match="op is 'no op'"):
            comm.all_reduce(x, "no op", async_op=True)
    second = comm.all_gather(x, async_op=True)
    return work.result(), second.result().shape


def test_a_call_that_all_refuse_harms_nobody(world_of):
    assert world_of(3)(refuse_everywhere) == [(None, (3, 2_000))] * 3


def miss(comm, missed_path):
    comm.barrier()
    if comm.rank == 1:
        until_there(missed_path)
    work = comm.all_reduce(np.ones(5_000), async_op=True, timeout=1)
    try:
        work.wait()
    finally:
        missed_path.touch()


def test_a_rank_that_does_not_come_is_named(world_of, tmp_path):
    for error in assert_all(world_of(3).outcomes(miss, tmp_path / "missed"), shmring.Timeout):
        assert error.rank == 1


def call_for_ever(comm, path_when_running):
    x = np.ones(30_000)
    for turn in turns(comm, path_when_running):
        works = [comm.all_reduce(x, "max", async_op=True) for _ in range(3)]
        if turn % 2:
            time.sleep(0.001)
        works[-1].wait()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_all_others(tmp_path, victim):
    with Ranks(3) as ranks:
        ranks.meet()
        ranks.begin(call_for_ever, str(tmp_path / "runs"))
        until_there(tmp_path / "runs", ranks)
        ranks.kill(victim)
        outcomes = ranks.answers()
        assert isinstance(outcomes.pop(victim), Died)
        for error in assert_all(outcomes, shmring.RankFailed):
            assert error.rank == victim


def die_unwatched(comm):
    """Nobody waits, all is in the background: the others know it when they ask."""
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    work = comm.all_reduce(np.ones(10), async_op=True)
    begin = counted_s()
    wait_until(work.done, "the call is done")
    assert counted_s() - begin < SOON_S
    work.wait()


def test_a_death_ends_calls_that_no_rank_waits_for():
    with Ranks(3) as ranks:
        *others, died = ranks.meet().outcomes(die_unwatched)
        assert isinstance(died, Died)
        for error in assert_all(others, shmring.RankFailed):
            assert error.rank == 2


def abort_behind(comm):
    if comm.rank == 0:
        time.sleep(0.2)
        comm.abort("enough")
    work = comm.all_reduce(np.ones(5_000), async_op=True)
    work.wait()


def test_abort_ends_what_is_under_way(world_of):
    for error in assert_all(world_of(3).outcomes(abort_behind), shmring.Aborted):
        assert error.reason == "enough"


# ---- the end ----------------------------------------------------------------------------------------------


def close_behind(comm):
    x, works = np.ones(100_000), []
    if comm.rank == 0:
        time.sleep(0.2)
    works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
    comm.close()
    for work in works:
        work.wait()
    with pytest.raises(shmring.Closed):
        comm.barrier(async_op=True)
    return float(x[0])


def test_close_lets_issued_calls_come_to_their_end(world_of):
    assert world_of(3)(close_behind) == [27.0] * 3


def fork_behind(comm, forked_path):
    """Let rank 0 come after a child of rank 1 has polled the call, which is unfinished before."""
    if comm.rank == 0:
        until_there(forked_path)
    work = comm.all_reduce(np.ones(1_000), async_op=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work.wait()
        except shmring.Closed:
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    forked_path.touch()
    work.wait()
    after = comm.all_gather(np.arange(100_000), async_op=True)
    return status, after.result().shape


def test_a_forked_child_is_reported_that_the_work_is_not_its_own(world_of, tmp_path):
    statuses = world_of(2)(fork_behind, tmp_path / "forked")
    assert [shape for _, shape in statuses] == [(2, 100_000)] * 2
    assert statuses[1][0] == 0  # rank 0's call may have been finished before


def use_wrongly(comm):
    work = comm.barrier(async_op=True)
    with pytest.raises(TypeError, match="number of seconds"):
        work.wait("soon")
    with pytest.raises(ValueError, match="0 seconds or more"):
        work.wait(-1)
    work.wait()
    assert "finished" in repr(work)
    with pytest.raises(TypeError, match="async_op=True"):
        shmring.Work()


def test_wrong_timeouts(world_of):
    world_of(2)(use_wrongly)


def forget_lists(comm):
    """Check that only the queue keeps the arrays, and the lists that contain them."""
    rank, size = comm.rank, comm.size
    if rank == 0:
        time.sleep(0.1)
    gathered, exchanged, reduced = [], [], []
    for turn in range(10):
        gathered.append(comm.all_gather_v(np.full(3_000 * rank, turn), async_op=True))
        pieces = [np.full(2_000, turn + taker) for taker in range(size)]
        exchanged.append(comm.all_to_all_v(pieces, async_op=True))
        del pieces
        out = [np.zeros(5_000), np.zeros(5)]
        reduced.append((comm.all_reduce_many([np.ones(5_000), np.ones(5)], out=out, async_op=True), out))
        gc.collect()
    for turn in range(10):
        parts = gathered[turn].result()
        assert [len(part) for part in parts] == [3_000 * giver for giver in range(size)]
        assert all((part == turn).all() for part in parts)
        assert all((part == turn + rank).all() for part in exchanged[turn].result())
        reduced[turn][0].wait()
        assert all((array == size).all() for array in reduced[turn][1])


@pytest.mark.parametrize("size", [1, 3])
def test_the_queue_keeps_the_arrays_of_lists(world_of, size):
    world_of(size)(forget_lists)


def free_lists(comm):
    """Nothing keeps the arrays once the call is finished, not even until a collection of garbage."""
    arrays, out = (
        [np.ones(5_000), np.ones(5), np.ones(7, "f4")],
        [np.zeros(5_000), np.zeros(5), np.zeros(7, "f4")],
    )
    left = [weakref.ref(array) for array in arrays + out]
    gc.collect()
    gc.disable()
    try:
        work = comm.all_reduce_many(arrays, out=out, async_op=True)
        work.wait()
        del work, arrays, out
        comm.barrier(async_op=True).wait()  # the queue lets go of the finished calls
        assert [ref() for ref in left] == [None] * 6
    finally:
        gc.enable()


def test_finished_lists_are_freed_without_the_collector(world_of):
    world_of(2)(free_lists)


def refuse_late(comm):
    """Receive more than one rank's out holds, which is known only once the lengths have arrived."""
    out = [np.zeros(7) for _ in range(comm.size)] if comm.rank == 1 else None
    work = comm.all_gather_v(np.ones(5_000), out=out, async_op=True)
    if comm.rank == 1:
        with pytest.raises(ValueError, match="out\\[0\\] has 7 elements"):
            work.wait()
    work.wait()


def test_an_uneven_call_that_is_refused_late_is_a_mismatch_elsewhere(world_of):
    first, second, last = world_of(3).outcomes(refuse_late)
    assert isinstance(second, ValueError)
    for error in (first, last):
        assert isinstance(error, shmring.Mismatch)
        assert "all_gather_v with arguments that it refused" in error.calls


def segments_mapped():
    with open("/proc/self/maps") as maps:
        return sum("memfd:shmring" in line for line in maps)


def leave_a_group_behind(comm):
    before = segments_mapped()
    group = comm.dup()
    work = group.all_reduce(np.ones(100_000), async_op=True)
    time.sleep(0.1)  # for the thread to step it, and to attend to it
    work.wait()
    group.close()
    del group, work
    gc.collect()
    return segments_mapped() - before


def test_the_thread_in_the_background_keeps_nothing_of_a_closed_communicator(world_of):
    assert world_of(2)(leave_a_group_behind) == [0, 0]


def leave_works_beside_a_receive(comm):
    """Works of other communicators that nobody waits for are released, though a receive is pending."""
    received = np.zeros(1)
    transfer = comm.irecv(received, 1 - comm.rank)
    arrays = []
    for _ in range(3):
        group, x = comm.dup(), np.ones(1000)
        work = group.all_reduce(x, async_op=True)
        wait_until(work.done, "a work is done")
        assert x[0] == comm.size
        arrays.append(weakref.ref(x))
        del group, work, x
    wait_until(lambda: not any(array() is not None for array in arrays), "the arrays are released")
    comm.send(np.ones(1), 1 - comm.rank)
    transfer.wait()
    return received[0]


def test_a_pending_receive_does_not_keep_finished_works(world_of):
    assert world_of(2)(leave_works_beside_a_receive) == [1, 1]
