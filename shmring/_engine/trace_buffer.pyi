from typing import Any, final

from .engine import Engine

TRACED: tuple[str, ...]

@final
class Recorder:
    def __init__(self, engine: Engine, capacity: int) -> None: ...
    def stop(self) -> None: ...
    def slices(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int, int]: ...
