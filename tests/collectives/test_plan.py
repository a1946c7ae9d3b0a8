"""plan: a collective bound once. Each call uses fresh values, making a plan is local, and it ends with the
communicator."""

import contextlib
import gc
import os
import weakref

import numpy as np
import pytest
from cases import Placed, all_reduced, inputs
from combinations import each_pair

import shmring

COUNTS = (0, 1, 13, 1500, 20_000)
KINDS = (
    ("int32", "sum", "auto"),
    ("uint8", "bxor", "ring"),
    ("int64", "max", "tree"),
    ("int16", "sum", "bidirectional_ring"),
    ("uint64", "prod", "halving_doubling"),
    ("int8", "min", "double_tree"),
    ("float16", "avg", "auto"),
)


def plans_and_calls(comm, row):
    """A plan against the call that it stands for, with values that change between the calls."""
    values = [inputs({**row, "turn": turn}, comm.size) for turn in range(5)]
    x = Placed(comm, values[0][comm.rank], row["memory"])
    out = Placed(comm, values[0][comm.rank], row["memory"]) if row["out"] else None
    call = {"op": row["op"], "algorithm": row["algorithm"], "out": out and out.array}
    run = comm.plan("all_reduce", x.array, **call)
    for arrays in values:
        x.array[...] = arrays[comm.rank]
        assert run() is None
        planned = (out or x).array.tobytes()
        x.array[...] = arrays[comm.rank]
        comm.all_reduce(x.array, **call)
        assert planned == (out or x).array.tobytes()
        if row["dtype"] != "float16":  # its NaNs have many bit patterns
            want = all_reduced(row["dtype"], row["op"], arrays, row["algorithm"])
            assert planned == want.tobytes()
    return comm.stats()["path"]


@each_pair({"memory": ["private", "shared", "mixed"], "out": [False, True], "chunk": [None, 256]})
def test_a_plan_does_what_the_call_does(world_of, memory, out, chunk):
    ranks = world_of(3, **({"SHMRING_CHUNK": chunk, "SHMRING_DEPTH": 2} if chunk else {}))
    for dtype, op, algorithm in KINDS:
        for count in COUNTS:
            row = {"dtype": dtype, "op": op, "size": count, "algorithm": algorithm, "memory": memory}
            assert len(set(ranks(plans_and_calls, {**row, "out": out}))) == 1


def many_plans(comm):
    """Plans of every kind in turn with other calls, a thousand times over."""
    x, y, z = np.empty(6), np.empty(3000, "i8"), comm.empty(5000, "i4")
    out = np.empty(6)
    sum_x, sum_y = comm.plan("all_reduce", x, out=out), comm.plan("all_reduce", y, op=shmring.Op.SUM)
    sum_z, y_from_last = comm.plan("all_reduce", z, "max"), comm.plan("broadcast", y, root=comm.size - 1)
    meet = comm.plan("barrier", timeout=15)
    for turn in range(1000):
        x[...], y[...], z[...] = turn, turn + comm.rank, turn * comm.rank
        sum_x()
        assert (out == comm.size * turn).all()
        assert (x == turn).all()
        y_from_last()
        assert (y == turn + comm.size - 1).all()
        if turn % 10 == 0:
            sum_y()
            assert (y == comm.size * (turn + comm.size - 1)).all()
            kept = comm.empty(4000) if turn % 100 == 0 else None
            sum_z()
            assert (z == turn * (comm.size - 1)).all()
            del kept
        meet()
    return comm.stats()["calls"]


@pytest.mark.parametrize("how", [{}, {"SHMRING_CHUNK": 512, "SHMRING_FIRST_SEQ": (1 << 64) - 500}])
def test_plans_stay_valid_between_other_calls(world_of, how):
    assert min(world_of(3, **how)(many_plans)) > 3000


