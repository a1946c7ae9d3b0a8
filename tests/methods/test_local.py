"""Accumulated gradients equal those of a larger batch, local SGD takes means, and all ranks agree to skip."""

import numpy as np
import pytest
from injections import Interrupt
from ranks import raised

from shmring.methods.local import GradientAccumulation, LocalSGD
from shmring.methods.precision import LossScaler, MasterWeights
from shmring.methods.sharded import SGD, ShardedOptimizer
from shmring.methods.sparse import all_reduce_pairs

SHAPES = [(3, 4), (), (0,), (1000,)]


def gradients_of(rank, number, dtype, exact):
    """Return the gradients of a micro-batch: whole numbers, whose sums are exact, or any numbers."""
    random = np.random.default_rng([rank, number])
    if exact:
        return [random.integers(-50, 50, shape).astype(dtype) for shape in SHAPES]
    return [random.standard_normal(shape).astype(dtype) for shape in SHAPES]


def accumulated(comm, every, dtype, op, exact):
    """The gradients of two rounds, and at which calls they were ready."""
    accumulation = GradientAccumulation(comm, gradients_of(0, 0, dtype, True), every, op=op)
    rounds, ready = [], []
    for number in range(2 * every):
        mine = gradients_of(comm.rank, number, dtype, exact)
        if accumulation.add(mine):
            ready.append(number)
            rounds.append([each.copy() for each in accumulation.gradients])
        for each in mine:
            each.fill(np.nan)  # ours again
    assert accumulation.synchronisations == 2
    return rounds, ready, accumulation.nbytes


@pytest.mark.parametrize("every", [1, 4, 8, 16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_are_one_batch_as_large_as_all(world_of, size, every):
    for rounds, ready, nbytes in world_of(size)(accumulated, every, "f4", "sum", True):
        assert ready == [every - 1, 2 * every - 1]
        assert nbytes == 4 * 1013
        for number, found in enumerate(rounds):
            parts = [
                gradients_of(rank, micro, "f4", True)
                for rank in range(size)
                for micro in range(number * every, (number + 1) * every)
            ]
            expected = [np.sum(each, axis=0, dtype="f4") for each in zip(*parts, strict=True)]
            assert all((a == b).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_sums_are_in_order_of_micro_batches_and_then_of_ranks(world_of, dtype):
    rounds, _, _ = world_of(2)(accumulated, 4, dtype, "avg", False)[1]
    for index in range(len(SHAPES)):
        by_rank = []
        for rank in range(2):
            total = gradients_of(rank, 4, dtype, False)[index]
            for number in (5, 6, 7):
                total = total + gradients_of(rank, number, dtype, False)[index]
            by_rank.append(total)
        wide = "f4" if dtype == "f2" else dtype  # in which 16-bit floats are folded
        mean = ((by_rank[0].astype(wide) + by_rank[1].astype(wide)) / np.array(2, wide)).astype(dtype)
        assert (rounds[1][index] == mean / np.array(4, dtype)).all()


def accumulate_often(comm, every):
    accumulation = GradientAccumulation(comm, [np.empty(1, "f2")], every)
    gradient = np.array([0], "f2")
    for _ in range(every - 1):
        accumulation.add([gradient])
    gradient[0] = 30_000
    return accumulation.add([gradient]), accumulation.gradients[0].item()


def test_a_number_of_micro_batches_may_be_larger_than_any_float16(world_of):
    every = 66_000
    assert world_of(1)(accumulate_often, every) == [(True, np.float16(30_000 / every).item())]


def local(comm, every, steps):
    """Add whole numbers on each rank; return the values after each step."""
    start = [np.full(shape, comm.rank, "f8") for shape in SHAPES]
    local_sgd = LocalSGD(comm, start, every)
    seen, averaged = [], []
    for number in range(steps):
        for param in local_sgd.params:
            param += comm.rank * (number + 1)
        averaged.append(local_sgd.step())
        seen.append(local_sgd.params[3][0].item())
    local_sgd.average()
    return seen, averaged, [param.copy() for param in local_sgd.params], local_sgd.synchronisations


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_learn_apart_and_take_the_mean(world_of, size, every):
    steps = 6
    values, means = np.zeros(size), []  # rank 0's start counts
    for number in range(steps):
        values += np.arange(size) * (number + 1)
        if (number + 1) % every == 0:
            values[:] = values.mean()
        means.append(values.copy())
    for rank, (seen, averaged, last, synchronisations) in enumerate(world_of(size)(local, every, steps)):
        assert seen == [mean[rank] for mean in means]
        assert averaged == [(number + 1) % every == 0 for number in range(steps)]
        assert synchronisations == steps // every + 1
        assert [param.shape for param in last] == SHAPES
        assert all((param == values.mean()).all() for param in last)


# ---- interrupts ---------------------------------------------------------------------------------------


def raise_interrupt(*_, **__):
    raise Interrupt


def interrupt_an_add(comm):
    """Interrupt rank 0 as it adds; return the error of the next call, which reduces on rank 1."""
    own = comm.dup()
    gradients = [np.ones(1, "f4"), np.ones(1, "f4")]
    accumulation = GradientAccumulation(own, gradients, every=2)
    accumulation.add(gradients)
    if comm.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "add", raise_interrupt)
            with pytest.raises(Interrupt):
                accumulation.add(gradients)
    return raised(accumulation.add, gradients)


def interrupt_a_step(comm):
    """Interrupt rank 0 before it averages; return the error of the next call, which averages on rank 1."""
    own = comm.dup()
    local_sgd = LocalSGD(own, [np.zeros(1)], every=1)
    if comm.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_sgd, "_reduce", raise_interrupt)
            with pytest.raises(Interrupt):
                local_sgd.step()
    return raised(local_sgd.step)


@pytest.mark.parametrize("interrupt", [interrupt_an_add, interrupt_a_step])
def test_an_interrupted_call_ends_the_communicator(world_of, interrupt):
    """It cannot be repeated: it has changed sums or counts."""
    for error in world_of(2)(interrupt):
        assert str(error).startswith("Aborted"), error


# ---- mixed precision ------------------------------------------------------------------------------------


def scaled(comm, bad_rank, bad_value, dtype):
    """Make steps 0 to 7, of which 3 is bad on one rank; return whether each counted, and the scale after
    it."""
    scaler = LossScaler(comm, scale=8.0, growth=4.0, backoff=0.5, growth_interval=2)
    reported = []
    for step in range(8):
        gradients = [np.full(shape, (comm.rank + 1) * scaler.scale).astype(dtype) for shape in SHAPES]
        out = [np.full(shape, 77.0, "f4") for shape in SHAPES]
        if step == 3 and comm.rank == bad_rank:
            gradients[3][999] = bad_value
        counted = scaler.unscale(gradients, out)
        assert all((each == (comm.rank + 1 if counted else 77)).all() for each in out)
        reported.append((counted, scaler.scale))
    return reported, scaler.skipped


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("size", "bad_rank"), [(1, 0), (3, 0), (3, 2)])
def test_all_skip_where_one_has_an_overflow(world_of, size, bad_rank, bad):
    scales = [8, 32, 32, 16, 16, 64, 64, 256]  # grows after two good steps, falls at the bad one
    for dtype in ("f2", "f4"):
        for reported, skipped in world_of(size)(scaled, bad_rank, bad, dtype):
            assert reported == [(step != 3, scale) for step, scale in enumerate(scales)]
            assert skipped == 1


