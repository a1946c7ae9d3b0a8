"""The process: joining the world, leaving it, and what MPI says about itself."""

from __future__ import annotations

import atexit
import contextlib
import math
import operator
import os
import secrets
import socket
import threading
import time
from typing import Any

import shmring

from ..errors import Error, RankFailed
from . import alloc_mem, errors, handles, process
from .calls import set_many_threads_call
from .comm import FOREVER_S, SENDS_S, Communicator, Intra
from .constants import INTEGERS
from .errhandlers import Policy
from .info import Info
from .intracomm import Intracomm
from .messages import buffer, get_address, integer_of
from .point_to_point import BUFFERED
from .rc import rc

_SECRET_NBYTES = 32
_MOST_RANKS = 2**31 - 1  # of a grid: MPI counts them by an int of C
_LEVELS = {
    name: INTEGERS[f"THREAD_{name.upper()}"] for name in ("single", "funneled", "serialized", "multiple")
}
_state: dict[str, Any] = {
    "is_initialized": False,
    "is_finalized": False,
    "pid": 0,
    "thread_level": _LEVELS["multiple"],
    "thread": threading.main_thread(),  # that has joined the world
}

COMM_WORLD: Intracomm = Intracomm()
COMM_SELF: Intracomm = Intracomm()


def Init() -> None:
    """Join the world; collective over all ranks."""
    _init(_LEVELS["multiple"])


def init_at_import() -> None:
    """Join the world with the support for threads that `mpi4py.rc` asks for."""
    if rc.thread_level not in _LEVELS:
        raise ValueError(f"mpi4py.rc.thread_level is {rc.thread_level!r}; it is one of {', '.join(_LEVELS)}")
    _init(_LEVELS[rc.thread_level if rc.threads else "single"])


def _init(thread_level: int) -> None:
    if _state["is_initialized"]:
        raise errors.Exception(errors.ERR_OTHER, "Init was called already")
    Policy.set(rc.errors)
    comm = process.join()
    rank, size = comm.rank, comm.size
    secret = comm.broadcast_object(secrets.token_bytes(_SECRET_NBYTES))
    world = Communicator(rank, tuple(range(size)), secret, comm)
    alone = Communicator(
        0, (rank,), secret + b"self", open_comm=lambda: shmring.init(shmring.world(1), 0, timeout=FOREVER_S)
    )
    for name, constant, context in (("WORLD", COMM_WORLD, world), ("SELF", COMM_SELF, alone)):
        context.name, context.constant, constant._ref = f"MPI_COMM_{name}", constant, context
    Intra.world = COMM_WORLD
    handles.predefine({"COMM_WORLD": COMM_WORLD, "COMM_SELF": COMM_SELF})
    _state.update(
        is_initialized=True, pid=os.getpid(), thread_level=thread_level, thread=threading.current_thread()
    )
    set_many_threads_call(thread_level == _LEVELS["multiple"])
    finalize = rc.initialize if rc.finalize is None else rc.finalize
    atexit.register(_leave if finalize else process.abort_if_failed)


def Init_thread(required: int = INTEGERS["THREAD_MULTIPLE"]) -> int:
    """Join the world, and return the support for threads: that which is required."""
    if required not in _LEVELS.values():
        raise errors.Exception(errors.ERR_ARG, f"{required!r} is not a level of thread support")
    _init(required)
    return Query_thread()


def Finalize() -> None:
    """Wait for all ranks, and leave the world."""
    if _state["is_finalized"] or not _state["is_initialized"]:
        raise errors.Exception(errors.ERR_OTHER, "MPI is not initialized, or was finalized already")
    handles.delete_attributes(COMM_SELF)  # MPI calls their functions first, while all calls still work
    BUFFERED.flush()
    try:
        COMM_WORLD._ref.comm.barrier()
    except RankFailed:
        pass  # a rank has ended without a call of this
    except Error as error:
        raise COMM_WORLD._ref.failure(None, error) from error
    _leave()


