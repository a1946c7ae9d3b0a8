"""The command line of shmrun: its options, and a one-line error for each wrong use."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import sys
from typing import Any, NoReturn

from .. import __version__
from .._bootstrap.join import check_nprocs
from .._config.settings import parse_address, whole_number
from .._system import cpu_topology, cpulist
from .._system.limits import usable_cpus

BAD_USAGE = 2
_GRACE_S = 5.0  # time from SIGTERM to SIGKILL


def print_message(message: str) -> None:
    """Print a line of shmrun's own."""
    print_line(f"shmrun: {message}")


def print_line(line: str) -> None:
    """Write a line to stderr; ignore errors. Not by sys.stderr, which buffers what it cannot write."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def complain(message: str) -> int:
    """Print an error in the command line; return the exit code."""
    print_message(message)
    return BAD_USAGE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(complain(f"{message} (usage: shmrun -n 4 script.py ...; more with --help)"))


class _Alias(argparse.Action):
    """Another name of a required option."""

    def __init__(self, *arguments: Any, of: argparse.Action, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._of = of

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        value: Any,
        name: str | None = None,
    ) -> None:
        setattr(options, self.dest, value)
        self._of.required = False


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse and check the options; `counts` becomes the number of ranks on each host."""
    parser = _parser()
    options = parser.parse_args(argv)
    counts = options.counts
    try:
        _count_ranks(options)
        _check_output(options)
        _check_restart(options)
    except ValueError as error:
        parser.error(str(error))
    if not options.module and _is_python(options.script):
        without = " ".join(["shmrun -n", counts, *itertools.dropwhile(_is_pythons_own, options.arguments)])
        parser.error(f"shmrun starts Python itself: leave out {options.script!r}, as in {without}")
    if not options.module and not os.path.exists(options.script):
        parser.error(f"there is no script {options.script!r}")
    return options


def _is_python(script: str) -> bool:
    """Return whether SCRIPT is Python itself, as in other launchers' `-n 4 python script.py`."""
    is_named_so = re.fullmatch(r"python[\d.]*", os.path.basename(script)) is not None
    return is_named_so and (os.access(script, os.X_OK) or not os.path.exists(script))


def _is_pythons_own(argument: str) -> bool:
    return argument.startswith("-") and argument != "-m"


def _parser() -> _Parser:
    parser = _Parser(
        prog="shmrun",
        allow_abbrev=False,
        usage="shmrun -n RANKS [options] [-m] SCRIPT [ARGUMENT ...]",
        description="Run a Python script as several ranks on this host; shmring.init() joins them. For "
        "several hosts run it on each, with the same --nnodes, --rdzv, -n and SHMRING_KEY, and its own "
        "--node-rank.",
        epilog="The exit code is that of the first rank that fails (128 + N for signal N); the last "
        "line that is printed names it and its error. Ctrl-C, SIGTERM and SIGHUP are forwarded to the ranks "
        "and end the run.",
    )
    counts = parser.add_argument(
        "-n",
        dest="counts",
        required=True,
        metavar="RANKS",
        help="ranks on each host, or `auto`: one for each usable CPU (for each core with --bind "
        "core); for several hosts also a number for each, as in 2,1,3. Other launchers' -np, --np and "
        "--nproc-per-node mean the same",
    )
    names = ("-np", "--np", "--nproc-per-node", "--nproc_per_node")
    parser.add_argument(*names, dest="counts", action=_Alias, of=counts, help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"shmring {__version__}")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "--mpi4py",
        action="store_true",
        help="let `import mpi4py` mean shmring's stand-in, so that a program for mpi4py runs without MPI",
    )
    parser.add_argument("script", metavar="SCRIPT")
    rest = parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER)
    rest.required = False  # argparse would name it among the arguments that are missing
    _add_output(parser.add_argument_group("output"))
    _add_failures_and_cpus(parser.add_argument_group("failures and CPUs"))
    hosts = parser.add_argument_group("several hosts")
    hosts.add_argument("--nnodes", type=_whole, metavar="HOSTS", help="number of hosts (default: one)")
    hosts.add_argument("--node-rank", type=_whole, metavar="INDEX", help="index of this host: 0 to HOSTS - 1")
    hosts.add_argument("--rdzv", metavar="HOST:PORT", help="where host 0 listens for the others")
    return parser


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--no-prefix",
        dest="prefix",
        action="store_false",
        help="show lines unchanged, without the rank in front",
    )
    group.add_argument(
        "--ranks",
        metavar="RANKS",
        help="show the output of these ranks only, as in 0 or 0,2-3; the rank that fails is reported anyway",
    )
    group.add_argument(
        "--collapse",
        action="store_true",
        help="show a line that several ranks print within 0.2 s once, with these ranks in front: 0-3|",
    )
    group.add_argument(
        "--log-dir",
        metavar="DIR",
        help="write the output of the ranks to DIR/rank-0.out, DIR/rank-0.err and so on, and show only this "
        "host's first rank (or --ranks); DIR is made; files of an earlier run in it are an error",
    )
    group.add_argument("--tee", action="store_true", help="with --log-dir: also show the output of all ranks")
    group.add_argument(
        "--report", metavar="FILE", help="at the end write to FILE, as JSON, how each rank ended"
    )


