"""Inspect communicators of other processes: find them through /proc, copy, check and describe them.

This module writes nothing and touches no page of a job that the job has not touched itself: it reads segments
like files. Only a request for stacks maps a segment, read-only, to wake its ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .._diagnostics import describe, stacks
from .._diagnostics.flight_recorder import Flight, control_nbytes_of
from .._system import procfs, segments

_MEMFD = "/memfd:shmring (deleted)"
_POSIX = segments.SHM_DIRECTORY + "/"


class Snapshot:
    """A copy of a file's first bytes in page-aligned memory. The address is valid while it lives."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, nbytes)
        self.nbytes = os.preadv(fd, [self._pages], 0)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))


@dataclass
class Segment:
    """One communicator's memory, and the processes that hold it open."""

    name: str  # memfd:INODE or posix:INODE
    number: int  # the inode
    path: str  # path of an open descriptor, under /proc
    pids: list[int] = field(default_factory=list)
    flight: Flight | None = None  # a copy of the ranks' flight records
    damage: str = ""  # why there is no copy


def of_processes(pids: Iterable[int]) -> list[Segment]:
    """Return the communicators that these processes hold open, in inode order."""
    found: dict[tuple[int, int], Segment | None] = {}
    for pid in pids:
        for path, kind in _descriptors(pid):
            with contextlib.suppress(OSError):  # the process may close it at any moment
                status = os.stat(path)
                key = status.st_dev, status.st_ino
                if key not in found:
                    found[key] = _read(path, kind, status)
                segment = found[key]
                if segment is not None and pid not in segment.pids:
                    segment.pids.append(pid)
    return sorted((segment for segment in found.values() if segment is not None), key=lambda one: one.number)


def why_not(pid: int) -> str | None:
    """Return why a process cannot be inspected; None if it can."""
    try:
        os.listdir(f"/proc/{pid}/fd")
    except FileNotFoundError:
        return f"there is no process {pid}"
    except OSError as error:
        return f"process {pid} cannot be inspected: {error.strerror}"
    return None


def own_processes() -> list[int]:
    """Return the pids of this user's processes."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                    pids.append(int(name))
    return sorted(pids)


def _descriptors(pid: int) -> Iterator[tuple[str, str]]:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):
            target = os.readlink(path)
            if target == _MEMFD:
                yield path, "memfd"
            elif target.startswith(_POSIX) and target.endswith(" (deleted)"):
                yield path, "posix"


def _read(path: str, kind: str, status: os.stat_result) -> Segment | None:
    """Return the communicator in this file; None if the file holds something else, such as a shared array."""
    name = f"{kind}:{status.st_ino}"
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(fd).st_size
        control_nbytes = control_nbytes_of(os.pread(fd, mmap.PAGESIZE, 0), nbytes)
        if control_nbytes == 0:
            return None
        return Segment(name, status.st_ino, path, flight=Flight(Snapshot(fd, control_nbytes)))
    except ValueError as error:
        return Segment(name, status.st_ino, path, damage=str(error))
    finally:
        os.close(fd)


def stacks_of(segment: Segment) -> dict[int, str]:
    """Return by local rank its Python stacks, or in brackets why there are none."""
    if segment.flight is None:
        return {}
    ranks = range(segment.flight.nranks)
    try:
        fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return dict.fromkeys(ranks, f"({error.strerror})")
    try:
        status = os.fstat(fd)
        control_nbytes = control_nbytes_of(os.pread(fd, mmap.PAGESIZE, 0), status.st_size)
        if status.st_ino != segment.number or control_nbytes == 0:
            return dict.fromkeys(ranks, "(it has gone)")
        live = segments.Mapping(fd, control_nbytes, writable=False)
        return stacks.ask(Flight(live), ranks)
    except ValueError as error:
        return dict.fromkeys(ranks, f"(it is damaged: {error})")
    finally:
        os.close(fd)


# ---- as JSON and text ------------------------------------------------------------------------------------


def state_of(segment: Segment) -> dict[str, Any]:
    """Describe a communicator for JSON: names, numbers and texts."""
    state: dict[str, Any] = {"communicator": segment.name, "pids": segment.pids}
    if segment.flight is None:
        return state | {"damage": segment.damage}
    ranks = range(segment.flight.nranks)
    return state | {
        "over": over(segment.flight),
        "ranks": [rank_state(segment.flight, rank) for rank in ranks],
    }


def rank_state(flight: Flight, rank: int) -> dict[str, Any]:
    """Describe one local rank of a communicator for JSON."""
    number, size = flight.world_rank_and_size(rank)
    pid, start = flight.liveness_of(rank)
    sight = flight.sight_of(rank)
    presence = sight.presence
    state = procfs.state(pid, start) if presence != "absent" else "not here yet"
    if state == "gone":
        state = {"here": "in another pid namespace?", "closed": "ended"}.get(presence, "dead")
    position = describe.position_of(sight, name_in(flight))
    return {
        "rank": number,
        "size": size,
        "pid": pid if presence != "absent" else None,
        "presence": presence,
        "state": state,
        "where": printable(str(position)),
        "last_call": sight.record,
        "waits": [
            wait | {"waited_s": describe.waited_s(wait, sight.at_ns), "awaited": _awaited(flight, wait)}
            for wait in sight.waits
        ],
    }


def name_in(flight: Flight) -> Any:
    """Return a function that names a segment's ranks. A segment numbers only the ranks of its own host."""

    def name(rank: int | None) -> str:
        if rank is None:
            return "any rank"
        if rank >= flight.nranks:
            return f"rank {rank - flight.nranks} on another host"
        return f"rank {flight.world_rank_and_size(rank)[0]}"

    return name


def _awaited(flight: Flight, wait: dict[str, Any]) -> int | None:
    rank = wait["awaited"]
    if rank is None:
        return None
    return int(rank - flight.nranks) if rank >= flight.nranks else flight.world_rank_and_size(rank)[0]


def over(flight: Flight) -> dict[str, Any] | None:
    """Return why a communicator has ended; None while it has not."""
    try:
        report = flight.abort_report()
    except ValueError as error:
        return {"cause": "damaged", "rank": None, "reason": str(error)}
    if report is None:
        return None
    cause, culprit, _, reason, *_ = report
    return {"cause": cause, "rank": _awaited(flight, {"awaited": culprit}), "reason": printable(reason)}


def over_text(why: dict[str, Any]) -> str:
    """Format the result of `over` as one sentence."""
    words = {
        "failed": "failed",
        "timed out": "was late",
        "aborted": "gave up",
        "remote": "was notified by another host",
    }
    who = f"rank {why['rank']} {words.get(why['cause'], '')}".rstrip()
    if why["cause"] == "mismatch":
        return "the ranks' calls do not match" + (f": {why['reason']}" if why["reason"] else "")
    return f"{who}: {why['reason']}" if why["rank"] is not None else why["reason"]


def printable(text: str) -> str:
    """Replace characters that a terminal would interpret."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
