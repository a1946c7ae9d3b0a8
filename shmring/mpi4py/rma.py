"""One-sided operations: a rank reads and writes the memory of another one, which takes no part.

Every operation is complete when its call returns. Accumulates, fetches and swaps hold a lock of their target,
so they are atomic towards each other.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from . import errors
from .constants import INTEGERS
from .constructors import basic_of
from .messages import Data, TypeInfo, handle, integer_of, simple, simple_with_gaps
from .ops import OPS, SUM, Op
from .point_to_point import completed
from .requests import Request
from .types import Datatype
from .window_state import Window, reports

_PROC_NULL = INTEGERS["PROC_NULL"]
_NO_OP = OPS["NO_OP"]
_REPLACE = OPS["REPLACE"]
_PIECE_NBYTES = 4096  # reading so many bytes of gaps takes about as long as one more system call


class Place(NamedTuple):
    """Items in the memory of a rank."""

    rank: int
    begin: int  # byte in that rank's memory
    number: int  # of items
    type: TypeInfo  # that of the items without their gaps
    layout: Any  # None if the items have no gaps

    @property
    def nbytes(self) -> int:
        """The number of bytes, without gaps."""
        return self.number * int(self.type.extent)

    def bounds(self) -> tuple[int, int]:
        """Return the first byte in that rank's memory, and the end."""
        first, end = (0, self.nbytes) if self.layout is None else self.layout.bounds(self.number)
        return self.begin + first, self.begin + end

    def is_copied(self, window: Window) -> bool:
        """Return whether `read` returns a copy: there are gaps, or the memory is not mapped."""
        return self.layout is not None or not window.is_mapped(self.rank)

    def read(self, window: Window) -> Any:
        """Return the bytes without gaps: those in the window, or a copy."""
        part = window.parts[self.rank]
        if self.layout is None or window.is_mapped(self.rank) or self._is_close():
            there = part[slice(*self.bounds())]
            return there if self.layout is None else self.layout.gather(there, self.number)
        pieces = [part[begin:end] for begin, end in self._pieces()]
        return np.concatenate(pieces)

    def read_into(self, window: Window, out: Any) -> None:
        """Fill an array with the bytes without gaps."""
        if self.layout is None and not window.is_mapped(self.rank):
            window.parts[self.rank].read_into(out, self.begin)
        else:
            np.copyto(out, self.read(window))

    def write(self, window: Window, given: Any) -> None:
        """Write bytes without gaps to the window; they may be fewer than there is room for."""
        if self.layout is None:
            window.parts[self.rank][self.begin : self.begin + given.nbytes] = given
            return
        part = window.parts[self.rank]
        if window.is_mapped(self.rank):
            self.layout.scatter(given, part[slice(*self.bounds())], self.number)
            return
        for begin, end in self._pieces():  # not the gaps: another rank may write to them now
            piece, given = given[: end - begin], given[end - begin :]
            part[begin : begin + piece.nbytes] = piece

    def _pieces(self) -> list[tuple[int, int]]:
        """Return the first byte and the end of each piece that has no gap, in the order of the message."""
        offsets, lengths = self.layout.pieces(self.number)
        begins = self.begin + offsets
        return list(zip(begins.tolist(), (begins + lengths).tolist(), strict=True))

    def _is_close(self) -> bool:
        """Return whether to read the gaps too is cheaper than one system call for each piece."""
        first, end = self.bounds()
        return end - first <= _PIECE_NBYTES * self.number * len(self.layout.offsets)


class Operations:
    """The calls of a window that access memory."""

    __slots__ = ()
    _ref: Any

    def _window(self) -> Window:
        raise NotImplementedError

    @reports
    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Write a message to the memory of a rank.

        The target is a displacement, or (displacement, count, datatype), and may end after each of them.
        """
        window, data = self._window(), _message(target_rank, origin, False)
        place = _place_of(window, data, target_rank, target)
        if place is not None:
            given = data.bytes
            _check_fits(window, given.nbytes, place.nbytes)
            with window.copying(place.rank, given.nbytes):
                place.write(window, given)

    @reports
    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Read a message from the memory of a rank."""
        window, data = self._window(), _message(target_rank, origin, True)
        place = _place_of(window, data, target_rank, target)
        if place is not None:
            taken = data.bytes
            _check_fits(window, place.nbytes, taken.nbytes)
            with window.copying(place.rank, place.nbytes):
                place.read_into(window, taken[: place.nbytes])
            _finish(data, place.nbytes)

    @reports
    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        """Combine a message with the memory of a rank, atomically for each item."""
        window, data = self._window(), _message(target_rank, origin, False)
        place = _place_of(window, data, target_rank, target)
        if place is not None:
            _combine(window, place, op, data, None)

    @reports
    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> None:
        """As `Accumulate`; the result is what the memory held before."""
        window = self._window()
        data, taken = _message(target_rank, origin, False), _message(target_rank, result, True)
        place = _place_of(window, taken if op == _NO_OP else data, target_rank, target)
        if place is not None:
            _combine(window, place, op, data, taken)

    @reports
    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM
    ) -> None:
        """As `Get_accumulate`, for one item."""
        window = self._window()
        if target_rank != _PROC_NULL:
            data, taken = _single_items(simple(origin, False), simple(result, True))
            place = _place_of(window, data, target_rank, integer_of(target_disp))
            assert place is not None
            _combine(window, place, op, data, taken)

    @reports
    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        """Replace one item in the memory of a rank if it equals `compare`; the result is the old item."""
        window = self._window()
        if target_rank == _PROC_NULL:
            return
        data, expected, taken = _single_items(
            simple(origin, False), simple(compare, False), simple(result, True)
        )
        if data.type.dtype.kind not in "iubS":
            raise window.failure(errors.ERR_TYPE, f"{data.type.name} cannot be compared and swapped")
        place = _place_of(window, data, target_rank, integer_of(target_disp))
        assert place is not None
        with window.atomic[place.rank]:
            before = place.read(window).copy()
            if (before == expected.bytes).all():
                place.write(window, data.bytes)
        taken.bytes[:] = before

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """As `Put`; return a request, which is complete."""
        self.Put(origin, target_rank, target)
        return completed(self._ref)

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """As `Get`; return a request, which is complete."""
        self.Get(origin, target_rank, target)
        return completed(self._ref)

    def Raccumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> Request:
        """As `Accumulate`; return a request, which is complete."""
        self.Accumulate(origin, target_rank, target, op)
        return completed(self._ref)

    def Rget_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> Request:
        """As `Get_accumulate`; return a request, which is complete."""
        self.Get_accumulate(origin, result, target_rank, target, op)
        return completed(self._ref)


