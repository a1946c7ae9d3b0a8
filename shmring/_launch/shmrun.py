"""`shmrun -n 4 script.py`: start the ranks of a script on this host, show their output, end them together.

When a rank fails, the others are ended and the first failure is reported. With several hosts, each host runs
its own shmrun.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import itertools
import json
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from .._bootstrap.join import world
from .._config.settings import MAKE_A_KEY, Settings, parse_address
from .._outcome import Tier
from .._system import ended_ranks
from .._system.limits import explain, oom_kills
from .._system.processes import describe_exit, open_standard_streams, parent_death_tie
from .cpu_binding import Cpus, share_cpus
from .dedupe import Dedupe
from .log_files import Log, create_logs, restart_directory
from .options import complain, parse, print_line, print_message
from .output_mux import Front, Screen, Stream, screens
from .stand_in import with_stand_in
from .traceback_tail import exception_line, tier_of, traceback_tail

_CAUSE_S = 1.0  # time for the cause to appear if the first failure may be a consequence of another rank's
_SWEEP_S = 1.0  # time for processes that the ranks have left running
_READER_S = 1.0  # after a signal to end, time for the reader of the output to take the next part
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # forwarded; the ranks must then end
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_SECOND_S = 0.5  # an ending signal this much later is a second one, not a copy of the first
_READ_NBYTES = 1 << 16
_OUT, _ERR = 1, 2
_NO_KEY = (
    "hosts trust each other only by a key: set SHMRING_KEY to the same one on every host, or "
    f"SHMRING_KEY_FILE to a file with it and mode 0600; make one with: {MAKE_A_KEY}"
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    open_standard_streams()
    options = parse(sys.argv[1:] if argv is None else argv)
    environment = dict(os.environ)
    if options.mpi4py:
        environment["PYTHONPATH"] = with_stand_in(environment.get("PYTHONPATH", ""))
    share = _share_of(options, 0)
    share.place(share.ranks[0], environment)
    try:
        settings = Settings.from_environment(environment)  # one error message, not one by rank
        if settings.key is None:
            return complain(_NO_KEY)
        _check_report(options.report)
        files = _logs_of(options, share, 0)
    except (ValueError, OSError) as error:
        return complain(str(error))
    cpus = share_cpus(environment, options.bind, share.ranks)
    status, outcome = _attempts(options, share, environment, cpus, files)
    if options.report is not None:
        _write_report(options.report, {"exit_code": status, **outcome})
    return status


def _attempts(
    options: argparse.Namespace,
    share: _Share,
    environment: dict[str, str],
    cpus: dict[int, Cpus],
    files: dict[int, tuple[Log, Log]],
) -> tuple[int, dict[str, Any]]:
    """Run the ranks, with restarts; return the exit code and the outcome of the last attempt."""
    signals = _Signals()
    signals.catch()
    for attempt in itertools.count():
        run = _Run(options, share, environment, cpus, files, signals)
        status = run.run()
        if attempt == options.restart or not run.may_start_again:
            break
        share = _share_of(options, attempt + 1)
        try:
            files = _logs_of(options, share, attempt + 1)
        except OSError as error:
            print_message(f"no restart: {error}")
            break
        if not run.may_start_again:  # a signal has ended the job meanwhile
            break
        signals.forget(_PASSED_ON)
        print_message(f"restart {attempt + 1} of {options.restart}: all {share.size} ranks start again")
    return status, {"restarts": attempt, **run.outcome()}


def _logs_of(options: argparse.Namespace, share: _Share, attempt: int) -> dict[int, tuple[Log, Log]]:
    if options.log_dir is None:
        return {}
    directory = restart_directory(options.log_dir, attempt) if attempt else options.log_dir
    return create_logs(directory, share.ranks, 0 if attempt else options.restart)


def _check_report(path: str | None) -> None:
    if path is not None:
        place = path if os.path.exists(path) else os.path.dirname(path) or "."
        if not path or os.path.isdir(path) or not os.access(place, os.W_OK):
            raise OSError(
                f"--report is {path!r}, which cannot be written: name a file in a directory of yours"
            )


def _write_report(path: str, outcome: dict[str, Any]) -> None:
    try:
        with open(path, "w") as file:
            json.dump(outcome, file, indent=1)
            file.write("\n")
    except OSError as error:
        print_message(f"{path} is not complete: {error.strerror}")


@dataclass(frozen=True)
class _Share:
    """This host's ranks of all `size`, and the variables by which they join the world (None: unset)."""

    ranks: range
    size: int
    variables: dict[str, str | None]

    def place(self, rank: int, environment: dict[str, str]) -> None:
        here = {"SHMRING_RANK": str(rank), "SHMRING_SIZE": str(self.size), **self.variables}
        for name, text in here.items():
            environment.pop(name, None)
            if text is not None:
                environment[name] = text


