"""Python objects as messages: they are pickled, and sent as plain bytes."""

from __future__ import annotations

import pickle as _pickle
from collections.abc import Callable, Iterable
from typing import Any

from .memory import buffer

_THRESHOLD = 1 << 18


class Pickle:
    """The conversion of objects to bytes. `dumps` and `loads` may be replaced, as by cloudpickle's."""

    def __init__(
        self,
        dumps: Callable[..., bytes] | None = None,
        loads: Callable[..., Any] | None = None,
        protocol: int | None = None,
        threshold: int | None = None,
    ) -> None:
        self._dumps, self._loads = dumps or _pickle.dumps, loads or _pickle.loads
        if protocol is None and self._dumps is _pickle.dumps:
            protocol = _pickle.HIGHEST_PROTOCOL
        self._protocol = protocol
        self._threshold = _THRESHOLD if threshold is None else threshold

    @property
    def PROTOCOL(self) -> int | None:
        """The protocol that `dumps` is called with; None: the function's own."""
        return self._protocol

    @PROTOCOL.setter
    def PROTOCOL(self, protocol: int | None) -> None:
        if protocol is None and self._dumps is _pickle.dumps:
            protocol = _pickle.HIGHEST_PROTOCOL
        self._protocol = protocol

    @property
    def THRESHOLD(self) -> int:
        """The size in bytes from which `dumps_oob` leaves a buffer out of the pickle."""
        return self._threshold

    @THRESHOLD.setter
    def THRESHOLD(self, threshold: int | None) -> None:
        self._threshold = _THRESHOLD if threshold is None else threshold

    def dumps(self, obj: Any) -> bytes:
        """Return an object as bytes."""
        return self._dumps(obj) if self._protocol is None else self._dumps(obj, self._protocol)

    def loads(self, data: Any) -> Any:
        """Return the object of the bytes."""
        return self._loads(data)

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[buffer]]:
        """Return an object as bytes, and its large buffers."""
        left_out: list[buffer] = []

        def leave_out(part: Any) -> bool:
            memory = buffer(part)
            if memory.nbytes < self._threshold:
                return True
            left_out.append(memory)
            return False

        protocol = _pickle.HIGHEST_PROTOCOL if self._protocol is None else max(5, self._protocol)
        return self._dumps(obj, protocol, buffer_callback=leave_out), left_out

    def loads_oob(self, data: Any, buffers: Iterable[Any]) -> Any:
        """Return the object of the bytes and the buffers."""
        return self._loads(data, buffers=buffers)


pickle = Pickle()
