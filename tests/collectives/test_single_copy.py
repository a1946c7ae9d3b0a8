"""Private memory that other ranks read through the kernel: when this is chosen, by a size or by measurement,
the owner's access to its memory after the call, and the errors if it cannot be read or its owner is gone."""

import ctypes
import mmap
import os
import signal

import numpy as np
import pytest
from combinations import first
from ranks import Died, Ranks, turns, when_there
from unreadable import needs_page_with_the_time, page_with_the_time

import shmring
from shmring._config import thresholds, tuning_table
from tests.collectives.test_shared_path_choice import on_cpus

KINDS = (
    "broadcast",
    "scatter",
    "gather",
    "all_gather",
    "all_to_all",
    "scatter_v",
    "gather_v",
    "all_gather_v",
    "all_to_all_v",
)
OF_TWO = ("exscan",)  # among more ranks it reduces
OTHERS = ("all_reduce",)
COUNT = 3000
FROM_64_BYTES = {"SHMRING_SINGLE_COPY": 64}


def call(comm, kind, rank=0):
    """Make a call of any kind with private arrays of `rank`'s values; return its result."""
    n, mine = comm.size, comm.rank == 1
    if kind == "broadcast":
        x = np.full(COUNT, float(rank) if mine else -1.0)
        comm.broadcast(x, 1)
        return x
    if kind == "all_reduce":
        x = np.full(8 * COUNT, float(rank))  # smaller ones are folded by everyone
        comm.all_reduce(x, "max")
        return x
    if kind == "exscan":
        x = np.full(COUNT, float(rank))
        comm.exscan(x)
        return x
    one, many = np.full(COUNT, float(rank)), np.full((n, COUNT), float(rank))
    if kind in ("all_gather", "all_gather_v"):
        return np.stack(getattr(comm, kind)(one))
    if kind in ("gather", "gather_v"):
        found = getattr(comm, kind)(one, 1)
        return one if found is None else np.stack(found)
    if kind in ("scatter", "scatter_v"):
        return getattr(comm, kind)(many if mine else None, 1, like=one)
    return np.stack(getattr(comm, kind)(many))


def path_of(comm, kind):
    call(comm, kind)
    return comm.stats()["path"]


def skip_unless_allowed(world_of):
    if world_of(2, **FROM_64_BYTES)(path_of, "scatter") != ["single_copy"] * 2:
        pytest.skip("processes may not read each other's memory here")


@pytest.mark.parametrize("kind", [*KINDS, *OF_TWO])
def test_a_size_in_the_environment_fixes_the_path_of_all_calls_that_move_data(world_of, kind):
    skip_unless_allowed(world_of)
    assert world_of(2, **FROM_64_BYTES)(path_of, kind) == ["single_copy"] * 2
    paths = world_of(3, **FROM_64_BYTES)(path_of, kind)
    assert paths == ["single_copy"] * 3 if kind in KINDS else "single_copy" not in paths


@pytest.mark.parametrize("kind", [*KINDS, *OF_TWO, *OTHERS])
def test_other_calls_and_smaller_pieces_go_through_slots(world_of, kind):
    how = FROM_64_BYTES if kind in OTHERS else {"SHMRING_SINGLE_COPY": "1M"}
    assert "single_copy" not in world_of(2, **how)(path_of, kind)
    assert "single_copy" not in world_of(2, SHMRING_SINGLE_COPY="off")(path_of, kind)


def paths_with_one_unwilling(comm):
    return [path_of(comm, kind) for kind in KINDS]


def test_one_rank_that_does_without_is_enough_for_all_to_do_without(world_of):
    ranks = world_of(3, **FROM_64_BYTES)
    assert ranks.try_to_meet(of_rank={2: {"SHMRING_SINGLE_COPY": "off"}}) == [None] * 3
    for paths in ranks(paths_with_one_unwilling):
        assert "single_copy" not in paths


def exscan_of_two(comm, dtype, op):
    x = np.full(COUNT, comm.rank + 2).astype(dtype)
    comm.exscan(x, op)
    return x.tolist()


