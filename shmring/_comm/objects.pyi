"""Types of the frames of Python objects."""

import pickle
from typing import Any

import numpy as np

class ArrayPickler(pickle.Pickler):
    """Pickle arrays of numbers as calls of `numpy.ndarray`, which takes half the time of NumPy's own way."""

    def reducer_override(self, item: object) -> Any: ...

class Slots:
    """The slots of one communicator: this rank's own, and all ranks' that an all_gather collects."""

    @property
    def own(self) -> np.ndarray[Any, np.dtype[np.uint8]]: ...
    @property
    def every(self) -> np.ndarray[Any, np.dtype[np.uint8]]: ...

def as_array(frame: bytes | np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the frame as an array, without a copy."""

def pack(item: object) -> bytes | np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the object as a frame. Raise the errors of pickle."""

def unpack(frame: bytes | np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    """Return the object of a frame. Its arrays are writable and use the frame's memory."""