def _share_of(options: argparse.Namespace, attempt: int) -> _Share:
    # Pass the key in the environment, which only this user can read, never in argv, which all users can read.
    size = sum(options.counts)
    # SHMRING_JOINED is for the processes of a rank that has run this shmrun, not for these ranks.
    variables: dict[str, str | None] = {"SHMRING_RESTART": str(attempt), "SHMRING_JOINED": None}
    if options.nnodes == 1:
        meeting = world(size)
        variables |= {"SHMRING_ADDR": meeting.id, "SHMRING_PORT": None}
        variables |= {"SHMRING_KEY": meeting.key.hex(), "SHMRING_KEY_FILE": None}
        return _Share(range(size), size, variables)
    first = sum(options.counts[: options.node_rank])
    host, port = parse_address("--rdzv", options.rdzv)
    ranks = range(first, first + options.counts[options.node_rank])
    return _Share(ranks, size, variables | {"SHMRING_ADDR": host, "SHMRING_PORT": str(port)})


class _Signals:
    """Signals received but not handled. Each also writes to a pipe, so that the next wait returns at once."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.fd, self._wake_fd = os.pipe()
        for fd in (self.fd, self._wake_fd):
            os.set_blocking(fd, False)

    def catch(self) -> None:
        signal.set_wakeup_fd(self._wake_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self._catch)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])  # a daemon's children inherit its mask
        for number in (*_ENDING, *_PASSED_ON, signal.SIGTSTP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored, as under nohup
                signal.signal(number, self._catch)

    def forget(self, numbers: tuple[int, ...]) -> None:
        """Drop signals meant for ranks that have ended: new ranks have no handlers yet and would die."""
        self.came[:] = [number for number in self.came if number not in numbers]

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.came.append(number)


@dataclass
class _Rank:
    """A started rank. Its process is reaped only at the end, so that its group id is not reused before."""

    rank: int
    process: subprocess.Popen[bytes]
    out: Stream
    err: Stream
    exit_code: int | None = None  # negative for a signal
    failed_at: int | None = None  # its position among the ranks that failed by themselves
    follows_another: bool = False  # it had got an error about another rank

    @property
    def traceback_tail(self) -> list[str]:
        """Return the last traceback of a rank that has ended."""
        return traceback_tail(list(self.err.tail))

    @property
    def tier(self) -> Tier:
        """Return the tier of the failure of a rank that has ended."""
        return tier_of(self.traceback_tail, follows_another=self.follows_another)

    @property
    def status(self) -> int | None:
        """Return the exit code in the shells' form: 128 + N for signal N."""
        return 128 - self.exit_code if self.exit_code is not None and self.exit_code < 0 else self.exit_code


