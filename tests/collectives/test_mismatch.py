"""Every pair of collectives and every argument that two ranks may disagree on: Mismatch on all ranks, on one
host and over two, in groups, in the background and by plans. The error names each rank's call."""

import contextlib

import numpy as np
import pytest
from combinations import each_value
from ranks import until_there

import shmring
from tests.collectives.test_errors import ones

SIZE = 3
ROWS = 200  # enough for slots; test_errors has calls that fit into a call line


def _square(c):
    return ones((c.size, ROWS))


def _lists(c):
    return [ones(ROWS)] * c.size


def _of_root(c, given):
    return given if c.rank == 0 else None


# Each has the same number of bytes per rank, so that the count does not distinguish them.
ISSUED = {
    "all_reduce": lambda c, **how: c.all_reduce(ones(3 * ROWS), **how),
    "reduce": lambda c, **how: c.reduce(ones(3 * ROWS), **how),
    "scan": lambda c, **how: c.scan(ones(3 * ROWS), **how),
    "exscan": lambda c, **how: c.exscan(ones(3 * ROWS), **how),
    "reduce_scatter": lambda c, **how: c.reduce_scatter(_square(c), **how),
    "broadcast": lambda c, **how: c.broadcast(ones(3 * ROWS), **how),
    "scatter": lambda c, **how: c.scatter(_of_root(c, _square(c)), like=ones(ROWS), **how),
    "gather": lambda c, **how: c.gather(ones(ROWS), **how),
    "all_gather": lambda c, **how: c.all_gather(ones(ROWS), **how),
    "all_to_all": lambda c, **how: c.all_to_all(_square(c), **how),
    "all_gather_v": lambda c, **how: c.all_gather_v(ones(ROWS + c.rank), **how),
    "gather_v": lambda c, **how: c.gather_v(ones(ROWS + c.rank), **how),
    "scatter_v": lambda c, **how: c.scatter_v(_of_root(c, _lists(c)), like=ones(1), **how),
    "all_to_all_v": lambda c, **how: c.all_to_all_v(_lists(c), **how),
    "all_reduce_many": lambda c, **how: c.all_reduce_many([ones(ROWS), ones(2 * ROWS)], **how),
    "barrier": lambda c, **how: c.barrier(**how),
}
AT_ONCE = {
    "empty": lambda c: c.empty(3 * ROWS),
    "shared": lambda c: c.shared(3 * ROWS),
    "split": lambda c: c.split(0),
    "group": lambda c: c.group([0, 1]),
    "broadcast_object": lambda c: c.broadcast_object("an object"),
    "all_gather_object": lambda c: c.all_gather_object("an object"),
    "gather_object": lambda c: c.gather_object("an object"),
    "scatter_object": lambda c: c.scatter_object(["an object"] * c.size),
}
CALLS = ISSUED | AT_ONCE
PAIRS = [(one, other) for one in CALLS for other in CALLS if one < other]
# Made of the same calls: an object is an array of bytes, of its own length.
ALIKE = {(f"{kind}_object", f"{kind}_v") for kind in ("all_gather", "gather", "scatter")}


def call(comm, name, way):
    if way == "foreground" or name in AT_ONCE:
        CALLS[name](comm)
    elif way == "background":
        ISSUED[name](comm, async_op=True).wait()
    elif name == "barrier":
        comm.plan("barrier")()
    else:
        kind, x = name, ones(3 * ROWS)
        x = _square(comm) if kind in ("reduce_scatter", "all_to_all") else x
        comm.plan(kind, x)()


def what_comes_of(comm, calls, odd_one, way):
    """(text, calls, number) of the Mismatch that this rank gets, at the latest with the next call."""
    try:
        call(comm, calls[comm.rank == odd_one], way)
        comm.barrier()
    except shmring.Mismatch as error:
        return str(error), error.calls, error.seq
    raise AssertionError(f"no Mismatch on rank {comm.rank} for {calls}, {way}")


def each_in_a_group_of_its_own(comm, pairs, odd_one, way):
    """An error is one group's: the world is there for the next pair."""
    found = []
    for pair in pairs:
        group = comm.dup()
        found.append(what_comes_of(group, pair, odd_one, way))
        group.close()
    return found


def assert_limit_named(pairs, by_rank, *, is_near):
    for number, pair in enumerate(pairs):
        for text, calls, seq in (found[number] for found in by_rank):
            known = {output for output in calls if output not in ("nothing yet", "(on another host)")}
            assert len(known) >= 2 or pair in ALIKE, (pair, calls)
            assert all(output in text for output in known) or not is_near, (pair, text, calls)
            assert seq in (1, 2, 3), (pair, text)  # not 1: a rank that did not wait in its own call


@each_value({"way": ["foreground", "background"], "odd_one": [0, SIZE - 1]})
def test_every_two_collectives_are_a_mismatch(world_of, way, odd_one):
    by_rank = world_of(SIZE)(each_in_a_group_of_its_own, PAIRS, odd_one, way)
    assert_limit_named(PAIRS, by_rank, is_near=True)


