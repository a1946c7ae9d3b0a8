"""Datatypes: the predefined ones, by name, by code and by NumPy's dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._core import kernels
from . import errors, handles
from .constants import INTEGERS
from .constructors import Constructors, contents_of
from .messages import Handle, TypeInfo, handle, integer_of, simple, simple_with_gaps
from .refused import refuse_methods

# The predefined datatypes by NumPy's character, that of C first. Other names of one follow after a slash.
_BASIC = {
    "B": "UNSIGNED_CHAR PACKED BYTE UINT8_T",
    "p": "AINT OFFSET COUNT",
    "c": "CHAR CHARACTER",
    "U": "WCHAR",
    "b": "SIGNED_CHAR INT8_T/SINT8_T INTEGER1",
    "h": "SHORT/SIGNED_SHORT INT16_T/SINT16_T INTEGER2",
    "i": "INT/SIGNED_INT INT32_T/SINT32_T LOGICAL/F_BOOL INTEGER/F_INT INTEGER4",
    "l": "LONG/SIGNED_LONG INT64_T/SINT64_T INTEGER8",
    "q": "LONG_LONG/SIGNED_LONG_LONG",
    "H": "UNSIGNED_SHORT UINT16_T",
    "I": "UNSIGNED/UNSIGNED_INT UINT32_T",
    "L": "UNSIGNED_LONG UINT64_T",
    "Q": "UNSIGNED_LONG_LONG",
    "?": "C_BOOL/BOOL CXX_BOOL",
    "e": "FLOAT16_T REAL2",
    "f": "FLOAT/FLOAT32_T REAL/F_FLOAT REAL4",
    "d": "DOUBLE/FLOAT64_T DOUBLE_PRECISION/F_DOUBLE REAL8",
    "g": "LONG_DOUBLE REAL16",
    "F": "C_COMPLEX/C_FLOAT_COMPLEX CXX_FLOAT_COMPLEX COMPLEX/F_COMPLEX/F_FLOAT_COMPLEX COMPLEX8",
    "D": "C_DOUBLE_COMPLEX CXX_DOUBLE_COMPLEX DOUBLE_COMPLEX/F_DOUBLE_COMPLEX COMPLEX16",
    "G": "C_LONG_DOUBLE_COMPLEX CXX_LONG_DOUBLE_COMPLEX COMPLEX32",
}
# Pairs of a value and a place, by NumPy's character of the value.
_PAIRS = {
    "h": "SHORT_INT",
    "i": "INT_INT/TWOINT",
    "l": "LONG_INT",
    "f": "FLOAT_INT",
    "d": "DOUBLE_INT",
    "g": "LONG_DOUBLE_INT",
}
# Types that NumPy does not have. They are null, as in MPI libraries without them.
_MISSING = [
    "DATATYPE_NULL",
    "BFLOAT16_T",
    "LOGICAL1",
    "LOGICAL2",
    "LOGICAL4",
    "LOGICAL8",
    "LOGICAL16",
    "INTEGER16",
    "COMPLEX4",
]
_MPI_NAMES = {"LONG_LONG": "LONG_LONG_INT", "INT_INT": "2INT"}


class Datatype(Constructors, handles.Named, handles.Attributed, Handle):
    """A type of the items of a message."""

    _null_error = errors.ERR_TYPE

    def _info(self) -> TypeInfo:
        return self._handled()

    def Get_size(self) -> int:
        """Return the number of bytes of an item, without gaps."""
        return self._info().size

    def Get_extent(self) -> tuple[int, int]:
        """Return the lower bound, and the distance of two items in memory."""
        info = self._info()
        return 0 if info.layout is None else info.layout.lb, info.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """Return where the bytes of an item begin, and their distance to where they end."""
        info = self._info()
        if info.layout is not None:
            return info.layout.true_lb, info.layout.true_ub - info.layout.true_lb
        pair = info.dtype.fields
        return 0, info.extent if pair is None else pair["place"][1] + pair["place"][0].itemsize

    size = property(Get_size)
    extent = property(lambda self: self.Get_extent()[1])
    lb = property(lambda self: self.Get_extent()[0])
    ub = property(lambda self: sum(self.Get_extent()))
    true_extent = property(lambda self: self.Get_true_extent()[1])
    true_lb = property(lambda self: self.Get_true_extent()[0])
    true_ub = property(lambda self: sum(self.Get_true_extent()))

    def __reduce__(self) -> Any:
        if self._ref is not None and self._ref.made is not None:
            base, combiner, arguments = self.decode()
            return _made_again, (base or type(self), combiner, arguments)
        return super().__reduce__()

    def Dup(self) -> Datatype:
        """Return another datatype with the same properties."""
        info = self._info()
        properties = info.size, info.dtype, None, info.letter, info.code, "", info.ops
        dup = handle(type(self), TypeInfo(*properties, ("DUP", info, {}), info.layout))
        handles.copy_attributes(self, dup)
        return dup

    Create_dup = Dup

    def Commit(self) -> Datatype:
        """Return this datatype, which is ready for messages."""
        self._info()
        return self

    def Free(self) -> None:
        """Free a datatype that the program made. Datatypes made of it, and calls that were begun, stay."""
        if self._info().made is None:
            raise errors.Exception(errors.ERR_TYPE, f"{self.name} is predefined")
        handles.delete_attributes(self)
        self._ref = None

    def tocode(self) -> str:
        """Return the code of one character: "i"."""
        if self._ref is None or self._ref.letter == "V":
            raise ValueError(f"{self.name} has no code")
        return self._info().letter

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        """Return the datatype of a code such as "i" or "f8"."""
        try:
            return BY_CODE[code]
        except KeyError:
            raise ValueError(f"there is no datatype for the code {code!r}") from None

    @property
    def typestr(self) -> str:
        """The code, as NumPy writes it; empty for DATATYPE_NULL."""
        return "" if self._ref is None else self._ref.code

    @property
    def typechar(self) -> str:
        """The code of one character; empty for DATATYPE_NULL."""
        return "" if self._ref is None else self._ref.letter

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Return the numbers of integers, addresses, counts and datatypes that made it, and the way."""
        made = self._info().made
        if made is None:
            return 0, 0, 0, 0, INTEGERS["COMBINER_NAMED"]
        integers, addresses, counts, datatypes = self.Get_contents()
        numbers = len(integers), len(addresses), len(counts), len(datatypes)
        return *numbers, INTEGERS["COMBINER_" + made[0]]

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """Return the integers, addresses, counts and datatypes that made it."""
        if self._info().made is None:
            raise errors.Exception(errors.ERR_TYPE, "a predefined datatype has no contents")
        base, combiner, arguments = self.decode()
        integers, addresses = contents_of(combiner, arguments)
        return integers, addresses, [], arguments.get("datatypes", [base])

    envelope = property(Get_envelope)
    contents = property(Get_contents)
    combiner = property(lambda self: self.Get_envelope()[-1])

    def decode(self) -> tuple[Datatype, str, dict[str, Any]]:
        """Return the datatype that this one was made of, how, and with which arguments."""
        made = self._info().made
        if made is None:
            return self, "NAMED", {}
        combiner, base, arguments = made
        arguments = {
            name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()
        }
        if "datatypes" in arguments:
            arguments["datatypes"] = [handle(type(self), info) for info in arguments["datatypes"]]
        return handle(type(self), base), combiner, arguments

    @property
    def is_named(self) -> bool:
        """True if the datatype is one of MPI's."""
        return self.combiner == INTEGERS["COMBINER_NAMED"]

    @property
    def is_predefined(self) -> bool:
        """True if the datatype is one of MPI's, or null."""
        return self._ref is None or self.is_named

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Datatype:
        """Return the datatype of a class and a size."""
        letters = {"REAL": "f", "INTEGER": "i", "COMPLEX": "c"}
        for name, letter in letters.items():
            if typeclass == INTEGERS["TYPECLASS_" + name] and f"{letter}{size}" in BY_CODE:
                return BY_CODE[f"{letter}{size}"]
        raise errors.Exception(errors.ERR_ARG, f"there is no datatype of class {typeclass} with {size} bytes")

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Datatype:
        """Return the datatype of pairs of a value and an index; DATATYPE_NULL if there is none."""
        if index._info().dtype == np.dtype("i"):
            for pair in PAIRS:
                if pair._info().dtype["value"] == value._info().dtype:
                    return pair
        return DATATYPE_NULL

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
        """Append items to packed memory at a position, and return the position behind them."""
        source = self._items_in(inbuf, False).bytes
        nbytes = source.nbytes
        target = simple((outbuf, "B"), True).bytes
        if position < 0 or position + nbytes > target.nbytes:
            raise errors.Exception(errors.ERR_TRUNCATE, f"{nbytes} bytes do not fit at {position}")
        target[position : position + nbytes] = source
        return position + nbytes

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
        """Copy items from packed memory at a position, and return the position behind them."""
        items = self._items_in(outbuf, True)
        target = items.bytes
        nbytes = target.nbytes
        source = simple((inbuf, "B"), False).bytes
        if position < 0 or position + nbytes > source.nbytes:
            raise errors.Exception(errors.ERR_TRUNCATE, f"there are no {nbytes} bytes at {position}")
        target[:] = source[position : position + nbytes]
        if items.finish is not None:
            items.finish()
        return position + nbytes

    def _items_in(self, buf: Any, is_written: bool) -> Any:
        """Return all items of this datatype in a buffer."""
        memory = simple((buf, "B"), is_written).bytes
        count = memory.nbytes // self.extent if self.extent > 0 else 0
        return simple_with_gaps([memory, count, self], is_written)

    def Pack_size(self, count: int, comm: Any) -> int:
        """Return the number of bytes of `count` packed items."""
        info = self._info()
        return integer_of(count) * (info.packed if info.has_gaps else info).extent


