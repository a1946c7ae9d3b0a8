"""Sums in a wire format between hosts: bf16 and fp16 bit for bit, int8 within its bound, the same on all
ranks. The next call of the same array also sends what rounding lost. Refused arguments.

Hosts are names here, and the network is loopback: see conftest.world_over_hosts.
"""

import itertools
import tracemalloc

import numpy as np
import pytest
from cases import DTYPES, expected, numbers, refusals_of, rng_of

import shmring
from tests.internode.test_internode_collectives import LAYOUTS, TINY_SLICE
from tests.unit.test_casts import as_it_arrives, as_it_travels

WIRES = ("bf16", "fp16", "int8")
BY_ITEM = ("bf16", "fp16")
THREE = ("1+1", "2+2", "2+1+3")
PARTS = 2 * TINY_SLICE  # bytes from which on each of two hosts folds a part
COUNTS = (33, 2047, 2048, 9001, 30_011)  # of float32: the first that is not small, around PARTS, fragments
UNIT = {
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
    "int8": 1 / 254,
}  # units of rounding: of an item, or of the largest item of a block
LEAST = {"bf16": 2.0**-134, "fp16": 2.0**-25, "int8": 2.0**-127}  # half of the least there is
UNIT_OF_DTYPE = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
LEAST_OF_DTYPE = {
    "float16": 2.0**-25,
    "bfloat16": 2.0**-134,
    "float8_e4m3fn": 2.0**-10,
    "float8_e5m2": 2.0**-17,
}
INT8_BLOCK = 256


def values_of(count, rank, dtype="float32"):
    return rng_of("travels", count, rank).normal(size=count).astype("f4").astype(DTYPES[dtype])


# ---- expected results -------------------------------------------------------------------------------------


def rounded(wire, x):
    """With nothing kept of earlier calls, which makes 0 of -0."""
    return as_it_arrives(wire, as_it_travels(wire, x + np.float32(0)), len(x))


def partials_of(xs, nodes):
    """Return the partial result of each host, in float32."""
    xs = [x.astype("f4") for x in xs]
    hosts = dict.fromkeys(nodes)
    return [
        expected("float32", "sum", [x for x, at in zip(xs, nodes, strict=True) if at == host])
        for host in hosts
    ]


def are_in_parts(nodes, nbytes, kind="all_reduce"):
    """Return whether each host folds a part for all; else each folds everything that it needs."""
    return len(set(nodes)) > 2 or (kind == "all_reduce" and nbytes >= PARTS)


@np.errstate(all="ignore")
def allowed_of(wire, op, xs, nodes, kind="all_reduce", root=0):
    """Return the possible results: an array for each host that may have folded, with its own partial result
    unrounded."""
    partials, dtype, in_parts = partials_of(xs, nodes), xs[0].dtype, are_in_parts(nodes, xs[0].nbytes, kind)
    hosts = list(dict.fromkeys(nodes))
    arrived = [rounded(wire, partial) for partial in partials]
    found = []
    for folder in range(len(hosts)) if in_parts or kind == "all_reduce" else [hosts.index(nodes[root])]:
        keeps = in_parts or kind == "reduce"
        terms = [partials[i] if i == folder and keeps else arrived[i] for i in range(len(hosts))]
        total = expected("float32", op, terms, len(nodes))
        found.append((rounded(wire, total) if in_parts and dtype == "f4" else total).astype(dtype))
    return found


def assert_allowed(got, allowed, context):
    """Bit for bit one of them, any NaN for any NaN."""
    bits = f"u{got.itemsize}"
    fits = np.zeros(len(got), bool)
    for want in allowed:
        with np.errstate(invalid="ignore"):
            fits |= (got.view(bits) == want.view(bits)) | (
                np.isnan(got.astype("f8")) & np.isnan(want.astype("f8"))
            )
    at = np.flatnonzero(~fits)
    assert not at.size, (context, len(at), at[:3], got[at[:3]], [want[at[:3]] for want in allowed])


