"""Tools of the methods: views of one flat array, compound calls, aborting, checks, agreement.

This module uses only a communicator's public API.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

import shmring
from shmring.errors import agreed

from .._arguments import refusing

if TYPE_CHECKING:
    from shmring import Comm

    from .rules import Rule

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    *("FOLDS", "abort_after", "agree", "agree_on_shapes", "check_alike", "check_arrays", "check_folded"),
    *("check_in_place", "check_op", "check_rule", "dtype_of", "one_call", "one_call_to_make", "parts"),
    *("views", "without_feedback"),
]

_MARKED_S = 0.2  # Busy CPUs may interrupt the end of a process for as long.

FOLDS: Mapping[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def one_call(function: F) -> F:
    """Decorate a function that makes several calls: run it by `Comm.run_steps`, as one call.

    Parameters
    ----------
    function : callable
        Its first argument is the `Comm`, or an object that has the `Comm` as `_comm`.

    Returns
    -------
    callable
        Raises what `Comm.run_steps` raises.

    Examples
    --------
    >>> from shmring.methods.flat import one_call
    >>> @one_call
    ... def mean_and_max(comm, x):
    ...     return comm.all_reduce(x, "avg"), comm.all_reduce(x, "max")
    >>> mean_and_max(comm, 2.0 * comm.rank)
    (1.0, 2.0)
    """

    @functools.wraps(function)
    def run(first: Any, *arguments: Any, **keywords: Any) -> Any:
        return getattr(first, "_comm", first).run_steps(function, first, *arguments, **keywords)

    return cast(F, run)


def one_call_to_make(function: F) -> F:
    """Decorate a method __init__(self, comm, ...) as `one_call` does.

    Parameters
    ----------
    function : callable
        The method, whose second argument is the `Comm`.

    Returns
    -------
    callable
        Raises what `Comm.run_steps` raises.

    Examples
    --------
    >>> from shmring.methods.flat import one_call_to_make
    >>> class Counter:
    ...     @one_call_to_make
    ...     def __init__(self, comm):
    ...         self.total = comm.all_reduce(1)
    >>> Counter(comm).total
    2
    """

    @functools.wraps(function)
    def run(self: Any, comm: Any, *arguments: Any, **keywords: Any) -> None:
        comm.run_steps(function, self, comm, *arguments, **keywords)

    return cast(F, run)


def abort_after(comm: Comm, error: BaseException, text: str) -> None:
    """Abort a communicator for an exception of this rank, unless it has ended or a rank has died.

    The error may come from another communicator. The other ranks are to get a death as RankFailed, not as
    Aborted. A dying process is marked in one communicator after the other, so look for it for some time.

    Parameters
    ----------
    comm : Comm
        The communicator.
    error : BaseException
        The exception.
    text : str
        The reason for `Comm.abort`.

    Examples
    --------
    >>> from shmring.methods.flat import abort_after
    >>> own = comm.dup()
    >>> abort_after(own, ValueError("no such batch"), "no such batch")
    """
    until_s = time.monotonic() + (_MARKED_S if isinstance(error, shmring.RankFailed) else 0)
    with contextlib.suppress(shmring.Error):
        comm.iprobe()
        while time.monotonic() < until_s:
            time.sleep(0.002)
            comm.iprobe()
        comm.abort(text)


def views(flat: NDArray[Any], like: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return consecutive parts of flat in the shapes of the arrays in `like`.

    Parameters
    ----------
    flat : numpy.ndarray
        An array of one dimension.
    like : list of numpy.ndarray
        Arrays with the shapes of the parts. Their values are not read.

    Returns
    -------
    list of numpy.ndarray
        Views of flat.

    Examples
    --------
    >>> from shmring.methods.flat import views
    >>> [view.shape for view in views(np.zeros(8), [np.empty((2, 3)), np.empty(2)])]
    [(2, 3), (2,)]
    """
    return parts(flat, [each.shape for each in like])


