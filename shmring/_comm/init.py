"""Join a world and make its communicator."""

from __future__ import annotations

import os
from collections.abc import Callable

from .._arguments import seconds
from .._bootstrap.environment import ended_ranks_check
from .._bootstrap.framed_socket import Check
from .._bootstrap.join import World, was_invited, world_from_environment
from .._bootstrap.world import nothing_to_check
from .._config.settings import Settings
from .._lifecycle.startup import join_and_begin
from .._system import ended_ranks
from ..errors import Error
from .comm import Comm


def init(
    world: World | None = None,
    rank: int | None = None,
    *,
    timeout: float | None = None,
    check: Callable[[], None] | None = None,
) -> Comm:
    """Join a world and return this rank's communicator; collective over the world's ranks.

    Without `world`, world and rank come from the environment (shmrun, torchrun, mpiexec, srun), or the world
    has one rank.

    Parameters
    ----------
    world : World, optional
        As returned by `shmring.world`, the same for all ranks.
    rank : int, optional
        This process' rank in the world, 0 to nprocs - 1.
    timeout : float, optional
        Seconds for the meeting, and the default of every later call. None: SHMRING_TIMEOUT.
    check : callable, optional
        For a world that is given. It is called at least every 20 ms while ranks are missing, and may raise an
        `Error`, for example because the process of a missing rank has ended. All ranks that have come raise
        the error of rank 0's check. If another rank's check raises, the others get RankFailed for that rank.

    Returns
    -------
    Comm
        A context manager that closes it.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument.
    Timeout, RankFailed, Mismatch, OutOfMemory, Error
        If the ranks cannot meet. The error names the missing ranks.

    Examples
    --------
    >>> with shmring.init() as comm:  # no launcher: a world of one rank
    ...     comm.size
    1
    """
    settings = Settings.from_environment()
    timeout_s = settings.timeout_s if timeout is None else seconds("timeout", timeout)
    if world is None:
        check = ended_ranks_check(settings)
        if rank is not None:
            raise ValueError(f"rank is {rank}, without a world: give both, shmring.init(world, rank={rank})")
        found = world_from_environment()
        if found is None or found[0].nprocs == 1:
            world, rank = World(id=os.urandom(16).hex(), key=bytes(32), nprocs=1), 0
        else:
            world, rank = found
    elif not isinstance(world, World):
        raise TypeError(
            f"world is {world!r:.60}; make one with shmring.world(nprocs) and give it to every rank"
        )
    elif rank is None:
        raise ValueError("a world needs this process' rank in it: shmring.init(world, rank=...)")
    try:
        return _join(world, rank, settings, timeout_s, check or nothing_to_check)
    except Error as error:
        ended_ranks.note_error(error, rank)
        # The message is enough. A traceback through the bootstrap would hide it, on every rank.
        raise error.with_traceback(None) from None


def _join(world: World, rank: int, settings: Settings, timeout_s: float, check: Check) -> Comm:
    parts = comm = None
    try:
        invited = was_invited(world, rank)
        parts = join_and_begin(world, rank, settings, timeout_s, check=check, is_invited=invited)
        comm = Comm(*parts, epoch=world.epoch)
        if world.epoch > 0:  # made by `grow`
            comm._confirm_start(timeout_s, True)
    except BaseException:
        if comm is not None:
            comm.close()
        elif parts is not None:
            parts.engine.abandon(parts)
        raise
    try:
        comm._begin_own_trace()
    except (MemoryError, OSError) as error:
        comm.close()
        if isinstance(error, MemoryError):
            raise
        raise Error(
            f"SHMRING_TRACE is {settings.trace!r}, which cannot be written: {error.strerror}; give a file in "
            "a folder that is there, the same on every rank of a host",
            rank=comm.rank,
        ) from error
    return comm
