"""Every collective of ranks of several hosts against its definition in NumPy: dtype, op, size, memory, out,
root, way of calling and layout in pairs; pipelines that wrap; bytes on the network.

Hosts are names here, and the network is loopback: see conftest.world_over_hosts.
"""

import contextlib
import functools
import itertools

import numpy as np
import pytest
from cases import DTYPES, rng_of, same_bytes
from combinations import each_value, first, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import KINDS, WAYS, Prepared, run_program, seeds_of
from ranks import Ranks

from shmring._core import kernels
from shmring._internode.context import most_parts
from tests.collectives.test_collectives import CALLS, FOLDING, IN_PLACE, some_calls
from tests.collectives.test_collectives import FACTORS as ON_ONE_HOST
from tests.collectives.test_fused import fused_and_separate
from tests.collectives.test_measured_single_copy import mix
from tests.collectives.test_objects import every_call
from tests.collectives.test_single_copy import skip_unless_allowed
from tests.collectives.test_vector import FACTORS as UNEVEN
from tests.collectives.test_vector import assert_uneven
from tests.collectives.test_vector import call_once as call_uneven

LAYOUTS = {  # by rank: the host that it is on; some tests take the first two in a plain run
    "2+2 interleaved": [0, 1, 0, 1],
    "2+1+3": [0, 0, 1, 2, 2, 2],
    "1+1": [0, 1],
    "2+2": [0, 0, 1, 1],
    "1+1+1": [0, 1, 2],
    "3+2 interleaved": [1, 0, 1, 0, 1],
}
TINY_SLICE = 4096  # the size of a fragment; 1/32 of it is small
SLICES = (None, TINY_SLICE, 16 << 10)
FIRST_SEQS = (0, 2**32 - 3, 2**64 - 3)

FACTORS = {
    **{name: ON_ONE_HOST[name] for name in ("dtype", "op", "rows", "columns", "memory", "out", "root")},
    "kind": KINDS,
    "way": tuple(dict.fromkeys(WAYS)),
    "layout": tuple(LAYOUTS),
    "slice": SLICES,
    "chunk": (None, 256, 4096),
    "first_seq": FIRST_SEQS,
}


def is_folding(row):
    return row["kind"] in (*FOLDING, "all_reduce")


def has_a_meaning(row):
    if "kind" not in row or not is_folding(row):
        return True
    if row.get("op") == "avg" and row["kind"] in ("scan", "exscan"):
        return False
    return "op" not in row or "dtype" not in row or row["op"] in kernels.ops(row["dtype"])


@functools.cache
def rows_of(layout):
    """In an order in which few worlds have to be made."""
    rows = [
        row | {"algorithm": "auto"} for row in pairwise(FACTORS, has_a_meaning) if row["layout"] == layout
    ]
    return sorted(rows, key=lambda row: repr(sorted(environment(row).items())))


def environment(row):
    names = {"slice": "WIRE_SLICE", "chunk": "CHUNK", "first_seq": "FIRST_SEQ"}
    return {f"SHMRING_{name}": row[key] for key, name in names.items() if row.get(key)}


def call_and_check(comm, rows, nodes):
    for row in rows:
        prepared = Prepared(comm, row, nodes)
        result = prepared.make(row["way"])
        if row["way"].startswith("background"):
            result = result.result()
        prepared.check(result)
        assert comm.stats()["path"] == "across"


@pytest.mark.limit(200)
@pytest.mark.parametrize("layout", first(2, LAYOUTS))
def test_every_collective_is_what_numpy_says(world_over_hosts, layout):
    environ = ranks = None
    for row in rows_of(layout):
        if environ != environment(row):
            environ = environment(row)
            ranks = world_over_hosts(LAYOUTS[layout], **environ)
        ranks(call_and_check, [row], LAYOUTS[layout])


