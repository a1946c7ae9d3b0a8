"""The process group of the torch backend: every operation against shmring's or torch's own result on the same
tensors, in every kind of memory."""

import contextlib
import ctypes
import functools
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from ranks import Ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_ranks import group_of

import shmring
from shmring._core import kernels
from shmring._diagnostics import flight_recorder

SIZES = (1, 2, 3, 5)
COUNTS = (0, 1, 7, 3000, 90_000)
DTYPES = {getattr(torch, name): name for name in flight_recorder.DTYPES}
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
MEMORIES = {  # name → function that makes a tensor with the values of a contiguous one
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: torch.stack([x, x], 1)[:, 0],
    "channels last": lambda x: (
        x.clone().reshape(1, 1, 1, -1).to(memory_format=torch.channels_last).reshape(-1)
    ),
    "part of a parameter": lambda x: _part(x),
}


def _part(x):
    if not (x.is_floating_point() or x.is_complex()) or x.element_size() == 1:
        return x.clone()
    return torch.nn.Parameter(torch.cat([x, x]))[: x.numel()].detach()


@pytest.fixture(params=SIZES)
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks.meet()


def values_of(dtype, count, rank):
    """Small numbers, that sums of few do not round; bytes of all kinds for opaque dtypes."""
    rng = np.random.default_rng(1000 * count + rank)
    whole = torch.from_numpy(rng.integers(0, 4, max(count, 1)))[:count]
    if dtype.is_complex:
        return (whole + 1j * whole.flip(0)).to(dtype)
    return whole.to(dtype)


