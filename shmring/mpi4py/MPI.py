"""MPI for Python on shmring: `from shmring import MPI`."""

from __future__ import annotations

from threading import Lock as _Lock
from typing import Any

from .calls import register_classes as _register_classes
from .comm import COMM_NULL, Comm, Intercomm
from .constants import INTEGERS
from .environment import (
    COMM_SELF,
    COMM_WORLD,
    Aint_add,
    Aint_diff,
    Alloc_mem,
    Compute_dims,
    Finalize,
    Free_mem,
    Get_address,
    Get_hw_resource_info,
    Get_library_version,
    Get_processor_name,
    Get_version,
    Init,
    Init_thread,
    Is_finalized,
    Is_initialized,
    Is_thread_main,
    Pcontrol,
    Query_thread,
    Wtick,
    Wtime,
    get_vendor,
)
from .environment import init_at_import as _init_at_import
from .errhandlers import ERRHANDLERS, Errhandler
from .errors import (
    Add_error_class,
    Add_error_code,
    Add_error_string,
    Exception,
    Get_error_class,
    Get_error_string,
    Remove_error_class,
    Remove_error_code,
    Remove_error_string,
)
from .groups import GROUP_EMPTY, GROUP_NULL, Group
from .handles import MODULE as _MODULE
from .handles import addressof as _addressof
from .handles import handleof as _handleof
from .handles import sizeof as _sizeof
from .info import INFO_ENV, INFO_NULL, Info
from .intracomm import Cartcomm, Distgraphcomm, Graphcomm, Intracomm, Topocomm
from .messages import (
    BOTTOM,
    BUFFER_AUTOMATIC,
    IN_PLACE,
    BottomType,
    BufferAutomaticType,
    InPlaceType,
    Status,
    buffer,
)
from .messages import register_types as _register_types
from .objects import Pickle, pickle
from .ops import OPS, Op
from .point_to_point import (
    MESSAGE_NO_PROC,
    MESSAGE_NULL,
    Attach_buffer,
    Detach_buffer,
    Flush_buffer,
    Iflush_buffer,
    Message,
)
from .rc import rc
from .rc import read_environment as _read_environment
from .refused import FILE_NULL, SESSION_NULL, File, Session
from .refused import FUNCTIONS as _REFUSED
from .requests import REQUEST_NULL, Grequest, Prequest, Request
from .types import BY_CODE as _typedict
from .types import BY_NUMBER as _BY_NUMBER
from .types import BYTE, DATATYPES, Datatype
from .types import TYPEDICT_C as _typedict_c
from .types import TYPEDICT_F as _typedict_f
from .windows import WIN_NULL, Win

memory = buffer
globals().update(INTEGERS)
globals().update(DATATYPES)
globals().update(OPS)
globals().update(ERRHANDLERS)
globals().update(_REFUSED)


def _comm_lock_table(comm: Comm) -> dict[Any, _Lock]:
    """Return the locks of a communicator by key."""
    return comm._comm().locks


def _comm_lock(comm: Comm, key: Any = None) -> _Lock:
    """Return the lock of a communicator for a key."""
    return comm._comm().lock_of(key)


def _typecode(datatype: Datatype) -> str | None:
    """Return the character of a datatype."""
    return datatype.typechar or None


def _typealign(datatype: Datatype) -> int | None:
    """Return the alignment of a predefined datatype or a duplicate of one, and None for any other."""
    return None if not datatype or datatype._ref.layout is not None else datatype._ref.dtype.alignment


_register_types(_typedict, _BY_NUMBER, BYTE)
_register_classes(OPS["SUM"], Request, Prequest)
for _class in (
    Cartcomm, Comm, Datatype, Distgraphcomm, Errhandler, File, Graphcomm, Grequest, Group, Info, Intercomm,
    Intracomm, Message, Op, Prequest, Request, Session, Topocomm, Win,
):  # fmt: skip
    _class.__module__ = _MODULE
_read_environment()
if rc.initialize:
    _init_at_import()
