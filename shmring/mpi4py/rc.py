"""The settings of mpi4py, `mpi4py.rc`."""

from __future__ import annotations

import os
from typing import Any


class Rc:
    """The settings of mpi4py; `MPI` reads most of them when it is imported.

    A call with keywords changes several at once.
    """

    initialize: bool = True  # join the world on import, not in MPI.Init()
    threads: bool = True  # False: as the level "single"
    thread_level: str = "multiple"  # below: threads take no turns
    finalize: bool | None = None  # leave the world at exit; None: if `initialize` is true
    fast_reduce: bool = True
    recv_mprobe: bool = True
    irecv_bufsz: int = 32768  # the most bytes of an object that `irecv` can receive
    errors: str = "exception"

    def __init__(self, **settings: Any) -> None:
        self(**settings)

    def __call__(self, **settings: Any) -> None:
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Rc.__annotations__:
            raise TypeError(f"mpi4py.rc has no setting {name!r}; it has: {', '.join(Rc.__annotations__)}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return "<mpi4py.rc>"


rc = Rc()


def read_environment() -> None:
    """Change the settings as MPI4PY_RC_INITIALIZE, MPI4PY_RC_ERRORS and so on say, whatever they are."""
    for name in Rc.__annotations__:
        text = os.environ.get(f"MPI4PY_RC_{name.upper()}", "")
        if text:
            setattr(rc, name, _value(text, getattr(Rc, name)))


def _value(text: str, default: Any) -> Any:
    if isinstance(default, str):
        return text.lower()
    truth = {"1": True, "true": True, "yes": True, "on": True, "y": True}
    truth |= {"0": False, "false": False, "no": False, "off": False, "n": False}
    return int(text) if type(default) is int else truth.get(text.lower(), default)


def integer_of_variable(name: str, default: int) -> int:
    """Return the integer in an environment variable, by which a program sets a default."""
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be an integer") from None
