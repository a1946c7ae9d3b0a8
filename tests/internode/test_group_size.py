"""Hosts in groups that reduce among themselves before the groups do: the fold group by group, bit for bit, on
all ranks; the bytes sent to other groups; wire formats; refused arguments.

Hosts are names here, and the network is loopback: see conftest.world_over_hosts.
"""

import functools

import numpy as np
import pytest
from cases import DTYPES, assert_same, expected, numbers, refusals_of, rng_of
from combinations import first

import shmring
from shmring._core import kernels
from tests.internode.test_internode_collectives import TINY_SLICE
from tests.internode.test_wire_formats import WIRES, assert_near, exact_sum, values_of
from tests.unit.test_kernels import SMALL_FLOATS

LAYOUTS = {  # by rank: the host that it is on
    "1+1": [0, 1],
    "2+1": [0, 0, 1],
    "1+2+1": [0, 1, 1, 2],
    "1+1+1+1": [0, 1, 2, 3],
    "2+1+1+2 interleaved": [0, 1, 2, 3, 3, 0],
    "2+2+2+2": [0, 0, 1, 1, 2, 2, 3, 3],
}
SIZES = [
    (layout, size)
    for layout, nodes in LAYOUTS.items()
    for size in range(1, 5)
    if len(set(nodes)) % size == 0 and (size == 2 or len(nodes) < 8)
]
COUNTS = (0, 5, 1025, 9001)


def values(dtype, op, count, rank):
    return numbers(dtype, count, rng_of("groups", dtype, op, count, rank))


def folded(name, op, xs, nodes, group_size):
    """Each host in rank order, hosts in the order of their lowest ranks in each group, groups: rounded once.

    What is small, or is folded by each of two hosts, is folded as if there were no groups.
    """
    wide, hosts = xs, list(dict.fromkeys(nodes))
    if name in SMALL_FLOATS:
        wide = [x.astype("f4") for x in xs]
    fold = functools.partial(expected, "float32" if name in SMALL_FLOATS else name)
    hop = "sum" if op == "avg" else op
    partials = [fold(hop, [x for x, at in zip(wide, nodes, strict=True) if at == host]) for host in hosts]
    is_small = xs[0].nbytes <= TINY_SLICE // 32
    in_parts = not is_small and (len(hosts) > 2 or xs[0].nbytes >= 2 * TINY_SLICE)
    if in_parts:
        partials = [fold(hop, partials[i : i + group_size]) for i in range(0, len(hosts), group_size)]
    with np.errstate(all="ignore"):
        return fold(op, partials, len(xs)).astype(xs[0].dtype)


def results_of(comm, dtype, op, group_size):
    """In place, into out, in the background and by a plan: the same bits."""
    found = []
    for count in COUNTS:
        given = values(dtype, op, count, comm.rank)
        x, out, later = given.copy(), np.zeros_like(given), given.copy()
        comm.all_reduce(x, op, group_size=group_size)
        comm.all_reduce(given, op, out=out, group_size=group_size)
        assert given.tobytes() == values(dtype, op, count, comm.rank).tobytes()
        comm.all_reduce(later, op, group_size=group_size, async_op=True).wait()
        comm.plan("all_reduce", given, op, group_size=group_size)()
        assert x.tobytes() == out.tobytes() == later.tobytes() == given.tobytes(), count
        found.append(x)
    return found


@pytest.mark.parametrize(("layout", "group_size"), first(len(SIZES[::2]), SIZES[::2] + SIZES[1::2]))
def test_sums_are_folded_group_by_group(world_over_hosts, layout, group_size):
    nodes = LAYOUTS[layout]
    ranks = world_over_hosts(nodes, SHMRING_WIRE_SLICE=TINY_SLICE)
    for number, dtype in enumerate(DTYPES):
        ops = kernels.ops(dtype)
        op = ops[number % len(ops)] if (number + group_size) % 2 else "sum"
        results = ranks(results_of, dtype, op, group_size)
        for at, count in enumerate(COUNTS):
            xs = [values(dtype, op, count, rank) for rank in range(len(nodes))]
            want = folded(dtype, op, xs, nodes, group_size)
            assert_same(results[0][at], want, op, (layout, group_size, dtype, op, count))
            assert len({result[at].tobytes() for result in results}) == 1


