"""Views of several shapes in one flat array, which is reduced or updated as a whole; argument checks.

This module uses only a communicator's public API.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

import shmring
from shmring.errors import agreed

if TYPE_CHECKING:
    from shmring import Comm

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    *("FOLDS", "agree", "check_alike", "check_arrays", "check_folded", "check_in_place", "check_op"),
    *("dtype_of", "one_call", "one_call_to_make", "parts", "views"),
]

FOLDS: Mapping[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def one_call(function: F) -> F:
    """Decorate a function that is one call to its caller: run it by its first argument's `run_steps`."""

    @functools.wraps(function)
    def run(first: Any, *arguments: Any, **keywords: Any) -> Any:
        return getattr(first, "_comm", first).run_steps(function, first, *arguments, **keywords)

    return cast(F, run)


def one_call_to_make(function: F) -> F:
    """Decorate an __init__(self, comm, ...) that is one call to its caller: run it by comm.run_steps."""

    @functools.wraps(function)
    def run(self: Any, comm: Any, *arguments: Any, **keywords: Any) -> None:
        comm.run_steps(function, self, comm, *arguments, **keywords)

    return cast(F, run)


def views(flat: NDArray[Any], like: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return consecutive parts of flat in the shapes of the arrays in `like`."""
    return parts(flat, [each.shape for each in like])


def parts(flat: NDArray[Any], shapes: Iterable[tuple[int, ...]]) -> list[NDArray[Any]]:
    """Return consecutive parts of flat in these shapes."""
    found, begin = [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        found.append(flat[begin:end].reshape(shape))
        begin = end
    return found


def dtype_of(arrays: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return the floating NumPy dtype that all arrays share, or raise TypeError or ValueError."""
    if not arrays:
        raise ValueError("the list of arrays is empty; give at least one")
    check_arrays(arrays)
    dtypes = {each.dtype for each in arrays}
    if len(dtypes) > 1:
        raise TypeError(f"the arrays are of dtypes {sorted(map(str, dtypes))}; handle each dtype separately")
    (dtype,) = dtypes
    if dtype.kind != "f":
        raise TypeError(f"the arrays are of dtype {dtype}; give one of NumPy's floating dtypes")
    return dtype


def check_arrays(arrays: Sequence[NDArray[Any]]) -> None:
    """Raise TypeError unless all are NumPy arrays."""
    for each in arrays:
        if not isinstance(each, np.ndarray):
            raise TypeError(f"a {type(each).__name__} instead of a NumPy array; use np.asarray")


def check_in_place(x: NDArray[Any]) -> None:
    """Raise TypeError or ValueError unless x can be reduced in place as one vector."""
    check_arrays([x])
    if not x.flags.c_contiguous or not x.flags.writeable:
        raise ValueError("x is not contiguous, or read-only; pass np.ascontiguousarray(x) and use that")


def check_op(op: str) -> None:
    """Raise ValueError unless op combines gradients."""
    if op not in ("avg", "sum"):
        raise ValueError(f"op is {op!r}; gradients are combined by 'avg' or 'sum'")


def check_folded(x: Any, op: shmring.Op | str, dtypes: Sequence[str]) -> shmring.Op:
    """Return the op, one of FOLDS. Raises TypeError or ValueError if NumPy cannot fold x by it in place."""
    if not isinstance(x, np.ndarray) or x.dtype.name not in dtypes:
        what = x.dtype.name if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"x is {what}; pass a NumPy array of {', '.join(dtypes)}")
    if not (x.flags.c_contiguous and x.flags.writeable):
        raise ValueError("x is not contiguous and writable; pass a = np.array(x) and copy it back")
    name = shmring.Op(op)
    if name not in FOLDS or (name == "avg" and x.dtype.kind == "i"):
        raise ValueError(f"there is no {name.value!r} of {x.dtype.name}; there are {', '.join(FOLDS)}")
    if name in ("min", "max") and x.dtype.kind == "c":
        raise ValueError(f"{name.value!r} of complex numbers has no meaning")
    return name


def agree(comm: Comm, **given: float) -> None:
    """Raise the same ValueError on all ranks if they give different numbers. Collective."""
    try:
        own = np.array([float(value) for value in given.values()])
    except (TypeError, ValueError):
        comm.refuse("all_gather")
        raise
    for name, by_rank in zip(given, comm.all_gather(own).T.tolist(), strict=True):
        if len(set(by_rank)) > 1:
            shown = ", ".join(repr(value).removesuffix(".0") for value in by_rank)
            raise agreed(ValueError(f"{name} is {shown} by rank; it must be the same on all"))


def check_alike(arrays: Sequence[NDArray[Any]], like: Sequence[NDArray[Any]], what: str) -> None:
    """Raise ValueError unless number, shapes and dtypes are equal; otherwise NumPy would broadcast."""
    check_arrays(arrays)
    if [(each.shape, each.dtype) for each in arrays] != [(each.shape, each.dtype) for each in like]:
        given, wanted = (", ".join(f"{each.dtype}{each.shape}" for each in which) for which in (arrays, like))
        raise ValueError(f"{what} are {given}; they must be {wanted}")