def bound_of(wire, xs, nodes, divisor=1):
    """Return the largest difference from the exact result: the partial results are rounded once, and the sum
    once."""
    partials = [partial.astype("f8") for partial in partials_of(xs, nodes)]
    total = np.sum(partials, axis=0)
    terms = [np.abs(term) for term in (*partials, total)]
    if wire == "int8":
        terms = [np.full(len(total), term.max()) for term in terms]
    once = sum(terms) * UNIT[wire] * (1 + 4 * UNIT[wire]) + len(terms) * LEAST[wire]
    in_float32 = len(xs) * 2.0**-23 * np.sum([np.abs(x.astype("f8")) for x in xs], axis=0)
    return once / divisor, (in_float32 + 2.0**-149) / divisor


def exact_sum(xs):
    return np.sum([x.astype("f8") for x in xs], axis=0)


def assert_near(got, wire, op, xs, nodes, context, calls=1):
    """Check the distance. calls: `got` is the mean of so many calls, with feedback; later calls made up for
    all but one rounding."""
    divisor = len(xs) if op == "avg" else 1
    once, in_float32 = bound_of(wire, xs, nodes, divisor)
    want = exact_sum(xs) / divisor
    bound = once / calls + in_float32
    name = xs[0].dtype.name
    if name in UNIT_OF_DTYPE:
        bound += UNIT_OF_DTYPE[name] * (np.abs(want) + bound) + LEAST_OF_DTYPE[name]
    off = np.abs(got.astype("f8") - want)
    at = int(np.argmax(off - bound))
    assert (off <= bound).all(), (context, at, got[at], want[at], bound[at])


# ---- sums -------------------------------------------------------------------------------------------------


def first_results(comm, wire, counts, dtype, kind, op, given):
    """Return the results for an array of each count; given: how the call gets the format."""
    found = []
    comm.wire = wire if given == "comm" else "native"
    keywords = {"wire": wire} if given == "call" else {}
    for count in counts:
        x = values_of(count, comm.rank, dtype)
        before = x.copy()
        out = np.zeros_like(x)
        if kind == "reduce":
            comm.reduce(x, op, comm.size - 1, out=out, **keywords)
        else:
            comm.all_reduce(x, op, out=out, **keywords)
        assert (x == before).all()
        if kind == "all_reduce":
            x = x.copy()
            comm.all_reduce(x, op, **keywords)
            assert (x.view("u1") == out.view("u1")).all(), "in place and into out differ"
        found.append(out)
    comm.wire = "native"
    return found


def check_first_results(ranks, layout, wire, dtype="float32", kind="all_reduce", op="sum", given="call"):
    nodes = LAYOUTS[layout]
    results = ranks(first_results, wire, COUNTS, dtype, kind, op, given)
    for number, count in enumerate(COUNTS):
        context = (layout, wire, dtype, kind, op, count)
        xs = [values_of(count, rank, dtype) for rank in range(len(nodes))]
        if xs[0].nbytes <= TINY_SLICE // 32:
            continue
        got = results[-1][number]
        assert_near(got, wire, op, xs, nodes, context)
        if wire in BY_ITEM:
            assert_allowed(got, allowed_of(wire, op, xs, nodes, kind, len(nodes) - 1), context)
        for rank in range(len(nodes) if kind == "all_reduce" else 0):
            assert results[rank][number].tobytes() == got.tobytes(), (context, rank)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("layout", THREE)
def test_sums_are_what_the_format_says_and_the_same_everywhere(world_over_hosts, layout, wire):
    ranks = world_over_hosts(LAYOUTS[layout], SHMRING_WIRE_SLICE=TINY_SLICE)
    for kind, op in itertools.product(("all_reduce", "reduce"), ("sum", "avg")):
        check_first_results(ranks, layout, wire, kind=kind, op=op)
    check_first_results(ranks, layout, wire, given="comm")


@pytest.mark.parametrize("dtype", UNIT_OF_DTYPE)
@pytest.mark.parametrize("layout", THREE)
def test_sums_of_shorter_floats(world_over_hosts, layout, dtype):
    """Partial results are float32 and are sent in a shorter format; results are sent in their own format."""
    ranks = world_over_hosts(LAYOUTS[layout], SHMRING_WIRE_SLICE=TINY_SLICE)
    for wire in WIRES:
        check_first_results(ranks, layout, wire, dtype)


def test_fragments_of_full_length(world_over_hosts):
    nodes, count = LAYOUTS["2+1+3"], 1_200_007
    xs = [values_of(count, rank) for rank in range(len(nodes))]
    for wire in WIRES:
        results = world_over_hosts(nodes)(
            first_results, wire, [count], "float32", "all_reduce", "sum", "call"
        )
        assert_near(results[0][0], wire, "sum", xs, nodes, wire)
        assert len({result[0].tobytes() for result in results}) == 1


