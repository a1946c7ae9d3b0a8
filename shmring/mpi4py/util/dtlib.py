"""Conversion between NumPy's dtypes and datatypes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..types import DATATYPE_NULL, Datatype


def from_numpy_dtype(dtype: Any) -> Datatype:
    """Return a new datatype whose items are in memory as those of a dtype.

    ValueError if the dtype holds Python objects, or is not in the byte order of this machine.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise ValueError(f"{dtype} has Python objects, which have no datatype")
    if not dtype.isnative:
        raise ValueError(f"{dtype} is not in the byte order of this machine")
    if dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names or ()]
        made = [from_numpy_dtype(field[0]) for field in fields]
        struct = Datatype.Create_struct([1] * len(made), [field[1] for field in fields], made)
        is_padded = dtype.isalignedstruct and struct.extent == dtype.itemsize
        found: Datatype = struct if is_padded else struct.Create_resized(0, dtype.itemsize)
    elif dtype.subdtype is not None:
        base, shape = dtype.subdtype
        found = from_numpy_dtype(base).Create_subarray(shape, shape, [0] * len(shape))
    elif dtype.kind in "SU" and dtype.itemsize:
        letter = Datatype.fromcode(f"{dtype.kind}1")
        count = dtype.itemsize // letter.extent
        found = letter.Dup() if count == 1 else letter.Create_contiguous(count)
    else:
        found = Datatype.fromcode(dtype.char).Dup()
    return found


def to_numpy_dtype(datatype: Datatype) -> np.dtype[Any]:
    """Return the dtype whose items are in memory as those of a datatype.

    A block of items is a field, named f0, f1 and so on. ValueError for DATATYPE_NULL, and for a datatype that
    has no dtype, such as a part of an array.
    """
    if datatype == DATATYPE_NULL:
        raise ValueError("DATATYPE_NULL has no dtype")
    base, combiner, arguments = datatype.decode()
    if combiner == "NAMED":
        pair = datatype._info().dtype.fields
        if pair is None:
            return np.dtype(datatype.typestr)
        return np.dtype([("f0", pair["value"][0]), ("f1", pair["place"][0])], align=True)
    if combiner == "DUP":
        return to_numpy_dtype(base)
    if combiner == "CONTIGUOUS":
        return np.dtype((to_numpy_dtype(base), (arguments["count"],)))
    sizes = arguments.get("sizes")
    if sizes is not None and arguments["subsizes"] == sizes and not any(arguments["starts"]):
        return np.dtype((to_numpy_dtype(base), tuple(sizes)))
    if combiner == "RESIZED" and base.decode()[1] == "STRUCT":
        _, combiner, arguments = base.decode()
    blocks = _blocks(base, combiner, arguments)
    if blocks is None or datatype.lb < 0:
        raise ValueError(f"{datatype.name or combiner} has no dtype")
    formats = [
        (to_numpy_dtype(kind), (count,)) if is_array else to_numpy_dtype(kind)
        for _, count, kind, is_array in blocks
    ]
    fields: Any = {
        "names": [f"f{number}" for number in range(len(blocks))],
        "formats": formats,
        "offsets": [displ for displ, *_ in blocks],
        "itemsize": datatype.ub if combiner.rpartition("INDEXED")[1] else datatype.extent,
    }
    try:
        aligned: Any = {**fields, "aligned": True}
        return np.dtype(aligned)
    except ValueError:  # the places are not aligned
        return np.dtype(fields)


def _blocks(base: Any, combiner: str, arguments: dict[str, Any]) -> list[Any] | None:
    """Return the blocks: displacement in bytes, number of items, datatype, and whether they are an array."""
    if combiner == "STRUCT":
        blocks = zip(
            arguments["displacements"], arguments["blocklengths"], arguments["datatypes"], strict=True
        )
        return [(displ, count, kind, count != 1) for displ, count, kind in blocks]
    if combiner in ("VECTOR", "HVECTOR"):
        displs = [number * arguments["stride"] for number in range(arguments["count"])]
    elif "displacements" in arguments:
        displs = arguments["displacements"]
    else:
        return None
    unit = 1 if combiner.startswith("H") else base.extent
    counts = arguments.get("blocklengths", [arguments.get("blocklength")] * len(displs))
    return [(displ * unit, count, base, True) for displ, count in zip(displs, counts, strict=True)]
