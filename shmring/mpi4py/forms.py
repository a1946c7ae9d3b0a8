"""The three forms of a call: blocking, with a request, and persistent. Each prepares the call first."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_PREFIX = "_prepare_"


def add_forms(cls: _Class) -> _Class:
    """Add Name, Iname and Name_init to a class for each of its methods _prepare_Name, unless it has them."""
    for attribute, prepare in list(vars(cls).items()):
        if attribute.startswith(_PREFIX):
            name = attribute.removeprefix(_PREFIX)
            for form, method in _forms_of(name, prepare).items():
                if not hasattr(cls, form):
                    setattr(cls, form, method)
    return cls


def _forms_of(name: str, prepare: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    most = len(inspect.signature(prepare).parameters) - 1  # without self

    def run(self: Any, *args: Any, status: Any = None, **keywords: Any) -> Any:
        if len(args) > most:
            *args, status = args  # type: ignore[assignment]
        return prepare(self, *args, **keywords).run(status)

    def issue(self: Any, *args: Any, **keywords: Any) -> Any:
        return prepare(self, *args, **keywords).issue()

    def persist(self: Any, *args: Any, info: Any = None, **keywords: Any) -> Any:
        return prepare(self, *args[:most], **keywords).persist()

    doc = prepare.__doc__ or ""
    return {
        name: _named(run, name, doc, prepare),
        f"I{name[0].lower()}{name[1:]}": _named(
            issue, f"I{name[0].lower()}{name[1:]}", f"{doc} Return a request.", prepare
        ),
        f"{name}_init": _named(persist, f"{name}_init", f"{doc} Return a persistent request.", prepare),
    }


def _named(
    method: Callable[..., Any], name: str, doc: str, prepare: Callable[..., Any]
) -> Callable[..., Any]:
    functools.update_wrapper(method, prepare)
    method.__name__, method.__qualname__, method.__doc__ = name, name, doc
    return method
