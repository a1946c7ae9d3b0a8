"""shmring in the place of gloo: programs that ask for gloo get shmring, and see what gloo would show them.

Most tests run a function on gloo itself and in its place, and compare.
"""

import contextlib
import datetime
import logging
import os
import sys
import time
import warnings

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from engines import output_of, start, write_script
from ranks import Died, Ranks, free_port, until_there
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from torch_ranks import LIMIT_S, NEWS_S, as_array, as_if_installed, assert_same, die, group_of
from waiting import counted_s

import shmring
from shmring.adapters._torch import replacement, tensors
from shmring.adapters._torch.replacement import Replacement
from shmring.adapters.torch import replace_gloo

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@contextlib.contextmanager
def in_place(on=True):
    replace_gloo(on)
    try:
        yield
    finally:
        replace_gloo(False)


def run(comm, on, backend, function, args):
    with in_place(on), group_of(comm, backend) as group:
        assert isinstance(group, Replacement) is on
        return pytree.tree_map_only(torch.Tensor, as_array, function(comm.rank, *args))


def of_both(ranks, backend, function, *args):
    """Return by rank the result in gloo's place, after comparing it with gloo's."""
    ours = ranks(run, True, backend, function, args)
    assert_same(ours, ranks(run, False, backend, function, args))
    return ours


def outcome_of(call, *args, **how):
    """Return what the call returns, or its error."""
    try:
        return call(*args, **how)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


# ---- every way to ask for it ------------------------------------------------------------------------------

ASKED = ["gloo", "GLOO", dist.Backend.GLOO, None, "cpu:gloo", "cpu:gloo,cuda:gloo"]


def ask_everything(rank):
    """Return what a program can see of its groups, and results of calls of each kind."""
    world, size = dist.group.WORLD, dist.get_world_size()
    pair = dist.new_group([0, 1], backend="gloo")
    like_world = dist.new_group()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    assert mesh.get_group() is world or mesh.get_group().size() == size
    groups = {"world": world, "like the world": like_world, "mesh": mesh.get_group()}
    if rank < 2:
        groups["pair"] = pair
    else:
        assert pair is dist.GroupMember.NON_GROUP_MEMBER
    found = {}
    for name, group in groups.items():
        x = torch.arange(4.0) + rank
        dist.all_reduce(x, group=group)
        objects = [None] * dist.get_world_size(group)
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        found[name] = {
            "backend": str(dist.get_backend(group)),
            "is gloo": dist.get_backend(group) is dist.Backend.GLOO,
            "config": dist.get_backend_config(group),
            # torch 2.13 itself has no name for groups of "device:backend".
            "name": None if ":" in dist.get_backend(group) else (group.name(), group._get_backend_name()),
            "devices": sorted(device.type for device in group._device_types),
            "device of objects": c10d._get_object_coll_device(group),
            "ranks": dist.get_process_group_ranks(group),
            "sum": x,
            "objects": objects,
            "lazy sum": funcol.all_reduce(torch.ones(3) * rank, "sum", group) + 0,
            "barrier": outcome_of(dist.monitored_barrier, group),
            "split": outcome_of(dist.split_group, group, [[0]]),
        }
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("asked", ASKED, ids=["gloo", "upper", "constant", "default", "cpu", "both devices"])
def test_whoever_asks_for_gloo_gets_it(world_of, size, asked):
    for found in of_both(world_of(size), asked, ask_everything):
        assert found["world"]["sum"][0] == sum(range(size))


def kinds_of_groups(rank):
    groups = [
        dist.group.WORLD,
        dist.new_group(backend="gloo"),
        dist.new_group(),
        dist.new_group(backend="cpu:gloo", group_desc="mine"),
        dist.new_group(backend="gloo", device_id=torch.device("cuda", 0)),
        init_device_mesh("cpu", (dist.get_world_size(),)).get_group(),
    ]
    return [type(group).__name__ for group in groups]


def test_all_groups_are_replaced_and_none_without(world_of):
    ranks = world_of(2)
    assert ranks(run, True, "gloo", kinds_of_groups, ()) == [["Replacement"] * 6] * 2
    assert ranks(run, False, "gloo", kinds_of_groups, ()) == [["ProcessGroup"] * 6] * 2


