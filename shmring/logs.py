"""A run's files in a directory, one for each rank's stdout and stderr: rank-0.out, rank-0.err and so on.

They hold what the ranks wrote, byte by byte, and an earlier run's are left alone. May know: nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable

KINDS = ("out", "err")


class Log:
    """The file of one stream; what goes wrong with it does not end the rank, and is told afterwards."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.error: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes) -> None:
        """All of it, unless the file could not be written before."""
        rest = memoryview(data)
        try:
            while rest and self.error is None:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.error = error

    def close(self) -> None:
        """A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def create_logs(directory: str, ranks: Iterable[int]) -> dict[int, tuple[Log, Log]]:
    """The files of these ranks, new, in a directory that is made; OSError says why there are none."""
    paths = {rank: [os.path.join(directory, f"rank-{rank}.{kind}") for kind in KINDS] for rank in ranks}
    for path in itertools.chain(*paths.values()):  # all before the first: who is refused leaves nothing
        if os.path.lexists(path):
            raise FileExistsError(
                f"{path} is there, and what an earlier run has written is kept: give --log-dir another "
                "directory, or remove this one"
            )
    try:
        os.makedirs(directory, exist_ok=True)
        return {rank: (Log(out), Log(err)) for rank, (out, err) in paths.items()}
    except OSError as error:
        raise OSError(f"--log-dir is {directory!r}, where no files can be made: {error.strerror}") from None
