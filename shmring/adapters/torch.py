"""torch.distributed on shmring: `torch.distributed.init_process_group("shmring")`.

No import is needed: torch finds the backend if shmring is installed. If shmring is only on the path, call
`shmring.adapters.torch.register_backend()`. Needs torch 2.13 or newer: pip install '.[torch]'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

import shmring

from .._config.optional_deps import need
from ._tasks import free_port, join_address

__all__ = ["compress_buckets", "create_group", "meet", "register_backend", "share_buckets"]

_NOBODY = "192.0.2.1"  # a documentation address, RFC 5737: the route to it leaves this host
_ASKED = "asked by rank 0"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5e-3, 0.05


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
    need("torch.distributed", "torch", __name__).Backend.register_backend(
        "shmring", create_group, devices=["cpu"]
    )


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
    timeout_s = timeout.total_seconds()
    world = _lead(store, size) if rank == 0 else _join(store, rank, size, timeout_s)
    return shmring.init(world, rank, timeout=timeout_s)


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
    from ._torch.buckets import share_buckets

    share_buckets(model)


# The store may hold entries of earlier ranks: torchrun's store outlives the ranks that it restarts, and files
# persist. So rank 0 publishes a new world id; each other rank answers under that id with a new random key,
# and accepts only what rank 0 stores under that key.


def _lead(store: Any, size: int) -> shmring.World:
    """Make a new world, with an address if there are several hosts, and tell the other ranks. Rank 0 only."""
    world = shmring.world(size)
    store.set(_ASKED, world.id)
    answers = [json.loads(store.get(_answer_key(world.id, other))) for other in range(1, size)]
    if any(answer["host"] != shmring.host_id() for answer in answers):
        world = dataclasses.replace(world, address=join_address(_own_address(), free_port()))
    fields = {"id": world.id, "key": world.key.hex(), "nprocs": size, "address": world.address}
    for answer in answers:
        store.set(answer["reply key"], json.dumps(fields))
    return world


def _join(store: Any, rank: int, size: int, timeout_s: float) -> shmring.World:
    """Return the world that rank 0 has made."""
    reply_key = f"reply to rank {rank} {secrets.token_hex(8)}"
    answer = json.dumps({"host": shmring.host_id(), "reply key": reply_key})
    until, pause_s, asked = time.monotonic() + timeout_s, _FIRST_PAUSE_S, b""
    while not store.check([reply_key]):
        if store.check([_ASKED]) and (latest := store.get(_ASKED)) != asked:
            asked, pause_s = latest, _FIRST_PAUSE_S
            store.set(_answer_key(asked.decode(), rank), answer)
        if time.monotonic() > until:
            raise shmring.Timeout(
                f"rank 0 did not tell rank {rank} of {size} where to meet within {timeout_s:g} s: start all "
                "ranks, or allow a longer timeout"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    fields = json.loads(store.get(reply_key))
    return shmring.World(
        fields["id"],
        bytes.fromhex(fields["key"]),
        fields["nprocs"],
        fields["address"],
    )


def _answer_key(asked: str, rank: int) -> str:
    return f"answer of rank {rank} to {asked}"


def _own_address() -> str:
    """Return this host's address for other hosts: the source address on the route to MASTER_ADDR."""
    found = [*_ways_to(os.environ.get("MASTER_ADDR", "localhost")), *_ways_to(_NOBODY)]
    others = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    return (others or found or ["127.0.0.1"])[0]


def _ways_to(host: str) -> Iterator[str]:
    """Yield the source addresses on the route to `host`. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                yield str(probe.getsockname()[0]).partition("%")[0]
