"""Calls that move shared arrays in place or through slots: one rank measures which is faster."""

import time

import numpy as np
import pytest

import shmring
from shmring._system import limits

FIRST = 64  # calls in place before the first trial of slots
TRIED = 32 + 12  # calls that do not count, and the trial
COUNT = 5_000  # of float32 in a piece; pieces from 8 KiB on are measured
CLASS = 1 << 14
GIVEN_BY_ONE = ("broadcast", "scatter")
GIVEN_BY_ONE_OF_TWO = ("gather", "scan", "exscan")
GIVEN_BY_ALL = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
SPLIT = ("scatter", "all_to_all", "reduce_scatter")


def values(rank, turn):
    return np.float32(3 * turn + rank)


def make_call(comm, kind, turn, array):
    """Make a call with this rank's values of a turn in `array`, and check the result."""
    array[...] = values(comm.rank, turn)
    everybody = values(np.arange(comm.size), turn)
    if kind == "broadcast":
        comm.broadcast(array, 1)
        assert (array == everybody[1]).all()
    elif kind == "scatter":
        found = comm.scatter(array if comm.rank == 1 else None, 1, like=array[0])
        assert (found == everybody[1]).all()
    elif kind == "gather":
        found = comm.gather(array, 0)
        assert (found is None) == (comm.rank > 0)
        assert comm.rank or (found == everybody[:, None]).all()
    elif kind == "reduce":
        comm.reduce(array, root=1)
        assert (array == (everybody.sum() if comm.rank == 1 else everybody[comm.rank])).all()
    elif kind == "all_reduce":
        comm.all_reduce(array)
        assert (array == everybody.sum()).all()
    elif kind in ("all_gather", "all_to_all"):
        assert (getattr(comm, kind)(array) == everybody[:, None]).all()
    elif kind == "reduce_scatter":
        assert (comm.reduce_scatter(array) == everybody.sum()).all()
    else:
        found = np.zeros_like(array)
        getattr(comm, kind)(array, out=found)
        assert (found == everybody[: comm.rank + (kind == "scan")].sum()).all()


def arrays_of(comm, kind):
    shape = (comm.size, COUNT) if kind in SPLIT else COUNT
    return comm.empty(shape, "f4"), np.empty(shape, "f4")


def paths_of(comm, kind, ncalls):
    """Return the path of each call with a shared array, and the chosen paths after each call."""
    shared, _ = arrays_of(comm, kind)
    paths, chosen = [], []
    for turn in range(ncalls):
        make_call(comm, kind, turn, shared)
        paths.append(comm.stats()["path"])
        chosen.append(comm.stats()["chosen_paths_of_shared"])
    return paths, chosen


def on_cpus(comm, cpus, world, function, *arguments):
    """Return what the function returns in a new world, whose ranks see this number of CPUs."""
    usable, limits.usable_cpus = limits.usable_cpus, lambda _: cpus
    try:
        with shmring.init(world, rank=comm.rank) as other:
            return function(other, *arguments)
    finally:
        limits.usable_cpus = usable


@pytest.fixture
def call_on(world_of):
    """call_on(cpus, size, function, *arguments) → by rank, what the function returns on so many CPUs."""

    def call(cpus, size, *called, **environ):
        return world_of(size, **environ)(on_cpus, cpus, shmring.world(size), *called)

    return call


ON_SHARED_CPUS = [(kind, 1) for kind in GIVEN_BY_ONE + GIVEN_BY_ONE_OF_TWO + GIVEN_BY_ALL]


@pytest.mark.parametrize(
    ("kind", "cpus"), ON_SHARED_CPUS + [(kind, 2) for kind, _ in ON_SHARED_CPUS] + [("reduce", 2)]
)
def test_slots_are_tried_after_some_calls_in_place(call_on, kind, cpus):
    found = call_on(cpus, 2, paths_of, kind, FIRST + TRIED)
    assert len({tuple(paths) for paths, _ in found}) == 1
    paths = found[0][0]
    assert set(paths[:FIRST]) == {"zero_copy"}
    assert "zero_copy" not in paths[FIRST + 1 : FIRST + 6]  # a trial that is hopeless takes more calls
    knowing = [chosen for _, chosen in found if chosen[-1]]
    # A rank that alone gives data chooses alone.
    assert len(knowing) == (2 if kind in (*GIVEN_BY_ALL, "reduce") else 1)
    for chosen in knowing:
        assert {"zero_copy", "slots"} == {each[kind][CLASS] for each in chosen}
        for path, before in zip(paths[1:], chosen[:-1], strict=True):
            assert before == {kind: {CLASS: "zero_copy" if path == "zero_copy" else "slots"}}


