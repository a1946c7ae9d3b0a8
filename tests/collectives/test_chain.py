"""Partial results from rank to rank, with more ranks than CPUs: when the chain is chosen, its results against
NumPy, and the rank that is named when one is missing or calls something else."""

import signal

import numpy as np
import pytest
from cases import assert_same
from combinations import each_value
from ranks import Ranks, turns, when_there

import shmring
from shmring._config import thresholds
from shmring._system import limits
from tests.collectives.test_collectives import call_once, inputs, outcomes
from tests.collectives.test_errors import assert_all
from tests.collectives.test_going_ahead import LATE, SOON, share_cpus

SIZE = 5
KINDS = ("reduce", "scan", "exscan")
LARGE = thresholds.built_in(SIZE)["chain_nbytes"] // 8  # float64s


@pytest.fixture(scope="module")
def crowd():
    """As world_of, of ranks on one CPU."""
    with Ranks(SIZE) as ranks:
        ranks.meet()(share_cpus, 1)
        yield ranks.meet


def path_of(comm, kind, dtype, count, shared=()):
    x = comm.zeros(count, dtype)
    getattr(comm, kind)(x if comm.rank in shared else x.copy())
    return comm.stats()["path"]


@pytest.mark.parametrize("kind", KINDS)
def test_large_messages_of_many_ranks_go_from_rank_to_rank(crowd, kind):
    ranks = crowd()
    assert ranks(path_of, kind, "f8", LARGE) == ["chain"] * SIZE
    assert "chain" not in ranks(path_of, kind, "f8", LARGE - 1)
    assert "chain" not in ranks(path_of, kind, "f2", 8 * LARGE)
    of_shared = "zero_copy" if kind == "reduce" else "chain"  # a scan in place has to be staged
    assert ranks(path_of, kind, "f8", LARGE, range(SIZE)) == [of_shared] * SIZE
    assert ranks(path_of, kind, "f8", LARGE, range(1, SIZE)) == ["chain"] * SIZE


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_other_calls_do_not(crowd, kind):
    assert "chain" not in crowd()(path_of, kind, "f8", LARGE * SIZE)


def meet_again(comm, world, cpus):
    """Return the path of a scan in a new world in which each rank sees this number of CPUs."""
    usable, limits.usable_cpus = limits.usable_cpus, lambda _: cpus[comm.rank]
    try:
        with shmring.init(world, rank=comm.rank) as other:
            return path_of(other, "scan", "f8", 1 << 20)
    finally:
        limits.usable_cpus = usable


@pytest.mark.parametrize("cpus", [(4, 4, 1, 4), (1, 9, 9, 9), (4, 4, 4, 4)])
def test_all_go_by_the_fewest_cpus_that_one_sees(world_of, cpus):
    paths = world_of(4)(meet_again, shmring.world(4), cpus)
    assert paths == ["chain"] * 4 if min(cpus) < 4 else "chain" not in paths


NAMES = ("dtype", "op", "rows", "columns", "memory", "out", "root")
ROWS = [
    {"kind": kind, **dict(zip(NAMES, row, strict=True))}
    for kind in KINDS
    for row in (
        ("float32", "sum", 7, 6001, "private", False, "first"),
        ("float32", "avg" if kind == "reduce" else "max", 1, 5000, "unaligned", True, "last"),
        ("complex128", "prod", 1, 1000, "mixed", False, "middle"),
        ("int8", "land", 3, 6001, "unaligned", False, "last"),
        ("bool", "lxor", 1, 6001, "private", True, "first"),
        ("uint16", "bxor", 3, 1000, "mixed", True, "first"),
        ("int64", "min", 7, 1000, "private", True, "middle"),
    )
]


@pytest.mark.parametrize("environ", [{}, {"SHMRING_FIRST_SEQ": (1 << 64) - 20}])
@pytest.mark.parametrize("chunk", [64, 1024, 32_768])
def test_what_comes_of_it(crowd, chunk, environ):
    ranks = crowd(SHMRING_CHUNK=chunk, SHMRING_DEPTH=2, **environ)
    for row in ROWS:
        xs = inputs(row, SIZE)
        for rank, (result, want) in enumerate(zip(ranks(call_once, row), outcomes(row, xs), strict=True)):
            if rank == 0 and row["kind"] == "exscan":
                assert result == want.tobytes()
            else:
                assert_same(np.frombuffer(result, want.dtype), want.ravel(), row["op"], (rank, row))
    assert set(ranks(path_of, "scan", "f8", LARGE)) == {"chain"}


def repeat(comm, kind, root, path_when_running, timeout_s):
    x = np.ones(LARGE)
    for _ in turns(comm, path_when_running):
        getattr(comm, kind)(x, "max", **({"root": root} if kind == "reduce" else {}), timeout=timeout_s)


@each_value(
    {
        "kind": KINDS,
        "how": [signal.SIGSTOP, signal.SIGKILL],
        "victim": [0, 1, 2, SIZE - 1],  # 1 is the root
    }
)
def test_all_name_the_rank_that_keeps_them(tmp_path, kind, how, victim):
    with Ranks(SIZE) as ranks:
        ranks.meet()(share_cpus, 1)
        timeout_s = 2 if how == signal.SIGSTOP else None
        ranks.meet().begin(repeat, kind, 1, str(tmp_path / "runs"), timeout_s)
        when_there(tmp_path / "runs", ranks)
        ranks.kill(victim, how)
        others = ranks.answers(among=[rank for rank in range(SIZE) if rank != victim])
        ranks.kill(victim, signal.SIGKILL)
        kind_of_error = shmring.Timeout if how == signal.SIGSTOP else shmring.RankFailed
        assert {error.rank for error in assert_all(others, kind_of_error)} == {victim}


def differ_in_the_middle(comm, kind, how, middle):
    for turn in range(middle + 1):
        x = np.ones(LARGE)
        if turn == middle and comm.rank == 2:
            x = np.ones(2 * LARGE) if how == "size" else x
            comm.broadcast(x) if how == "kind" else getattr(comm, kind)(x)
        else:
            getattr(comm, kind)(x)
    if middle == LATE:
        comm.barrier()


@pytest.mark.parametrize("middle", [SOON, LATE])
@pytest.mark.parametrize("how", ["size", "kind"])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_differ_are_noticed(crowd, kind, how, middle):
    for error in assert_all(crowd().outcomes(differ_in_the_middle, kind, how, middle), shmring.Mismatch):
        assert error.seq == middle + 1
