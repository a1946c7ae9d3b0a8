"""`shmring selftest`: runs the checks of shmring/selftest.py and prints a line for each.

May know: screen, and shmring/selftest.py, which brings NumPy and is imported when it runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import shmring

from . import screen

if TYPE_CHECKING:
    from ..selftest import Check

WATCHDOG_S = 600  # for all of it, should a check's own limit not help
_ABOUT = (
    "Every call on some dtypes and sizes against NumPy, with one rank, two, and more than CPUs; messages, "
    "errors, and that nothing is left behind. Exit status 1 if a check fails."
)


def add_to(commands: Any) -> None:
    """Add this command to a parser's."""
    summary = "whether this installation works on this machine: some seconds"
    parser = commands.add_parser("selftest", help=summary, description=_ABOUT)
    screen.add_json(parser, "the checks")
    parser.set_defaults(run=run)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m shmring.selftest`; the exit status."""
    parser = screen.Parser(prog="python -m shmring.selftest", description=_ABOUT)
    screen.add_json(parser, "the checks")
    return run(parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """Print it; the exit status."""
    from ..selftest import checks

    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    began, found, about = time.perf_counter(), [], _versions()
    if not arguments.json:
        print(", ".join(f"{name} {version}" for name, version in about.items()), flush=True)
    for check in checks():
        found.append(check)
        if not arguments.json:
            print(_line(check), flush=True)
    faulthandler.cancel_dump_traceback_later()
    seconds = time.perf_counter() - began
    failed = sum(check.problem is not None for check in found)
    if arguments.json:
        screen.print_json(about | {"seconds": seconds, "failed": failed, "checks": [*map(asdict, found)]})
    else:
        print(f"{len(found) - failed} passed, {failed} failed in {seconds:.1f} s")
    return 1 if failed else 0


def _versions() -> dict[str, str]:
    import numpy

    return {
        "shmring": shmring.__version__,
        "Python": platform.python_version(),
        "NumPy": numpy.__version__,
        "Linux": f"{platform.release()} {platform.machine()}",
    }


def _line(check: Check) -> str:
    if check.problem is not None:
        return f"FAILED  {check.name}: {check.problem}"
    return f"ok      {check.name:<44} {check.results:>4} results {check.seconds:>6.2f} s"
