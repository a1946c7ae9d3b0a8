"""Join a world: connect to its other ranks, authenticate them, and find the host of every rank.

On one host the ranks connect over a Unix socket. In a world with an address they first connect to rank 0 over
TCP.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from .._arguments import integer
from .._config.settings import (
    FIRST_PORT,
    LAST_PORT,
    MAKE_A_KEY,
    Settings,
    address_text,
    is_numeric,
    parse_address,
)
from .._system.deadline import Deadline
from ..errors import Error
from . import host_map, local, tcp
from .coordinator import Coordinator
from .environment import Job, find_job
from .fd_passing import LocalSockets
from .framed_socket import Check
from .host_map import Place
from .mesh import Mesh, connect_mesh
from .tcp import Found
from .world import JoinRequest, World, check_nprocs, nothing_to_check, world

__all__ = ["Joined", "World", "check_nprocs", "host_id", "join", "world", "world_from_environment"]


@dataclass
class Joined:
    """The result of `join`: connections to the ranks of this host and of other hosts, and this rank's place.

    `mesh` is None if all ranks are on one host. `coordinator` is None if the world has
    no address or one rank. Else it is open for one more agreement; then the caller closes it.
    """

    local_sockets: LocalSockets
    place: Place
    mesh: Mesh | None = None
    coordinator: Coordinator | None = None

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        for part in (self.local_sockets, self.mesh, self.coordinator):
            if part is not None:
                part.close()


def host_id() -> str:
    """Return a text that is equal for processes on one host: a world of such processes needs no address.

    Returns
    -------
    str
        Compare it only.

    Examples
    --------
    >>> shmring.host_id() == shmring.host_id()
    True
    """
    return host_map.identity(Settings.from_environment().node or "")


def world_from_environment(environ: Mapping[str, str] = os.environ) -> tuple[World, int] | None:
    """Return (world, rank) as the launcher of this process gives them; None if no launcher is recognised.

    Each call returns another world: the n-th call of a process matches the n-th call of the other ranks.
    """
    settings = Settings.from_environment(environ)
    job = find_job(settings, environ)
    if job is None:
        return None
    spans_hosts = job.local_size != job.size or (settings.addr is not None and settings.port is not None)
    if spans_hosts:
        _require_key_and_address(job, settings)
    _calls[job.name] += 1
    world_id = f"{job.name} #{_calls[job.name]}"
    address = _address(job, settings, world_id) if spans_hosts else None
    return World(world_id, settings.key or _common_key(world_id), job.size, address), job.rank


_calls: collections.Counter[str] = collections.Counter()


def _common_key(world_id: str) -> bytes:
    # This key is no secret. Within one host the kernel reports the user of the other side (SO_PEERCRED), and
    # processes of one user trust each other. The key then only distinguishes jobs.
    return hashlib.sha256(f"shmring {os.geteuid()} {world_id}".encode()).digest()


def _require_key_and_address(job: Job, settings: Settings) -> None:
    if job.local_size != job.size:
        where = f"{job.launcher} runs this job's {job.size} ranks on several hosts"
    else:
        where = "SHMRING_ADDR and SHMRING_PORT let this job's ranks be on several hosts"
    if settings.key is None:
        raise Error(
            f"{where}, and hosts trust each other only by a key: give the same one to all ranks through "
            f"SHMRING_KEY, or SHMRING_KEY_FILE (a file with mode 0600). Make one with: {MAKE_A_KEY}"
        )
    if settings.addr is None and job.first_host is None:
        raise Error(
            f"{where}, and it does not give the host of rank 0: set SHMRING_ADDR to the name or address of "
            "rank 0's host, the same for all ranks"
        )


def _address(job: Job, settings: Settings, world_id: str) -> str:
    """Return the address where rank 0 listens. It is the same on all ranks, also without SHMRING_PORT."""
    name, host = "SHMRING_ADDR", settings.addr
    if host is None:
        name, host = f"rank 0's host by {job.launcher}", job.first_host or ""
    digest = hashlib.sha256(f"shmring port {world_id}".encode()).digest()
    port = settings.port or FIRST_PORT + int.from_bytes(digest[:4], "big") % (LAST_PORT - FIRST_PORT + 1)
    address = address_text(host, port)
    parse_address(name, address)
    return address


def listen(world: World) -> socket.socket:
    """Return a listener for rank 0 of a world of several ranks, to be passed to `join`."""
    if world.address is None:
        return local.listen(world, 0, world.nprocs - 1)
    return tcp.listen_at(world.address)


def was_invited(world: World, rank: int) -> bool:
    """Return whether rank 0 listened before this rank got the world, as `Comm.grow` does.

    Return False if the address is a name: such as that of a service, it may lead to rank 0 only later.
    """
    if world.epoch == 0 or rank == 0:
        return False
    return world.address is None or is_numeric(parse_address("address", world.address)[0])


def join(
    world: World,
    rank: int,
    *,
    deadline: Deadline,
    node: str | None = None,
    check: Check = nothing_to_check,
    listener: socket.socket | None = None,
    is_invited: bool = False,
) -> Joined:
    """Connect to the other ranks of the world. Return when all have joined, before the deadline.

    `node` overrides SHMRING_NODE. `check` may raise while ranks are missing. `listener` is rank 0's listener,
    if it has one already (see `listen`); the caller closes it too. `is_invited` is True on the
    other ranks in that case. Raises the same error on every rank that has joined: Timeout names the missing
    ranks, RankFailed a rank that ended meanwhile, Mismatch ranks with different nprocs. A rank with another
    key, or one that joins twice, gets an Error.
    """
    rank = integer("rank", rank)
    if not 0 <= rank < world.nprocs:
        raise ValueError(f"rank is {rank}; a world of {world.nprocs} has ranks 0 to {world.nprocs - 1}")
    if not deadline.timeout_s > 0:
        raise ValueError(f"the timeout is {deadline.timeout_s!r}; it must be more than 0 seconds")
    settings = Settings.from_environment()
    name = (settings.node if node is None else node) or ""
    if (world.id, rank) in _used:
        raise local.second_use(rank)
    request = JoinRequest(world, rank, name, deadline, check, listener, is_invited)
    if world.address is None or world.nprocs == 1:
        local_sockets = local.connect_ranks(request, range(world.nprocs))
        joined = Joined(local_sockets, host_map.place_of(rank, [0] * world.nprocs))
    else:
        request = dataclasses.replace(request, identity=host_map.identity(name))
        joined = _join_hosts(request, settings.ports)
    _used.append((world.id, rank))
    return joined


# The last worlds joined from this process, to detect the common mistake of using one twice. The marker that
# rank 0 holds while the world exists detects it in other processes.
_used: collections.deque[tuple[str, int]] = collections.deque(maxlen=1024)


def _join_hosts(request: JoinRequest, ports: tuple[int, int] | None) -> Joined:
    """Connect over TCP, within this host, and to the other hosts. All ranks succeed, or none."""
    found = tcp.connect_ranks(request, ports)
    coordinator, place = found.coordinator, found.place
    local_sockets = mesh = None

    def check(callers: Check = request.check) -> None:
        coordinator.check()  # first: the error that it has is the one that all ranks raise
        callers()

    try:
        with found.listener, coordinator.together():
            request = dataclasses.replace(request, check=check)
            local_sockets = local.connect_ranks(_within_host(request, found), place.ranks_of_host[place.host])
            if place.num_hosts > 1:
                mesh = connect_mesh(request, found)
            coordinator.all_ready(deadline=request.deadline)
            return Joined(local_sockets, place, mesh, coordinator)
    except BaseException:
        for opened in (mesh, local_sockets, coordinator):
            if opened is not None:
                opened.close()
        raise


def _within_host(request: JoinRequest, found: Found) -> JoinRequest:
    """Return the same request in a world of this host only.

    "Hosts" on one machine, and jobs with the same port on different hosts, may share abstract socket names.
    """
    world = request.world
    own = f"shmring host {found.place.host} of {found.nonce.hex()} {world.id}"
    own_id = hashlib.sha256(own.encode()).hexdigest()
    within = World(own_id, world.key, world.nprocs)
    return dataclasses.replace(request, world=within, listener=None, is_invited=False)