def rows_of_size(kind, columns, **how):
    """Return the rows of a size, with all roots if the call has one."""
    roots = (
        ("first", "last", "middle") if kind in ("reduce", "broadcast", "scatter", "gather") else ("first",)
    )
    fixed = {
        "kind": kind,
        "dtype": "float32",
        "op": "sum",
        "rows": 1,
        "algorithm": "auto",
        "way": "foreground",
    }
    return [
        fixed | {"columns": columns, "root": root, "memory": "private", "out": False} | how for root in roots
    ]


@each_value({"layout": ["1+1", "2+2 interleaved", "2+1+3"], "slice_nbytes": [None, TINY_SLICE]})
def test_sizes_where_something_changes(world_over_hosts, layout, slice_nbytes):
    """Small to large, one fragment to two, one part to two; one element more and one less."""
    whole = slice_nbytes or 1 << 20
    ranks = world_over_hosts(LAYOUTS[layout], **environment({"slice": slice_nbytes}))
    borders = [whole // 32 // 4, whole // 16 // 4, whole // 4 if slice_nbytes else 0]
    for kind in KINDS:
        rows = [
            row
            for border in borders
            for columns in (border - 1, border, border + 1)
            if columns > 0
            for row in rows_of_size(kind, columns)
        ]
        ranks(call_and_check, rows, LAYOUTS[layout])


@each_value({"layout": ["1+1", "2+2", "2+1+3"], "kind": KINDS, "shared": [False, True]})
def test_some_megabytes_in_fragments_of_full_length(world_over_hosts, layout, kind, shared):
    count = 1_200_007 if kind in (*IN_PLACE, "all_reduce") else 400_003
    ranks = world_over_hosts(LAYOUTS[layout])
    assert ranks(some_calls, [(kind, count, shared)]) == [[]] * len(LAYOUTS[layout])


def mix_and_count(comm):
    """Return the wrong results of a mixture of calls, and whether local steps were single copies."""
    return mix(comm, 5, 150), comm.stats()["paths"]["single_copy"] > 0


@each_value({"layout": ["2+2", "2+1+3"], "environ": [{"SHMRING_PATH": "single_copy"}, {}]})
def test_local_steps_may_be_single_copies(world_of, world_over_hosts, layout, environ):
    skip_unless_allowed(world_of)
    nodes = LAYOUTS[layout]
    for rank, (wrong, some) in enumerate(world_over_hosts(nodes, **environ)(mix_and_count)):
        assert wrong == []
        assert some or not environ or nodes.count(nodes[rank]) == 1


@pytest.fixture(scope="module")
def settled():
    """Ranks by layout that stay in one world, whose fragments are tiny."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def ranks_of(layout):
            nodes = LAYOUTS[layout]
            ranks = stack.enter_context(Ranks(len(nodes), nodes=nodes))
            return ranks.meet(SHMRING_WIRE_SLICE=TINY_SLICE)

        yield ranks_of


@settings(max_examples=60)
@given(layout=st.sampled_from(sorted(LAYOUTS)), calls=st.lists(CALLS, min_size=1, max_size=8))
def test_any_sequence_of_calls(settled, layout, calls):
    assert settled(layout)(some_calls, calls) == [[]] * len(LAYOUTS[layout])


@pytest.mark.limit(200)
@each_value(
    {
        "layout": ["2+2 interleaved", "1+1+1", "2+1+3"],
        "environ": [{}, {"SHMRING_WIRE_SLICE": TINY_SLICE, "SHMRING_CHUNK": 1024}],
    }
)
def test_random_programs(world_over_hosts, layout, environ):
    ranks = world_over_hosts(LAYOUTS[layout], **environ)
    for seed in seeds_of((layout, sorted(environ)), 4):
        ranks(run_program, seed, LAYOUTS[layout])


# ---- shapes, orders, makes of items -----------------------------------------------------------------------


def orders(comm, columns):
    """Reduce arrays that Prepared cannot describe: Fortran order and 0-d."""
    n, rank = comm.size, comm.rank
    total = n * (n - 1) // 2
    x = np.asfortranarray(np.arange(3.0 * columns).reshape(3, columns))
    base = x.copy(order="F")
    x += rank
    comm.all_reduce(x)
    assert np.array_equal(x, n * base + total)
    assert x.flags.f_contiguous
    x = base + rank
    out = np.empty_like(x, order="F")
    comm.scan(x, out=out)
    assert np.array_equal(out, (rank + 1) * base + rank * (rank + 1) // 2)
    comm.broadcast(x, n - 1)
    assert np.array_equal(x, base + n - 1)
    number = np.array(rank, "i8")
    comm.reduce(number, root=n - 1)
    assert number == (total if rank == n - 1 else rank)
    number = np.array(rank + 1.5)
    comm.all_reduce(number, "max")
    assert number == n + 0.5
    assert comm.all_gather(np.array(rank)).tolist() == list(range(n))
    gathered = comm.gather(np.array(rank), 0)
    assert (gathered is None) if rank else gathered.tolist() == list(range(n))


@pytest.mark.parametrize("layout", first(2, LAYOUTS))
def test_fortran_order_and_no_dimension(world_over_hosts, layout):
    ranks = world_over_hosts(LAYOUTS[layout], SHMRING_WIRE_SLICE=TINY_SLICE)
    ranks(orders, 7)
    ranks(orders, 5000)


LARGE_ITEM = np.dtype([("a", "u1"), ("b", "V3000")])
ITEMS = {
    "record": np.dtype([("when", "M8[s]"), ("name", "S5"), ("what", "f8", (3,))]),
    "large item": LARGE_ITEM,
    "line": np.dtype("V64"),
    "times": np.dtype("m8[ms]"),
    "words": np.dtype("U3"),
}


def move_items(comm, dtype, count):
    """Items of any make, by every call that only moves."""
    n, rank = comm.size, comm.rank

    def made(*who):
        return np.frombuffer(rng_of("items", *who).bytes(count * dtype.itemsize), dtype)

    def swap(giver, taker):
        return made(giver, taker)

    everyone = [made(r) for r in range(n)]
    mine = everyone[rank]
    for root in range(n):
        x = mine.copy()
        comm.broadcast(x, root)
        assert same_bytes(x, everyone[root])
        joined = comm.gather(mine, root)
        assert (joined is None) if rank != root else same_bytes(joined, np.stack(everyone))
        x = np.stack(everyone) if rank == root else None
        assert same_bytes(comm.scatter(x, root, like=mine), mine)
    assert same_bytes(comm.all_gather(mine), np.stack(everyone))
    blocks = np.stack([swap(rank, taker) for taker in range(n)])
    wanted = np.stack([swap(giver, rank) for giver in range(n)])
    assert same_bytes(comm.all_to_all(blocks), wanted)
    comm.all_to_all(blocks, out=blocks)
    assert same_bytes(blocks, wanted)


@each_value({"layout": ["1+1", "2+2 interleaved", "2+1+3"], "item": ITEMS})
def test_items_of_opaque_dtypes_may_have_any_layout(world_over_hosts, layout, item):
    for slice_nbytes in (None, TINY_SLICE):
        ranks = world_over_hosts(LAYOUTS[layout], **environment({"slice": slice_nbytes}))
        for nbytes in (1, 50_000, 500_000):
            ranks(move_items, ITEMS[item], 1 + nbytes // ITEMS[item].itemsize)


# ---- pieces that differ in length, arrays together, objects -----------------------------------------------


UNEVEN_FACTORS = {
    name: UNEVEN[name]
    for name in ("kind", "dtype", "most", "trailing", "memory", "out", "background", "root")
} | {"layout": tuple(LAYOUTS), "slice": SLICES, "chunk": (None, 256)}


@functools.cache
def uneven_rows():
    return sorted(pairwise(UNEVEN_FACTORS), key=lambda row: repr(sorted(environment(row).items())))


@pytest.mark.limit(200)
@pytest.mark.parametrize("layout", first(2, LAYOUTS))
def test_every_uneven_collective_is_what_its_definition_says(world_over_hosts, layout):
    environ = ranks = None
    for row in uneven_rows():
        if row["layout"] != layout:
            continue
        if environ != environment(row):
            environ = environment(row)
            ranks = world_over_hosts(LAYOUTS[layout], **environ)
        for rank, found in enumerate(ranks(call_uneven, row)):
            assert_uneven(found, row, rank, len(LAYOUTS[layout]))


def all_but_one_empty(comm, count):
    """Each rank in turn is the only one that has anything."""
    for giver in range(comm.size):
        x = np.full((count if comm.rank == giver else 0, 3), comm.rank, "i4")
        found = comm.all_gather_v(x)
        assert [len(piece) for piece in found] == [count * (r == giver) for r in range(comm.size)]
        assert (found[giver] == giver).all()
        swapped = comm.all_to_all_v([x] * comm.size)
        assert [len(piece) for piece in swapped] == [count * (r == giver) for r in range(comm.size)]
        assert (swapped[giver] == giver).all()


@pytest.mark.parametrize("layout", first(2, LAYOUTS))
def test_one_has_all(world_over_hosts, layout):
    ranks = world_over_hosts(LAYOUTS[layout], SHMRING_WIRE_SLICE=TINY_SLICE)
    for count in (1, 10, 30_000):
        ranks(all_but_one_empty, count)


@each_value({"layout": ["1+1", "2+1+3"], "place": ["private", "shared", "out"]})
def test_arrays_together_become_what_they_become_one_by_one(world_over_hosts, layout, place):
    specs = [(dtype, count) for dtype in DTYPES for count in (0, 1, 3, 700, 9001)]
    ranks = world_over_hosts(LAYOUTS[layout], SHMRING_WIRE_SLICE=TINY_SLICE)
    for op, fuse_nbytes, background in (("sum", None, False), ("prod", 0, True), ("sum", 5000, True)):
        ranks(fused_and_separate, specs, op, fuse_nbytes, place, background)


def views_together(comm, shared):
    """One call, whether a rank has to pack them or not."""
    block = comm.zeros((100, 64), "f4") if shared else np.zeros((100, 64), "f4")
    block[...] = comm.rank
    arrays = [row.copy() for row in block] if comm.rank == 1 and not shared else list(block)
    begin = comm.stats()["calls"]
    comm.all_reduce_many(arrays)
    calls = comm.stats()["calls"] - begin
    return calls, all((array == sum(range(comm.size))).all() for array in arrays)


@pytest.mark.parametrize("shared", [False, True])
def test_views_together_are_one_call(world_over_hosts, shared):
    assert world_over_hosts(LAYOUTS["2+1+3"])(views_together, shared) == [(1, True)] * 6


@pytest.mark.parametrize("layout", ["1+1", "2+1+3"])
def test_objects(world_over_hosts, layout):
    ranks = world_over_hosts(LAYOUTS[layout])
    for counts in ([5] * 6, [0, 1, 2, 100_000, 3, 0], [30_000] * 6):
        for found in ranks(every_call, counts):
            assert all(found.values()), found


# ---- bytes on the network ---------------------------------------------------------------------------------


def sent_by(comm, kind, count, root):
    x = np.ones(count * (comm.size if kind in ("scatter", "all_to_all", "reduce_scatter") else 1), "f4")
    keywords = {"root": root} if kind in ("reduce", "broadcast", "gather", "scatter") else {}
    if kind == "scatter" and comm.rank != root:
        x, keywords["like"] = None, x[:count]
    before = comm.stats()["bytes_over_wire"]
    comm.barrier() if kind == "barrier" else getattr(comm, kind)(x, **keywords)
    return comm.stats()["bytes_over_wire"] - before


@pytest.mark.parametrize("count", [24, 240_000])
def test_every_byte_crosses_the_wire_as_seldom_as_it_can(world_over_hosts, count):
    """Once for each host that wants it; large calls from all ranks of a host alike. Heads are not counted."""
    two, three = world_over_hosts(LAYOUTS["2+2"]), world_over_hosts(LAYOUTS["1+1+1"])
    n, is_large = 4 * count, count > 24
    sent = {
        kind: (two(sent_by, kind, count, 1), three(sent_by, kind, count, 1)) for kind in (*KINDS, "barrier")
    }
    assert sent["barrier"] == ([0] * 4, [0] * 3)
    assert sent["all_reduce"] == (
        [n // 2] * 4 if is_large else [n, 0, n, 0],
        [4 * n // 3] * 3 if is_large else [2 * n] * 3,
    )
    assert [sum(of_ranks) for of_ranks in sent["reduce"]] == [n, 8 * n // 3 if is_large else 2 * n]
    assert sent["reduce_scatter"] == ([n] * 4, [2 * n] * 3)
    assert [sum(of_ranks) for of_ranks in sent["broadcast"]] == [n, 2 * n]
    assert sent["all_gather"] == ([n] * 4, [2 * n] * 3)
    assert sent["scan"] == sent["exscan"] == sent["all_gather"]
    assert sent["scatter"] == ([0, 2 * n, 0, 0], [0, 2 * n, 0])
    assert sent["gather"] == ([0, 0, n, n], [n, 0, n])
    assert sent["all_to_all"] == ([2 * n] * 4, [2 * n] * 3)


def one_after_the_other(comm, count, times):
    """Make calls as fast as possible: no call may take the data of an earlier call for its own."""
    x = np.empty(count, "i8")
    for number in range(times):
        x[...] = comm.rank + number
        comm.all_reduce(x)
        assert (x == comm.size * number + sum(range(comm.size))).all(), number
        x[...] = number
        comm.broadcast(x, number % comm.size)
        assert (x == number).all()


@pytest.mark.parametrize("layout", first(2, LAYOUTS))
def test_many_calls_in_a_row(settled, layout):
    settled(layout)(one_after_the_other, 3, 150)
    settled(layout)(one_after_the_other, 3000, 30)


def sum_of_many(comm, count):
    x = np.arange(count, dtype="f4") % 97
    comm.all_reduce(x)
    return np.array_equal(x, comm.size * (np.arange(count) % 97))


@pytest.mark.slow
def test_a_host_of_many_ranks_beside_hosts_of_one():
    """Sum with pieces that differ in length by more than the messages in flight between two ranks."""
    with Ranks(67, nodes=[0, 1] + [2] * 65) as ranks:
        assert all(ranks.meet()(sum_of_many, 100_001))


def parts_of_a_slice(counts, ngrains):
    """Return the most parts of a slice if every host divides so many grains among its ranks."""
    begins = {count: [count_before(ngrains, count, rank) for rank in range(count + 1)] for count in counts}
    cuts = {begin for of_host in begins.values() for begin in of_host}
    slices = {pair for of_host in begins.values() for pair in itertools.pairwise(of_host)}
    slices = {(begin, end) for begin, end in slices if begin < end}
    return max(1 + sum(begin < cut < end for cut in cuts) for begin, end in slices)


def count_before(ngrains, nranks, rank):
    return ngrains // nranks * rank + min(ngrains % nranks, rank)


@pytest.mark.parametrize(
    "counts", [(1, 1, 8, 16), (1, 6, 12), (2, 3), (2, 2, 32), (4, 6, 9), (8, 16), (5, 5)]
)
def test_no_slice_has_more_parts_than_the_queue_is_asked_for(counts):
    """Borders that coincide as fractions are apart after rounding to grains."""
    limit = most_parts(counts)
    assert limit < sum(counts)
    for ngrains in (*range(1, 200), 1000, 1013):
        assert parts_of_a_slice(counts, ngrains) <= limit
