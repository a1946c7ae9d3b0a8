"""shmring as a collective group of `ray.util.collective`, registered by register_backend.

Only register_backend imports this module, since the class derives from a class of Ray.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.experimental import internal_kv
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp

import shmring

from .._arguments import refusing
from .._config.settings import address_text
from ._tasks import free_port

_OPS = {
    ReduceOp.SUM: shmring.Op.SUM,
    ReduceOp.PRODUCT: shmring.Op.PROD,
    ReduceOp.MIN: shmring.Op.MIN,
    ReduceOp.MAX: shmring.Op.MAX,
}
_FIRST_RANK_S = 60.0  # limit for rank 0 to publish the world
_POLL_S = 0.02
_CHECK_S = 0.5  # a rank that joins checks this often whether rank 0 has started again


class Group(BaseGroup):  # type: ignore[misc]
    """One actor's membership in a collective group. Ray passes every tensor as a list of one."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._comm = _meet(world_size, rank, group_name)

    @classmethod
    def backend(cls) -> str:
        return "SHMRING"

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        self._comm.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        """Reduce in place."""
        with refusing(self._comm, "all_reduce"):
            x = _one(tensor)
        self._comm.all_reduce(x, op=_op(allreduce_options))

    def barrier(self, barrier_options: Any = None) -> None:
        self._comm.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        """Reduce in place on the root; the other tensors do not change."""
        root = getattr(reduce_options, "root_rank", 0)
        with refusing(self._comm, "reduce"):
            x = _one(tensor, is_written=self.rank == root)
        self._comm.reduce(x, op=_op(reduce_options), root=root)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        root = getattr(broadcast_options, "root_rank", 0)
        with refusing(self._comm, "broadcast"):
            x = _one(tensor, is_written=self.rank != root)
        self._comm.broadcast(x, root=root)

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None
    ) -> None:
        """Copy rank r's tensor to tensor_list[0][r]."""
        with refusing(self._comm, "all_gather"):
            x, parts = _one(tensor, is_written=False), _each(tensor_list, is_written=True)
            _check_alike(x, parts)
            x, gathered = _in_c_order(x), _rows(self.world_size, x)
        self._comm.all_gather(x, out=gathered)
        for there, here in zip(parts, gathered, strict=True):
            _copy(there, here)

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None
    ) -> None:
        """Set tensor to the reduced tensor_list[0][rank]; the list does not change."""
        with refusing(self._comm, "reduce_scatter"):
            out, parts = _one(tensor), _each(tensor_list, is_written=False)
            _check_alike(out, parts)
            x = _rows(len(parts), out)
            for row, part in enumerate(parts):
                _copy(x[row, ...], part)
            reduced = _in_c_order(out)  # is out itself, or a copy
        self._comm.reduce_scatter(x, op=_op(reducescatter_options), out=reduced)
        if reduced is not out:
            _copy(out, reduced)

    def send(self, tensor: list[Any], send_options: Any) -> None:
        self._comm.send(_one(tensor, is_written=False), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        self._comm.recv(_one(tensor), recv_options.src_rank)


def _meet(world_size: int, rank: int, group_name: str) -> shmring.Comm:
    """Join the world, which rank 0 publishes in Ray's key-value store and deletes when all have joined."""
    name = f"shmring {ray.get_runtime_context().namespace} {group_name}"
    comm = _publish(name, world_size) if rank == 0 else _join(name, rank, group_name)
    try:
        if rank == 0:
            internal_kv._internal_kv_del(name)
        comm.barrier()  # a rank that makes the group again must not find the name of this world
    except BaseException:
        comm.close()
        raise
    return comm


def _publish(name: str, world_size: int) -> shmring.Comm:
    address = address_text(ray.util.get_node_ip_address(), free_port())
    world = shmring.world(world_size, address=address)
    internal_kv._internal_kv_put(name, pickle.dumps(world), overwrite=True)
    try:
        return shmring.init(world, 0)
    except BaseException:
        internal_kv._internal_kv_del(name)
        raise


def _join(name: str, rank: int, group_name: str) -> shmring.Comm:
    """Join the published world. If rank 0 dies before all have joined, a new rank 0 publishes another."""
    while True:
        found = _look_up(name, group_name)
        try:
            return shmring.init(pickle.loads(found), rank, check=_check_replaced(name, found))
        except _Replaced:
            continue


class _Replaced(shmring.Error):
    pass


def _check_replaced(name: str, found: bytes) -> Callable[[], None]:
    """Return a function that raises _Replaced once another world is published."""
    due = time.monotonic() + _CHECK_S

    def check() -> None:
        nonlocal due
        if time.monotonic() >= due:
            if internal_kv._internal_kv_get(name) not in (None, found):  # None: all have joined
                raise _Replaced("rank 0 has started again, and published another world", rank=0)
            due = time.monotonic() + _CHECK_S

    return check


def _look_up(name: str, group_name: str) -> bytes:
    until = time.monotonic() + _FIRST_RANK_S
    while (found := internal_kv._internal_kv_get(name)) is None:
        if time.monotonic() > until:
            raise shmring.Timeout(
                f"rank 0 of the collective group {group_name!r} did not start within {_FIRST_RANK_S:g} s",
                rank=0,
            )
        time.sleep(_POLL_S)
    return bytes(found)


def _op(options: Any) -> shmring.Op:
    return _OPS[getattr(options, "reduceOp", ReduceOp.SUM)]


def _one(tensors: Sequence[Any], *, is_written: bool = True) -> Any:
    if len(tensors) != 1:
        raise ValueError(f"an actor passed {len(tensors)} tensors; shmring takes one, on the CPU")
    return _usable(tensors[0], is_written)


def _each(tensor_lists: Sequence[Sequence[Any]], *, is_written: bool) -> list[Any]:
    if len(tensor_lists) != 1:
        raise ValueError(f"an actor passed {len(tensor_lists)} lists of tensors; shmring takes one")
    return [_usable(tensor, is_written) for tensor in tensor_lists[0]]


def _usable(tensor: Any, is_written: bool) -> Any:
    """Return the tensor without its gradient. Raise ValueError if the call would write to a read-only one."""
    if is_written and isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
        raise ValueError(
            "this call writes to a read-only array. In Ray an actor's arguments and the results of ray.get "
            "are read-only, since processes share their memory: pass a copy, x = x.copy()"
        )
    return tensor.detach() if _is_torch(tensor) else tensor


def _check_alike(tensor: Any, others: Sequence[Any]) -> None:
    """Raise RuntimeError if shapes or dtypes differ, as Ray's gloo does for shapes."""
    expected = _described(tensor)
    for other in map(_described, others):
        if other != expected:
            raise RuntimeError(
                f"tensor is {expected}, and tensor_list has {other}: all need the same shape and dtype"
            )


def _described(tensor: Any) -> str:
    """Return the dtype and the shape, as "float32[2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def _in_c_order(tensor: Any) -> Any:
    return tensor.contiguous() if _is_torch(tensor) else np.asanyarray(tensor, order="C")


def _rows(count: int, tensor: Any) -> Any:
    """Return a new array in C order for `count` tensors like this one."""
    shape = (count, *tensor.shape)
    return tensor.new_empty(shape) if _is_torch(tensor) else np.empty(shape, tensor.dtype)


def _copy(there: Any, here: Any) -> None:
    if not _is_torch(there):
        there[...] = here
    elif _is_torch(here):
        there.copy_(here)
    else:
        there.numpy()[...] = here
