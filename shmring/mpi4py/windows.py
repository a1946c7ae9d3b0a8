"""Windows: memory of each rank that the others access."""

from __future__ import annotations

from . import handles
from .errhandlers import Handling
from .messages import Handle


class Win(handles.Named, handles.Attributed, Handling, Handle):
    """Memory of each rank that the others access."""


WIN_NULL = Win()
handles.predefine({"WIN_NULL": WIN_NULL})
