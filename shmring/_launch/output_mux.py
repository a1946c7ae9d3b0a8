"""Combine the output of several ranks on one terminal or in one log: whole lines with the rank in front.

The lines of a traceback are shown together. The unfinished line of one rank (a progress bar, a prompt) is
shown as it grows. It is drawn again below lines that other ranks print meanwhile.

A screen never blocks: it keeps what its reader does not take yet, and shmrun reads no more for it meanwhile.
"""

from __future__ import annotations

import collections
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .._system import cpulist
from .log_files import Log

_LONGEST_LINE_NBYTES = 1 << 16  # of a line that is always shown whole
_TAIL_LINES = 200
_CLEAR_LINE = b"\r\x1b[K"
_COLOURS = (36, 33, 35, 32, 34, 31)
_TRACEBACK = b"Traceback (most recent call last):"


@dataclass(frozen=True)
class Front:
    """The prefix of a line: its ranks, in `width` columns; empty if `width` is 0."""

    width: int
    colour: bool = False

    def of(self, ranks: Sequence[int]) -> bytes:
        if not self.width:
            return b""
        text = f"{cpulist.spell(ranks):>{self.width}}|"
        colour = _COLOURS[min(ranks) % len(_COLOURS)]
        return (f"\x1b[{colour}m{text}\x1b[0m " if self.colour else f"{text} ").encode()


