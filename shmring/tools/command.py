"""The command `shmring`: one module for each of its commands.

`add_to` of a module adds its command to those of a parser. `run` carries it out and returns the exit status.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

from .._config.optional_deps import Missing
from .._system.processes import open_standard_streams
from . import bench, doctor, dump, info, predict, ps, selftest, top, tune
from ._cli import BAD_USAGE, INTERRUPTED, Parser, complain

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of stdout, such as a file on a full disk
_COMMANDS = (info, doctor, selftest, bench, predict, tune, ps, top, dump)  # as --help shows them


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    open_standard_streams()
    parser = Parser(
        prog="shmring",
        description="Inspect this machine, measure its speed, and observe running communicators.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except Missing as error:
        return complain(arguments.prog, str(error), BAD_USAGE)
    except KeyboardInterrupt:  # without a traceback, as other commands end
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as `head` does; keep the interpreter silent at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return complain(arguments.prog, str(error))


if __name__ == "__main__":
    raise SystemExit(main())
