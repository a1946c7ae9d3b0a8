"""The output of several ranks on one terminal or in one log: whole lines, each with its rank in front.

Rank 0's unfinished line (a progress bar, a prompt) is shown while it grows, and is drawn again below
the lines that others print meanwhile. May know: nothing.
"""

from __future__ import annotations

import collections
import os
import select

_LONGEST_LINE_NBYTES = 1 << 16
_TAIL_LINES = 200
_CLEAR_LINE = b"\r\x1b[K"
_COLOURS = (36, 33, 35, 32, 34, 31)


class Screen:
    """One terminal or file, reached by stdout, stderr or both, and the unfinished line on it, if any."""

    def __init__(self, tty: bool) -> None:
        self.tty = tty
        self._open: Stream | None = None

    def line(self, stream: Stream, line: bytes) -> None:
        """A finished line of a stream."""
        unfinished, self._open = self._open, None
        if not self.tty and unfinished is not stream and 0 < len(line) == stream.shown_nbytes:
            return  # all of it was there when another line ended it
        whole = stream.prefix + stream.last_segment(line) + b"\n"
        if unfinished is None:
            _write(stream.fd, whole)
        elif self.tty:
            _write(stream.fd, _CLEAR_LINE + whole)
            if unfinished is not stream:
                self.unfinished(unfinished)
        elif unfinished is stream:
            _write(stream.fd, stream.prefixed(line[stream.shown_nbytes :]) + b"\n")
        else:
            _write(stream.fd, b"\n" + whole)

    def unfinished(self, stream: Stream) -> None:
        """A stream's line as far as it has come."""
        if self._open is stream and not self.tty:
            _write(stream.fd, stream.prefixed(stream.rest[stream.shown_nbytes :]))
        else:
            clear = b"" if self._open is None else _CLEAR_LINE if self.tty else b"\n"
            _write(stream.fd, clear + stream.prefix + stream.rest.rpartition(b"\r")[2])
        self._open = stream

    def finish(self) -> None:
        """End the unfinished line: something else is going to be printed."""
        if self._open is not None:
            _write(self._open.fd, b"\n")
            self._open = None


class Stream:
    """One rank's stdout or stderr on its way to our `fd`.

    `rest` is its unfinished line, `shown_nbytes` how much of that is on the screen if it is the one
    there, `tail` its last lines.
    """

    def __init__(self, screen: Screen, fd: int, prefix: bytes, *, live: bool) -> None:
        self.fd = fd
        self.prefix = prefix
        self.rest = b""
        self.shown_nbytes = 0
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._screen = screen
        self._live = live

    def feed(self, data: bytes) -> None:
        """Pass on what the rank has written."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._finish_line(line)
        # In a log a line in pieces would be torn apart by other ranks' lines, but a progress bar, which
        # starts over at each carriage return, is wanted as it grows.
        shown = self._live and bool(self.rest) and (self._screen.tty or b"\r" in self.rest)
        if shown:
            self._screen.unfinished(self)
        if b"\r" in self.rest and (self._live or self.prefix):
            self.rest = b"\r" + self.rest.rpartition(b"\r")[2]  # what was overwritten is of no more use
        self.shown_nbytes = len(self.rest) if shown else 0
        if len(self.rest) > _LONGEST_LINE_NBYTES:
            self.close()

    def close(self) -> None:
        """The rank has closed it: an unfinished line is finished."""
        rest, self.rest = self.rest, b""
        if rest:
            self._finish_line(rest)

    def last_segment(self, line: bytes) -> bytes:
        """What carriage returns have left of a line; all of it where output is passed on unchanged."""
        return _last_segment(line) if self.prefix else line

    def prefixed(self, text: bytes) -> bytes:
        return text.replace(b"\r", b"\r" + self.prefix)

    def _finish_line(self, line: bytes) -> None:
        self._screen.line(self, line)
        self.shown_nbytes = 0
        self.tail.append(_last_segment(line).decode("utf-8", "replace")[:2000])


def _last_segment(line: bytes) -> bytes:
    return line.removesuffix(b"\r").rpartition(b"\r")[2]


def screens(out_fd: int, err_fd: int) -> tuple[Screen, Screen]:
    """The screens behind stdout and stderr: one and the same where both lead to one place."""
    out_tty, err_tty = os.isatty(out_fd), os.isatty(err_fd)
    out = Screen(out_tty)
    same = out_tty == err_tty and (out_tty or os.path.samestat(os.fstat(out_fd), os.fstat(err_fd)))
    return out, out if same else Screen(err_tty)


def rank_prefix(rank: int, nprocs: int, *, colour: bool) -> bytes:
    text = f"{rank:>{len(str(nprocs - 1))}}|"
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} ").encode()


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # somebody else has made our terminal non-blocking
            select.select([], [fd], [])
