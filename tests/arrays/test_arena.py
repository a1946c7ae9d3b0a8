"""A communicator's memory for the arrays that NumPy makes: what comes from it, and how long it lives."""

import asyncio
import contextlib
import contextvars
import gc
import os
import random
import threading

import numpy as np
import pytest

import shmring

KIB, MIB = 1 << 10, 1 << 20
LARGE = 16 * KIB  # elements of 8 bytes: more than the smallest array that comes from an arena


# NumPy 1.26 has an empty _core.
multiarray = (np._core if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else np.core).multiarray
handler = handler_of = multiarray.get_handler_name


ORDINARY = handler()


def is_shared(array):
    """True if other ranks can map the array's memory."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= array.ctypes.data < end:
                return "memfd:shmring" in line
    return False


def zero_copies(comm):
    return comm.stats()["paths"]["zero_copy"]


# ---- what it is for ---------------------------------------------------------------------------------------


def reduce_what_numpy_makes(comm):
    a, b = np.arange(40_000.0) + comm.rank, np.full(40_000, 2.0)
    found = []
    with comm.arena(4 * MIB) as arena:
        for x in (
            a * b,
            np.zeros(40_000),
            np.ones(40_000),
            a.copy(),
            np.concatenate([a[:30_000], b[:10_000]]),
        ):
            expected = sum(comm.all_gather_object(x.copy()))
            before = zero_copies(comm)
            comm.all_reduce(x)
            found.append((zero_copies(comm) - before, np.array_equal(x, expected)))
        del x, expected
        gc.collect()
        return found, arena.used_nbytes, arena.nbytes


def test_collectives_copy_nothing_of_what_numpy_makes_in_it(world_of):
    for found, used_nbytes, nbytes in world_of(2)(reduce_what_numpy_makes):
        assert found == [(1, True)] * 5
        assert (used_nbytes, nbytes) == (0, 4 * MIB)


def use_places_that_differ(comm):
    """Let each rank's array begin elsewhere in its part."""
    with comm.arena(8 * MIB):
        before = np.empty(LARGE * (1 + comm.rank))
        x = np.arange(LARGE) + comm.rank
    comm.all_reduce(x)
    del before
    out = comm.all_gather(x[:3])
    return zero_copies(comm), x[:2].tolist(), out[:, 0].tolist()


def test_ranks_may_have_their_arrays_at_different_places(world_of):
    assert world_of(3)(use_places_that_differ) == [(1, [3, 6], [3, 3, 3])] * 3


def use_over_hosts(comm):
    with comm.arena(MIB):
        x = np.full(LARGE, comm.rank + 1.0)
        assert is_shared(x)
    comm.all_reduce(x)
    return float(x[0]), float(x[-1])


def test_several_hosts(world_over_hosts):
    assert world_over_hosts([0, 0, 1])(use_over_hosts) == [(6.0, 6.0)] * 3


# ---- sizes ------------------------------------------------------------------------------------------------


def fill_it(comm):
    with comm.arena(MIB, smallest_nbytes=64 * KIB) as arena:
        small = np.empty(64 * KIB - 1, "u1")
        first, second = np.empty(600 * KIB, "u1"), np.empty(424 * KIB, "u1")
        third = np.zeros(64 * KIB, "u1")
        found = [is_shared(first), is_shared(second), arena.used_nbytes]
        full = arena.used_nbytes
        del first
        fourth = np.zeros(64 * KIB, "u1")  # in the room of `first`
        assert not fourth.any()
        assert not third.any()
        found += [full - 600 * KIB + 64 * KIB == arena.used_nbytes, repr(arena)]
        comm.all_reduce(third)  # ordinary memory
    del small
    return found


def test_what_has_no_room_or_is_small_gets_ordinary_memory(world_of):
    text = "<shmring.Arena of 1 MiB, 488 KiB in use>"
    assert world_of(2)(fill_it) == [[True, True, MIB, True, text]] * 2