def _place_of(window: Window, data: Data, rank: int, target: Any) -> Place | None:
    """Return the items that an operation accesses; None for PROC_NULL."""
    disp, count, info, layout = 0, data.count, data.type, data.layout
    if hasattr(target, "__index__"):
        disp = operator.index(target)
    elif isinstance(target, list | tuple) and len(target) <= 3:
        disp = operator.index(target[0]) if target else 0
        count = operator.index(target[1]) if len(target) > 1 else count
        if len(target) > 2:
            described = simple_with_gaps((None, 0, target[2]), False)
            info, layout = described.type, described.layout
    elif target is not None:
        raise ValueError(f"the target is {target!r}; it must be a displacement or [displ, count, datatype]")
    number = window.target(rank)
    if number is None:
        return None
    if not window.epochs.allow(number):
        raise window.failure(
            errors.ERR_RMA_SYNC, f"this rank may not access rank {number}: call Fence, Lock or Start first"
        )
    if disp < 0 or count < 0:
        code = errors.ERR_DISP if disp < 0 else errors.ERR_COUNT
        raise window.failure(code, f"the target is {count} items at {disp}; neither may be negative")
    place = Place(number, disp * window.units[number], count, info, layout)
    first, end = place.bounds()
    if first < end and not 0 <= first < end <= window.sizes[number]:
        raise window.failure(
            errors.ERR_RMA_RANGE,
            f"{end - first} bytes at byte {first} are not in the memory of rank {number}, which has "
            f"{window.sizes[number]}",
        )
    return place


def _message(rank: int, spec: Any, is_written: bool) -> Data:
    """Return the data of a specification. For PROC_NULL it may be anything."""
    return simple_with_gaps([None, 0] if rank == _PROC_NULL else spec, is_written)


def _finish(data: Data, nbytes: int) -> None:
    """Copy `nbytes` bytes that were read to the items in the caller's memory, if these have gaps."""
    if data.finish is not None:
        data.finish(nbytes)


def _check_fits(window: Window, moved: int, room: int) -> None:
    if moved > room:
        raise window.failure(errors.ERR_TRUNCATE, f"{moved} bytes are moved, and there is room for {room}")


def _single_items(*all_data: Data) -> tuple[Data, ...]:
    first = all_data[0].type
    for data in all_data:
        if data.count != 1 or data.type.dtype != first.dtype:
            raise ValueError(
                f"this takes one item of one datatype, not {data.count} of {data.type.name} and {first.name}"
            )
    return all_data


def _combine(window: Window, place: Place, op: Op, data: Data, taken: Data | None) -> None:
    """Combine items with those of a rank; store what these were before."""
    if not op or not op.is_predefined or (op == _NO_OP and taken is None):
        raise window.failure(errors.ERR_OP, "the operation must be one of MPI's, and NO_OP needs a result")
    basic = basic_of(place.type)
    is_moved = op in (_NO_OP, _REPLACE)  # nothing is combined, so any parts will do
    is_whole = basic is None and is_moved
    if is_whole:
        basic = place.type
    for given in [taken] if op == _NO_OP else [data, taken]:
        if given is None:
            continue
        found = given.type if is_whole else basic_of(given.type)
        if basic is None or found is None or found.dtype != basic.dtype:
            raise window.failure(errors.ERR_TYPE, f"{given.type.name} is combined with {place.type.name}")
        if given.bytes.nbytes != place.nbytes:
            raise window.failure(errors.ERR_COUNT, f"{given.count} items meet {place.number}")
    assert basic is not None  # each operation has an origin or a result
    # MPICH takes BYTE as a number, in windows alone.
    is_number = basic.constant == "BYTE" and op._ref.name not in ("minloc", "maxloc")
    if not is_moved and not is_number:
        op._ref.check(basic)
    before = None
    with window.atomic[place.rank]:
        there = place.read(window).view(basic.dtype)
        if taken is not None:
            before = there.copy()
        if op != _NO_OP:
            given, datatype = data.bytes.view(basic.dtype), handle(Datatype, basic)
            if place.layout is not None and place.layout.has_overlaps(place.number):
                region = window.parts[place.rank][slice(*place.bounds())]
                for part in place.layout.segments(region, place.number):
                    there = part.view(basic.dtype)
                    op._ref.fold(given[: len(there)], there, datatype)
                    given = given[len(there) :]
                there = place.layout.gather(region, place.number)
            else:
                op._ref.fold(given, there, datatype)
            if place.is_copied(window):
                place.write(window, there.view(np.uint8))
    if taken is not None:
        taken.bytes.view(basic.dtype)[:] = before
        _finish(taken, place.nbytes)
