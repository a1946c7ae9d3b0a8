"""The three forms of a call: blocking, with a request, and persistent. Each prepares the call first."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from .messages import Handle, handle, has_gaps

_Class = TypeVar("_Class", bound=type)
_PREFIX = "_prepare_"


def add_forms(cls: _Class, are_collective: bool = True) -> _Class:
    """Add Name, Iname and Name_init to a class for each of its methods _prepare_Name, unless it has them."""
    for attribute, prepare in list(vars(cls).items()):
        if attribute.startswith(_PREFIX):
            name = attribute.removeprefix(_PREFIX)
            for form, method in _forms_of(name, prepare, are_collective).items():
                if not hasattr(cls, form):
                    setattr(cls, form, method)
    return cls


def _forms_of(name: str, prepare: Callable[..., Any], is_collective: bool) -> dict[str, Callable[..., Any]]:
    most = len(inspect.signature(prepare).parameters) - 1  # without self

    def run(self: Any, *args: Any, status: Any = None, **keywords: Any) -> Any:
        if len(args) > most:
            *args, status = args  # type: ignore[assignment]
        return prepare(self, *args, **keywords).run(status)

    def issue(self: Any, *args: Any, **keywords: Any) -> Any:
        return prepare(self, *args, **keywords).issue()

    def persist(self: Any, *args: Any, info: Any = None, **keywords: Any) -> Any:
        args, again = args[:most], None
        if any(map(has_gaps, [*args, *keywords.values()])):  # items with gaps are copied at each start
            args = _frozen(args)
            keywords = {name: _frozen(value) for name, value in keywords.items()}
            again = functools.partial(prepare, self, *args, **keywords)
        return prepare(self, *args, **keywords).persist(is_collective, again)

    forms = (
        (name, run, ""),
        (f"I{name[0].lower()}{name[1:]}", issue, " Return a request."),
        (f"{name}_init", persist, " Return a persistent request."),
    )
    for form, method, more in forms:
        functools.update_wrapper(method, prepare)
        method.__name__ = method.__qualname__ = form
        method.__doc__ = f"{prepare.__doc__ or ''}{more}"  # None with -OO
    return {form: method for form, method, _ in forms}


def _frozen(value: Any) -> Any:
    """Return an argument that stays if the program changes the lists in it, or frees the datatypes."""
    if isinstance(value, Handle):
        return handle(type(value), value._ref)
    if isinstance(value, (list, tuple)):  # stays a list: [1, 2] are two counts, (1, 2) are one and its place
        return [_frozen(part) for part in value] if isinstance(value, list) else tuple(map(_frozen, value))
    return value
