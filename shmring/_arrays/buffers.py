"""Arrays without the buffer protocol: `__array_interface__` (ml_dtypes) and DLPack (torch, JAX).

The fast path, the buffer protocol, is in operands.pyx. This module is the slow path, and makes the errors for
arrays that cannot be used.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Buffer:
    """Contiguous memory: address, element count, NumPy dtype, and the object that keeps it alive."""

    address: int
    count: int
    dtype: str  # its name; begins with ">" for the other byte order
    readonly: bool
    fortran: bool
    owner: object


_OBJECT_CALLS = "the object calls, such as broadcast_object, take any object"


def take(x: Any, what: str, tensor_in: Callable[[object], tuple[Any, ...]]) -> Buffer:
    """Return the memory of an array that lacks the buffer protocol. TypeError or ValueError if invalid.

    tensor_in: the function of operands, which imports this module.
    """
    if isinstance(x, (bool, int, float, complex, str, bytes, np.generic)) or x is None:
        raise TypeError(f"{what} is {x!r:.60}, not an array; {_instead_of(x)}")
    interface = getattr(x, "__array_interface__", None)
    if interface is not None:
        return _from_interface(x, interface, what)
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, what, tensor_in)
    if not isinstance(x, (list, tuple)):
        raise TypeError(
            f"{what} is of type {type(x).__name__}; pass an array (of NumPy, or with the buffer protocol, "
            f"__array_interface__ or DLPack); {_OBJECT_CALLS}"
        )
    raise TypeError(f"{what} is a {type(x).__name__}; pass an array, created first with a = np.asarray(...)")


def _instead_of(x: Any) -> str:
    if x is None:
        return "pass an array; object calls, such as broadcast_object, need none on ranks that only receive"
    if isinstance(x, (str, bytes)):
        return _OBJECT_CALLS
    return "for a single number pass a 0-d array, created as a = np.array(value)"


def explain_refusal(
    x: Any, what: str, writable: bool, moves: bool, error: BaseException, allowed: tuple[str, ...]
) -> Exception:
    """Return the error to raise when the buffer protocol refused x or gave a format that has no dtype."""
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, np.dtype) and (not moves or dtype.hasobject) and native_name(dtype) not in allowed:
        return unsupported_dtype(what, dtype, allowed)
    contiguous, readonly = _flags(x)
    if not contiguous:
        return not_contiguous(what, x)
    if writable and readonly:
        return read_only(what)
    if isinstance(error, TypeError):
        return TypeError(f"{what} cannot be used: {error}; the dtypes allowed are {', '.join(allowed)}")
    return ValueError(f"{what} cannot be used: {error}")


def _flags(x: Any) -> tuple[bool, bool]:
    """Return (is contiguous, is read-only) for x; (True, False) if x does not say."""
    if isinstance(x, np.ndarray):
        return x.flags.c_contiguous or x.flags.f_contiguous, not x.flags.writeable
    try:
        view = memoryview(x)
    except (BufferError, TypeError, ValueError):  # closed or released
        return True, False
    return view.contiguous, view.readonly


def wrong_byte_order(what: str) -> TypeError:
    return TypeError(
        f"{what} is not in this machine's byte order; pass {what}.astype({what}.dtype.newbyteorder('='))"
    )


def not_contiguous(what: str, x: Any) -> ValueError:
    strides = getattr(x, "strides", "unknown")
    return ValueError(
        f"{what} is not contiguous in memory (strides {strides}); pass a = np.ascontiguousarray({what}) and, "
        "for a result in place, copy it back"
    )


def masked(what: str) -> TypeError:
    return TypeError(
        f"{what} is a masked array, whose mask would be ignored; pass {what}.filled(value), a copy, or "
        f"{what}.data to use the masked elements as well"
    )


def refuse_as_output(x: Any, what: str) -> None:
    """Raise ValueError if all ranks share x: every rank would write its output to the same memory."""
    if getattr(x, "one_for_all_ranks", False):
        raise ValueError(
            f"{what} is one array for all ranks, which would all write to it at once; give a private array, "
            f"or np.asarray({what}) if this rank alone uses this part of it"
        )


def read_only(what: str) -> ValueError:
    way_out = "" if what == "out" else "out= or "
    return ValueError(
        f"{what} is read-only and would be written to; pass {way_out}a writable copy, a = np.array({what})"
    )


def unsupported_dtype(what: str, dtype: Any, allowed: tuple[str, ...]) -> TypeError:
    if str(dtype).startswith(">"):
        return wrong_byte_order(what)
    if str(dtype).startswith(("datetime64", "timedelta64")):
        way_out = f"{what}.view('int64') shares its memory"
    else:
        way_out = f"convert it first, {what}.astype(...)"
        if dtype == "object" or getattr(dtype, "hasobject", False):
            way_out += f"; {_OBJECT_CALLS}"
    return TypeError(
        f"{what} has dtype {dtype}, which cannot be used here; {way_out}; allowed: {', '.join(allowed)}"
    )


def _from_interface(x: Any, interface: dict[str, Any], what: str) -> Buffer:
    dtype: Any = getattr(x, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.dtype(interface["typestr"])
    if not isinstance(interface.get("data"), tuple):  # for example a PIL image: it makes the bytes on request
        raise TypeError(
            f"{what} is a {type(x).__name__} that gives no address of its memory; pass np.array(...)"
        )
    address, readonly = interface["data"]
    count = math.prod(interface["shape"])
    c_order, f_order = _orders(interface["shape"], interface.get("strides"), dtype.itemsize)
    if not (c_order or f_order):
        raise not_contiguous(what, x)
    name = dtype.name if dtype.isnative else dtype.str
    return Buffer(address, count, name, bool(readonly), not c_order, x)


def _orders(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> tuple[bool, bool]:
    """Return (C-contiguous, Fortran-contiguous) for a shape and strides in bytes."""
    if strides is None or 0 in shape:
        return True, len(shape) <= 1
    found = []
    for axes in (reversed(range(len(shape))), range(len(shape))):
        expected, contiguous = itemsize, True
        for axis in axes:
            contiguous = contiguous and (shape[axis] == 1 or strides[axis] == expected)
            expected *= shape[axis]
        found.append(contiguous)
    return found[0], found[1]


# ---- names of dtypes ----


def native_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a dtype in this machine's byte order; None for the other byte order."""
    return dtype.name if dtype.isnative else None


