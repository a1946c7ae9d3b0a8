"""Groups that are made of others by the methods of a process group, as gloo makes them."""

import datetime

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from ranks import Ranks
from torch_ranks import group_of

from shmring.adapters.torch import replace_gloo

SOON = datetime.timedelta(seconds=20)


def described(group):
    """Return what a group adds up and says of itself; None for none."""
    if group is None:
        return None
    x = torch.tensor([2.0 ** dist.get_rank()])
    group.allreduce([x]).wait()
    return x.item(), group.rank(), group.size(), group.group_name, group.group_desc, group.name()


def split(comm, backend):
    with group_of(comm, backend):
        group = dist.group.WORLD
        found = [
            described(group.split_group([0, 1])),
            described(group.split_group([2, 0])),
            described(group.split_group([1, 2], SOON, None, "name", "description")),
            described(group.split_group(ranks=[0, 2], group_name="other")),
            described(group.split_group([0, 1])),  # once more
        ]
        part = group.split_group([0, 2])
        found.append(None if part is None else described(part.split_group([1])))
        for ranks in ([], [0, 0], [0, 3], [-1]):
            with pytest.raises(RuntimeError):
                group.split_group(ranks)
        with pytest.raises(TypeError):
            group.split_group([0.5])
        return found, described(group)[:3]


def run(function, backend, *arguments):
    replace_gloo(backend == "gloo")
    try:
        with Ranks(3) as ranks:
            return ranks.meet()(function, backend, *arguments)
    finally:
        replace_gloo(False)


@pytest.mark.parametrize("backend", ["shmring", "gloo"])
def test_a_group_is_split(backend):
    found = run(split, backend)
    first = "0:split:[0, 1]"
    expected = [
        [(3.0, 0, 2, first, "default_pg:split:0"), (3.0, 1, 2, first, "default_pg:split:0"), None],
        [
            (5.0, 1, 2, "0:split:[2, 0]", "default_pg:split:1"),
            None,
            (5.0, 0, 2, "0:split:[2, 0]", "default_pg:split:1"),
        ],
        [None, (6.0, 0, 2, "name", "description"), (6.0, 1, 2, "name", "description")],
        [(5.0, 0, 2, "other", "default_pg:split:2"), None, (5.0, 1, 2, "other", "default_pg:split:2")],
        [(3.0, 0, 2, first, "default_pg:split:3"), (3.0, 1, 2, first, "default_pg:split:3"), None],
        [None, None, (4.0, 0, 1, "0:split:[0, 2]:split:[1]", "default_pg:split:4:split:0")],
    ]
    for rank, (groups, whole) in enumerate(found):
        assert groups == [one[rank] and (*one[rank], backend) for one in expected]
        assert whole == (7.0, rank, 3)


def split_in_two(comm):
    """Return by round the members of the group of this rank's half; the groups have one name."""
    mine, found = [0, 1] if comm.rank < 2 else [2, 3], []
    with group_of(comm):
        for _ in range(5):
            group = dist.group.WORLD.split_group(mine, group_name="half")
            x = torch.tensor([2.0**comm.rank])
            group.allreduce([x]).wait()
            found.append(x.item())
        dist.barrier()  # rank 0 serves the store: it must not leave while the other half still meets there
    return found


def test_disjoint_groups_may_have_one_name():
    with Ranks(4) as ranks:
        assert ranks.meet()(split_in_two) == [[3.0] * 5] * 2 + [[12.0] * 5] * 2


def merge(comm, backend, folder):
    with group_of(comm, backend):
        store = dist.FileStore(str(folder / "store"), -1)
        merged = dist.group.WORLD.merge_remote_group(store, 3)
        again = dist.PrefixStore("again", store)
        named = dist.group.WORLD.merge_remote_group(again, 3, SOON, "name", "description")
        with pytest.raises(TypeError, match="store"):
            dist.group.WORLD.merge_remote_group(3, 3)
        return described(merged), described(named)


@pytest.mark.parametrize("backend", ["shmring", "gloo"])
def test_groups_are_merged(tmp_path, backend):
    for one, name, description in zip(
        zip(*run(merge, backend, tmp_path), strict=True),
        ("0:merge", "name"),
        ("default_pg:merge", "description"),
        strict=True,
    ):
        assert sorted(found[1] for found in one) == [0, 1, 2]  # in the order in which they came
        assert {(*found[:1], *found[2:]) for found in one} == {(7.0, 3, name, description, backend)}


def resize_results(comm, backend):
    """The memory of a result is torch's own when the call is complete."""
    with group_of(comm, backend):
        mine, size, found = torch.full((2,), float(comm.rank)), comm.size, []
        for is_async in (False, True):
            out, outs, x = torch.empty(2 * size), [torch.empty(2) for _ in range(size)], torch.ones(4)
            works = [
                dist.all_gather_into_tensor(out, mine, async_op=is_async),
                dist.all_gather(outs, mine, async_op=is_async),
                dist.all_reduce(x, async_op=is_async),
            ]
            for work in works:
                if work is not None:
                    work.wait()
            for tensor in (out, *outs, x):
                tensor.resize_(1000)[tensor.numel() // 2 :] = -1.0
            found.append([*out[:4].tolist(), *outs[1][:2].tolist(), *x[:4].tolist()])
            dist.all_reduce(out)  # the same tensor with other memory
            found.append(out[[0, 3, 999]].tolist())
            out.untyped_storage().resize_(0)
            out.untyped_storage().resize_(4000)
            dist.broadcast(out.fill_(comm.rank), 1)
            found.append(out.unique().tolist())
        return found


@pytest.mark.parametrize("backend", ["shmring", "gloo"])
def test_results_can_be_resized(backend):
    expected = [[0, 0, 1, 1, 1, 1, 3, 3, 3, 3], [0, 3, -3], [1]] * 2
    assert run(resize_results, backend) == [expected] * 3
