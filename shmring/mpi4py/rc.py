"""Settings that take effect when `MPI` is imported: `mpi4py.rc`."""

from __future__ import annotations

from typing import Any

_DEFAULTS: dict[str, Any] = {
    "initialize": True,
    "threads": True,
    "thread_level": "multiple",
    "finalize": None,
    "fast_reduce": True,
    "recv_mprobe": True,
    "irecv_bufsz": 32768,
    "errors": "exception",
}


class Rc:
    """The settings. Calling it with keywords sets several of them."""

    def __init__(self) -> None:
        self.__dict__.update(_DEFAULTS)

    def __call__(self, **settings: Any) -> None:
        for name, value in settings.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"mpi4py.rc has no setting {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _DEFAULTS:
            raise TypeError(f"mpi4py.rc has no setting {name!r}; it has {', '.join(_DEFAULTS)}")
        self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"<mpi4py.rc {self.__dict__}>"


rc = Rc()
