"""Replaces itself by `shmring.mpi4py`, with a finder for its modules."""

import importlib
import sys

from shmring.mpi4py import finder

finder.install()
sys.modules[__name__] = importlib.import_module("shmring.mpi4py")
