"""`shmring tune`: measure the best thresholds for this machine and save them for this user's processes.

Also python -m shmring.tools.tune [--ranks 2,4] [--seconds 120]. Thresholds are tuned one at a time, with the
values found so far for the others. Candidates are timed in turn. A candidate is taken if it is clearly faster
than the built-in value in two trials and takes at most 1.05 times as long in each load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import shmring

from .._config import thresholds, tuning_table
from .._config.settings import Settings
from .._system.limits import usable_cpus
from . import _cli
from ._bench.trials import LEAST_ROUNDS, Call, Load, Timed, trial

_PURPOSE = (
    "Measure the best thresholds for this machine and save them for this user's processes. Takes some "
    "minutes, during which the machine should be idle."
)
KIB, MIB = 1 << 10, 1 << 20
LEAST_S = 4.0  # rounds of a question that has less time are too few
WORTH = 0.97  # a candidate needs at most this part of the present value's time on average
HARMLESS = 1.05  # and at most this part in each load


@dataclass(frozen=True)
class Question:
    """A threshold, its candidates, and the loads that compare them."""

    name: str
    candidates: tuple[int, ...]
    loads: Callable[[int], list[Load]]  # for a number of ranks
    is_for: Callable[[int], bool] = lambda ranks: True  # False: it has no effect among so many ranks


def _share_cpus(ranks: int) -> bool:
    return ranks > usable_cpus()


def _private(call: Call, *sizes: int) -> Callable[[int], list[Load]]:
    return lambda _: [Load(call, nbytes) for nbytes in sizes]


def _in_place(*sizes: int) -> Callable[[int], list[Load]]:
    return lambda _: [Load("all_reduce", nbytes, in_place=True) for nbytes in sizes]


def _read_whole(call: Call, nranks: int) -> list[Load]:
    """Return loads in which a rank that folds whole arrays reads 7 to 56 KiB of the other ranks'."""
    return [Load(call, size * KIB // max(1, nranks - 1)) for size in (7, 12, 20, 30, 42, 56)]


_CHAINED = (96 * KIB, 192 * KIB, 384 * KIB, 1 * MIB)
QUESTIONS = (
    Question(
        "small_nbytes",
        tuple(n * KIB for n in (8, 16, 24, 36, 48, 64)),
        lambda n: _read_whole("all_reduce" if _share_cpus(n) else "reduce", n),
        is_for=lambda n: n > 2 or _share_cpus(n),
    ),
    Question(
        "small_all_reduce_nbytes",
        tuple(n * KIB for n in (4, 6, 8, 16, 24, 36, 48, 64)),
        lambda n: _read_whole("all_reduce", n),
        is_for=lambda n: not _share_cpus(n),
    ),
    Question(
        "one_chunk_nbytes",
        (256 * KIB, 384 * KIB, 512 * KIB, 768 * KIB, 1 * MIB, 2 * MIB),
        _private("all_reduce", 384 * KIB, 768 * KIB, 1 * MIB, 2 * MIB),
    ),
    Question(
        "chunk_nbytes",
        (128 * KIB, 256 * KIB, 512 * KIB, 1 * MIB),
        _private("all_reduce", 8 * MIB, 16 * MIB),
    ),
    Question(
        "cached_most_nbytes",
        (0, *(n * MIB for n in (2, 4, 8, 32)), thresholds.NEVER),
        _in_place(2 * MIB, 16 * MIB, 64 * MIB),
    ),
    Question(
        "cached_chunk_nbytes",
        tuple(n * KIB for n in (48, 64, 96, 128, 192)),
        _in_place(1 * MIB, 2 * MIB, 8 * MIB),
    ),
    Question("depth", (2, 3, 4, 6, 8), _private("all_reduce", 8 * MIB, 16 * MIB)),
    Question(
        "exchange_nbytes",
        (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1 * MIB),
        lambda n: [
            *_private("all_gather", 256 * KIB, 2 * MIB)(n),
            *_private("broadcast", 1 * MIB, 8 * MIB)(n),
        ],
    ),
    Question(
        "far_stream_nbytes",
        (512, 2 * KIB, 8 * KIB, 32 * KIB, thresholds.NEVER),
        _private("all_reduce", 1 * KIB, 4 * KIB, 16 * KIB, 256 * KIB, 4 * MIB),
    ),
    Question(
        "stream_reduced_nbytes",
        (*(n * MIB for n in (1, 3, 8, 16, 64)), thresholds.NEVER),
        lambda n: [
            *_private("all_reduce", 2 * MIB, 8 * MIB, 32 * MIB)(n),
            *(Load("all_reduce", size * MIB, shared=True) for size in (2, 8, 32)),
        ],
    ),
    Question(
        "stream_in_place_nbytes",
        (*(n * MIB for n in (4, 16, 32, 96)), thresholds.NEVER),
        _in_place(8 * MIB, 24 * MIB, 64 * MIB),
    ),
    Question(
        "stream_out_nbytes",
        (*(n * MIB for n in (4, 8, 12, 16, 24, 48)), thresholds.NEVER),
        lambda n: [
            *_private("scan", 8 * MIB, 32 * MIB)(n),
            *(Load("all_gather", nbytes // n) for nbytes in (8 * MIB, 32 * MIB)),
        ],
    ),
    Question(
        "single_copy_scatter_nbytes",
        (*(n * KIB for n in (64, 128, 256, 512, 1024, 2048)), thresholds.NEVER),
        lambda n: [Load("scatter", size * KIB // n) for size in (96, 192, 384, 768, 1536)],
    ),
    Question(
        "chain_nbytes",
        (*(n * KIB for n in (64, 128, 256, 512)), thresholds.NEVER),
        lambda n: _private("reduce", *_CHAINED)(n) + _private("scan", *_CHAINED)(n),
        is_for=_share_cpus,
    ),
    Question(
        "fuse_nbytes",
        tuple(n * KIB for n in (1, 2, 4, 8, 16, 32)),
        _private("all_reduce_many", 1 * KIB, 3 * KIB, 6 * KIB, 12 * KIB, 24 * KIB),
    ),
)


def answers(
    question: Question, candidates: Sequence[int], timed: Iterable[Timed]
) -> dict[str, tuple[int, float]]:
    """Return by distance the best value and its time as a part of the present value's time.

    The present value is the first candidate. A threshold that must be equal for near and far uses all rounds.
    """
    found = {}
    of_both = question.name in thresholds.OF_BOTH_DISTANCES
    for distance in ("any",) if of_both else ("near", "far"):
        ratios = [_ratios(load, distance) for load in timed]
        if not all(ratios):
            continue
        scores = [statistics.geometric_mean(of_candidate) for of_candidate in zip(*ratios, strict=True)]
        harmless = [at for at in range(len(scores)) if all(row[at] <= HARMLESS for row in ratios)]
        best = min(harmless, key=lambda at: scores[at])
        found[distance] = (candidates[best], scores[best]) if scores[best] <= WORTH else (candidates[0], 1.0)
    return found


def _ratios(timed: Timed, distance: str) -> list[float]:
    """Return each candidate's time relative to the first: medians over a distance's rounds, [] if too few."""
    rows = [at for at, seen in enumerate(timed.distances) if seen is not None and distance in ("any", seen)]
    if len(rows) < LEAST_ROUNDS:
        return []
    seconds = timed.seconds[rows]
    return [float(ratio) for ratio in np.median(seconds / seconds[:, :1], axis=0)]


@dataclass(frozen=True)
class Answer:
    """The result for a threshold: the built-in value, the value to take, and the ratio of their times."""

    ranks: int
    distance: str
    name: str
    built_in: int
    taken: int
    part_of_time: float

    def __str__(self) -> str:
        built_in, taken = _value_text(self.built_in), _value_text(self.taken)
        found = f"{taken} stays"
        if self.taken != self.built_in:
            found = f"{taken} takes {self.part_of_time:.2f} of the time with {built_in}"
        return f"{self.ranks} ranks, {self.distance}: {self.name}: {found}"


def _value_text(value: int) -> str:
    """Return a threshold as a person reads it."""
    if value >= thresholds.NEVER:
        return "never"
    return _cli.in_words(value) if value >= KIB else str(value)


def tune(
    ranks: int, questions: Sequence[Question], seconds: float, bar: _cli.Bar
) -> tuple[tuning_table.Table, list[Answer]]:
    """Return the table for a number of ranks: only values that beat the built-in value in two trials.

    The questions share `seconds`, which include the start of the ranks. If the shares would be too short, the
    last questions are not asked.
    """
    table: tuning_table.Table = {distance: {} for distance in tuning_table.DISTANCES}
    chosen = []
    end = time.monotonic() + seconds
    for at, question in enumerate(questions):
        left = end - time.monotonic()
        share = min(left, max(left / (len(questions) - at), LEAST_S))
        found = _answered(ranks, question, table, share) if left > 0 else {}
        present = thresholds.built_in(ranks)[question.name]
        for distance, (value, part) in found.items():
            if value != present:
                table[distance][question.name] = value
            chosen.append(Answer(ranks, distance, question.name, present, value, part))
            bar.write_line(str(chosen[-1]))
        if not found:
            text = f"{_value_text(present)} stays, {'too few rounds' if left > 0 else 'no time left'}"
            bar.write_line(f"{ranks} ranks: {question.name}: {text}; give more --seconds")
        bar.advance()
    return {distance: values for distance, values in table.items() if values}, chosen


def _answered(
    ranks: int, question: Question, table: tuning_table.Table, seconds: float
) -> dict[str, tuple[int, float]]:
    """Return the answers by distance; none after too few rounds."""
    begin = time.monotonic()
    present = thresholds.built_in(ranks)[question.name]
    others = [value for value in question.candidates if value != present]
    found = _ask(ranks, question, [present, *others], table, begin + seconds * 2 / 3)
    best = sorted({value for value, _ in found.values()} - {present})
    # The best of many candidates owes something to chance, so it must win a second trial alone.
    return _ask(ranks, question, [present, *best], table, begin + seconds) if best else found


def _beside(question: Question) -> dict[str, int]:
    """Return other thresholds that force messages onto the path that the question concerns."""
    if question.name in ("chunk_nbytes", "depth", "exchange_nbytes"):  # thresholds of the staging buffer
        return {"cached_most_nbytes": 0, "single_copy_measured": 0, "single_copy_nbytes": thresholds.NEVER}
    if question.name == "stream_out_nbytes":  # the kernel does not use it in single copies
        return {"single_copy_measured": 0, "single_copy_nbytes": thresholds.NEVER}
    if question.name == "single_copy_scatter_nbytes":  # has no effect on a scatter that is measured
        return {"single_copy_measured": 0}
    return {}


def _ask(
    ranks: int, question: Question, candidates: Sequence[int], table: tuning_table.Table, until: float
) -> dict[str, tuple[int, float]]:
    """Return the answers from communicators that differ only in the candidate."""
    with tempfile.TemporaryDirectory(prefix="shmring-tune-") as folder:
        paths = []
        for value in candidates:
            paths.append(str(Path(folder, f"{value}.json")))
            tried = {distance: dict(values) for distance, values in table.items()}
            for distance in ("near", "far"):
                tried[distance] |= _beside(question)
            for distance in ("any",) if question.name in thresholds.OF_BOTH_DISTANCES else ("near", "far"):
                tried[distance][question.name] = value
            tuning_table.save(Path(paths[-1]), {ranks: tried}, thresholds.LIMITS)
        worlds = [shmring.world(ranks) for _ in candidates]
        results: list[list[Timed]] = shmring.spawn(
            trial, ranks, (worlds, paths, question.loads(ranks), until)
        )
    return answers(question, candidates, results[0])


# ---- the command line -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this module as a program and return the exit status."""
    parser = _filled(_cli.Parser(prog="shmring tune", description=_PURPOSE))
    return run(parser.parse_args(arguments))


def add_to(commands: Any) -> None:
    purpose = "measure the best thresholds for this machine and use them"
    _filled(commands.add_parser("tune", help=purpose, description=_PURPOSE))


def run(options: argparse.Namespace) -> int:
    """Measure, print and save; return the exit status."""
    try:
        _check(options)
        return _run(options)
    except BrokenPipeError:
        raise  # the reader of the output has ended, as `head` does
    except (shmring.Error, ValueError, OSError) as error:
        return _cli.complain("shmring tune", " ".join(str(error).split()), _cli.BAD_USAGE)
    except KeyboardInterrupt:
        return _cli.complain("shmring tune", "interrupted; nothing is written", _cli.INTERRUPTED)


def _check(options: argparse.Namespace) -> None:
    """Check the options before the minutes of measuring, not after."""
    Settings.from_environment()
    path: Path = options.output
    if options.dry_run:
        return
    if path == tuning_table.default_path() and not path.is_absolute():
        raise ValueError("there is no home folder for the table; give --output")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give --output a file in it")
    try:
        tempfile.TemporaryFile(dir=next(one for one in path.absolute().parents if one.exists())).close()
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror}; give another --output, or --dry-run"
        raise ValueError(text) from error


def _run(options: argparse.Namespace) -> int:
    asked = {question.name for question in QUESTIONS if not options.only or question.name in options.only}
    questions = {
        ranks: [question for question in QUESTIONS if question.name in asked and question.is_for(ranks)]
        for ranks in options.ranks
    }
    total = sum(map(len, questions.values()))
    tables = {} if options.dry_run else _kept_so_far(options.output)
    bar = _cli.Bar(total, "question", sys.stderr if options.json else sys.stdout)
    answered: list[Answer] = []
    with closing(bar):
        for ranks in options.ranks:
            table, chosen = tune(ranks, questions[ranks], options.seconds, bar)
            answered += chosen
            for distance, values in tables.get(ranks, {}).items():
                kept = {name: value for name, value in values.items() if name not in asked}
                if kept:
                    table[distance] = kept | table.get(distance, {})
            tables[ranks] = table
        bar.write_line(summary(answered, total, kept=not options.dry_run))
    if not options.dry_run:
        tuning_table.save(options.output, tables, thresholds.LIMITS)
    if options.json:
        written = None if options.dry_run else str(options.output)
        found = {"machine": tuning_table.machine(), "answers": [asdict(answer) for answer in answered]}
        _cli.print_json(found | {"tables": tables, "written": written})
    elif not options.dry_run:
        used = options.output == tuning_table.default_path()
        how = "in use from now on; delete it to go back" if used else "set SHMRING_TUNING to it to use it"
        print(f"written to {options.output}: {how}")
    return 0


def summary(answered: Sequence[Answer], asked: int, *, kept: bool) -> str:
    """Return what the answers to `asked` questions mean for the user, in one line."""
    measured = len({(one.ranks, one.name) for one in answered})
    better = [one for one in answered if one.taken != one.built_in]
    count = len({(one.ranks, one.name) for one in better})
    text = f"{count} of {measured} values {'are' if kept else 'would be'} better"
    if better:
        text += ": " + ", ".join(
            f"{one.name} {_value_text(one.taken)} instead of {_value_text(one.built_in)} "
            f"({one.ranks} ranks, {one.distance})"
            for one in better
        )
    elif measured:
        text += ": the built-in values stay"
    if better and not kept:
        ranks = ",".join(dict.fromkeys(str(one.ranks) for one in better))
        names = ",".join(dict.fromkeys(one.name for one in better))
        text += f"; keep {'it' if count == 1 else 'them'} with: shmring tune --ranks {ranks} --only {names}"
    if measured < asked:
        text += f"; {asked - measured} could not be measured, give more --seconds"
    return text


def _filled(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    names = [question.name for question in QUESTIONS]
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--ranks",
        type=_numbers,
        default=sorted({2, min(max(cpus, 2), 64), min(2 * cpus, 64)}),
        help="numbers of ranks to tune for, as in 2,4 (default: 2, the number of CPUs, twice that)",
    )
    parser.add_argument(
        "--seconds",
        type=_cli.seconds,
        default=120.0,
        help="time for each number of ranks; if it is short, some stay unmeasured (default: %(default)g)",
    )
    parser.add_argument("--only", type=_names(names), default=[], help=f"some of {', '.join(names)}")
    parser.add_argument(
        "--output", type=Path, default=tuning_table.default_path(), help="default: %(default)s"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the best values and write nothing")
    _cli.add_json(parser, "what was measured and taken")
    parser.set_defaults(run=run)
    return parser


def _numbers(text: str) -> list[int]:
    numbers = [int(word) if word.isascii() and word.isdigit() else 0 for word in text.split(",")]
    if not all(2 <= number <= 1024 for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers of ranks from 2 to 1024, as in 2,4"
        )
    return numbers


def _names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        unknown = [word for word in words if word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed)}")
        return words

    return parse


def _kept_so_far(path: Path) -> dict[int, tuning_table.Table]:
    """Return the tables that the file holds so far; none if the file is unusable."""
    try:
        return tuning_table.load(path, thresholds.LIMITS)
    except tuning_table.Unusable:
        return {}


if __name__ == "__main__":
    sys.exit(main())