# ---- error feedback ---------------------------------------------------------------------------------------


class Place:
    """An array's base at an address that another object keeps."""

    def __init__(self, room):
        self.__array_interface__ = room.__array_interface__


def call_in_a_way(comm, x, way, **keywords):
    if way == "background":
        comm.all_reduce(x, async_op=True, **keywords).wait()
    elif way == "view":
        comm.all_reduce(x[:], **keywords)
    else:
        comm.all_reduce(x, **keywords)


def results_of(comm, wire, count, times, way, given_op="sum"):
    """Return the results of `times` calls with the same values; way: of calling, or the memory of x."""
    values = values_of(count, comm.rank)
    x = comm.empty(count, "f4") if way == "shared" else np.empty(count, "f4")
    plan = comm.plan("all_reduce", x, given_op, wire=wire) if way == "plan" else None
    found = []
    for _ in range(times):
        if way == "fresh":
            x = np.empty(count, "f4")
        x[...] = values
        if plan is not None:
            plan()
        else:
            call_in_a_way(comm, x, way, op=given_op, wire=wire)
        found.append(x.copy())
    return found


def mean_after(comm, *how):
    found = results_of(comm, *how)
    return [np.mean(found[:calls], axis=0, dtype="f8") for calls in (1, len(found))]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("layout", THREE)
def test_the_mean_converges_with_the_same_array_and_only_then(world_over_hosts, layout, wire):
    nodes, times = LAYOUTS[layout], 40
    ranks = world_over_hosts(nodes, SHMRING_WIRE_SLICE=TINY_SLICE)
    for count, op in ((1900, "sum"), (9001, "sum"), (9001, "avg")):
        xs = [values_of(count, rank) for rank in range(len(nodes))]
        want = exact_sum(xs) / (len(nodes) if op == "avg" else 1)
        first, mean = ranks(mean_after, wire, count, times, "same", op)[0]
        assert_near(mean, wire, op, xs, nodes, (wire, count, op), times)
        assert np.abs(mean - want).max() < np.abs(first - want).max() / (times / 4)
        first, mean = ranks(mean_after, wire, count, times, "fresh", op)[0]
        assert np.abs(mean - want).max() > np.abs(first - want).max() * 0.99


def all_ways(comm, wire, count):
    ways = ("same", "background", "plan", "view", "shared")
    return {way: [x.tobytes() for x in results_of(comm, wire, count, 4, way)] for way in ways}


@pytest.mark.parametrize("layout", ["1+1", "2+1+3"])
def test_every_way_of_calling_comes_to_the_same_bits(world_over_hosts, layout):
    ranks = world_over_hosts(LAYOUTS[layout], SHMRING_WIRE_SLICE=TINY_SLICE)
    for wire in WIRES:
        found = ranks(all_ways, wire, 9001)
        assert all(results == found[0]["same"] for of_rank in found for results in of_rank.values())
        assert len(set(found[0]["same"])) > 1, "nothing was kept"


def in_turns(comm, count):
    """Results of x alone, and of x with another array between, and with another part of its memory."""
    values, other = values_of(count, comm.rank), values_of(count, comm.rank + 100)
    found = []
    for between in (False, True):
        whole = np.empty(2 * count, "f4")
        x, y, z = whole[:count], whole[count:], np.empty(count, "f4")
        found.append([])
        for _ in range(5):
            for array in (y, z) if between else ():
                array[...] = other
                comm.all_reduce(array, wire="int8")
            x[...] = values
            comm.all_reduce(x, wire="int8")
            found[-1].append(x.tobytes())
    return found


@pytest.mark.parametrize("layout", ["1+1", "2+2"])
def test_an_array_has_its_own(world_over_hosts, layout):
    alone, between = world_over_hosts(LAYOUTS[layout], SHMRING_WIRE_SLICE=TINY_SLICE)(in_turns, 5000)[0]
    assert len(set(alone)) > 1
    assert alone == between


