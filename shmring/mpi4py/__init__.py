"""A stand-in for mpi4py: programs written for it run on shmring, without MPI.

    shmrun --mpi4py -n 4 script.py

MPI               the names, and joining at import; `shmring.MPI` is the same module
  environment     Init, Finalize, versions, time, memory
  intracomm       Intracomm, grids and graphs of ranks
  neighbors       collectives along the edges of grids and graphs
  windows         memory that other ranks access: `window_state`, `epochs`, `rma`, `alloc_mem` and
                  `private_memory`
  comm            communicators: how they are made and freed
  object_calls    isend, gather ... of Python objects
  objects         pickles; send, recv, bcast, allgather of Python objects (Cython)
  collectives     Bcast, Allreduce ... in three forms (`forms`)
  point_to_point  Send, Recv, probes, Message; threads take `turns`
  requests        Request, Prequest, Grequest
  ops, folds      operations; reductions that shmring has no operation for
  types           predefined datatypes; `constructors` and `layouts`: those that programs make
  groups, info, errhandlers, handles, errors, constants, rc, refused
  calls           calls on buffers that have to be fast; how calls run, are begun and waited for (Cython)
  messages        MPI.buffer, handles, statuses, specifications of messages (Cython)
  device_arrays   memory by DLPack and __cuda_array_interface__
finder            makes the name `mpi4py` mean this package; run: the command line
process           joins the world, and ends the job if the process fails
bench, futures, typing, util   modules of mpi4py
"""

from __future__ import annotations

from typing import Any, NoReturn

from .rc import rc

__version__ = "4.1.2"  # the version of mpi4py whose names and behaviour this package has
__all__ = ["get_config", "get_include", "profile", "rc"]


def get_config() -> dict[str, str]:
    """Return an empty dict: no MPI was used to build this package."""
    return {}


def get_include() -> NoReturn:
    """Refuse: there are no headers of C."""
    raise NotImplementedError(
        "shmring's MPI has no headers: what is compiled against mpi4py needs mpi4py and an MPI"
    )


def profile(name: Any, *, path: Any = None) -> NoReturn:
    """Refuse: there is no library of MPI to profile."""
    raise NotImplementedError(
        "shmring's MPI has no profiling interface: use SHMRING_TRACE, which writes a trace of all calls"
    )
