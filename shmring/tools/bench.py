"""`shmring bench`: how long a collective takes here, by size, as nccl-tests and the OSU benchmarks show it.

Owns the command line, who the ranks are, and what comes of the figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import shmring

from .._bootstrap.environment import find_job
from .._config.settings import ALGORITHMS, Settings, whole_number
from .._system.limits import usable_cpus
from . import _cli
from ._bench import plot, rank
from ._bench.calls import FORMS, NUMPY_DTYPES, OPS, OTHER_DTYPES, Job, Turn, dtype_named
from ._bench.compare import SCHEMA, Others, Unusable, curves_of, load
from ._bench.table import Table

INTERRUPTED = 130
_WHY_ABORTED = "shmring bench was interrupted"
_MOST_RANKS = 4096
_DEFAULT_SIZES, _DEFAULT_RANKS = "8:64M", 2

_COLUMNS = """\
The table:
  size, count   of the larger array of a call: of what all_gather and gather return, of what scatter and
                reduce_scatter take. Where ranks have equal parts of it, it is a multiple of them.
  min avg p50   us of one call. A sample is a barrier, then as many calls in a row as take some 0.2 ms (5 ms
  p99           with more ranks than CPUs), divided by their number, on the rank on which that takes longest.
                These are the least, the mean and the percentiles of the samples.
  algbw         size / p50, in GB/s (10^9 bytes a second): a mean tells more of what else the machine does.
  busbw         what has to go in or out of each rank at least, as nccl-tests has it: algbw times 2(n-1)/n
                for all_reduce, (n-1)/n for all_gather, gather, scatter, reduce_scatter, all_to_all, else 1.
  copy          us in which all ranks copy as many bytes of their own at once, measured in the same run.
  #wrong        items, of all ranks together, that are not what NumPy makes of the same input, in a call
                before the timed ones and one after. With any the exit status is 1.
ping_pong: rank 0 sends to rank 1 and receives as much. There and back is one call; busbw counts both ways.
all_reduce_many: 16 arrays that have the size together.

