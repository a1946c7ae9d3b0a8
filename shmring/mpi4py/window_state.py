"""State of a window: the memory of all ranks, its locks, and the epochs that are open."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from ..errors import Error
from . import alloc_mem, errors, private_memory
from .calls import HeldLocks
from .comm import Communicator, Intra
from .constants import INTEGERS
from .messages import handle, integer_of

_PROC_NULL = INTEGERS["PROC_NULL"]
_ALIGNMENT_NBYTES = 64  # of the parts, where they need not follow each other without a gap
_WHOLE_NBYTES = 64 << 10  # a `Put` or `Get` of at most this many bytes excludes accumulates
_WAYS_OUT = (
    "; use Win.Allocate or memory of MPI.Alloc_mem, or let processes of one user access each other's memory: "
    "sysctl kernel.yama.ptrace_scope=0, and in a container CAP_SYS_PTRACE (docker run --cap-add=SYS_PTRACE)"
)
FindParts = Callable[[Any, int], tuple[list[Any], Any]]  # see `allocate` and `attach`
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Epochs:
    """The epochs of this rank that are open."""

    def __init__(self) -> None:
        self.is_fenced = False  # a fence allows access to all ranks
        self.locked: dict[int, HeldLocks] = {}  # gates, by target
        self.locked_all: HeldLocks | None = None
        self.ready: set[int] = set()  # targets whose `Post` an interrupted `Start` has seen
        self.started: list[int] | None = None  # targets that this rank may access until `Complete`
        self.posted: list[int] | None = None  # ranks whose `Complete` this rank has not seen

    def allow(self, target: int) -> bool:
        """Return whether this rank may access a target now."""
        return self.is_fenced or self.is_passive(target) or target in (self.started or ())

    def is_passive(self, target: int | None = None) -> bool:
        """Return whether this rank has locked the target, or, for None, any."""
        if self.locked_all is not None:
            return True
        return bool(self.locked) if target is None else target in self.locked

    def describe(self) -> str:
        """Return what is open, apart from what a fence opened; empty if nothing is."""
        found = [f"the lock of rank {target}" for target in self.locked]
        found += ["the lock of all ranks"] * (self.locked_all is not None)
        found += ["an epoch of Start"] * (self.started is not None)
        found += ["an epoch of Post"] * (self.posted is not None)
        return ", ".join(found)


class Window(Communicator):
    """A window: the parts of all ranks, and a communicator of its own for their locks and messages.

    A part is an array that this rank has mapped, or the `PrivateMemory` of another one.
    `atomic[rank]` is held while an accumulate changes the part of `rank`.
    `gates[rank]` are locks of that part, one for each rank that accesses it. A shared lock takes the gate of
    its origin, an exclusive lock takes all. A rank that waits for the gate of a dead rank gets `RankFailed`,
    as it does for any lock of shmring.
    """

    handle_class: Any = None  # Win, which a module above this one sets

    def __init__(self, parent: Communicator, flavor: int, unit: int, find_parts: FindParts) -> None:
        comm = parent.comm.dup()
        super().__init__(parent.rank, parent.processes, b"", comm)
        ranks = range(self.size)
        try:
            self.parts, array = find_parts(comm, self.size * (1 + self.size))
            self.units = _gathered(comm, unit)
        except BaseException:
            comm.close()
            raise
        self.sizes = [part.nbytes for part in self.parts]
        self.atomic = [array.lock(rank) for rank in ranks]
        self.gates = [[array.lock(self.size * (1 + rank) + origin) for origin in ranks] for rank in ranks]
        self.epochs = Epochs()
        self.flavor = flavor
        self.is_freed = False

    def own_handle(self) -> Any:
        """Return the handle that an error handler gets."""
        return handle(self.handle_class, self)

    def channel(self) -> Any:
        """Return a handle of the window's own communicator."""
        return handle(Intra.cls, self)

    def target(self, rank: int) -> int | None:
        """Return the rank, checked; None for PROC_NULL."""
        rank = integer_of(rank)
        if 0 <= rank < self.size:
            return rank
        if rank == _PROC_NULL:
            return None
        raise self.failure(errors.ERR_RANK, f"the target is {rank}; the ranks are 0 to {self.size - 1}")

    def copying(self, rank: int, nbytes: int) -> Any:
        """Return the lock that is held while bytes are copied to or from the part of a rank."""
        return self.atomic[rank] if nbytes <= _WHOLE_NBYTES else contextlib.nullcontext()

    def order(self, rank: int) -> None:
        """Order the accesses of this rank before and after this call, by the atomic operations of a lock."""
        with self.atomic[rank]:
            pass

    def is_mapped(self, rank: int) -> bool:
        """Return whether this rank can access the part of a rank by loads and stores."""
        return isinstance(self.parts[rank], np.ndarray)

    def free(self) -> None:
        """Wait until no rank accesses the parts any more, and drop them."""
        try:
            self.comm.barrier()
        finally:
            self.is_freed = True
            self.parts, self.atomic, self.gates = [], [], []
            self.comm.close()


def _gathered(comm: Any, number: int) -> list[int]:
    numbers: list[int] = comm.all_gather(np.array([number], np.int64)).reshape(-1).tolist()
    return numbers


def allocate(comm: Any, nlocks: int, *, nbytes: int, is_contiguous: bool) -> tuple[list[Any], Any]:
    """Return new parts of all ranks, `nbytes` bytes of this one, and an array with locks."""
    sizes = _gathered(comm, nbytes)
    step = 1 if is_contiguous else _ALIGNMENT_NBYTES
    begins = [0]
    for size in sizes:
        begins.append(-(-(begins[-1] + size) // step) * step)
    array = comm.shared(begins[-1], np.uint8, locks=nlocks)
    whole = array.view(np.ndarray)
    return [whole[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)], array


def attach(comm: Any, nlocks: int, *, memory: Any) -> tuple[list[Any], Any]:
    """Return as parts memory of the program, and an array with locks.

    Memory from `Alloc_mem` is mapped. OSError is raised on all ranks.
    """
    mark = private_memory.new_mark()
    mine = alloc_mem.place_of(memory) or private_memory.place_of(memory, mark)
    parts: list[Any] = []
    reason = ""
    try:
        for rank, place in enumerate(comm.all_gather_object(mine)):
            if rank == comm.rank:
                parts.append(memory)
            elif isinstance(place, alloc_mem.FilePart):
                parts.append(alloc_mem.attach(place))
            else:
                parts.append(private_memory.attach(place, rank))
    except OSError as error:
        reason = f"rank {comm.rank} cannot access the memory of rank {len(parts)}: {error}"
        if isinstance(error, PermissionError):
            reason += _WAYS_OUT
    reasons = [reason for reason in comm.all_gather_object(reason) if reason]
    if reasons:
        raise OSError(reasons[0])
    return parts, comm.shared(0, np.uint8, locks=nlocks)


def reports(method: _Method) -> _Method:
    """Make a method of a window raise the exceptions of MPI for those of shmring."""

    @functools.wraps(method)
    def reporting(self: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return method(self, *args, **keywords)
        except Error as error:
            raise self._ref.failure(None, error) from error

    return cast(_Method, reporting)
