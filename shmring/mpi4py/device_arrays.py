"""Arrays that describe their memory by DLPack or by `__cuda_array_interface__`, not by the buffer protocol.

The memory may be of the host all the same. Memory that this process cannot read, such as a GPU's, is refused.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._arrays.operands import tensor_in

_CPU = 1
_FLOAT = 2
_CODES = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


@dataclass(frozen=True)
class Described:
    """Memory of an array: where it is, how long, of which items, and the object that keeps it alive."""

    address: int
    nbytes: int
    readonly: bool
    is_device: bool
    format: str
    owner: Any


def describe(source: Any) -> Described:
    """Return the memory of an array that exports no buffer; raise TypeError if it is none."""
    if hasattr(source, "__dlpack__"):
        found = _describe_dlpack(source)
    elif hasattr(source, "__cuda_array_interface__"):
        found = _describe_interface(source, source.__cuda_array_interface__)
    else:
        raise TypeError(f"a message needs a buffer or an array, not {type(source).__name__}")
    if found.is_device and found.nbytes > 0:
        check_readable(found.address, found.nbytes)
    return found


def _describe_dlpack(source: Any) -> Described:
    device_type, device_id = source.__dlpack_device__()
    if not isinstance(device_type, int) or not isinstance(device_id, int):
        raise TypeError(f"__dlpack_device__() returned {(device_type, device_id)!r}, not two integers")
    stream = None if device_type == _CPU else -1
    try:
        capsule = source.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:
        capsule = source.__dlpack__(stream=stream)
    address, shape, strides, code, bits, lanes, readonly = tensor_in(capsule)
    itemsize = bits * lanes // 8
    # A long complex is described as two long floats, since its bits do not fit.
    letter = "c" if code == _FLOAT and lanes == 2 else _CODES.get(code, "V")
    return Described(
        address=address,
        nbytes=itemsize * _contiguous_count(shape, strides),
        readonly=readonly,
        is_device=device_type != _CPU,
        format=f"{letter}{itemsize}",
        owner=capsule,
    )


def _describe_interface(source: Any, interface: Any) -> Described:
    if not isinstance(interface, dict):
        raise TypeError(f"__cuda_array_interface__ is a {type(interface).__name__}, not a dict")
    (address, readonly), typestr, shape = interface["data"], interface["typestr"], interface["shape"]
    strides, descr = interface.get("strides"), interface.get("descr")
    if interface.get("mask") is not None:
        raise BufferError("the array has a mask, which cannot be sent")
    if not isinstance(typestr, str) or not isinstance(shape, tuple):
        raise TypeError("__cuda_array_interface__ needs a str as typestr and a tuple as shape")
    if typestr[0] not in "<|=":
        raise BufferError(f"the array has typestr {typestr!r}: its byte order is not that of this machine")
    itemsize = int(typestr[2:])
    if descr is not None and list(descr) != [("", typestr)]:
        warnings.warn(
            "the fields of the array are ignored: it is sent as bytes", RuntimeWarning, stacklevel=2
        )
    in_items = None if strides is None else [stride / itemsize for stride in strides]
    return Described(
        address=address or 0,
        nbytes=itemsize * _contiguous_count(shape, in_items),
        readonly=bool(readonly),
        is_device=True,
        format=typestr[1:],
        owner=source,
    )


def _contiguous_count(shape: Sequence[int], strides: Sequence[float] | None) -> int:
    """Return the number of items of an array in C or Fortran order; raise BufferError for any other."""
    count = 1
    for extent in shape:
        if extent < 0:
            raise BufferError(f"the shape {tuple(shape)} has a negative extent")
        count *= extent
    if strides is None or count == 0:
        return count
    axes = range(len(shape))
    for order in (axes[::-1], axes):
        expected = 1
        for axis in order:
            if shape[axis] != 1 and strides[axis] != expected:
                break
            expected *= shape[axis]
        else:
            return count
    raise BufferError(f"the array, of shape {tuple(shape)}, is not contiguous")


def check_readable(address: int, nbytes: int) -> None:
    """Raise TypeError if this process cannot read memory."""
    try:
        fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.pread(fd, 1, address)
            os.pread(fd, 1, address + nbytes - 1)
        finally:
            os.close(fd)
    except (OSError, OverflowError):
        raise TypeError(
            "the message is in memory that this process cannot read, such as a GPU's: copy it to the host"
        ) from None
