"""Operations of reductions: the predefined ones, and those that the program makes of functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from . import errors, handles
from .folds import FoldCall
from .messages import Handle, TypeInfo, buffer, handle, simple
from .types import Datatype, operations_of

_MOST_FUNCTIONS = 32
_functions: set[Any] = set()


class OpInfo:
    """An operation: its name in shmring, if it has one, its function on Python objects, and on arrays."""

    def __init__(
        self,
        name: str | None,
        on_objects: Callable[..., Any],
        on_arrays: Callable[..., Any] | None = None,
        commute: bool = True,
        is_predefined: bool = True,
    ) -> None:
        self.name, self.on_objects, self.on_arrays = name, on_objects, on_arrays
        self.commute, self.is_predefined = commute, is_predefined

    def fold(self, lower: Any, higher: Any, datatype: Datatype) -> None:
        """Combine two arrays of items; the result is written to the second."""
        if self.is_predefined:
            assert self.on_arrays is not None
            with np.errstate(all="ignore"):
                higher[...] = self.on_arrays(lower, higher)
        else:
            self.on_objects(_memory_of(lower), _memory_of(higher), datatype)

    def check(self, info: TypeInfo) -> None:
        """Raise ERR_OP if MPI does not define the operation for a datatype. REPLACE and NO_OP raise."""
        if self.is_predefined and self.name not in operations_of(info):
            name = info.name or "a datatype that the program made"
            raise errors.Exception(errors.ERR_OP, f"{self.name} is not defined for {name}")

    def fold_call(self, context: Any, kind: int, root: int, given: Any, *arguments: Any) -> FoldCall:
        """Return the reduction that gathers the arrays of the ranks, and combines them on each of them."""
        self.check(given.type)
        return FoldCall(self, context, kind, root, given, *arguments)


def _memory_of(array: Any) -> buffer:
    return buffer(array.view(np.uint8).reshape(-1))


class Op(handles.Named, Handle):
    """An operation of a reduction."""

    _null_error = errors.ERR_OP

    def __call__(self, x: Any, y: Any) -> Any:
        if self._ref is None:
            raise ValueError("OP_NULL cannot be called")
        if self._ref.is_predefined:
            return self._ref.on_objects(x, y)
        return self._ref.on_objects(x, y, None)

    @classmethod
    def Create(cls, function: Callable[..., Any], commute: bool = False) -> Op:
        """Return the operation of a function.

        It is called as function(a, b, datatype) with buffers, and writes the result to b. With objects,
        datatype is None, and the function returns the result.
        """
        handles.check_function(function)
        if len(_functions) >= _MOST_FUNCTIONS:
            raise RuntimeError(
                f"a program may have {_MOST_FUNCTIONS} operations of its own at a time: free some"
            )
        info = OpInfo(None, function, commute=bool(commute), is_predefined=False)
        _functions.add(info)
        return handle(cls, info)

    def Free(self) -> None:
        """Free an operation that the program made."""
        if self._ref is None or self._ref.is_predefined:
            raise errors.Exception(errors.ERR_OP)
        _functions.discard(self._ref)
        self._ref = None

    def Is_commutative(self) -> bool:
        """Return whether the order of the two operands does not matter."""
        return bool(self._handled().commute)

    is_commutative = property(Is_commutative)

    @property
    def is_predefined(self) -> bool:
        """True if the operation is one of MPI's, or null."""
        return self._ref is None or self._ref.is_predefined

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Combine two messages of this rank; the result is written to the second."""
        given, taken = simple(inbuf, False), simple(inoutbuf, True)
        if given.type.dtype != taken.type.dtype or given.count != taken.count:
            raise ValueError("both messages must have the same datatype and count")
        info = self._handled()
        info.check(given.type)
        info.fold(given.items, taken.items, handle(Datatype, given.type))

    def __reduce__(self) -> Any:
        if self._ref is not None and not self._ref.is_predefined:
            return type(self).Create, (self._ref.on_objects, self._ref.commute)
        return super().__reduce__()


def _place(first: Any, second: Any, is_better: Callable[[Any, Any], bool]) -> Any:
    """Return the pair with the better value, as a tuple; of equal values, that with the lower place."""
    (x, i), (y, j) = first, second
    return (x, i) if is_better(x, y) or (not is_better(y, x) and i <= j) else (y, j)


def _place_arrays(first: Any, second: Any, is_better: Callable[[Any, Any], Any]) -> Any:
    x, y = first["value"], second["value"]
    takes_first = is_better(x, y) | ((x == y) & (first["place"] <= second["place"]))
    return np.where(takes_first, first, second)


def _logical(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: function(x != 0, y != 0)


_PREDEFINED = {
    "SUM": OpInfo("sum", operator.add, np.add),
    "PROD": OpInfo("prod", operator.mul, np.multiply),
    "MIN": OpInfo("min", lambda x, y: y if y < x else x, np.minimum),
    "MAX": OpInfo("max", lambda x, y: y if y > x else x, np.maximum),
    "BAND": OpInfo("band", operator.and_, np.bitwise_and),
    "BOR": OpInfo("bor", operator.or_, np.bitwise_or),
    "BXOR": OpInfo("bxor", operator.xor, np.bitwise_xor),
    "LAND": OpInfo("land", lambda x, y: bool(x) and bool(y), _logical(np.logical_and)),
    "LOR": OpInfo("lor", lambda x, y: bool(x) or bool(y), _logical(np.logical_or)),
    "LXOR": OpInfo("lxor", lambda x, y: bool(x) ^ bool(y), _logical(np.logical_xor)),
    "MINLOC": OpInfo(
        "minloc", lambda x, y: _place(x, y, operator.lt), lambda x, y: _place_arrays(x, y, np.less)
    ),
    "MAXLOC": OpInfo(
        "maxloc", lambda x, y: _place(x, y, operator.gt), lambda x, y: _place_arrays(x, y, np.greater)
    ),
    "REPLACE": OpInfo("replace", lambda x, y: y, lambda x, y: x, commute=False),
    "NO_OP": OpInfo("no_op", lambda x, y: x, lambda x, y: y, commute=False),
}
OPS: dict[str, Op] = {"OP_NULL": Op(), **{name: handle(Op, info) for name, info in _PREDEFINED.items()}}
SUM = OPS["SUM"]
handles.predefine(OPS)
