"""Common properties of all handles: names of constants, integers for handles, pickling, attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from . import errors
from .constants import INTEGERS
from .messages import Handle, Status, handle

MODULE = "shmring.mpi4py.MPI"
_constants: dict[int, tuple[str, Any]] = {}  # by the identity of what they refer to
_nulls: dict[tuple[type], tuple[str, Any]] = {}  # by family
_by_number: WeakValueDictionary[int, Any] = WeakValueDictionary()


def predefine(constants: Mapping[str, Any]) -> None:
    """Register handles as constants of the module: they are pickled by name, and `free` leaves them alone."""
    for name, constant in constants.items():
        if constant:
            _constants.setdefault(id(constant._ref), (name, constant))
        else:
            _nulls.setdefault(constant._family, (name, constant))


def _constant_of(some: Any) -> tuple[str, Any] | None:
    return _constants.get(id(some._ref)) if some else _nulls.get(some._family)


class Named:
    """Methods of every handle."""

    __slots__ = ()
    _family: tuple[type]  # handles of one family can be compared, and copied into each other
    _ref: Any
    _null_error: int  # class of the error of a null handle

    def _handled(self) -> Any:
        """Return what this refers to. A null handle raises."""
        if self._ref is None:
            raise errors.Exception(self._null_error)
        return self._ref

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if Named in cls.__bases__:
            cls._family = (cls,)  # for isinstance; no attribute of a class refers to the class itself

    @classmethod
    def _check_ref(cls, ref: Any) -> None:
        """Raise TypeError if a handle of this class cannot refer to this; a class may have a condition."""

    def __reduce__(self) -> Any:
        found = _constant_of(self)
        if found is None:
            raise ValueError(f"this {type(self).__name__} belongs to its process, so it cannot be pickled")
        name, constant = found
        return name if constant is self else (type(self), (constant,))

    @property
    def handle(self) -> int:
        """An integer for `fromhandle`; 0 if the handle is null."""
        if self._ref is None:
            return 0
        _by_number[id(self._ref)] = self._ref
        return id(self._ref)

    @classmethod
    def fromhandle(cls, handle_: int) -> Any:
        """Return a handle to what the integer `handle` of another one stands for."""
        return handle(cls, _by_number[handle_] if handle_ else None)

    def toint(self) -> int:
        """Return -1: there is no library of C to which a handle could be passed."""
        return -1

    py2f = toint

    @classmethod
    def fromint(cls, arg: int) -> Any:
        """Refused: there is no library of C from which a handle could come."""
        raise errors.refuse("handles of C and Fortran", "pass the Python objects")

    f2py = fromint

    def free(self) -> None:
        """Free what this refers to, unless it is predefined. This raises no error."""
        if _constant_of(self) is None:
            with contextlib.suppress(errors.Exception, NotImplementedError):
                self.Free()  # type: ignore[attr-defined]
        self._let_go()

    def _let_go(self) -> None:
        """Make this a null handle, unless it is a constant of the module."""
        found = _constant_of(self)
        if found is None or found[1] is not self:
            self._ref = None


def check_function(function: Any) -> None:
    """Raise TypeError if this cannot be called."""
    if not callable(function):
        raise TypeError(f"a function is needed, not {type(function).__name__}")


def text_of(value: Any) -> str:
    """Return a name, which may be bytes, as a str."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"a str is needed, not {type(value).__name__}")
    return value


def name_of(value: Any) -> str:
    """Return the name that an object gets: MPI cuts those that are too long."""
    return text_of(value).encode()[: INTEGERS["MAX_OBJECT_NAME"] - 1].decode(errors="ignore")


class _Keyval:
    """A key of attributes, and the functions that are called when attributes are copied and deleted."""

    def __init__(self, copy_fn: Any, delete_fn: Any) -> None:
        self.copy_fn, self.delete_fn = copy_fn, delete_fn


_FIRST_KEYVAL = 1000
_next_keyval = _FIRST_KEYVAL