def grow_and_shrink(comm):
    with comm.arena(MIB) as arena:
        x = np.arange(LARGE)
        x.resize(2 * LARGE, refcheck=False)  # with a copy, to more pages
        assert x[:LARGE].tolist() == list(range(LARGE))
        assert not x[LARGE:].any()
        larger = arena.used_nbytes
        x.resize(LARGE, refcheck=False)  # stays where it is
        assert arena.used_nbytes == larger == 256 * KIB
        x.resize(MIB, refcheck=False)  # to ordinary memory
        assert arena.used_nbytes == 0
        assert x[:LARGE].tolist() == list(range(LARGE))
        x.resize(LARGE, refcheck=False)
    return True


def test_resize_keeps_the_elements(world_of):
    assert all(world_of(1)(grow_and_shrink))


def make_and_free(comm, seed, times):
    """Make arrays of any size, drop them in any order; no array may change another."""
    chance, kept = random.Random(seed), []
    with comm.arena(MIB, smallest_nbytes=1) as arena:
        for number in range(times):
            if kept and chance.random() < 0.5:
                x, value = kept.pop(chance.randrange(len(kept)))
                assert (x == value).all(), number
            else:
                count = chance.choice([1, 4096, 4097, chance.randrange(1, 200_000)])
                x = chance.choice([np.zeros, np.empty])(count, "u1")
                x[...] = value = number % 251
                kept.append((x, value))
            x = None
        assert all((x == value).all() for x, value in kept)
        nbytes = sum(-(-x.nbytes // 4096) * 4096 for x, _ in kept if is_shared(x))
        kept.clear()
        whole = np.empty(MIB, "u1")  # the free pages join again
        return nbytes <= MIB, arena.used_nbytes == MIB == whole.nbytes


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_making_and_freeing(world_of, seed):
    assert world_of(1)(make_and_free, seed, 500) == [(True, True)]


# ---- how long it holds ------------------------------------------------------------------------------------


def outlive_everything(comm):
    twin = comm.dup()
    arena = twin.arena(MIB)
    with arena:
        x = np.full(LARGE, 7.0)
        view = x[5:]
    outside = np.empty(LARGE)
    twin.close()
    del twin, arena, x
    gc.collect()
    return handler_of(outside) == ORDINARY, float(view.sum()) == 7.0 * (LARGE - 5), handler_of(view.base)


def mappings(comm):
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("shmring" in line for line in maps)


def test_arrays_outlive_the_statement_the_arena_and_the_communicator(world_of):
    ranks = world_of(2)
    before = ranks(mappings)
    assert ranks(outlive_everything) == [(True, True, "shmring_arena")] * 2
    assert ranks(mappings) == before


def use_after_a_failure(comm, victim):
    twin = comm.dup()
    with twin.arena(MIB) as arena:
        x = np.full(LARGE, 3.0)
        with pytest.raises(shmring.Error):
            twin.all_reduce(x, "sum" if comm.rank == victim else "max")
        y = x + 1  # the arena's memory, which is private to this rank now
        assert arena.used_nbytes == 2 * x.nbytes
    again = twin.shrink()
    again.all_reduce(y)  # private memory of the new communicator
    found = float(y[0]), zero_copies(again)
    again.close()
    return float(x[-1]), *found


def test_arrays_stay_valid_after_the_communicator_has_ended(world_of):
    assert world_of(2)(use_after_a_failure, 1) == [(3.0, 8.0, 0)] * 2


# ---- no hook is left --------------------------------------------------------------------------------------


def raise_in_it(comm):
    arena = comm.arena(MIB)
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError), arena:
            x = np.empty(LARGE)
            1 / 0  # noqa: B018
        assert is_shared(x)
        assert handler() == ORDINARY
    with arena, arena:
        pass
    with arena, comm.arena(MIB) as inner:
        assert is_shared(np.empty(LARGE))
        with arena:
            x = x + 1
            assert (arena.used_nbytes, inner.used_nbytes) == (8 * LARGE, 0)
        y = np.empty(LARGE)
        assert inner.used_nbytes == y.nbytes
    return handler() == ORDINARY


def test_exceptions_and_nested_statements_leave_no_hook(world_of):
    assert all(world_of(1)(raise_in_it))


def use_threads_and_tasks(comm):
    arena, found = comm.arena(4 * MIB), {}

    def ordinary(name):
        x = np.empty(LARGE)
        found[name] = handler_of(x), is_shared(x)

    async def enters():
        with arena:
            await asyncio.sleep(0.02)
            ordinary("task that enters")

    async def other():
        await asyncio.sleep(0.01)
        ordinary("another task")

    async def both():
        await asyncio.gather(enters(), other())

    asyncio.run(both())
    with arena:
        thread = threading.Thread(target=contextvars.Context().run, args=(ordinary, "another thread"))
        thread.start()
        thread.join()
        copied = contextvars.copy_context()
    copied.run(ordinary, "a context that was copied in it, after it")
    return found


def test_other_threads_and_tasks_make_ordinary_arrays(world_of):
    (found,) = world_of(1)(use_threads_and_tasks)
    assert found.pop("task that enters") == ("shmring_arena", True)
    # It has the hook, which has no effect any more.
    assert found.pop("a context that was copied in it, after it") == ("shmring_arena", False)
    assert found == {"another task": (ORDINARY, False), "another thread": (ORDINARY, False)}


def leave_in_another_context(comm):
    arena = comm.arena(MIB)
    contextvars.copy_context().run(arena.__enter__)
    with pytest.raises(RuntimeError, match="left in another thread or task"):
        arena.__exit__(None, None, None)
    with arena:
        copied = contextvars.copy_context()
        outer = comm.arena(MIB)
        outer.__enter__()
        with pytest.raises(RuntimeError, match="before one that was entered later"):
            arena.__exit__(None, None, None)
        x = np.empty(LARGE)
        assert is_shared(x)
        outer.__exit__(None, None, None)
        y = np.empty(LARGE)
        assert arena.used_nbytes == 0
        arena.__enter__()  # for the end of the `with` statement
        arena.__exit__(None, None, None)
    z = copied.run(np.empty, LARGE)
    return arena.used_nbytes, handler() == ORDINARY, y.nbytes == z.nbytes


def test_leaving_it_elsewhere_is_an_error_and_ends_it(world_of):
    assert world_of(1)(leave_in_another_context) == [(0, True, True)]


def fork_in_it(comm):
    with comm.arena(MIB) as arena:
        x = np.full(LARGE, 5.0)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            del x
            y = np.full(LARGE, 6.0)  # would be in the room of x
            os.write(writing, b"1" if y[0] == 6 and arena.used_nbytes == 0 else b"0")
            os._exit(0)
        os.close(writing)
        told = os.read(reading, 1)
        os.close(reading)
        os.waitpid(child, 0)
        return told, float(x.min()), arena.used_nbytes


def test_a_forked_child_makes_ordinary_arrays(world_of):
    assert world_of(1)(fork_in_it) == [(b"1", 5.0, 8 * LARGE)]


# ---- wrong use --------------------------------------------------------------------------------------------


def ask_for(comm, arguments):
    with pytest.raises(arguments.pop("error")) as caught:
        comm.arena(**arguments)
    comm.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"nbytes": 0, "error": ValueError}, "nbytes is 0; it must be 1 to"),
        ({"nbytes": 1.5, "error": TypeError}, "nbytes is 1.5; it must be an integer"),
        ({"nbytes": 1 << 60, "error": ValueError}, "nbytes is 1152921504606846976; it must be"),
        ({"smallest_nbytes": -1, "error": ValueError}, "smallest_nbytes is -1; it must be"),
        ({"nbytes": 1 << 55, "error": shmring.OutOfMemory}, "needs 64 PiB of shared memory"),
    ],
)
def test_wrong_numbers_are_refused(world_of, arguments, text):
    for told in world_of(2)(ask_for, arguments):
        assert text in told


def differ(comm):
    twin = comm.dup()
    with pytest.raises(shmring.Mismatch):
        twin.arena(MIB * (1 + comm.rank))
    twin.close()


def test_ranks_that_want_different_numbers_of_bytes_are_a_mismatch(world_of):
    world_of(2)(differ)


def test_only_a_communicator_makes_one():
    with pytest.raises(TypeError):
        shmring.Arena()
