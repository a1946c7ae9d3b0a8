"""Conversion between NumPy's dtypes and datatypes that a program makes; there are none of these here."""

from __future__ import annotations

from typing import Any, NoReturn

_WAY_OUT = (
    "shmring's MPI has no datatypes that programs make: use the predefined ones, as in Datatype.fromcode and "
    "Datatype.tocode, and copy parts of arrays to contiguous memory"
)


def from_numpy_dtype(dtype: Any) -> NoReturn:
    """Refuse."""
    raise NotImplementedError(_WAY_OUT)


def to_numpy_dtype(datatype: Any) -> NoReturn:
    """Refuse."""
    raise NotImplementedError(_WAY_OUT)
