"""Info: hints, which are kept and have no effect."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import errors, handles
from .constants import INTEGERS
from .messages import Handle, handle


class Hints(dict[str, str]):
    """The pairs of an Info."""


class Info(handles.Named, Handle):
    """A mapping of strings to strings."""

    _null_error = errors.ERR_INFO

    def _hints(self) -> Hints:
        return self._handled()

    @classmethod
    def Create(cls, items: Any = None) -> Info:
        """Return a new info, with the pairs of a mapping or of a list."""
        made: Info = handle(cls, Hints())
        made.update(items or ())
        return made

    @classmethod
    def Create_env(cls, args: Sequence[str] | None = None) -> Info:
        """Return a copy of INFO_ENV."""
        return handle(cls, Hints(INFO_ENV._hints()))

    def Free(self) -> None:
        """Free the info."""
        if self._ref is None or self._ref is INFO_ENV._ref:
            raise errors.Exception(errors.ERR_INFO)
        self._ref = None

    def Dup(self) -> Info:
        """Return a copy."""
        return handle(type(self), Hints(self._hints()))

    def copy(self) -> Info:
        """Return a copy; a null info for a null one."""
        return type(self)() if self._ref is None else self.Dup()

    def __reduce__(self) -> Any:
        if self._ref is None or self._ref is INFO_ENV._ref:
            return super().__reduce__()
        return type(self).Create, (dict(self._ref),)

    def Get(self, key: str) -> str | None:
        """Return the value of a key; None if there is none."""
        return self._hints().get(_checked(key, "KEY"))

    def Set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        hints = self._hints()
        hints[_checked(key, "KEY")] = _checked(value, "VALUE")

    def Delete(self, key: str) -> None:
        """Delete a key."""
        if self._hints().pop(_checked(key, "KEY"), None) is None:
            raise errors.Exception(errors.ERR_INFO_NOKEY, repr(key))

    def Get_nkeys(self) -> int:
        """Return the number of keys."""
        return len(self._hints())

    def Get_nthkey(self, n: int) -> str:
        """Return key number n."""
        if not 0 <= n < self.Get_nkeys():
            raise errors.Exception(errors.ERR_ARG, f"there is no key number {n}")
        return list(self._hints())[n]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return 0 if self._ref is None else self.Get_nkeys()

    def __contains__(self, key: str) -> bool:
        return self._ref is not None and handles.text_of(key) in self._hints()

    def __getitem__(self, key: str) -> str:
        if key not in self:
            raise KeyError(key)
        return self._hints()[handles.text_of(key)]

    def __setitem__(self, key: str, value: str) -> None:
        if self._ref is None:
            raise KeyError(key)
        self.Set(key, value)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self.Delete(key)

    def get(self, key: str, default: str | None = None) -> str | None:
        """Return the value of a key, or the default."""
        return default if self._ref is None else self._hints().get(handles.text_of(key), default)

    def keys(self) -> list[str]:
        """Return the keys."""
        return [] if self._ref is None else list(self._hints())

    def values(self) -> list[str]:
        """Return the values."""
        return [] if self._ref is None else list(self._hints().values())

    def items(self) -> list[tuple[str, str]]:
        """Return the pairs."""
        return [] if self._ref is None else list(self._hints().items())

    def update(self, items: Mapping[str, str] | Iterable[tuple[str, str]] = (), **kwds: str) -> None:
        """Set the values of several keys."""
        if self._ref is None:
            raise KeyError("the info is null")
        pairs = items.items() if hasattr(items, "items") else items
        for key, value in [*pairs, *kwds.items()]:
            self.Set(key, value)

    def pop(self, key: str, *default: str) -> str:
        """Delete a key and return its value, or the default."""
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        return self._hints().pop(handles.text_of(key))

    def popitem(self) -> tuple[str, str]:
        """Delete a pair and return it."""
        if not self:
            raise KeyError("the info is null")
        return self._hints().popitem()

    def clear(self) -> None:
        """Delete all keys."""
        if self._ref is not None:
            self._hints().clear()


class Hinted:
    """Part of the handles of communicators and windows, which have hints."""

    __slots__ = ()
    _handled: Callable[[], Any]  # of `Named`

    def Set_info(self, info: Info) -> None:
        """Set hints, which have no effect."""
        self._handled().hints.update(info.items())

    def Get_info(self) -> Info:
        """Return the hints."""
        return handle(Info, Hints(self._handled().hints))

    info = property(Get_info, Set_info)


def _checked(given: str | bytes, what: str) -> str:
    text = handles.text_of(given)
    most = INTEGERS["MAX_INFO_KEY" if what == "KEY" else "MAX_INFO_VAL"]
    if not text or len(text) > most:
        raise errors.Exception(errors.NUMBERS[f"ERR_INFO_{what}"], f"{text!r:.40} is empty or too long")
    return text


INFO_NULL = Info()


def _environment() -> Hints:
    found = Hints(command=sys.argv[0] if sys.argv else "")
    with contextlib.suppress(OSError):  # the working directory has been removed, or may not be read
        found["wdir"] = os.getcwd()
    return found


INFO_ENV: Info = handle(Info, _environment())
handles.predefine({"INFO_NULL": INFO_NULL, "INFO_ENV": INFO_ENV})
