"""A trace of what ranks did and when, as a file for Perfetto or Chrome: a track a rank, of calls and phases.

Each rank adds its own part to the file when it stops, so that it is whole JSON at any time, also after a rank
has died. The format is the JSON object format of Chrome's trace events. May know: _recorder, flight; it is
handed an engine.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._recorder import Recorder
from .flight import describe_call, named

if TYPE_CHECKING:
    from ._engine import Engine

Event = dict[str, Any]

CAPACITY = 1 << 16  # slices of a rank that are kept, 96 bytes each; a power of two

_END = b"\n]}\n"

_log = logging.getLogger("shmring")
_numbers = itertools.count(1)  # of the communicators of this process that are traced: their tracks


class Trace:
    """What a rank does from now on; made by `Comm.trace`, a context manager that ends it."""

    def __init__(
        self,
        engine: Engine,
        path: str | os.PathLike[str],
        *,
        rank: int,
        size: int,
        node: int,
        ranks: tuple[int, ...] | None = None,
        within: Trace | None = None,
    ) -> None:
        self.path: str = within.path if within else _of_node(os.path.abspath(os.fspath(path)), node)
        self._run: str = within._run if within else _run_of(engine)
        with open(self.path, "ab"):  # now, while it can still be put right
            pass
        self._engine = engine
        self._track = {"pid": os.getpid(), "tid": next(_numbers)}
        self._name = f"rank {rank} of {size}" if ranks is None else f"rank {rank} of {named(ranks)}"
        self._rank = rank if within is None else None  # by which the process is named
        self._recorder: Recorder | None = Recorder(engine, CAPACITY)

    def stop(self) -> None:
        """End it, and add this rank's part to the file; a second call does nothing. Raises OSError."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None and self._track["pid"] == os.getpid():
            recorder.stop()
            _add_to_file(self.path, self._run, self._events(recorder))

    def stop_quietly(self) -> None:
        """As `stop`; what goes wrong is only logged."""
        try:
            self.stop()
        except OSError as error:
            _log.warning("%s: its trace %s could not be written: %s", self._name, self.path, error.strerror)

    @property
    def is_running(self) -> bool:
        """Whether it has not been stopped."""
        return self._recorder is not None

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _events(self, recorder: Recorder) -> Iterator[Event]:
        if self._rank is not None:
            yield self._about("process_name", name=self._name)
            yield self._about("process_sort_index", sort_index=self._rank)
        calls, messages, ncalls_lost, nmessages_lost = recorder.slices()
        yield from self._track_of(self._name, calls, ncalls_lost)
        if messages:  # another thread may be at them, so they would not fit between the calls
            self._track["tid"] = next(_numbers)
            yield from self._track_of(f"{self._name}: messages", messages, nmessages_lost)

    def _track_of(self, name: str, slices: list[dict[str, Any]], nlost: int) -> Iterator[Event]:
        yield self._about("thread_name", name=name)
        if nlost:
            at = {"ph": "i", "s": "t", "ts": slices[0]["begin_ns"] / 1000}
            yield {"name": f"{nlost} slices before are lost"} | at | self._track
        yield from map(self._event, slices)

    def _about(self, what: str, **arguments: str | int) -> Event:
        return {"name": what, "ph": "M", "args": arguments} | self._track

    def _event(self, one: dict[str, Any]) -> Event:
        times = {"ph": "X", "ts": one["begin_ns"] / 1000, "dur": (one["end_ns"] - one["begin_ns"]) / 1000}
        name, kind = one["what"], one["what"]
        arguments: dict[str, Any] = {key: one[key] for key in ("number", "nbytes", "path") if key in one}
        if "awaited" in one:
            arguments["for"] = f"rank {self._engine.world_rank(one['awaited'])}"
        if "rank" in one:
            kind, arguments["to" if name == "send" else "from"] = "message", f"rank {one['rank']}"
        if "call" in one:
            name = one["call"]["kind"]
            arguments |= {"call": describe_call(one["call"]), "outcome": one["call"]["outcome"]}
        return {"name": name, "cat": kind, "args": arguments} | times | self._track


def _of_node(path: str, node: int) -> str:
    """Each host has a file of its own: their clocks differ, and so may what the path means."""
    root, suffix = os.path.splitext(path)
    return f"{root}.node{node}{suffix}" if node else path


def _run_of(engine: Engine) -> str:
    """The same on all ranks of the host, and no other communicator's."""
    return hashlib.blake2b(engine.flight.nonce.to_bytes(8, "little"), digest_size=8).hexdigest()


def _add_to_file(path: str, run: str, events: Iterable[Event]) -> None:
    """Behind what other ranks of this run have written; what an earlier run has is replaced."""
    head = f'{{"displayTimeUnit":"ns","otherData":{{"shmring":"{run}"}},"traceEvents":[\n'.encode()
    body = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()
    with open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        file.seek(0)
        if file.read(len(head)) == head:
            file.truncate(file.seek(-len(_END), os.SEEK_END))
            file.write(b",\n" + body + _END)
        else:
            file.truncate(0)
            file.write(head + body + _END)
