"""joblib: its workers as the ranks of a world, and a backend whose large arrays are shared."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import shmring

from .._config.optional_deps import need
from .._outcome import Failure
from ._sharing import KEEP_NBYTES, LEAST_NBYTES, Loaded, reducer, submit_task
from ._tasks import be_rank, first_cause, pack, submitting

__all__ = ["register_joblib", "run"]


def run(fn: Callable[..., Any], n_jobs: int, *args: Any, timeout: float | None = None) -> list[Any]:
    """Call `fn(comm, *args)` in `n_jobs` joblib workers at the same time; return the results by rank.

    The backend is joblib's current one (loky, unless `joblib.parallel_config` sets another).

    Parameters
    ----------
    fn : callable
        The function.
    n_jobs : int
        Number of ranks. Negative numbers have joblib's meaning.
    *args
        joblib passes large arrays among them as read-only memory maps.
    timeout : float, optional
        Seconds for the start and for each call on `comm`.

    Returns
    -------
    list
        By rank.

    Raises
    ------
    ValueError
        If joblib would run fewer workers at the same time (nested deep in its own workers it runs one).
    TypeError
        For a function that cannot be pickled.
    BaseException
        The exception of the first failing rank in its own type, with `.rank` and a note that has its
        traceback. If it cannot be pickled, a RuntimeError with its text.
    RankFailed
        If a rank raises SystemExit.

    Examples
    --------
    ::

        from shmring.adapters import joblib

        def total(comm, factor):
            return comm.all_reduce(factor * comm.rank)

        joblib.run(total, 3, 10)
    """
    joblib = need("joblib", "joblib", __name__)
    workers = joblib.effective_n_jobs(n_jobs)
    nprocs = workers if n_jobs < 0 else n_jobs
    world = shmring.world(nprocs)
    if workers < nprocs:
        raise ValueError(
            f"joblib would run {workers} task(s) at the same time here, too few for {nprocs} ranks: choose "
            "another backend (joblib.parallel_config), or do not call this within joblib's own workers"
        )
    function = pack(fn)
    # Batches of one task, all dispatched at once: joblib runs the tasks of one batch one after another.
    parallel = joblib.Parallel(n_jobs=nprocs, batch_size=1, pre_dispatch="all")
    with contextlib.ExitStack() as dispatch:
        if nprocs > 1:  # joblib may run a single rank here, which may itself call this function
            dispatch.enter_context(submitting())

        def tasks() -> Iterator[Any]:
            for rank in range(nprocs):
                yield joblib.delayed(be_rank)(function, world, rank, timeout, *args)
            dispatch.close()  # joblib asks for more tasks once it has dispatched these

        outcomes = parallel(tasks())
    # joblib would raise the exception of any rank, not the first cause.
    failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}
    if failures:
        raise first_cause(failures, ["a worker of joblib"] * nprocs)
    return list(outcomes)


def register_joblib(
    name: str = "shmring", *, least_nbytes: int = LEAST_NBYTES, keep_nbytes: int = KEEP_NBYTES
) -> None:
    """Register a joblib backend: loky, whose large arrays travel in shared memory in both directions.

    Parameters
    ----------
    name : str
        For `joblib.Parallel(backend=name)` and `joblib.parallel_config(name)`.
    least_nbytes : int
        Smaller arrays are pickled, except those of `shmring.share`.
    keep_nbytes : int
        The most memory of dropped arrays that this process, and each worker, keeps for later arrays.

    Raises
    ------
    ModuleNotFoundError
        If joblib is not installed.

    Examples
    --------
    ::

        from shmring.adapters.joblib import register_joblib

        register_joblib()
        spectra = joblib.Parallel(4, backend="shmring")(joblib.delayed(np.fft.rfft)(x) for x in signals)
    """
    joblib = need("joblib", "joblib", __name__)
    from joblib._parallel_backends import (  # type: ignore[import-untyped, unused-ignore]
        LokyBackend,
    )

    class Backend(LokyBackend):  # type: ignore[misc, unused-ignore]
        def configure(self, *args: Any, **keywords: Any) -> Any:
            shmring.keep_shared(keep_nbytes)
            keywords["max_nbytes"] = None  # no memory maps of files
            return super().configure(*args, **keywords)

        def submit(self, func: Any, callback: Any = None) -> Any:
            return submit_task(
                super().submit, functools.partial(_Task.of, func, least_nbytes, keep_nbytes), callback
            )

        def apply_async(self, func: Any, callback: Any = None) -> Any:  # the name before joblib 1.5
            task = functools.partial(_Task.of, func, least_nbytes, keep_nbytes)
            return submit_task(super().apply_async, task, callback)

    joblib.register_parallel_backend(name, Backend)


class _Task:
    """A batch of joblib's calls, pickled by loky's pickler with shared arrays."""

    def __init__(self, data: bytes, least_nbytes: int, keep_nbytes: int) -> None:
        self.data, self.least_nbytes, self.keep_nbytes = data, least_nbytes, keep_nbytes

    @classmethod
    def of(cls, calls: Any, least_nbytes: int, keep_nbytes: int, sent: list[Any]) -> _Task:
        if isinstance(calls, cls):
            return calls
        return cls(_dumps(calls, least_nbytes, sent), least_nbytes, keep_nbytes)

    def __call__(self) -> Loaded:
        shmring.keep_shared(self.keep_nbytes)
        return Loaded(_dumps(pickle.loads(self.data)(), self.least_nbytes))


def _dumps(obj: Any, least_nbytes: int, sent: list[Any] | None = None) -> bytes:
    import numpy as np
    from joblib.externals.loky.backend.reduction import (  # type: ignore[import-untyped, unused-ignore]
        get_loky_pickler,
    )

    file = io.BytesIO()
    get_loky_pickler()(file, reducers={np.ndarray: reducer(least_nbytes, sent=sent)}).dump(obj)
    return file.getvalue()
