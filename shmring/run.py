"""`shmrun -n 4 script.py`: start the ranks of a script on this host, pass on their output, end together.

The first rank that fails takes the others with it and is the one that is reported. Over several hosts each
runs its own shmrun. May know: bootstrap, errors, limits, processes, relay, settings.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from .bootstrap import check_nprocs, world
from .limits import usable_cpus
from .processes import describe_exit, parent_death_tie
from .relay import Stream, rank_prefix, screens
from .settings import Settings, parse_address

_GRACE_S = 5.0  # from SIGTERM to SIGKILL
_CAUSE_S = 1.0  # for the cause to show where the first failure only tells of another rank's
_SWEEP_S = 1.0  # for what the ranks have left running
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # forwarded, and the ranks have to end then
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_BAD_USAGE = 2
_READ_NBYTES = 1 << 16
_CONSEQUENCES = ("RankFailed:", "Aborted:")  # they tell of another rank's failure
_TRACEBACK = "Traceback (most recent call last)"
_NO_KEY = (
    "hosts trust each other only by a key: set SHMRING_KEY to the same one on every host, or "
    "SHMRING_KEY_FILE to a file with it and mode 0600; make one with: "
    'python -c "import secrets; print(secrets.token_hex())"'
)
_CHAINS = ("During handling of the above exception", "The above exception was the direct cause")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    environment = dict(os.environ)
    share = _share_of(options)
    share.place(share.ranks[0], environment)
    try:
        settings = Settings.from_environment(environment)  # one message here instead of one from each rank
    except ValueError as error:
        return _complain(str(error))
    if settings.key is None:
        return _complain(_NO_KEY)
    _share_cpus(environment, len(share.ranks))
    return _Run(options, share, environment).run()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(_complain(f"{message} (usage: shmrun -n 4 script.py ...; more with --help)"))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="shmrun",
        allow_abbrev=False,
        usage="shmrun -n RANKS [options] [-m] SCRIPT [ARGUMENT ...]",
        description="Run a Python script as several ranks on this host; shmring.init() joins them. For "
        "several hosts run it on each, with the same --nnodes, --rdzv, -n and SHMRING_KEY, and its own "
        "--node-rank.",
        epilog="The exit code is that of the first rank that fails (128 + N for signal N).",
    )
    parser.add_argument(
        "-n",
        dest="counts",
        required=True,
        metavar="RANKS",
        help="how many ranks on each host, or `auto`: one for each usable CPU; over hosts also one number "
        "for each, as in 2,1,3",
    )
    parser.add_argument("--nnodes", type=int, metavar="HOSTS", help="how many hosts (default: one)")
    parser.add_argument("--node-rank", type=int, metavar="INDEX", help="which one this is: 0 to HOSTS - 1")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where host 0 listens for the others")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "--no-prefix",
        dest="prefix",
        action="store_false",
        help="pass on lines unchanged, without the rank in front",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=_GRACE_S,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL for the others when a rank fails (default %(default)g)",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="let the others go on when a rank fails (see Comm.shrink); the exit code is 0 if any ends well",
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    try:
        _count_ranks(options)
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    if not options.module and not os.path.exists(options.script):
        parser.error(f"there is no script {options.script!r}")
    return options


def _count_ranks(options: argparse.Namespace) -> None:
    """Turn -n into the number of ranks on each host, and check what says which host this is."""
    texts = options.counts.split(",")
    is_said = options.nnodes is not None
    options.nnodes = len(texts) if options.nnodes is None else options.nnodes
    if options.nnodes < 1 or len(texts) not in (1, options.nnodes):
        raise ValueError(
            f"--nnodes is {options.nnodes} but -n is {options.counts}: give one number, or one for each host"
        )
    if options.rdzv is not None and not is_said and len(texts) == 1:
        raise ValueError("--rdzv is for several hosts: say how many with --nnodes, the same on all of them")
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
    options.counts = [_nprocs(text) for text in texts] * (options.nnodes // len(texts))
    check_nprocs(sum(options.counts))


def _nprocs(text: str) -> int:
    if text == "auto":
        return usable_cpus()
    try:
        return check_nprocs(int(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"argument -n: {text!r}: {error}") from None


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _complain(message: str) -> int:
    print(f"shmrun: {message}", file=sys.stderr, flush=True)
    return _BAD_USAGE


@dataclass(frozen=True)
class _Share:
    """This host's ranks of all `size`, and the variables by which they meet the others (None: unset)."""

    ranks: range
    size: int
    variables: dict[str, str | None]

    def place(self, rank: int, environment: dict[str, str]) -> None:
        here = {"SHMRING_RANK": str(rank), "SHMRING_SIZE": str(self.size), **self.variables}
        for name, text in here.items():
            environment.pop(name, None)
            if text is not None:
                environment[name] = text