def replace_twice_and_back(comm):
    make = c10d._new_process_group_helper
    replace_gloo()
    ours = c10d._new_process_group_helper
    replace_gloo()
    assert c10d._new_process_group_helper is ours is not make
    replace_gloo(False)
    replace_gloo(False)
    assert c10d._new_process_group_helper is make
    with group_of(comm, "gloo") as group:
        assert type(group) is dist.ProcessGroup
    with in_place(), group_of(comm, "shmring") as group:
        assert type(group).__name__ == "Group"
        assert dist.get_backend() == "shmring"


def test_replacing_is_idempotent_and_has_a_way_back(world_of):
    world_of(2)(replace_twice_and_back)


def begin_and_end_often(comm):
    sums = []
    with in_place():
        for _ in range(3):
            with group_of(comm, "gloo"):
                x = torch.ones(2)
                dist.all_reduce(x)
                sums.append(x.tolist())
    return sums


def test_groups_are_destroyed_and_made_again(world_of):
    assert world_of(3)(begin_and_end_often) == [[[3.0, 3.0]] * 3] * 3


def reduce_over_hosts(rank):
    x = torch.full((70_000,), float(rank + 1))
    dist.all_reduce(x)
    return x[-1], getattr(dist.group.WORLD, "comm", None) is None or dist.group.WORLD.comm.num_nodes == 2


def test_ranks_of_several_hosts():
    with Ranks(3, nodes=[0, 0, 1]) as ranks:
        assert of_both(ranks.meet(), "gloo", reduce_over_hosts) == [(6.0, True)] * 3


# ---- from the environment ---------------------------------------------------------------------------------

ASKS = """
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(2)
    dist.all_reduce(x)
    kind = type(dist.group.WORLD).__name__
    print(f"rank {dist.get_rank()}: {kind} {x.tolist()}", flush=True)
    if kind == "ProcessGroup":  # else the ranks end as many programs do
        dist.destroy_process_group()
"""


@pytest.fixture
def installed(tmp_path):
    return as_if_installed(tmp_path)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({"SHMRING_REPLACES": "gloo"}, "Replacement"),
        ({"SHMRING_REPLACES": " "}, "ProcessGroup"),
        ({}, "ProcessGroup"),
        ({"SHMRING_REPLACES": "gloo", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "ProcessGroup"),
    ],
    ids=["on", "empty", "off", "no autoload"],
)
def test_the_variable(installed, tmp_path, how, kind):
    text = output_of(start(*TORCHRUN, 2, write_script(tmp_path, ASKS), **installed, **how))
    for rank in range(2):
        assert f"rank {rank}: {kind} [2.0, 2.0]" in text
    assert "Traceback" not in text  # also at the end of ranks that do not destroy the group
    assert "Exception ignored" not in text


def test_an_unknown_value_is_an_error(installed):
    process = start(sys.executable, "-c", "import torch", **installed, SHMRING_REPLACES="glo")
    text = process.communicate(timeout=LIMIT_S * 3)[0]
    assert process.returncode != 0
    assert "ValueError: SHMRING_REPLACES is 'glo'; allowed: gloo" in text


TRAINS = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DDP(torch.nn.Linear(3, 1))
    for _ in range(3):
        net(torch.full((2, 3), 1.0 + dist.get_rank())).sum().backward()
    kind = type(dist.group.WORLD).__name__
    print(f"{kind} {net.module.weight.grad.tolist()}", flush=True)
    dist.destroy_process_group()