@pytest.mark.parametrize("kind", [*GIVEN_BY_ALL, "reduce"])
def test_all_ranks_take_the_path_that_rank_0_announces(call_on, kind):
    cpus = 3 if kind == "reduce" else 2
    found = call_on(cpus, 3, paths_of, kind, 3 * (FIRST + TRIED))
    assert len({tuple(paths) for paths, _ in found}) == 1
    assert {"zero_copy"} < set(found[0][0])


@pytest.mark.parametrize("kind", ["gather", "scan", "exscan"])
def test_ranks_that_give_beside_others_do_not_measure(call_on, kind):
    for paths, chosen in call_on(3, 3, paths_of, kind, FIRST + TRIED):
        assert set(paths) == {"zero_copy"}
        assert chosen[-1] == {}


def measured_sizes(comm, kind):
    shared = comm.empty(9000, "u1")
    for nbytes in (2047, 2048, 4096, 8191, 8192):
        getattr(comm, kind)(shared[:nbytes], 0)
    return comm.stats()["chosen_paths_of_shared"]


def test_broadcasts_are_measured_from_2_kib_on_other_calls_from_8(call_on):
    classes = dict.fromkeys((2048, 4096, 8192), "zero_copy")
    assert call_on(2, 2, measured_sizes, "broadcast") == [{"broadcast": classes}, {}]
    assert call_on(2, 2, measured_sizes, "gather") == [{}, {"gather": {8192: "zero_copy"}}]


def come_late(comm, kind, rank, late):
    """Let one rank come late to some calls: `late` has their first and last turn, and the seconds."""
    shared, _ = arrays_of(comm, kind)
    for turn in range(FIRST + TRIED):
        for first, last, seconds in late if comm.rank == rank else ():
            if first <= turn <= last:
                time.sleep(seconds)
        make_call(comm, kind, turn, shared)
    return comm.stats()["chosen_paths_of_shared"].get(kind, {}).get(CLASS)


# The turns of the calls that one rank times before its first trial.
TIMED = range(FIRST - 15, FIRST)


def test_ranks_that_share_cpus_compare_means(call_on):
    """Some calls of a path are fast, and in others ranks wait for a CPU: all of them count."""
    late = [(TIMED[1], FIRST, 0.04), (FIRST + 1, FIRST + TRIED, 0.005)]
    assert call_on(1, 2, come_late, "all_gather", 1, late) == ["slots"] * 2


def test_one_late_call_does_not_change_the_path(call_on):
    late = [(TIMED[0], TIMED[0], 0.9), (FIRST + 1, FIRST + TRIED, 0.03)]
    assert call_on(2, 2, come_late, "broadcast", 0, late) == [None, "zero_copy"]


def mix(comm, kind, ncalls):
    """Make calls in which each rank has a shared array or a private one at random."""
    chance = np.random.default_rng([comm.rank, ncalls])
    arrays = arrays_of(comm, kind)
    for turn in range(ncalls):
        make_call(comm, kind, turn, arrays[chance.integers(2)])
    for turn in range(FIRST + TRIED):
        make_call(comm, kind, turn, arrays[0])


def test_ranks_that_share_cpus_do_not_measure_a_reduce(call_on):
    """In it they need not await each other's lines, so they cannot agree on a path."""
    for paths, chosen in call_on(1, 2, paths_of, "reduce", FIRST + TRIED):
        assert set(paths) == {"zero_copy"}
        assert chosen[-1] == {}


@pytest.mark.parametrize("kind", [*GIVEN_BY_ONE, *GIVEN_BY_ONE_OF_TWO, *GIVEN_BY_ALL, "reduce"])
def test_shared_and_private_arrays_in_one_call(call_on, kind):
    for size in (2, 3):
        call_on(size, size, mix, kind, 2 * (FIRST + TRIED))


@pytest.mark.parametrize("path", ["slots", "single_copy"])
def test_the_environment_fixes_the_path_of_shared_arrays(call_on, path):
    for paths, chosen in call_on(2, 2, paths_of, "broadcast", FIRST + TRIED, SHMRING_PATH=path):
        assert set(paths) == {"zero_copy"}
        assert chosen[-1] == {}
