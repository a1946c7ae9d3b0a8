"""`python -m mpi4py.futures script.py`: rank 0 runs the script, the others carry out its tasks."""

from __future__ import annotations

import sys

from .. import finder
from ..run import run_command_line
from .server import run

_USAGE = "usage: python -m mpi4py.futures [-m MODULE | -c COMMAND | FILE | -] [ARGUMENT ...]"


def main() -> None:
    """Run the command line."""
    program = sys.argv[1:]
    if not program or (program[0] in ("-m", "-c") and len(program) < 2):
        raise SystemExit(f"there is no program to run\n{_USAGE}")
    finder.install_for_children()
    run(program, lambda: run_command_line(program))


if __name__ == "__main__":
    main()
