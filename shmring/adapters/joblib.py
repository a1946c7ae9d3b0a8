"""joblib's workers as the ranks of a world."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import shmring

from .._config.optional_deps import need
from ._tasks import be_rank, first_cause, pack

__all__ = ["run"]


def run(fn: Callable[..., Any], n_jobs: int, *args: Any, timeout: float | None = None) -> list[Any]:
    """Call `fn(comm, *args)` in `n_jobs` workers of joblib at the same time; returns the results by rank.

    The backend is joblib's present one (loky, unless `joblib.parallel_config` says otherwise); large arrays
    among args arrive as joblib sends them, mapped and read-only. n_jobs: -1 is as many as joblib means by
    it. timeout: seconds, for the meeting and for each call on `comm`. Raises ValueError where joblib would
    run fewer at the same time (deep within its own workers it runs one), TypeError for a function that cannot
    be pickled, and the exception of the first failing rank in its own type, with `.rank` and a note.
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
    # One by one and all at once: what joblib puts into one batch would run one after the other.
    parallel = joblib.Parallel(n_jobs=nprocs, batch_size=1, pre_dispatch="all")
    tasks = (joblib.delayed(_outcome)(function, world, rank, timeout, *args) for rank in range(nprocs))
    results, errors = zip(*parallel(tasks), strict=True)
    failures = {rank: error for rank, error in enumerate(errors) if error is not None}
    if failures:
        raise first_cause(failures, ["a worker of joblib"] * nprocs)
    return list(results)


def _outcome(*task: Any) -> tuple[Any, Exception | None]:
    # Returned, as joblib raises any failure, not the one that the others follow from.
    try:
        return be_rank(*task), None
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        return None, error
