"""vLLM's communicator of one group of CPU workers. vLLM imports this module by the class' name."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

import shmring

from .torch import meet
from .vllm import TensorGroup

_TIMEOUT = datetime.timedelta(minutes=30)  # torch's, for a group


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
        for name in (
            *("all_reduce", "broadcast", "all_gather", "all_gatherv", "gather", "reduce_scatter"),
            *("reduce_scatterv", "send", "recv", "send_tensor_dict", "recv_tensor_dict"),
        ):
            setattr(self, name, getattr(self.tensors, name))

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