"""


def test_debug_mode_of_torch(installed, tmp_path):
    how = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "ERROR", "SHMRING_REPLACES": "gloo"}
    text = output_of(start(*TORCHRUN, 2, write_script(tmp_path, TRAINS), **installed, **how))
    assert text.count("Replacement [[9.0, 9.0, 9.0]]") == 2, text


# ---- what shmring does not serve --------------------------------------------------------------------------


@contextlib.contextmanager
def unserved(dtype):
    """As if tensors of this dtype were on a GPU."""
    from shmring.adapters._torch import group

    memory_of, stage_memory = tensors.memory_of, tensors.stage_memory

    def memory_of_others(tensor):
        return None if tensor.dtype == dtype else memory_of(tensor)

    def memory_of_stage(stage):
        if stage.dtype == dtype:
            raise tensors._OtherTensor(f"shmring does not serve {dtype}; ask gloo")
        return stage_memory(stage)

    tensors.memory_of = group.memory_of = memory_of_others
    tensors.stage_memory = memory_of_stage
    group.prepare_compiled(memory_of_others)
    try:
        yield
    finally:
        tensors.memory_of = group.memory_of = memory_of
        tensors.stage_memory = stage_memory
        group.prepare_compiled(memory_of)


def call_with(dtype, rank):
    """Return the results of calls with tensors of the dtype, by name."""
    size = dist.get_world_size()
    x = (torch.arange(2 * size) + rank).to(dtype)
    found = {"all_reduce": x.clone(), "reduce": x.clone(), "broadcast": x.clone(), "async": x.clone()}
    dist.all_reduce(found["all_reduce"])
    dist.broadcast(found["broadcast"], 1)
    dist.reduce(found["reduce"], 0)
    if rank != 0:
        del found["reduce"]
    work = dist.all_reduce(found["async"], dist.ReduceOp.MAX, async_op=True)
    work.wait()
    found["all_gather"] = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(found["all_gather"], x)
    found["all_gather_single"] = x.new_empty(size * x.numel())
    dist.all_gather_into_tensor(found["all_gather_single"], x)
    found["scatter"] = torch.empty_like(x)
    dist.scatter(found["scatter"], [x + other for other in range(size)] if rank == 1 else None, 1)
    found["gather"] = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
    dist.gather(x, found["gather"], 0)
    found["all_to_all"] = torch.empty_like(x)
    dist.all_to_all_single(found["all_to_all"], x)
    found["functional"] = funcol.all_reduce(x, "sum", dist.group.WORLD) + 0
    found["gathered"] = funcol.all_gather_into_tensor_coalesced([x, x * 2], dist.group.WORLD)[1] + 0
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        found["recv"] = torch.empty_like(x)
        dist.recv(found["recv"])  # from any rank; a third rank takes no part
    return found


def call_served_and_others(rank):
    kinds = []
    logging.getLogger("shmring").addHandler(handler := logging.Handler())
    handler.emit = lambda record: kinds.append(record.getMessage())
    with unserved(torch.float64):
        found = {str(dtype): call_with(dtype, rank) for dtype in (torch.float32, torch.float64, torch.int32)}
    logging.getLogger("shmring").removeHandler(handler)
    group = dist.group.WORLD
    if isinstance(group, Replacement):
        assert type(group._gloo) is dist.ProcessGroup
        (text,) = kinds or [""]
        assert text.endswith("shmring does not serve torch.float64") == (rank == 0)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_calls_that_shmring_does_not_serve_go_to_gloo(world_of, size):
    of_both(world_of(size), "gloo", call_served_and_others)


def combine_calls_of_two_kinds(rank):
    """Return the results of combined calls whose first tensors shmring serves, and not the others."""
    size = dist.get_world_size()
    with unserved(torch.float64):
        given = [torch.full((2 * size,), rank + 1, dtype=dtype) for dtype in (torch.float32, torch.float64)]
        sums = [x.new_empty(2) for x in given]
        dist.group.WORLD.reduce_scatter_tensor_coalesced(sums, given).wait()
        dist.all_reduce(total := torch.ones(1))
    return sums, total


def test_gloo_makes_all_of_the_combined_calls_or_none(world_of):
    for sums, total in of_both(world_of(2), "gloo", combine_calls_of_two_kinds):
        assert [x.tolist() for x in sums] == [[3.0, 3.0]] * 2
        assert total == 2.0


def send_between_two(rank):
    """Only two of three ranks need gloo itself."""
    with unserved(torch.float64):
        x = torch.full((3,), float(rank), dtype=torch.float64)
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
        assert rank < 2 or getattr(dist.group.WORLD, "_gloo", None) is None
        return x


def test_a_message_by_gloo_does_not_wait_for_other_ranks(world_of):
    assert [found.tolist() for found in of_both(world_of(3), "gloo", send_between_two)] == [
        [0.0] * 3, [0.0] * 3, [2.0] * 3,
    ]  # fmt: skip


def use_a_device(rank):
    """The group of gloo has a backend for GPUs, and meta tensors pass."""
    group = dist.group.WORLD
    dist.all_reduce(torch.ones(3, device="meta"))
    backend = group._get_backend(torch.device("cuda"))
    absent = outcome_of(group._get_backend, torch.device("xpu"))
    assert backend is group or isinstance(backend, c10d.ProcessGroupGloo)
    if not torch.cuda.is_available():
        assert getattr(group, "_gloo", None) is None  # asking has not made it
    return str(absent).startswith("RuntimeError")


def test_other_devices(world_of):
    assert of_both(world_of(2), "gloo", use_a_device) == [True] * 2


def ask_for_more(comm, has_options, backend, reason):
    """A group that asks for what shmring does not know is gloo's, and the log of rank 0 says why."""
    texts = []
    logging.getLogger("shmring").addHandler(handler := logging.Handler())
    handler.emit = lambda record: texts.append(record.getMessage())
    try:
        with in_place(), group_of(comm, "gloo"):
            options = c10d.ProcessGroupGloo._Options() if has_options else None
            group = dist.new_group(backend=backend, pg_options=options)
            assert type(group) is dist.ProcessGroup
            x = torch.ones(1)
            dist.all_reduce(x, group=group)
            kinds = {device.type: type(group._get_backend(device)).__name__ for device in group._device_types}
    finally:
        logging.getLogger("shmring").removeHandler(handler)
    assert [reason in text for text in texts] == ([True] if comm.rank == 0 else []), texts
    return x.tolist(), kinds