def _leave() -> None:
    if _state["is_finalized"] or _state["pid"] != os.getpid():
        return
    if process.abort_if_failed():
        _state["is_finalized"] = True
        return  # at once: the launcher names the rank that ends first, and the others are ending now
    with contextlib.suppress(errors.Exception):
        handles.delete_attributes(COMM_SELF)
    _state["is_finalized"] = True
    with contextlib.suppress(Error, errors.Exception):  # receivers that have ended
        BUFFERED.flush()
    deadline_s = time.monotonic() + SENDS_S
    for one in list(Communicator.every):
        one.complete_sends(deadline_s - time.monotonic())
    for constant in (COMM_SELF, COMM_WORLD):
        context = constant._ref
        if context.is_open:
            context.comm.close()


def Is_initialized() -> bool:
    """Return whether this process has joined the world."""
    return bool(_state["is_initialized"])


def Is_finalized() -> bool:
    """Return whether this process has left the world."""
    return bool(_state["is_finalized"])


def Query_thread() -> int:
    """Return the support for threads; THREAD_MULTIPLE: any thread may call MPI at any time.

    As in MPI, two threads may not call collectives of one communicator at the same time. With less support,
    threads do not take turns, so a receive waits as it does in a process with one thread.
    """
    return _state["thread_level"]


def Is_thread_main() -> bool:
    """Return whether this is the thread that has joined the world."""
    return threading.current_thread() is _state["thread"]


def Get_version() -> tuple[int, int]:
    """Return the version of the MPI standard."""
    return INTEGERS["VERSION"], INTEGERS["SUBVERSION"]


def Get_library_version() -> str:
    """Return the name and the version of the library."""
    return f"shmring {shmring.__version__}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Return the name and the version of the library."""
    major, minor, patch = (int(part) for part in shmring.__version__.split(".")[:3])
    return "shmring", (major, minor, patch)


def Get_processor_name() -> str:
    """Return the name of the host."""
    return socket.gethostname()


def Get_hw_resource_info() -> Info:
    """Return what the ranks of a host share."""
    return Info.Create({"mpi_hw_resource_type": "mpi_shared_memory"})


def Wtime() -> float:
    """Return the time in seconds; it is the same clock for all ranks of a host."""
    return time.perf_counter()


def Wtick() -> float:
    """Return the resolution of `Wtime` in seconds."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """Do nothing: there is no profiler."""


def Get_address(location: Any) -> int:
    """Return the address of an object's memory."""
    return 0 if location is None else int(get_address(location))


def Aint_add(base: int, disp: int) -> int:
    """Return an address and a displacement, added."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """Return the difference of two addresses."""
    return addr1 - addr2


def Alloc_mem(size: int, info: Any = None) -> buffer:
    """Return new memory, set to zero. `Win.Create` can make a window of it."""
    return alloc_mem.allocate(integer_of(size))


def Free_mem(mem: buffer) -> None:
    """Free memory of `Alloc_mem`. It stays while arrays or windows use it."""
    mem.release()


def Compute_dims(nnodes: int, dims: Any) -> list[int]:
    """Return extents of a grid of `nnodes` ranks, as equal as they can be. Extents other than 0 are kept."""
    if hasattr(dims, "__index__") and not hasattr(dims, "__len__"):
        dims = [0] * operator.index(dims)
    found, count = [operator.index(extent) for extent in dims], integer_of(nnodes)
    kept, free = math.prod(extent for extent in found if extent), found.count(0)
    if count > _MOST_RANKS:
        raise OverflowError(f"nnodes is {nnodes}; it must be at most {_MOST_RANKS}")
    if count < 1 or min(found, default=0) < 0 or count % kept or (free == 0 and count != kept):
        raise errors.Exception(errors.ERR_DIMS, f"{nnodes} ranks do not form a grid of {found}")
    extents = iter(_factors(count // kept, free, _divisors(count // kept)) or ())
    return [extent or next(extents) for extent in found]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _factors(number: int, count: int, divisors: list[int]) -> list[int] | None:
    """Return `count` factors of a number, the largest first, each as small as can be.

    divisors: at least those of the number that may be factors, the smallest first.
    """
    if count == 0:
        return [] if number == 1 else None
    for place, largest in enumerate(divisors):
        if number % largest == 0 and largest**count >= number:
            others = _factors(number // largest, count - 1, divisors[: place + 1])
            if others is not None:
                return [largest, *others]
    return None
