"""Windows: memory of each rank that the others access."""

from __future__ import annotations

import functools
import operator
from typing import Any

from . import errors, handles
from .calls import Context
from .comm import Comm
from .constants import INTEGERS
from .environment import COMM_SELF
from .epochs import Synchronisation
from .errhandlers import Handling
from .groups import Group, Members
from .info import INFO_NULL, Hinted, Info
from .messages import MemoryHandle, buffer, get_address, handle, simple
from .refused import refuse_methods
from .rma import Operations
from .window_state import FindParts, Window, allocate, attach

_CREATED, _ALLOCATED, _SHARED = (INTEGERS["WIN_FLAVOR_" + name] for name in ("CREATE", "ALLOCATE", "SHARED"))
_UNIFIED = INTEGERS["WIN_UNIFIED"]


class Win(handles.Named, handles.Attributed, Handling, Hinted, Synchronisation, Operations, MemoryHandle):
    """Memory of each rank that the others access."""

    _null_error = errors.ERR_WIN

    def _window(self) -> Window:
        if self._ref is None or self._ref.is_freed:
            raise errors.Exception(errors.ERR_WIN)
        found: Window = self._ref
        return found

    _handled = _window

    @classmethod
    def Allocate(cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Comm = COMM_SELF) -> Any:
        """Return a window over new memory: `size` bytes of this rank. Collective over the communicator.

        Displacements count `disp_unit` bytes.
        """
        return cls._made(_ALLOCATED, size, disp_unit, info, comm)

    @classmethod
    def Allocate_shared(
        cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Comm = COMM_SELF
    ) -> Any:
        """As `Allocate`. The memory of the ranks is contiguous, in their order.

        With the hint alloc_shared_noncontig=true, each rank's memory begins at a cache line.
        """
        return cls._made(_SHARED, size, disp_unit, info, comm)

    @classmethod
    def Create(cls, memory: Any, disp_unit: int = 1, info: Info = INFO_NULL, comm: Comm = COMM_SELF) -> Any:
        """As `Allocate`, over memory of the program, or over none, for None and BOTTOM.

        The window keeps the memory. Memory that does not come from `Alloc_mem` stays private: other ranks
        access it by calls of the kernel. If it refuses them, all ranks get the error ERR_BASE.
        """
        return cls._made(_CREATED, memory, disp_unit, info, comm)

    @classmethod
    def _made(cls, flavor: int, what: Any, disp_unit: int, info: Info, comm: Comm) -> Any:
        context = comm._comm()
        if context.comm.num_nodes > 1:
            raise errors.refuse(
                "windows over several hosts", "use comm.Split_type(MPI.COMM_TYPE_SHARED), one host's ranks"
            )
        try:
            unit = operator.index(disp_unit)
            if unit <= 0:
                raise context.failure(errors.ERR_DISP, f"disp_unit is {unit}; it must be positive")
            find_parts = _parts_finder(context, flavor, what, info)
        except Exception:
            context.comm.refuse("barrier")
            raise
        new = handle(cls, None)  # first: if there is no memory for it, no rank makes the window
        try:
            with errors.Translating(context):
                new._ref = window = Window(context, flavor, unit, find_parts)
        except OSError as error:
            raise context.failure(errors.NUMBERS["ERR_BASE"], error) from error
        window.hints.update(info.items())
        return new

    def Shared_query(self, rank: int) -> tuple[buffer, int]:
        """Return the memory and the displacement unit of a rank; PROC_NULL: the first with memory.

        Private memory of another rank cannot be returned: it counts as none, and the unit as 0.
        """
        window = self._window()
        target = window.target(rank)
        if target is None:
            with_memory = (rank for rank, size in enumerate(window.sizes) if size and window.is_mapped(rank))
            target = next(with_memory, 0)
        if not window.is_mapped(target):
            return buffer.allocate(0), 0
        return buffer(window.parts[target]), window.units[target]

    def tomemory(self) -> buffer:
        """Return the memory of this rank."""
        return self.Shared_query(self._window().rank)[0]

    def Free(self) -> None:
        """Free the window; collective. The memory is freed once no object refers to it."""
        window = self._window()
        is_open = window.epochs.describe()
        if is_open:
            window.comm.refuse("barrier")
            raise window.failure(errors.ERR_RMA_SYNC, f"this rank has open {is_open}")
        handles.delete_attributes(self)
        with errors.Translating(window):
            window.free()
        self._ref = None

    def Get_group(self) -> Group:
        """Return the group of the processes."""
        window = self._window()
        made: Group = handle(Group, Members(window.processes, window.process))
        return made

    group = property(Get_group)
    group_size = property(lambda self: self._window().size)
    group_rank = property(lambda self: self._window().rank)

    def _predefined_attributes(self) -> dict[int, Any]:
        base, size, unit = self.attrs
        return {
            INTEGERS["WIN_BASE"]: base,
            INTEGERS["WIN_SIZE"]: size,
            INTEGERS["WIN_DISP_UNIT"]: unit,
            INTEGERS["WIN_CREATE_FLAVOR"]: self.flavor,
            INTEGERS["WIN_MODEL"]: self.model,
        }

    @property
    def attrs(self) -> tuple[int, int, int]:
        """The address of this rank's memory, its size in bytes, and the unit of displacements."""
        window = self._window()
        return get_address(window.parts[window.rank]), window.sizes[window.rank], window.units[window.rank]

    @property
    def flavor(self) -> int:
        """The kind of memory: WIN_FLAVOR_CREATE, WIN_FLAVOR_ALLOCATE or WIN_FLAVOR_SHARED."""
        return self._window().flavor

    @property
    def model(self) -> int:
        """The memory model: WIN_UNIFIED, as all ranks access the same memory."""
        self._window()
        return _UNIFIED


def _parts_finder(context: Context, flavor: int, what: Any, info: Info) -> FindParts:
    """Return the function that finds the memory of all ranks, from the checked arguments of this one."""
    if flavor == _CREATED:
        return functools.partial(attach, memory=simple((what, "B"), True).bytes)
    nbytes = operator.index(what)
    if nbytes < 0:
        raise context.failure(errors.ERR_SIZE, f"the size is {nbytes}; it must not be negative")
    is_contiguous = flavor == _SHARED and info.get("alloc_shared_noncontig") != "true"
    return functools.partial(allocate, nbytes=nbytes, is_contiguous=is_contiguous)


refuse_methods(Win, "Create_dynamic Attach Detach", "windows to which memory is attached", "use Win.Create")
Window.handle_class = Win
WIN_NULL = Win()
handles.predefine({"WIN_NULL": WIN_NULL})