def refused_on_one_rank(comm):
    """Fail to make a plan on one rank: this is local, the other ranks do not notice it."""
    if comm.rank == 1:
        for wrong, error in [
            (lambda: comm.plan("all_reduce", np.ones(3), op="sub"), ValueError),
            (lambda: comm.plan("all_reduce", [1, 2]), TypeError),
            (lambda: comm.plan("all_reduce", np.ones(3), root=1), TypeError),
            (lambda: comm.plan("all_reduce", np.ones(3), algorithm="best"), ValueError),
            (lambda: comm.plan("all_reduce", np.ones(3), timeout=0), ValueError),
            (lambda: comm.plan("all_reduce", np.ones(3), out=np.ones(4)), ValueError),
            (lambda: comm.plan("broadcast", np.ones(3), root=9), ValueError),
            (lambda: comm.plan("broadcast", np.ones(3), op="sum"), TypeError),
            (lambda: comm.plan("barrier", timeout=-1), ValueError),
            (lambda: comm.plan("scatter_gather", np.ones(3)), ValueError),
            (lambda: comm.plan(None, np.ones(3)), ValueError),
        ]:
            with pytest.raises(error):
                wrong()
    x = np.ones(3)
    comm.all_reduce(x)
    return float(x[0])


def test_a_refused_plan_concerns_no_other_rank(world_of):
    assert world_of(3)(refused_on_one_rank) == [3.0] * 3


def test_wrong_arguments_of_a_plan_name_the_call():
    x, none = np.ones(3), {}
    wrong = {
        "all_reduce() got an unexpected keyword argument 'opp'": ("all_reduce", (x,), {"opp": "sum"}),
        "all_reduce() got multiple values for argument 'x'": ("all_reduce", (x,), {"x": x}),
        "broadcast() missing a required argument: 'x'": ("broadcast", (), none),
        "barrier() got too many positional arguments": ("barrier", (x,), none),
    }
    with shmring.init() as comm:
        for text, (kind, arguments, keywords) in wrong.items():
            with pytest.raises(TypeError) as caught:
                comm.plan(kind, *arguments, **keywords)
            assert str(caught.value) == text
            assert caught.value.__suppress_context__


def different_plans(comm):
    with contextlib.suppress(shmring.Mismatch):
        comm.plan("all_reduce", np.ones(3), op="sum" if comm.rank else "max")()
        return "no error"
    with pytest.raises(shmring.Mismatch, match="max"):
        comm.plan("barrier")()
    return "mismatch"


def test_plans_that_do_not_match(world_of):
    assert world_of(2)(different_plans) == ["mismatch"] * 2


def close_and_run(comm):
    x = comm.empty(5000)
    plans = [comm.plan("all_reduce", x), comm.plan("all_reduce", np.ones(1)), comm.plan("barrier")]
    for run in plans:
        run()
    comm.barrier()
    comm.close()
    for run in plans:
        with pytest.raises(shmring.Closed):
            run()
    with pytest.raises(shmring.Closed):
        comm.plan("barrier")
    x[...] = 3  # arrays outlive the communicator, planned or not
    return float(x.sum())


def test_a_plan_is_over_when_the_communicator_is(world_of):
    assert world_of(2)(close_and_run) == [15000.0] * 2


def test_a_plan_keeps_its_arrays_and_its_communicator_and_nothing_longer():
    with shmring.init() as comm:
        x, grows = np.ones(3), bytearray(8)
        array, plan = weakref.ref(x), comm.plan("all_reduce", x)
        pinned = comm.plan("all_reduce", grows)
        del x
        gc.collect()
        assert array() is not None
        plan()
        with pytest.raises(BufferError):
            grows.extend(b"more")
        del plan, pinned
        gc.collect()
        assert array() is None
        grows.extend(b"more")
    comm = shmring.init()
    plan, alive = comm.plan("barrier"), weakref.ref(comm)
    del comm
    plan()
    del plan
    gc.collect()
    assert alive() is None


def fork_and_run(comm):
    x = np.ones(2000)
    run = comm.plan("all_reduce", x)
    run()
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except shmring.Closed:
            os._exit(17)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    run()
    return status, float(x[0])


def test_a_forked_child_cannot_run_its_parents_plan(world_of):
    assert world_of(2)(fork_and_run) == [(17, 4.0)] * 2
