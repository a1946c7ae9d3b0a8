"""The packages that adapters are for, imported when they are used. May know: nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def need(module: str, extra: str) -> Any:
    """The module, or ModuleNotFoundError that says how to get it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is there, and lacks something itself
        raise ModuleNotFoundError(
            f"shmring.adapters.{extra} needs the package {package!r}, which is not installed here: "
            f"pip install 'shmring[{extra}]'",
            name=error.name,
        ) from error
