"""Collectives inside programs of JAX on the CPU: `all_reduce(tree, comm)` in a function that XLA compiles.

XLA calls shmring directly, through its interface for foreign functions, on the program's own buffers. All
collectives of a program run in the order in which the function makes them. `jit` compiles a function with
collectives and keeps JAX's fast dispatch; they work under `jax.jit`, `jax.grad`, `jax.vmap`, `jax.lax.scan`
and eagerly, too. Where JAX has no such interface, each collective is a callback of Python (`calls_through`).

A tree is a pytree of arrays, with the same structure, shapes and dtypes on all ranks. The dtypes are those of
`Comm.all_reduce`. One process has one device: a program for several devices is refused.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import shmring

from .._arguments import integer, refusing
from .._config.optional_deps import need
from ._jax.call import Call, group_of

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "calls_through",
    "jit",
    "recv",
    "reduce_scatter",
    "send",
]


def jit(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Compile a function that contains collectives, as `jax.jit` does.

    A call returns when its collectives are over. So the communicator may be used right after it, an error
    of the communicator is raised by the call and in its own class, and Ctrl-C ends the wait. Under plain
    `jax.jit`, which is allowed, each call takes some 100 us longer, and errors come as
    `jax.errors.JaxRuntimeError`, with shmring's text, when a result is used.

    Within another transformation of JAX (`jax.grad`, `jax.vmap`, an outer `jit`) it is `jax.jit`.

    Parameters
    ----------
    function : callable
        As for `jax.jit`. Without it, `jit` returns a decorator.
    **options
        Keyword arguments of `jax.jit`, such as `donate_argnums` and `static_argnums`.

    Returns
    -------
    callable
        The compiled function.

    Raises
    ------
    Error
        The compiled function raises the errors of the communicators.

    Examples
    --------
    >>> import jax
    >>> from shmring.adapters import jax as shmring_jax
    >>> @shmring_jax.jit
    ... def total(x):
    ...     return shmring_jax.all_reduce(2 * x, comm)
    >>> total(np.full(2, 1 + comm.rank, "f4")).tolist()
    [6.0, 6.0]
    """
    if function is None:
        return functools.partial(jit, **options)
    return _way().jit(function, options)


def calls_through() -> str:
    """Return how programs call shmring with this version of JAX.

    Returns
    -------
    str
        "XLA": as custom calls. "callbacks": as host callbacks, because the adapter cannot use this version's
        interface. They take some 100 us more, copy arguments and results, and are refused by `jax.vmap`.

    Examples
    --------
    >>> import jax
    >>> from shmring.adapters import jax as shmring_jax
    >>> shmring_jax.calls_through()
    'XLA'
    """
    return "XLA" if _way().__name__.endswith("xla") else "callbacks"


def all_reduce(tree: Any, comm: shmring.Comm, op: shmring.Op | str = "sum") -> Any:
    """Combine every leaf elementwise over all ranks; return leaves of the same shapes and dtypes.

    The gradient is that of the sum of the ranks' losses: for a sum the sum of all cotangents, for an
    average their average. Other ops have none (TypeError). In a compiled program, a leaf that the program
    has computed, or that the caller has donated, is reduced in place.

    Parameters
    ----------
    tree : pytree of arrays
        Small leaves are reduced together (tensor fusion, as in `Comm.all_reduce_many`).
    comm : Comm
        The communicator. Compiled programs do not keep it alive.
    op : str or Op
        As in `Comm.all_reduce`.

    Returns
    -------
    pytree of arrays
        New leaves.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument, when JAX traces the function.
    Error
        As `Comm.all_reduce`, in eager calls and from functions of `jit`. From functions of `jax.jit`, a
        `jax.errors.JaxRuntimeError` with its text.

    Examples
    --------
    >>> import jax
    >>> from shmring.adapters import jax as shmring_jax
    >>> shmring_jax.all_reduce({"w": np.ones(2, "f4")}, comm)["w"].tolist()
    [2.0, 2.0]
    """
    with refusing(comm, "all_reduce"):
        op = shmring.Op(op)
    return _run(comm, "all_reduce", tree, op.value)


