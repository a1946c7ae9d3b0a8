"""Identical lines that several ranks print within a moment, shown once with all of these in front: 0-3|.

The lines of each rank stay in their order, and none waits longer than HOLD_S.
"""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass

from .output_mux import Front, Screen, Stream

HOLD_S = 0.2  # ranks in step are less apart, and people do not notice it
_MOST_HELD = 1000


@dataclass
class _Held:
    """A line that waits for the same of other ranks, and whose it is so far."""

    text: bytes
    streams: list[Stream]
    until: float

    def is_of(self, rank: int) -> bool:
        return any(stream.rank == rank for stream in self.streams)


class Dedupe(Screen):
    """A screen that holds lines back for a moment. They leave in the order in which they came."""

    def __init__(self, tty: bool, front: Front) -> None:
        super().__init__(tty, front)
        self._held: collections.deque[_Held] = collections.deque()
        self._counts: collections.Counter[int] = collections.Counter()  # of lines held, by rank
        self._streams: collections.Counter[int] = collections.Counter()  # that may bring more, by rank
        self._ended: _Held | None = None  # as far as it is drawn, as the unfinished line that it was

    def opened(self, stream: Stream) -> None:
        """Others' lines may wait for it."""
        self._streams[stream.rank] += 1

    def closed(self, stream: Stream) -> None:
        """Nothing waits for it any more."""
        self._streams[stream.rank] -= 1
        self._streams += collections.Counter()  # without those that are 0
        self._show_settled()

    def line(self, stream: Stream, line: bytes) -> None:
        """A finished line: it joins the same of other ranks, or waits for them."""
        if stream.shown_nbytes and not self.tty:
            self._show_all_of(stream.rank)
            super().line(stream, line)
            return
        self.uncover(stream)
        text = stream.last_segment(line)
        held = self._same(stream, text)
        if held is None:
            self._held.append(held := _Held(text, [], time.monotonic() + HOLD_S))
        held.streams.append(stream)
        self._counts[stream.rank] += 1
        if self._open is stream and self._ended is None:
            self._ended = held
        self._show_settled()

    def unfinished(self, stream: Stream) -> None:
        """A stream's line as far as it has come: on a terminal it is below all others, in a log it stands."""
        if not self.tty:
            self._show_all_of(stream.rank)
        ended, self._ended = self._ended, None
        standing = self._open
        super().unfinished(stream)
        if ended is not None and standing is not None:  # it is held, and not to come back as unfinished
            self.uncover(standing)

    def release(self, now: float) -> None:
        """Show what has waited long enough."""
        while self._held and self._held[0].until <= now:
            self._show_first()

    def finish(self) -> None:
        """Show everything, and end the unfinished line."""
        self.release(float("inf"))
        super().finish()

    @property
    def due_at(self) -> float:
        """When the first line has waited long enough."""
        return self._held[0].until if self._held else float("inf")

    def _same(self, stream: Stream, text: bytes) -> _Held | None:
        """The first such line that this rank's may join without passing an earlier one of its own."""
        found = None
        for held in reversed(self._held):
            if held.is_of(stream.rank):
                break
            if held.text == text and held.streams[0].fd == stream.fd:
                found = held
        return found

    def _show_settled(self) -> None:
        """Show what nobody can join any more, as every rank that goes on has a line there or further back."""
        while self._held and (self._streams.keys() <= self._counts.keys() or len(self._held) > _MOST_HELD):
            self._show_first()

    def _show_all_of(self, rank: int) -> None:
        while rank in self._counts:
            self._show_first()

    def _show_first(self) -> None:
        held = self._held.popleft()
        whole = self.front.of([stream.rank for stream in held.streams]) + held.text
        self.show(held.streams[0].fd, whole, ends=held is self._ended)
        self._ended = None if held is self._ended else self._ended
        for stream in held.streams:
            self._counts[stream.rank] -= 1
            if not self._counts[stream.rank]:
                del self._counts[stream.rank]
