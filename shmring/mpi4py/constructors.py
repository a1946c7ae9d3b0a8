"""The datatypes that a program makes of others: blocks of items at places in memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import errors
from .constants import INTEGERS
from .layouts import Layout, combine, grid
from .messages import TypeInfo, handle, integer_of

_ORDER_C, _ORDER_FORTRAN = INTEGERS["ORDER_C"], INTEGERS["ORDER_FORTRAN"]
_MOST_BYTES = 2**31 - 1  # of an item that NumPy has a dtype for
# The names of the arguments that are addresses, by combiner; those of all others are integers.
_ADDRESSES = {
    "HVECTOR": ["stride"],
    "HINDEXED": ["displacements"],
    "HINDEXED_BLOCK": ["displacements"],
    "STRUCT": ["displacements"],
    "RESIZED": ["lb", "extent"],
}


def contents_of(combiner: str, arguments: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the integers and the addresses of which a datatype was made, in MPI's order."""
    integers: list[int] = []
    addresses: list[int] = []
    lists = [value for name, value in arguments.items() if isinstance(value, list) and name != "datatypes"]
    lead = 2 if combiner == "DARRAY" else 0  # the number of what is in the lists comes behind size and rank
    for place, (name, value) in enumerate(item for item in arguments.items() if item[0] != "datatypes"):
        if place == lead and lists:
            integers.append(len(lists[0]))
        target = addresses if name in _ADDRESSES.get(combiner, []) else integers
        target.extend(value if isinstance(value, list) else [value])
    return integers, addresses


def _numbers(values: Any, length: int | None = None) -> tuple[int, ...]:
    numbers = tuple(operator.index(value) for value in values)
    if length is not None and len(numbers) != length:
        raise ValueError(f"{len(numbers)} numbers are given where {length} are needed")
    return numbers


def _layout_of(info: TypeInfo) -> Layout:
    if info.layout is not None:
        return info.layout
    elements = len(info.dtype.names or (None,))
    return Layout.of_bytes(info.extent, info.dtype.alignment, elements)


def basic_of(info: TypeInfo) -> TypeInfo | None:
    """Return the predefined datatype that a datatype is made of; None if it is made of several."""
    if info.made is None:
        return info
    if info.basic is NotImplemented:
        info.basic = _find_basic(info)
    found: TypeInfo | None = info.basic
    return found


def _find_basic(info: TypeInfo) -> TypeInfo | None:
    _, base, arguments = info.made
    basics = [basic_of(part) for part in (arguments["datatypes"] if base is None else [base])]
    first = basics[0] if basics else None
    if first is None or any(each is None or each.dtype != first.dtype for each in basics):
        return None
    return first


def _check(is_right: bool, reason: str) -> None:
    if not is_right:
        raise errors.Exception(errors.ERR_ARG, reason)