def test_the_exscan_of_two_is_a_copy_unless_the_op_changes_values(world_of):
    ranks = world_of(2)
    assert ranks(exscan_of_two, "f4", "sum") == [[2.0] * COUNT] * 2
    assert ranks(exscan_of_two, "i4", "lor") == [[2] * COUNT, [1] * COUNT]


def written_as_soon_as_it_returns(comm, kind, calls):
    for turn in range(calls):
        found = call(comm, kind, turn)
        want = turn * comm.rank if kind == "exscan" and comm.rank > 0 else turn
        assert (found == want).all(), (kind, turn, np.unique(found))
        # The allocator gets the arrays back here, and returns them again with other values.


@pytest.mark.parametrize("kind", [*KINDS, *OF_TWO, *OTHERS])
def test_arrays_are_the_callers_again_as_soon_as_the_call_returns(world_of, kind):
    world_of(2, **FROM_64_BYTES)(written_as_soon_as_it_returns, kind, 200)
    world_of(4, **FROM_64_BYTES)(written_as_soon_as_it_returns, kind, 50)


def in_a_group(comm):
    group = comm.split(comm.rank % 2)
    found = group.all_gather(np.full(COUNT, float(comm.rank)))
    path = group.stats()["path"]
    group.close()
    return found[:, 7].tolist(), path, path_of(comm, "scatter")


def test_groups_copy_once_as_the_communicator_does_that_they_come_from(world_of):
    for rank, (found, path, of_all) in enumerate(world_of(4, **FROM_64_BYTES)(in_a_group)):
        assert found == [float(rank % 2), float(rank % 2 + 2)]
        assert path == of_all


def read_only_pages(comm):
    """Give memory that is read-only, and memory that is not allocated yet."""
    never_touched = np.frombuffer(mmap.mmap(-1, 8 * comm.size * COUNT), "f8").reshape(comm.size, COUNT)
    given = np.full((comm.size, COUNT), comm.rank + 1.0)
    given.flags.writeable = False
    return comm.all_to_all(never_touched).sum(), comm.all_to_all(given).sum()


def test_input_memory_may_be_read_only_or_untouched(world_of):
    assert world_of(3, **FROM_64_BYTES)(read_only_pages) == [(0.0, COUNT * 6.0)] * 3


def mapped_by_the_kernel(comm, kind):
    size = comm.size
    x = page_with_the_time() if comm.rank == 0 else np.zeros(4096, "u1")
    if kind == "all_to_all":
        comm.all_to_all(x)
    else:
        comm.all_to_all_v(list(x.reshape(size, -1)))
    return comm.stats()["path"]


@needs_page_with_the_time
@pytest.mark.parametrize("kind", ["all_to_all", "all_to_all_v"])
def test_memory_that_the_kernel_cannot_read_uses_slots(world_of, kind):
    assert "single_copy" not in world_of(2, **FROM_64_BYTES)(mapped_by_the_kernel, kind)[1:]


def alternately_readable(comm):
    """The test of an array that was just read is not repeated: it must not hold for another array."""
    readable, unreadable = np.arange(4096).astype("u1"), page_with_the_time()
    second = unreadable if comm.rank == 0 else readable
    paths = set()
    for _ in range(20):
        comm.all_to_all(readable)
        found = comm.all_to_all(readable)
        paths.add((True, comm.stats()["path"]))
        assert (found.reshape(2, -1) == readable.reshape(2, -1)[comm.rank]).all()
        comm.all_to_all(readable)
        comm.all_to_all(second)  # at once: with one address for both the test would not be made again
        paths.add((False, comm.stats()["path"]))
    return paths


@needs_page_with_the_time
def test_arrays_are_tested_one_by_one(world_of):
    for paths in world_of(2, **FROM_64_BYTES)(alternately_readable):
        assert (True, "single_copy") in paths
        assert (False, "single_copy") not in paths


def swapped_in_place(comm):
    x = np.stack([np.full(COUNT, 10.0 * comm.rank + taker) for taker in range(comm.size)])
    comm.all_to_all(x, out=x)
    return x[:, 7].tolist(), comm.stats()["path"]


