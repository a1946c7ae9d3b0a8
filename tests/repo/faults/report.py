"""Kill ranks in every call at every point, and write the results: python -m tests.repo.faults.report

Exit with status 1 if a world hung, a result or an error was wrong, or something was left behind.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import sys

from . import builds


def main() -> int:
    arguments = parse()
    folder = builds.build()
    sys.path.insert(0, str(folder))
    builds.faults = ctypes.CDLL(str(folder / builds.FAULTS_LIBRARY), ctypes.RTLD_GLOBAL)
    return importlib.import_module(".campaign", __package__).run(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--at-least", type=int, default=0, metavar="KILLS", help="and so many kills")
    parser.add_argument("--ranks", type=numbers, default=(2, 4, 8), help="2,4,8")
    parser.add_argument("--sizes", type=numbers, default=(8, 64 << 10, 16 << 20), help="in bytes")
    parser.add_argument("--calls", type=words, help="only these, of tests/repo/faults/calls.py")
    parser.add_argument("--points", type=words, help="only these, of tests/repo/faults/worlds.py")
    parser.add_argument("--every", type=int, default=10, help="in every n-th world rank after rank dies")
    parser.add_argument("--stops", type=int, default=0, help="stop so many ranks, and wake them again")
    parser.add_argument(
        "--detection", type=int, default=0, help="so many kills more for the figures of detection"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--markdown", help="write the table here")
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
