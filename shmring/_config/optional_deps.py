"""Packages that only some need, imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Missing(ModuleNotFoundError):
    """A package of an extra is not installed; the message says how to get it."""


def need(module: str, extra: str, purpose: str) -> Any:
    """The module, or Missing: `purpose` needs it, and the extra brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is there, and lacks something itself
        raise Missing(
            f"{purpose} needs the package {package!r}, which is not installed here: "
            f"pip install 'shmring[{extra}]'",
            name=error.name,
        ) from error