def broadcast(tree: Any, comm: shmring.Comm, root: int = 0) -> Any:
    """Return root's leaves on every rank. The gradient is the sum of all cotangents on root, else zeros.

    Parameters
    ----------
    tree, comm
        As in `all_reduce`.
    root : int
        The rank that sends.

    Returns
    -------
    pytree of arrays
        As `all_reduce`.

    Raises
    ------
    TypeError, ValueError, Error
        As `all_reduce`.

    Examples
    --------
    >>> import jax
    >>> from shmring.adapters import jax as shmring_jax
    >>> shmring_jax.broadcast(np.full(2, comm.rank, "i4"), comm, root=1).tolist()
    [1, 1]
    """
    with refusing(comm, "broadcast"):
        root = _rank(comm, "root", root)
    return _run(comm, "broadcast", tree, root)


def all_gather(tree: Any, comm: shmring.Comm) -> Any:
    """Return all ranks' leaves: (size, *s) for a leaf of shape s. The gradient is `reduce_scatter`.

    Parameters
    ----------
    tree, comm
        As in `all_reduce`.

    Returns
    -------
    pytree of arrays
        As `all_reduce`.

    Raises
    ------
    TypeError, ValueError, Error
        As `all_reduce`.

    Examples
    --------
    >>> import jax
    >>> from shmring.adapters import jax as shmring_jax
    >>> shmring_jax.all_gather(np.full(2, comm.rank, "i4"), comm).tolist()
    [[0, 0], [1, 1]]
    """
    return _run(comm, "all_gather", tree)


def reduce_scatter(tree: Any, comm: shmring.Comm, op: shmring.Op | str = "sum") -> Any:
    """Return this rank's part of each leaf's `all_reduce`: s of shape (size, *s), or k of size · k rows.

    The gradient of a sum is `all_gather`; that of an average is `all_gather` divided by the number of ranks.

    Parameters
    ----------
    tree, comm, op
        As in `all_reduce`.

    Returns
    -------
    pytree of arrays
        As `all_reduce`.

    Raises
    ------
    TypeError, ValueError, Error
        As `all_reduce`.

    Examples
    --------
    >>> import jax
    >>> from shmring.adapters import jax as shmring_jax
    >>> shmring_jax.reduce_scatter(np.arange(4, dtype="i4"), comm).tolist()  # rank 1 gets [4, 6]
    [0, 2]
    """
    with refusing(comm, "reduce_scatter"):
        op = shmring.Op(op)
    return _run(comm, "reduce_scatter", tree, op.value)


def all_to_all(tree: Any, comm: shmring.Comm) -> Any:
    """Send part i of each leaf to rank i, and return the parts that this rank gets.

    The gradient is `all_to_all`.

    Parameters
    ----------
    tree : pytree of arrays
        Each has the shape (size, *s), or size · k rows, whose parts are k rows.
    comm
        As in `all_reduce`.

    Returns
    -------
    pytree of arrays
        They have the shapes of the leaves.

    Raises
    ------
    TypeError, ValueError, Error
        As `all_reduce`.

    Examples
    --------
    >>> import jax
    >>> from shmring.adapters import jax as shmring_jax
    >>> x = 10 * comm.rank + np.arange(2, dtype="i4")
    >>> shmring_jax.all_to_all(x, comm).tolist()  # rank 1 gets [1, 11]
    [0, 10]
    """
    return _run(comm, "all_to_all", tree)


def send(tree: Any, comm: shmring.Comm, dest: int, tag: int = 0) -> None:
    """Send each leaf to rank `dest`, which calls `recv`. It has no gradient (TypeError).

    Parameters
    ----------
    tree, comm
        As in `all_reduce`.
    dest : int
        The rank that receives.
    tag : int
        As in `Comm.send`.

    Raises
    ------
    TypeError, ValueError, Error
        As `all_reduce`.

    Examples
    --------
    >>> import jax
    >>> from shmring.adapters import jax as shmring_jax
    >>> x = np.arange(2, dtype="i4")
    >>> if comm.rank == 0:
    ...     shmring_jax.send(x, comm, dest=1)
    ... else:
    ...     x = shmring_jax.recv(x, comm, source=0)
    """
    _run(comm, "send", tree, _rank(comm, "dest", dest), integer("tag", tag))


