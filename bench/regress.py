"""Is this working tree slower than an older revision? python bench/regress.py BASE [--ratio 1.15]

Builds BASE and the working tree beside each other, runs them in turn, and exits with 1 if the median of
the paired ratios of any call and size is beyond the given one. Contains the building and the verdict; uses
crew and interleave. pip gets what the builds need from the package index.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.calls import CALLS
from bench.common.progress import Progress
from bench.common.tables import aligned, format_bytes, format_us
from bench.peers.contestants import shmring
from bench.peers.crew import Crew
from bench.peers.interleave import Cell, Match, Sample
from bench.peers.probe import Probe, compile_probe

ROOT = Path(__file__).resolve().parents[1]
LAUNCHES = 3
DEFAULT_SIZES = [8, 4 << 10, 64 << 10, 1 << 20, 16 << 20]

Key = tuple[str, int, str, str]  # call, bytes, variant, distance


def key_of(sample: Sample) -> Key:
    return sample.call, sample.nbytes, sample.variant, sample.distance


def build(source: Path, target: Path) -> None:
    """Install the package of a source folder into a folder of its own."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
           "--disable-pip-version-check", "--target", str(target), str(source)]
    subprocess.run(pip, check=True, cwd=target.parent)


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True).stdout


def sources_of(revision: str, folder: Path) -> Path:
    """Return the files of one revision."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", revision))) as archive:
        archive.extractall(folder, filter="data")
    return folder


def sources_as_they_are(folder: Path) -> Path:
    """Copy the files of the working tree, new ones too: building must not touch the tree."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def paired_ratios(samples: Iterable[Sample]) -> dict[Key, list[float]]:
    """Return working tree / base, one ratio for each round in which both were measured at one distance."""
    by_round: dict[tuple[Key, int], dict[str, float]] = defaultdict(dict)
    for sample in samples:
        if sample.distance != "mixed":
            by_round[key_of(sample), sample.round][sample.contestant] = sample.us
    ratios: dict[Key, list[float]] = defaultdict(list)
    for (key, _), us in by_round.items():
        if len(us) == 2:
            ratios[key].append(us["work"] / us["base"])
    return dict(ratios)


def too_slow(ratios: dict[Key, list[float]], limit: float) -> list[Key]:
    return [key for key, values in ratios.items() if statistics.median(values) > limit]


def table(samples: list[Sample], ratios: dict[Key, list[float]], limit: float) -> str:
    rows = [["call", "bytes", "variant", "distance", "base µs", "work µs", "work / base", "rounds", ""]]
    slow = set(too_slow(ratios, limit))
    for key in sorted(ratios):
        us = {name: statistics.median(sample.us for sample in samples
                                      if sample.contestant == name and key_of(sample) == key)
              for name in ("base", "work")}
        call, nbytes, variant, distance = key
        rows.append([call, format_bytes(nbytes), variant, distance,
                     format_us(us["base"]), format_us(us["work"]), f"{statistics.median(ratios[key]):.3f}",
                     str(len(ratios[key])), "TOO SLOW" if key in slow else ""])
    return aligned(rows)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("base", help="the revision to compare with: main, HEAD~1, a commit")
    add("--ratio", type=float, default=1.15, help="work / base at most (%(default)s)")
    add("--ranks", type=int, default=2, help="%(default)s")
    add("--rounds", type=int, default=5, help=f"in each of {LAUNCHES} launches (%(default)s)")
    add("--calls", type=comma_separated(str, list(CALLS)), default=["all_reduce"], help="default all_reduce")
    add("--sizes", type=comma_separated(parse_size), default=DEFAULT_SIZES, help="default 8,4K,64K,1M,16M")
    return parser.parse_args(arguments)


def check_build(crew: Crew, path: Path) -> None:
    ran = Path(crew.versions["file"])
    if not ran.is_relative_to(path):
        raise SystemExit(f"{crew.contestant.name} ran {ran}, not the build in {path}")


def play_launch(builds: dict[str, Path], rounds: range, options: argparse.Namespace, library: Path | None,
                progress: Progress) -> list[Sample]:
    """Run some rounds with the same processes."""
    cpus = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        crews = {}
        for name, path in builds.items():
            crews[name] = stack.enter_context(Crew(shmring(name, path), options.ranks, cpus, library))
            check_build(crews[name], path)
        match = Match(crews, Probe(library), progress.say)
        cells = [Cell(nbytes, False, call) for call in options.calls for nbytes in options.sizes]
        progress.total(LAUNCHES * options.rounds * sum(len(match.entries(cell)) for cell in cells))
        for round_number in rounds:
            for cell in cells:
                for sample in match.play_block(round_number, cell):
                    progress.advance(1, sample.round_trip_ns[1])
        if match.problems:
            raise SystemExit("\n".join(match.problems))
        return match.samples


def measure(builds: dict[str, Path], options: argparse.Namespace, library: Path | None) -> list[Sample]:
    """Launch several times: the place of a process's memory changes its times by some percent for as long as
    it runs."""
    samples: list[Sample] = []
    with Progress("regress") as progress:
        for launch in range(LAUNCHES):
            rounds = range(launch * options.rounds, (launch + 1) * options.rounds)
            samples += play_launch(builds, rounds, options, library, progress)
    return samples


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="shmring-regress-") as name:
        folder = Path(name)
        builds = {"base": folder / "base", "work": folder / "work"}
        build(sources_of(options.base, folder / "base-source"), builds["base"])
        build(sources_as_they_are(folder / "work-source"), builds["work"])
        samples = measure(builds, options, compile_probe(folder))
    ratios = paired_ratios(samples)
    print(table(samples, ratios, options.ratio))
    slow = too_slow(ratios, options.ratio)
    print(f"{len(slow)} of {len(ratios)} beyond {options.ratio:g}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