class Constructors:
    """The methods of datatypes that make others of them."""

    _info: Any

    def _block(self, combiner: str, arguments: dict[str, Any], displs: Any, counts: Any) -> Any:
        """Return the datatype of blocks of items: displacements in bytes, and numbers of items."""
        info = self._info()
        layout = combine([(np.asarray(displs, np.int64), _as_counts(counts, len(displs)), _layout_of(info))])
        return _made(type(self), (combiner, info, arguments), layout, info.size)

    def Create_contiguous(self, count: int) -> Any:
        """Return the datatype of `count` items that follow each other."""
        count = integer_of(count)
        return self._block("CONTIGUOUS", {"count": count}, [0], count)

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Any:
        """Return the datatype of `count` blocks of items; the stride from block to block is in items."""
        arguments = {"count": count, "blocklength": blocklength, "stride": stride}
        return self._vector("VECTOR", arguments, self._info().extent)

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Any:
        """As `Create_vector`; the stride is in bytes."""
        arguments = {"count": count, "blocklength": blocklength, "stride": stride}
        return self._vector("HVECTOR", arguments, 1)

    def _vector(self, combiner: str, arguments: dict[str, int], unit: int) -> Any:
        arguments = {name: integer_of(value) for name, value in arguments.items()}
        _check(arguments["count"] >= 0, f"the count is {arguments['count']}; it must not be negative")
        displs = np.arange(arguments["count"]) * (arguments["stride"] * unit)
        return self._block(combiner, arguments, displs, arguments["blocklength"])

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Any:
        """Return the datatype of blocks of items; their displacements are in items."""
        return self._indexed("INDEXED", blocklengths, displacements, self._info().extent)

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Any:
        """As `Create_indexed`; the displacements are in bytes."""
        return self._indexed("HINDEXED", blocklengths, displacements, 1)

    def _indexed(self, combiner: str, blocklengths: Any, displacements: Any, unit: int) -> Any:
        counts = _numbers(blocklengths)
        displs = _numbers(displacements, len(counts))
        arguments = {"blocklengths": counts, "displacements": displs}
        return self._block(combiner, arguments, np.array(displs, np.int64) * unit, counts)

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Any:
        """As `Create_indexed`; all blocks have one length."""
        return self._indexed_block("INDEXED_BLOCK", blocklength, displacements, self._info().extent)

    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> Any:
        """As `Create_hindexed`; all blocks have one length."""
        return self._indexed_block("HINDEXED_BLOCK", blocklength, displacements, 1)

    def _indexed_block(self, combiner: str, blocklength: Any, displacements: Any, unit: int) -> Any:
        blocklength = integer_of(blocklength)
        arguments = {"blocklength": blocklength, "displacements": _numbers(displacements)}
        displs = np.array(arguments["displacements"], np.int64) * unit
        return self._block(combiner, arguments, displs, blocklength)

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence[Any]
    ) -> Any:
        """Return the datatype of blocks of items of several datatypes; the displacements are in bytes.

        It ends where the next item is aligned, as a struct of C, unless `Create_resized` made one of the
        datatypes.
        """
        counts = _numbers(blocklengths)
        displs = _numbers(displacements, len(counts))
        infos = tuple(datatype._info() for datatype in datatypes)
        if len(infos) != len(counts):
            raise ValueError(f"{len(infos)} datatypes are given for {len(counts)} blocks")
        parts = [
            (np.array([displ]), _as_counts(count, 1), _layout_of(info))
            for displ, count, info in zip(displs, counts, infos, strict=True)
        ]
        size = sum(count * info.size for count, info in zip(counts, infos, strict=True))
        arguments = {"blocklengths": counts, "displacements": displs, "datatypes": infos}
        return _made(cls, ("STRUCT", None, arguments), combine(parts, is_padded=True), 0, size)

    def Create_subarray(
        self, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int = _ORDER_C
    ) -> Any:
        """Return the datatype of a part of an array; its extent is that of the whole array."""
        shape = _numbers(sizes)
        part, first = _numbers(subsizes, len(shape)), _numbers(starts, len(shape))
        for size, subsize, start in zip(shape, part, first, strict=True):
            is_right = min(start, subsize) >= 0 and start + subsize <= size
            _check(is_right, f"{subsize} items from {start} on are not in an axis of {size}")
        arguments = {"sizes": shape, "subsizes": part, "starts": first, "order": order}
        axes = self._axes(shape, order)
        chosen = [range(first[axis], first[axis] + part[axis]) for axis in axes]
        run = chosen.pop() if chosen else range(1)  # along the last axis, items follow each other
        rows = (
            grid([shape[axis] for axis in axes[:-1]], chosen) * (shape[axes[-1]] if axes else 1) + run.start
        )
        return self._in_array("SUBARRAY", arguments, shape, rows, len(run))

    def Create_darray(
        self,
        size: int,
        rank: int,
        gsizes: Sequence[int],
        distribs: Sequence[int],
        dargs: Sequence[int],
        psizes: Sequence[int],
        order: int = _ORDER_C,
    ) -> Any:
        """Return the datatype of the part of an array that a rank of a grid has.

        Its extent is that of the whole array.
        """
        shape = _numbers(gsizes)
        ways, blocks, ranks = (_numbers(values, len(shape)) for values in (distribs, dargs, psizes))
        _check(
            int(np.prod(ranks)) == size and 0 <= rank < size,
            f"rank {rank} of {size} is not in a grid of {ranks}",
        )
        arguments = {"size": size, "rank": rank, "gsizes": shape, "distribs": ways, "dargs": blocks}
        arguments |= {"psizes": ranks, "order": order}
        places = np.unravel_index(rank, ranks) if ranks else ()
        axes = self._axes(shape, order)
        chosen = [_share(shape[i], ways[i], blocks[i], ranks[i], int(places[i])) for i in axes]
        return self._in_array("DARRAY", arguments, shape, grid([shape[axis] for axis in axes], chosen), 1)

    def _axes(self, shape: Sequence[int], order: int) -> list[int]:
        """Return the axes from the outermost to the innermost."""
        _check(
            order in (_ORDER_C, _ORDER_FORTRAN), f"the order is {order}, neither ORDER_C nor ORDER_FORTRAN"
        )
        return list(range(len(shape)))[:: 1 if order == _ORDER_C else -1]

    def _in_array(
        self, combiner: str, arguments: Any, shape: Sequence[int], numbers: Any, length: int
    ) -> Any:
        info = self._info()
        layout = combine([(numbers * info.extent, _as_counts(length, len(numbers)), _layout_of(info))])
        layout = layout.with_bounds(0, int(np.prod(shape, dtype=np.int64)) * info.extent)
        return _made(type(self), (combiner, info, arguments), layout, info.size)

    def Create_resized(self, lb: int, extent: int) -> Any:
        """Return the datatype with another lower bound, and another distance of two items."""
        info = self._info()
        arguments = {"lb": integer_of(lb), "extent": integer_of(extent)}
        layout = _layout_of(info).with_bounds(arguments["lb"], arguments["extent"], align=1)
        return _made(type(self), ("RESIZED", info, arguments), layout, 0, info.size)

    Resized = Create_resized