def _made_again(base: Any, combiner: str, arguments: dict[str, Any]) -> Any:
    return base.Dup() if combiner == "DUP" else getattr(base, f"Create_{combiner.lower()}")(**arguments)


refuse_methods(
    Datatype,
    "Create_f90_integer Create_f90_real Create_f90_complex Pack_external Unpack_external Pack_external_size",
    "datatypes of Fortran's kinds and no format external32",
    "use the predefined datatypes, and Pack",
)


_SUMS, _ORDER = ["sum", "prod"], ["min", "max"]
_BITS, _LOGIC = ["band", "bor", "bxor"], ["land", "lor", "lxor"]
# The operations that MPI defines, by the kind of the dtype.
_OPERATIONS = {
    **dict.fromkeys("iu", frozenset(_SUMS + _ORDER + _BITS + _LOGIC)),
    "f": frozenset(_SUMS + _ORDER),
    "c": frozenset(_SUMS),
    "V": frozenset(["minloc", "maxloc"]),  # of pairs
    "?": frozenset(_LOGIC),
    "F": frozenset(_SUMS + _ORDER + _BITS),  # of Fortran's integers
    "B": frozenset(_BITS),
}
# Datatypes that MPI treats as another kind than that of their dtype.
_OTHER_KINDS = {
    **dict.fromkeys(["C_BOOL", "CXX_BOOL", "LOGICAL"], "?"),
    **dict.fromkeys(["INTEGER", "INTEGER1", "INTEGER2", "INTEGER4", "INTEGER8"], "F"),
    **dict.fromkeys(["WCHAR", "CHARACTER", "PACKED"], "no operations"),
    "BYTE": "B",
}


