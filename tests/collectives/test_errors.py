"""Wrong arguments and calls that do not match: the rank that is wrong gets an error that names the fix, the
others get Mismatch, and no rank hangs, on any path."""

import contextlib
import time

import numpy as np
import pytest
from combinations import each_value
from ranks import until_there

import shmring

COUNTS = {"tiny": 4, "small": 500, "large": 40_000, "zero-copy": 40_000}
PATHS = tuple(COUNTS)


def array_for(comm, path, dtype="f8"):
    return comm.full(COUNTS[path], 1, dtype) if path == "zero-copy" else np.ones(COUNTS[path], dtype)


def assert_all(outcomes, kind):
    for outcome in outcomes:
        assert isinstance(outcome, kind), outcomes
        assert isinstance(outcome, shmring.Error)
    return outcomes


# ---- wrong arguments --------------------------------------------------------------------------------------


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


WRONG = {  # error → (the call, its type, words that name the fix)
    "every other": (lambda comm, x: comm.all_reduce(x[::2]), ValueError, "ascontiguousarray"),
    "read-only": (lambda comm, x: comm.all_reduce(read_only(x)), ValueError, "out="),
    "read-only out": (lambda comm, x: comm.all_reduce(x, out=read_only(x)), ValueError, "writable"),
    "objects": (lambda comm, x: comm.all_reduce(x.astype(object)), TypeError, "allowed: bool, int8"),
    "byte order": (lambda comm, x: comm.all_reduce(x.astype(">f8")), TypeError, "newbyteorder"),
    "a text": (lambda comm, x: comm.all_reduce("3.0"), TypeError, "broadcast_object"),
    "a list": (lambda comm, x: comm.all_reduce([1.0]), TypeError, "asarray"),
    "no such op": (lambda comm, x: comm.all_reduce(x, "sub"), ValueError, "allowed: sum, prod"),
    "an op of another kind": (lambda comm, x: comm.all_reduce(x, 3), ValueError, "allowed: sum, prod"),
    "float band": (lambda comm, x: comm.all_reduce(x, "band"), TypeError, "float64"),
    "integer avg": (lambda comm, x: comm.all_reduce(x.astype("i4"), "avg"), TypeError, "int32"),
    "complex min": (lambda comm, x: comm.all_reduce(x.astype("c16"), "min"), TypeError, "complex128"),
    "bool avg": (lambda comm, x: comm.all_reduce(x.astype("?"), "avg"), TypeError, "bool"),
    "no such algorithm": (lambda comm, x: comm.all_reduce(x, algorithm="best"), ValueError, "ring"),
    "timeout of 0": (lambda comm, x: comm.all_reduce(x, timeout=0), ValueError, "timeout"),
    "timeout of nan": (lambda comm, x: comm.all_reduce(x, timeout=float("nan")), ValueError, "timeout"),
    "out of another dtype": (lambda comm, x: comm.all_reduce(x, out=x.astype("f4")), ValueError, "dtype"),
    "out of another size": (lambda comm, x: comm.all_reduce(x, out=np.empty(9)), ValueError, "count"),
    "out of another order": (
        lambda comm, x: comm.all_reduce(x.reshape(2, -1), out=np.empty((2, x.size // 2), order="F")),
        ValueError,
        "order",
    ),
    "out overlaps": (lambda comm, x: comm.all_reduce(x[1:], out=x[:-1]), ValueError, "overlap"),
    "no such root": (lambda comm, x: comm.broadcast(x, comm.size), ValueError, "0 to"),
    "negative root": (lambda comm, x: comm.broadcast(x, -1), ValueError, "0 to"),
    "root of another kind": (lambda comm, x: comm.broadcast(x, 0.0), TypeError, "integer"),
    "broadcast of a list": (lambda comm, x: comm.broadcast([1, 2]), TypeError, "asarray"),
    "a barrier's timeout": (lambda comm, x: comm.barrier(timeout=-1), ValueError, "timeout"),
}


def refuse_everything(comm, path):
    """The same wrong call on all ranks: an error that names the fix, and the communicator remains."""
    x = array_for(comm, path)
    for name, (wrong, error, words) in WRONG.items():
        with pytest.raises(error) as caught:
            wrong(comm, x)
        assert words in str(caught.value), f"{name}: {caught.value}"
        if name < "n":
            x[...] = 1
            comm.all_reduce(x)
            assert (x == comm.size).all(), name
    comm.barrier()


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_argument_everywhere_is_an_error_everywhere_and_no_more(world_of, path):
    world_of(3)(refuse_everything, path)


def refuse_on_rank_1(comm, path, name):
    right_or_wrong(comm, array_for(comm, path), comm.rank == 1, name)


def right_or_wrong(comm, x, is_wrong, name):
    if is_wrong:
        WRONG[name][0](comm, x)
    elif "root" in name or "broadcast" in name:
        comm.broadcast(x)
    elif "barrier" in name:
        comm.barrier()
    else:
        comm.all_reduce(x)


@each_value({"name": WRONG, "path": PATHS})
def test_a_wrong_argument_on_one_rank_is_a_mismatch_elsewhere(world_of, name, path):
    first, wrong, last = world_of(3).outcomes(refuse_on_rank_1, path, name)
    assert isinstance(wrong, WRONG[name][1])
    for rank, other in zip((0, 2), assert_all([first, last], shmring.Mismatch), strict=True):
        assert "refused" in other.calls[1]
        assert "the error of the rank that refused says what was wrong" in str(other)
        assert f"[{COUNTS[path]}]" in other.calls[rank] or "barrier" in name


def call_after_refusing(comm):
    if comm.rank == 1:
        with contextlib.suppress(ValueError):
            comm.all_reduce(np.ones(3), "sub")
    comm.all_reduce(np.ones(3))


def test_the_refusing_rank_gets_the_mismatch_with_its_next_call(world_of):
    assert_all(world_of(3).outcomes(call_after_refusing), shmring.Mismatch)


def wait_alone_after_refusing(comm):
    if comm.rank == 1:
        time.sleep(1.5)
        return None
    with contextlib.suppress(TypeError):
        comm.all_reduce("text")
    comm.barrier(timeout=0.3)


def test_a_refusal_does_not_make_the_next_calls_timeout_longer(world_of):
    refused, _ = world_of(2).outcomes(wait_alone_after_refusing)
    assert isinstance(refused, shmring.Timeout)
    assert refused.rank == 1


# ---- calls that do not match ------------------------------------------------------------------------------


def ones(count, dtype="f8"):
    return np.ones(count, dtype)


DIFFERENT = {  # difference → two calls
    "op": (lambda c: c.all_reduce(ones(9)), lambda c: c.all_reduce(ones(9), "max")),
    "op of small": (lambda c: c.all_reduce(ones(900)), lambda c: c.all_reduce(ones(900), "max")),
    "op of large": (lambda c: c.all_reduce(ones(90_000)), lambda c: c.all_reduce(ones(90_000), "max")),
    "dtype": (lambda c: c.all_reduce(ones(3, "f4")), lambda c: c.all_reduce(ones(3, "i4"))),
    "dtype of large": (
        lambda c: c.all_reduce(ones(90_000, "f4")),
        lambda c: c.all_reduce(ones(90_000, "i4")),
    ),
    "size": (lambda c: c.all_reduce(ones(3)), lambda c: c.all_reduce(ones(4))),
    "nothing and something": (lambda c: c.all_reduce(ones(0)), lambda c: c.all_reduce(ones(1))),
    "tiny and large": (lambda c: c.all_reduce(ones(3)), lambda c: c.all_reduce(ones(90_000))),
    "small and large": (lambda c: c.all_reduce(ones(300)), lambda c: c.all_reduce(ones(90_000))),
    "two large": (lambda c: c.all_reduce(ones(90_001)), lambda c: c.all_reduce(ones(90_000))),
    "same bytes": (lambda c: c.all_reduce(ones(90_000, "f4")), lambda c: c.all_reduce(ones(45_000, "f8"))),
    "root": (lambda c: c.broadcast(ones(3), 0), lambda c: c.broadcast(ones(3), 1)),
    "root of large": (lambda c: c.broadcast(ones(90_000), 0), lambda c: c.broadcast(ones(90_000), 1)),
    "kind": (lambda c: c.broadcast(ones(3)), lambda c: c.all_reduce(ones(3))),
    "kind of large": (lambda c: c.broadcast(ones(90_000)), lambda c: c.all_reduce(ones(90_000))),
    "a barrier": (lambda c: c.barrier(), lambda c: c.all_reduce(ones(90_000))),
    "length": (lambda c: c.all_gather(ones(3)), lambda c: c.all_gather(ones(4))),
    "an allocation": (lambda c: c.empty(3), lambda c: c.all_reduce(ones(3))),
    "two allocations": (lambda c: c.empty(3), lambda c: c.empty(4)),
    "order": (
        lambda c: c.all_reduce(np.ones((20, 30))),
        lambda c: c.all_reduce(np.ones((20, 30), order="F")),
    ),
    "algorithm": (lambda c: c.all_reduce(ones(900)), lambda c: c.all_reduce(ones(900), algorithm="ring")),
    "two algorithms": (
        lambda c: c.all_reduce(ones(90_000), algorithm="tree"),
        lambda c: c.all_reduce(ones(90_000), algorithm="ring"),
    ),
    "rings": (
        lambda c: c.all_reduce(ones(90_000), algorithm="ring"),
        lambda c: c.all_reduce(ones(90_000), algorithm="bidirectional_ring"),
    ),
    "halving and double tree": (
        lambda c: c.all_reduce(ones(90_000), algorithm="halving_doubling"),
        lambda c: c.all_reduce(ones(90_000), algorithm="double_tree"),
    ),
    "direct and master": (
        lambda c: c.all_reduce(ones(90_000), algorithm="direct"),
        lambda c: c.all_reduce(ones(90_000), algorithm="master"),
    ),
}


def call_differently(comm, what, odd_one):
    comm.all_reduce(ones(5))
    for _ in range(2):  # the second time it is the same error again
        try:
            DIFFERENT[what][comm.rank == odd_one](comm)
        except shmring.Mismatch as error:
            first = error
    return first


@pytest.mark.parametrize("what", DIFFERENT)
def test_calls_that_differ_are_a_mismatch_on_every_rank(world_of, what):
    for size, odd_one in ((2, 1), (3, 0), (3, 1)):
        errors = assert_all(world_of(size).outcomes(call_differently, what, odd_one), shmring.Mismatch)
        for error in errors:
            assert len(error.calls) == size
            assert len({call for call in error.calls if call != "nothing yet"}) == 2, error.calls
            assert ("all_gather_v takes arrays of different lengths" in str(error)) == (what == "length")
            assert all(call in str(error) or call == "nothing yet" for call in error.calls)
            assert error.seq == 2


def mismatch_then_anything(comm):
    with pytest.raises(shmring.Mismatch):
        comm.all_reduce(ones(3 + comm.rank))
    for call in (lambda: comm.barrier(), lambda: comm.broadcast(ones(3)), lambda: comm.empty(4)):
        with pytest.raises(shmring.Mismatch):
            call()
    assert comm.stats()["bytes_sent"] == 0
    comm.close()
    with pytest.raises(shmring.Closed):
        comm.barrier()


def test_a_mismatch_is_final_but_closing_works(world_of):
    world_of(2)(mismatch_then_anything)


def give_a_list(comm, path):
    """The same mistake on both ranks; rank 0 makes it after rank 1 has raised and left."""
    if comm.rank == 0:
        until_there(path)
    try:
        comm.all_reduce([1, 2])
    except TypeError:
        if comm.rank == 1:
            comm.abort("a mistake")
            path.touch()
        raise


def test_a_mistake_that_all_make_is_the_same_error_on_all(world_of, tmp_path):
    for error in world_of(2).outcomes(give_a_list, tmp_path / "left"):
        assert isinstance(error, TypeError)
        assert "np.asarray" in str(error)


class CommWithoutInit(shmring.Comm):
    """A subclass that does not call __init__ of its base."""

    def __init__(self, *_):
        pass


@pytest.mark.parametrize(
    "call",
    [
        lambda: CommWithoutInit().barrier(),
        lambda: CommWithoutInit("other").barrier(),
        lambda: shmring.Work.__new__(shmring.Work).wait(),
        lambda: shmring.Work.__new__(shmring.Work).done(),
        lambda: shmring.Transfer.__new__(shmring.Transfer).done(),
        lambda: shmring.Plan.__new__(shmring.Plan)(),
    ],
)
def test_an_object_without_a_communicator_raises(call):
    with pytest.raises((TypeError, AttributeError)):
        call()