@functools.lru_cache(maxsize=256)
def items_of(dtype: np.dtype[Any] | str) -> tuple[int, int, bytes, str | None]:
    """Return (32-bit signature of the dtype, bytes of an item, description, `native_name`).

    The result is the same in every process. dtype may also be a buffer format that NumPy does not know; its
    items are then single bytes.
    """
    if isinstance(dtype, str):
        return zlib.crc32(dtype.encode()), 1, dtype.encode("ascii", "backslashreplace"), None
    fields: Mapping[str, Any] = dtype.fields or {}
    words = ",".join(str(field[0]) for field in fields.values()) or str(dtype)
    signature = zlib.crc32(repr(_description(dtype)).encode())
    nbytes = min(dtype.itemsize, 2**32 - 1)
    return signature, nbytes, words.encode("ascii", "backslashreplace"), native_name(dtype)


def has_references(dtype: np.dtype[Any] | str) -> bool:
    """Return whether items have objects or pointers. dtype may also be a format that NumPy does not know."""
    if isinstance(dtype, np.dtype):
        return dtype.hasobject
    names = ":[^:]*:"
    return re.search("[&OPXz]|Z(?![dfg])", re.sub(names, "", dtype)) is not None  # Zd, Zf, Zg: complex


def _description(dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return the same tuple for equal dtypes. Their `str` may differ: aligned dtypes print differently."""
    if dtype.subdtype is not None:
        return (*_description(dtype.subdtype[0]), dtype.shape)
    fields: Mapping[str, Any] = dtype.fields or {}
    parts = [(name, field[1], _description(field[0])) for name, field in fields.items()]
    return (dtype.str, dtype.name, *parts)


# ---- DLPack -----------------------------------------------------------------------------------------------

# torch's bits that DLPack does not export: the method that reads the bit, its meaning, the method that
# applies it.
_LAZY = (("is_neg", "negated", "resolve_neg"), ("is_conj", "conjugated", "resolve_conj"))
_CPU = 1
_CODES = {
    0: "int",
    1: "uint",
    2: "float",
    4: "bfloat",
    5: "complex",
    6: "bool",
    10: "float8_e4m3fn",
    12: "float8_e5m2",
}


def _refuse_lazy(x: Any, what: str) -> None:
    """Raise TypeError if x is a tensor that is negated or conjugated when it is read, not in memory."""
    for asks, done, mend in _LAZY:
        if hasattr(x, mend) and getattr(x, asks)():
            raise TypeError(
                f"{what} is lazily {done}: its memory holds other elements; pass a = {what}.{mend}() and, "
                "for a result in place, copy it back"
            )


def _from_dlpack(x: Any, what: str, tensor_in: Callable[[object], tuple[Any, ...]]) -> Buffer:
    device = x.__dlpack_device__()
    if int(device[0]) != _CPU:
        raise TypeError(
            f"{what} is not in this machine's memory but on DLPack's device {tuple(map(int, device))}; "
            "move it to the CPU first"
        )
    _refuse_lazy(x, what)
    try:
        capsule = x.__dlpack__()
        address, shape, strides, code, bits, lanes, readonly = tensor_in(capsule)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{what} cannot be used: {error}") from error
    kind = _CODES.get(code, f"dlpack type {code} of ")
    name = kind if code in (6, 10, 12) else f"{kind}{bits}"
    if lanes != 1:
        name = f"vectors of {lanes} {name}"
    c_order, f_order = _orders(shape, strides, 1)
    if not (c_order or f_order):
        raise not_contiguous(what, x)
    count = math.prod(shape)
    if not address and count > 0:  # torch's fake and functional tensors
        raise TypeError(f"{what} is a {type(x).__name__} of {count} elements that has no memory of its own")
    # The capsule stays unconsumed: its destructor frees the tensor together with the Buffer's owner.
    return Buffer(address, count, name, readonly, not c_order, (x, capsule))
