"""A progress bar if tqdm is installed, else a line at intervals."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Count samples, and show the last round trip."""

    def __init__(self, title: str) -> None:
        self._title, self._done, self._total, self._next_line_s = title, 0, 0, 0.0
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(desc=title, unit="sample", mininterval=0.5)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def total(self, samples: int) -> None:
        self._total = samples
        if self._bar is not None:
            self._bar.total = samples
            self._bar.refresh()

    def advance(self, samples: int, round_trip_ns: float) -> None:
        self._done += samples
        trip = f"{round_trip_ns:.0f} ns" if round_trip_ns >= 0 else "unknown"
        if self._bar is not None:
            self._bar.set_postfix(round_trip=trip, refresh=False)
            self._bar.update(samples)
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + SECONDS_BETWEEN_LINES
            print(f"{self._title}: {self._done}/{self._total} samples, round trip {trip}", file=sys.stderr)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr)
