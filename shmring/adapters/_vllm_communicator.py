"""vLLM's communicator of one group of CPU workers. vLLM imports this module by the class' name."""

from __future__ import annotations

import datetime
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

import shmring

from .torch import meet
from .vllm import TensorGroup

_TIMEOUT = datetime.timedelta(minutes=30)  # torch's, for a group

# torch.compile cannot trace calls of shmring, so compiled models call operators of torch. vLLM's own serve
# calls that return a new tensor. An operator cannot return its argument, as all_reduce does.
_library = torch.library.Library("shmring_vllm", "FRAGMENT")
_library.define("all_reduce(Tensor(a!) tensor, str group) -> ()")
_tensors: weakref.WeakValueDictionary[str, TensorGroup] = weakref.WeakValueDictionary()


def _all_reduce(tensor: torch.Tensor, group: str) -> None:
    _tensors[group].all_reduce(tensor)


_library.impl("all_reduce", _all_reduce, "CPU")
torch.library.register_fake("shmring_vllm::all_reduce", lambda tensor, group: None, lib=_library)


class Communicator(CpuCommunicator):  # type: ignore[misc, unused-ignore]
    """vLLM's calls for one group, made by a TensorGroup."""

    def __init__(
        self,
        cpu_group: Any,
        device: Any = None,
        device_group: Any = None,
        unique_name: str = "",
        **more: Any,
    ) -> None:
        super().__init__(cpu_group, device, device_group, unique_name, **more)
        self.tensors = TensorGroup(_comm_of(cpu_group))
        self.supports_tensor_dict = True
        _tensors[self.unique_name] = self.tensors
        for name in (
            *("broadcast", "all_gatherv", "gather", "reduce_scatterv"),
            *("send", "recv", "send_tensor_dict", "recv_tensor_dict"),
        ):
            setattr(self, name, getattr(self.tensors, name))

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Call TensorGroup's method, or a compiled model's operator."""
        if torch.compiler.is_dynamo_compiling():
            torch.ops.shmring_vllm.all_reduce(input_, self.unique_name)
            return input_
        return self.tensors.all_reduce(input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Call TensorGroup's method, or a compiled model's operator."""
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.vllm.all_gather(input_, dim, self.world_size, self.unique_name)
        return self.tensors.all_gather(input_, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Call TensorGroup's method, or a compiled model's operator."""
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.vllm.reduce_scatter(input_, dim, self.world_size, self.unique_name)
        return self.tensors.reduce_scatter(input_, dim)

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        """Return False on all ranks: vLLM then sets up no shared memory of its own."""
        return False

    def destroy(self) -> None:
        """Close the communicator."""
        self.tensors.close()
        super().destroy()


def _comm_of(group: Any) -> shmring.Comm:
    """Return a communicator of the ranks of a process group, of any backend. Collective."""
    comm = getattr(group, "comm", None)
    if isinstance(comm, shmring.Comm):
        return comm.dup()
    store = dist.PrefixStore("shmring for vllm", c10d._get_process_group_store(group))
    return meet(store, dist.get_rank(group), dist.get_world_size(group), _TIMEOUT)
