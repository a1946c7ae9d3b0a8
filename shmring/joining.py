"""From a world to a communicator: meet, share the segment, begin the engine.

May know: bootstrap, links, memory, settings, tuning, liveness, engine, comm.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref

from . import liveness, memory, tuning
from ._engine import Engine
from ._layout import abandon, control_nbytes, format_segment, header_of, segment_nbytes
from .bootstrap import World, join, world_from_environment
from .comm import Comm
from .links import Links
from .settings import Settings

_FORCED_PATHS = {"auto": 0, "near": 1, "far": 2}
_CPU_MASK_NBYTES = 1024  # 8192 CPUs, the most that Linux can be built for
_open: weakref.WeakSet[Comm] = weakref.WeakSet()


def init(world: World | None = None, rank: int | None = None, *, timeout: float | None = None) -> Comm:
    """Join a world and return this rank's communicator; collective over the world's ranks.

    Without a world the environment says which one and which rank (shmrun, torchrun, mpiexec, srun); without
    any of them it is a world of one rank. `timeout` in seconds bounds the meeting, and is the default of
    every later call; SHMRING_TIMEOUT otherwise. Raises Timeout, RankFailed, Mismatch, OutOfMemory or Error.
    """
    settings = Settings.from_environment()
    timeout_s = settings.timeout_s if timeout is None else float(timeout)
    if world is None:
        if rank is not None:
            raise ValueError(f"rank is {rank}, of no world: give both, shmring.init(world, rank={rank})")
        world, rank = world_from_environment() or (World(id="alone", key=bytes(32), nprocs=1), 0)
        if world.nprocs == 1:
            world = World(id=os.urandom(16).hex(), key=bytes(32), nprocs=1)
    elif not isinstance(world, World):
        raise TypeError(
            f"world is {world!r:.60}; make one with shmring.world(nprocs) and give it to every rank"
        )
    elif rank is None:
        raise ValueError("a world needs this process' rank in it: shmring.init(world, rank=...)")
    links = join(world, rank, timeout_s=timeout_s)
    try:
        comm = _begin(links, settings, timeout_s)
    except BaseException:
        links.close()
        raise
    _open.add(comm)
    return comm


def _begin(links: Links, settings: Settings, timeout_s: float) -> Comm:
    fd = _share_segment(links, settings, timeout_s)
    try:
        segment = memory.Mapping(fd, os.fstat(fd).st_size)
        try:
            engine = _start_engine(segment, links, settings, timeout_s)
        except BaseException as error:
            # The others have the segment too, and would wait for this rank.
            abandon(segment.address, links.rank, f"{type(error).__name__} in rank {links.rank}: {error}")
            raise
    except BaseException:
        os.close(fd)
        raise
    return Comm(engine, links, segment, fd, settings)


def _start_engine(segment: memory.Mapping, links: Links, settings: Settings, timeout_s: float) -> Engine:
    header = header_of(segment.address)
    engine = Engine(
        segment,
        links.rank,
        links.size,
        isa="" if settings.isa == "auto" else settings.isa,
        tuning=tuning.tuning(header["forced_chunk_nbytes"]),
        timeout_s=timeout_s,
    )
    engine.arrive(os.getpid(), liveness.start_time(os.getpid()))
    try:
        engine.be_patient(**tuning.patience(links.local_size, _allowed_cpus(engine)))
        engine.measure_distance()
        engine.open_for_calls()
    except BaseException:
        engine.close()
        raise
    return engine


def _allowed_cpus(engine: Engine) -> int:
    """How many CPUs the ranks may run on, all together. The first collective: all are there after it."""
    mask = sum(1 << cpu for cpu in os.sched_getaffinity(0))
    return engine.union(mask.to_bytes(_CPU_MASK_NBYTES, "little")).bit_count()


def _share_segment(links: Links, settings: Settings, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    if links.rank != 0:
        return links.broadcast_descriptor(None, check=_nothing_to_check, deadline=deadline)
    try:
        fd = _create_segment(links.size, settings)
    except BaseException as error:
        links.fail_descriptor(error)
        raise
    return links.broadcast_descriptor(fd, check=_nothing_to_check, deadline=deadline)


def _create_segment(size: int, settings: Settings) -> int:
    ring_nbytes = tuning.ring_nbytes(settings, size)
    fd = memory.create(segment_nbytes(size, ring_nbytes, settings.message_ring_nbytes), kind=settings.segment)
    try:
        memory.allocate(fd, 0, control_nbytes(size), purpose="a communicator")
        mapping = memory.Mapping(fd, control_nbytes(size))
        format_segment(
            mapping.address,
            size,
            ring_nbytes,
            forced_path=_FORCED_PATHS[settings.path],
            forced_chunk_nbytes=tuning.forced_chunk_nbytes(settings),
            first_seq=settings.first_seq,
            message_nbytes=settings.message_ring_nbytes,
        )
        mapping.close()
    except BaseException:
        os.close(fd)
        raise
    return fd


def _nothing_to_check() -> None:
    """There is no communicator yet whose failure could be looked at."""


@atexit.register
def _close_all() -> None:
    for comm in list(_open):
        comm.close()


def _disown_all() -> None:
    for comm in list(_open):
        comm._disown()


os.register_at_fork(after_in_child=_disown_all)
