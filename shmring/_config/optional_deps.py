"""Import optional packages when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Missing(ModuleNotFoundError):
    """A package of an extra is not installed; the message says how to install it."""


def need(module: str, extra: str, purpose: str) -> Any:
    """Import and return the module that `purpose` needs. Raises Missing, which names the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is installed, but one of its own imports is missing
        raise Missing(
            f"{purpose} needs the package {package!r}, which is not installed here: "
            + _how_to_install(extra),
            name=error.name,
        ) from error


def _how_to_install(extra: str) -> str:
    """Return a command that installs an extra without looking up shmring, which is on no index."""
    from importlib import metadata  # imports much, and is seldom needed

    try:
        metadata.distribution("shmring")
    except metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in the checkout"
    return f"pip install 'shmring[{extra}]'"


def cloudpickle_if_installed() -> Any:
    """Return the module cloudpickle, or None. It pickles functions and classes that pickle cannot."""
    try:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    return cloudpickle
