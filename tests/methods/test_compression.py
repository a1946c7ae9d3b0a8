"""Compressed gradients: the same bits on every rank, within the bound of the format, and right in the long
run, as error feedback adds the loss to the next call."""

import functools
import gc
import signal
import tempfile
import time
import traceback
import weakref

import numpy as np
import pytest

import shmring
from shmring.methods import compression
from shmring.methods.compression import BF16, FP16, ErrorFeedback, Int8, PowerSGD, TopK

FORMATS = {
    "fp16": FP16,
    "bf16": BF16,
    "int8": Int8,
    "int8 stochastic": functools.partial(Int8, stochastic=True, seed=3),
    "top-k": functools.partial(TopK, 0.1),
    "PowerSGD": functools.partial(PowerSGD, 2),
}
SHAPES = [(), (0,), (1,), (40, 30), (257,), (5, 7, 3), (0, 4)]


def gradients(rank, dtype="f4", step=0):
    rng = np.random.default_rng([rank, step])
    return [np.array(rng.standard_normal(shape), dtype) for shape in SHAPES]


def exact(size, op, dtype="f4"):
    """Return the exact results."""
    total = [sum(xs) for xs in zip(*(gradients(rank, "f8") for rank in range(size)), strict=True)]
    return [x / (size if op == "avg" else 1) for x in total]


def one_by_one_and_together(comm, name, op, dtype):
    """The bits of both, and whether the counts agree with each other."""
    alone, together = gradients(comm.rank, dtype), gradients(comm.rank, dtype)
    for x in alone:
        compressor = FORMATS[name]()
        compressor.all_reduce(comm, x, op)
    compressor = FORMATS[name]()
    reduction = compressor.all_reduce_many(comm, together, op, async_op=True)
    reduction.wait(30)
    reduction.wait()  # a second time: nothing
    assert compressor.bytes_given == sum(x.nbytes for x in together)
    assert compressor.ratio == compressor.bytes_given / compressor.bytes_sent
    return alone, together, compressor.ratio


def assert_same_bits(results):
    for other in results[1:]:
        assert [x.tobytes() for x in other] == [x.tobytes() for x in results[0]]


@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_agree_to_the_last_bit(world_of, size, name, op):
    for dtype in ("f4", "f8"):
        results = world_of(size)(one_by_one_and_together, name, op, dtype)
        for number in range(2):
            assert_same_bits([result[number] for result in results])
        assert results[0][2] > (1.2 if dtype == "f4" else 2)


# Error bound of one call, as a share of the largest element that a rank gave, times the ranks.
BOUNDS = {"fp16": 2.0**-10, "bf16": 2.0**-7, "int8": 1 / 120, "int8 stochastic": 2 / 120}


@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_rounded_is_as_near_as_the_format_says(world_of, name, op):
    size = 3
    for result in world_of(size)(one_by_one_and_together, name, op, "f4"):
        for got in result[:2]:
            for x, want in zip(got, exact(size, op), strict=True):
                largest = 4.0 * (1 if op == "avg" else size)
                assert np.abs(x - want).max(initial=0) <= 2 * BOUNDS[name] * largest
                assert x.shape == want.shape


def half(x, name):
    if name == "fp16":
        return x.astype("f2").astype("f4")
    bits = x.view("u4").astype("u8")
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype("u4").view("f4")


def halves(comm, name):
    x = gradients(comm.rank)[3]
    FORMATS[name]().all_reduce(comm, x, "sum")
    return x


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_halves_are_added_in_float32_and_rounded_once(world_of, name):
    xs = [half(gradients(rank)[3], name) for rank in range(3)]
    for got in world_of(3)(halves, name):
        assert got.tobytes() == half(xs[0] + xs[1] + xs[2], name).tobytes()


LARGE = 40_000  # elements: more than what is sent uncompressed between hosts


def large_sums(comm, nodes):
    """Return results of FP16 whose sums by host overflow."""
    average, total, given = (np.full(LARGE, value, "f4") for value in (40_000, 40_000, 1))
    if nodes[comm.rank] == 1:
        total *= -1
    given[comm.rank] = np.inf
    FP16().all_reduce(comm, average)
    FP16().all_reduce(comm, total, "sum")
    FP16().all_reduce(comm, given)
    return np.unique(average).tolist(), np.unique(total).tolist(), np.flatnonzero(np.isinf(given)).tolist()


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_a_sum_of_one_host_that_overflows_does_no_harm(world_over_hosts, nodes):
    for result in world_over_hosts(nodes)(large_sums, nodes):
        assert result == ([40_000.0], [0.0], [0, 1, 2, 3])


