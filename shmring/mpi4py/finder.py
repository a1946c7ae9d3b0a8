"""Make the names `mpi4py` and `mpi4py.…` mean the modules of this package, and no installed mpi4py.

`install` puts a finder before all others. With `SHMRING_MPI4PY=1` it runs when the interpreter starts, by a
`.pth` file beside the installed package. `shmrun --mpi4py` puts its folder `_stand_in` at the front of
PYTHONPATH, which works for a checkout as well. `mpi4py` in that folder installs the finder.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

from .._config.settings import Settings
from .._launch.stand_in import FOLDER, with_stand_in

_NAME = "mpi4py"
_PACKAGE = __package__  # shmring.mpi4py
_PUBLIC = {"MPI", "__main__", "bench", "futures", "rc", "run", "typing", "util"}


class _Alias:
    """Loads a module of this package under its name in mpi4py; both names are one module."""

    def __init__(self, ours: ModuleSpec) -> None:
        self.ours = ours

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import make a module, which exec_module replaces."""

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        ours: Any = importlib.import_module(self.ours.name)
        is_rc = module.__spec__.name == f"{_NAME}.rc"  # the object, also as a module
        sys.modules[module.__spec__.name] = ours.rc if is_rc else ours

    def get_code(self, name: str) -> CodeType | None:
        """Return the code that `python -m` runs."""
        loader: Any = self.ours.loader
        return loader.get_code(self.ours.name)


class _Finder:
    """Finds `mpi4py` and its public modules here, and none of them anywhere else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first, _, rest = name.partition(".")
        if first != _NAME:
            return None
        ours = find_spec(_PACKAGE + name.removeprefix(_NAME)) if _is_public(rest) else None
        if ours is None:
            raise ModuleNotFoundError(f"shmring's stand-in for mpi4py has no module {name!r}", name=name)
        is_package = ours.submodule_search_locations is not None
        loader: Any = _Alias(ours)
        spec = ModuleSpec(name, loader, origin=ours.origin, is_package=is_package)
        spec.submodule_search_locations = ours.submodule_search_locations
        spec.has_location = True
        return spec


def _is_public(module: str) -> bool:
    return not module or module.partition(".")[0] in _PUBLIC


def install() -> None:
    """Let `import mpi4py` mean this package from now on, in this process.

    Raises RuntimeError if the process has imported `MPI` of the installed mpi4py.
    """
    check_alone()
    for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
        del sys.modules[name]
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def check_alone() -> None:
    """Raise RuntimeError if the process has imported `MPI` of the installed mpi4py."""
    there = sys.modules.get(f"{_NAME}.MPI")
    if there is not None and not _is_ours(there):
        raise RuntimeError(
            f"mpi4py's MPI was imported before shmring's, from {getattr(there, '__file__', '?')}: a process "
            "has one MPI. Start the program by shmrun --mpi4py or by python -m shmring.mpi4py"
        )


def _is_ours(module: ModuleType) -> bool:
    """Return whether a module is of this package, or is about to be replaced by one of it."""
    loader = module.__spec__.loader if module.__spec__ is not None else None
    return module.__name__.startswith(_PACKAGE) or isinstance(loader, _Alias)


def install_for_children() -> None:
    """Install, and let processes that this one starts find the stand-in as well."""
    install()
    sys.path.insert(1, FOLDER)  # children of multiprocessing take over sys.path
    os.environ["PYTHONPATH"] = with_stand_in(os.environ.get("PYTHONPATH", ""))


def install_if_asked() -> None:
    """Install if SHMRING_MPI4PY is 1."""
    if Settings.from_environment().mpi4py:
        install()
