"""An engine that cannot be made."""

import ctypes
from types import SimpleNamespace

import pytest

from shmring._engine.engine import Engine


def test_memory_that_is_no_segment_is_refused():
    room = ctypes.create_string_buffer(1 << 16)
    segment = SimpleNamespace(address=ctypes.addressof(room), nbytes=len(room))
    with pytest.raises(ValueError, match="not a segment of 2 ranks"):
        Engine(segment, 0, 2, isa="", tuning=[{}, {}], timeout_s=1.0)
