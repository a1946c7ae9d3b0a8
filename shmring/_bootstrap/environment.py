"""Which launcher started this process, as what rank of what job.

Reads the variables of torchrun, Open MPI, MPICH and Intel MPI, and Slurm; those of shmrun are settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .._config.settings import MAX_RANKS, Settings, whole_number


@dataclass(frozen=True)
class Job:
    """What a launcher said.

    `name` tells this job from every other one of this user on this host, and is the same on all hosts of
    the job; `first_host` is rank 0's, where the launcher says so.
    """

    launcher: str
    name: str
    rank: int
    size: int
    local_size: int
    first_host: str | None = None


def find_job(settings: Settings, environ: Mapping[str, str]) -> Job | None:
    """The job that this process is part of; None where no launcher is recognised.

    shmrun comes first, as it may itself run inside a batch job. ValueError names a variable that is wrong.
    """
    job = (
        _from_shmrun(settings)
        or _from_torchrun(environ)
        or _from_open_mpi(environ)
        or _from_hydra(environ)
        or _from_slurm(environ)
    )
    if job is not None and not 1 <= job.size <= MAX_RANKS:
        raise ValueError(f"{job.launcher} says {job.size} ranks; allowed: 1 to {MAX_RANKS}")
    if job is not None and job.rank >= job.size:
        raise ValueError(f"{job.launcher} says rank {job.rank} of {job.size}; allowed: 0 to {job.size - 1}")
    return job


def _from_shmrun(settings: Settings) -> Job | None:
    if settings.rank is None or settings.size is None:
        return None
    # Set by hand SHMRING_ADDR may be left out; two such jobs at once are told so when they meet. Over
    # hosts it is where they meet that tells jobs apart, and each host may call that by another name.
    over_hosts = settings.addr is not None and settings.port is not None
    name = f"port {settings.port}" if over_hosts else settings.addr or "by hand"
    return Job("SHMRING_RANK", name, settings.rank, settings.size, settings.size)


def _from_torchrun(environ: Mapping[str, str]) -> Job | None:
    # All four, as RANK alone is anybody's name.
    if not all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")):
        return None
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size if _number(environ, "LOCAL_RANK") == rank else 0)
    told_apart_by: tuple[str, ...] = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    if local_size == size:
        # Each host counts its own: one whose ranks were well restarts them for another's, and counts nothing.
        told_apart_by += ("TORCHELASTIC_RESTART_COUNT",)
    name = _name("torchrun", environ, told_apart_by)
    return Job("torchrun", name, rank, size, local_size, environ["MASTER_ADDR"])


def _from_open_mpi(environ: Mapping[str, str]) -> Job | None:
    if "OMPI_COMM_WORLD_RANK" not in environ or "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    return Job(
        "Open MPI",
        _name("openmpi", environ, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        size,
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size),
    )


def _from_hydra(environ: Mapping[str, str]) -> Job | None:
    """MPICH and Intel MPI, whose launcher is called Hydra."""
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    size = _number(environ, "PMI_SIZE")
    local = next((name for name in ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE") if name in environ), None)
    if local is None and "SLURM_STEP_ID" in environ:  # srun --mpi=pmi2: Slurm knows the hosts
        return None
    local_size = size if local is None else _number(environ, local)
    # Nothing in the environment is unique to the job, but its ranks on a host have one proxy as ancestor.
    # On several hosts they have only that in common where they are told to meet.
    own = _ancestor("hydra_pmi_proxy") if local_size == size else "over hosts"
    return Job("mpiexec", f"hydra {own}", _number(environ, "PMI_RANK"), size, local_size)


def _from_slurm(environ: Mapping[str, str]) -> Job | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too, but only srun starts the tasks: as a step.
    if not all(name in environ for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS")):
        return None
    size = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS"))
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_JOB_NUM_NODES", 1))
    name = _name("slurm", environ, ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"))
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    local_size = size if nodes == 1 else 0  # Slurm says it for each node: here it matters that there are more
    return Job("Slurm", name, _number(environ, "SLURM_PROCID"), size, local_size, first_of(hosts) or None)


def first_of(hosts: str) -> str:
    """The first name in a list as Slurm writes it: "node01" of "node[01-03,7],login"."""
    first = re.match(r"(?:[^][,]|\[[^][]*\])*", hosts)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0]) if first else ""


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    number = whole_number(text)
    if number is None:
        raise ValueError(f"{name} is {text[:64]!r}; allowed: a whole number (its launcher sets it)")
    return number


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
