"""What is said of a message."""

from typing import final

@final
class Status:
    """What has come, or waits: `source`, `tag`, `count` (elements), `nbytes`, `dtype`."""

    @property
    def source(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str | None: ...
