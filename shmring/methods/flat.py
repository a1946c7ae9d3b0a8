"""Arrays of several shapes as views of one flat array: what is reduced or updated is then one array.

May know: the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_alike", "dtype_of", "views"]


def views(flat: NDArray[Any], like: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Parts of flat, one after the other, in the shapes of the arrays in like."""
    ends = np.cumsum([each.size for each in like]).tolist()
    return [flat[end - each.size : end].reshape(each.shape) for each, end in zip(like, ends, strict=True)]


def dtype_of(arrays: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """The one floating dtype of NumPy that all of them have; TypeError or ValueError where they have not."""
    if not arrays:
        raise ValueError("the list of arrays is empty; give at least one")
    dtypes = {each.dtype for each in arrays}
    if len(dtypes) > 1:
        raise TypeError(
            f"the arrays are of dtypes {sorted(map(str, dtypes))}; treat those of each by themselves"
        )
    (dtype,) = dtypes
    if dtype.kind != "f":
        raise TypeError(f"the arrays are of dtype {dtype}; give one of NumPy's floating dtypes")
    return dtype


def check_alike(arrays: Sequence[NDArray[Any]], like: Sequence[NDArray[Any]], what: str) -> None:
    """ValueError unless they are as many, of the same shapes and dtypes; NumPy would broadcast."""
    if [(each.shape, each.dtype) for each in arrays] != [(each.shape, each.dtype) for each in like]:
        given, wanted = (", ".join(f"{each.dtype}{each.shape}" for each in which) for which in (arrays, like))
        raise ValueError(f"{what} are {given}; they have to be {wanted}")
