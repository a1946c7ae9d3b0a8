"""Executors of the interface of concurrent.futures, on the ranks of a communicator.

MPICommExecutor   in pool: an executor on one rank, whose workers are the other ranks
MPIPoolExecutor   with `python -m mpi4py.futures` (server, __main__): rank 0 runs the program, the others work
collect, compose  in composed: futures made of other futures
"""

from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    InvalidStateError,
    TimeoutError,
    as_completed,
    wait,
)

from .composed import collect, compose
from .pool import MPICommExecutor, MPIPoolExecutor, ProcessPoolExecutor, ThreadPoolExecutor, get_comm_workers

__all__ = [
    "ALL_COMPLETED",
    "FIRST_COMPLETED",
    "FIRST_EXCEPTION",
    "BrokenExecutor",
    "CancelledError",
    "Executor",
    "Future",
    "InvalidStateError",
    "MPICommExecutor",
    "MPIPoolExecutor",
    "ProcessPoolExecutor",
    "ThreadPoolExecutor",
    "TimeoutError",
    "as_completed",
    "collect",
    "compose",
    "get_comm_workers",
    "wait",
]