def _as_counts(counts: Any, length: int) -> Any:
    found = np.broadcast_to(np.asarray(counts, np.int64), (length,))
    _check(
        not length or int(found.min()) >= 0,
        f"the number of items of a block is {counts}; it must not be negative",
    )
    return found


def _share(size: int, way: int, block: int, ranks: int, place: int) -> Any:
    """Return the numbers of the items along one axis that a place of the grid has."""
    is_default = block == INTEGERS["DISTRIBUTE_DFLT_DARG"]
    if way == INTEGERS["DISTRIBUTE_NONE"]:
        _check(ranks == 1, f"an axis that is not distributed has {ranks} ranks, not 1")
        return np.arange(size)
    if way == INTEGERS["DISTRIBUTE_BLOCK"]:
        block = -(-size // ranks) if is_default else block
        _check(block * ranks >= size, f"{ranks} blocks of {block} do not hold {size} items")
    else:
        _check(way == INTEGERS["DISTRIBUTE_CYCLIC"], f"{way} is not a way to distribute an axis")
        block = 1 if is_default else block
    _check(block > 0, f"the length of a block is {block}; it must be positive")
    numbers = np.arange(size)
    return numbers[numbers // block % ranks == place]


def _made(cls: Any, made: Any, layout: Layout, item_size: int, size: int | None = None) -> Any:
    elements = made[1] and (_layout_of(made[1]).elements or 1)
    size = layout.elements // elements * item_size if size is None else size
    nbytes = layout.extent if 0 < layout.extent <= _MOST_BYTES else 0
    dtype = np.dtype((np.void, nbytes))
    info = TypeInfo(size, dtype, None, "V", f"V{layout.extent}", "", frozenset(), made, layout)
    return handle(cls, info)
