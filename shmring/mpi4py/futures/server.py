"""The ranks under `python -m mpi4py.futures`: rank 0 runs the program, the others carry out its tasks."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from ...errors import Aborted, RankFailed
from ..run import search_first, set_abort_status
from .pool import share
from .workers import MPI, Manager, serve


def run(program: list[str], run_program: Callable[[], None]) -> None:
    """Run the program on rank 0, with the other ranks as its workers; collective over the world."""
    world = MPI.COMM_WORLD
    if world.Get_rank() != 0:
        _import_main(program)
        _serve(world)
        return
    manager = Manager(world, 0) if world.Get_size() > 1 else None
    share(manager)
    try:
        run_program()
    except SystemExit as ending:
        if ending.code not in (None, 0):
            set_abort_status(ending)
            raise
    if manager is not None:
        manager.close()


def _serve(world: Any) -> None:
    """Carry out the tasks of rank 0. If rank 0 ends without an end of its tasks, end in one line."""
    try:
        serve(world, 0)
    except MPI.Exception as error:
        failed = error.__cause__
        if not isinstance(failed, (RankFailed, Aborted)) or failed.rank != 0:
            raise
        # A traceback of this rank would hide that of the program. shmrun knows by this line that another
        # rank failed first.
        raise SystemExit("".join(traceback.format_exception_only(error)).strip()) from None


def _import_main(program: list[str]) -> None:
    """Make the program's functions known as those of `__main__`; its module is called `__worker__`."""
    module = types.ModuleType("__worker__")
    if program[0] == "-m":
        names = runpy.run_module(program[1], run_name="__worker__", alter_sys=True)
    elif program[0] in ("-c", "-"):
        return
    else:
        search_first(os.path.realpath(os.path.dirname(program[0])))
        names = runpy.run_path(program[0], run_name="__worker__")
    vars(module).update(names)
    sys.modules["__main__"] = sys.modules["__worker__"] = module