def operations_of(info: TypeInfo) -> frozenset[str]:
    """Return the names of the operations that MPI defines for a datatype, and for `Dup`s of it."""
    while info.made is not None and info.made[0] == "DUP":
        info = info.made[1]
    return frozenset() if info.made is not None else _defined(info.constant, info.dtype)


def _defined(constant: str, dtype: np.dtype[Any]) -> frozenset[str]:
    return _OPERATIONS.get(_OTHER_KINDS.get(constant, dtype.kind), frozenset())


def _make(constant: str, dtype: np.dtype[Any], size: int, char: str, code: str) -> Datatype:
    name = "MPI_" + _MPI_NAMES.get(constant, constant)
    found = kernels.ops(dtype.name) if dtype.name in kernels.dtypes() else ()
    ops = _defined(constant, dtype).intersection(found)
    return handle(Datatype, TypeInfo(size, dtype, constant, char, code, name, ops))


def _predefined() -> dict[str, Datatype]:
    found = {name: Datatype() for name in _MISSING}
    for char, names in _BASIC.items():
        code = np.dtype("U1" if char == "U" else char).str[1:]
        for constant, *aliases in (each.split("/") for each in names.split()):
            # Operations are defined for CHAR, which is an integer.
            dtype = np.dtype("b" if constant == "CHAR" else code)
            made = _make(constant, dtype, dtype.itemsize, char, code)
            found.update(dict.fromkeys([constant, *aliases], made))
    for char, names in _PAIRS.items():
        constant, *aliases = names.split("/")
        dtype = np.dtype([("value", char), ("place", "i")], align=True)
        made = _make(constant, dtype, np.dtype(char).itemsize + 4, "V", f"V{dtype.itemsize}")
        found.update(dict.fromkeys([constant, *aliases], made))
    return found