def at_the_same_place(comm, count):
    """By kind of memory: the first result of each array, and whether the second was another."""
    values, room = values_of(count, comm.rank), np.empty(count, "f4")
    found = {}
    for kind in ("private", "shared"):
        found[kind] = []
        for _ in range(3):
            x = np.asarray(Place(room)) if kind == "private" else comm.empty(count, "f4")
            results = []
            for _ in range(2):
                x[...] = values
                comm.all_reduce(x, wire="int8")
                results.append(x.tobytes())
            del x
            found[kind].append((results[0], results[0] != results[1]))
    return found


def test_an_array_at_the_address_of_another_starts_without_feedback(world_over_hosts):
    for found in world_over_hosts(LAYOUTS["2+2"], SHMRING_WIRE_SLICE=TINY_SLICE)(at_the_same_place, 5000):
        for results in found.values():
            assert len(set(results)) == 1
            assert results[0][1], "nothing was kept of the first call"


def after_other_calls(comm, count):
    """Check that calls without a loss keep nothing: their arrays are not those of a sum."""
    x, values = np.empty(count, "f4"), values_of(count, comm.rank)
    found = []
    for call in (lambda: comm.all_reduce(x, "max"), lambda: comm.broadcast(x), lambda: comm.scan(x)):
        y = np.empty(count, "f4")
        y[...] = values
        comm.all_reduce(y, wire="int8")
        found.append(y.tobytes())
        comm.wire = "int8"
        x[...] = values
        call()
        comm.wire = "native"
    x[...] = values
    comm.all_reduce(x, wire="int8")
    return [*found, x.tobytes()]


def test_other_calls_leave_nothing_behind(world_over_hosts):
    for found in world_over_hosts(LAYOUTS["1+1"], SHMRING_WIRE_SLICE=TINY_SLICE)(after_other_calls, 5000):
        assert len(set(found)) == 1


# ---- numbers that are none, and such as the format has not ------------------------------------------------


def wild_values(count, rank):
    return numbers("float32", count, rng_of("wild", rank))


def wild_result(comm, wire, count):
    x = wild_values(count, comm.rank)
    comm.all_reduce(x, wire=wire)
    return x


@pytest.mark.parametrize("wire", BY_ITEM)
@pytest.mark.parametrize("layout", THREE)
def test_any_bits(world_over_hosts, layout, wire):
    """Infinities and NaNs are sent unchanged; values that are too large become infinite."""
    nodes, count = LAYOUTS[layout], 9001
    xs = [wild_values(count, rank) for rank in range(len(nodes))]
    results = world_over_hosts(nodes, SHMRING_WIRE_SLICE=TINY_SLICE)(wild_result, wire, count)
    assert_allowed(results[0], allowed_of(wire, "sum", xs, nodes), (layout, wire))
    assert len({result.tobytes() for result in results}) == 1


SPECIAL = {0: np.nan, 700: np.inf, 701: -np.inf, 3000: np.inf, 8999: -np.nan}


def special_then_ordinary(comm, wire, count):
    """The result with such numbers on one rank, and the next one without."""
    x = values_of(count, comm.rank)
    if comm.rank == comm.size - 1:
        x[list(SPECIAL)] = list(SPECIAL.values())
    comm.all_reduce(x, wire=wire)
    first = x.copy()
    x[...] = values_of(count, comm.rank)
    comm.all_reduce(x, wire=wire)
    return first, x


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("layout", THREE)
def test_nan_spoils_its_own_call_and_no_later_one(world_over_hosts, layout, wire):
    nodes, count = LAYOUTS[layout], 9001
    ranks = world_over_hosts(nodes, SHMRING_WIRE_SLICE=TINY_SLICE)
    xs = [values_of(count, rank) for rank in range(len(nodes))]
    once, in_float32 = bound_of(wire, xs, nodes)
    found = ranks(special_then_ordinary, wire, count)
    for first, second in found:
        spoiled = np.flatnonzero(~np.isfinite(first))
        assert set(SPECIAL) <= set(spoiled.tolist())
        near = INT8_BLOCK if wire == "int8" else 1  # a block with such a number has no other
        assert all(min(abs(at - special) for special in SPECIAL) < near for at in spoiled.tolist())
        rest = np.isfinite(first)
        assert (np.abs(first - exact_sum(xs))[rest] <= (once + in_float32)[rest]).all()
        assert (np.abs(second - exact_sum(xs)) <= 2 * once + in_float32).all()
        assert (first.tobytes(), second.tobytes()) == tuple(x.tobytes() for x in found[0])