def largest_only(comm):
    x = np.zeros(1000, "f4")
    x[: comm.rank + 9] = 1 + np.arange(comm.rank + 9)
    x[500 + comm.rank] = -1000 - comm.rank
    whole = x.copy()
    compressor = TopK(0.01)
    compressor.all_reduce(comm, x, "sum")
    sent = compressor.bytes_sent
    TopK(1).all_reduce(comm, whole, "sum")
    return x, whole, sent


def test_the_largest_arrive_whole_and_the_others_not(world_of):
    for x, whole, sent in world_of(2)(largest_only):
        assert x[500] == -1000
        assert x[501] == -1001
        assert x[8] == 18  # 9 of both ranks, at a place that both sent
        assert x[0] == 1  # of 10, rank 1 sends 10 … 2 and its -1001
        assert sent == 11 * 8
        assert whole[0] == 2
        assert np.count_nonzero(whole) == 12


def low_rank(comm, nsteps):
    """Reduce a gradient whose average has rank 2: the power iteration finds it."""
    rng = np.random.default_rng(1)
    want = rng.standard_normal((60, 2)) @ rng.standard_normal((2, 50))
    own = want + (comm.rank - (comm.size - 1) / 2) * rng.standard_normal((60, 50))
    compressor, x = PowerSGD(2), np.empty((60, 50), "f4")
    for _ in range(nsteps):
        x[:] = own
        compressor.all_reduce(comm, x)
    return float(np.abs(x - want).max() / np.abs(want).max()), compressor.bytes_sent, x


def test_the_power_iteration_finds_a_matrix_of_low_rank(world_of):
    results = world_of(3)(low_rank, 4)
    assert_same_bits([[x] for _, _, x in results])
    for error, sent, _ in results:
        assert error < 1e-5
        assert sent == 4 * 4 * 2 * (60 + 50)


def in_two_shapes(comm):
    """The same memory as a matrix of other widths, which has a factor of its own."""
    x, compressor = np.empty((60, 50), "f4"), PowerSGD(1)
    for shape in ((60, 50), (50, 60), (60, 50)):
        x[:] = 3
        compressor.all_reduce(comm, x.reshape(shape))
    return float(np.abs(x - 3).max())


def test_a_matrix_may_change_its_shape(world_of):
    assert max(world_of(2)(in_two_shapes)) < 1e-5


def by_the_wire(comm):
    """Return the bits of a matrix after calls with others of its size, and of one without."""
    comm.wire = "int8"
    given = np.random.default_rng(comm.rank).standard_normal((3, 100_000, 2)).astype("f4")
    compressor, found = PowerSGD(1), given[-1].copy()
    for matrix in given:
        compressor.all_reduce(comm, matrix)
    PowerSGD(1).all_reduce(comm, found)
    return given[-1].tobytes() == found.tobytes()


def test_what_the_wire_rounds_off_a_factor_is_not_added_to_others(world_over_hosts):
    assert world_over_hosts([0, 1])(by_the_wire) == [True, True]


def vectors_and_matrices(comm):
    """Those that do not pay are reduced as they are."""
    xs = [np.full(100, 1 / 3), np.full((2, 2), comm.rank + 0.1), np.full((20, 30), comm.rank, "f4")]
    PowerSGD(1).all_reduce_many(comm, xs)
    return xs


def test_vectors_and_small_matrices_are_sent_uncompressed(world_of):
    for vector, small, matrix in world_of(2)(vectors_and_matrices):
        assert (vector == (1 / 3 + 1 / 3) / 2).all()
        assert (small == (0.1 + 1.1) / 2).all()
        assert np.abs(matrix - 0.5).max() < 1e-6


# ---- feedback ---------------------------------------------------------------------------------------------