def complex_scaled(comm, bad):
    gradient = np.array([complex(1, bad if comm.rank == 0 else 1), 2], "c8")
    return LossScaler(comm).unscale([gradient])


def test_all_skip_where_an_imaginary_part_overflows(world_of):
    for bad in 1, np.inf, np.nan:
        assert world_of(2)(complex_scaled, bad) == [bad == 1] * 2


def scaled_from_generators(comm):
    """Return whether a good and a bad step count, with the arrays of the good one."""
    scaler, good = LossScaler(comm, scale=4.0), [np.full(2, 8.0, "f4") for _ in range(2)]
    bad = [np.ones(2, "f4"), np.full(2, np.inf, "f4")]
    out = [np.zeros(2, "f4") for _ in range(2)]
    counted = scaler.unscale(each for each in good), scaler.unscale((each for each in good), iter(out))
    return counted, scaler.unscale(each for each in bad), [each[0].item() for each in (*good, *out)]


def test_gradients_may_come_from_a_generator(world_of):
    assert world_of(2)(scaled_from_generators) == [((True, True), False, [2.0, 2.0, 0.5, 0.5])] * 2


def at_the_limits(comm, dtype, growth, backoff):
    """Return the scale after a good step at the largest, and after a bad one at the least."""
    good, bad = np.ones(1, "f4"), np.full(1, np.inf, "f4")
    most = LossScaler(comm, scale=np.array(2.0**15, dtype)[()], growth=growth, growth_interval=1)
    least = LossScaler(comm, scale=np.array(2.0**-14, dtype)[()], backoff=backoff)
    assert most.unscale([good])
    assert not least.unscale([bad])
    assert least.unscale([good])  # divides by it
    return most.scale, least.scale, good[0].item()


@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_the_scale_stays_where_float32_has_it_and_its_inverse(world_of, dtype):
    found = world_of(2)(at_the_limits, dtype, 2.0**200, 2.0**-200)
    assert found == [(2.0**126, 2.0**-126, 2.0**111)] * 2


def test_factors_of_a_narrow_type_are_as_pythons(world_of):
    """As a float16, 2 * 2**15 would be infinite, and 2**-14 * 2**-14 would be 0."""
    found = world_of(2)(at_the_limits, "f2", np.float16(2), np.float16(2.0**-14))
    assert found == [(2.0**16, 2.0**-28, 2.0**13)] * 2


def with_errors_of_numpy(comm):
    """Overflow and underflow on rank 0, where NumPy is to raise; the others must not wait for it."""
    large, small = np.full(2, 3e38 / (1 + comm.rank), "f4"), np.full(2, 1e-38, "f4")
    with np.errstate(all="raise"):
        sums = GradientAccumulation(comm, [large], 2, op="sum")
        sums.add([large])
        sums.add([large])
        LossScaler(comm).unscale([small])
        pairs = all_reduce_pairs(comm, np.array([1, 1]), large, 10)
    return sums.gradients[0].tolist(), pairs[1].tolist()


