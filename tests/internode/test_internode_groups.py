"""Groups, background calls and shared arrays of ranks of several hosts, each independent of the others; and
waiting for another host costs little.

Hosts are names here, and the network is loopback: see conftest.world_over_hosts.
"""

import asyncio
import pickle
import time

import numpy as np
import pytest
from combinations import each_value
from ranks import free_port, until_there
from waiting import wait_until

import shmring
from shmring._lifecycle import internode
from tests.collectives.test_groups import total
from tests.internode.test_internode_collectives import LAYOUTS


def places(comm, layout):
    """Check what the communicator says about places, in the whole and in groups of every kind."""
    nodes = LAYOUTS[layout]
    own = [rank for rank, node in enumerate(nodes) if node == nodes[comm.rank]]
    assert (comm.rank, comm.size, comm.num_nodes) == (comm.rank, len(nodes), len(set(nodes)))
    assert (comm.local_rank, comm.local_size) == (own.index(comm.rank), len(own))
    by_node = comm.split(comm.node)
    assert by_node.parent_ranks == tuple(own)
    assert (by_node.num_nodes, by_node.local_size, by_node.rank) == (1, len(own), comm.local_rank)
    heads = comm.split(0 if comm.local_rank == 0 else None)
    assert (heads is None) == (comm.local_rank != 0)
    if heads is not None:
        assert (heads.num_nodes, heads.local_size, heads.size) == (comm.num_nodes, 1, comm.num_nodes)
    backwards = comm.split(0, -comm.rank)
    assert backwards.rank == comm.size - 1 - comm.rank
    assert backwards.num_nodes == comm.num_nodes
    nobody = comm.group([])
    last = comm.group([comm.size - 1])
    assert nobody is None
    assert (last is None) == (comm.rank != comm.size - 1)
    for group in (by_node, heads, backwards, last, comm):
        if group is not None:
            ranks = group.parent_ranks or range(comm.size)
            assert total(group, comm.rank) == sum(ranks)
            gathered = group.all_gather(np.array(comm.rank)).tolist()
            assert gathered == list(ranks)
            if group is not comm:
                group.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_of_the_hosts_of_their_ranks(world_over_hosts, layout):
    world_over_hosts(LAYOUTS[layout])(places, layout)


