"""Start an engine: the ranks of a host share a segment, start on it, and wait until all have started."""

from __future__ import annotations

import logging
import os
import socket
import zlib
from typing import NamedTuple

from .._bootstrap.fd_passing import LocalSockets
from .._bootstrap.framed_socket import Check
from .._bootstrap.host_map import Place
from .._bootstrap.join import Joined, join
from .._bootstrap.world import World, nothing_to_check
from .._config import thresholds
from .._config.settings import Settings
from .._engine.engine import Engine
from .._engine.state import KEY_NBYTES, control_nbytes, format_segment, header_of, segment_nbytes
from .._system import limits, procfs, segments
from .._system.deadline import Deadline
from .._system.limits import explain
from ..errors import Error, agreed
from .internode import InterNodeLinks

_FORCED_DISTANCES = {"near": 1, "far": 2}
_CPU_MASK_NBYTES = 1024  # 8192 CPUs, the maximum of Linux builds

_log = logging.getLogger("shmring")


class CommParts(NamedTuple):
    """All parts of a communicator. `engine.abandon` releases them if no communicator is made of them."""

    engine: Engine
    local_sockets: LocalSockets
    segment: segments.Mapping
    fd: int
    settings: Settings
    place: Place | LocalSockets
    internode: InterNodeLinks | None = None


def join_and_begin(
    world: World,
    rank: int,
    settings: Settings,
    timeout_s: float,
    *,
    deadline: Deadline | None = None,
    check: Check = nothing_to_check,
    listener: socket.socket | None = None,
    is_invited: bool = False,
    parent: Engine | None = None,
) -> CommParts:
    """Join a world, and run `begin` on each of its hosts. Every rank gets an engine, or every rank raises.

    timeout_s: default of every later call. deadline: of this call, by default `timeout_s` for `join` and
    again for `begin`. check, listener, is_invited: see `join`. parent: see `begin`. After an error at any
    point the connections are closed, since other ranks wait for this rank on them.
    """
    joined = None
    try:
        joined = join(
            world,
            rank,
            deadline=deadline or Deadline(timeout_s),
            node=settings.node,
            check=check,
            listener=listener,
            is_invited=is_invited,
        )
        start = deadline or Deadline(timeout_s)
        return _begin_joined(joined, settings, timeout_s, key=world.key, deadline=start, parent=parent)
    except BaseException as error:
        if joined is not None:
            joined.close()
        if isinstance(error, OSError) and not isinstance(error, Error):  # a Timeout is both
            raise explain(error, f"meeting as rank {rank} of a communicator") from error
        raise


def _begin_joined(
    joined: Joined,
    settings: Settings,
    timeout_s: float,
    *,
    key: bytes,
    deadline: Deadline,
    parent: Engine | None,
) -> CommParts:
    if joined.coordinator is None:
        return begin(joined.local_sockets, settings, timeout_s, deadline=deadline, parent=parent)
    parts = internode = None
    try:
        with joined.coordinator.together():
            parts = _begin_on_host(joined, settings, timeout_s, deadline=deadline, parent=parent)
            if joined.mesh is not None:
                engine = parts.engine
                internode = InterNodeLinks(engine, joined.place, joined.mesh, key)
                engine.open_for_calls(deadline.timeout_s)
                internode.agree(engine, settings.wire_slice_nbytes)
                engine.open_for_calls(timeout_s)
                parts = parts._replace(place=joined.place, internode=internode)
            joined.coordinator.all_ready(deadline=deadline)
        joined.coordinator.close()
        return parts
    except BaseException:
        try:
            if parts is not None:
                parts.engine.abandon(parts)
        finally:
            if internode is not None:
                internode.close(0.0)  # the parts may lack it; a second close does nothing
        raise


def _begin_on_host(
    joined: Joined, settings: Settings, timeout_s: float, *, deadline: Deadline, parent: Engine | None
) -> CommParts:
    """Run `begin`, and change local ranks in its errors to world ranks."""
    try:
        return begin(joined.local_sockets, settings, timeout_s, deadline=deadline, parent=parent)
    except Error as error:
        place = joined.place
        if error.rank is not None and error.rank < place.local_size:
            error.rank = place.ranks_of_host[place.host][error.rank]
            error.args = (f"{error} (by its host's numbers; it is rank {error.rank})",)
        raise


