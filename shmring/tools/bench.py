"""`shmring bench`: time a collective by size and print a table like nccl-tests and the OSU benchmarks.

This file has the command line, starts or joins the ranks, and writes the figures.
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
from .._config import optional_deps
from .._config.settings import ALGORITHMS, MAX_RANKS, Settings, whole_number
from .._system.limits import usable_cpus
from . import _cli
from ._bench import plot, rank
from ._bench.calls import FORMS, NUMPY_DTYPES, OPS, OTHER_DTYPES, Job, Turn, dtype_named
from ._bench.compare import SCHEMA, Others, Unusable, curves_of, load
from ._bench.table import Table

_WHY_ABORTED = "shmring bench was interrupted"
_DEFAULT_SIZES, _DEFAULT_RANKS = "8:64M", 2

_COLUMNS = """\
The table:
  size, count   of the larger array of a call: the result of all_gather and gather, the input of scatter
                and reduce_scatter. If each rank has an equal part, count is a multiple of the ranks.
  min avg p50   us of one call: minimum, mean and percentiles of the samples. For a sample the ranks pass a
  p99           barrier, then make calls in a row for some 0.2 ms (5 ms with more ranks than CPUs). The sample
                is the time on the slowest rank divided by the number of calls.
  algbw         size / p50, in GB/s (10^9 bytes a second). Other load affects a mean more than the median.
  busbw         the least traffic in or out of each rank, as nccl-tests defines it: algbw times 2(n-1)/n
                for all_reduce, (n-1)/n for all_gather, gather, scatter, reduce_scatter, all_to_all, else 1.
  copy          us in which all ranks at once copy as many bytes of private memory, measured in the same run.
  #wrong        items of all ranks that differ from NumPy's result, in one call before the timed calls and
                one after. If there are any, the exit status is 1.
ping_pong: rank 0 sends to rank 1 and receives as much. A round trip is one call; busbw counts both ways.
all_reduce_many: 16 arrays whose sizes sum to the given size.

Under shmrun, torchrun, mpiexec or srun this command measures the launcher's ranks, also over several hosts,
and rank 0 prints. Otherwise it starts ranks of its own. Each rank is bound to one of its usable CPUs.
Ctrl-C ends the run with the figures so far and exit status 130.
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time a collective on this machine, by size, and check its results",
        description="Time a collective by size: latency, bandwidth, time of a plain copy, wrong items",
        epilog=_COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("call", nargs="?", choices=FORMS, default="all_reduce", metavar="collective", help=", ".join(FORMS))
    add("-n", type=_ranks, metavar="RANKS", help="ranks to start, or auto: one for each usable CPU (2)")
    add("--sizes", metavar="B:E", help=f"bytes from B to E, or a list, as in 8,4K,1M ({_DEFAULT_SIZES})")
    add("--factor", type=_cli.at_least(2), metavar="F", help="factor between two sizes (2)")
    add("--dtype", choices=NUMPY_DTYPES + OTHER_DTYPES, metavar="TYPE", help="float32 and so on (float32)")
    add("--op", choices=OPS, metavar="OP", help=f"{', '.join(OPS)} (sum)")
    add("--root", type=_cli.at_least(0), metavar="R", help="root rank of the collective (0)")
    add("--algorithm", metavar="A", help=f"algorithm of all_reduce: {', '.join(ALGORITHMS)}")
    add("--async", dest="async_op", action="store_true", help="issue it in the background and wait for it")
    add("--plan", action="store_true", help="time a plan of the call")
    add("--zero-copy", action="store_true", help="arrays that all ranks of the host map: comm.empty")
    yes_or_no = argparse.BooleanOptionalAction
    add("--inplace", action=yes_or_no, help="the result replaces the input (only broadcast does by itself)")
    add("--written", action="store_true", help="write the input before each call; subtract that time")
    add("--check", action=yes_or_no, default=True, help="compare results with NumPy's (yes)")
    add("--seconds", type=_cli.seconds, default=0.3, metavar="S", help="time for each size (0.3)")
    add("--iters", type=_cli.at_least(1), metavar="N", help="samples for each size, in place of --seconds")
    add("--output", type=Path, metavar="FILE", help="also write JSON to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw latency and bandwidth: PNG, SVG, PDF")
    help_ = "show figures of another run: JSON of --output, or of bench/peers/peers.py --json"
    add("--compare", type=Path, action="append", default=[], metavar="FILE", help=help_)
    _cli.add_json(parser, "all of it, in place of the table,")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    try:
        return _measure(arguments, _job(arguments))
    except BrokenPipeError:
        raise  # the reader of the output has ended, as `head` does
    except (shmring.Error, MemoryError, OSError) as error:
        return _cli.complain("shmring bench", _cli.in_one_line(error))


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
    """Measure the launcher's ranks.

    Only rank 0 reads and writes files, since other hosts may lack the folders. If rank 0
    refuses the arguments, all ranks end.
    """
    others: list[Others] = []
    refused = False
    if comm.rank == 0:
        try:
            others = _prepared(arguments, job, comm.size)
        except SystemExit:  # the reason is already printed
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
            if interrupt.came:  # before the ranks had begun
                return _cli.INTERRUPTED
            raise
    return _finish(arguments, others, reports[0])