def whole_numbers(comm, group_size, dtype):
    """Reduce whole numbers: their sums are exact in any order."""
    n, found = comm.size, []
    for count in (3, 7000, 200_003):
        x = (np.arange(count) % 11 + comm.rank).astype(dtype)
        before = x.copy()
        want = (np.arange(count) % 11 * n + n * (n - 1) // 2).astype(dtype)
        comm.all_reduce(x, group_size=group_size)
        found.append(np.array_equal(x, want))
        comm.all_reduce(before, "avg" if np.dtype(dtype).kind == "f" else "max", group_size=group_size)
        many = (
            want / dtype(n) if np.dtype(dtype).kind == "f" else (np.arange(count) % 11 + n - 1).astype(dtype)
        )
        found.append(np.array_equal(before, many))
        x = (np.arange(count) % 11 + comm.rank).astype(dtype)
        comm.reduce(x, root=n - 1)
        found.append(comm.rank != n - 1 or np.array_equal(x, want))
    return found


@pytest.mark.parametrize(("layout", "group_size"), first(len(SIZES[::2]), SIZES[::2] + SIZES[1::2]))
def test_whole_numbers_in_fragments_of_full_length(world_over_hosts, layout, group_size):
    for dtype in (np.int64, np.float32):
        assert all(map(all, world_over_hosts(LAYOUTS[layout])(whole_numbers, group_size, dtype)))


# ---- bytes between groups ---------------------------------------------------------------------------------


def sent_to_hosts(comm, count, group_size, wire="native"):
    before = comm.stats()["bytes_over_wire"]
    comm.all_reduce(np.ones(count, "f4"), group_size=group_size, wire=wire)
    return comm.stats()["bytes_over_wire"] - before


def test_each_host_sends_a_part_of_it_to_other_groups(world_over_hosts):
    """For g hosts per group and n/g groups: (g-1)/g twice inside the group, and 1/g to each other group."""
    ranks, count = world_over_hosts(LAYOUTS["1+1+1+1"]), 480_000
    for group_size in (1, 2, 4):
        want = 4 * count * (2 * (group_size - 1) + (4 // group_size - 1)) // group_size
        assert ranks(sent_to_hosts, count, group_size) == [want] * 4
        assert ranks(sent_to_hosts, count, group_size, "bf16") == [want // 2] * 4


def repeated(comm, group_size, wire, count, times, op):
    """The first result, the mean of all, the last one's bytes."""
    given, x, results = values_of(count, comm.rank), np.empty(count, "f4"), []
    for _ in range(times):
        x[...] = given
        comm.all_reduce(x, op, group_size=group_size, wire=wire)
        results.append(x.copy())
    return results[0], np.mean(results, axis=0, dtype="f8"), x.tobytes()


@pytest.mark.parametrize(("layout", "group_size"), first(len(SIZES[::2]), SIZES[::2] + SIZES[1::2]))
def test_with_a_shorter_format(world_over_hosts, layout, group_size):
    """Groups add roundings: each group's partial result is rounded too. Their mean converges."""
    nodes, count, times = LAYOUTS[layout], 9001, 40
    ranks = world_over_hosts(nodes, SHMRING_WIRE_SLICE=TINY_SLICE)
    xs = [values_of(count, rank) for rank in range(len(nodes))]
    for wire, op in zip(WIRES, ("sum", "sum", "avg"), strict=True):
        results = ranks(repeated, group_size, wire, count, times, op)
        assert len({last for _, _, last in results}) == 1
        first, mean, _ = results[0]
        assert_near(first, wire, op, xs, nodes, (layout, group_size, wire), 0.5)
        assert_near(mean, wire, op, xs, nodes, (layout, group_size, wire), times / 2)
        want = exact_sum(xs) / (len(nodes) if op == "avg" else 1)
        assert np.abs(mean - want).max() < np.abs(first - want).max() / (times / 4)


# ---- refused arguments ------------------------------------------------------------------------------------


def refused(comm, count):
    x = np.ones(count, "f4")
    attempts = {
        size: lambda size=size: comm.all_reduce(x, group_size=size)
        for size in (0, -1, 2, 4, 6, 1 << 70, 1.5, "1")
    }
    attempts["plan"] = lambda: comm.plan("all_reduce", x, group_size=2)
    attempts["background"] = lambda: comm.all_reduce(x, group_size=2, async_op=True)
    return refusals_of(comm, attempts)


@pytest.mark.parametrize("count", [5, 50_000])
def test_a_group_size_that_does_not_divide_is_refused(world_over_hosts, count):
    for messages in world_over_hosts(LAYOUTS["1+2+1"])(refused, count):
        for size in (0, -1, 2, 4, 6, 1 << 70):
            assert (
                messages.pop(size)
                == f"ValueError: group_size is {size}; it must divide the number of hosts, 3"
            )
        for size in (1.5, "1"):
            assert messages.pop(size) == f"TypeError: group_size is {size!r}; it must be an integer"
        assert sorted(messages) == ["background", "plan"]
        assert all("group_size is 2" in text for text in messages.values())


def on_one_host(comm):
    x = np.full(9001, comm.rank + 1.0)
    comm.all_reduce(x, group_size=1)
    with pytest.raises(ValueError, match="number of hosts, 1"):
        comm.all_reduce(x, group_size=2)
    return (x == 3).all()


def test_one_host_is_one_group(world_of):
    assert world_of(2)(on_one_host) == [True, True]


def in_a_part(comm, hosts):
    """A group of ranks has its own number of hosts."""
    part = comm.split(0 if comm.node < hosts else 1)
    x = np.full(5000, 1.0)
    for group_size in (1, part.num_nodes):
        part.all_reduce(x, group_size=group_size)
    with pytest.raises(ValueError, match=f"number of hosts, {part.num_nodes}"):
        part.all_reduce(x, group_size=part.num_nodes + 1)
    return part.size, (x == part.size**2).all()


def test_groups_of_ranks_count_their_own_hosts(world_over_hosts):
    ranks = world_over_hosts(LAYOUTS["2+2+2+2"], SHMRING_WIRE_SLICE=TINY_SLICE)
    assert ranks(in_a_part, 3) == [(6, True)] * 6 + [(2, True)] * 2


def give_different(comm, count, own, other):
    size = other if comm.rank == 1 else own
    with pytest.raises(ValueError if size == 3 else shmring.Mismatch) as caught:
        comm.all_reduce(np.ones(count, "f4"), group_size=size)
    return str(caught.value)


@pytest.mark.parametrize("count", [5, 50_000])
def test_sizes_that_differ_are_a_mismatch_on_every_rank(world_over_hosts, count):
    for own, other in ((1, 2), (None, 2), (4, 1), (2, 3)):
        for rank, text in enumerate(world_over_hosts(LAYOUTS["1+1+1+1"])(give_different, count, own, other)):
            if other == 3:
                assert ("must divide" if rank == 1 else "do not match") in text
            else:
                assert ("group_size=2" in text) == (2 in (own, other))
                assert ("group_size=4" in text) == (own == 4)
