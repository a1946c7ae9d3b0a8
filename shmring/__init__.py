"""Collectives between Python processes at the speed of shared memory.

    with shmring.init(world, rank) as comm:
        comm.all_reduce(gradient)

What is public is named here and imported when it is first used, so that `import shmring` stays light.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _check_built() -> None:
    """Raise an ImportError that says what to do if the compiled modules are missing."""
    import os
    from importlib.machinery import PathFinder

    if PathFinder.find_spec(f"{__name__}._kernels", __path__) is not None:
        return
    here = __path__[0]
    tree = os.path.dirname(here)
    if os.path.exists(os.path.join(tree, "setup.py")):
        raise ImportError(
            f"shmring was imported from its source tree, {tree}, in which it has not been built: start "
            "Python elsewhere, to import the installed shmring, or build it in place, pip install -e ."
        )
    raise ImportError(
        f"the compiled modules of shmring are missing in {here}, or are those of another Python: install it "
        "with this one, python -m pip install --force-reinstall shmring"
    )


_check_built()

_HOMES = {
    "Adoption": "arrays",
    "Comm": "comm",
    "ANY_SOURCE": "messages",
    "ANY_TAG": "messages",
    "Status": "messages",
    "Transfer": "messages",
    "Bucketer": "bucketer",
    "Memory": "_operands",
    "Plan": "collectives",
    "Work": "work",
    "Op": "ops",
    "Ring": "ring",
    "model": "model",
    "SharedArray": "shared",
    "Trace": "tracing",
    "World": "bootstrap",
    "host_id": "bootstrap",
    "world": "bootstrap",
    "init": "joining",
    "spawn": "launch",
    "Error": "errors",
    "RankFailed": "errors",
    "Timeout": "errors",
    "Mismatch": "errors",
    "Aborted": "errors",
    "Closed": "errors",
    "Truncated": "errors",
    "OutOfMemory": "errors",
}

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "Aborted",
    "Adoption",
    "Bucketer",
    "Closed",
    "Comm",
    "Error",
    "Memory",
    "Mismatch",
    "Op",
    "OutOfMemory",
    "Plan",
    "RankFailed",
    "Ring",
    "SharedArray",
    "Status",
    "Timeout",
    "Trace",
    "Transfer",
    "Truncated",
    "Work",
    "World",
    "__version__",
    "host_id",
    "init",
    "spawn",
    "world",
]

if TYPE_CHECKING:
    from . import model as model
    from ._operands import Memory
    from .arrays import Adoption
    from .bootstrap import World, host_id, world
    from .bucketer import Bucketer
    from .collectives import Plan
    from .comm import Comm
    from .errors import Aborted, Closed, Error, Mismatch, OutOfMemory, RankFailed, Timeout, Truncated
    from .joining import init
    from .launch import spawn
    from .messages import ANY_SOURCE, ANY_TAG, Status, Transfer
    from .ops import Op
    from .ring import Ring
    from .shared import SharedArray
    from .tracing import Trace
    from .work import Work


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shmring' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f".{home}", __name__)
    value = globals()[name] = module if name == home else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