def _finish(arguments: argparse.Namespace, others: Sequence[Others], report: dict[str, Any]) -> int:
    """Write the figures, on rank 0 or in the process that started the ranks; return the exit status."""
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
        return _cli.INTERRUPTED
    return int(any(row["wrong"] for row in report["rows"]))


# ---- the ranks -------------------------------------------------------------------------------------------


def _rank(comm: shmring.Comm, job: Job, others: Sequence[Others], quiet: bool) -> dict[str, Any]:
    """Measure in one rank and return the report. Only rank 0 prints the table."""
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
        comm.abort(_WHY_ABORTED)  # the other ranks may not have received the signal
        interrupted = True
    finally:
        table.end()
    head = {"program": "shmring bench", "schema": SCHEMA, **facts, "options": asdict(job)}
    return head | {"interrupted": interrupted, "rows": rows}


def _interrupt_once(_number: int, _frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt once: the terminal and the parent both send SIGINT; ignore the second."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Forwarding:
    """Forward the first Ctrl-C to the ranks, which return the figures so far. A second ends the run."""

    def __init__(self) -> None:
        self.came = False
        self._pid = os.getpid()

    def __enter__(self) -> _Forwarding:
        self._before = signal.signal(signal.SIGINT, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _forward(self, _number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked rank that has not begun and has no figures
            os._exit(_cli.INTERRUPTED)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.came = True
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signal.SIGINT)


# ---- the command line ------------------------------------------------------------------------------------


def _refuse(text: str) -> NoReturn:
    _cli.refuse("shmring bench", text)


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
        optional_deps.need("ml_dtypes", "dtypes", f"--dtype {dtype}")
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
    """Make the call with one rank, so that invalid arguments are refused before any rank is started."""
    itemsize = dtype_named(job.dtype).itemsize
    wrong = next((nbytes for nbytes in job.sizes if nbytes % itemsize), None)
    if wrong is not None:
        _refuse(f"--sizes: {wrong} bytes are no multiple of the {itemsize} bytes of a {job.dtype} item")
    if job.call == "ping_pong":
        return
    try:
        with shmring.init(shmring.world(1), 0) as comm:
            Turn(comm, replace(job, root=0), 1).call()
    except (TypeError, ValueError) as error:
        _refuse(str(error))


def _prepared(arguments: argparse.Namespace, job: Job, nranks: int) -> list[Others]:
    """Check files and number of ranks; return the figures of other runs to show."""
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
    if number is None or not 1 <= number <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: give 1 to {MAX_RANKS}, or auto")
    return number