def test_arrays_that_may_be_overwritten_are_staged(world_of):
    for rank, (found, path) in enumerate(world_of(3, **FROM_64_BYTES)(swapped_in_place)):
        assert found == [10.0 * giver + rank for giver in range(3)]
        assert path != "single_copy"


def reduced_in_memory_of_all_kinds(comm, first):
    """all_reduce of private arrays on the ranks from `first` on, of shared ones before, in place and not."""

    def make(count, dtype):
        shared = comm.empty(count, dtype)  # which all ranks make
        return shared if comm.rank < first else np.empty(count, dtype)

    found = []
    for in_place in (True, False):
        x = make(8 * COUNT, "f8")
        x[:] = np.arange(8 * COUNT) + comm.rank
        out = None if in_place else make(8 * COUNT, "f8")
        comm.all_reduce(x, "sum", out=out)
        found.append(((x if in_place else out) == comm.size * np.arange(8 * COUNT) + 3).all())
        found.append(in_place or (x == np.arange(8 * COUNT) + comm.rank).all())
    return found, comm.stats()["path"]


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_shared_and_private_arrays_are_reduced_together(world_of, first):
    for found, path in world_of(3, **FROM_64_BYTES)(reduced_in_memory_of_all_kinds, first):
        assert found == [True] * 4
        assert (path == "zero_copy") == (first == 3)


# ---- the measured choice ----------------------------------------------------------------------------------

MEASURED_COUNT = 20_000  # of float64 in a piece; shorter pieces than 32 KiB are not measured
TRIED = 16 + 12  # calls of a window, and of the trial after it


def measured(comm, kind, calls):
    """Make calls with other values each time. Return the numbers of calls by path, and the chosen paths."""
    before = comm.stats()["paths"]
    x = np.zeros((comm.size, MEASURED_COUNT) if kind == "all_to_all" else MEASURED_COUNT)
    for turn in range(calls):
        x[:] = 1000 * turn + comm.rank
        found = getattr(comm, kind)(x)
        assert (found == 1000 * turn + np.arange(comm.size)[:, None]).all()
    stats = comm.stats()
    taken = {path: number - before[path] for path, number in stats["paths"].items() if number > before[path]}
    return taken, stats["chosen_paths"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_measurement_a_table_decides_only_where_one_rank_reads(world_of, kind, tmp_path):
    skip_unless_allowed(world_of)
    path = tmp_path / "table.json"
    least = {"single_copy_nbytes": 64, "single_copy_scatter_nbytes": 64}
    tuning_table.save(path, {2: {"near": least, "far": least}}, thresholds.LIMITS)
    paths = world_of(2, SHMRING_TUNING=str(path))(path_of, kind)
    assert paths == ["single_copy"] * 2 if "scatter" in kind or "all" in kind else "single_copy" not in paths


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["all_to_all", "all_gather"])
def test_ranks_try_both_paths_and_agree_on_one(world_of, kind, size):
    skip_unless_allowed(world_of)
    first, *others = world_of(size)(measured, kind, TRIED + 1)
    assert others == [first] * (size - 1)
    taken, chosen = first
    assert sum(taken.values()) == TRIED + 1
    # A trial is over after 4 calls, after 6 to 11 or after 12: its second half ends once it is hopeless. The
    # call after it still takes its path, the first one does not yet.
    assert 4 <= taken["single_copy"] <= 12
    assert chosen.keys() == {kind}
    assert chosen[kind].keys() == {1 << 17}
    assert chosen[kind][1 << 17] in ("slots", "single_copy")


def measured_by_one(comm, kind, calls):
    """As measured, for calls in which one rank alone gives data. Return the path of each call as well."""
    one, many = np.zeros(MEASURED_COUNT), np.zeros((comm.size, MEASURED_COUNT))
    paths = []
    for turn in range(calls):
        one[:] = many[:] = 1000 * turn + comm.rank
        if kind == "broadcast":
            comm.broadcast(one, 1)
            assert (one == 1000 * turn + 1).all()
        elif kind == "scatter":
            assert (comm.scatter(many if comm.rank == 1 else None, 1, like=one) == 1000 * turn + 1).all()
        elif kind == "gather":
            found = comm.gather(one, 1)
            assert found is None or (found == 1000 * turn + np.arange(comm.size)[:, None]).all()
        else:
            comm.exscan(one)
            assert (one == 1000 * turn).all()
        paths.append(comm.stats()["path"])
    return paths, comm.stats()["chosen_paths"]