DATATYPES = _predefined()
DATATYPE_NULL, BYTE, INT = DATATYPES["DATATYPE_NULL"], DATATYPES["BYTE"], DATATYPES["INT"]
PAIRS = [DATATYPES[names.partition("/")[0]] for names in _PAIRS.values()]
handles.predefine(DATATYPES)

# The datatypes of NumPy's characters in C, as the buffer protocol and array.array have them, then with sizes.
_C_NAMES = {char: names.split()[0].partition("/")[0] for char, names in _BASIC.items()} | {
    **dict.fromkeys("Ssa", "CHAR"),
    **dict.fromkeys("wu", "WCHAR"),
    **dict.fromkeys("Pn", "AINT"),
    **dict.fromkeys("mM", "INT64_T"),
    "N": "COUNT",
    "Zf": "C_COMPLEX",
    "Zd": "C_DOUBLE_COMPLEX",
    "Zg": "C_LONG_DOUBLE_COMPLEX",
}
_C_CODES = {char: DATATYPES[name] for char, name in _C_NAMES.items()}
_SIZED_CODES = {
    **{f"i{nbytes}": DATATYPES[f"INT{8 * nbytes}_T"] for nbytes in (1, 2, 4, 8)},
    **{f"u{nbytes}": DATATYPES[f"UINT{8 * nbytes}_T"] for nbytes in (1, 2, 4, 8)},
    **{np.dtype(char).str[1:]: _C_CODES[char] for char in "cefdgFDG?"},
    **{f"{char}{nbytes}": _C_CODES[char] for char, nbytes in (("U", 1), ("m", 8), ("M", 8))},
}
_PREFIXED_CODES = {
    order + code: found for order in "|<=@" for code, found in {**_SIZED_CODES, **_C_CODES}.items()
}
BY_CODE: dict[str, Datatype] = {**_PREFIXED_CODES, **_SIZED_CODES, **_C_CODES}
_FORTRAN_CODES = {
    "l": "LOGICAL",
    "i": "INTEGER",
    "d": "DOUBLE_PRECISION",
    **dict.fromkeys("frs", "REAL"),
    **dict.fromkeys("Fc", "COMPLEX"),
    **dict.fromkeys("Dz", "DOUBLE_COMPLEX"),
    **{f"i{nbytes}": f"INTEGER{nbytes}" for nbytes in (1, 2, 4, 8)},
    **{f"r{nbytes}": f"REAL{nbytes}" for nbytes in (4, 8, 16)},
    **{f"c{nbytes}": f"COMPLEX{nbytes}" for nbytes in (8, 16, 32)},
}
BY_NUMBER = {np.dtype(char).num: BY_CODE[char] for char in "bBhHiIlLqQfdg?eFDG"}
TYPEDICT_C = {**_SIZED_CODES, **_C_CODES}
TYPEDICT_F = {code: DATATYPES[name] for code, name in _FORTRAN_CODES.items()}
