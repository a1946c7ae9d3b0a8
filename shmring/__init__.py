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

    if PathFinder.find_spec("kernels", [os.path.join(__path__[0], "_core")]) is not None:
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
        "with this one, from a checkout (python -m pip install --force-reinstall .) or from a wheel"
    )


_check_built()

_HOMES = {
    "Adoption": "_arrays.allocator",
    "Comm": "_comm.comm",
    "ANY_SOURCE": "_comm.point_to_point",
    "ANY_TAG": "_comm.point_to_point",
    "ProbedMessage": "_comm.point_to_point",
    "Status": "_comm.endpoint",
    "Transfer": "_comm.endpoint",
    "Bucketer": "_comm.bucketer",
    "Arena": "_arrays.operands",
    "Memory": "_arrays.operands",
    "Plan": "_comm.collectives",
    "Work": "_comm.work",
    "Op": "_comm.ops",
    "Broadcast": "_p2p.broadcast",
    "Ring": "_p2p.ring",
    "MPI": "mpi4py.MPI",
    "model": "model",
    "SharedArray": "_arrays.shared_array",
    "keep_shared": "_arrays.passing",
    "share": "_arrays.passing",
    "shared_empty": "_arrays.passing",
    "shared_zeros": "_arrays.passing",
    "Trace": "_comm.trace_file",
    "World": "_bootstrap.join",
    "host_id": "_bootstrap.join",
    "world": "_bootstrap.join",
    "init": "_comm.init",
    "spawn": "_launch.spawn",
    "Error": "errors",
    "RankFailed": "errors",
    "Timeout": "errors",
    "Mismatch": "errors",
    "Aborted": "errors",
    "Closed": "errors",
    "Truncated": "errors",
    "OutOfMemory": "errors",
}
_MODULES = ("MPI", "model")

__all__ = sorted(["__version__", *(name for name in _HOMES if name not in _MODULES)])

# For type checkers, which do not read the table; `as` marks what is public.
if TYPE_CHECKING:
    from . import model as model
    from ._arrays.allocator import Adoption as Adoption
    from ._arrays.operands import Arena as Arena
    from ._arrays.operands import Memory as Memory
    from ._arrays.passing import keep_shared as keep_shared
    from ._arrays.passing import share as share
    from ._arrays.passing import shared_empty as shared_empty
    from ._arrays.passing import shared_zeros as shared_zeros
    from ._arrays.shared_array import SharedArray as SharedArray
    from ._bootstrap.join import World as World
    from ._bootstrap.join import host_id as host_id
    from ._bootstrap.join import world as world
    from ._comm.bucketer import Bucketer as Bucketer
    from ._comm.collectives import Plan as Plan
    from ._comm.comm import Comm as Comm
    from ._comm.endpoint import Status as Status
    from ._comm.endpoint import Transfer as Transfer
    from ._comm.init import init as init
    from ._comm.ops import Op as Op
    from ._comm.point_to_point import ANY_SOURCE as ANY_SOURCE
    from ._comm.point_to_point import ANY_TAG as ANY_TAG
    from ._comm.point_to_point import ProbedMessage as ProbedMessage
    from ._comm.trace_file import Trace as Trace
    from ._comm.work import Work as Work
    from ._launch.spawn import spawn as spawn
    from ._p2p.broadcast import Broadcast as Broadcast
    from ._p2p.ring import Ring as Ring
    from .errors import Aborted as Aborted
    from .errors import Closed as Closed
    from .errors import Error as Error
    from .errors import Mismatch as Mismatch
    from .errors import OutOfMemory as OutOfMemory
    from .errors import RankFailed as RankFailed
    from .errors import Timeout as Timeout
    from .errors import Truncated as Truncated


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shmring' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f".{home}", __name__)
    value = globals()[name] = module if name in _MODULES else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