def begin(
    local_sockets: LocalSockets,
    settings: Settings,
    timeout_s: float,
    *,
    deadline: Deadline,
    parent: Engine | None = None,
) -> CommParts:
    """Collective over the ranks of `local_sockets`: return the parts on every rank, or raise on every rank.

    timeout_s: default of every later call. deadline: of the exchange of descriptors; each later step may take
    the whole timeout, as in other compound calls. If the ranks have a `parent`, its measurements of
    distance and CPU competition are used: all its ranks compete, in whatever group.
    If a rank fails before every rank is ready, the other ranks are notified and raise too.
    """
    fd = engine = None
    others_wait = True
    try:
        fd = _share_segment(local_sockets, settings, deadline)
        segment = segments.Mapping(fd, os.fstat(fd).st_size)
        engine = _new_engine(segment, local_sockets, settings, deadline.timeout_s)
        engine.stalls.warn_after(engine, settings.stall_s)
        engine.arrive(os.getpid(), procfs.start_time(os.getpid()))
        # Until now a death is visible on the sockets, from now on in the segment.
        others_wait = False
        local_sockets.all_ready(check=nothing_to_check, deadline=deadline)
        _check_liveness(engine, is_known=parent is not None)
        if parent is None:
            oversubscribed = _is_oversubscribed(engine)
            one_group = not oversubscribed or _all_have(engine, limits.scheduling_group())
            engine.set_wait_policy(
                **thresholds.wait_policy(engine.size, oversubscribed=oversubscribed, one_group=one_group)
            )
            engine.measure_distance()
            engine.probe_single_copy(settings.single_copy_nbytes != 0)
        else:
            engine.adopt_wait_policy(parent)
        engine.open_for_calls(timeout_s)
        return CommParts(engine, local_sockets, segment, fd, settings, local_sockets)
    except BaseException as error:
        try:  # at once, since a handler of a second signal may raise at any call
            if others_wait and isinstance(error, Exception):
                agreed(error)
            local_sockets.fail_fd(error)
        finally:
            try:
                if engine is not None:
                    engine.close()
            finally:
                if fd is not None:
                    os.close(fd)
        raise


def _new_engine(
    segment: segments.Mapping, local_sockets: LocalSockets, settings: Settings, timeout_s: float
) -> Engine:
    header = header_of(segment.address)
    return Engine(
        segment,
        local_sockets.rank,
        local_sockets.size,
        isa="" if settings.isa == "auto" else settings.isa,
        tuning=header["tuning"],
        timeout_s=timeout_s,
    )


def _check_liveness(engine: Engine, *, is_known: bool) -> None:
    unwatched, hidden = engine.find_unwatched_ranks()
    if is_known:
        return
    if hidden:
        what = (
            "rank %d of this host: the kernel refuses set_robust_list to local ranks (a seccomp profile?), "
            "and local ranks %s cannot be looked for from here: the death of such a rank is seen only as a "
            "Timeout; allow set_robust_list"
        )
        _log.warning(what, engine.rank, ", ".join(map(str, hidden)))
    elif engine.rank in unwatched:
        what = (
            "rank %d of this host: the kernel refuses set_robust_list to this process (a seccomp profile?), "
            "so that others see its death only when they look for it, every few ms of a wait; allow "
            "set_robust_list"
        )
        _log.warning(what, engine.rank)


def _is_oversubscribed(engine: Engine) -> bool:
    """True if any rank counts more ranks than CPUs that all ranks together may use.

    Ranks may be pinned to different CPUs, and their cgroups may have different quotas.
    """
    mask = sum(1 << cpu for cpu in os.sched_getaffinity(0))
    allowed = engine.union(mask.to_bytes(_CPU_MASK_NBYTES, "little")).bit_count()
    return not engine.all_agree(engine.size <= limits.usable_cpus(allowed), engine.timeout_s)


def _all_have(engine: Engine, text: str) -> bool:
    """True if `text` is the same on every rank."""
    own = zlib.crc32(text.encode())
    return engine.all_agree(engine.broadcast_word(own) == own, engine.timeout_s)


def _share_segment(local_sockets: LocalSockets, settings: Settings, deadline: Deadline) -> int:
    fd = _create_segment(local_sockets.size, settings) if local_sockets.rank == 0 else None
    try:
        return local_sockets.broadcast_fd(fd, check=nothing_to_check, deadline=deadline)
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise


def _create_segment(size: int, settings: Settings) -> int:
    tables = thresholds.tables(settings, size)
    staging_nbytes = thresholds.staging_nbytes(tables, size)
    message_ring_nbytes = settings.message_ring_nbytes or tables[0]["message_ring_nbytes"]
    fd = segments.create(segment_nbytes(size, staging_nbytes, message_ring_nbytes), kind=settings.segment)
    try:
        segments.allocate(fd, 0, control_nbytes(size), purpose="a communicator")
        mapping = segments.Mapping(fd, control_nbytes(size))
        format_segment(
            mapping.address,
            size,
            staging_nbytes,
            message_ring_nbytes,
            forced_path=_FORCED_DISTANCES.get(settings.path, 0),
            tuning=tables,
            first_seq=settings.first_seq,
            key=os.urandom(KEY_NBYTES),
        )
        mapping.close()
    except BaseException:
        os.close(fd)
        raise
    return fd
