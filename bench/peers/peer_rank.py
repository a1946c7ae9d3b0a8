"""The program of every rank of every contestant: it joins, then prepares, runs and checks as ordered.

Contains the timed loop, which is the same code for all. Runs in the contestant's own interpreter and uses
peer_libraries, torch_libraries and internode_libraries. crew.py sends the orders, one JSON line per message;
between two messages a rank is blocked reading its socket and costs no CPU.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.calls import fill_pattern
from bench.internode.internode_libraries import INTERNODE_LIBRARIES
from bench.peers.peer_libraries import LIBRARIES, Job, Library, Seat, private_array
from bench.torch.torch_libraries import TORCH_LIBRARIES

clock = time.perf_counter_ns  # on Linux CLOCK_MONOTONIC, the same in every process

START_SPIN_NS = 150_000

# As timeit does: only the expression differs. The write is x.fill, the same for everybody.
LOOP = """
def loop(turns, clock, {names}):
    start = clock()
    for _ in turns:
        {body}
    return start, clock()
"""


def wait_on_the_start_line(at_ns: int) -> None:
    """Wait until all ranks start at one moment, without any library's barrier. Sleep most of the time, since
    ranks may share a CPU; sched_yield would make a thread pay later in the scheduler."""
    time.sleep(max(0, at_ns - clock() - START_SPIN_NS) * 1e-9)
    while clock() < at_ns:
        pass


def compiled_loop(body: str, names: dict[str, Any]) -> Callable[[int], tuple[int, int]]:
    space: dict[str, Any] = {}
    exec(LOOP.format(names=", ".join(names), body=body), space)
    return lambda loops: space["loop"](range(loops), clock, *names.values())


def dtype_named(name: str) -> np.dtype[Any]:
    """Return numpy's dtype, else the one of ml_dtypes: bfloat16, float8_e4m3fn and so on."""
    try:
        found: np.dtype[Any] = np.dtype(name)
    except TypeError:
        import ml_dtypes

        found = np.dtype(getattr(ml_dtypes, name))
    return found


class Turn:
    """One prepared variant at one size: the timed loops over it and the check of its result."""

    def __init__(self, library: Library, job: Job) -> None:
        self.library, self.job = library, job
        self.prepared = library.prepare(job)
        fill_pattern(self.prepared.x, library.seat.rank)
        if not self.prepared.in_place:
            self.prepared.y.fill(0)
        call = self.prepared.call
        names = {"write": self.prepared.x.fill, **self.prepared.names}
        self.run = compiled_loop("write(1); " + call if job.written else call, names)
        self.write = compiled_loop("write(1)", names)
        self.call_once = compiled_loop(call, names)

    def wrong(self) -> int:
        """Count wrong elements. Every rank must ask, since a call in place is made again for it."""
        if self.prepared.count_wrong is not None:
            return self.prepared.count_wrong()
        x, y = self.prepared.x, self.prepared.y
        if self.prepared.in_place:
            fill_pattern(x, self.library.seat.rank)
            self.call_once(1)
        return self.library.wrong(self.job, x, y)

    def release(self) -> None:
        self.prepared.release()


class Copy(Library):
    """The limit, not a peer: every rank copies private memory to private memory, in C."""

    def join(self, token: str | None) -> None:
        if self.seat.probe is None:
            raise RuntimeError("the copy limit needs a C compiler (cc) to build bench/peers/probe.c")
        self.c = ctypes.CDLL(str(self.seat.probe))

    def versions(self) -> dict[str, str]:
        return {"library": "memcpy of " + " ".join(platform.libc_ver())}

    def leave(self) -> None:
        pass


