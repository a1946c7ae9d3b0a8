"""`shmring selftest`: run the checks of shmring/tools/selftest_checks.py and print a line for each."""

from __future__ import annotations

import argparse
import faulthandler
import platform
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import shmring

from . import _cli

if TYPE_CHECKING:
    from .selftest_checks import Check

WATCHDOG_S = 280  # for the whole run, if a check exceeds its own limit; CI allows 5 min
_ABOUT = (
    "Compare every call with NumPy on several dtypes and sizes, with one rank, two ranks, and more ranks "
    "than CPUs. Also check messages, errors, and that nothing is left behind. Exit status 1 if a check fails."
)


def add_to(commands: Any) -> None:
    summary = "check that this installation works on this machine (some seconds)"
    parser = commands.add_parser("selftest", help=summary, description=_ABOUT)
    _cli.add_json(parser, "the checks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the checks and return the exit status."""
    from .selftest_checks import checks

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
    skipped = sum(check.skipped is not None for check in found)
    if arguments.json:
        counts = {"seconds": seconds, "failed": failed, "skipped": skipped}
        _cli.print_json(about | counts | {"checks": [*map(asdict, found)]})
    else:
        passed = len(found) - failed - skipped
        print(f"{passed} passed, {failed} failed, {skipped} skipped in {seconds:.1f} s")
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
    if check.skipped is not None:
        return f"skipped {check.name}: {check.skipped}"
    return f"ok      {check.name:<44} {check.results:>4} results {check.seconds:>6.2f} s"
