"""A trace file for Perfetto or Chrome: for each rank one track with its calls and phases over time.

Each rank adds its part when it stops tracing. It replaces the old file by a new one, so the file is complete
JSON at any time, even after a rank has died. The format is the JSON object format of Chrome's trace events,
in which a rank is a process. A Trace is constructed with an engine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import stat
import sys
import time
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from .._diagnostics.describe import describe_call
from .._diagnostics.flight_recorder import TraceBuffer

if TYPE_CHECKING:
    from .._engine.engine import Engine

Event = dict[str, Any]

CAPACITY = 1 << 16  # slices kept for a rank, 104 bytes each; a power of two
LOCKED_S = 10.0  # other ranks may hold the lock for this long

_END = b"\n]}\n"

_log = logging.getLogger("shmring")
_tracks = itertools.count(1)  # numbers of this process's tracks


class Origin(NamedTuple):
    """The world that a communicator comes from: its nonce, and this rank's place in it."""

    nonce: int
    rank: int
    size: int
    node: int

    @property
    def head(self) -> bytes:
        """First bytes of a trace file of this world."""
        return (
            f'{{"displayTimeUnit":"ns","otherData":{{"shmring":"{self.nonce:x}"}},"traceEvents":[\n'.encode()
        )


class Trace:
    """A trace of a rank, begun by `Comm.trace`. It is a context manager that stops it."""

    def __init__(
        self,
        engine: Engine,
        path: str | os.PathLike[str],
        origin: Origin,
        *,
        ranks: tuple[int, ...] | None = None,
        is_automatic: bool = False,
    ) -> None:
        self.asked_path = os.path.abspath(os.fsdecode(path))  # the path that groups use
        self.path = _of_node(self.asked_path, origin.node)
        self.is_automatic = is_automatic
        self.groups: weakref.WeakSet[Trace] = weakref.WeakSet()  # of groups made meanwhile; they end with it
        self._origin = origin
        self._engine = engine
        self._ranks = ranks
        self._pid = os.getpid()
        buffer = TraceBuffer(CAPACITY)
        self._buffer: TraceBuffer | None = buffer  # None once the trace is stopped
        try:
            engine.trace_into(buffer)
            _begin_file(self.path, origin)
            util = sys.modules.get("multiprocessing.util")
            if util is not None:  # children of multiprocessing skip atexit, which closes communicators
                util.Finalize(self, _stop_weakly, args=(weakref.ref(self),), exitpriority=0)
        except BaseException:
            engine.stop_trace(buffer)
            raise

    def stop(self) -> None:
        """Stop tracing and add this rank's part to the file. A second call does nothing.

        Raises
        ------
        OSError
            If the file cannot be written. `stop` may then be called again.
        RuntimeError
            While another thread is inside a call of the communicator.
        """
        buffer = self._buffer
        if buffer is not None and self._pid == os.getpid():
            self._engine.stop_trace(buffer)
            lines = (json.dumps(event, separators=(",", ":")) for event in self._events(buffer))
            _add_to_file(self.path, self._origin, ",\n".join(lines).encode())
        self._buffer = None
        for group in list(self.groups):
            group.stop()

    def stop_quietly(self) -> None:
        """Stop as `stop` does, but only log errors."""
        try:
            self.stop()
        except Exception as error:
            _log.warning("rank %d: its trace %s is not written: %s", self._origin.rank, self.path, error)

    @property
    def is_running(self) -> bool:
        """True until it is stopped."""
        return self._buffer is not None

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:  # the error of the block matters more than one about the trace
            self.stop_quietly()

    def _events(self, buffer: TraceBuffer) -> Iterator[Event]:
        rank = {"pid": self._origin.rank, "tid": 0}
        whole, own = f"rank {self._origin.rank} of {self._origin.size}", "calls"
        yield {"name": "process_name", "ph": "M", "args": {"name": whole}} | rank
        yield {"name": "process_sort_index", "ph": "M", "args": {"sort_index": self._origin.rank}} | rank
        if self._ranks is not None:
            own = f"group of rank{'s' if len(self._ranks) > 1 else ''} {', '.join(map(str, self._ranks))}"
        calls, messages, ncalls_lost, nmessages_lost = buffer.slices()
        yield from self._track(own, calls, ncalls_lost)
        if messages:  # another thread may send them, so they may overlap with the calls
            yield from self._track(f"{own}: messages", messages, nmessages_lost)

    def _track(self, name: str, slices: list[dict[str, Any]], nlost: int) -> Iterator[Event]:
        track = {"pid": self._origin.rank, "tid": next(_tracks)}
        yield {"name": "thread_name", "ph": "M", "args": {"name": name}} | track
        if nlost:
            at = {"ph": "i", "s": "t", "ts": slices[0]["begin_ns"] / 1000}
            yield {"name": f"{nlost} slices before are lost"} | at | track
        for one in slices:
            yield self._event(one) | track

    def _event(self, one: dict[str, Any]) -> Event:
        times = {"ph": "X", "ts": one["begin_ns"] / 1000, "dur": (one["end_ns"] - one["begin_ns"]) / 1000}
        name, kind = one["what"], one["what"]
        arguments: dict[str, Any] = {key: one[key] for key in ("number", "nbytes", "path") if key in one}
        if "awaited" in one:
            arguments["for"] = f"rank {self._engine.world_rank(one['awaited'])}"
        if "rank" in one:
            kind, arguments["to" if name == "send" else "from"] = "message", f"rank {one['rank']}"
            arguments["outcome"] = one["outcome"]
        if "call" in one:
            name = one["call"]["kind"]
            arguments |= {"call": describe_call(one["call"]), "outcome": one["call"]["outcome"]}
        return {"name": name, "cat": kind, "args": arguments} | times