def mean_over_calls(comm, name, with_feedback, ncalls):
    """Return the distance from the exact average, as a share of its largest element."""
    compressor = FORMATS[name]()
    if with_feedback:
        compressor = ErrorFeedback(compressor)
    given = gradients(comm.rank)
    xs, totals = gradients(comm.rank), [np.zeros(x.shape) for x in given]
    for _ in range(ncalls):
        for x, value in zip(xs, given, strict=True):
            x[...] = value
        compressor.all_reduce_many(comm, xs)
        for x, total in zip(xs, totals, strict=True):
            total += x
    errors = [t / ncalls - e for t, e in zip(totals, exact(comm.size, "avg"), strict=True)]
    return max(np.abs(error).max(initial=0) for error in errors), compressor.bytes_sent


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "top-k", "PowerSGD"])
def test_losses_are_sent_with_later_calls(world_of, name):
    ranks = world_of(3)
    without, sent = ranks(mean_over_calls, name, False, 40)[0]
    fed_back, also_sent = ranks(mean_over_calls, name, True, 40)[0]
    # The sum of halves is rounded as well, and that loss is not fed back.
    assert 0 < fed_back < without / (1.5 if name in ("fp16", "bf16") else 3), (fed_back, without)
    if name == "int8":  # only the loss of the last call
        assert fed_back < 4 / 127 / 40
    assert also_sent == sent


def stochastically(comm):
    """The mean of many roundings of the same values, without feedback."""
    compressor, total = FORMATS["int8 stochastic"](), np.zeros(257)
    for _ in range(300):
        x = gradients(comm.rank)[4]
        compressor.all_reduce(comm, x)
        total += x
    return np.abs(total / 300 - exact(comm.size, "avg")[4]).max()


def test_stochastic_rounding_is_right_on_average(world_of):
    (once,) = (1 / 127 * 3,)  # a step of the scale
    assert max(world_of(2)(stochastically)) < once / 5


def memory_of_its_own(comm):
    """Views of one gradient have their feedback; a new array at an old place has none."""
    compressor = ErrorFeedback(TopK(0.5))
    flat = np.array([4, 1, 0, 0], "f4")
    for _ in range(2):
        flat[:] = 4, 1, 0, 0
        compressor.all_reduce(comm, flat[:2])
    kept = flat[1]
    del flat
    fresh = np.array([4, 1, 0, 0], "f4")
    compressor.all_reduce(comm, fresh[:2])
    return float(kept), float(fresh[1])


def test_feedback_belongs_to_the_memory(world_of):
    assert world_of(2)(memory_of_its_own) == [(0.0, 0.0)] * 2


class Interfaced:
    """Memory whose owner has neither a size nor a buffer."""

    def __init__(self, count):
        self._memory = np.zeros(count, "f4")
        self.__array_interface__ = self._memory.__array_interface__


def memmap(comm, count):
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, "f4", "w+", shape=(count,))


LAYERS = [300, 300, 300, 300, 300, 10, 2]
PLACES = {
    "shared": lambda comm, count: comm.zeros(count, "f4"),
    "memmap": memmap,
    "interface": lambda comm, count: np.asarray(Interfaced(count)),
}


def in_layers(comm, flat):
    """Return the results of calls with views of one array, whose errors are those of the earlier calls."""
    ends = np.cumsum(LAYERS)
    layers = [flat[end - length : end] for length, end in zip(LAYERS, ends, strict=True)]
    compressor, found = ErrorFeedback(Int8()), []
    for _ in range(3):
        flat[:] = np.random.default_rng(comm.rank).standard_normal(len(flat))
        compressor.all_reduce_many(comm, layers)
        found.append(flat.tobytes())
    return found


def feedback_by_place(comm, place):
    plain = in_layers(comm, np.zeros(sum(LAYERS), "f4"))
    assert plain[0] != plain[1]
    return plain == in_layers(comm, PLACES[place](comm, sum(LAYERS)))


@pytest.mark.parametrize("place", PLACES)
def test_feedback_of_views_does_not_depend_on_the_owner_of_the_memory(world_of, place):
    assert world_of(2)(feedback_by_place, place) == [True, True]


