"""A trace of what ranks did and when, as a file for Perfetto or Chrome: a track a rank, of calls and phases.

Each rank adds its part by itself when it stops, by a new file in place of the old one: it is whole JSON at
any time, also after a rank has died. The format is the JSON object format of Chrome's trace events, in which
a rank is a process. It is handed an engine.
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
from .._engine.trace_buffer import Recorder

if TYPE_CHECKING:
    from .._engine.engine import Engine

Event = dict[str, Any]

CAPACITY = 1 << 16  # slices of a rank that are kept, 96 bytes each; a power of two
LOCKED_S = 10.0  # for which others may be writing

_END = b"\n]}\n"

_log = logging.getLogger("shmring")
_tracks = itertools.count(1)  # of this process


class Origin(NamedTuple):
    """The world that a communicator comes from: its nonce, and this rank's place in it."""

    nonce: int
    rank: int
    size: int
    node: int

    @property
    def head(self) -> bytes:
        """How a file of its ranks begins."""
        return (
            f'{{"displayTimeUnit":"ns","otherData":{{"shmring":"{self.nonce:x}"}},"traceEvents":[\n'.encode()
        )


class Trace:
    """What a rank does from now on; made by `Comm.trace`, a context manager that ends it.

    ranks: those of the world that the communicator has, None for all. is_automatic: nobody has asked for just
    this one, who may ask for another.
    """

    def __init__(
        self,
        engine: Engine,
        path: str | os.PathLike[str],
        origin: Origin,
        *,
        ranks: tuple[int, ...] | None = None,
        is_automatic: bool = False,
    ) -> None:
        self.asked_path = os.path.abspath(os.fsdecode(path))  # as groups are to have it
        self.path = _of_node(self.asked_path, origin.node)
        self.is_automatic = is_automatic
        self.groups: weakref.WeakSet[Trace] = weakref.WeakSet()  # that began meanwhile, and end with it
        self._origin = origin
        self._engine = engine
        self._ranks = ranks
        self._pid = os.getpid()
        self._recorder: Recorder | None = Recorder(engine, CAPACITY)
        try:
            _begin_file(self.path, origin)
        except BaseException:
            self._recorder.stop()
            raise
        util = sys.modules.get("multiprocessing.util")
        if util is not None:  # children of multiprocessing end without atexit, in which communicators close
            util.Finalize(self, _stop_weakly, args=(weakref.ref(self),), exitpriority=0)

    def stop(self) -> None:
        """End it, and add this rank's part to the file; a second call does nothing.

        Raises OSError where it cannot be written: it can be stopped again, then. RuntimeError while another
        thread is inside a call of the communicator.
        """
        recorder = self._recorder
        if recorder is not None and self._pid == os.getpid():
            recorder.stop()
            lines = (json.dumps(event, separators=(",", ":")) for event in self._events(recorder))
            _add_to_file(self.path, self._origin, ",\n".join(lines).encode())
        self._recorder = None
        for group in list(self.groups):
            group.stop()

    def stop_quietly(self) -> None:
        """As `stop`; what goes wrong is only logged."""
        try:
            self.stop()
        except Exception as error:
            _log.warning("rank %d: its trace %s is not written: %s", self._origin.rank, self.path, error)

    def report_untraced(self, error: Exception) -> None:
        """A group that would have been traced with it goes on without."""
        _log.warning("rank %d: a group is not traced: %s", self._origin.rank, error)

    @property
    def is_running(self) -> bool:
        """Whether it has not been stopped."""
        return self._recorder is not None

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:  # which says more than a trace that cannot be written
            self.stop_quietly()

    def _events(self, recorder: Recorder) -> Iterator[Event]:
        rank = {"pid": self._origin.rank, "tid": 0}
        whole, own = f"rank {self._origin.rank} of {self._origin.size}", "calls"
        yield {"name": "process_name", "ph": "M", "args": {"name": whole}} | rank
        yield {"name": "process_sort_index", "ph": "M", "args": {"sort_index": self._origin.rank}} | rank
        if self._ranks is not None:
            own = f"group of rank{'s' if len(self._ranks) > 1 else ''} {', '.join(map(str, self._ranks))}"
        calls, messages, ncalls_lost, nmessages_lost = recorder.slices()
        yield from self._track(own, calls, ncalls_lost)
        if messages:  # another thread may be at them, so they would not fit between the calls
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
    """Each host has a file of its own: their clocks differ, and so may what the path means."""
    root, suffix = os.path.splitext(path)
    return f"{root}.node{node}{suffix}" if node else path


def _stop_weakly(trace: weakref.ref[Trace]) -> None:
    found = trace()
    if found is not None:
        found.stop_quietly()


# ---- the file ---------------------------------------------------------------------------------------------


def _begin_file(path: str, origin: Origin) -> None:
    """There is none, or an earlier run's: that goes now, while what is wrong can still be put right."""
    with _locked(path) as file:
        if file.read(len(origin.head)) != origin.head:
            _replace(path, None, origin.head.removesuffix(b"\n") + _END)


def _add_to_file(path: str, origin: Origin, events: bytes) -> None:
    """Behind what other ranks of this run have written."""
    with _locked(path) as file:
        if file.read(len(origin.head)) != origin.head:  # somebody else's by now
            _replace(path, None, origin.head + events + _END)
            return
        nbytes = file.seek(0, os.SEEK_END) - len(_END)
        is_empty = nbytes < len(origin.head)
        _replace(path, (file, nbytes), (b"\n" if is_empty else b",\n") + events + _END)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[BinaryIO]:
    """The file, made if there is none, while nobody else writes it."""
    until = time.monotonic() + LOCKED_S
    while True:
        with open(path, "rb", opener=_open) as file:
            fd = file.fileno()
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file", path)
            _lock(fd, path, until)
            try:
                if os.path.lexists(path) and os.path.samestat(os.fstat(fd), os.lstat(path)):
                    yield file
                    return
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # which a child that was forked meanwhile would keep


def _open(path: str, _: int) -> int:
    # No link is followed: in a directory that others may write to one could lead to any file of this user.
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
    """A new file in place of that one: so many bytes of the old one, and more."""
    part = f"{path}.part"  # one name, as only who has the lock makes it
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part)  # of a rank that was killed, or a link that somebody else has put there
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