Started by shmrun, torchrun, mpiexec or srun it measures their ranks, over several hosts too, and rank 0
prints. Else it starts ranks of its own. Each is bound to one CPU of those it may use.
Ctrl-C ends it with what there is, and status 130.
"""


def add_to(commands: Any) -> None:
    """Add this command to a parser's."""
    parser = commands.add_parser(
        "bench",
        help="time a collective on this machine, by size, and check its results",
        description="Time a collective by size: latency, bandwidth, the limit that copying sets, wrong items",
        epilog=_COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("call", nargs="?", choices=FORMS, default="all_reduce", metavar="collective", help=", ".join(FORMS))
    add("-n", type=_ranks, metavar="RANKS", help="how many to start, or auto: one for each usable CPU (2)")
    add("--sizes", metavar="B:E", help=f"bytes from B to E, or a list, as in 8,4K,1M ({_DEFAULT_SIZES})")
    add("--factor", type=_cli.at_least(2), metavar="F", help="from one size to the next (2)")
    add("--dtype", choices=NUMPY_DTYPES + OTHER_DTYPES, metavar="TYPE", help="float32 and so on (float32)")
    add("--op", choices=OPS, metavar="OP", help=f"{', '.join(OPS)} (sum)")
    add("--root", type=_cli.at_least(0), metavar="R", help="rank that has it, or gets it (0)")
    add("--algorithm", metavar="A", help=f"of all_reduce: {', '.join(ALGORITHMS)}")
    add("--async", dest="async_op", action="store_true", help="issue it in the background, and wait for it")
    add("--plan", action="store_true", help="call a plan of it")
    add("--zero-copy", action="store_true", help="arrays that all ranks of the host map: comm.empty")
    yes_or_no = argparse.BooleanOptionalAction
    add("--inplace", action=yes_or_no, help="the result replaces the input (only broadcast does by itself)")
    add("--written", action="store_true", help="write the input before each call; the writing is taken off")
    add("--check", action=yes_or_no, default=True, help="compare results with NumPy's (yes)")
    add("--seconds", type=_cli.seconds, default=0.3, metavar="S", help="of calls for each size (0.3)")
    add("--iters", type=_cli.at_least(1), metavar="N", help="samples for each size, in place of --seconds")
    add("--output", type=Path, metavar="FILE", help="write JSON there, too")
    add("--plot", type=Path, metavar="FILE", help="draw latency and bandwidth: PNG, SVG, PDF")
    help_ = "figures beside these: JSON of an earlier run's --output, or of bench/peers/peers.py --json"
    add("--compare", type=Path, action="append", default=[], metavar="FILE", help=help_)
    _cli.add_json(parser, "all of it, in place of the table,")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure; the exit status."""
    try:
        return _measure(arguments, _job(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (shmring.Error, MemoryError, OSError) as error:
        return _cli.complain("shmring bench", _one_line(error))


def _measure(arguments: argparse.Namespace, job: Job) -> int:
    try:
        launched = find_job(Settings.from_environment(), os.environ)
        comm = shmring.init() if launched else None
    except ValueError as error:
        _refuse(str(error))
    if comm is None:
        return _with_own_ranks(arguments, job)
    with comm:
        return _launched(comm, arguments, job)


def _launched(comm: shmring.Comm, arguments: argparse.Namespace, job: Job) -> int:
    """Files are rank 0's: another host may have none of these folders. Where it refuses, all end."""
    others: list[Others] = []
    refused = False
    if comm.rank == 0:
        try:
            others = _prepared(arguments, job, comm.size)
        except SystemExit:  # it has said why
            refused = True
    if comm.broadcast_object(refused):
        return _cli.BAD_USAGE
    report = _rank(comm, job, others, arguments.json)
    return _finish(arguments, others, report) if comm.rank == 0 else _status(report)


def _with_own_ranks(arguments: argparse.Namespace, job: Job) -> int:
    nranks = arguments.n or _DEFAULT_RANKS
    others = _prepared(arguments, job, nranks)
    with _Forwarding() as interrupt:
        try:
            reports = shmring.spawn(_rank, nranks, (job, others, arguments.json))
        except shmring.Error:
            if interrupt.came:  # before they had begun
                return INTERRUPTED
            raise
    return _finish(arguments, others, reports[0])


def _finish(arguments: argparse.Namespace, others: Sequence[Others], report: dict[str, Any]) -> int:
    """What comes of the figures, on rank 0 or in the process that started the ranks."""
    if report["rows"]:
        curves = curves_of(others, report["ranks"], report["distance"])
        report["compared"] = {curve.label: curve.us for curve in curves}
        if arguments.json:
            _cli.print_json(report)
        if arguments.output:
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
        if arguments.plot:
            plot.draw(report, curves, arguments.plot)
    wrong = sum(row["wrong"] or 0 for row in report["rows"])
    if wrong:
        _cli.complain("shmring bench", f"{wrong} items are wrong")
    return _status(report)


def _status(report: dict[str, Any]) -> int:
    if report["interrupted"]:
        return INTERRUPTED
    return int(any(row["wrong"] for row in report["rows"]))


# ---- the ranks -------------------------------------------------------------------------------------------


def _rank(comm: shmring.Comm, job: Job, others: Sequence[Others], quiet: bool) -> dict[str, Any]:
    """All that there is; table, files and JSON are rank 0's."""
    signal.signal(signal.SIGINT, _interrupt_once)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[comm.local_rank % len(cpus)]})
    table = Table(job, others, lines=comm.rank == 0 and not quiet, bar=comm.rank == 0)
    facts: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        facts = rank.facts(comm, job)
        table.begin(facts)
        for row in rank.rows(comm, job, crowded=facts["crowded"]):
            rows.append(row)
            table.row(row)
    except (KeyboardInterrupt, shmring.Aborted) as error:
        if isinstance(error, shmring.Aborted) and error.reason != _WHY_ABORTED:
            raise
        comm.abort(_WHY_ABORTED)  # the others may not have heard of it
        interrupted = True
    finally:
        table.end()
    head = {"program": "shmring bench", "schema": SCHEMA, **facts, "options": asdict(job)}
    return head | {"interrupted": interrupted, "rows": rows}


