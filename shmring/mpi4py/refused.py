"""Classes, methods and functions that exist by name only: each call is refused, and says what to use."""

from __future__ import annotations

from typing import Any

from . import errors, handles
from .messages import Handle


def _refused(name: str, what: str, instead: str) -> Any:
    def refusal(*_: Any, **__: Any) -> Any:
        raise errors.refuse(f"{what} ({name})", instead)

    refusal.__name__, refusal.__doc__ = name.rpartition(".")[2], f"Refused: shmring's MPI has no {what}."
    return refusal


def refuse_methods(cls: type, names: str, what: str, instead: str) -> None:
    """Give a class methods, named in a text, each of which only raises the error for a missing feature."""
    for name in names.split():
        setattr(cls, name, _refused(f"{cls.__name__}.{name}", what, instead))


class File(handles.Named, Handle):
    """A file that ranks write and read together. shmring's MPI has only null ones."""


class Session(handles.Named, Handle):
    """A session. shmring's MPI has only null ones."""


refuse_methods(
    File,
    "Open Close Delete Set_size Preallocate Get_size Get_amode Get_group Set_info Get_info Set_view "
    "Get_view Read_at Read_at_all Write_at Write_at_all Iread_at Iread_at_all Iwrite_at Iwrite_at_all "
    "Read Read_all Write Write_all Iread Iread_all Iwrite Iwrite_all Seek Get_position Get_byte_offset "
    "Read_shared Write_shared Iread_shared Iwrite_shared Read_ordered Write_ordered Seek_shared "
    "Get_position_shared Read_at_all_begin Read_at_all_end Write_at_all_begin Write_at_all_end "
    "Read_all_begin Read_all_end Write_all_begin Write_all_end Read_ordered_begin Read_ordered_end "
    "Write_ordered_begin Write_ordered_end Get_type_extent Set_atomicity Get_atomicity Sync "
    "Create_errhandler Get_errhandler Set_errhandler Call_errhandler",
    "files",
    "open a file of each rank, or numpy.memmap one file",
)
refuse_methods(
    Session,
    "Init Finalize Get_num_psets Get_nth_pset Get_info Get_pset_info Create_group Attach_buffer "
    "Detach_buffer Flush_buffer Iflush_buffer Create_errhandler Get_errhandler Set_errhandler "
    "Call_errhandler",
    "sessions",
    "use MPI.COMM_WORLD",
)
FUNCTIONS = {
    name: _refused(name, "ports", "start all processes as ranks of one job")
    for name in ("Open_port", "Close_port", "Publish_name", "Unpublish_name", "Lookup_name")
}
FUNCTIONS["Register_datarep"] = _refused(
    "Register_datarep", "data representations", "convert arrays with NumPy"
)
for _name in ("Get_abi_version", "Get_abi_info", "Get_abi_fortran_info"):
    FUNCTIONS[_name] = _refused(_name, "binary interface of C", "use the Python classes")
FILE_NULL, SESSION_NULL = File(), Session()
handles.predefine({"FILE_NULL": FILE_NULL, "SESSION_NULL": SESSION_NULL})
