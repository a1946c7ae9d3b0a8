"""Which launcher started this process, and what world and rank it was given by it.

Reads the variables of shmrun, torchrun, Open MPI, MPICH and Intel MPI, and Slurm, in that order.
May know: errors, settings, bootstrap.
"""

from __future__ import annotations

import collections
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from .bootstrap import World
from .errors import Error
from .settings import MAX_RANKS, Settings


@dataclass(frozen=True)
class _Job:
    """What a launcher said: `name` tells this job from every other one of this user on this host."""

    launcher: str
    name: str
    rank: int
    size: int
    local_size: int


def world_from_environment(environ: Mapping[str, str] = os.environ) -> tuple[World, int] | None:
    """(world, rank) as the launcher of this process has it; None where none is recognised.

    Each call stands for one more world: the n-th call of a process meets the n-th of the other ranks.
    """
    settings = Settings.from_environment(environ)
    job = (
        _from_shmrun(settings)
        or _from_torchrun(environ)
        or _from_open_mpi(environ)
        or _from_hydra(environ)
        or _from_slurm(environ)
    )
    if job is None:
        return None
    if not 0 <= job.rank < job.size <= MAX_RANKS:
        raise ValueError(f"{job.launcher} says rank {job.rank} of {job.size}: that cannot be")
    if job.local_size != job.size:
        raise _several_hosts(job, settings)
    world_id = f"{job.name} #{_nth_call(job.name)}"
    return World(world_id, settings.key or _common_key(world_id), job.size), job.rank


_calls: collections.Counter[str] = collections.Counter()


def _nth_call(name: str) -> int:
    _calls[name] += 1
    return _calls[name]


def _common_key(world_id: str) -> bytes:
    # No secret: without one to be had, what protects a world within one host is that the kernel vouches
    # for the other side's user (SO_PEERCRED), and processes of one user trust each other anyway. The key
    # then only tells jobs apart.
    return hashlib.sha256(f"shmring {os.geteuid()} {world_id}".encode()).digest()


def _several_hosts(job: _Job, settings: Settings) -> Error:
    where = f"{job.launcher} runs this job's {job.size} ranks on several hosts ({job.local_size} on this one)"
    if settings.key is None:
        return Error(
            f"{where}, and hosts trust each other only by a key: give the same one to all ranks through "
            "SHMRING_KEY, or SHMRING_KEY_FILE (a file with mode 0600). Several hosts also need a later "
            "version of shmring than this one"
        )
    return Error(f"{where}: this version of shmring cannot do that yet")


def _from_shmrun(settings: Settings) -> _Job | None:
    if settings.rank is None or settings.size is None:
        return None
    # Set by hand SHMRING_ADDR may be left out; two such jobs at once are told so when they meet.
    return _Job("SHMRING_RANK", settings.addr or "by hand", settings.rank, settings.size, settings.size)


def _from_torchrun(environ: Mapping[str, str]) -> _Job | None:
    # All four, as RANK alone is anybody's name.
    if not all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")):
        return None
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size if _number(environ, "LOCAL_RANK") == rank else 0)
    told_apart_by = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return _Job("torchrun", _name("torchrun", environ, told_apart_by), rank, size, local_size)


def _from_open_mpi(environ: Mapping[str, str]) -> _Job | None:
    if "OMPI_COMM_WORLD_RANK" not in environ or "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    return _Job(
        "Open MPI",
        _name("openmpi", environ, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        size,
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size),
    )


def _from_hydra(environ: Mapping[str, str]) -> _Job | None:
    """MPICH and Intel MPI, whose launcher is called Hydra."""
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    size = _number(environ, "PMI_SIZE")
    local = next((name for name in ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE") if name in environ), None)
    if local is None and "SLURM_STEP_ID" in environ:  # srun --mpi=pmi2: Slurm knows the hosts
        return None
    # Nothing in the environment is unique to the job, but its ranks on a host have one proxy as ancestor.
    return _Job(
        "mpiexec",
        f"hydra {_ancestor('hydra_pmi_proxy')}",
        _number(environ, "PMI_RANK"),
        size,
        size if local is None else _number(environ, local),
    )


def _from_slurm(environ: Mapping[str, str]) -> _Job | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too, but only srun starts the tasks: as a step.
    if not all(name in environ for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS")):
        return None
    size = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS"))
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_JOB_NUM_NODES", 1))
    name = _name("slurm", environ, ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _Job("Slurm", name, _number(environ, "SLURM_PROCID"), size, size if nodes == 1 else size // nodes)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} is {text!r}; allowed: a whole number (its launcher sets it)")
    return int(text)


def _name(launcher: str, environ: Mapping[str, str], variables: tuple[str, ...]) -> str:
    return " ".join([launcher, *(environ.get(variable, "-") for variable in variables)])[:400]


def _ancestor(process_name: str) -> str:
    """The nearest ancestor of that name, else the parent, as pid and start time (pids come again)."""
    parent = pid = os.getppid()
    while pid > 1:
        name, grandparent, started = _process(pid)
        if name == process_name:
            return f"{pid} {started}"
        pid = grandparent
    return f"{parent} {_process(parent)[2]}"


def _process(pid: int) -> tuple[str, int, int]:
    """(name, parent's pid, start time in ticks since boot); zeros where it cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return "", 0, 0
    name, _, rest = text.partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    return name.decode("utf-8", "replace"), int(fields[1]), int(fields[19])
