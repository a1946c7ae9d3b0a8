"""Convert the arguments of one-sided operations, as NumPy interprets them, to elements and values."""

from __future__ import annotations

import operator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._core import kernels
from .._diagnostics.flight_recorder import DTYPES
from . import buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .locks import Stripes

_REPLACE = -1  # passed instead of an op's number
_SUM = kernels.OPS.index("sum")
_OPS = tuple(op for op in kernels.OPS if op != "avg")  # "avg" is undefined for one element and one value


class _Elements(NamedTuple):
    """`size` elements of a flat array: contiguous from `first`, or those at the indices `places`."""

    first: int
    size: int
    places: NDArray[np.intp] | None
    shape: tuple[int, ...]  # shape of the selection


def put(
    stripes: Stripes, array: NDArray[Any], where: Any, values: Any, mode: str, timeout: float | None
) -> None:
    """Write values as `np.put` does: cast them without a check, and repeat them as necessary."""
    if isinstance(where, tuple):
        where = list(where)
    elif isinstance(where, np.ma.MaskedArray):
        where = where.data
    elements = _elements_of(array, where if mode == "raise" else _brought_inside(where, mode, array.size))
    given = np.asarray(values, array.dtype).reshape(-1)
    if given.size == 0 or elements.size == 0:
        return
    if given.size != elements.size:
        given = np.resize(given, elements.size)
    _access(stripes, array, elements, np.ascontiguousarray(given), None, _REPLACE, timeout)


