"""Pickle tasks and results of pools so that large arrays in them travel in shared memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from multiprocessing import reduction
from typing import Any

import numpy as np

import shmring

from .._arrays.passing import reduce_array, reduce_copy, reduce_plainly, region_of, take_back

LEAST_NBYTES = 1 << 20  # bench_share.py: sharing is clearly faster from here on
KEEP_NBYTES = 1 << 30

# bench_share.py: from this size on it is faster to pickle at once than to copy, if many tasks are submitted.
LIGHT_NBYTES = 160 << 10
_IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes)) | {
    np.dtype(code).type for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}

_Reducer = Callable[[np.ndarray[Any, Any]], Any]


class _Pickler(reduction.ForkingPickler):
    """Pickle as multiprocessing does, but send large arrays in shared memory."""

    def __init__(self, file: io.BytesIO, least_nbytes: int, sent: list[Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table[np.ndarray] = reducer(least_nbytes, sent=sent)


def reducer(least_nbytes: int, otherwise: _Reducer | None = None, sent: list[Any] | None = None) -> _Reducer:
    """Return a reducer that copies arrays of at least `least_nbytes` into shared memory.

    Arrays that the user has shared are passed by reference.
    otherwise: the reducer of all other arrays; None for a pickle that is loaded as a writable array. sent:
    a list, to which the reducer appends what `take_back` needs.
    """

    def reduce(array: np.ndarray[Any, Any]) -> Any:
        reduced = None
        if region_of(array) is not None:
            reduced = reduce_array(array)
        elif array.nbytes >= least_nbytes and not array.dtype.hasobject:
            reduced = reduce_copy(array)
        if reduced is None:
            if otherwise:
                return otherwise(array)
            # The receiver's copy is writable; protocol 5 would keep a read-only array read-only.
            return reduce_plainly(array, pickle.HIGHEST_PROTOCOL if array.flags.writeable else 4)
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


def light_copies(values: Iterable[Any], least_nbytes: int) -> list[Any] | None:
    """Return copies of the values, which later changes do not affect. None if a value is not light.

    Light values are numbers, strings, and arrays below `least_nbytes` that the user has not shared.
    """
    copies = []
    # By the id of an array: an array that is given twice is one array to the receiver.
    made: dict[int, Any] = {}
    for value in values:
        kind = type(value)
        if kind is np.ndarray:
            if value.nbytes >= least_nbytes or value.dtype.hasobject or region_of(value) is not None:
                return None
            if id(value) not in made:
                made[id(value)] = value.copy("A")
            value = made[id(value)]
        elif kind not in _IMMUTABLE:
            return None
        copies.append(value)
    return copies


def begin_worker(
    least_nbytes: int, keep_nbytes: int, initializer: Callable[..., Any] | None, arguments: tuple[Any, ...]
) -> None:
    """Let this process, a worker, send large arrays in shared memory; call the user's initializer."""
    shmring.keep_shared(keep_nbytes)
    reduction.ForkingPickler.register(np.ndarray, reducer(least_nbytes, reduce_array))
    if initializer is not None:
        initializer(*arguments)


def run_task(task: bytes) -> Any:
    """Run a pickled (function, arguments, keywords) in a worker."""
    function, arguments, keywords = pickle.loads(task)
    return function(*arguments, **keywords)