class _Run:
    """All ranks of this host from start to end."""

    def __init__(
        self,
        options: argparse.Namespace,
        share: _Share,
        environment: dict[str, str],
        cpus: dict[int, Cpus],
        files: dict[int, tuple[Log, Log]],
        signals: _Signals,
    ) -> None:
        self._options = options
        self._share = share
        self._environment = environment
        self._cpus = cpus
        self._files = files
        self._signals = signals
        self._ranks: list[_Rank] = []
        # Ranks that wait in init() see in it which ranks have ended.
        self._ended_fd = ended_ranks.create()
        self._shown = [rank for rank in share.ranks if options.ranks is None or rank in options.ranks]
        self._screens = screens(_OUT, _ERR, self._screen)
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.fd, selectors.EVENT_READ)
        self._pipes: dict[int, Stream] = {}  # the ranks' open pipes
        self._forwarded: int | None = None
        self._is_hurried = False  # by a second signal to end
        self._oom_kills = oom_kills()
        self._stopping = False  # the ranks have been sent SIGTERM because one failed
        self._terminate_at = float("inf")
        self._kill_at = float("inf")
        self._second_from = float("inf")

    def run(self) -> int:
        """Run the ranks until the last has ended; return the exit code."""
        problem: Exception | None = None
        try:
            for rank in self._share.ranks:
                try:
                    self._start(rank)
                except (OSError, subprocess.SubprocessError) as error:
                    problem = error
                    break
            if problem is None:
                while any(rank.exit_code is None for rank in self._ranks) and not self._is_unread():
                    self._step()
        finally:
            self._sweep()
        if isinstance(problem, OSError) and problem.filename is None:  # a limit
            problem = explain(problem, "starting a process")
        if problem is not None:
            print_message(f"rank {rank} of {self._share.size} could not be started: {problem}")
            return 1
        return self._conclude()

    @property
    def may_start_again(self) -> bool:
        """Return whether a rank has failed and no signal asks the run to end."""
        stops = self._forwarded is not None or any(number in _ENDING for number in self._signals.came)
        return bool(self._failed()) and not stops

    def outcome(self) -> dict[str, Any]:
        """Return how each rank has ended, and the rank that failed first."""
        failed = self._failed()
        return {
            "failed_first": failed[0].rank if failed else None,
            "ranks": [
                {
                    "rank": rank.rank,
                    "exit_code": rank.status,
                    "ended": None if rank.exit_code is None else describe_exit(rank.exit_code),
                    "cpus": list(self._cpus[rank.rank].numbers) or None,
                }
                for rank in self._ranks
            ],
        }

    def _screen(self, tty: bool) -> Screen:
        colour = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return (Dedupe if self._options.collapse else Screen)(tty, Front(self._width(), colour))

    def _width(self) -> int:
        """Return the width of a line's prefix, without the bar."""
        last = self._share.size - 1
        text = f"0-{last}" if self._options.collapse and last else str(last)
        return len(text) if self._options.prefix else 0

    def _start(self, rank: int) -> None:
        target = ["-m", self._options.script] if self._options.module else [self._options.script]
        out, err = self._streams(rank)
        with self._cpus[rank].inherited():
            process = subprocess.Popen(
                [sys.executable, *target, *self._options.arguments],
                env=self._environment_of(rank),
                stdin=None if rank == 0 and not _is_terminal(0) else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Each rank has a group of its own, so that signals reach its children, too. So it is not in
                # the terminal's foreground group: Ctrl-C reaches shmrun only, which forwards it.
                process_group=0,
                pass_fds=(self._ended_fd,),
                preexec_fn=parent_death_tie(os.getpid()),
            )
            self._ranks.append(_Rank(rank, process, out, err))  # first, so that _sweep ends it
        for pipe, stream in ((process.stdout, out), (process.stderr, err)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, stream)
            self._pipes[pipe.fileno()] = stream

    def _streams(self, rank: int) -> list[Stream]:
        """Return the streams of a rank's stdout and stderr."""
        live, is_shown = rank in self._shown[:1], rank in self._shown
        files = self._files.get(rank, (None, None))
        return [
            Stream(rank, fd, screen if is_shown else None, live=live, log=log)
            for fd, screen, log in zip((_OUT, _ERR), self._screens, files, strict=True)
        ]

    def _environment_of(self, rank: int) -> dict[str, str]:
        environment = dict(self._environment)
        self._share.place(rank, environment)
        environment["SHMRING_ENDED_FD"] = str(self._ended_fd)
        environment.setdefault("PYTHONUNBUFFERED", "1")  # Python would buffer 8 KiB for a pipe
        environment.setdefault("PYTHONFAULTHANDLER", "1")  # prints a traceback on a segmentation fault
        threads = self._cpus[rank].threads
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        if _is_terminal(_ERR):  # progress bars cannot read a terminal's width from a pipe
            size = shutil.get_terminal_size()
            width = self._width()
            environment.setdefault("COLUMNS", str(max(size.columns - (width and width + 2), 20)))
            environment.setdefault("LINES", str(size.lines))
        else:
            environment.setdefault("TQDM_DISABLE", "1")  # a bar would fill a log
        return environment

    def _step(self) -> None:
        next_event = min(self._terminate_at, self._kill_at, *(screen.due_at for screen in self._screens))
        left_s = None if next_event == float("inf") else max(0.0, next_event - time.monotonic())
        self._watch()
        for key, _ in self._selector.select(left_s):
            if isinstance(key.data, Screen):
                self._selector.unregister(key.fd)
                key.data.flush()
            elif key.data is not None and not key.data.is_blocked:
                self._pump(key.fd, key.data)
        self._take_signals()
        for rank in self._ranks:
            if rank.exit_code is None:
                self._poll_rank(rank)
        now = time.monotonic()
        for screen in self._screens:
            screen.release(now)
        if now >= self._terminate_at:
            self._terminate_at, self._kill_at = float("inf"), now + self._options.grace
            self._stopping = True
            self._signal_ranks(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._signal_ranks(signal.SIGKILL)

    def _watch(self) -> None:
        """Watch the ranks' pipes. While a screen's reader does not read, watch that screen instead."""
        watched = self._selector.get_map()
        for screen in self._screens:
            if screen.blocked_fd is not None and screen.blocked_fd not in watched:
                self._selector.register(screen.blocked_fd, selectors.EVENT_WRITE, screen)
        for fd, stream in self._pipes.items():
            if stream.is_blocked and fd in watched:
                self._selector.unregister(fd)
            elif not stream.is_blocked and fd not in watched:
                self._selector.register(fd, selectors.EVENT_READ, stream)

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._signals.fd, 4096)
        while self._signals.came:
            self._forward(self._signals.came.pop(0))

    def _pump(self, fd: int, stream: Stream) -> int:
        """Pass on available data; return its bytes, 0 if there is none now or the stream has ended."""
        try:
            data = os.read(fd, _READ_NBYTES)
        except BlockingIOError:
            return 0
        if data:
            stream.feed(data)
        else:
            stream.close()
            del self._pipes[fd]
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        return len(data)

    def _forward(self, number: int) -> None:
        if number == signal.SIGTSTP:  # Ctrl-Z: stop the ranks, since shmrun would not read their output
            self._signal_ranks(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._signal_ranks(signal.SIGCONT)
        elif number in _PASSED_ON:
            self._signal_ranks(number)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        """Forward a signal after which all ranks must end within the grace; at the second, kill them."""
        now = time.monotonic()
        if self._forwarded is None:
            self._second_from = now + _SECOND_S
            self._signal_ranks(number)
        elif now >= self._second_from:
            self._is_hurried = True
            self._signal_ranks(signal.SIGKILL)
        else:
            return
        self._forwarded = number
        self._terminate_at = float("inf")
        self._kill_at = min(self._kill_at, now + self._options.grace)

    def _is_unread(self) -> bool:
        """Return whether the reader of our output has gone, as `head` does. A lost terminal is a SIGHUP."""
        lost = [screen for screen in self._screens if screen.error is not None]
        if lost and self._forwarded is None:
            if any(screen.tty for screen in lost):
                self._end(signal.SIGHUP)
            else:
                self._forwarded = signal.SIGPIPE
        return self._forwarded == signal.SIGPIPE

    def _signal_ranks(self, number: int) -> None:
        for rank in self._ranks:
            if rank.exit_code is None:
                _signal_group(rank.process.pid, number)
                with contextlib.suppress(OSError):  # the rank may be another user's, by setuid
                    if os.getpgid(rank.process.pid) != rank.process.pid:  # the rank has left its group
                        os.kill(rank.process.pid, number)

    def _poll_rank(self, rank: _Rank) -> None:
        """Check whether a rank has ended; if it has failed, plan the end of the others."""
        status = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return
        rank.exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        rank.follows_another = ended_ranks.follows_another(self._ended_fd, rank.rank)
        ended_ranks.write_end(self._ended_fd, rank.rank)
        self._drain(rank)
        stopped = self._stopping and rank.exit_code in (-signal.SIGTERM, -signal.SIGKILL)
        if rank.exit_code == 0 or stopped or self._forwarded is not None:
            return
        rank.failed_at = sum(other.failed_at is not None for other in self._ranks)
        if self._options.keep_going:
            ended = f"rank {rank.rank} of {self._share.size} ended: {describe_exit(rank.exit_code)}"
            self._screens[1].show(_ERR, f"shmrun: {ended}".encode(), ends=False)
        elif not self._stopping:
            patience_s = _CAUSE_S if rank.tier > Tier.OWN else 0.0
            self._terminate_at = min(self._terminate_at, time.monotonic() + patience_s)

    def _drain(self, rank: _Rank) -> None:
        """Pass on the last output of an ended rank: at most a full pipe, as its children may write on."""
        for pipe, stream in ((rank.process.stdout, rank.out), (rank.process.stderr, rank.err)):
            assert pipe is not None
            if pipe.fileno() in self._pipes:
                left = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
                while left > 0 and (count := self._pump(pipe.fileno(), stream)):
                    left -= count

    def _sweep(self) -> None:
        """End all ranks and all processes in their groups."""
        self._signal_ranks(signal.SIGKILL)
        for rank in self._ranks:
            exit_code = rank.process.wait()
            rank.exit_code = exit_code if rank.exit_code is None else rank.exit_code
            self._drain(rank)
        _end_groups([rank.process.pid for rank in self._ranks])
        for rank in self._ranks:
            self._drain(rank)
            rank.out.close()
            rank.err.close()
        for screen in self._screens:
            screen.finish()
            self._wait_for_reader(screen)
        self._selector.close()
        os.close(self._ended_fd)
        for rank in self._ranks:
            for pipe in (rank.process.stdout, rank.process.stderr):
                assert pipe is not None
                pipe.close()

    def _wait_for_reader(self, screen: Screen) -> None:
        """Block until all output is read; after a signal to end, only as long as its reader reads."""
        while screen.blocked_fd is not None:
            poller = select.poll()
            poller.register(self._signals.fd, select.POLLIN)
            poller.register(screen.blocked_fd, select.POLLOUT)
            patience_s = None if self._forwarded is None else 0.0 if self._is_hurried else _READER_S
            if poller.poll(None if patience_s is None else patience_s * 1000):
                self._take_signals()
                screen.flush()
            else:
                screen.give_up(OSError(errno.ETIMEDOUT, "their reader does not read"))
                null = os.open(os.devnull, os.O_WRONLY)  # shmrun's own messages must not wait for it either
                for fd, other in zip((_OUT, _ERR), self._screens, strict=True):
                    if other is screen:
                        os.dup2(null, fd)
                os.close(null)

    def _failed(self) -> list[_Rank]:
        """Return the ranks that failed by themselves, causes before consequences."""
        return sorted(
            (rank for rank in self._ranks if rank.failed_at is not None),
            key=lambda rank: (rank.tier, rank.failed_at),
        )

    def _conclude(self) -> int:
        for log in itertools.chain(*self._files.values()):
            if log.error is not None:
                print_message(f"{log.path} is not complete: {log.error.strerror}")
        unshown = {screen.error for screen in self._screens if not screen.tty}
        lost = [error for error in unshown if error is not None and not isinstance(error, BrokenPipeError)]
        for error in lost:
            print_message(f"the output of the ranks cannot be shown: {error.strerror}")
        failed = self._failed()
        goes_on = self._options.keep_going and any(rank.exit_code == 0 for rank in self._ranks)
        if failed and not goes_on:
            return self._report(failed[0])
        if self._forwarded is None or all(rank.exit_code == 0 for rank in self._ranks):
            return 1 if lost else 0
        if self._forwarded != signal.SIGPIPE:
            print_message(f"stopped by {signal.Signals(self._forwarded).name}")
        return 128 + self._forwarded

    def _report(self, rank: _Rank) -> int:
        """Print, as the last output, the rank that failed first; its traceback too if that was not shown."""
        assert rank.exit_code is not None
        assert rank.status is not None
        how = _how_ended(rank.exit_code, self._oom_kills)
        tail, hidden = rank.traceback_tail, rank.rank not in self._shown
        words = ", with nothing on stderr"
        if tail and hidden:
            words = f"; the end of {'its stderr' if rank.err.log is None else rank.err.log.path}:"
        elif tail:
            words = f": {exception_line(tail)}"
        print_message(f"rank {rank.rank} of {self._share.size} failed first: {how}{words}")
        for line in tail if hidden else ():
            print_line(line)
        return rank.status


def _how_ended(exit_code: int, oom_kills_before: int | None) -> str:
    how = describe_exit(exit_code)
    if exit_code == -signal.SIGKILL and oom_kills() != oom_kills_before:
        how += " (out of memory: the kernel has killed a process for lack of memory meanwhile)"
    return how


def _end_groups(groups: list[int]) -> None:
    until = time.monotonic() + _SWEEP_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        groups = [group for group in groups if _signal_group(group, number)]
        while groups and time.monotonic() < until:
            time.sleep(0.01)
            groups = [group for group in groups if _signal_group(group, 0)]


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # the remaining processes may be another user's, by setuid
        return False
    return True


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