def get(
    stripes: Stripes, array: NDArray[Any], where: Any, out: NDArray[Any] | None, timeout: float | None
) -> Any:
    elements = _elements_of(array, where)
    if out is None:
        taken = np.empty(elements.shape, array.dtype)
        _access(stripes, array, elements, None, taken, _REPLACE, timeout)
        return taken[()]
    if isinstance(out, np.ma.MaskedArray):
        raise buffers.masked("out")
    if not (isinstance(out, np.ndarray) and out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out must be a writeable NumPy array, contiguous in C order")
    if out.dtype != array.dtype or out.size != elements.size:
        raise ValueError(
            f"out has {out.size} elements of {out.dtype}; it must have {elements.size} of {array.dtype}"
        )
    _access(stripes, array, elements, None, out, _REPLACE, timeout)
    return out


def accumulate(
    stripes: Stripes, array: NDArray[Any], where: Any, values: Any, op: str, timeout: float | None
) -> None:
    number = _op_number(array.dtype, op)
    elements = _elements_of(array, where)
    _access(stripes, array, elements, _values_for(elements, values, array.dtype), None, number, timeout)


def fetch_and_add(
    stripes: Stripes, array: NDArray[Any], where: Any, value: Any, timeout: float | None
) -> Any:
    elements = _elements_of(array, where)
    before = np.empty(elements.shape, array.dtype)
    values = _values_for(elements, value, array.dtype)
    _access(stripes, array, elements, values, before, _SUM, timeout)
    return before[()]


def _access(
    stripes: Stripes,
    array: NDArray[Any],
    elements: _Elements,
    values: NDArray[Any] | None,
    out: NDArray[Any] | None,
    op: int,
    timeout: float | None,
) -> None:
    first, size, places, _ = elements
    stripes.access(array, first, size, places, values, out, _dtype_number(array.dtype), op, timeout)


def _elements_of(array: NDArray[Any], where: Any) -> _Elements:
    """Return the elements that `where` selects in the flattened array. Errors are those of NumPy."""
    size = array.size
    if isinstance(where, tuple) and array.ndim > 1:
        raise TypeError(
            f"where is the tuple {where!r:.60}, and elements are numbered in C order: give a list, "
            "or np.ravel_multi_index(where, array.shape) for the element at one index"
        )
    if isinstance(where, np.ma.MaskedArray):
        raise buffers.masked("where")
    if where is ...:
        return _Elements(0, size, None, array.shape)
    if isinstance(where, slice):
        begin, end, step = where.indices(size)
        if step == 1:
            return _Elements(begin, max(0, end - begin), None, (max(0, end - begin),))
        where = np.arange(begin, end, step)
    index = np.asarray(where)
    if index.dtype == bool:
        raise IndexError("where is boolean; give np.flatnonzero(where), the indices where it is true")
    if index.ndim == 0:
        return _Elements(_within(operator.index(where), size), 1, None, ())
    return _all_within(_as_intp(index), size)


def _as_intp(index: NDArray[Any]) -> NDArray[np.intp]:
    """Return a copy of integers as intp. TypeError for others: a cast would cut fractions off."""
    return index.astype(np.intp, casting="safe" if index.size else "unsafe")


def _within(place: int, size: int) -> int:
    if not -size <= place < size:
        raise IndexError(f"index {place} is out of bounds for axis 0 with size {size}")
    return place if place >= 0 else place + size


def _all_within(index: NDArray[np.intp], size: int) -> _Elements:
    """Check and normalise `index`, which must be a copy: the caller's array could change after the check."""
    if index.size:
        _within(int(index.min()), size)
        _within(int(index.max()), size)
        index[index < 0] += size
    return _Elements(0, index.size, np.ascontiguousarray(index), index.shape)


def _brought_inside(where: Any, mode: str, size: int) -> Any:
    """Apply np.put's other modes: "wrap" is the index modulo the size, "clip" the nearest valid index."""
    if mode not in ("wrap", "clip"):
        raise ValueError(f"mode is {mode!r}; allowed: 'raise', 'wrap', 'clip'")
    if where is ... or isinstance(where, slice):
        return where
    index = _as_intp(np.asarray(where))
    return index % max(1, size) if mode == "wrap" else np.clip(index, 0, max(0, size - 1))


def _values_for(elements: _Elements, values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return one value for each element, in C order. A single value is repeated."""
    if isinstance(values, (int, float, complex)):
        kind: Any = type(values)
    elif isinstance(values, np.ma.MaskedArray):
        raise buffers.masked("values")
    else:
        kind = np.asarray(values).dtype
    if kind != dtype:
        _check_cast(kind, dtype)
    given = np.asarray(values, dtype)
    if given.size == elements.size:
        return np.ascontiguousarray(given)
    if given.size == 1:
        return np.full(elements.size, given.reshape(()), dtype)
    raise ValueError(f"{given.size} values for {elements.size} elements; give one for each, or a single one")


@cache
def _check_cast(kind: Any, dtype: np.dtype[Any]) -> None:
    """Raise TypeError if values of `kind` cannot be cast to `dtype`.

    kind: a dtype, or a type of Python numbers, which take the array's dtype if its kind allows.
    """
    found = kind
    if isinstance(kind, type):  # a subclass, such as an IntEnum, may have no 0
        found = np.result_type(dtype, next(k(0) for k in (bool, int, float, complex) if issubclass(kind, k)))
    if not np.can_cast(found, dtype, "same_kind"):
        raise TypeError(f"values of {found} cannot be cast to the array's dtype {dtype}; convert them first")


@cache
def _dtype_number(dtype: np.dtype[Any]) -> int:
    if dtype.name not in DTYPES or not dtype.isnative:
        raise TypeError(
            f"one-sided operations do not take {dtype}; allowed: {', '.join(DTYPES)}, in native byte order"
        )
    return DTYPES.index(dtype.name)


@cache
def _op_number(dtype: np.dtype[Any], op: str) -> int:
    if op not in _OPS:
        raise ValueError(f"op is {op!r}; allowed: {', '.join(_OPS)}")
    _dtype_number(dtype)
    if op not in kernels.ops(dtype.name):
        raise TypeError(f"op {op} has no meaning for {dtype}")
    return kernels.OPS.index(op)