SIZES = {"nothing": 0, "subnormal": 1e-41, "small": 1e-37, "large": 6e4 / 8, "huge": 1e37}


def scaled(comm, wire, count, size):
    x = values_of(count, comm.rank) * np.float32(size / 6)
    comm.all_reduce(x, wire=wire)
    return x


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["1+1", "2+1+3"])
def test_sums_of_any_size(world_over_hosts, layout, size):
    nodes, count = LAYOUTS[layout], 9001
    xs = [values_of(count, rank) * np.float32(SIZES[size] / 6) for rank in range(len(nodes))]
    ranks = world_over_hosts(nodes, SHMRING_WIRE_SLICE=TINY_SLICE)
    for wire in WIRES:
        got = ranks(scaled, wire, count, SIZES[size])[0]
        if (wire, size) == ("fp16", "huge"):
            assert np.isfinite(got).mean() < 0.01
        elif size == "nothing":
            assert not got.any()
        else:
            assert_near(got, wire, "sum", xs, nodes, (layout, wire, size))


# ---- bytes on the network ---------------------------------------------------------------------------------


def sent_by(comm, count, dtype, **keywords):
    before = comm.stats()["bytes_over_wire"]
    comm.all_reduce(np.ones(count, DTYPES[dtype]), **keywords)
    return comm.stats()["bytes_over_wire"] - before


def sent_by_formats(comm, count, dtype="float32"):
    return {wire: sent_by(comm, count, dtype, wire=wire) for wire in ("native", *WIRES)}


@pytest.mark.parametrize("layout", ["1+1", "2+2", "1+1+1"])
def test_half_and_a_quarter_of_the_bytes(world_over_hosts, layout):
    ranks = world_over_hosts(LAYOUTS[layout], SHMRING_WIRE_SLICE=16 << 10)
    for count in (3000, 240_000):
        for sent in ranks(sent_by_formats, count):
            assert sent["bf16"] == sent["fp16"] == sent["native"] / 2
            assert sent["native"] / 4 < sent["int8"] < sent["native"] / 3.7
    for sent in ranks(sent_by_formats, 20):
        assert len(set(sent.values())) == 1, "what is small travels as it is"


def test_partial_results_of_shorter_floats_are_float32_unless_they_travel_shorter(world_over_hosts):
    count = 3000  # 6000 bytes: two hosts exchange partial results and no more
    for sent in world_over_hosts(LAYOUTS["1+1"], SHMRING_WIRE_SLICE=TINY_SLICE)(
        sent_by_formats, count, "bfloat16"
    ):
        assert sent["native"] == 4 * count
        assert sent["bf16"] == sent["fp16"] == 2 * count
        assert count < sent["int8"] < 1.1 * count


# ---- calls without a wire format --------------------------------------------------------------------------


OTHERS = (
    ("float64", "sum"),
    ("int32", "sum"),
    ("complex64", "sum"),
    ("float32", "max"),
    ("bfloat16", "prod"),
)


def exact_in_spite(comm, count):
    """Set a format on the communicator that these calls cannot use: their data travel unchanged."""
    found = []
    for dtype, op in OTHERS:
        x = (np.arange(count) % 3 + comm.rank % 2).astype(DTYPES[dtype])
        y = x.copy()
        comm.wire = "int8"
        comm.all_reduce(x, op)
        comm.wire = "native"
        comm.all_reduce(y, op)
        found.append(x.tobytes() == y.tobytes())
        x[...] = comm.rank
        comm.all_reduce(x, op, wire="native")
    return found


def other_calls(comm, count):
    """Make calls that take no format: they are unchanged."""
    n, rank = comm.size, comm.rank
    comm.wire = "int8"
    x, y = values_of(count, rank), values_of(count, rank)
    everyone = [values_of(count, r) for r in range(n)]
    comm.broadcast(x, n - 1)
    found = [np.array_equal(x, everyone[-1]), np.array_equal(comm.all_gather(y), everyone)]
    comm.all_reduce(y, wire="native")
    parts = np.stack([values_of(count, rank)] * n)
    found.append(np.array_equal(comm.reduce_scatter(parts), y))
    comm.wire = "native"
    return found