class Screen:
    """A terminal or file behind stdout, stderr or both, with its unfinished line, if any."""

    def __init__(self, tty: bool, front: Front) -> None:
        self.tty = tty
        self.front = front
        self.error: OSError | None = None  # the first error of a write, after which nothing is written
        self._unwritten: collections.deque[tuple[int, bytes]] = collections.deque()
        self._open: Stream | None = None
        self._drawn = b""  # text of the unfinished line on a terminal
        # On a terminal, another stream and its unfinished line, drawn again when the open line is finished.
        # It occurs with a bar on stderr and print(), which writes the end of a line separately.
        self._covered: tuple[Stream, bytes] | None = None

    def opened(self, stream: Stream) -> None:
        """Register a stream that may write lines."""

    def closed(self, stream: Stream) -> None:
        """Remove a stream that writes no more lines."""

    def line(self, stream: Stream, line: bytes) -> None:
        """Show a finished line of a stream."""
        self.uncover(stream)
        left = stream.left_of(line)
        if self._open is stream and not self.tty:
            self._open = None
            self.write(stream.fd, left + b"\n")
        elif self.tty or left or not stream.shown_nbytes:  # not shown yet, or ended by another line
            whole = stream.prefix + stream.last_segment(line) if self.tty or stream.prefix else left
            self.show(stream.fd, whole, ends=self._open is stream)

    def show(self, fd: int, whole: bytes, *, ends: bool) -> None:
        """Show a whole line: the end of the unfinished line, or a line above the unfinished line."""
        unfinished, self._open = self._open, None
        if unfinished is None:
            self.write(fd, whole + b"\n")
        elif not self.tty:
            self.write(fd, b"\n" + whole + b"\n")
        else:
            self.write(fd, _CLEAR_LINE + whole + b"\n")
            back = (unfinished, self._drawn) if not ends else self._covered
            if back is not None:
                self._open, self._drawn = back
                self.write(self._open.fd, self._drawn)
                self.uncover(self._open)

    def uncover(self, stream: Stream) -> None:
        """Forget the covered line if it is this stream's, because it is finished or shown."""
        if self._covered is not None and self._covered[0] is stream:
            self._covered = None

    def unfinished(self, stream: Stream) -> None:
        """Show a stream's unfinished line."""
        clear = b"" if self._open is None else _CLEAR_LINE if self.tty else b"\n"
        if self.tty or (stream.prefix and self._open is not stream):
            if self.tty and self._open is not None and self._open is not stream:
                self._covered = self._open, self._drawn
            self._drawn = stream.prefix + _last_segment(stream.rest)
            self.write(stream.fd, clear + self._drawn)
        else:
            self.write(stream.fd, (clear if self._open is not stream else b"") + stream.left_of(stream.rest))
        self._open = stream

    @property
    def due_at(self) -> float:
        """Return when `release` must be called, by time.monotonic()."""
        return float("inf")

    def release(self, now: float) -> None:
        """Show the lines whose time is up."""

    def finish(self) -> None:
        """End the unfinished line before other output."""
        if self._open is not None:
            self.write(self._open.fd, b"\n")
            self._open = self._covered = None

    def write(self, fd: int, data: bytes) -> None:
        """Write data, now or by `flush`, unless an earlier write failed, which must not end the ranks."""
        if data and self.error is None:
            self._unwritten.append((fd, data))
            self.flush()

    def flush(self) -> None:
        """Write what the reader takes now."""
        try:
            while self._unwritten:
                fd, data = self._unwritten.popleft()
                rest = data[_write(fd, data) :]
                if rest:
                    self._unwritten.appendleft((fd, rest))
                    break
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Write nothing any more."""
        self.error = error
        self._unwritten.clear()

    @property
    def blocked_fd(self) -> int | None:
        """Return the descriptor whose reader has not taken everything, if any."""
        return self._unwritten[0][0] if self._unwritten else None


class Stream:
    """One rank's stdout or stderr, which goes to a file of its own, to our `fd`, to both, or nowhere.

    `rest` is its unfinished line, `shown_nbytes` the bytes of `rest` on the screen if its line is the
    unfinished one there, `tail` its last lines.
    """

    def __init__(
        self, rank: int, fd: int, screen: Screen | None, *, live: bool = False, log: Log | None = None
    ) -> None:
        self.rank = rank
        self.fd = fd
        self.log = log
        self.prefix = b"" if screen is None else screen.front.of([rank])
        self.rest = b""
        self.shown_nbytes = 0
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._screen = screen
        self._live = live
        self._traceback: list[bytes] = []  # the lines of a traceback so far, which are not shown yet
        if screen is not None:
            screen.opened(self)

    def feed(self, data: bytes) -> None:
        """Pass on data that the rank has written."""
        if self.log is not None:
            self.log.write(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._finish_line(line)
        # In a log, other ranks' lines would split an unfinished line. A progress bar is shown nevertheless:
        # it starts over at each carriage return.
        screen = self._screen
        live = self._live and not self._traceback
        shown = screen is not None and live and bool(self.rest) and (screen.tty or b"\r" in self.rest)
        if screen is not None and shown:
            screen.unfinished(self)
        if b"\r" in self.rest and (self._live or self.prefix):
            end = b"\r" if self.rest.endswith(b"\r") else b""
            self.rest = b"\r" + _last_segment(self.rest) + end  # drops the overwritten text
        self.shown_nbytes = len(self._settled(self.rest)) if shown else 0
        if len(self.rest) > _LONGEST_LINE_NBYTES:
            if screen is None or screen.tty or self.prefix:
                self._cut()
            else:
                self._show_piece(screen)

    def close(self) -> None:
        """Finish an unfinished line: the rank has closed the stream."""
        self._cut()
        screen, self._screen = self._screen, None
        if screen is not None:
            self._show(screen, self._traceback)
            screen.closed(self)
        if self.log is not None:
            self.log.close()

    @property
    def is_blocked(self) -> bool:
        """Return whether the reader of this stream's screen has not taken everything yet."""
        return self._screen is not None and self._screen.blocked_fd is not None

    def last_segment(self, line: bytes) -> bytes:
        """Return the text after the last carriage return; the whole line if output is passed on unchanged."""
        return _last_segment(line) if self.prefix else line

    def left_of(self, line: bytes) -> bytes:
        """Return the part of a line that is not on the screen yet."""
        return self._settled(line)[self.shown_nbytes :].replace(b"\r", b"\r" + self.prefix)

    def _settled(self, line: bytes) -> bytes:
        # Hold back a carriage return at the end: it may be part of the line's end.
        return line.rstrip(b"\r") if self.prefix else line

    def _show_piece(self, screen: Screen) -> None:
        """Show the unfinished line so far, unchanged, and continue it with what comes."""
        self._show(screen, self._traceback)
        self._traceback = []
        screen.unfinished(self)
        self.rest, self.shown_nbytes = b"", 0

    def _cut(self) -> None:
        rest, self.rest = self.rest, b""
        if rest:
            self._finish_line(rest)

    def _finish_line(self, line: bytes) -> None:
        if self._screen is not None:
            self._traceback.append(line)
            if not self._is_inside_traceback(line):
                self._show(self._screen, self._traceback)
                self._traceback = []
        self.shown_nbytes = 0
        self.tail.append(_last_segment(line).decode("utf-8", "replace")[:2000])

    def _is_inside_traceback(self, line: bytes) -> bool:
        """Return whether more lines of a traceback follow: the first line without indent ends it."""
        is_head = line == _TRACEBACK and not self.shown_nbytes
        return is_head or (line.startswith(b" ") and self._traceback[0] == _TRACEBACK)

    def _show(self, screen: Screen, lines: list[bytes]) -> None:
        for line in lines:
            screen.line(self, line)


def _last_segment(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def screens(out_fd: int, err_fd: int, make: Callable[[bool], Screen]) -> tuple[Screen, Screen]:
    """Return the screens behind stdout and stderr: the same screen if both lead to one terminal or file."""
    out_tty, err_tty = os.isatty(out_fd), os.isatty(err_fd)
    out = make(out_tty)
    same = out_tty == err_tty and (out_tty or os.path.samestat(os.fstat(out_fd), os.fstat(err_fd)))
    return out, out if same else make(err_tty)


def _write(fd: int, data: bytes) -> int:
    """Write without blocking; return the number of bytes written.

    The descriptor stays blocking, since other processes use it. A ready pipe takes PIPE_BUF bytes at once.
    """
    written = 0
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    while written < len(data) and poller.poll(0):
        try:
            written += os.write(fd, data[written : written + select.PIPE_BUF])
        except BlockingIOError:  # another process has made the terminal non-blocking
            break
    return written