def recv(like: Any, comm: shmring.Comm, source: int, tag: int = 0) -> Any:
    """Return leaves that rank `source` has sent. They are constants to gradients.

    Parameters
    ----------
    like : pytree of arrays
        Arrays, or `jax.ShapeDtypeStruct` objects, of the shapes and dtypes of the leaves. No value is used.
    comm
        As in `all_reduce`.
    source : int
        The rank that sends.
    tag : int
        As in `Comm.recv`.

    Returns
    -------
    pytree of arrays
        New leaves.

    Raises
    ------
    TypeError, ValueError, Error
        As `all_reduce`; ValueError also for a message of another length.

    Examples
    --------
    >>> import jax
    >>> from shmring.adapters import jax as shmring_jax
    >>> if comm.rank == 1:
    ...     comm.send(np.arange(2, dtype="i4"), dest=0)
    ... else:
    ...     shmring_jax.recv(np.zeros(2, "i4"), comm, source=1).tolist()
    [0, 1]
    """
    source, tag = _rank(comm, "source", source), integer("tag", tag)
    jax = need("jax", "jax", __name__)
    leaves, structure = jax.tree.flatten(like)
    if not leaves:
        return like
    shapes = tuple((tuple(leaf.shape), str(_canonical(jax, leaf.dtype))) for leaf in leaves)
    call = Call(group_of(comm), "recv", (source, tag, shapes))
    return structure.unflatten(_way().collective(call, []))


def barrier(comm: shmring.Comm) -> None:
    """Wait until every rank has come to this point of its program.

    Parameters
    ----------
    comm
        As in `all_reduce`.

    Raises
    ------
    Error
        As `all_reduce`.

    Examples
    --------
    >>> import jax
    >>> from shmring.adapters import jax as shmring_jax
    >>> shmring_jax.barrier(comm)
    """
    _way().collective(Call(group_of(comm), "barrier"), [])


def _run(comm: shmring.Comm, kind: str, tree: Any, *how: Any) -> Any:
    jax = need("jax", "jax", __name__)
    with _refusing(comm, kind):
        found, structure = jax.tree.flatten(tree)
    if not found:
        return tree
    call = Call(group_of(comm), kind, how)
    with _refusing(comm, kind):
        leaves = [jax.numpy.asarray(leaf) for leaf in found]
        for leaf in leaves:
            _check_dtype(leaf.dtype)
        call.results([(leaf.shape, leaf.dtype) for leaf in leaves])
    results = _way().collective(call, leaves)
    return structure.unflatten(results) if results else None


def _check_dtype(dtype: Any) -> None:
    try:
        shmring.Memory(0, 0, str(dtype))
    except TypeError as error:
        raise TypeError(f"a leaf has the dtype {dtype}: {error}") from None


def _canonical(jax: Any, dtype: Any) -> Any:
    """Return the dtype that JAX has in place of this one, such as float32 for float64."""
    found = jax.dtypes.canonicalize_dtype(dtype)
    _check_dtype(found)
    return found


def _rank(comm: shmring.Comm, name: str, rank: int) -> int:
    found = integer(name, rank)
    if not 0 <= found < comm.size:
        raise ValueError(f"{name} is {found}; there are ranks 0 to {comm.size - 1}")
    return found


def _refusing(comm: shmring.Comm, kind: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for the checks before a call. A send is no collective, so not refused."""
    return contextlib.nullcontext() if kind == "send" else refusing(comm, kind)


@functools.cache
def _way() -> Any:
    """Return the module that makes collectives: xla, or callback where JAX lacks what xla needs."""
    need("jax", "jax", __name__)
    try:
        from ._jax import xla
    except (ImportError, AttributeError, TypeError) as error:  # private names of JAX, which may change
        warnings.warn(
            f"programs of this JAX call shmring through callbacks, some 100 us more each: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        from ._jax import callback

        return callback
    return xla