def kept_nbytes(comm, count):
    """Return the bytes that remain allocated after calls without a format, and after a sum."""
    x = np.ones((comm.size, count), "f4")
    part, joined = x[comm.rank], np.empty_like(x)
    comm.wire = "int8"
    tracemalloc.start()
    comm.broadcast(x)
    comm.scan(x)
    comm.all_gather(part, out=joined)
    comm.reduce_scatter(x, out=part)
    comm.all_reduce(x, "max")
    without = tracemalloc.get_traced_memory()[0]
    comm.all_reduce(x)
    kept = tracemalloc.get_traced_memory()[0] - without
    tracemalloc.stop()
    return without, kept / x.nbytes


def test_only_sums_keep_what_they_lose(world_over_hosts):
    for without, kept in world_over_hosts(LAYOUTS["2+2"])(kept_nbytes, 300_000):
        assert without < 10_000
        assert 0.5 <= kept < 0.6, "of each host a rank keeps it for its slices"


@pytest.mark.parametrize("layout", ["1+1", "2+1+3"])
def test_all_else_travels_as_it_is(world_over_hosts, layout):
    ranks = world_over_hosts(LAYOUTS[layout], SHMRING_WIRE_SLICE=TINY_SLICE)
    for count in (5, 5000):
        assert all(map(all, ranks(exact_in_spite, count)))
        assert all(map(all, ranks(other_calls, count)))


def on_one_host(comm, count):
    x, y = values_of(count, comm.rank), values_of(count, comm.rank)
    comm.all_reduce(x)
    comm.all_reduce(y, wire="int8")
    with pytest.raises(ValueError, match="allowed: native, bf16, fp16, int8"):
        comm.all_reduce(y, wire="fp8")
    return np.array_equal(x, y)


def test_within_one_host_nothing_is_lost(world_of):
    assert world_of(2)(on_one_host, 9001) == [True, True]


def refused(comm, count):
    x = np.ones(count, "f4")
    attempts = {
        "unknown": lambda: comm.all_reduce(x, wire="fp8"),
        "no name": lambda: comm.all_reduce(x, wire=2),
        "reduce": lambda: comm.reduce(x, wire="bfloat16"),
        "plan": lambda: comm.plan("all_reduce", x, wire=""),
        "of the communicator": lambda: setattr(comm, "wire", "half"),
        "background": lambda: comm.all_reduce(x, wire="fp8", async_op=True),
    }
    for dtype, op in OTHERS:
        y = np.ones(count, DTYPES[dtype])
        attempts[dtype, op] = lambda y=y, op=op: comm.all_reduce(y, op, wire="bf16")
    return refusals_of(comm, attempts), comm.wire


def test_impossible_settings_are_reported(world_over_hosts):
    ranks = world_over_hosts(LAYOUTS["1+1"])
    for count in (5, 50_000):
        for output, wire in ranks(refused, count):
            assert wire == "native"
            for name in ("unknown", "no name", "reduce", "plan", "of the communicator", "background"):
                assert output.pop(name).startswith("ValueError: wire is "), name
            assert sorted(output) == sorted(OTHERS)
            for (dtype, op), text in output.items():
                assert text.startswith("ValueError: ")
                assert f"not for {op} of {dtype}" in text


def give_different(comm, count, own, other, odd_one):
    wire = other if comm.rank == odd_one else own
    with pytest.raises(ValueError if wire == "fp8" else shmring.Mismatch) as caught:
        comm.all_reduce(np.ones(count, "f4"), wire=wire)
    return str(caught.value)


@pytest.mark.parametrize("count", [5, 50_000])
@pytest.mark.parametrize(("layout", "odd_one"), [("1+1", 1), ("2+2", 0), ("2+1+3", 2)])
def test_formats_that_differ_are_a_mismatch_on_every_rank(world_over_hosts, layout, odd_one, count):
    for own, other in (("bf16", "int8"), (None, "fp16"), ("int8", "native"), ("bf16", "fp8")):
        ranks = world_over_hosts(LAYOUTS[layout])
        for rank, text in enumerate(ranks(give_different, count, own, other, odd_one)):
            if other == "fp8":
                assert ("allowed" if rank == odd_one else "do not match") in text
            else:
                assert all(f"wire={name}" in text for name in (own, other) if name not in (None, "native"))
