"""Arrays of several shapes as views of one flat array: what is reduced or updated is then one array; and what
methods ask of their arguments.

A user of the public API: what it is handed is a communicator.
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
    """Decorate what is one call to its caller: `run_steps` of its first argument, or of that one's _comm."""

    @functools.wraps(function)
    def run(first: Any, *arguments: Any, **keywords: Any) -> Any:
        return getattr(first, "_comm", first).run_steps(function, first, *arguments, **keywords)

    return cast(F, run)


def one_call_to_make(function: F) -> F:
    """Decorate an __init__(self, comm, ...) that is one call to its caller: `run_steps` of comm."""

    @functools.wraps(function)
    def run(self: Any, comm: Any, *arguments: Any, **keywords: Any) -> None:
        comm.run_steps(function, self, comm, *arguments, **keywords)

    return cast(F, run)


def views(flat: NDArray[Any], like: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Parts of flat, one after the other, in the shapes of the arrays in like."""
    return parts(flat, [each.shape for each in like])


def parts(flat: NDArray[Any], shapes: Iterable[tuple[int, ...]]) -> list[NDArray[Any]]:
    """Parts of flat, one after the other, in these shapes."""
    found, begin = [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        found.append(flat[begin:end].reshape(shape))
        begin = end
    return found


def dtype_of(arrays: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """The one floating dtype of NumPy that all of them have; TypeError or ValueError where they have not."""
    if not arrays:
        raise ValueError("the list of arrays is empty; give at least one")
    check_arrays(arrays)
    dtypes = {each.dtype for each in arrays}
    if len(dtypes) > 1:
        raise TypeError(
            f"the arrays are of dtypes {sorted(map(str, dtypes))}; treat those of each by themselves"
        )
    (dtype,) = dtypes
    if dtype.kind != "f":
        raise TypeError(f"the arrays are of dtype {dtype}; give one of NumPy's floating dtypes")
    return dtype


def check_arrays(arrays: Sequence[NDArray[Any]]) -> None:
    """TypeError for what is no array of NumPy."""
    for each in arrays:
        if not isinstance(each, np.ndarray):
            raise TypeError(f"a {type(each).__name__} where an array of NumPy is wanted; use np.asarray")


def check_in_place(x: NDArray[Any]) -> None:
    """TypeError or ValueError for what cannot be reduced in place as one vector."""
    check_arrays([x])
    if not x.flags.c_contiguous or not x.flags.writeable:
        raise ValueError("x is not contiguous, or read-only; pass np.ascontiguousarray(x) and use that")


def check_op(op: str) -> None:
    """ValueError for what gradients are not combined by."""
    if op not in ("avg", "sum"):
        raise ValueError(f"op is {op!r}; gradients are combined by 'avg' or 'sum'")


def check_folded(x: Any, op: shmring.Op | str, dtypes: Sequence[str]) -> shmring.Op:
    """The op, one of FOLDS; TypeError or ValueError where NumPy cannot fold x by it, in place."""
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
    """Collective: ValueError on all ranks alike where they give different numbers."""
    try:
        own = np.array([float(value) for value in given.values()])
    except (TypeError, ValueError):
        comm.refuse("all_gather")
        raise
    for name, by_rank in zip(given, comm.all_gather(own).T.tolist(), strict=True):
        if len(set(by_rank)) > 1:
            told = ", ".join(repr(value).removesuffix(".0") for value in by_rank)
            raise agreed(ValueError(f"{name} is {told} by rank; it must be the same on all"))


def check_alike(arrays: Sequence[NDArray[Any]], like: Sequence[NDArray[Any]], what: str) -> None:
    """ValueError unless they are as many, of the same shapes and dtypes; NumPy would broadcast."""
    check_arrays(arrays)
    if [(each.shape, each.dtype) for each in arrays] != [(each.shape, each.dtype) for each in like]:
        given, wanted = (", ".join(f"{each.dtype}{each.shape}" for each in which) for which in (arrays, like))
        raise ValueError(f"{what} are {given}; they have to be {wanted}")