def _of_node(path: str, node: int) -> str:
    """Return the file of a host. Each host has its own, since clocks and file systems may differ."""
    root, suffix = os.path.splitext(path)
    return f"{root}.node{node}{suffix}" if node else path


def of_epoch(path: str, epoch: int) -> str:
    """Return the file of a world. One made by `grow` has its own, since its ranks differ."""
    root, suffix = os.path.splitext(path)
    return f"{root}.epoch{epoch}{suffix}" if epoch else path


def _stop_weakly(trace: weakref.ref[Trace]) -> None:
    found = trace()
    if found is not None:
        found.stop_quietly()


# ---- the file ---------------------------------------------------------------------------------------------


def _begin_file(path: str, origin: Origin) -> None:
    """Start a new file now, unless this run already has: errors are then reported before the run."""
    with _locked(path) as file:
        if file.read(len(origin.head)) != origin.head:
            _replace(path, None, origin.head.removesuffix(b"\n") + _END)


def _add_to_file(path: str, origin: Origin, events: bytes) -> None:
    """Append the events to those that other ranks of this run have written."""
    with _locked(path) as file:
        if file.read(len(origin.head)) != origin.head:  # another run has replaced the file
            _replace(path, None, origin.head + events + _END)
            return
        nbytes = file.seek(0, os.SEEK_END) - len(_END)
        is_empty = nbytes < len(origin.head)
        _replace(path, (file, nbytes), (b"\n" if is_empty else b",\n") + events + _END)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[BinaryIO]:
    """Open the file, create it if necessary, and hold its lock."""
    until = time.monotonic() + LOCKED_S
    while True:
        with open(path, "rb", opener=_open) as file:
            fd = file.fileno()
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", path)
            _lock(fd, path, until)
            try:
                if os.path.lexists(path) and os.path.samestat(os.fstat(fd), os.lstat(path)):
                    yield file
                    return
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # explicitly: a child forked meanwhile would keep the lock


def _open(path: str, _: int) -> int:
    # Follow no link: in a directory writable by others it could point to any file of this user.
    how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        return os.open(path, how, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link, which a trace does not follow", path) from error


def _open_for_this_user(path: str, how: int) -> int:
    return os.open(path, how, 0o600)


def _lock(fd: int, path: str, until: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(
                    errno.EBUSY, f"another process has it locked for {LOCKED_S:g} s", path
                ) from None
        time.sleep(0.005)


def _replace(path: str, old: tuple[BinaryIO, int] | None, more: bytes) -> None:
    """Replace the file by a new one: a given number of bytes of the old file, then the new bytes."""
    part = f"{path}.part"  # one name is enough: only the holder of the lock creates it
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part)  # left by a killed rank, or a link planted by another user
    try:
        with open(part, "xb", opener=_open_for_this_user) as file:
            if old is not None:
                old[0].seek(0)
                shutil.copyfileobj(old[0], file, 1 << 20)
                file.truncate(old[1])
                file.seek(old[1])
            file.write(more)
            os.fchmod(file.fileno(), stat.S_IMODE(os.lstat(path).st_mode))
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