class EndsAtTheSum:
    """A communicator that this rank ends instead of a call of all_reduce."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_reduce(self, *arguments, **keywords):
        self._comm.abort("no sum")
        raise shmring.Aborted("no sum")


def after_a_failed_call(comm):
    given = np.random.default_rng(comm.rank).standard_normal((40, 30)).astype("f4")
    x, fresh, compressor = given.copy(), given.copy(), ErrorFeedback(PowerSGD(1))
    ending = comm.dup()
    with pytest.raises(shmring.Aborted):
        compressor.all_reduce(EndsAtTheSum(ending) if comm.rank else ending, x)
    assert x.tobytes() == given.tobytes()
    compressor.all_reduce(comm, x)
    ErrorFeedback(PowerSGD(1)).all_reduce(comm, fresh)
    return x.tobytes() == fresh.tobytes()


def test_a_failed_call_keeps_no_errors(world_of):
    assert world_of(2)(after_a_failed_call) == [True, True]


def overflow(comm, name):
    """Make one call with an infinity and a NaN, then ordinary calls."""
    compressor = ErrorFeedback(FORMATS[name]())
    x = np.ones((40, 30), "f4")
    x[3, 5] = np.inf
    x.view("u4")[20, 1] = 0xFFFFFFFF  # a NaN to which nothing can be added
    compressor.all_reduce(comm, x)
    seen = [bool(np.isnan(x[20, 1])), bool(np.isfinite(x[3, 5])), int(np.isnan(x).sum())]
    for _ in range(30):
        x[:] = 1
        compressor.all_reduce(comm, x)
    return seen, float(np.abs(x).max())


@pytest.mark.parametrize("name", FORMATS)
def test_an_overflow_shows_and_is_forgotten(world_of, name):
    for (is_nan, is_finite, nnans), largest in world_of(2)(overflow, name):
        assert is_nan
        assert not is_finite
        if name.startswith("int8"):
            assert nnans == 2 * 256
        assert 0.9 < largest < 20


# ---- with others ------------------------------------------------------------------------------------------


def in_buckets(comm, nbytes, name):
    compressor = ErrorFeedback(FORMATS[name]())
    bucketer = shmring.Bucketer(comm, nbytes=nbytes, compressor=compressor)
    xs = gradients(comm.rank)
    for step in range(3):
        for x, value in zip(xs, gradients(comm.rank, step=step), strict=True):
            x[...] = value
            bucketer.add(x)
        bucketer.wait()
    return xs, compressor.bytes_given


@pytest.mark.parametrize("nbytes", [1, 3000, 1 << 20])
@pytest.mark.parametrize("name", ["bf16", "int8", "PowerSGD"])
def test_buckets_are_compressed(world_of, name, nbytes):
    results = world_of(3)(in_buckets, nbytes, name)
    assert_same_bits([xs for xs, _ in results])
    assert results[0][1] == 3 * sum(x.nbytes for x in gradients(0))


def over_the_wire(comm, name):
    """Return the bytes that left this host, relative to a plain all_reduce."""
    rng = np.random.default_rng(comm.rank)
    x = rng.standard_normal((500, 400)).astype("f4")
    plain = x.copy()
    begin = comm.stats()["bytes_over_wire"]
    comm.all_reduce(plain, "avg")
    between = comm.stats()["bytes_over_wire"]
    FORMATS[name]().all_reduce(comm, x)
    return x, (between - begin, comm.stats()["bytes_over_wire"] - between)


# int8: a quarter, and a scale for each block. top-k: 8 bytes for 4, of a tenth. PowerSGD: 900 of 100,000.
@pytest.mark.parametrize(
    ("name", "least"), [("fp16", 1.9), ("bf16", 1.9), ("int8", 3.8), ("top-k", 4.9), ("PowerSGD", 50)]
)
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1)], ids=["1+1", "2+2"])
def test_fewer_bytes_cross_the_wire(world_over_hosts, nodes, name, least):
    results = world_over_hosts(nodes)(over_the_wire, name)
    assert_same_bits([[x] for x, _ in results])
    if nodes == (0, 1):  # beyond, all_to_all and all_gather bring every rank's to every rank
        plain, compressed = (sum(counts) for counts in zip(*(nbytes for _, nbytes in results), strict=True))
        assert plain >= least * compressed


def in_the_background(comm):
    """Several under way at once, with one compressor; waited for in one order."""
    compressor = Int8()
    xs = [np.full(1000 + number, comm.rank + number, "f4") for number in range(5)]
    reductions = [compressor.all_reduce(comm, x, async_op=True) for x in xs]
    for reduction in reversed(reductions):
        reduction.wait()
    return [float(np.abs(x - number - (comm.size - 1) / 2).max()) for number, x in enumerate(xs)]


def test_several_at_once(world_of):
    for errors in world_of(3)(in_the_background):
        assert max(errors) < 0.1


# ---- refusals ---------------------------------------------------------------------------------------------

WRONG = {
    "a list": (lambda: [1.0, 2.0], "avg", TypeError, "instead of a NumPy array"),
    "masked": (lambda: np.ma.ones(3, "f4"), "avg", TypeError, "mask would be ignored"),
    "integers": (lambda: np.arange(3), "avg", TypeError, "int64"),
    "columns": (lambda: np.ones((4, 4), "f4")[:, :2], "avg", ValueError, "contiguous"),
    "read-only": (lambda: np.broadcast_to(np.float32(1), (1,)), "avg", ValueError, "read-only"),
    "max": (lambda: np.ones(3, "f4"), "max", ValueError, "op is 'max'"),
}


def refused(comm, name, compressor):
    make, op, error, words = WRONG[name]
    if comm.rank == 0:
        with pytest.raises(error, match=words):
            FORMATS[compressor]().all_reduce(comm, make(), op)
        return "refused"
    with pytest.raises(shmring.Mismatch):
        FORMATS[compressor]().all_reduce(comm, np.ones((30, 30), "f4"))
    return "told"


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("compressor", ["fp16", "int8", "top-k", "PowerSGD"])
def test_wrong_arguments_are_refused_and_no_rank_hangs(world_of, name, compressor):
    assert world_of(2)(refused, name, compressor) == ["refused", "told"]


def unequal(comm, compressor):
    begun = []

    def reduce():
        x = np.ones(1000 + comm.rank, "f4")
        begun.append(FORMATS[compressor]().all_reduce(comm, x, async_op=True))
        begun[0].wait()

    with pytest.raises((shmring.Mismatch, ValueError)):
        reduce()
    for reduction in begun:  # a second wait must not look like a success
        with pytest.raises((shmring.Mismatch, ValueError)):
            reduction.wait()


@pytest.mark.parametrize("compressor", FORMATS)
def test_arrays_of_other_lengths_are_noticed(world_of, compressor):
    world_of(3)(unequal, compressor)


# By rank: arrays of as many elements in total.
SAME_TOTALS = {
    "order": [[(30, 40), (50, 60)], [(50, 60), (30, 40)]],
    "transposed": [[(30, 40), (40, 30)], [(40, 30), (30, 40)]],
    "number": [[(20, 40), (20, 40)], [(40, 40)]],
    "sizes": [[(20, 40), (20, 40)], [(10, 40), (30, 40)]],
}


def of_the_same_total(comm, compressor, what, way):
    xs = [np.ones(shape, "f4") for shape in SAME_TOTALS[what][comm.rank]]
    one = FORMATS[compressor]()

    def reduce():
        if way == "bucketer":
            bucketer = shmring.Bucketer(comm, compressor=one)
            for x in xs:
                bucketer.add(x)
            bucketer.wait()
        else:
            one.all_reduce_many(comm, xs)

    with pytest.raises((shmring.Mismatch, ValueError)):
        reduce()
    assert all((x == 1).all() for x in xs)


@pytest.mark.parametrize("way", ["all_reduce_many", "bucketer"])
@pytest.mark.parametrize(
    ("compressor", "what"),
    [
        *((name, what) for name in FORMATS for what in ("order", "number", "sizes") if name != "PowerSGD"),
        *(("PowerSGD", what) for what in ("order", "transposed", "sizes")),
    ],
)
def test_arrays_of_the_same_total_in_another_order_are_noticed(world_of, compressor, what, way):
    world_of(2)(of_the_same_total, compressor, what, way)


def wait_again(comm, kind):
    """Return the errors of three waits, the frames of the last two, and whether the array is freed."""
    gc.disable()
    try:
        x = np.ones(1000 + (kind is ValueError and comm.rank), "f4")
        freed, found, frames = weakref.ref(x), [], []
        reduction = Int8().all_reduce(comm, x, async_op=True)
        if kind is KeyboardInterrupt:
            reduction._steps = (signal.raise_signal(signal.SIGINT) for _ in range(1))
        for _ in range(3):
            try:
                reduction.wait()
            except BaseException as error:
                found.append(repr(error))
                frames.append(len(list(traceback.walk_tb(error.__traceback__))))
        del x, reduction
        return found, frames[1:], freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        (ValueError, "ValueError('ranks gave different ops or numbers"),
        (KeyboardInterrupt, "Aborted('an earlier wait failed: KeyboardInterrupt"),
    ],
)
def test_a_reduction_that_failed_keeps_neither_arrays_nor_frames(world_of, kind, second):
    for found, (one, other), is_freed in world_of(2)(wait_again, kind):
        assert found[0].startswith(kind.__name__)
        assert found[1].startswith(second)
        assert found[1:] == found[1:2] * 2
        assert one == other
        assert is_freed


class InterruptedAfter:
    """A communicator whose run_steps raises KeyboardInterrupt as it returns, like Ctrl-C at that moment."""

    def __init__(self, comm):
        self._comm = comm

    def run_steps(self, *arguments, **keywords):
        self._comm.run_steps(*arguments, **keywords)
        raise KeyboardInterrupt


def waited_for_twice(comm):
    """Return the result of a Reduction whose wait is interrupted on rank 1, and that of another one."""
    x = np.random.default_rng(comm.rank).standard_normal((40, 30)).astype("f4")
    undisturbed = x.copy()
    PowerSGD(1).all_reduce(comm, undisturbed)
    reduction = PowerSGD(1).all_reduce(comm, x, async_op=True)
    if comm.rank == 1:
        reduction._comm = InterruptedAfter(comm)
        with pytest.raises(KeyboardInterrupt):
            reduction.wait()
        reduction._comm = comm
    else:
        time.sleep(0.3)  # rank 1 must not find the next collective finished when it waits again
    reduction.wait()
    return x.tobytes() == undisturbed.tobytes()


def test_an_interrupted_wait_can_be_repeated(world_of):
    assert world_of(2)(waited_for_twice) == [True, True]


def unlike(comm, compressor, what):
    """An op, or no elements, on rank 1 alone; alike on all it works."""
    one = FORMATS[compressor]()
    one.all_reduce(comm, np.empty(0, "f4"))
    x = np.ones(0 if what == "empty" and comm.rank else 1000, "f4")
    with pytest.raises((shmring.Mismatch, ValueError)):
        one.all_reduce(comm, x, "sum" if what == "op" and comm.rank else "avg")


@pytest.mark.parametrize("compressor", FORMATS)
@pytest.mark.parametrize("what", ["op", "empty"])
def test_ranks_that_want_something_else_are_reported(world_of, compressor, what):
    world_of(2)(unlike, compressor, what)


def of_other_widths(comm, compressor):
    x = np.random.default_rng(comm.rank).standard_normal((40, 30)).astype("f8" if comm.rank else "f4")
    FORMATS[compressor]().all_reduce(comm, x)
    return [x.astype("f8")]


@pytest.mark.parametrize("compressor", FORMATS)
def test_it_is_worked_on_in_float32_whatever_the_array(world_of, compressor):
    assert_same_bits(world_of(2)(of_other_widths, compressor))


@pytest.mark.parametrize("inner", [FP16, None, ErrorFeedback(FP16())])
def test_feedback_goes_around_a_format(inner):
    with pytest.raises(TypeError, match="is not a format"):
        ErrorFeedback(inner)


@pytest.mark.filterwarnings("error")
def test_an_overflow_is_no_warning(world_of):
    for name in FORMATS:
        assert world_of(2)(overflow, name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(0),
        lambda: TopK(1.5),
        lambda: PowerSGD(0),
        lambda: PowerSGD(seed=-1),
        lambda: Int8(stochastic=True, seed=-1),
    ],
)
def test_settings_that_make_no_sense(make):
    with pytest.raises(ValueError, match="must be"):
        make()


@pytest.mark.parametrize(
    "make", [lambda: PowerSGD(1.5), lambda: PowerSGD(seed=None), lambda: Int8(stochastic=True, seed="1")]
)
def test_numbers_that_are_no_integers(make):
    with pytest.raises(TypeError, match="integer"):
        make()


def test_every_format_is_public():
    assert set(compression.__all__) >= {type(make()).__name__ for make in FORMATS.values()}
