"""Find the launcher that started this process, and the rank and the job that it gave.

This module reads the variables of torchrun, Open MPI, MPICH and Intel MPI, and Slurm. Those of shmrun are
settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .._config.settings import MAX_RANKS, Settings, whole_number
from .._system import ended_ranks, procfs
from ..errors import RankFailed
from .framed_socket import Check
from .world import nothing_to_check


@dataclass(frozen=True)
class Job:
    """This process's place in a job, as its launcher gives it.

    `name` is unique among this user's jobs on this host, and the same on all hosts of the job. `first_host`
    is the host of rank 0 if the launcher gives it.
    """

    launcher: str
    name: str
    rank: int
    size: int
    local_size: int
    first_host: str | None = None


def find_job(settings: Settings, environ: Mapping[str, str]) -> Job | None:
    """Return the job that this process is part of; None if no launcher is recognised.

    shmrun is tried first, since it may run inside a batch job. A ValueError names an invalid variable.
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


def ended_ranks_check(settings: Settings) -> Check:
    """Return a function that raises RankFailed once shmrun has recorded the end of a rank.

    From now on this process notes in shmrun's record that it has got an error about another rank.
    """
    fd = settings.ended_fd
    if fd is None or not ended_ranks.is_shmruns(fd):
        return nothing_to_check
    if settings.rank is not None:
        ended_ranks.belong_to(fd, settings.rank)

    def check() -> None:
        rank = ended_ranks.first_ended(fd, MAX_RANKS)
        if rank is not None:
            raise RankFailed(
                f"rank {rank} ended without joining: its program did not call shmring.init(), or not as "
                "often as the others",
                rank=rank,
                cause="ended without joining",
            )

    return check


def _from_shmrun(settings: Settings) -> Job | None:
    if settings.rank is None or settings.size is None:
        return None
    # If variables are set by hand, SHMRING_ADDR may be missing; two such jobs at once get an error when they
    # start. Over several hosts the port identifies the job: hosts may use different names for the address.
    over_hosts = settings.addr is not None and settings.port is not None
    name = f"port {settings.port}" if over_hosts else settings.addr or "by hand"
    return Job("SHMRING_RANK", name, settings.rank, settings.size, settings.size)


def _from_torchrun(environ: Mapping[str, str]) -> Job | None:
    # All four are required: other programs use the name RANK, too.
    if not all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")):
        return None
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size if _number(environ, "LOCAL_RANK") == rank else 0)
    identified_by: tuple[str, ...] = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    if local_size == size:
        # Each host counts only failures of its own ranks, so the counts of several hosts may differ.
        identified_by += ("TORCHELASTIC_RESTART_COUNT",)
    name = _name("torchrun", environ, identified_by)
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
    """Return the job under Hydra, the launcher of MPICH and Intel MPI."""
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    size = _number(environ, "PMI_SIZE")
    local = next((name for name in ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE") if name in environ), None)
    if local is None and "SLURM_STEP_ID" in environ:  # srun --mpi=pmi2: Slurm knows the hosts
        return None
    local_size = size if local is None else _number(environ, local)
    # No variable is unique to the job, but its ranks on one host have one proxy process as ancestor. Ranks on
    # several hosts have nothing in common but the address that the user gives.
    own = _hydra_proxy() if local_size == size else "over hosts"
    return Job("mpiexec", f"hydra {own}", _number(environ, "PMI_RANK"), size, local_size)


def _from_slurm(environ: Mapping[str, str]) -> Job | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too, but only srun starts the tasks: as a step.
    if not all(name in environ for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS")):
        return None
    size = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS"))
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_JOB_NUM_NODES", 1))
    name = _name("slurm", environ, ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"))
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    local_size = size if nodes == 1 else 0  # any value but size means several hosts
    return Job("Slurm", name, _number(environ, "SLURM_PROCID"), size, local_size, first_of(hosts) or None)


def first_of(hosts: str) -> str:
    """Return the first name in a list in Slurm's format: "node01" for "node[01-03,7],login"."""
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


def _hydra_proxy() -> str:
    """Return pid and start time of the nearest ancestor that is Hydra's proxy, else of the parent.

    The start time is for pids that are used again.
    """
    found = pid = os.getppid()
    while pid > 1:
        name, parent = procfs.name_and_parent(pid)
        if name == "hydra_pmi_proxy":
            found = pid
            break
        pid = parent
    return f"{found} {procfs.start_time(found)}"
