"""The group that programs get in the place of gloo's: calls that shmring does not serve go to gloo itself.

Gloo itself is a process group of the same ranks, made at the first such call. It connects two ranks when they
first need each other, so a message between two ranks does not wait for the others.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .group import Group, hide_from_dynamo
from .tensors import NotServed, check_kind

_log = logging.getLogger("shmring")
_GLOO = dist.ProcessGroup.BackendType.GLOO


class Replacement(Group):
    """A Group that programs see as one of gloo's."""

    _frames_to_caller = 2
    _gloo: dist.ProcessGroup | None = None

    def __init__(self, comm: Any, store: dist.Store, timeout: datetime.timedelta) -> None:
        super().__init__(comm, store, timeout)
        self.device_types_of_gloo: Sequence[str] = ("cpu",)
        self._making_gloo = threading.Lock()

    def _begin(self, comm: Any, store: dist.Store) -> None:
        super()._begin(comm, store)
        gloo, self._gloo = self._gloo, None  # gloo's group has the members from before
        if gloo is not None:
            gloo.shutdown()

    def _refuse(self, kind: Any, error: Exception) -> None:
        if not isinstance(error, NotServed):
            super()._refuse(kind, error)

    def _each(self, opts: Any, call: Callable[..., Any], outputs: Any, inputs: Any) -> Any:
        # gloo gets all of the calls, or none.
        _check_served(outputs, inputs)
        return super()._each(opts, functools.partial(getattr(Group, call.__name__), self), outputs, inputs)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        super().set_timeout(timeout)
        if self._gloo is not None:
            self._gloo.set_timeout(timeout)

    def abort(self) -> None:
        super().abort()
        if self._gloo is not None:
            self._gloo.abort()

    def shutdown(self) -> None:
        super().shutdown()
        if self._gloo is not None:
            self._gloo.shutdown()

    # -- gloo itself --

    def _gloo_for(self, reason: str) -> dist.ProcessGroup:
        with self._making_gloo:
            if self._gloo is None:
                self._gloo = self._make_gloo()
                if self.comm.rank == 0:
                    what = reason.partition(";")[0]
                    _log.warning("gloo itself makes some calls of the group %r: %s", self._name, what)
            return self._gloo

    def _make_gloo(self) -> dist.ProcessGroup:
        """Return a process group of gloo of the same ranks, which waits for none of them."""
        options = c10d.ProcessGroupGloo._Options()
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options._devices = [
            c10d.ProcessGroupGloo.create_device(interface=name, lazy_init=True) for name in names
        ] or [c10d.ProcessGroupGloo.create_default_device(lazy_init=True)]
        options._threads = 2 * len(options._devices)
        options._timeout = self._timeout()
        store, rank, size = dist.PrefixStore("gloo/", self._store), self.comm.rank, self.comm.size
        backend = c10d.ProcessGroupGloo(store, rank, size, options)
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(_GLOO)
        for device in dict.fromkeys(("cpu", *self.device_types_of_gloo)):
            group._register_backend(torch.device(device), _GLOO, backend)
        group._set_group_name(f"{self._name}:gloo")
        group._set_group_desc(self._description)
        return group

    # -- the interface that torch reads --

    # Python reads gloo's name. torch's C++ asks for getBackendName, and would take the group for gloo's own.
    def name(self) -> str:
        return "gloo"

    _get_backend_name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self.device_types_of_gloo]

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if kind == "cpu" or kind not in self.device_types_of_gloo:
            return super()._get_backend(device)
        # When torch loads compiled code from its cache, it asks all groups for CUDA's, also without a GPU.
        if not torch.get_device_module(kind).device_count():  # unlike is_available, it allows a fork later
            return self
        return self._gloo_for(f"the program asks for the backend of {kind}")._get_backend(torch.device(kind))

    def _start_coalescing(self, device: torch.device) -> None:
        if torch.device(device).type == "cpu":
            super()._start_coalescing(device)
        else:
            self._gloo_for(f"calls for {device} are combined")._start_coalescing(device)


def _or_by_gloo(name: str) -> Callable[..., Any]:
    """Return a method that calls Group's of this name, or gloo itself if shmring does not serve the call."""
    method, name_in_gloo = getattr(Group, name), _NAMES_IN_GLOO.get(name, name)

    @functools.wraps(method)
    def call(self: Replacement, *arguments: Any, **keywords: Any) -> Any:
        try:
            return method(self, *arguments, **keywords)
        except NotServed as error:
            reason = str(error)
        return getattr(self._gloo_for(reason), name_in_gloo)(*arguments, **keywords)

    return call


# Compiled methods make only calls that shmring serves, and leave others to these ones.
_NAMES_IN_GLOO = {
    "_reduce_for_all": "allreduce",
    "_broadcast_any": "broadcast",
    "_all_gather_single_any": "_allgather_base",
    "_reduce_scatter_single_any": "_reduce_scatter_base",
}
for _name in (
    *("_reduce_for_all", "allreduce_coalesced", "reduce", "_broadcast_any"),
    *("reduce_scatter", "_reduce_scatter_single_any"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("allgather", "_all_gather_single_any", "allgather_coalesced"),
    *("all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather", "gather_single"),
    *("gather_into_tensor", "scatter"),
    *("all_to_all_single", "alltoall_base", "alltoall", "send", "recv", "recv_anysource"),
):
    setattr(Replacement, _name, _or_by_gloo(_name))
hide_from_dynamo(Replacement)


def _check_served(*tensors: Any) -> None:
    """Raise NotServed if one of the tensors, in lists of lists, is of a kind that shmring does not take."""
    for one in tensors:
        if not isinstance(one, torch.Tensor):
            _check_served(*one)
        else:
            check_kind(one)
