"""Report a process's software: versions, libraries, launchers, settings, tuning table, instruction set.

This module looks up the versions of packages and imports none of them. A process of its own imports JAX.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import shmring

from ..._bootstrap.environment import find_job
from ..._config import thresholds
from ..._config import tuning_table as measured
from ..._config.settings import Settings, Survey, replaced_backend
from ..._core import kernels

LIBRARIES = (
    *("torch", "ray", "dask", "distributed", "joblib", "loky", "mpi4py", "jax", "ml_dtypes", "scikit-learn"),
    *("cloudpickle", "matplotlib", "rich", "tqdm"),
)
_LAUNCHERS = ("shmrun", "torchrun", "mpiexec", "mpirun", "srun", "ray", "dask")
_JAX_S = 60  # limit of an import
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def versions() -> dict[str, str]:
    """Return the versions of shmring, Python, NumPy and the kernel."""
    return {
        "shmring": shmring.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": metadata.version("numpy"),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def instruction_set() -> dict[str, Any]:
    """Return the instruction set of the reduction loops, why it is chosen, and those available."""
    there = kernels.isas()
    asked = Survey.of().given.get("SHMRING_ISA", "").strip().lower()
    if asked in ("", "auto"):
        chosen, why = there[0], "the best that this CPU and its operating system support"
    elif asked in there:
        chosen, why = asked, "SHMRING_ISA asks for it"
    else:
        chosen, why = None, f"SHMRING_ISA asks for {asked!r}, which is not available here"
    return {"chosen": chosen, "why": why, "there": there}


def settings() -> dict[str, Any]:
    """Return the SHMRING_* variables that are set, their errors, and unknown names."""
    found = Survey.of()
    return {"given": found.given, "wrong": found.wrong, "unknown_names": found.unknown}


def tuning_table() -> dict[str, Any]:
    """Return the tuning table of new communicators: a file with its numbers of ranks, or the built-in one."""
    asked = Survey.of().given.get("SHMRING_TUNING", "").strip() or "auto"
    fact: dict[str, Any] = {"path": None, "ranks": [], "state": "off", "why": "SHMRING_TUNING says none"}
    if asked == "none":
        return fact
    path = measured.default_path() if asked == "auto" else Path(asked)
    fact["path"] = str(path)
    try:
        ranks = sorted(measured.load(path, thresholds.LIMITS))
    except measured.Unusable as error:
        absent = asked == "auto" and isinstance(error, measured.Absent)
        return fact | {"state": "absent" if absent else "unusable", "why": str(error)}
    return fact | {"ranks": ranks, "state": "used", "why": None}


def job() -> dict[str, Any]:
    """Return the launcher of this process, according to its environment, and the launchers on the PATH."""
    fact: dict[str, Any] = {"launcher": None, "rank": None, "size": None, "local_size": None, "wrong": None}
    try:
        found = find_job(Settings.from_environment() if not Survey.of().wrong else Settings(), os.environ)
    except ValueError as error:
        fact["wrong"], found = str(error), None
    if found is not None:
        fact |= {"launcher": found.launcher, "rank": found.rank, "size": found.size}
        fact["local_size"] = found.local_size
    return fact | {
        "commands": {name: path for name in _LAUNCHERS if (path := shutil.which(name))},
        "kubernetes": "KUBERNETES_SERVICE_HOST" in os.environ,
        "slurm_allocation": "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ,
    }


def libraries() -> dict[str, str | None]:
    """Return the versions of libraries that shmring works with; None for a library that is not installed."""
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def gloo() -> dict[str, Any]:
    """Return whether programs that import torch get shmring in gloo's place, and why or why not."""
    fact: dict[str, Any] = {"replaced": False, "why": None}
    try:
        asked = replaced_backend()
    except ValueError as error:
        return fact | {"why": str(error)}
    if asked != "gloo":
        return fact | {"why": "SHMRING_REPLACES does not ask for it"}
    if libraries()["torch"] is None:
        return fact | {"why": "torch is not installed"}
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return fact | {"why": "torch loads no extensions, because of TORCH_DEVICE_BACKEND_AUTOLOAD"}
    if not metadata.entry_points(group="torch.backends", name="shmring"):
        return fact | {"why": "shmring is on the path and not installed, so torch does not find it"}
    return {"replaced": True, "why": "SHMRING_REPLACES asks for it"}


def jax() -> dict[str, Any]:
    """Return the version of JAX, and how its programs call shmring; both None without JAX.

    A process of its own imports JAX, since only JAX knows.
    """
    fact: dict[str, Any] = {"version": libraries()["jax"], "calls_through": None}
    if fact["version"] is None:
        return fact
    program = "from shmring.adapters import jax; print(jax.calls_through())"
    quiet = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=_JAX_S, check=False)
    if found.returncode != 0:
        raise OSError(f"JAX cannot be imported: {found.stderr.strip().rpartition(chr(10))[2]}")
    return fact | {"calls_through": found.stdout.strip()}


def threads() -> dict[str, Any]:
    """Return the variables that set numerical libraries' thread counts; and True if there is no GIL."""
    given = {name: os.environ[name] for name in THREAD_VARIABLES if os.environ.get(name)}
    return {"given": given, "free_threaded": not getattr(sys, "_is_gil_enabled", lambda: True)()}
