"""Windows: memory of each rank that the others access."""

from __future__ import annotations

from typing import Any

from . import errors, handles
from .errhandlers import Handling
from .messages import Handle


class Win(handles.Named, handles.Attributed, Handling, Handle):
    """Memory of each rank that the others access. shmring's MPI has only null ones yet."""


def _refuse(name: str) -> Any:
    def refusal(*_: Any, **__: Any) -> Any:
        raise errors.refuse(
            f"windows (Win.{name})", "use shmring.Comm.shared, an array that all ranks access"
        )

    refusal.__name__, refusal.__doc__ = name, "Refused: shmring's MPI has no windows."
    return refusal


_NAMES = (
    "Create Allocate Allocate_shared Shared_query Create_dynamic Attach Detach Free Set_info "
    "Get_info Get_group tomemory Put Get Accumulate Get_accumulate Fetch_and_op Compare_and_swap "
    "Rput Rget Raccumulate Rget_accumulate Fence Start Complete Post Wait Test Lock Unlock Lock_all "
    "Unlock_all Flush Flush_all Flush_local Flush_local_all Sync Get_name Set_name"
)
for _name in _NAMES.split():
    setattr(Win, _name, _refuse(_name))
WIN_NULL = Win()
handles.predefine({"WIN_NULL": WIN_NULL})
