"""torch.distributed on shmring: `torch.distributed.init_process_group("shmring")`.

No import is needed: torch finds the backend if shmring is installed. If shmring is only on the path, call
`shmring.adapters.torch.register_backend()`. Needs torch 2.13 or newer: pip install '.[torch]'.
"""

from __future__ import annotations

import datetime
from typing import Any

import shmring

from .._config.optional_deps import need

__all__ = [
    "compress_buckets",
    "create_group",
    "meet",
    "register_backend",
    "replace_gloo",
    "share_buckets",
]


def register_backend() -> None:
    """Register the backend "shmring" with torch.distributed. Installed packages need no call: torch finds it.

    Examples
    --------
    ::

        import torch.distributed
        from shmring.adapters import torch as shmring_torch

        shmring_torch.register_backend()
        torch.distributed.init_process_group("shmring")
    """
    from ._torch.entry import register_in

    register_in(need("torch.distributed", "torch", __name__))


def replace_gloo(on: bool = True) -> None:
    """Let programs that ask torch.distributed for "gloo" get shmring for their CPU tensors.

    The names that programs see do not change: `torch.distributed.get_backend()` returns "gloo". Calls that
    shmring does not serve go to gloo itself, such as calls with tensors on a GPU. `SHMRING_REPLACES=gloo`
    in the environment does the same when torch is imported, if shmring is installed.

    Parameters
    ----------
    on : bool
        False: torch makes gloo's groups again. Existing groups stay as they are.

    Examples
    --------
    ::

        import torch.distributed
        from shmring.adapters import torch as shmring_torch

        shmring_torch.replace_gloo()
        torch.distributed.init_process_group("gloo")
    """
    from ._torch import replacing

    c10d = need("torch.distributed.distributed_c10d", "torch", __name__)
    if on:
        replacing.replace_gloo(c10d)
    else:
        replacing.restore_gloo(c10d)


def create_group(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """Return this rank's process group; torch.distributed calls this. Collective.

    Parameters
    ----------
    store, rank, size, timeout
        As in `meet`.

    Returns
    -------
    torch.distributed.Backend
        The group.

    Raises
    ------
    Error
        As `meet`.

    Examples
    --------
    See `meet`.
    """
    from ._torch.group import Group

    return Group(meet(store, rank, size, timeout), store, timeout)


def meet(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> shmring.Comm:
    """Return a communicator of the ranks that share a store of torch.distributed. Collective.

    The ranks find each other through the store.

    Parameters
    ----------
    store : torch.distributed.Store
        The same for all ranks.
    rank, size : int
        This process' number, and the number of ranks.
    timeout : datetime.timedelta
        For the start, and the default for each call.

    Returns
    -------
    Comm
        The communicator.

    Raises
    ------
    Timeout, RankFailed, OutOfMemory
        As `shmring.init`; or what the store raises.

    Examples
    --------
    ::

        import datetime
        from shmring.adapters import torch as shmring_torch

        comm = shmring_torch.meet(store, rank, size, datetime.timedelta(seconds=60))
    """
    from ._torch import meeting

    return meeting.meet(store, rank, size, timeout)


def compress_buckets(model: Any, compressor: Any) -> None:
    """Compress the gradients of a DistributedDataParallel. Collective.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        On a group of backend "shmring".
    compressor : Compressor
        One of shmring.methods.compression.

    Raises
    ------
    TypeError, ValueError
        For another model or compressor.

    Examples
    --------
    ::

        from shmring.adapters.torch import compress_buckets
        from shmring.methods.compression import ErrorFeedback, PowerSGD

        compress_buckets(model, ErrorFeedback(PowerSGD(rank=2)))
    """
    need("torch", "torch", __name__)
    from ._torch.compressed import compress_buckets

    compress_buckets(model, compressor)


def share_buckets(model: Any) -> None:
    """Reduce a DistributedDataParallel's gradients without copies. Collective.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        On a group of backend "shmring".

    Raises
    ------
    TypeError, ValueError
        For another model.

    Examples
    --------
    ::

        from shmring.adapters.torch import share_buckets

        share_buckets(model)
    """
    need("torch", "torch", __name__)
    from ._torch.buckets import share_buckets

    share_buckets(model)
