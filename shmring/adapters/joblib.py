"""joblib workers as the ranks of a world."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import shmring

from .._config.optional_deps import need
from ._tasks import be_rank, first_cause, pack

__all__ = ["run"]


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
        The exception of the first failing rank in its own type, with `.rank` and a note.

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
    tasks = (joblib.delayed(_outcome)(function, world, rank, timeout, *args) for rank in range(nprocs))
    results, errors = zip(*parallel(tasks), strict=True)
    failures = {rank: error for rank, error in enumerate(errors) if error is not None}
    if failures:
        raise first_cause(failures, ["a worker of joblib"] * nprocs)
    return list(results)


def _outcome(*task: Any) -> tuple[Any, Exception | None]:
    # Return the failure: joblib would raise an arbitrary one, not the first cause.
    try:
        return be_rank(*task), None
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        return None, error
