"""The command `shmring`: one module for each of its commands.

May know: dump, ps, screen, top.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import dump, ps, top
from .screen import Parser

_COMMANDS = (ps, top, dump)  # in the order in which --help shows them


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = Parser(
        prog="shmring",
        description="Look at the communicators of running processes of this user on this host.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