def nested(comm):
    """Make halves of halves down to single ranks; use each at the end, close the first one before."""
    levels = [comm.dup()]
    while levels[-1].size > 1:
        levels.append(levels[-1].split(levels[-1].rank * 2 // levels[-1].size, -levels[-1].rank))
    sums = [total(level, comm.rank) for level in levels]
    levels[0].close()
    assert [total(level, comm.rank) for level in levels[:0:-1]] == sums[:0:-1]
    return sums[0], sums[-1]


@pytest.mark.parametrize("layout", ["2+2 interleaved", "2+1+3"])
def test_groups_of_groups(world_over_hosts, layout):
    size = len(LAYOUTS[layout])
    for rank, found in enumerate(world_over_hosts(LAYOUTS[layout])(nested)):
        assert found == (sum(range(size)), rank)


def at_the_same_time(comm):
    """Each rank issues its groups' calls in an order of its own; within a group they stand as they are."""
    twin, half = comm.dup(), comm.split(comm.rank % 2)
    for turn in range(10):
        works, arrays = [], []
        groups = [comm, twin, half]
        for group in groups if (comm.rank + turn) % 2 else groups[::-1]:
            for count in (3, 40_000, 700):
                x = np.full(count, group.rank + 1.0)
                works.append(group.all_reduce(x, async_op=True))
                arrays.append((x, group.size * (group.size + 1) / 2))
        for work in works[:: 1 if turn % 2 else -1]:
            work.wait()
        for x, want in arrays:
            assert (x == want).all()


def an_abort_stays_within(comm):
    twin, half = comm.dup(), comm.split(comm.rank % 2)
    if comm.rank == 0:
        half.abort("enough")
    if comm.rank % 2 == 0:
        with pytest.raises(shmring.Aborted, match="enough"):
            half.barrier()
    else:
        total(half)
    with pytest.raises(shmring.Closed):
        twin.close() or twin.barrier()
    assert total(comm) == sum(range(comm.size))


@pytest.mark.parametrize("layout", ["1+1", "2+2", "2+1+3"])
def test_groups_go_on_by_themselves(world_over_hosts, layout):
    ranks = world_over_hosts(LAYOUTS[layout], SHMRING_WIRE_SLICE=16384)
    ranks(at_the_same_time)
    ranks(an_abort_stays_within)


def awaited(comm):
    async def main():
        x, y = np.full(50_000, 1.0), np.full(5, comm.rank)
        many = [np.full(50, 2.0), np.full(4, 3.0)]
        works = [comm.all_reduce(x, async_op=True), comm.broadcast(y, comm.size - 1, async_op=True)]
        works.append(comm.all_reduce_many(many, async_op=True))
        gathered = comm.all_gather_v(np.arange(comm.rank * 1000), async_op=True)
        await asyncio.gather(*works)
        lengths = [len(piece) for piece in await gathered]
        return float(x[-1]), int(y[0]), float(many[1][3]), lengths

    return asyncio.run(main())


@pytest.mark.parametrize("layout", ["1+1", "2+2", "2+1+3"])
def test_calls_can_be_awaited(world_over_hosts, layout):
    n = len(LAYOUTS[layout])
    lengths = [1000 * rank for rank in range(n)]
    assert world_over_hosts(LAYOUTS[layout])(awaited) == [(n, n - 1, 3.0 * n, lengths)] * n


def asked_for(comm, folder):
    """done() turns true without a wait, and a wait that times out harms nothing."""
    x = np.full(100_000, 1.0)
    if comm.rank == 0:
        for rank in range(1, comm.size):
            until_there(folder / f"{rank} waits")
    work = comm.all_reduce(x, async_op=True)
    if comm.rank != 0:
        with pytest.raises(TimeoutError):
            work.wait(timeout=0.02)
        (folder / f"{comm.rank} waits").touch()
    wait_until(work.done, "the call is done")
    work.wait()
    return float(x[-1])


def test_works_come_to_an_end_by_themselves(world_over_hosts, tmp_path):
    assert world_over_hosts(LAYOUTS["2+1+3"])(asked_for, tmp_path) == [6.0] * 6


def share(comm):
    """Return, by rank of the world, which ranks have written here."""
    array = comm.shared(comm.size, "i8", locks=1)
    with array.lock(0):
        array[comm.rank] += comm.rank + 1
    array.fence()
    seen = np.array(array)
    array.fence()
    blocks = comm.full(3, comm.rank)
    comm.all_reduce(blocks)
    return seen.tolist(), blocks.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shared_array_is_one_on_each_host(world_over_hosts, layout):
    nodes = LAYOUTS[layout]
    for rank, (seen, blocks) in enumerate(world_over_hosts(nodes)(share)):
        assert seen == [(r + 1) * (nodes[r] == nodes[rank]) for r in range(len(nodes))]
        assert blocks == [sum(range(len(nodes)))] * 3


# ---- how groups meet ---------------------------------------------------------------------------------------


def lead_side_by_side(comm):
    """Lead every group from one host, with just enough ports for all."""
    with comm.split(comm.local_rank) as group:
        return total(group, comm.rank)


def test_groups_led_from_one_host_use_ports_that_are_allowed(world_over_hosts):
    first = free_port(21)
    ranks = world_over_hosts(LAYOUTS["2+2"], SHMRING_PORTS=f"{first}-{first + 20}")
    assert ranks(lead_side_by_side) == [2, 4, 2, 4]


def fail_to_lead(comm):
    """Rank 0 has no port for its group; the other group begins."""

    def listen(*_):
        raise shmring.Error("no port is free", rank=0)

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(internode, "listen_nearby", listen)
        try:
            return total(comm.split(comm.rank % 2), comm.rank)
        except shmring.Error as error:
            return str(error), error.rank
        finally:
            comm.barrier()


def test_a_rank_that_cannot_lead_its_group_is_named_in_it(world_over_hosts):
    refused = "rank 0 cannot come to its group: no port is free", 0
    assert world_over_hosts(LAYOUTS["2+2"])(fail_to_lead) == [refused, 4, refused, 4]


def sends_its_key(comm):
    """Return whether the leader of a group sends the key."""
    found = []

    def listen(own, ports):
        listener, invitation = listen_plainly(own, ports)
        found.append(own.world(2, invitation).key in pickle.dumps(invitation))
        return listener, invitation

    listen_plainly = internode.InterNodeLinks.listen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internode.InterNodeLinks, "listen", listen)
        comm.dup().close()
    return found


def test_an_invitation_to_a_group_does_not_hold_the_key(world_over_hosts):
    """Nothing after the start of a world is encrypted."""
    assert world_over_hosts(LAYOUTS["1+1"])(sends_its_key) == [[False], []]


# ---- the cost of waiting ----------------------------------------------------------------------------------


def cpu_s_of_idling(comm, idle_s):
    comm.all_reduce(np.ones(60_000))
    begin = time.process_time()
    time.sleep(idle_s)
    used_s = time.process_time() - begin
    comm.barrier()
    return used_s


def cpu_s_of_waiting(comm, wait_s, count, background):
    comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(wait_s)
    begin = time.process_time()
    work = comm.all_reduce(np.ones(count), async_op=background)
    if background:
        time.sleep(wait_s)  # it is the background that waits
        work.wait()
    return time.process_time() - begin


def test_idle_connections_cost_no_cpu(world_over_hosts):
    for used_s in world_over_hosts(LAYOUTS["2+1+3"])(cpu_s_of_idling, 1.5):
        assert used_s < 0.05


@each_value({"count": [3, 60_000], "background": [False, True]})
def test_a_long_wait_for_another_host_costs_little(world_over_hosts, count, background):
    for used_s in world_over_hosts(LAYOUTS["2+1+3"])(cpu_s_of_waiting, 1.5, count, background):
        assert used_s < 0.15