def _add_failures_and_cpus(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--grace",
        type=_seconds,
        default=_GRACE_S,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL for the others when a rank fails (default %(default)g)",
    )
    group.add_argument(
        "--keep-going",
        action="store_true",
        help="let the others go on when a rank fails (see Comm.shrink); the exit code is 0 if any succeeds",
    )
    group.add_argument(
        "--restart",
        type=_whole,
        default=0,
        metavar="TIMES",
        help="when a rank fails, end all ranks and start them again as a new world, at most TIMES times; "
        "SHMRING_RESTART tells the script the number of restarts. Not after Ctrl-C; for one host only",
    )
    group.add_argument(
        "--bind",
        choices=("none", "core", "numa"),
        default="none",
        help="bind each rank to its share of the usable cores, consecutive ranks under one cache (core), or "
        "to the cores of one NUMA node (numa); with more ranks than cores `core` binds none",
    )


def _count_ranks(options: argparse.Namespace) -> None:
    """Turn -n into the number of ranks on each host, and check the options that identify this host."""
    texts = options.counts.split(",")
    is_said = options.nnodes is not None
    options.nnodes = len(texts) if options.nnodes is None else options.nnodes
    if options.nnodes < 1:
        raise ValueError(f"--nnodes is {options.nnodes}; it must be 1 or more")
    if len(texts) not in (1, options.nnodes):
        raise ValueError(
            f"--nnodes is {options.nnodes} but -n is {options.counts}: give one number, or one for each host"
        )
    if options.rdzv is not None and not is_said and len(texts) == 1:
        raise ValueError("--rdzv is for several hosts: give --nnodes, the same on all of them")
    if options.nnodes > 1:
        if "auto" in texts:
            raise ValueError("-n auto may differ from host to host: give the same numbers on all of them")
        if options.rdzv is None or options.node_rank is None:
            raise ValueError("several hosts need --rdzv HOST:PORT and, on each host, its own --node-rank")
        parse_address("--rdzv", options.rdzv)
    options.node_rank = options.node_rank or 0
    if not 0 <= options.node_rank < options.nnodes:
        raise ValueError(
            f"--node-rank is {options.node_rank}; allowed: 0 to {options.nnodes - 1}, as --nnodes is "
            f"{options.nnodes}"
        )
    options.counts = [_nprocs(text, options.bind) for text in texts] * (options.nnodes // len(texts))
    check_nprocs(sum(options.counts))


def _check_output(options: argparse.Namespace) -> None:
    """Turn --ranks into the list of shown ranks, None for all, and refuse conflicting options."""
    if options.tee and options.log_dir is None:
        raise ValueError("--tee shows what --log-dir writes to files: give --log-dir DIR")
    if options.tee and options.ranks is not None:
        raise ValueError("--tee shows all ranks, --ranks some: give one of them")
    if options.collapse and not options.prefix:
        raise ValueError("--collapse shows the ranks of a line, --no-prefix does not: give one of them")
    if options.ranks is not None:
        options.ranks = _ranks(options.ranks, sum(options.counts))
    elif options.log_dir is not None and not options.tee:
        options.ranks = [sum(options.counts[: options.node_rank])]


def _check_restart(options: argparse.Namespace) -> None:
    if options.restart and options.nnodes > 1:
        raise ValueError(
            "--restart is for one host: shmrun cannot restart the ranks of other hosts (the launcher of all "
            "hosts can, such as Slurm or Kubernetes)"
        )
    if options.restart and options.keep_going:
        raise ValueError("--restart ends all ranks when one fails, --keep-going does not: give one of them")


def _nprocs(text: str, bind: str) -> int:
    if text == "auto":
        cores = len(cpu_topology.cores_of(cpu_topology.read(os.sched_getaffinity(0))))
        return min(cores, usable_cpus()) if bind == "core" else usable_cpus()
    number = whole_number(text)
    if number is None:
        raise ValueError(f"-n is {text!r}, which is not a number of ranks: give one, such as 4, or auto")
    try:
        return check_nprocs(number)
    except ValueError as error:
        raise ValueError(f"-n: {error}") from None


def _ranks(text: str, size: int) -> list[int]:
    try:
        ranks = cpulist.parse(text)
    except ValueError as error:
        raise ValueError(f"--ranks is {text!r}: {error}") from None
    if ranks[-1] >= size:
        raise ValueError(f"--ranks is {text!r}; allowed: 0 to {size - 1}, as there are {size}")
    return ranks


def _whole(text: str) -> int:
    number = whole_number(text)
    if number is None or number > 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, such as 3")
    return number


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < 1e6:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, such as 0.5")
