"""Pickle tasks and results of pools so that large arrays in them travel in shared memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np

import shmring

LEAST_NBYTES = 1 << 20  # bench_share.py: sharing is clearly faster from here on
KEEP_NBYTES = 1 << 30


class _Pickler(reduction.ForkingPickler):
    """Pickle as multiprocessing does, and arrays from a size on in shared memory."""

    def __init__(self, file: io.BytesIO, least_nbytes: int) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table[np.ndarray] = reducer(least_nbytes)


def reducer(least_nbytes: int) -> Callable[[np.ndarray[Any, Any]], Any]:
    """Return a reducer of arrays that shares those of `least_nbytes` or more."""

    def reduce(array: np.ndarray[Any, Any]) -> Any:
        if array.nbytes < least_nbytes or array.dtype.hasobject:
            return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return _travel(shmring.share(array, writable=True, copy=None))

    return reduce


def _travel(array: np.ndarray[Any, Any]) -> Any:
    return reduction.ForkingPickler(io.BytesIO()).dispatch_table[np.ndarray](array)


def dumps(obj: Any, least_nbytes: int) -> bytes:
    """Return the pickle of an object."""
    file = io.BytesIO()
    _Pickler(file, least_nbytes).dump(obj)
    return file.getvalue()


class Loaded:
    """An object's pickle within another pickle: who loads it gets the object."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


def run_task(task: bytes, least_nbytes: int, keep_nbytes: int) -> Loaded:
    """Run a pickled (function, arguments, keywords) in a worker; return the result, to be pickled."""
    shmring.keep_shared(keep_nbytes)
    function, arguments, keywords = pickle.loads(task)
    result = function(*arguments, **keywords)
    del function, arguments, keywords  # their memory can be used for the result
    return Loaded(dumps(result, least_nbytes))