def _interrupt_once(_number: int, _frame: FrameType | None) -> NoReturn:
    """A terminal and who started the ranks both tell them: the second one must not break the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Forwarding:
    """While ranks run, Ctrl-C is for them: they come back with what they have. A second one ends them."""

    def __init__(self) -> None:
        self.came = False
        self._pid = os.getpid()

    def __enter__(self) -> _Forwarding:
        self._before = signal.signal(signal.SIGINT, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _forward(self, _number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a rank that was forked, and has not begun: it has nothing to tell
            os._exit(INTERRUPTED)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.came = True
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signal.SIGINT)


# ---- the command line ------------------------------------------------------------------------------------


def _refuse(text: str) -> NoReturn:
    text = f"{text} (more with shmring bench --help)"
    raise SystemExit(_cli.complain("shmring bench", text, _cli.BAD_USAGE))


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _job(arguments: argparse.Namespace) -> Job:
    call, form = arguments.call, FORMS[arguments.call]
    bare = call == "barrier"
    meaningless = {
        "--op": arguments.op and not form.reduces,
        "--root": arguments.root is not None and not form.rooted,
        "--algorithm": arguments.algorithm and call != "all_reduce",
        "--plan": arguments.plan and not form.plans,
        "--inplace": arguments.inplace and not form.in_place,
        "--sizes": bare and arguments.sizes,
        "--factor": arguments.factor and (bare or ":" not in (arguments.sizes or _DEFAULT_SIZES)),
        "--dtype": bare and arguments.dtype,
        "--zero-copy": bare and arguments.zero_copy,
        "--written": bare and arguments.written,
        "--plot": bare and arguments.plot,
    }
    for flag, given in meaningless.items():
        if given:
            sized = "a list of sizes" if flag == "--factor" and not bare else call
            _refuse(f"{flag} has no meaning for {sized}: leave it out")
    dtype = arguments.dtype or "float32"
    if dtype in OTHER_DTYPES:
        _cli.need("ml_dtypes", "dtypes", f"--dtype {dtype}")
    job = Job(
        call=call,
        sizes=(0,) if bare else _sizes(arguments.sizes or _DEFAULT_SIZES, arguments.factor or 2),
        dtype=dtype,
        op=arguments.op or "sum",
        root=arguments.root or 0,
        algorithm=arguments.algorithm,
        async_op=arguments.async_op,
        plan=arguments.plan,
        zero_copy=arguments.zero_copy,
        in_place=call == "broadcast" if arguments.inplace is None else arguments.inplace,
        written=arguments.written,
        check=arguments.check,
        seconds=arguments.seconds,
        samples=arguments.iters,
    )
    _rehearse(job)
    return job


def _rehearse(job: Job) -> None:
    """The call by a rank alone, so that what it refuses is known before any rank is started."""
    itemsize = dtype_named(job.dtype).itemsize
    wrong = next((nbytes for nbytes in job.sizes if nbytes % itemsize), None)
    if wrong is not None:
        _refuse(f"--sizes: {wrong} bytes are no multiple of the {itemsize} of an item of {job.dtype}")
    if job.call == "ping_pong":
        return
    try:
        with shmring.init(shmring.world(1), 0) as comm:
            Turn(comm, replace(job, root=0), 1).call()
    except (TypeError, ValueError) as error:
        _refuse(str(error))


def _prepared(arguments: argparse.Namespace, job: Job, nranks: int) -> list[Others]:
    """The figures to stand beside it, once nothing is wrong with files and the number of ranks."""
    try:
        others = [load(path, job) for path in dict.fromkeys(arguments.compare)]  # each once
    except Unusable as error:
        _refuse(str(error))
    _check_files(arguments)
    _check_ranks(arguments, job, others, nranks)
    return others


def _check_ranks(arguments: argparse.Namespace, job: Job, others: Sequence[Others], nranks: int) -> None:
    problem = None
    if arguments.n is not None and arguments.n != nranks:
        counted = f"{nranks} rank{'' if nranks == 1 else 's'}"
        problem = f"-n {arguments.n}, but the launcher has started {counted}: leave -n out"
    elif job.call == "ping_pong" and nranks < 2:
        problem = "ping_pong needs 2 ranks or more: give another -n"
    elif job.root >= nranks:
        problem = f"--root {job.root} of {nranks} ranks: give one of 0 to {nranks - 1}"
    for one in others:
        if nranks not in one.ranks:
            known = ", ".join(map(str, sorted(one.ranks)))
            problem = problem or f"{one.path} has figures of {known} ranks, not of {nranks}"
    if problem:
        _refuse(problem)


def _check_files(arguments: argparse.Namespace) -> None:
    checks = (("--output", arguments.output, _cli.check_writable), ("--plot", arguments.plot, plot.check))
    for flag, path, check in checks:
        if path is not None:
            try:
                check(path)
            except ValueError as error:
                _refuse(f"{flag} {error}")


def _sizes(text: str, factor: int) -> tuple[int, ...]:
    try:
        return _cli.sizes(text, factor)
    except argparse.ArgumentTypeError as error:
        _refuse(f"--sizes: {error}")


def _ranks(text: str) -> int:
    if text == "auto":
        return usable_cpus()
    number = whole_number(text)
    if number is None or not 1 <= number <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: give 1 to {_MOST_RANKS}, or auto")
    return number