def _share_of(options: argparse.Namespace) -> _Share:
    # The key goes through the environment, which only this user can read, never argv, which everybody can.
    size = sum(options.counts)
    if options.nnodes == 1:
        meeting = world(size)
        key = {"SHMRING_KEY": meeting.key.hex(), "SHMRING_KEY_FILE": None}
        return _Share(range(size), size, {"SHMRING_ADDR": meeting.id, "SHMRING_PORT": None, **key})
    first = sum(options.counts[: options.node_rank])
    host, port = parse_address("--rdzv", options.rdzv)
    ranks = range(first, first + options.counts[options.node_rank])
    return _Share(ranks, size, {"SHMRING_ADDR": host, "SHMRING_PORT": str(port)})


def _share_cpus(environment: dict[str, str], nprocs: int) -> None:
    """Keep numerical libraries from starting a thread for every CPU in every rank."""
    if nprocs > 1 and not environment.get("OMP_NUM_THREADS"):
        cpus = usable_cpus()
        threads = max(1, cpus // nprocs)
        environment["OMP_NUM_THREADS"] = str(threads)
        _say(f"{nprocs} ranks on {cpus} usable CPU(s): OMP_NUM_THREADS={threads} unless you set it")


def _say(message: str) -> None:
    print(f"shmrun: {message}", file=sys.stderr, flush=True)


@dataclass
class _Rank:
    """A started rank. Its process is waited for at the end only: until then its group's id is its own."""

    rank: int
    process: subprocess.Popen[bytes]
    out: Stream
    err: Stream
    exit_code: int | None = None  # negative for a signal
    failed_at: int | None = None  # its place among those that failed by themselves


class _Run:
    """All ranks from start to end."""

    def __init__(self, options: argparse.Namespace, share: _Share, environment: dict[str, str]) -> None:
        self._options = options
        self._share = share
        self._environment = environment
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []  # caught and not yet dealt with
        self._forwarded: int | None = None
        self._stopping = False  # the ranks have been sent SIGTERM because one failed
        self._terminate_at = float("inf")
        self._kill_at = float("inf")

    def run(self) -> int:
        """The exit code, after the last rank has ended."""
        self._catch_signals()
        try:
            self._start()
        except OSError as error:
            self._sweep()
            rank = self._share.ranks[len(self._ranks)]
            _say(f"rank {rank} of {self._share.size} could not be started: {error}")
            return 1
        try:
            while any(rank.exit_code is None for rank in self._ranks):
                self._step()
        except BrokenPipeError:  # whoever read our output has gone, as `head` does
            self._forwarded = signal.SIGPIPE
        finally:
            self._sweep()
        return self._conclude()

    def _catch_signals(self) -> None:
        # A signal writes to a pipe that the selector watches, so that none can slip in before a wait.
        wake_up, wake_end = os.pipe()
        for fd in (wake_up, wake_end):
            os.set_blocking(fd, False)
        self._selector.register(wake_up, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self._catch)
        for number in (*_ENDING, *_PASSED_ON, signal.SIGTSTP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._catch)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _start(self) -> None:
        out_fd, err_fd = sys.stdout.fileno(), sys.stderr.fileno()
        out_screen, err_screen = screens(out_fd, err_fd)
        self._screens = (out_screen, err_screen)
        tie = parent_death_tie(os.getpid())
        target = ["-m", self._options.script] if self._options.module else [self._options.script]
        command = [sys.executable, *target, *self._options.arguments]
        for rank in self._share.ranks:
            process = subprocess.Popen(
                command,
                env=self._environment_of(rank),
                stdin=None if rank == 0 and not _is_terminal(0) else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Groups of their own, so that a rank's children can be reached as well. They are not the
                # terminal's foreground group then: Ctrl-C comes to us and is forwarded.
                process_group=0,
                preexec_fn=tie,
            )
            assert process.stdout is not None
            assert process.stderr is not None
            live = rank == self._share.ranks[0]
            out = Stream(out_screen, out_fd, self._prefix(rank, out_screen.tty), live=live)
            err = Stream(err_screen, err_fd, self._prefix(rank, err_screen.tty), live=live)
            self._ranks.append(_Rank(rank, process, out, err))
            for pipe, stream in ((process.stdout, out), (process.stderr, err)):
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe.fileno(), selectors.EVENT_READ, stream)

    def _prefix(self, rank: int, tty: bool) -> bytes:
        if not self._options.prefix:
            return b""
        colour = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return rank_prefix(rank, self._share.size, colour=colour)

    def _environment_of(self, rank: int) -> dict[str, str]:
        environment = dict(self._environment)
        self._share.place(rank, environment)
        environment.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would hold lines back until 8 KiB are full
        if _is_terminal(2):  # progress bars cannot ask a pipe how wide it is
            size = shutil.get_terminal_size()
            width = len(rank_prefix(rank, self._share.size, colour=False)) if self._options.prefix else 0
            environment.setdefault("COLUMNS", str(max(size.columns - width, 20)))
            environment.setdefault("LINES", str(size.lines))
        return environment

    def _step(self) -> None:
        next_event = min(self._terminate_at, self._kill_at)
        left_s = None if next_event == float("inf") else max(0.0, next_event - time.monotonic())
        for key, _ in self._selector.select(left_s):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            else:
                self._pump(key.fd, key.data)
        while self._signals:
            self._forward(self._signals.pop(0))
        for rank in self._ranks:
            if rank.exit_code is None:
                self._look_at(rank)
        now = time.monotonic()
        if now >= self._terminate_at:
            self._terminate_at, self._kill_at = float("inf"), now + self._options.grace
            self._stopping = True
            self._signal_ranks(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._signal_ranks(signal.SIGKILL)

    def _pump(self, fd: int, stream: Stream) -> bool:
        """Pass on what there is; False where there is nothing now, or will be nothing any more."""
        try:
            data = os.read(fd, _READ_NBYTES)
        except BlockingIOError:
            return False
        if data:
            stream.feed(data)
            return True
        stream.close()
        self._selector.unregister(fd)
        return False

    def _forward(self, number: int) -> None:
        if number == signal.SIGTSTP:  # Ctrl-Z: nobody would read what the ranks write
            self._signal_ranks(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._signal_ranks(signal.SIGCONT)
        elif number in _PASSED_ON:
            self._signal_ranks(number)
        else:
            self._signal_ranks(number if self._forwarded is None else signal.SIGKILL)
            self._forwarded = number
            self._terminate_at = float("inf")
            self._kill_at = min(self._kill_at, time.monotonic() + self._options.grace)

    def _signal_ranks(self, number: int) -> None:
        for rank in self._ranks:
            if rank.exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, number)

    def _look_at(self, rank: _Rank) -> None:
        """See whether a rank has ended, and what follows if it has failed."""
        status = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return
        rank.exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        self._drain(rank)
        stopped = self._stopping and rank.exit_code in (-signal.SIGTERM, -signal.SIGKILL)
        if rank.exit_code == 0 or stopped or self._forwarded is not None:
            return
        rank.failed_at = sum(other.failed_at is not None for other in self._ranks)
        if self._options.keep_going:
            _say(f"rank {rank.rank} of {self._share.size} ended: {describe_exit(rank.exit_code)}")
        elif not self._stopping:
            patience_s = _CAUSE_S if _is_consequence(rank) else 0.0
            self._terminate_at = min(self._terminate_at, time.monotonic() + patience_s)

    def _drain(self, rank: _Rank) -> None:
        """Pass on the last that an ended rank wrote; its children may hold the pipes open still."""
        for pipe, stream in ((rank.process.stdout, rank.out), (rank.process.stderr, rank.err)):
            assert pipe is not None
            if pipe.fileno() in self._selector.get_map():
                while self._pump(pipe.fileno(), stream):
                    pass

    def _sweep(self) -> None:
        """Leave nothing: no rank, and none of the processes that ranks started in their groups."""
        self._signal_ranks(signal.SIGKILL)
        groups = []
        for rank in self._ranks:
            rank.process.wait()
            groups.append(rank.process.pid)
            with contextlib.suppress(BrokenPipeError):
                self._drain(rank)
                rank.out.close()
                rank.err.close()
        until = time.monotonic() + _SWEEP_S
        for number in (signal.SIGTERM, signal.SIGKILL):
            groups = [group for group in groups if _signal_group(group, number)]
            while groups and time.monotonic() < until:
                time.sleep(0.01)
                groups = [group for group in groups if _signal_group(group, 0)]
        for screen in self._screens:
            with contextlib.suppress(BrokenPipeError):
                screen.finish()

    def _conclude(self) -> int:
        failed = sorted(
            (rank for rank in self._ranks if rank.failed_at is not None),
            key=lambda rank: (_is_consequence(rank), rank.failed_at),
        )
        goes_on = self._options.keep_going and any(rank.exit_code == 0 for rank in self._ranks)
        if failed and not goes_on:
            return self._report(failed[0])
        if self._forwarded is None or all(rank.exit_code == 0 for rank in self._ranks):
            return 0
        if self._forwarded != signal.SIGPIPE:
            _say(f"stopped by {signal.Signals(self._forwarded).name}")
        return 128 + self._forwarded

    def _report(self, rank: _Rank) -> int:
        """Say last, and alone, which rank failed first and what its last words were."""
        assert rank.exit_code is not None
        how = describe_exit(rank.exit_code) + (
            " (out of memory?)" if rank.exit_code == -signal.SIGKILL else ""
        )
        words = "; the end of its stderr:" if rank.err.tail else ", without a word on stderr"
        _say(f"rank {rank.rank} of {self._share.size} failed first: {how}{words}")
        for line in _last_words(rank):
            print(line, file=sys.stderr)
        sys.stderr.flush()
        return rank.exit_code if rank.exit_code > 0 else 128 - rank.exit_code


def _last_words(rank: _Rank) -> list[str]:
    """The last traceback on a rank's stderr, with those that led to it; else its last lines."""
    lines = list(rank.err.tail)
    begins = [at for at, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not begins:
        return lines[-10:]
    while len(begins) > 1 and lines[begins[-1] - 2].startswith(_CHAINS):
        begins.pop()
    return lines[begins[-1] :]


def _is_consequence(rank: _Rank) -> bool:
    """The exception that it all began with tells of another rank's failure."""
    causes = [line for line in _last_words(rank)[1:] if line and not line.startswith(" ")]
    return (
        bool(causes) and causes[0].startswith("shmring.") and any(name in causes[0] for name in _CONSEQUENCES)
    )


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