@pytest.mark.parametrize(
    ("has_options", "backend", "reason"),
    [
        (True, "gloo", "options"),
        (False, "cpu:gloo,cuda:fake", "several backends"),
    ],
    ids=["options", "mixed"],
)
def test_groups_that_stay_with_gloo(world_of, has_options, backend, reason):
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")

    for total, kinds in world_of(2)(ask_for_more, has_options, backend, reason):
        assert total == [2.0]
        assert kinds["cpu"] == "ProcessGroupGloo"
        assert "fake" not in backend or kinds["cuda"] == "FakeProcessGroup"


def check_for_nan(comm):
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    try:
        with in_place(), group_of(comm, "gloo") as group:
            return type(group).__name__
    finally:
        del os.environ["TORCH_DIST_NAN_CHECK"]


@pytest.mark.skipif(not hasattr(c10d, "NanCheckHook"), reason="torch has no such check before 2.14")
def test_checks_for_nan_are_gloos(world_of):
    assert world_of(2)(check_for_nan) == ["ProcessGroup"] * 2


def register_hooks(comm):
    """Return what the making of the group warns of."""
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    try:
        with warnings.catch_warnings(record=True) as caught, group_of(comm) as group:
            for register in (group.register_pre_hook, group.register_post_hook):
                with pytest.raises(RuntimeError, match="no hooks"):
                    register(1, print)
    finally:
        del os.environ["TORCH_DIST_NAN_CHECK"]
    return [str(one.message) for one in caught]


def test_no_group_of_shmring_has_hooks(world_of):
    for caught in world_of(2)(register_hooks):
        assert any("TORCH_DIST_NAN_CHECK has no effect" in text for text in caught)


def meet_with_another_version(comm):
    if comm.rank == 1:
        shmring.__version__ += ".another"
    try:
        with in_place(), group_of(comm, "gloo") as group:
            x = torch.ones(1)
            dist.all_reduce(x)
            return type(group).__name__, x.tolist()
    finally:
        shmring.__version__ = shmring.__version__.removesuffix(".another")


def test_ranks_with_different_versions_use_gloo(world_of):
    assert world_of(3)(meet_with_another_version) == [("ProcessGroup", [3.0])] * 3


def only_one_replaces(comm):
    """Return what the error says beside its message."""
    with in_place(comm.rank == 1):
        try:
            with group_of(comm, "gloo", seconds=1):
                dist.barrier()
        except RuntimeError as error:
            return getattr(error, "__notes__", [])
    raise AssertionError("the ranks met")


def test_ranks_of_which_only_some_replace_gloo_learn_why(world_of):
    (), (note,) = world_of(2)(only_one_replaces)
    assert "SHMRING_REPLACES=gloo for all ranks" in note


