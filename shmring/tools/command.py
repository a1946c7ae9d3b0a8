"""The command `shmring`: looks at running jobs from outside.

May know: dump, ps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import dump, ps


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(
        prog="shmring",
        description="Look at the communicators of running processes of this user on this host.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    ps.add_to(commands)
    dump.add_to(commands)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