SOME = {"all_reduce", "broadcast", "all_to_all", "scan", "barrier"}
PLANNED = [pair for pair in PAIRS if set(pair) <= SOME]


def test_plans_of_every_two_kinds_are_a_mismatch(world_of):
    by_rank = world_of(SIZE)(each_in_a_group_of_its_own, PLANNED, 1, "plan")
    assert_limit_named(PLANNED, by_rank, is_near=True)


# Some of all, others each time it is changed: a group over hosts takes its time to begin.
FEW = [pair for number, pair in enumerate(PAIRS) if number % 18 == 4]
# Both sides have nothing to send before the other has sent something.
STUCK = [("broadcast", "reduce"), ("reduce", "scatter"), ("broadcast_object", "gather")]


@each_value({"layout": ["1+1", "2+1"], "way": ["foreground", "background"]})
def test_every_two_collectives_are_a_mismatch_over_hosts(world_over_hosts, layout, way):
    nodes = {"1+1": [0, 1], "2+1": [0, 0, 1]}[layout]
    by_rank = world_over_hosts(nodes)(each_in_a_group_of_its_own, FEW, len(nodes) - 1, way)
    assert_limit_named(FEW, by_rank, is_near=False)


@pytest.mark.parametrize("way", ["foreground", "background"])
@pytest.mark.parametrize("pair", STUCK)
def test_two_hosts_that_wait_for_each_other_find_out(world_over_hosts, pair, way):
    """The mismatch is found long before the timeout, although no awaited message carries it."""
    by_rank = world_over_hosts([0, 1], timeout_s=30)(what_comes_of, pair[::-1], 1, way)
    for text, calls, _ in by_rank:
        assert len(set(calls)) == 2, text


def gather_other_shapes(comm, folder):
    """Ranks 0 and 2 gather arrays of other shapes; rank 1 comes after their errors."""
    if comm.rank == 1:
        for rank in (0, 2):
            until_there(folder / str(rank))
    try:
        comm.all_gather(ones((20, 30) if comm.rank == 0 else (30, 20)))
    finally:
        (folder / str(comm.rank)).touch()


def test_the_hint_that_calls_look_alike_follows_them(world_of, tmp_path):
    outcomes = world_of(SIZE).outcomes(gather_other_shapes, tmp_path)
    for error in (outcomes[0], outcomes[2]):
        assert type(error) is shmring.Mismatch
        text = "ranks 0, 2 called all_gather(float64[600]), but with arrays of other shapes or dtypes, "
        assert text in str(error)
        assert "priority=; rank 1 had not come yet; every rank has to make" in str(error)


# ---- arguments --------------------------------------------------------------------------------------------

FOLDING = "all_reduce", "reduce", "scan", "exscan"
ROOTED = "reduce", "broadcast", "gather", "gather_v"
MOVING = "all_gather", "gather", "broadcast", "all_gather_v", "gather_v"


def _with(kind, x, **how):
    return lambda c: getattr(c, kind)(x, **how)