def keep_rpc(comm):
    from torch.distributed import rpc

    with in_place():
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{comm.broadcast_object(free_port())}"
        )
        rpc.init_rpc(f"rank-{comm.rank}", rank=comm.rank, world_size=comm.size, rpc_backend_options=options)
        try:
            there = rpc.rpc_sync(f"rank-{1 - comm.rank}", torch.add, (torch.ones(2), comm.rank))
        finally:
            rpc.shutdown()
    return there.tolist()


@pytest.mark.skipif(not dist.rpc.is_available(), reason="torch without RPC")
def test_rpc_stays_as_it_is(three, world_of):
    assert world_of(2)(keep_rpc) == [[1.0, 1.0], [2.0, 2.0]]


# ---- failures ---------------------------------------------------------------------------------------------


def come_late(rank):
    """Return the errors of a monitored barrier to which the last rank comes late."""
    size = dist.get_world_size()
    dist.barrier()
    if rank == size - 1:
        time.sleep(0.6)
        return None
    return outcome_of(dist.monitored_barrier, timeout=datetime.timedelta(seconds=0.2), wait_all_ranks=True)


def test_monitored_barrier_names_who_is_missing(world_of):
    first, *_ = world_of(3)(run, True, "gloo", come_late, ())
    theirs, *_ = world_of(3)(run, False, "gloo", come_late, ())
    for text in (first, theirs):
        assert text.startswith("RuntimeError: ")
        assert "2 failed to pass monitoredBarrier in 200 ms" in text


def fail(comm, path):
    with in_place(), group_of(comm, "gloo"):
        try:
            dist.barrier()
            if comm.rank == comm.size - 1:
                die(path)
            dist.all_reduce(torch.ones(10))
        except shmring.RankFailed as error:
            return str(error), counted_s()
    raise AssertionError("nobody died")


def test_the_death_of_a_rank_is_an_error(three, tmp_path):
    *survivors, dead = three.outcomes(fail, tmp_path / "died")
    assert isinstance(dead, Died)
    for text, at_s in survivors:
        assert "rank 2" in text
        assert at_s - float((tmp_path / "died").read_text()) < NEWS_S


def change_the_timeout(rank, ended):
    """Return the seconds until a call ends to which the last rank does not come."""
    group = dist.group.WORLD
    dist.barrier()
    if rank == 0:
        c10d._set_pg_timeout(datetime.timedelta(seconds=0.3), group)
        began_s, began = time.monotonic(), counted_s()
        try:
            assert outcome_of(dist.all_reduce, torch.ones(2)) is not None
            return time.monotonic() - began_s, counted_s() - began
        finally:
            ended.touch()
    until_there(ended)
    return None


@pytest.mark.parametrize("on", [True, False], ids=["in place", "gloo"])
def test_the_timeout_of_a_group_can_be_changed(on, tmp_path):
    with Ranks(2) as ranks:
        first, _ = ranks.meet()(run, on, "gloo", change_the_timeout, (tmp_path / "ended",))
    took_s, counted = first
    assert took_s > 0.2
    assert counted < LIMIT_S / 2


def wait_in_vain(comm):
    with in_place(), group_of(comm, "gloo"):
        dist.barrier()  # ranks that are still starting would be late, too
        c10d._set_pg_timeout(datetime.timedelta(seconds=0.5), dist.group.WORLD)
        if comm.rank == 0:
            with pytest.raises(shmring.Timeout):
                dist.all_reduce(torch.ones(2))
        else:
            time.sleep(1)


def test_a_rank_that_does_not_come_is_a_timeout(three):
    three(wait_in_vain)


def test_every_call_with_tensors_can_go_to_gloo():
    kinds = ("all", "_all", "reduce", "_reduce_s", "broadcast", "gather", "scatter", "send", "recv")
    calls = {name for name in vars(replacement.Group) if name.startswith(kinds)}
    # The compiled methods leave to others the calls that they do not serve.
    compiled = {name for name in calls if "cython" in type(vars(replacement.Group)[name]).__name__}
    assert compiled >= {"allreduce", "broadcast", "all_gather_single", "reduce_scatter_single"}
    calls |= {"_reduce_for_all", "_broadcast_any", "_all_gather_single_any", "_reduce_scatter_single_any"}
    assert len(calls) > 20
    assert calls - compiled - {"_reduce_scatter"} <= set(vars(Replacement))