class Attributed:
    """Attributes that the program attaches to communicators, datatypes and windows."""

    __slots__ = ()
    _family: tuple[type]
    _ref: Any
    _handled: Callable[[], Any]  # of `Named`

    @classmethod
    def Create_keyval(
        cls,
        copy_fn: Callable[..., Any] | None = None,
        delete_fn: Callable[..., Any] | None = None,
        nopython: bool = False,
    ) -> int:
        """Return a new key."""
        global _next_keyval
        _next_keyval += 1
        _keyvals[_next_keyval] = cls, _Keyval(copy_fn, delete_fn)
        return _next_keyval

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Free a key, and return KEYVAL_INVALID."""
        _keyval_of(keyval)
        del _keyvals[keyval]
        return INTEGERS["KEYVAL_INVALID"]

    def Get_attr(self, keyval: int) -> Any:
        """Return the attribute of a key; None if it is not set."""
        _attributes_of(self)
        if keyval in self._predefined_attributes():
            return self._predefined_attributes()[keyval]
        _keyval_of(keyval)
        return _attributes_of(self).get(keyval, (None, None))[0]

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Set the attribute of a key."""
        key = _keyval_of(keyval)
        if keyval in _attributes_of(self):
            self.Delete_attr(keyval)
        _attributes_of(self)[keyval] = attrval, key

    def Delete_attr(self, keyval: int) -> None:
        """Delete the attribute of a key."""
        _keyval_of(keyval)
        found = _attributes_of(self).pop(keyval, None)
        if found is None:
            raise errors.Exception(errors.ERR_OTHER, "the attribute is not set")
        _call_delete(self, keyval, *found)

    def _predefined_attributes(self) -> dict[int, Any]:
        return {}

    def Get_name(self) -> str:
        """Return the name."""
        if self._ref is None:
            return f"MPI_{_nulls[self._family][0]}"
        return str(self._handled().name)

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self._handled().name = name_of(name)

    name = property(Get_name, Set_name)


_keyvals: dict[int, tuple[type, _Keyval]] = {}


def _keyval_of(keyval: int) -> _Keyval:
    if keyval not in _keyvals:
        raise errors.Exception(errors.ERR_KEYVAL)
    return _keyvals[keyval][1]


def _attributes_of(some: Any) -> dict[int, tuple[Any, _Keyval]]:
    info = some._handled()
    if info.attributes is None:
        info.attributes = {}
    return info.attributes


def _call_delete(some: Any, keyval: int, value: Any, key: _Keyval) -> None:
    if callable(key.delete_fn):
        with errors.from_functions():
            key.delete_fn(some, keyval, value)


def copy_attributes(old: Any, new: Any) -> None:
    """Copy the attributes of a handle to its duplicate, as their keys say."""
    for keyval, (value, key) in (old._ref.attributes or {}).items():
        if key.copy_fn is True:
            copied = value
        elif callable(key.copy_fn):
            with errors.from_functions():
                copied = key.copy_fn(old, keyval, value)
        else:
            continue
        if copied is not NotImplemented:
            _attributes_of(new)[keyval] = copied, key


def delete_attributes(some: Any) -> None:
    """Delete the attributes of a handle, the last one first."""
    while some._ref.attributes:
        keyval, (value, key) = some._ref.attributes.popitem()
        _call_delete(some, keyval, value, key)


def sizeof(arg: Any) -> int:
    """Return the number of bytes of a handle, or of a class of handles, in C."""
    return 24 if _class_of(arg) is Status else 8


def addressof(arg: Any) -> int:
    """Return an address for a handle."""
    _class_of(arg)
    return id(arg)


def handleof(arg: Any) -> int:
    """Return the integer of a handle."""
    return 0 if _class_of(arg) is Status else arg.handle


def _class_of(arg: Any) -> type:
    kind = arg if isinstance(arg, type) else type(arg)
    if not issubclass(kind, Handle | Status):
        raise TypeError(f"a handle or a class of handles is needed, not {kind.__name__}")
    return Status if issubclass(kind, Status) else kind
