"""The contestants: how their ranks are launched, and which settings make each as fast as possible.

Contains the launch commands, the environments and the list of variants. Uses install_peers, not the protocol.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers import install_peers

RANK_PROGRAM = Path(__file__).with_name("peer_rank.py")
# Long compared with the clock's resolution and a wake-up; when ranks share a CPU, long compared with a time
# slice.
SAMPLE_S = 0.004
OVERSUBSCRIBED_SAMPLE_S = 0.020

MPI_PEERS = ("mpich", "openmpi", "intel")


@dataclass(frozen=True)
class Contestant:
    """One library with all its ranks; `library` names the class in peer_libraries that calls it."""

    name: str
    library: str
    python: Path
    variants: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    oversubscribed_launcher: tuple[str, ...] = ()
    oversubscribed_environment: dict[str, str] = field(default_factory=dict)
    sample_s: float = SAMPLE_S
    smallest_nbytes: int = 0
    note: str = ""
    # By rank, the prefix of its command: on hosts.py's hosts, the command that enters the host.
    places: tuple[tuple[str, ...], ...] = ()

    def commands(self, nprocs: int, arguments: list[str], *, oversubscribed: bool) -> list[list[str]]:
        """Return the processes to start: one launcher for MPI, else one per rank, whose last argument is its
        rank."""
        program = [str(self.python), str(RANK_PROGRAM), self.library, *arguments]
        if not self.launcher:
            places = self.places or ((),) * nprocs
            return [[*places[rank], *program, str(rank)] for rank in range(nprocs)]
        extra = self.oversubscribed_launcher if oversubscribed else ()
        return [[*self.launcher, *extra, "-n", str(nprocs), *program]]

    def process_environment(self, *, oversubscribed: bool) -> dict[str, str]:
        extra = self.oversubscribed_environment if oversubscribed else {}
        return {**os.environ, **self.environment, **extra}


# Without other instructions mpi4py asks for MPI_THREAD_MULTIPLE, and MPICH and Open MPI then take locks.
ONE_THREAD_CALLS = {"MPI4PY_RC_THREAD_LEVEL": "funneled"}


def _mpi(folder: Path, peer: str, **more: object) -> Contestant:
    bin_folder = folder / peer / "bin"
    options = more.pop("launcher_options", ())
    launcher = (str(bin_folder / "mpiexec"), *options)  # type: ignore[misc]
    return Contestant(peer, "mpi", bin_folder / "python", ("blocking", "persistent"), launcher=launcher,
                      **more)  # type: ignore[arg-type]


def mpich(folder: Path) -> Contestant:
    return _mpi(folder, "mpich",
                environment=ONE_THREAD_CALLS,
                # MPICH yields only with MPI_THREAD_MULTIPLE: 7 ms for 8 bytes without.
                oversubscribed_environment={"MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
                                            "MPI4PY_RC_THREAD_LEVEL": "multiple"},
                note="more ranks than CPUs: MPI_THREAD_MULTIPLE, MPIR_CVAR_POLLS_BEFORE_YIELD=1")


def openmpi(folder: Path) -> Contestant:
    return _mpi(folder, "openmpi",
                environment=ONE_THREAD_CALLS,
                launcher_options=("--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
                oversubscribed_launcher=("--mca", "mpi_yield_when_idle", "1"),
                note="more ranks than CPUs: mpi_yield_when_idle=1")


def intel(folder: Path) -> Contestant:
    return _mpi(folder, "intel",
                environment={**ONE_THREAD_CALLS, "I_MPI_PIN": "off", "I_MPI_FABRICS": "shm"},
                oversubscribed_environment={"I_MPI_WAIT_MODE": "1"},
                note="I_MPI_FABRICS=shm; more ranks than CPUs: I_MPI_WAIT_MODE=1")


def gloo(folder: Path) -> Contestant:
    return Contestant("gloo", "gloo", install_peers.environment_python(folder, "gloo"), ("in place",),
                      environment={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                      sample_s=0.030,  # its first calls after a pause may wait for a clock tick
                      note="in place, since it has no other form; its own threads are not pinned")


def shmring(name: str = "shmring", python_path: Path | None = None) -> Contestant:
    """Return shmring in this interpreter; python_path puts another build of it before the installed one."""
    if python_path is None and importlib.util.find_spec("shmring") is None:
        python_path = RANK_PROGRAM.parents[2]  # not installed: the checkout, built in place
    environment = {"PYTHONPATH": str(python_path)} if python_path else {}
    return Contestant(name, "shmring", Path(sys.executable), ("private", "plan", "zero-copy"),
                      environment=environment)


def copy_limit() -> Contestant:
    return Contestant("copy", "copy", Path(sys.executable), ("plain", "streaming"), smallest_nbytes=4096)


def chosen(names: list[str], folder: Path) -> list[Contestant]:
    """Return the installed contestants among these names; the copy limit is always one of them."""
    make = {"mpich": mpich, "openmpi": openmpi, "intel": intel, "gloo": gloo}
    present = install_peers.installed(folder)
    return [copy_limit(), *(make[name](folder) for name in make if name in names and name in present),
            *([shmring()] if "shmring" in names else [])]
