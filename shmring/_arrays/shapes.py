"""Shapes of results of collectives that split or join arrays on dimension 0; checks of small arguments."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from .._arguments import integer


def as_numpy(x: Any) -> np.ndarray[Any, Any]:
    """Return x as a NumPy array. bytes become an array of uint8, where NumPy would make one string."""
    found = np.asarray(memoryview(x) if isinstance(x, bytes) else x)
    if found.dtype == object and found.ndim == 0 and hasattr(x, "__dlpack__"):
        return np.from_dlpack(x)  # NumPy does not try it by itself
    return found


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array of this dtype, for which np.empty makes items of one character if text has none."""
    return np.empty(shape, dtype) if dtype.itemsize else np.ndarray(shape, dtype)


def empty_joined(x: Any, size: int) -> np.ndarray[Any, Any]:
    """Return an empty array for every rank's x: shape (size, *s) for x of shape s."""
    like = as_numpy(x)
    return empty((size, *like.shape), like.dtype)


def empty_alike(x: Any) -> np.ndarray[Any, Any]:
    """Return an empty array of the shape and dtype of x."""
    like = as_numpy(x)
    return empty(like.shape, like.dtype)


def empty_part(x: Any, size: int) -> np.ndarray[Any, Any]:
    """Return an empty array for one rank's part of x: s for shape (size, *s), k rows for size * k rows.

    A column of `size` numbers stays a column: (size, 1) is split into parts of shape (1, 1).
    """
    if x is None:
        raise TypeError(
            f"x is None, but this rank is the root, whose array is split: pass one with rows for {size} ranks"
        )
    like = as_numpy(x)
    rows = rows_of_a_part(like.shape, size)
    is_column = like.shape[1:] == (1,)
    shape = like.shape[1:] if rows == 1 and not is_column else (rows, *like.shape[1:])
    return empty(shape, like.dtype)


def rows_of_a_part(shape: tuple[int, ...], size: int) -> int:
    """Return the number of rows for each of `size` ranks. ValueError if the rows do not divide evenly."""
    if not shape:
        raise ValueError(f"x is 0-d; the first dimension of x is what {size} ranks share")
    if shape[0] % size:
        raise ValueError(
            f"x has {shape[0]} rows (its shape is {shape}), which {size} ranks cannot share evenly; "
            f"its first dimension must be a multiple of {size}"
        )
    return shape[0] // size


# ---- parts of different lengths --------------------------------------------------------------------------


def list_for(arrays: Any, size: int, what: str) -> list[Any]:
    """Return `arrays` as a list with one array for each rank. TypeError or ValueError if it is not that."""
    try:
        found = list(arrays)
    except TypeError:
        raise TypeError(f"{what} is a {type(arrays).__name__}; give a list of {size} arrays") from None
    if len(found) != size:
        raise ValueError(f"{what} has {len(found)} arrays for {size} ranks; give one for each, empty or not")
    return found


def check_group_size(group_size: SupportsIndex, num_hosts: int) -> int:
    """Return the number of hosts in a group, checked."""
    size = integer("group_size", group_size)
    if not 1 <= size <= num_hosts or num_hosts % size:
        raise ValueError(f"group_size is {size}; it must divide the number of hosts, {num_hosts}")
    return size