class CopyTurn:
    def __init__(self, library: Copy, job: Job) -> None:
        self.c, self.nbytes, self.written = library.c, job.nbytes, job.written
        self.streaming = job.variant == "streaming"
        if self.streaming and not (self.c.probe_can_stream() and self.nbytes % 64 == 0):
            raise RuntimeError("no streaming copy on this CPU or of this size")
        self.src, self.dst = (private_array(self.nbytes // 4, np.dtype("f4"), offset=0) for _ in range(2))
        fill_pattern(self.src, 1)

    def _timed(self, function: Any, *arguments: int) -> tuple[int, int]:
        start = clock()
        function(*(ctypes.c_size_t(argument) for argument in arguments))
        return start, clock()

    def run(self, loops: int) -> tuple[int, int]:
        function = self.c.probe_write_and_copy if self.written else self.c.probe_copy
        return self._timed(function, self.dst.ctypes.data, self.src.ctypes.data, self.nbytes, loops,
                           self.streaming)

    def write(self, loops: int) -> tuple[int, int]:
        return self._timed(self.c.probe_write, self.src.ctypes.data, self.nbytes, loops)

    def wrong(self) -> int:
        return int(np.count_nonzero(self.dst.view("i4") != self.src.view("i4")))

    def release(self) -> None:
        pass


class Rank:
    """Answers the messages of the crew, one method per message."""

    def __init__(self, library: Library, cpu: int) -> None:
        self.library, self.cpu = library, cpu
        self.turn: Turn | CopyTurn | None = None
        self.idle_cpu_ns = 0
        self.cpu_when_answered_ns = time.process_time_ns()

    def hello(self) -> dict[str, Any]:
        seat = self.library.seat
        return {"rank": seat.rank, "token": self.library.token() if seat.rank == 0 else None}

    def join(self, token: str | None) -> dict[str, Any]:
        if self.library.pinned_with_its_threads:
            os.sched_setaffinity(0, {self.cpu})
        self.library.join(token)
        os.sched_setaffinity(0, {self.cpu})
        python = {"python": platform.python_version(), "numpy": np.__version__}
        return {"versions": {**self.library.versions(), **python}}

    def prepare(self, call: str, variant: str, nbytes: int, written: bool, dtype: str,
                keywords: dict[str, str]) -> dict[str, Any]:
        job = Job(call, variant, nbytes, dtype_named(dtype), written, keywords)
        library = self.library
        self.turn = CopyTurn(library, job) if isinstance(library, Copy) else Turn(library, job)
        return {}

    def run(self, loops: int, at_ns: int) -> dict[str, Any]:
        return self._timed("run", loops, at_ns)

    def write(self, loops: int, at_ns: int) -> dict[str, Any]:
        return self._timed("write", loops, at_ns)

    def _timed(self, which: str, loops: int, at_ns: int) -> dict[str, Any]:
        timed = getattr(self.turn, which)
        gc.collect(0)
        gc.disable()
        try:
            wait_on_the_start_line(at_ns)
            start_ns, end_ns = timed(loops)
        finally:
            gc.enable()
        return {"start_ns": start_ns, "end_ns": end_ns}

    def check(self) -> dict[str, Any]:
        assert self.turn is not None
        return {"wrong": self.turn.wrong()}

    def release(self) -> dict[str, Any]:
        if self.turn is not None:
            self.turn.release()
            self.turn = None
        gc.collect()
        return {}

    def facts(self) -> dict[str, Any]:
        return {"facts": self.library.facts(), "cpu_ns": time.process_time_ns(),
                "idle_cpu_ns": self.idle_cpu_ns}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        self.idle_cpu_ns += time.process_time_ns() - self.cpu_when_answered_ns
        what = message.pop("what")
        try:
            reply: dict[str, Any] = getattr(self, what)(**message)
        except Exception:
            reply = {"error": traceback.format_exc()}
        self.cpu_when_answered_ns = time.process_time_ns()
        return reply


def seat_from_arguments(arguments: list[str]) -> tuple[str, Seat, list[int]]:
    """Parse the arguments: library, folder, size, CPUs, the probe or nothing, and the rank unless mpiexec
    gives it."""
    library, folder, size, cpus, probe, *given = arguments
    by_launcher = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")
    rank = int(given[0] if given else by_launcher or 0)
    addresses = os.environ.get("PEER_ADDRESSES", "")
    seat = Seat(rank, int(size), Path(folder), Path(probe) if probe else None,
                tuple(addresses.split(",")) if addresses else ())
    return library, seat, [int(cpu) for cpu in cpus.split(",")]


def main() -> None:
    name, seat, cpus = seat_from_arguments(sys.argv[1:])
    libraries = {**LIBRARIES, **TORCH_LIBRARIES, **INTERNODE_LIBRARIES, "copy": Copy}
    rank = Rank(libraries[name](seat), cpus[seat.rank % len(cpus)])
    with socket.socket(socket.AF_UNIX) as to_crew:
        to_crew.connect(str(seat.folder / "crew"))
        with to_crew.makefile("rw", encoding="utf-8") as lines:
            print(json.dumps(rank.answer({"what": "hello"})), file=lines, flush=True)
            for line in lines:
                print(json.dumps(rank.answer(json.loads(line))), file=lines, flush=True)
    rank.release()
    rank.library.leave()


if __name__ == "__main__":
    main()