@pytest.mark.parametrize(
    ("kind", "size", "cpus", "chooser"),
    [
        ("broadcast", 2, 1, 1),
        ("broadcast", 2, 2, 1),
        ("broadcast", 3, 2, 1),
        ("broadcast", 3, 3, 1),
        ("scatter", 2, 1, 1),
        ("scatter", 2, 2, 1),
        ("scatter", 3, 2, 1),
        ("scatter", 3, 3, 1),
        ("gather", 2, 1, 0),
        ("gather", 2, 2, 0),
        ("exscan", 2, 2, 0),
    ],
)
def test_a_rank_that_alone_gives_data_tries_both_paths(world_of, kind, size, cpus, chooser):
    skip_unless_allowed(world_of)
    found = world_of(size)(on_cpus, cpus, shmring.world(size), measured_by_one, kind, TRIED + 1)
    assert len({tuple(paths) for paths, _ in found}) == 1
    paths, _ = found[0]
    assert "single_copy" not in paths[:16]
    assert set(paths[16:19]) == {"single_copy"}  # a rank that alone gives data announces nothing
    for rank, (_, chosen) in enumerate(found):
        assert chosen.keys() == ({kind} if rank == chooser else set())


def test_ranks_that_give_beside_others_do_not_measure(world_of):
    for paths, chosen in world_of(3)(on_cpus, 3, shmring.world(3), measured_by_one, "gather", TRIED + 1):
        assert "single_copy" not in paths
        assert chosen == {}


def on_one_cpu(comm, kind, calls):
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        return measured(comm, kind, calls)
    finally:
        os.sched_setaffinity(0, cpus)


def test_the_faster_path_is_chosen(world_of, tmp_path):
    """Small slots and a shared CPU make slots slow: the ranks switch for each chunk."""
    skip_unless_allowed(world_of)
    path = tmp_path / "table.json"
    names = ("one_chunk_nbytes", "chunk_nbytes", "exchange_nbytes", "cached_chunk_nbytes")
    small = dict.fromkeys(names, 4 << 10)
    tuning_table.save(path, {2: {"any": {"depth": 2}, "near": small, "far": small}}, thresholds.LIMITS)
    found = world_of(2, SHMRING_TUNING=str(path))(on_one_cpu, "all_to_all", 10 * TRIED)
    for taken, chosen in found:
        assert taken["single_copy"] > 3 * TRIED
        assert chosen.keys() == {"all_to_all"}  # a trial of the other path may be under way


def measured_beside_shared(comm):
    for _ in range(TRIED):
        comm.all_gather(comm.zeros(MEASURED_COUNT))
    return comm.stats()["path"], measured(comm, "all_gather", 3)


def test_zero_copy_calls_are_not_timed_as_calls_through_slots(world_of):
    """Otherwise a trial would be under way after a window of them."""
    skip_unless_allowed(world_of)
    for path, (taken, chosen) in world_of(2)(measured_beside_shared):
        assert path == "zero_copy"
        assert set(taken) <= {"near", "far", "small"}
        assert chosen == {"all_gather": {1 << 17: "slots"}}


def test_a_scatter_has_a_size_of_its_own(world_of, tmp_path):
    skip_unless_allowed(world_of)
    path = tmp_path / "table.json"
    sizes = {"single_copy_nbytes": thresholds.NEVER, "single_copy_scatter_nbytes": 16 << 10}
    tuning_table.save(path, {2: {"near": sizes, "far": sizes}}, thresholds.LIMITS)
    assert world_of(2, SHMRING_TUNING=str(path))(path_of, "scatter") == ["single_copy"] * 2


