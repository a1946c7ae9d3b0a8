"""The folder in which Python finds shmring's stand-in for mpi4py, before an installed one."""

from __future__ import annotations

import os

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "mpi4py", "_stand_in")


def with_stand_in(path: str) -> str:
    """Return PYTHONPATH with this folder at its front."""
    others = [folder for folder in path.split(os.pathsep) if folder and folder != FOLDER]
    return os.pathsep.join([FOLDER, *others])
