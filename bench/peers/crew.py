"""The ranks of one contestant, seen from the outside: start them once, send them orders, stop them.

Contains the processes, their temporary folder and the sockets to them. Uses contestants and the messages of
peer_rank.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.peers.contestants import OVERSUBSCRIBED_SAMPLE_S, Contestant

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
# Time for all ranks to wake up and come to the start line before the timed loop.
START_LINE_NS = 1_000_000

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """Run in the child: end it with its parent. A rank that hangs in a call would not notice the parent's
    end."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class ContestantFailed(Exception):
    """A contestant cannot go on; the message says why, with what its ranks wrote."""


class ContestantRefused(ContestantFailed):
    """All ranks alike could not carry out the order; they wait for the next message."""


@dataclass(frozen=True)
class Timing:
    """One timed loop: the slowest rank's own time, and the time from the first start to the last end."""

    slowest_s: float
    span_s: float


class Crew:
    """All ranks of one contestant. A context manager: the ranks are always gone afterwards."""

    def __init__(self, contestant: Contestant, nprocs: int, cpus: list[int], probe: Path | None) -> None:
        self.contestant, self.nprocs, self.cpus = contestant, nprocs, cpus
        self.versions: dict[str, str] = {}
        self.oversubscribed = nprocs > len(cpus)
        self.sample_s = max(contestant.sample_s, OVERSUBSCRIBED_SAMPLE_S if self.oversubscribed else 0)
        self._lines: list[TextIO] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="shmring-crew-"))
        try:
            self._start(probe)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # ---- starting and stopping ----

    def _start(self, probe: Path | None) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._folder / "crew"))
            listener.listen(self.nprocs)
            self._launch(probe)
            hellos = self._meet(listener)
        token = next(hello["token"] for hello in hellos if hello["rank"] == 0)
        self.versions = self.tell("join", token=token)[0]["versions"]

    def _launch(self, probe: Path | None) -> None:
        arguments = [str(self._folder), str(self.nprocs), ",".join(map(str, self.cpus)), str(probe or "")]
        commands = self.contestant.commands(self.nprocs, arguments, oversubscribed=self.oversubscribed)
        environment = self.contestant.process_environment(oversubscribed=self.oversubscribed)
        with open(self._folder / "log", "wb") as log:
            for command in commands:
                self._processes.append(subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                    process_group=0, preexec_fn=_end_with_parent))

    def _meet(self, listener: socket.socket) -> list[dict[str, Any]]:
        listener.settimeout(0.2)
        deadline = time.monotonic() + START_TIMEOUT_S
        by_rank: dict[int, tuple[dict[str, Any], TextIO]] = {}
        while len(by_rank) < self.nprocs:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise self._failure("its ranks did not start")
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(ANSWER_TIMEOUT_S)
                with connection:
                    lines = connection.makefile("rw", encoding="utf-8")
                hello = self._read(lines)
                if "error" in hello:
                    raise self._failure(hello["error"])
                by_rank[hello["rank"]] = (hello, lines)
        self._lines = [by_rank[rank][1] for rank in range(self.nprocs)]
        return [hello for hello, _ in by_rank.values()]

    def stop(self) -> None:
        """Let the ranks leave by themselves, then kill the rest."""
        for lines in self._lines:
            with contextlib.suppress(OSError):
                lines.close()
        deadline = time.monotonic() + 5
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- talking ----

    def _failure(self, what: str) -> ContestantFailed:
        log = (self._folder / "log").read_text(errors="replace").strip()
        return ContestantFailed(f"{self.contestant.name}: {what}" + (f"\n{log[-2000:]}" if log else ""))

    def _read(self, lines: TextIO) -> dict[str, Any]:
        try:
            line = lines.readline()
        except OSError as error:
            raise self._failure(f"no answer ({error})") from None
        if not line:
            raise self._failure("a rank is gone")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, what: str, **message: object) -> list[dict[str, Any]]:
        """Send the same message to all ranks and return their answers by rank."""
        text = json.dumps({"what": what, **message})
        for lines in self._lines:
            try:
                print(text, file=lines, flush=True)
            except OSError:
                raise self._failure("a rank is gone") from None
        answers = [self._read(lines) for lines in self._lines]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if len(errors) == self.nprocs:
            raise ContestantRefused(f"{self.contestant.name}: {errors[0]}")
        if errors:
            raise self._failure(errors[0])
        return answers

    def prepare(self, variant: str, nbytes: int, *, call: str = "all_reduce", written: bool = False,
                dtype: str = "float32", keywords: dict[str, str] | None = None) -> None:
        """Prepare arrays and the call; the keywords go to shmring's method, as in algorithm="ring"."""
        self.tell("prepare", call=call, variant=variant, nbytes=nbytes, written=written, dtype=dtype,
                  keywords=keywords or {})

    def check(self) -> None:
        """Raise unless the last result was right in every element on every rank."""
        wrong = sum(answer["wrong"] for answer in self.tell("check"))
        if wrong:
            raise ContestantRefused(f"{self.contestant.name}: {wrong} elements of the result are wrong")

    def facts(self) -> dict[str, Any]:
        """Return the facts of rank 0's library: path, instruction set and so on."""
        found: dict[str, Any] = self.tell("facts")[0]["facts"]
        return found

    def timed(self, what: str, loops: int) -> Timing:
        """Run the loop (`run`) or only the writing (`write`) in all ranks at once."""
        answers = self.tell(what, loops=loops, at_ns=time.perf_counter_ns() + START_LINE_NS)
        starts = [answer["start_ns"] for answer in answers]
        ends = [answer["end_ns"] for answer in answers]
        slowest = max(end - start for start, end in zip(starts, ends, strict=True))
        return Timing(1e-9 * slowest, 1e-9 * (max(ends) - min(starts)))

    def idle_cpu_s(self) -> float:
        """Return the CPU time that the ranks took between messages, while others were measured."""
        return 1e-9 * sum(int(answer["idle_cpu_ns"]) for answer in self.tell("facts"))

    def cpu_ns(self) -> int:
        """Return the CPU time of all ranks since their start."""
        return sum(int(answer["cpu_ns"]) for answer in self.tell("facts"))


@contextlib.contextmanager
def start_all(contestants: list[Contestant], nprocs: int, cpus: list[int], probe: Path | None,
              report: Callable[[str], None]) -> Iterator[dict[str, Crew]]:
    """Start all crews that can start, and yield them by name; report and leave out the others."""
    with contextlib.ExitStack() as stack:
        crews = {}
        for contestant in contestants:
            try:
                crews[contestant.name] = stack.enter_context(Crew(contestant, nprocs, cpus, probe))
            except ContestantFailed as failure:
                report(f"left out: {failure}")
        yield crews
