"""The log files of a run, one for each rank's stdout and stderr: rank-0.out, rank-0.err and so on.

The files have the exact bytes that the ranks wrote. Files of an earlier run are not overwritten.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Sequence

KINDS = ("out", "err")


class Log:
    """The file of one stream. An error does not end the rank; `error` keeps it for the end."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.error: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes) -> None:
        """Write all data, unless an earlier write failed."""
        rest = memoryview(data)
        try:
            while rest and self.error is None:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.error = error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.close(fd)
            except OSError as error:  # some file systems report a lack of space only on close
                self.error = self.error or error

    def discard(self) -> None:
        """Close and remove the file."""
        self.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def restart_directory(directory: str, attempt: int) -> str:
    """Return the subdirectory for the files of a restarted world."""
    return os.path.join(directory, f"restart-{attempt}")


def create_logs(directory: str, ranks: Sequence[int], restarts: int) -> dict[int, tuple[Log, Log]]:
    """Create the files of these ranks in a directory, which is made. Raises OSError if a file cannot be made.

    Files for the coming `restarts` must not exist either.
    """
    _refuse_earlier(directory, ranks, restarts)
    made: list[Log] = []
    try:
        os.makedirs(directory, exist_ok=True)
        for path in _paths(directory, ranks):
            made.append(Log(path))
    except OSError as error:
        for log in made:
            log.discard()
        raise OSError(f"--log-dir is {directory!r}, where no files can be made: {error.strerror}") from None
    return dict(zip(ranks, zip(made[::2], made[1::2], strict=True), strict=True))


def _paths(directory: str, ranks: Iterable[int]) -> list[str]:
    return [os.path.join(directory, f"rank-{rank}.{kind}") for rank in ranks for kind in KINDS]


def _refuse_earlier(directory: str, ranks: Sequence[int], restarts: int) -> None:
    later = (restart_directory(directory, attempt) for attempt in range(1, restarts + 1))
    directories = [directory, *filter(os.path.lexists, later)]
    for path in itertools.chain.from_iterable(_paths(one, ranks) for one in directories):
        if os.path.lexists(path):
            raise FileExistsError(
                f"{path} exists, and files of an earlier run are not overwritten: give --log-dir another "
                "directory, or remove this one"
            )