def test_no_error_of_numpy_is_raised_on_one_rank(world_of):
    assert world_of(2)(with_errors_of_numpy) == [([np.inf] * 2, [np.inf])] * 2


def agreed_by(comm):
    scaler = LossScaler(comm)
    gradients = [np.ones(1 << 16, "f4")]
    before = comm.stats()
    assert scaler.unscale(gradients)  # in place
    after = comm.stats()
    return (gradients[0] == 2.0**-16).all(), after["calls"] - before["calls"]


def test_agreement_is_one_tiny_call(world_of):
    assert world_of(2)(agreed_by) == [(True, 1)] * 2


def test_master_weights_keep_what_16_bits_would_lose():
    params = [np.ones(5, "f2"), np.ones((2, 2), "f2")]
    master = MasterWeights(params)
    seen = []
    for _ in range(8):
        for weight in master.weights:
            weight += 2.0**-13  # an eighth of the step from 1 to the next in float16
        master.store()
        seen.append(params[1][1, 1].item())
    assert seen == [1.0] * 4 + [1 + 2.0**-10] * 4  # rounded to nearest, and a tie to even
    assert all((param == seen[-1]).all() and param.dtype == "f2" for param in params)


# ---- wrong use ------------------------------------------------------------------------------------------


def wrong(comm, case):
    is_wrong, like = comm.rank == 0, [np.zeros(3, "f4")]
    if case == "every":
        return raised(LocalSGD, comm, like, 0 if is_wrong else 2)
    if case == "integers":
        return raised(GradientAccumulation, comm, [np.zeros(3, int)] if is_wrong else like, 2)
    if case == "op":
        return raised(GradientAccumulation, comm, like, 2, op="max" if is_wrong else "sum")
    if case == "list":
        return raised(GradientAccumulation(comm, like, 1).add, [[1, 2, 3]] if is_wrong else like)
    if case == "unscaled list":
        return raised(LossScaler(comm).unscale, [[1.0]] if is_wrong else like)
    if case == "scale":
        return raised(lambda: LossScaler(comm, scale=np.inf if is_wrong else 2.0).unscale(like))
    if case == "growth":
        return raised(lambda: LossScaler(comm, growth=0.5 if is_wrong else 2.0).unscale(like))
    if case == "broadcast":
        return raised(GradientAccumulation(comm, like, 1).add, [np.zeros((), "f4")] if is_wrong else like)
    if case == "out":
        return raised(LossScaler(comm).unscale, like, [np.zeros((2, 3), "f4")] if is_wrong else like)
    return raised(LossScaler(comm).unscale, [np.zeros(3, "f2")] if is_wrong else like)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("every", "ValueError: every is 0"),
        ("integers", "TypeError: the arrays are of dtype int64"),
        ("op", "ValueError: op is 'max'"),
        ("scale", "ValueError: scale inf"),
        ("growth", "ValueError: scale 65536.0, growth 0.5"),
        ("broadcast", "ValueError: gradients are float32(); they must be float32(3,)"),
        ("list", "TypeError: a list instead"),
        ("unscaled list", "TypeError: a list instead"),
        ("out", "ValueError: out has arrays of shapes [(2, 3)]"),
        ("underflow", "TypeError: unscaled gradients would underflow"),
    ],
)
def test_wrong_use_is_an_error_and_no_rank_hangs(world_of, case, expected):
    first, second = world_of(2)(wrong, case)
    assert first.startswith(expected)
    assert second.startswith("Mismatch")


def unlike(comm):
    like = [np.zeros(3, "f4")]
    found = [
        raised(LocalSGD, comm, like, 2 + comm.rank),
        raised(GradientAccumulation, comm, like, 2 + comm.rank),
        raised(lambda: LossScaler(comm, scale=2.0 + comm.rank)),
    ]
    comm.barrier()
    return found


def give_another_order(comm, make):
    arrays = [np.zeros(2), np.zeros(4)][:: -1 if comm.rank == 2 else 1]
    error = raised(make, comm, arrays, SGD(1) if make is ShardedOptimizer else 1)
    comm.barrier()
    return error


@pytest.mark.parametrize(
    "make", [LocalSGD, GradientAccumulation, ShardedOptimizer], ids=lambda each: each.__name__
)
def test_arrays_in_another_order_are_refused_by_all(world_of, make):
    for error in world_of(3)(give_another_order, make):
        assert error.startswith(
            "ValueError: the shapes or dtypes of the arrays, or their order, on ranks [2]"
        )


def test_values_that_must_be_equal_are_compared(world_of):
    assert (
        world_of(2)(unlike)
        == [
            [
                "ValueError: every is 2, 3 by rank; it must be the same on all",
                "ValueError: every is 2, 3 by rank; it must be the same on all",
                "ValueError: scale is 2, 3 by rank; it must be the same on all",
            ]
        ]
        * 2
    )
