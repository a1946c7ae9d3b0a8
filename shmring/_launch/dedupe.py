"""Show identical lines that several ranks print within HOLD_S once, with these ranks in front: 0-3|.

The lines of each rank keep their order, and no line waits longer than HOLD_S.
"""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass

from .output_mux import Front, Screen, Stream

HOLD_S = 0.2  # ranks in lockstep are closer together, and people do not notice the delay
_MOST_HELD = 1000


@dataclass
class _Held:
    """A line that waits for the same line of other ranks, and the streams that have printed it."""

    text: bytes
    streams: list[Stream]
    until: float

    def is_of(self, rank: int) -> bool:
        return any(stream.rank == rank for stream in self.streams)


class Dedupe(Screen):
    """A screen that delays lines by up to HOLD_S. Lines are shown in the order of their arrival."""

    def __init__(self, tty: bool, front: Front) -> None:
        super().__init__(tty, front)
        self._held: collections.deque[_Held] = collections.deque()
        self._counts: collections.Counter[int] = collections.Counter()  # lines held, by rank
        self._streams: collections.Counter[int] = collections.Counter()  # open streams, by rank
        self._ended: _Held | None = None  # held, but drawn on the terminal as an unfinished line

    def opened(self, stream: Stream) -> None:
        """Register a stream, so that lines of other ranks wait for its lines."""
        self._streams[stream.rank] += 1

    def closed(self, stream: Stream) -> None:
        """Remove a stream, and show lines that waited only for it."""
        self._streams[stream.rank] -= 1
        self._streams += collections.Counter()  # drops counts of 0
        self._show_settled()

    def line(self, stream: Stream, line: bytes) -> None:
        """Take a finished line: join it to the same line of other ranks, or hold it."""
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
        """Show a stream's unfinished line: on a terminal below all others, in a log in its place."""
        if not self.tty:
            self._show_all_of(stream.rank)
        ended, self._ended = self._ended, None
        standing = self._open
        super().unfinished(stream)
        if ended is not None and standing is not None:  # the held line must not be drawn again as unfinished
            self.uncover(standing)

    def release(self, now: float) -> None:
        """Show the lines whose time is up."""
        while self._held and self._held[0].until <= now:
            self._show_first()

    def finish(self) -> None:
        """Show everything, and end the unfinished line."""
        self.release(float("inf"))
        super().finish()

    @property
    def due_at(self) -> float:
        """Return the time at which the first held line must be shown."""
        return self._held[0].until if self._held else float("inf")

    def _same(self, stream: Stream, text: bytes) -> _Held | None:
        """Return the first equal held line that this rank can join without reordering its own lines."""
        found = None
        for held in reversed(self._held):
            if held.is_of(stream.rank):
                break
            if held.text == text and held.streams[0].fd == stream.fd:
                found = held
        return found

    def _show_settled(self) -> None:
        """Show the lines that no rank can join: every open rank has a line there or later."""
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