def same(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert bytes_of(got) == bytes_of(want)


def bytes_of(x):
    x = x.detach().contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""


# ---- reductions -------------------------------------------------------------------------------------------


def reduce_everything(comm, op_name, memory):
    with group_of(comm) as group:
        for dtype, name in DTYPES.items():
            if op_name not in kernels.ops(name) or dtype.is_complex:  # torch hands on complex ones as real
                continue
            for count in COUNTS:
                given = values_of(dtype, count, comm.rank)
                tensor = MEMORIES[memory](given)
                want = given.clone()
                comm.all_reduce(shmring.Memory(want.data_ptr(), count, name, owner=want), op_name)
                asynchronous = count % 2 == 1
                work = dist.all_reduce(tensor, REDUCE_OPS[op_name], async_op=asynchronous)
                if asynchronous:
                    work.wait()
                    assert work.is_completed()
                    assert work.is_success()
                same(tensor, want)
        return group.size()


@pytest.mark.parametrize("op_name", REDUCE_OPS)
def test_all_reduce_equals_shmrings(ranks, op_name):
    for memory in MEMORIES if ranks.size == 2 else ("contiguous",):
        assert ranks(reduce_everything, op_name, memory) == [ranks.size] * ranks.size


def reduce_rarely(comm):
    """Complex numbers, scaled sums, several tensors as one, sums of parts, and reductions to one rank."""
    n, rank = comm.size, comm.rank
    with group_of(comm) as group:
        z = torch.tensor([1 + 2j, 3 - rank * 1j])
        dist.all_reduce(z)
        same(z, torch.tensor([n + 2j * n, 3 * n - 1j * n * (n - 1) / 2]))
        x = torch.arange(5.0)
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        same(x, torch.arange(5.0) * n / 2)
        row = torch.arange(10.0).reshape(5, 2)[:, 0].expand(2, 5)[:1]  # of stride 0, with no element twice
        dist.all_reduce(row)
        same(row, torch.arange(0, 10.0, 2).reshape(1, 5) * n)
        many = [torch.full((k,), float(rank)) for k in (1, 7, 100)] + [torch.tensor([[rank, 2]])]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in many:
                dist.all_reduce(tensor)
        manager.wait()
        total = n * (n - 1) / 2
        for tensor in many[:-1]:
            same(tensor, torch.full_like(tensor, total))
        same(many[-1], torch.tensor([[int(total), 2 * n]]))
        y = torch.full((4, 3), float(rank + 1)).t()
        dist.reduce(y, n - 1)
        same(y, torch.full((3, 4), n * (n + 1) / 2 if rank == n - 1 else rank + 1.0))
        parts = [torch.full((2, 3), float(r + rank)) for r in range(n)]
        out = torch.empty(3, 2).t()
        dist.reduce_scatter(out, parts)
        same(out, torch.full((2, 3), sum(float(rank + r) for r in range(n))))
        same(parts[0], torch.full((2, 3), float(rank)))
        whole = torch.arange(float(2 * n))
        mine = torch.empty(2)
        dist.reduce_scatter_single(mine, whole, dist.ReduceOp.MAX)
        same(mine, torch.tensor([2.0 * rank, 2.0 * rank + 1]))
        group._reduce_scatter_base(mine, whole, c10d.ReduceScatterOptions()).wait()
        same(mine, torch.tensor([2.0 * rank, 2.0 * rank + 1]) * n)


def test_other_reductions(ranks):
    ranks(reduce_rarely)


def reduce_overlapping(comm):
    """Tensors that overlap get the results for their values before the call, as with gloo."""
    n, sums = comm.size, comm.size * torch.arange(6) + 5 * comm.size * (comm.size - 1)
    with group_of(comm):
        for op, dtype, want in (
            (dist.ReduceOp.SUM, torch.float32, sums),
            (dist.ReduceOp.AVG, torch.int64, sums // n),
        ):
            given = (torch.arange(6) + 10 * comm.rank).to(dtype)
            for x in given.clone(), torch.stack([given, given], 1)[:, 0]:
                with dist._coalescing_manager():
                    for one in (x[1:3], x, x, x[3:3], x[2:5]):
                        dist.all_reduce(one, op)
                same(x, want.to(dtype))


def test_a_coalesced_reduction_of_overlapping_tensors(ranks):
    ranks(reduce_overlapping)


def average_integers(comm):
    n, rank, average = comm.size, comm.rank, dist.ReduceOp.AVG
    with group_of(comm):
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
            for count in (1, 7, 3000):
                given = (torch.arange(count) % 11 - 3 + 2 * rank).to(dtype)
                all_given = [(torch.arange(count) % 11 - 3 + 2 * r).to(dtype) for r in range(n)]
                # As Lightning has it with gloo. The sums wrap around, as all sums of integers do.
                want = (sum(x.long() for x in all_given).to(dtype).double() / n).trunc().to(dtype)
                x, strided, root, part = (
                    given.clone(),
                    torch.stack([given, given], 1)[:, 0],
                    given.clone(),
                    given[:1],
                )
                dist.all_reduce(x, average)
                same(x, want)
                dist.all_reduce(strided, average, async_op=True).wait()
                same(strided, want)
                dist.reduce(root, n - 1, average)
                same(root, want if rank == n - 1 else given)
                with dist._coalescing_manager(async_ops=True) as manager:
                    for one in (x := given.clone(), strided := torch.stack([given, given], 1)[:, 0]):
                        dist.all_reduce(one, average)
                manager.wait()
                same(x, want)
                same(strided, want)
                whole, mine = given.repeat(n), torch.empty_like(given)
                dist.reduce_scatter_single(mine, whole, average)
                same(mine, want)
                dist.reduce_scatter(part, [given[:1]] * n, average)
                same(part, want[:1])
        with pytest.raises(TypeError, match="avg has no meaning for bool"):
            dist.all_reduce(torch.ones(1, dtype=torch.bool), average)


def test_averages_of_integers_are_rounded_toward_zero(ranks):
    ranks(average_integers)


def average_or_add(comm):
    with group_of(comm):
        x = torch.ones(3, dtype=torch.int64)
        with pytest.raises(shmring.Mismatch):
            dist.all_reduce(x, dist.ReduceOp.AVG if comm.rank else dist.ReduceOp.SUM)


def test_ranks_that_average_integers_do_not_meet_those_that_add_them():
    with Ranks(2) as ranks:
        ranks.meet()(average_or_add)


def add_sparse(comm):
    with group_of(comm):
        for asynchronous in (False, True):
            entries = torch.tensor([[0, comm.rank % 2], [1, 2]])
            x = torch.sparse_coo_tensor(entries, torch.ones(2, 3) * (comm.rank + 1), (2, 4, 3))
            dense = x.to_dense()
            if comm.rank == 1:
                x, dense = torch.sparse_coo_tensor((2, 4, 3)), torch.zeros(2, 4, 3)
                x = torch.zeros(2, 4, 3).to_sparse(2)
            work = dist.all_reduce(x, async_op=asynchronous)
            if asynchronous:
                work.wait()
            dist.all_reduce(dense)
            same(x.to_dense(), dense)


def test_sparse_sums(three):
    three(add_sparse)


def use_sparse_sums(comm):
    """Check that a sum is an ordinary tensor if its summands were, with 0 to 2 sparse dimensions."""
    with group_of(comm):
        for is_inference in (False, True):
            for nsparse in (0, 1, 2):
                with torch.inference_mode(is_inference):
                    dense = torch.ones(2, 3) * (comm.rank + 1)
                    x = dense.to_sparse(nsparse) if nsparse else _without_sparse_dimensions(dense)
                dist.all_reduce(x, async_op=True).wait()
                dist.all_reduce(x)
                dist.all_reduce(dense)
                dist.all_reduce(dense)
                assert x.is_inference() == is_inference
                with torch.inference_mode(is_inference):
                    same(x.to_dense(), dense)
                    assert x.values().is_inference() == x.indices().is_inference() == is_inference


def _without_sparse_dimensions(dense):
    return torch.sparse_coo_tensor(torch.empty(0, 1, dtype=torch.int64), dense[None], dense.shape)


def test_sparse_sums_are_tensors_like_their_summands(three):
    three(use_sparse_sums)


def overlap_in_part(comm):
    """Compare calls whose input overlaps their output with the same calls on a copy of the input."""
    n, rank = comm.size, comm.rank
    nrows = n * (n + 1) // 2 if rank == 0 else 0

    def parts(x):
        return list(x.view(n, -1))

    def pieces(x):
        return list(x[: n * (n + 1) // 2].split(list(range(1, n + 1))))

    calls = {
        "first part": lambda x, y: dist.reduce_scatter_tensor(x[:n], y),
        "last part": lambda x, y: dist.reduce_scatter_tensor(x[-n:], y),
        "own part": lambda x, y: dist.reduce_scatter_tensor(parts(x)[rank], y),
        "between": lambda x, y: dist.reduce_scatter_tensor(x[1 : n + 1], y, async_op=True).wait(),
        "last to all": lambda x, y: dist.all_gather(parts(x), parts(y)[-1]),
        "own to all": lambda x, y: dist.all_gather_into_tensor(x, parts(y)[rank]),
        "next to all": lambda x, y: dist.all_gather_into_tensor(x, parts(y)[(rank + 1) % n]),
        "scatter": lambda x, y: dist.scatter(parts(x)[0], parts(y) if rank == 1 else None, 1),
        "gather": lambda x, y: dist.gather(parts(y)[0], parts(x) if rank == 1 else None, 1),
        "pieces to all": lambda x, y: dist.all_gather(pieces(x[1:]), pieces(y)[rank]),
        "exchange": lambda x, y: dist.all_to_all(parts(x)[::-1], parts(y)),
        "in place": lambda x, y: dist.all_to_all(parts(x), parts(y)),
        "rows": lambda x, y: dist.all_to_all_single(
            x[1 : rank + 2], y[:nrows], [rank + 1, *[0] * (n - 1)], [k + 1 if nrows else 0 for k in range(n)]
        ),
    }
    with group_of(comm):
        for dtype in (torch.float32, torch.bool):
            for name, call in calls.items():
                x = (torch.arange(n * n) + 7 * rank).remainder(5).to(dtype)
                expected = x.clone()
                call(expected, x.clone())
                call(x, x)
                assert torch.equal(x, expected), name


def test_inputs_that_overlap_outputs_in_part(three):
    three(overlap_in_part)


# ---- moving -----------------------------------------------------------------------------------------------


def move_everything(comm, dtype, count, strided):
    n, rank = comm.size, comm.rank

    def x_of(r, k=0):
        return values_of(dtype, count, 10 * r + k)

    def room():
        place = torch.zeros(count, 2, dtype=dtype)[:, 0] if strided else torch.zeros(count, dtype=dtype)
        return place

    def given(r, k=0):
        place = room()
        place.copy_(x_of(r, k))
        return place

    with group_of(comm):
        root = n - 1
        x = given(rank)
        dist.broadcast(x, root)
        same(x, x_of(root))
        outs = [room() for _ in range(n)]
        dist.all_gather(outs, given(rank))
        for r in range(n):
            same(outs[r], x_of(r))
        side_by_side = torch.zeros(n, count, dtype=dtype)
        dist.all_gather(list(side_by_side), given(rank))
        for r in range(n):
            same(side_by_side[r], x_of(r))
        dist.all_gather_single(side_by_side, given(rank))
        same(side_by_side, torch.stack([x_of(r) for r in range(n)]))
        outs = [room() for _ in range(n)] if rank == root else None
        dist.gather(given(rank), outs, root)
        for r in range(n if rank == root else 0):
            same(outs[r], x_of(r))
        out = room()
        dist.scatter(out, [given(root, k) for k in range(n)] if rank == root else None, root)
        same(out, x_of(root, rank))
        outs = [room() for _ in range(n)]
        dist.all_to_all(outs, [given(rank, k) for k in range(n)])
        for r in range(n):
            same(outs[r], x_of(r, rank))
        together = torch.zeros(n * count, dtype=dtype)
        dist.all_to_all_single(together, torch.cat([x_of(rank, k) for k in range(n)]))
        same(together, torch.cat([x_of(r, rank) for r in range(n)]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_moving(ranks, dtype):
    for count, strided in ((0, False), (1, True), (50, True), (50, False), (20_000, False)):
        if dtype is torch.float8_e5m2 and strided:
            continue
        ranks(move_everything, dtype, count, strided)


def exchange_uneven(comm):
    n, rank = comm.size, comm.rank
    with group_of(comm) as group:
        gives = [rank + k for k in range(n)]
        takes = [r + rank for r in range(n)]
        x = torch.cat([torch.full((rank + k, 3), 10 * rank + k) for k in range(n)])
        out = torch.empty((sum(takes), 3), dtype=torch.int64)
        dist.all_to_all_single(out, x, takes, gives)
        same(out, torch.cat([torch.full((r + rank, 3), 10 * r + rank) for r in range(n)]))
        outs = [torch.empty(r) for r in range(n)]
        group.allgather([outs], [torch.full((rank,), float(rank))]).wait()
        for r in range(n):
            same(outs[r], torch.full((r,), float(r)))
        lists = [[torch.empty(2), torch.empty(3)] for _ in range(n)]
        dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), rank + 0.5)])
        for r in range(n):
            same(lists[r][0], torch.full((2,), float(r)))
            same(lists[r][1], torch.full((3,), r + 0.5))
        with pytest.raises(ValueError, match="split sizes"):
            group.all_to_all_single(out, x, takes, [length + 1 for length in gives])


def test_pieces_of_other_lengths(ranks):
    ranks(exchange_uneven)


def messages(comm):
    n, rank = comm.size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    with group_of(comm):
        x, out = torch.full((4, 2), float(rank)).t(), torch.zeros(4, 2).t()
        ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, out, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        same(out, torch.full((2, 4), float(left)))
        if rank == 0:
            seen = set()
            for _ in range(n - 1):
                message = torch.zeros(1)
                source = dist.recv(message)
                seen.add(source)
                same(message, torch.tensor([float(source)]))
            assert seen == set(range(1, n))
        else:
            dist.send(torch.tensor([float(rank)]), 0)
        big = torch.zeros(1_000_000)
        if rank == 0 and n > 1:
            dist.send(torch.ones(1_000_000), 1, tag=3)
        elif rank == 1:
            work = dist.irecv(big, 0, tag=3)
            work.wait()
            assert work.source_rank() == 0
            same(big, torch.ones(1_000_000))


def test_messages(three):
    three(messages)


# ---- futures, threads and modes ---------------------------------------------------------------------------


def chained(comm):
    """A callback that makes another call and waits for it, as PowerSGD's hook does."""
    with group_of(comm):
        for _ in range(20):

            def again(future):
                x = future.value()[0]
                return dist.all_reduce(x, async_op=True).get_future().wait()[0]

            futures = []
            for k in range(4):
                time.sleep(0.001 * (comm.rank == k % comm.size))
                x = torch.full((1000,), float(k))
                futures.append(dist.all_reduce(x, async_op=True).get_future().then(again))
            for k, future in enumerate(futures):
                same(future.wait(), torch.full((1000,), float(k * comm.size**2)))


def test_callbacks_that_make_calls(three):
    three(chained)


def futures_from_outside(comm):
    """Use a Work as torch's C++ does: the future completes with the call, whichever thread waits."""
    with group_of(comm) as group:
        x = torch.ones(300_000)
        work = group.allreduce([x], c10d.AllreduceOptions())
        time.sleep(0.05 * (comm.rank == 0))
        future = work.get_future()
        same(future.wait()[0], torch.full((300_000,), float(comm.size)))
        if comm.rank == 0:
            for rank in range(1, comm.size):
                comm.recv(bytearray(1), rank)
        y = torch.ones(1)
        future = group.allreduce([y], c10d.AllreduceOptions()).get_future()
        was_done = future.done()
        if comm.rank != 0:
            comm.send(b"x", 0)
        same(future.wait()[0], torch.tensor([float(comm.size)]))
        return was_done


def test_futures_of_calls_that_take_long(three):
    assert three(futures_from_outside)[1:] == [False, False]


def callbacks_from_outside(comm):
    """A callback waits for the future of another call: no future waits for the thread that runs callbacks."""
    with group_of(comm) as group:

        def again(future):
            time.sleep(0.1 * (comm.rank == 0))
            return group.allreduce([future.value()[0]], c10d.AllreduceOptions()).get_future().wait()[0]

        time.sleep(0.1 * (comm.rank == 0))
        future = group.allreduce([torch.ones(1)], c10d.AllreduceOptions()).get_future()
        return future.then(again).wait().item()


def test_callbacks_that_wait_for_futures(three):
    assert three(callbacks_from_outside) == [9.0] * 3


def groups_in_other_orders(comm):
    """Rank by rank the groups are used in another order, all at once."""
    with group_of(comm):
        groups = [dist.new_group() for _ in range(3)]
        results = []
        order = [(comm.rank + k) % 3 for k in range(3)]
        for _ in range(10):
            xs = [torch.full((5000,), float(k)) for k in range(3)]
            works = [dist.all_reduce(xs[k], group=groups[k], async_op=True) for k in order]
            for work in reversed(works):
                work.wait()
            results += [bool((xs[k] == k * comm.size).all()) for k in range(3)]
        pair = dist.new_group([0, 2])
        x = torch.tensor([1.0])
        if comm.rank != 1:
            dist.all_reduce(x, group=pair)
            assert dist.get_rank(pair) == comm.rank // 2
        return all(results), float(x)


def test_groups(three):
    assert three(groups_in_other_orders) == [(True, 2.0), (True, 1.0), (True, 2.0)]


def threads_at_once(comm):
    """Use one group from two threads, with the same result on all ranks in any order of arrival."""
    with group_of(comm):
        results = []

        def run():
            for _ in range(200):
                x = torch.ones(100)
                dist.all_reduce(x)
                results.append(bool((x == comm.size).all()))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(results), all(results)


def test_threads(three):
    assert three(threads_at_once) == [(400, True)] * 3


def staged_results(comm):
    """Check that results are there when the work is completed, and after other calls even without a wait."""
    with group_of(comm):
        outs = [torch.zeros(3, 2).t() for _ in range(comm.size)]
        work = dist.all_gather(outs, torch.full((2, 3), float(comm.rank)), async_op=True)
        while not work.is_completed():
            pass
        for rank, out in enumerate(outs):
            same(out, torch.full((2, 3), float(rank)))
        y = torch.zeros(1)
        for call in (
            dist.barrier,
            lambda: dist.all_reduce(y),
            lambda: dist.broadcast(y, 0),
            lambda: dist.all_gather_into_tensor(torch.zeros(comm.size), y),
            lambda: dist.reduce_scatter_tensor(y, torch.zeros(comm.size)),
            lambda: dist.reduce(y, 0),
        ):
            x = torch.ones(4, 3)
            dist.all_reduce(x.t(), async_op=True)
            call()
            same(x, torch.full((4, 3), float(comm.size)))


def test_results_that_were_staged(three):
    three(staged_results)


def dropped_at_the_end(comm):
    """Destroy the group while a call with a result that is staged is under way."""
    x = torch.ones(4, 3)
    with group_of(comm):
        time.sleep(0.2 * (comm.rank == 0))
        dist.all_reduce(x.t(), async_op=True)
    return bool((x == comm.size).all())


def test_results_of_calls_under_way_at_the_end(three):
    assert three(dropped_at_the_end) == [True] * 3


def staged_messages(comm):
    """Check that a barrier finishes the messages that have come, and waits for no other, nor does the end."""
    with group_of(comm):
        came, never = torch.zeros(3, 2).t(), torch.zeros(3, 2).t()
        work = dist.irecv(came, (comm.rank - 1) % comm.size)
        dist.irecv(never, (comm.rank - 1) % comm.size, tag=5)
        dist.barrier()
        dist.send(torch.ones(2, 3), (comm.rank + 1) % comm.size)
        work.wait()
        same(came, torch.ones(2, 3))
        forgotten = torch.zeros(3, 2).t()
        dist.irecv(forgotten, (comm.rank - 1) % comm.size, tag=6)
        dist.send(torch.ones(2, 3), (comm.rank + 1) % comm.size, tag=6)
        dist.barrier()
        same(forgotten, torch.ones(2, 3))
        comm.barrier()  # a rank that leaves ends the receive that no message matches, and so the group
        return True


def test_messages_that_are_staged(three):
    assert three(staged_messages) == [True] * 3


def messages_beside_calls(comm):
    """One thread waits for a message while another is in a barrier, and a third sends."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with group_of(comm):
        came = torch.zeros(1)
        threads = [threading.Thread(target=dist.recv, args=(came, left))]
        if comm.rank == 0:
            threads.append(threading.Thread(target=dist.barrier))
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        dist.send(torch.tensor([float(comm.rank)]), right)
        threads[0].join()
        if comm.rank == 0:
            threads[1].join()
        else:
            dist.barrier()
        return float(came)


def test_messages_beside_calls(three):
    assert three(messages_beside_calls) == [2.0, 0.0, 1.0]


def results_of_functional_collectives(comm):
    import torch.distributed._functional_collectives as functional

    with group_of(comm):
        y = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
        dist.all_reduce(y)
        same(y + 0, torch.full((3,), float(comm.size**2)))


def test_what_is_waited_for_when_it_is_used(three):
    three(results_of_functional_collectives)


def call_without_elements(comm, is_fake):
    """Check that calls of tensors without elements are complete at once, even if other ranks do not call."""
    n, made = comm.size, functools.partial(torch.zeros, device=None if is_fake else "meta")
    with group_of(comm) as group, FakeTensorMode() if is_fake else contextlib.nullcontext():
        x, whole, parts, transposed = made(2), made(2 * n), [made(2) for _ in range(n)], made(3, 2).t()
        calls = [
            lambda **later: dist.all_reduce(x, **later),
            lambda **later: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0), **later),
            lambda **later: dist.reduce(transposed, 0, **later),
            lambda **later: dist.broadcast(transposed, 0, **later),
            lambda **later: dist.all_gather(parts, x, **later),
            lambda **later: dist.all_gather_into_tensor(whole, x, **later),
            lambda **later: dist.gather(x, parts if comm.rank == 0 else None, **later),
            lambda **later: dist.scatter(x, parts if comm.rank == 0 else None, **later),
            lambda **later: dist.reduce_scatter(x, parts, **later),
            lambda **later: dist.reduce_scatter_tensor(x, whole, **later),
            lambda **later: dist.all_to_all(parts, parts, **later),
            lambda **later: dist.all_to_all_single(whole, whole, **later),
            lambda **later: dist.isend(x, 1 - comm.rank) if later else dist.recv(x),
        ]
        for call in calls if comm.rank < 2 else []:
            call()
            work = call(async_op=True)
            assert work.wait()
            assert work.is_completed()
    return group._get_sequence_number_for_group()


@pytest.mark.parametrize("is_fake", [False, True])
def test_tensors_without_elements(three, is_fake):
    assert three(call_without_elements, is_fake) == [0] * 3


class Nothing(TorchDispatchMode):
    """In this mode no operation of torch may run."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        raise AssertionError(f"{op} was called")


def in_a_mode(comm):
    with group_of(comm):
        x, strided = torch.ones(4), torch.ones(4, 2).t()
        outs = list(torch.zeros(comm.size, 4))
        with Nothing():
            dist.all_reduce(x)
            dist.all_reduce(strided)
            dist.all_gather(outs, x)
            dist.broadcast(strided, 0)
            dist.all_reduce(x, async_op=True).wait()
        same(strided, torch.full((2, 4), float(comm.size)))


def test_nothing_of_torch_runs_in_the_callers_mode(three):
    three(in_a_mode)


def across_hosts(comm):
    with group_of(comm) as group:
        x = torch.full((70_000,), float(comm.rank + 1))
        dist.all_reduce(x)
        objects = [None] * comm.size
        dist.all_gather_object(objects, {"rank": comm.rank})
        return float(x[-1]), group.comm.num_nodes, objects[-1]["rank"]


def test_several_hosts():
    with Ranks(3, nodes=[0, 0, 1]) as ranks:
        assert ranks.meet()(across_hosts) == [(6.0, 2, 2)] * 3


def seen_by_the_profiler(comm):
    with group_of(comm):
        x, row = torch.ones(3), torch.zeros(2)
        with torch.profiler.profile(record_shapes=True) as seen:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
            dist.broadcast(x, 0)
            if comm.rank == 1:
                dist.send(row, 0)
            elif comm.rank == 0:
                dist.recv(row, 1)
        dist.all_reduce(x)  # no thread waits for its result
        events = [event for event in seen.events() if event.name.startswith("shmring:")]
        return [(event.name, event.input_shapes) for event in events]


def test_the_profiler_sees_calls_and_their_shapes(three):
    calls = [("shmring:all_reduce", [[3]])] * 2 + [("shmring:broadcast", [[3]])]
    messages = [("shmring:recv", [[2]])], [("shmring:send", [[2]])], []
    assert three(seen_by_the_profiler) == [calls + own for own in messages]