def parts(flat: NDArray[Any], shapes: Iterable[tuple[int, ...]]) -> list[NDArray[Any]]:
    """Return consecutive parts of flat in the given shapes.

    Parameters
    ----------
    flat : numpy.ndarray
        An array of one dimension.
    shapes : iterable of tuple of int
        The shapes of the parts.

    Returns
    -------
    list of numpy.ndarray
        Views of flat.

    Examples
    --------
    >>> from shmring.methods.flat import parts
    >>> parts(np.arange(3), [(1,), (2,)])
    [array([0]), array([1, 2])]
    """
    found, begin = [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        found.append(flat[begin:end].reshape(shape))
        begin = end
    return found


def without_feedback(buffer: NDArray[Any]) -> Any:
    """Return buffer in a form in which `Comm.wire` keeps no rounding errors for the buffer's next call.

    For a buffer that holds other data in each call, to which those errors do not belong.

    Parameters
    ----------
    buffer : numpy.ndarray
        Contiguous.

    Returns
    -------
    Memory or numpy.ndarray
        The argument x of a collective: the same memory, in one dimension.

    Examples
    --------
    >>> from shmring.methods.flat import without_feedback
    >>> buffer = np.full(2, 1.0)
    >>> comm.all_reduce(without_feedback(buffer))
    >>> buffer
    array([2., 2.])
    """
    memory = shmring.Memory.of(buffer)
    return buffer if memory is None else memory


def dtype_of(arrays: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return the floating dtype that all arrays share: float16, float32 or float64.

    Parameters
    ----------
    arrays : list of numpy.ndarray
        At least one.

    Returns
    -------
    numpy.dtype
        The dtype.

    Raises
    ------
    TypeError, ValueError
        For no arrays, several dtypes, or another dtype.

    Examples
    --------
    >>> from shmring.methods.flat import dtype_of
    >>> dtype_of([np.zeros(2, "f4"), np.ones(3, "f4")])
    dtype('float32')
    """
    if len(arrays) == 0:
        raise ValueError("the list of arrays is empty; give at least one")
    check_arrays(arrays)
    dtypes = {each.dtype for each in arrays}
    if len(dtypes) > 1:
        raise TypeError(f"the arrays are of dtypes {sorted(map(str, dtypes))}; handle each dtype separately")
    (dtype,) = dtypes
    if dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(f"the arrays are of dtype {dtype}; give float16, float32 or float64")
    return dtype


def check_arrays(arrays: Sequence[NDArray[Any]]) -> None:
    """Raise TypeError unless all objects are NumPy arrays without a mask.

    Parameters
    ----------
    arrays : list
        The objects.

    Raises
    ------
    TypeError
        The message says what to give instead.

    Examples
    --------
    >>> from shmring.methods.flat import check_arrays
    >>> check_arrays([np.zeros(2)])
    """
    for each in arrays:
        if not isinstance(each, np.ndarray):
            raise TypeError(f"a {type(each).__name__} instead of a NumPy array; use np.asarray")
        if isinstance(each, np.ma.MaskedArray):
            raise TypeError(
                "a masked array, whose mask would be ignored; pass x.filled(value), a copy, or x.data"
            )


def check_in_place(x: NDArray[Any]) -> None:
    """Raise TypeError or ValueError unless x can be reduced in place as one vector.

    Parameters
    ----------
    x : object
        A NumPy array passes if it is contiguous in C order and writable.

    Raises
    ------
    TypeError, ValueError
        The message says what to give instead.

    Examples
    --------
    >>> from shmring.methods.flat import check_in_place
    >>> check_in_place(np.zeros((2, 3)))
    """
    check_arrays([x])
    if not x.flags.c_contiguous or not x.flags.writeable:
        raise ValueError(
            "x is not contiguous in C order, or read-only; pass a copy, np.array(x, order='C'), and use that"
        )


def check_rule(rule: Rule) -> None:
    """Raise TypeError unless rule is an object with the methods of `shmring.methods.rules.Rule`.

    Parameters
    ----------
    rule : object
        An object such as `SGD(0.1)`, not a class.

    Raises
    ------
    TypeError
        The message says what to give instead.

    Examples
    --------
    >>> from shmring.methods.flat import check_rule
    >>> from shmring.methods.rules import Adam
    >>> check_rule(Adam())
    """
    if isinstance(rule, type):
        raise TypeError(f"rule is {rule!r:.60}; give an instance, as in rule=SGD(0.1)")
    for name in ("num_states", "update"):
        if not hasattr(rule, name):
            raise TypeError(f"rule is {rule!r:.60}, which has no {name}; give a rule such as SGD(0.1)")


def check_op(op: str) -> None:
    """Raise ValueError unless op is "avg" or "sum", by which gradients are combined.

    Parameters
    ----------
    op : str
        The operation.

    Raises
    ------
    ValueError
        For another op.

    Examples
    --------
    >>> from shmring.methods.flat import check_op
    >>> check_op("avg")
    """
    if op not in ("avg", "sum"):
        raise ValueError(f"op is {op!r}; gradients are combined by 'avg' or 'sum'")


def check_folded(x: Any, op: shmring.Op | str, dtypes: Sequence[str]) -> shmring.Op:
    """Check that NumPy can fold x in place by an op; return the op, one of FOLDS.

    Parameters
    ----------
    x : object
        A NumPy array passes if it is contiguous in C order and writable.
    op : str or Op
        The operation.
    dtypes : list of str
        The allowed dtypes of x.

    Returns
    -------
    Op
        The operation.

    Raises
    ------
    TypeError, ValueError
        The message says what to give instead.

    Examples
    --------
    >>> from shmring.methods.flat import check_folded
    >>> check_folded(np.zeros(2), "sum", ["float64"]).name
    'SUM'
    """
    # Compare dtypes, not names: the name is the same in both byte orders.
    if not isinstance(x, np.ndarray) or x.dtype not in [np.dtype(name) for name in dtypes]:
        what = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"x is {what}; pass a NumPy array of {', '.join(dtypes)}")
    check_in_place(x)
    name, missing = shmring.Op(op), {"i": ("avg",), "c": ("min", "max")}.get(x.dtype.kind, ())
    allowed = [each for each in FOLDS if each not in missing]
    if name not in allowed:
        raise ValueError(f"op {name.value} has no meaning for {x.dtype}; give {', '.join(allowed)}")
    return name


def agree(comm: Comm, **given: float) -> None:
    """Raise the same ValueError on all ranks if they give different numbers. Collective.

    Parameters
    ----------
    comm : Comm
        The communicator.
    **given : float
        The numbers, under the names that the error shows.

    Raises
    ------
    TypeError, ValueError, OverflowError
        If a number is not the same on all ranks. If this rank's is no number, the other ranks get `Mismatch`.
    Error
        As `Comm.all_gather`.

    Examples
    --------
    >>> from shmring.methods.flat import agree
    >>> agree(comm, stage=2, every=4)
    """
    with refusing(comm, "all_gather"):
        own = np.array([float(value) for value in given.values()])
    for name, by_rank in zip(given, comm.all_gather(own).T.tolist(), strict=True):
        if len(set(by_rank)) > 1:
            shown = ", ".join(repr(value).removesuffix(".0") for value in by_rank)
            raise agreed(ValueError(f"{name} is {shown} by rank; it must be the same on all"))


def agree_on_shapes(comm: Comm, arrays: Sequence[NDArray[Any]]) -> None:
    """Raise the same ValueError on all ranks if the shapes or dtypes of their arrays differ. Collective.

    Lists of the same length in all, but in another order, would be reduced as if they were in one order.

    Parameters
    ----------
    comm : Comm
        The communicator.
    arrays : list of numpy.ndarray
        Their values are not read.

    Raises
    ------
    ValueError
        It names the ranks whose list differs from rank 0's.
    Error
        As `Comm.all_gather`.

    Examples
    --------
    >>> from shmring.methods.flat import agree_on_shapes
    >>> agree_on_shapes(comm, [np.zeros(2), np.zeros((3, 4))])
    """
    described = repr([(each.shape, each.dtype.str) for each in arrays])
    first, *others = comm.all_gather(np.array([zlib.crc32(described.encode())])).ravel().tolist()
    unlike = [rank for rank, checksum in enumerate(others, 1) if checksum != first]
    if unlike:
        raise agreed(
            ValueError(
                f"the shapes or dtypes of the arrays, or their order, on ranks {unlike} differ from those on "
                "rank 0; they must be the same on all"
            )
        )


def check_alike(arrays: Sequence[NDArray[Any]], like: Sequence[NDArray[Any]], what: str) -> None:
    """Raise ValueError unless two lists have arrays of equal shapes and dtypes, so that nothing is broadcast.

    Parameters
    ----------
    arrays, like : list of numpy.ndarray
        The arrays to compare.
    what : str
        The name of `arrays` in the error.

    Raises
    ------
    TypeError, ValueError
        The message has the dtypes and shapes of both lists.

    Examples
    --------
    >>> from shmring.methods.flat import check_alike
    >>> check_alike([np.zeros(2)], [np.ones(2)], "gradients")
    """
    check_arrays(arrays)
    if [(each.shape, each.dtype) for each in arrays] != [(each.shape, each.dtype) for each in like]:
        given, wanted = (", ".join(f"{each.dtype}{each.shape}" for each in which) for which in (arrays, like))
        raise ValueError(f"{what} are {given}; they must be {wanted}")
