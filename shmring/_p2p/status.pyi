"""Descriptions of messages."""

from typing import final

@final
class Status:
    """A received or waiting message: `source`, `tag`, `count` (elements), `nbytes`, `dtype`."""

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
