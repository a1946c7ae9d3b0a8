"""Pickle tasks and results of pools so that large arrays in them travel in shared memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np

import shmring

from .._arrays.passing import block_of, reduce_array, reduce_copy, take_back

LEAST_NBYTES = 1 << 20  # bench_share.py: sharing is clearly faster from here on
KEEP_NBYTES = 1 << 30

_LIGHT_NBYTES = (64 << 10) + 1  # longer arrays are pickled faster than copied (bench_share.py)
_IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes)) | {
    np.dtype(code).type for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}

_Reducer = Callable[[np.ndarray[Any, Any]], Any]


class _Pickler(reduction.ForkingPickler):
    """Pickle as multiprocessing does, and arrays from a size on in shared memory."""

    def __init__(self, file: io.BytesIO, least_nbytes: int, sent: list[Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table[np.ndarray] = reducer(least_nbytes, sent=sent)


def reducer(least_nbytes: int, otherwise: _Reducer | None = None, sent: list[Any] | None = None) -> _Reducer:
    """Return a reducer of arrays that sends copies of those of `least_nbytes` or more in shared memory.

    Arrays that the user has shared are passed by reference.
    otherwise: the reducer of the others; None for a pickle of the highest protocol. sent: a list to which
    what `take_back` needs is appended.
    """

    def reduce(array: np.ndarray[Any, Any]) -> Any:
        reduced = None
        if block_of(array) is not None:
            reduced = reduce_array(array)
        elif array.nbytes >= least_nbytes and not array.dtype.hasobject:
            reduced = reduce_copy(array)
            if reduced is None and not array.flags.writeable:  # the receiver's copy is writable in any case
                array = array.copy("K")
        if reduced is None:
            return otherwise(array) if otherwise else array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if sent is not None:
            sent.append(reduced)
        return reduced

    return reduce


def submit_task(call: Callable[..., Any], task: Callable[[list[Any]], Any], *args: Any) -> Any:
    """Return the future of call(task(sent), *args). When it is done, what no worker has loaded is freed.

    task: returns what to send, and fills the list `sent` as `reducer` does.
    """
    sent: list[Any] = []
    try:
        future = call(task(sent), *args)
    except BaseException:
        take_back(sent)
        raise
    if sent:
        future.add_done_callback(lambda _: take_back(sent))
    return future


def dumps(obj: Any, least_nbytes: int, sent: list[Any]) -> bytes:
    """Return the pickle of an object. sent: see `reducer`."""
    file = io.BytesIO()
    _Pickler(file, least_nbytes, sent).dump(obj)
    return file.getvalue()


class Loaded:
    """An object's pickle within another pickle. Loading the outer pickle returns the object."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


def is_light(value: Any, least_nbytes: int) -> bool:
    """Return whether a value is a number, a string or a short array, of which `snapshot` is fast.

    Arrays that the user has shared are not light.
    """
    if type(value) is np.ndarray:
        is_short = value.nbytes < min(least_nbytes, _LIGHT_NBYTES)
        return is_short and not value.dtype.hasobject and block_of(value) is None
    return type(value) in _IMMUTABLE


def snapshot(value: Any) -> Any:
    """Return a light value that later changes do not reach."""
    return value.copy("K") if type(value) is np.ndarray else value


def begin_worker(
    least_nbytes: int, keep_nbytes: int, initializer: Callable[..., Any] | None, arguments: tuple[Any, ...]
) -> None:
    """Have this process, a worker, share the large arrays that it sends; call the user's initializer."""
    shmring.keep_shared(keep_nbytes)
    reduction.ForkingPickler.register(np.ndarray, reducer(least_nbytes, reduce_array))
    if initializer is not None:
        initializer(*arguments)


def run_task(task: bytes) -> Any:
    """Run a pickled (function, arguments, keywords) in a worker."""
    function, arguments, keywords = pickle.loads(task)
    return function(*arguments, **keywords)
