"""The cases into which exceptions are injected, by name, and what their modules have in common.

A case is a generator. It prepares, yields a callable that makes one call of shmring, receives the result of
that call on this rank, and checks it. The callable can be called again if the call has not begun.
"""

import functools
import time

import numpy as np

SMALL, LARGE = 5, 40_000
CASES = {}
LATE_S = 0.012


def warm_up(comm):
    """Let a communicator allocate everything that its first calls allocate."""
    comm.all_reduce(np.zeros(LARGE, "f4"))
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.sendrecv(np.zeros(1), to, np.zeros(1), source)


class Place:
    """The environment of a case: its communicator, and whether this rank is the faulty one."""

    def __init__(self, comm, is_faulty):
        self.comm = comm
        self.is_faulty = is_faulty

    def be_late(self):
        """Let the faulty rank wait for the others in the call."""
        if not self.is_faulty:
            time.sleep(LATE_S)


def case(
    function=None, *, one_host=False, is_last=False, may_end=False, is_first=False, ends_in_python=False
):
    """Enter a case by its name.

    one_host: it is for ranks of one host only; is_last: it leaves no communicator; may_end: an exception in
    such a call may also end the communicator; is_first: the communicator has no allocations
    of first calls; ends_in_python: an exception can come after the end of the call in a function of shmring
    that only returns, which is equivalent to the caller's next line.
    """
    if function is None:
        return functools.partial(
            case,
            one_host=one_host,
            is_last=is_last,
            may_end=may_end,
            is_first=is_first,
            ends_in_python=ends_in_python,
        )
    function.one_host, function.is_last, function.is_first = one_host, is_last, is_first
    function.may_end, function.ends_in_python = may_end, ends_in_python
    CASES[function.__name__] = function
    return function


def numbers(count, rank, step=1):
    """Small integers that differ by rank, as floats: their sums are exact."""
    return (np.arange(count) % 97 * step + rank + 1).astype("f4")


def total(count, size, step=1):
    return sum(numbers(count, rank, step) for rank in range(size))


def call(function, *arguments, **keywords):
    return functools.partial(function, *arguments, **keywords)


def same(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert (got == wanted).all(), f"got {got.ravel()[:6]}, wanted {wanted.ravel()[:6]}"


def nothing():
    """Do nothing: the call of a rank that takes no part."""
