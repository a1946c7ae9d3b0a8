"""Pools of processes: their workers as the ranks of a world, and a pool whose large arrays are shared."""

from __future__ import annotations

import concurrent.futures
import functools
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import shmring

from .._arrays.passing import forget_pool, set_reuse_limit
from ._sharing import (
    KEEP_NBYTES,
    LEAST_NBYTES,
    LIGHT_NBYTES,
    begin_worker,
    dumps,
    light_copies,
    run_task,
    submit_task,
)
from ._tasks import be_rank, collect, pack, submit_all, submitting, wanting

__all__ = ["Executor", "run"]

_Result = TypeVar("_Result")


class Executor(concurrent.futures.ProcessPoolExecutor):
    """A ProcessPoolExecutor whose large arrays travel in shared memory instead of through a pipe.

    This applies to all arrays in the arguments and in the results, at any depth, and to the arrays that the
    workers put into queues. As in any pool, the receiver gets a copy of its own, which is writable. `submit`
    pickles or copies the arguments, so later changes of them have no effect. Arrays of `shmring.share`,
    `shared_empty` and `shared_zeros` are not copied: the receiver has the same memory.

    Parameters
    ----------
    max_workers : int, optional
        As for ProcessPoolExecutor.
    least_nbytes : int
        Smaller arrays are pickled, except those of `shmring.share`.
    keep_nbytes : int
        The most memory of dropped arrays that this process, and each worker, keeps for later arrays. 0: none.
    **keywords
        Those of ProcessPoolExecutor.

    Examples
    --------
    ::

        from shmring.adapters.pools import Executor

        with Executor(4) as pool:
            for spectrum in pool.map(np.fft.rfft, signals):
                ...
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        least_nbytes: int = LEAST_NBYTES,
        keep_nbytes: int = KEEP_NBYTES,
        **keywords: Any,
    ) -> None:
        initializer, initargs = keywords.pop("initializer", None), keywords.pop("initargs", ())
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a callable, not {type(initializer).__name__}")
        keywords["initargs"] = least_nbytes, keep_nbytes, initializer, initargs
        super().__init__(max_workers, initializer=begin_worker, **keywords)
        self._least_nbytes = least_nbytes
        self._light_nbytes = min(least_nbytes, LIGHT_NBYTES)
        self._while_open = object()
        set_reuse_limit(self._while_open, keep_nbytes)
        weakref.finalize(self, forget_pool, self._while_open).atexit = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do as ProcessPoolExecutor.shutdown, and keep no more memory for this Executor in this process.

        Parameters
        ----------
        wait : bool
            Return only when the workers have ended.
        cancel_futures : bool
            Cancel the tasks that have not begun.
        """
        super().shutdown(wait, cancel_futures=cancel_futures)
        set_reuse_limit(self._while_open, 0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Run fn(*args, **kwargs) in a worker, as ProcessPoolExecutor.submit does.

        Parameters
        ----------
        fn : callable
            The function. It, its arguments and its result are pickled.
        *args
            Its arguments.
        **kwargs
            Its keyword arguments.

        Returns
        -------
        concurrent.futures.Future
            The future of the result.

        Raises
        ------
        RuntimeError
            As ProcessPoolExecutor.submit: after `shutdown`, or if a worker has died.
        Exception
            The exception of pickle, if an argument cannot be pickled. ProcessPoolExecutor puts it into the
            future instead.
        OutOfMemory, Error
            As `shmring.share`.
        """
        is_named = isinstance(fn, FunctionType) and "<" not in fn.__qualname__
        if is_named and not kwargs and (copies := light_copies(args, self._light_nbytes)) is not None:
            return super().submit(fn, *copies)  # pickled later, as by any pool
        call, send = (fn, args, kwargs), super().submit
        future: concurrent.futures.Future[Any] = submit_task(
            lambda task: send(run_task, task), lambda sent: dumps(call, self._least_nbytes, sent)
        )
        return future


def run(
    pool: concurrent.futures.Executor,
    fn: Callable[..., _Result],
    nprocs: int,
    *args: Any,
    timeout: float | None = None,
) -> list[_Result]:
    """Call `fn(comm, *args)` in `nprocs` workers of the pool at the same time; return the results by rank.

    Parameters
    ----------
    pool : concurrent.futures.Executor
        A ProcessPoolExecutor, a loky executor, or another one on this host. As many of its workers as there
        are ranks must be idle or become so, since ranks wait for each other.
    fn : callable
        The function.
    nprocs : int
        Number of ranks.
    *args
        Its arguments after `comm`.
    timeout : float, optional
        Seconds for the start and for each call on `comm`.

    Returns
    -------
    list
        By rank.

    Raises
    ------
    ValueError
        If the pool has fewer workers than ranks.
    TypeError
        For a pool that is no executor, such as a multiprocessing.Pool; for a function that cannot be pickled
        (by cloudpickle if it is installed).
    BaseException
        The exception of the first failing rank in its own type, with `.rank` and a note that has its
        traceback. If it cannot be pickled, a RuntimeError with its text.
    RankFailed
        If a rank raises SystemExit or KeyboardInterrupt.

    Examples
    --------
    ::

        from concurrent.futures import ProcessPoolExecutor
        from shmring.adapters import pools

        def total(comm, factor):
            return comm.all_reduce(factor * comm.rank)

        with ProcessPoolExecutor(3) as pool:
            pools.run(pool, total, 3, 10)
    """
    if not callable(getattr(pool, "submit", None)):
        raise TypeError(f"pool is {pool!r:.60}; give an executor, such as a ProcessPoolExecutor")
    world = shmring.world(nprocs)
    workers = getattr(pool, "_max_workers", None)
    if workers is not None and workers < world.nprocs:
        raise ValueError(
            f"the pool has {workers} worker(s), too few for {world.nprocs} ranks, which all run at the same "
            f"time: make it with max_workers={world.nprocs}, or use {workers} rank(s)"
        )
    function = pack(fn)
    with wanting(world) as check:
        start = functools.partial(be_rank, check=check)
        with submitting():
            futures = submit_all(
                lambda rank: pool.submit(start, function, world, rank, timeout, *args), world.nprocs
            )
        return collect(futures, ["a worker of the pool"] * world.nprocs)
