"""Types of the frames of Python objects."""

import pickle
from typing import Any

import numpy as np

class ArrayPickler(pickle.Pickler):
    """Pickle arrays of numbers as calls of `numpy.ndarray`, which takes half the time of NumPy's own way."""

    def reducer_override(self, item: object) -> Any: ...

def as_array(frame: bytes | np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the frame as an array, without a copy."""

def pieces_of(item: object) -> list[bytes | memoryview]:
    """Return the frame that `pack` returns in pieces: bytes, and the memory of the object's arrays, not
    copied.
    """

def pack(item: object) -> bytes | np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the object as a frame: bytes if it is a pickle, else an array. Raise the errors of pickle."""

def unpack(frame: bytes | np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    """Return the object of a frame. Its arrays are writable and use the frame's memory."""