ARGUMENTS = {
    **{f"dtype of {k}": (_with(k, ones(600)), _with(k, ones(600, "i8"))) for k in FOLDING + MOVING},
    **{f"count of {k}": (_with(k, ones(600)), _with(k, ones(601))) for k in (*FOLDING, *MOVING[:3])},
    **{f"op of {k}": (_with(k, ones(600)), _with(k, ones(600), op="max")) for k in FOLDING},
    **{f"root of {k}": (_with(k, ones(600)), _with(k, ones(600), root=1)) for k in ROOTED},
    **{
        f"order of {k}": (_with(k, ones((20, 30))), _with(k, np.ones((20, 30), order="F")))
        for k in (*FOLDING, "broadcast")
    },
    # Opaque dtypes, all of 8 bytes per item.
    **{f"unit of {k}": (_with(k, ones(600, "M8[D]")), _with(k, ones(600, "M8[s]"))) for k in MOVING},
    **{f"byte order of {k}": (_with(k, ones(600, ">f8")), _with(k, ones(600, ">i8"))) for k in MOVING},
    "shape of all_gather": (_with("all_gather", ones((20, 30))), _with("all_gather", ones((30, 20)))),
    "dimensions of all_gather": (_with("all_gather", ones(600)), _with("all_gather", ones((600, 1)))),
    "shape of gather": (_with("gather", ones((20, 30))), _with("gather", ones((30, 20)))),
    "dimensions of gather": (_with("gather", ones(600), root=1), _with("gather", ones((600, 1)), root=1)),
    "shape of all_to_all": (
        lambda c: c.all_to_all(ones((c.size, 20, 30))),
        lambda c: c.all_to_all(ones((c.size, 30, 20))),
    ),
    "shape of no dimension": (_with("all_gather", np.array(1.0)), _with("all_gather", ones(1))),
    "fields of broadcast": (_with("broadcast", ones(60, "i4,f4")), _with("broadcast", ones(60, "f4,i4"))),
    "items of all_to_all": (
        lambda c: c.all_to_all(ones((c.size, 3), "S8")),
        lambda c: c.all_to_all(ones((c.size, 3), "U2")),
    ),
    "items of scatter": (
        lambda c: c.scatter(_of_root(c, ones((c.size, 3), "M8[D]")), like=ones(3, "M8[D]")),
        lambda c: c.scatter(_of_root(c, ones((c.size, 3), "m8[D]")), like=ones(3, "m8[D]")),
    ),
    "rows of all_gather_v": (_with("all_gather_v", ones((5, 2))), _with("all_gather_v", ones((5, 3)))),
    "rows of gather_v": (_with("gather_v", ones((5, 2))), _with("gather_v", ones((5, 3)))),
    "dtype of all_to_all_v": (
        lambda c: c.all_to_all_v([ones(9)] * c.size),
        lambda c: c.all_to_all_v([ones(9, "f4")] * c.size),
    ),
    "rows of all_to_all_v": (
        lambda c: c.all_to_all_v([ones((9, 2))] * c.size),
        lambda c: c.all_to_all_v([ones((9, 3))] * c.size),
    ),
    "root of scatter_v": (
        lambda c: c.scatter_v(_of_root(c, _lists(c)), like=ones(1)),
        lambda c: c.scatter_v(_lists(c) if c.rank == 1 else None, root=1, like=ones(1)),
    ),
    "op of reduce_scatter": (
        lambda c: c.reduce_scatter(_square(c)),
        lambda c: c.reduce_scatter(_square(c), "min"),
    ),
    "how many of all_reduce_many": (
        lambda c: c.all_reduce_many([ones(300), ones(300)]),
        lambda c: c.all_reduce_many([ones(300), ones(200), ones(100)]),
    ),
    "fuse_nbytes": (
        lambda c: c.all_reduce_many([ones(300), ones(300)]),
        lambda c: c.all_reduce_many([ones(300), ones(300)], fuse_nbytes=8),
    ),
}
OF_ONE_HOST = {
    "algorithm": (_with("all_reduce", ones(600)), _with("all_reduce", ones(600), algorithm="tree")),
    "bytes of empty": (lambda c: c.empty(5), lambda c: c.empty(6)),
    "shape of empty": (lambda c: c.empty((5, 4)), lambda c: c.empty((4, 5))),
    "dtype of zeros": (lambda c: c.zeros(5, "f8"), lambda c: c.zeros(5, "i8")),
    "shape of full": (lambda c: c.full((2, 2), 1.0), lambda c: c.full(4, 1.0)),
    "unit of copy_of": (lambda c: c.copy_of(ones(5, "M8[D]")), lambda c: c.copy_of(ones(5, "M8[s]"))),
    "shape of shared": (lambda c: c.shared((5, 4)), lambda c: c.shared((4, 5))),
    "locks of shared": (lambda c: c.shared(5, locks=1), lambda c: c.shared(5, locks=2)),
    "ranks of group": (lambda c: c.group([0, 1]), lambda c: c.group([1, 0])),
}
OVER_HOSTS = {
    "wire": (_with("all_reduce", ones(600, "f4")), _with("all_reduce", ones(600, "f4"), wire="bf16")),
    "group_size": (_with("all_reduce", ones(90_000)), _with("all_reduce", ones(90_000), group_size=1)),
}


def disagree(comm, names, odd_one):
    """Return the arguments on which two ranks may differ without a Mismatch."""
    unnoticed = []
    for name in names:
        group = comm.dup()
        with contextlib.suppress(shmring.Mismatch):
            (ARGUMENTS | OF_ONE_HOST | OVER_HOSTS)[name][group.rank == odd_one](group)
            group.barrier()
            unnoticed.append(name)
        group.close()
    return unnoticed


@pytest.mark.parametrize("odd_one", [0, 1])
def test_any_disagreement_is_a_mismatch(world_of, odd_one):
    assert world_of(SIZE)(disagree, sorted(ARGUMENTS | OF_ONE_HOST), odd_one) == [[]] * SIZE


def test_any_disagreement_is_a_mismatch_over_hosts(world_over_hosts):
    assert world_over_hosts([0, 1])(disagree, sorted(ARGUMENTS)[::4] + sorted(OVER_HOSTS), 1) == [[], []]


def gather_shapes(comm):
    comm.all_gather(np.zeros((2, 8) if comm.rank else (4, 4)))


def test_a_mismatch_of_shapes_shows_them(world_of):
    first, second = world_of(2).outcomes(gather_shapes)
    assert "with arrays of other shapes" in str(first)
    assert "this rank's x has shape (4, 4) and dtype float64" in first.__notes__
    assert "this rank's x has shape (2, 8) and dtype float64" in second.__notes__
