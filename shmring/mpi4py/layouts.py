"""The places of a datatype's bytes in memory, and the copies between these places and contiguous memory.

A layout is a list of segments, each an offset from the address of an item and a length. A message of such
items is copied to contiguous memory before it is sent, and back after it was received.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_MOST_INDEX_NBYTES = 2**20  # of an index that is kept for the next message
_MOST_INDEXED_NBYTES = 4096  # of a message whose index is faster than a view with strides
_UNITS = {nbytes: np.dtype(f"u{nbytes}") for nbytes in (1, 2, 4, 8)}
Part = tuple[Any, Any, "Layout"]


class Layout:
    """The segments of an item in the order of the message, its bounds, and the basic items in it."""

    def __init__(
        self, offsets: Any, lengths: Any, lb: int, extent: int, align: int, elements: int, basic: int | None
    ) -> None:
        self.offsets, self.lengths, self.lb, self.extent = offsets, lengths, lb, extent
        self.align = align  # 1 if the program set the bounds: a struct of such items gets no padding
        self.elements, self.basic = elements, basic  # number of basic items, and their size if they have one
        self.nbytes = int(lengths.sum())
        self._index: tuple[int, Any] = (0, None)  # that of the last count, which is often the next one, too

    @functools.cached_property
    def true_lb(self) -> int:
        """The place of the first byte, from the address of an item."""
        return int(self.offsets.min()) if self.nbytes else 0

    @functools.cached_property
    def true_ub(self) -> int:
        """The end of the last byte, from the address of an item."""
        return int((self.offsets + self.lengths).max()) if self.nbytes else 0

    @functools.cached_property
    def _unit(self) -> int:
        """The size of the integers that are copied: all segments are multiples of it."""
        steps = [np.gcd.reduce(self.offsets - self.true_lb), np.gcd.reduce(self.lengths), self.extent]
        step = int(np.gcd.reduce(steps))
        return min(step & -step, 8) or 1  # 0 if there is no segment

    @classmethod
    @functools.cache
    def of_bytes(cls, nbytes: int, align: int, elements: int) -> Layout:
        """Return the layout of a predefined datatype: its bytes follow each other."""
        ends = np.array([0], np.int64), np.array([nbytes], np.int64)
        return cls(*ends, 0, nbytes, align, elements, nbytes if elements == 1 else None)

    @functools.cached_property
    def is_dense(self) -> bool:
        """True if items that follow each other have no gaps in them, nor between them."""
        return len(self.offsets) == 1 and self.lengths[0] == self.extent

    def with_bounds(self, lb: int, extent: int, align: int | None = None) -> Layout:
        """Return the same segments with other bounds, and another alignment if one is given."""
        align = self.align if align is None else align
        return Layout(self.offsets, self.lengths, lb, extent, align, self.elements, self.basic)

    def beginning(self, nbytes: int) -> Layout:
        """Return the layout of the first `nbytes` bytes of an item."""
        before = np.cumsum(self.lengths) - self.lengths
        kept = before < nbytes
        lengths = np.minimum(self.lengths, nbytes - before)[kept]
        return Layout(
            self.offsets[kept], lengths, self.lb, self.extent, self.align, self.elements, self.basic
        )

    def bounds(self, count: int) -> tuple[int, int]:
        """Return where the bytes of `count` items begin and end, from the address of the first."""
        if not count or not self.nbytes:
            return 0, 0
        last = (count - 1) * self.extent
        return self.true_lb + min(0, last), self.true_ub + max(0, last)

    @functools.cached_property
    def _axes(self) -> list[tuple[int, int]] | None:
        """Number and distance of the segments along each axis if they are a regular array; else None."""
        if (self.lengths != self.lengths[0]).any():
            return None
        axes: list[tuple[int, int]] = []
        offsets = self.offsets
        while len(offsets) > 1:
            step = offsets[1] - offsets[0]
            others = np.flatnonzero(np.diff(offsets) != step)
            number = int(others[0]) + 1 if len(others) else len(offsets)
            if len(offsets) % number:
                return None
            rows = offsets.reshape(-1, number)
            if (np.diff(rows) != step).any():
                return None
            axes.insert(0, (number, int(step)))
            offsets = rows[:, 0]
        return axes

    def _segments_of(self, count: int) -> tuple[Any, Any]:
        """Return the segments of `count` items: offsets from the address of the first one, and lengths."""
        starts = np.arange(count)[:, None] * self.extent + self.offsets
        return starts.reshape(-1), np.tile(self.lengths, count)

    def pieces(self, count: int) -> tuple[Any, Any]:
        """Return the segments of `count` items; those without a gap between them are one."""
        return _join(*self._segments_of(count))

    def gather(self, region: Any, count: int) -> Any:
        """Return the bytes of `count` items, one after another; `region` is the memory in their bounds."""
        if not len(region) or self.is_dense or (len(self.offsets) == 1 and count == 1):
            return region.copy()
        places = self._strided(region, count)
        if places is not None:
            return places.flatten().view(np.uint8)
        return region.view(_UNITS[self._unit])[self._index_of(count)].view(np.uint8)

    def scatter(self, packed: Any, region: Any, count: int) -> None:
        """Copy what `gather` returned, or its first bytes, back to the items. Other bytes are untouched."""
        if packed.nbytes < count * self.nbytes:
            self._scatter_beginning(packed, region, self.bounds(count)[0])
            return
        if not len(region) or self.is_dense or (len(self.offsets) == 1 and count == 1):
            region[:] = packed
            return
        places = self._strided(region, count)
        if places is not None:
            places[:] = packed.view(places.dtype).reshape(places.shape)
        else:
            region.view(_UNITS[self._unit])[self._index_of(count)] = packed.view(_UNITS[self._unit])

    def _scatter_beginning(self, packed: Any, region: Any, begin: int) -> None:
        """Copy the first bytes of items. begin: the place of the region, from the address of an item."""
        number, rest = divmod(packed.nbytes, self.nbytes)
        parts = [(self, number, 0), (self.beginning(rest), 1, number * self.extent)][: 2 if rest else 1]
        for layout, count, place in parts:
            first, end = (place + bound - begin for bound in layout.bounds(count))
            nbytes = count * layout.nbytes
            layout.scatter(packed[:nbytes], region[first:end], count)
            packed = packed[nbytes:]

    def segments(self, region: Any, count: int) -> Iterator[Any]:
        """Yield each segment of the items, in the order of the message; see `gather`."""
        starts, lengths = self._segments_of(count)
        firsts = starts - self.bounds(count)[0]
        for first, end in zip(firsts.tolist(), (firsts + lengths).tolist(), strict=True):
            yield region[first:end]

    def has_overlaps(self, count: int) -> bool:
        """Return whether some bytes belong to two segments of `count` items."""
        if count < 2 or self.true_ub - self.true_lb <= abs(self.extent):
            return count > 0 and self._overlaps_itself
        return _have_common_bytes(*self._segments_of(count))

    @functools.cached_property
    def _overlaps_itself(self) -> bool:
        return _have_common_bytes(self.offsets, self.lengths)

    def _strided(self, region: Any, count: int) -> Any:
        """Return the items in memory as an array: items, segments of each, integers of each.

        Return None if an index is faster, or there is no such array.
        """
        if count * self.nbytes <= _MOST_INDEXED_NBYTES or self._axes is None:
            return None
        axes = [(count, self.extent), *self._axes, (int(self.lengths[0]) // self._unit, self._unit)]
        shape, strides = zip(*axes[count == 1 :], strict=True)
        first = int(self.offsets[0]) - self.true_lb - min(0, (count - 1) * self.extent)
        return np.ndarray(shape, _UNITS[self._unit], region, first, strides)

    def _index_of(self, count: int) -> Any:
        known, index = self._index
        if index is None or known != count:
            starts, lengths = (self.offsets - self.true_lb) // self._unit, self.lengths // self._unit
            index = _spread(starts, lengths, 1)
            if count != 1:
                step = self.extent // self._unit
                items = np.arange(count) * step - min(0, (count - 1) * step)
                index = (items[:, None] + index).reshape(-1)
            if index.nbytes < _MOST_INDEX_NBYTES:
                self._index = count, index
        return index


def _have_common_bytes(starts: Any, lengths: Any) -> bool:
    order = np.argsort(starts, kind="stable")
    return bool((starts[order][1:] < (starts + lengths)[order][:-1]).any())


def _spread(starts: Any, counts: Any, step: int) -> Any:
    """Return start, start + step, … of each start, as many as its count."""
    firsts = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
    return np.repeat(starts, counts) + within * step


def combine(parts: Sequence[Part], is_padded: bool = False) -> Layout:
    """Return the layout of blocks: for each part, displacements in bytes, numbers of items, and their layout.

    A padded layout ends where the next item is aligned, as a struct of C.
    """
    offsets, lengths, lower, upper = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [], []
    elements, basics, align = 0, set(), 1
    for displs, counts, old in parts:
        if not counts.all():
            displs, counts = displs[counts > 0], counts[counts > 0]
        if not len(displs) or not (old.nbytes or old.extent):
            continue
        if old.is_dense:
            offsets.append(displs + old.offsets[0])
            lengths.append(counts * old.extent)
        else:
            items = _spread(displs, counts, old.extent)
            offsets.append((items[:, None] + old.offsets).reshape(-1))
            lengths.append(np.tile(old.lengths, len(items)))
        ends = displs + (counts - 1) * old.extent
        lower.append(int(min(displs.min(), ends.min())) + old.lb)
        upper.append(int(max(displs.max(), ends.max())) + old.lb + old.extent)
        elements += int(counts.sum()) * old.elements
        basics.add(old.basic)
        align = max(align, old.align)
    lb, ub = min(lower, default=0), max(upper, default=0)
    extent = -(-(ub - lb) // align) * align if is_padded else ub - lb
    joined = _join(np.concatenate(offsets), np.concatenate(lengths))
    return Layout(*joined, lb, extent, align, elements, basics.pop() if len(basics) == 1 else None)


def _join(offsets: Any, lengths: Any) -> tuple[Any, Any]:
    """Return the segments with those joined that follow each other."""
    offsets, lengths = offsets[lengths > 0], lengths[lengths > 0]
    if len(offsets) < 2:
        return offsets, lengths
    is_first = np.concatenate([[True], offsets[1:] != offsets[:-1] + lengths[:-1]])
    return offsets[is_first], np.add.reduceat(lengths, np.flatnonzero(is_first))


def grid(sizes: Sequence[int], chosen: Sequence[Any]) -> Any:
    """Return the numbers of items of an array in C order; `chosen` has the indices along each axis."""
    numbers = np.zeros(1, np.int64)
    for size, indices in zip(sizes, chosen, strict=True):
        numbers = (numbers[:, None] * size + np.asarray(indices, np.int64)).reshape(-1)
    return numbers


def sizes_of_elements(info: Any) -> Any:
    """Return the bytes of each basic element of an item of a datatype, in the order of a message."""
    if info.made is None:
        if info.dtype.names is None:
            return np.array([info.extent])
        first = info.dtype[0].itemsize  # of a pair, whose message contains the padding
        return np.array([first, info.extent - first])
    combiner, base, arguments = info.made
    if combiner == "DUP":
        return sizes_of_elements(base)
    if base is None:
        blocks = zip(arguments["datatypes"], arguments["blocklengths"], strict=True)
        return np.concatenate([np.empty(0, int), *(np.tile(sizes_of_elements(old), n) for old, n in blocks)])
    sizes = sizes_of_elements(base)
    nbytes = int(sizes.sum())
    return np.tile(sizes, info.layout.nbytes // nbytes if nbytes else 0)