@pytest.mark.parametrize("path", ["near", "far", "slots", "single_copy"])
def test_the_environment_fixes_the_path(world_of, path):
    skip_unless_allowed(world_of)
    for taken, chosen in world_of(2, SHMRING_PATH=path)(measured, "all_to_all", TRIED):
        others = set(taken) - {"single_copy"}  # several, if the distance changes
        assert bool(others) == ("single_copy" not in taken) == (path != "single_copy")
        assert chosen == {}


def alike_in_groups(comm):
    group = comm.split(comm.rank % 2)
    found = measured(group, "all_gather", TRIED), comm.stats()["chosen_paths"]
    group.close()
    return found


def test_each_communicator_measures_for_itself(world_of):
    skip_unless_allowed(world_of)
    for (taken, chosen), of_all in world_of(4)(alike_in_groups):
        assert taken["single_copy"] > 0
        assert chosen.keys() == {"all_gather"}
        assert of_all == {}


# ---- failures ---------------------------------------------------------------------------------------------


def give_what_cannot_be_read(comm):
    """Unmap parts of rank 1's memory before it calls; its process ends without touching them."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, 1 << 20)
    x = np.frombuffer(memory, "u1")
    out = np.empty(x.nbytes // comm.size, "u1")
    for taker in (2, 3) if comm.rank == 1 else ():
        piece = ctypes.c_void_p(x.ctypes.data + taker * out.nbytes)
        assert libc.munmap(piece, ctypes.c_size_t(out.nbytes)) == 0
    try:
        comm.scatter(x.reshape(comm.size, -1) if comm.rank == 1 else None, 1, out=out)
        comm.barrier()  # a rank that had all its data sees the end here
    except shmring.Aborted as error:
        answer = (error.rank, str(error))
    if comm.rank == 1:
        os._exit(0)
    return answer


def test_memory_that_cannot_be_read_is_an_error_on_all_ranks(world_of):
    skip_unless_allowed(world_of)
    with Ranks(4) as ranks:
        ranks.meet(**FROM_64_BYTES)
        outcomes = ranks.outcomes(give_what_cannot_be_read)
        assert isinstance(outcomes.pop(1), Died)
        assert len(set(outcomes)) == 1, outcomes
        rank, text = outcomes[0]
        assert rank in (2, 3)
        assert "rank 1" in text
        assert "Bad address" in text
        assert "SHMRING_SINGLE_COPY=off" in text


def call_for_ever(comm, kind, path_when_running, timeout_s=None):
    comm.timeout_s = timeout_s or comm.timeout_s
    for _ in turns(comm, path_when_running):
        call(comm, kind)


def assert_killed(outcomes, victim):
    """The victim died, and all other ranks name it."""
    assert isinstance(outcomes.pop(victim), Died)
    for error in outcomes:
        assert isinstance(error, shmring.RankFailed), outcomes
        assert error.rank == victim


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_is_named_by_all_others(tmp_path, kind, victim):
    with Ranks(3) as ranks:
        ranks.meet(**FROM_64_BYTES)
        ranks.begin(call_for_ever, kind, str(tmp_path / "runs"))
        when_there(tmp_path / "runs", ranks)
        ranks.kill(victim)
        outcomes = ranks.answers()
        assert_killed(outcomes, victim)


@pytest.mark.parametrize("kind", first(2, reversed(KINDS)))
def test_a_stopped_rank_is_a_timeout_and_it_raises_the_same_when_it_goes_on(tmp_path, kind):
    with Ranks(3) as ranks:
        ranks.meet(**FROM_64_BYTES)
        ranks.begin(call_for_ever, kind, str(tmp_path / "runs"), 1.5)
        when_there(tmp_path / "runs", ranks)
        ranks.kill(1, signal.SIGSTOP)
        others = ranks.answers(among=(0, 2))
        ranks.kill(1, signal.SIGCONT)
        errors = [*others, *ranks.answers(among=(1,))]
        assert all(isinstance(error, shmring.Timeout) for error in errors), errors
        assert len({str(error) for error in errors}) == 1
        assert errors[0].rank == 1
