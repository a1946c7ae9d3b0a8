"""Arrays of every kind: exporters of the buffer protocol, ml_dtypes, __array_interface__ and DLPack."""

import array
import ctypes
import time

import ml_dtypes
import numpy as np
import pytest

import shmring


class Interface:
    """Has `__array_interface__` and nothing else."""

    def __init__(self, source):
        self._source = source
        self.__array_interface__ = source.__array_interface__


class DLPack:
    """An object with DLPack only, on any device."""

    def __init__(self, source, device=(1, 0)):
        self._source = source
        self._device = device

    def __dlpack__(self, **keywords):
        return self._source.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._device


EXPORTS_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # of DLPack: __dlpack__(max_version=...)


class Versioned(DLPack):
    """An object that always exports a versioned tensor, which says whether it is read-only."""

    def __dlpack__(self, **keywords):
        return super().__dlpack__(max_version=(1, 0), **keywords)


class WithoutCapsule(DLPack):
    def __dlpack__(self, **keywords):
        return "a capsule"


class Subclass(np.ndarray):
    pass


class Frozen(np.ndarray):
    """As arrays of JAX: read-only as a buffer, which DLPack does not say."""

    __array_interface__ = property()  # none

    def __dlpack__(self, **keywords):
        return self.base.__dlpack__(**keywords)


class Pair(ctypes.Structure):
    _fields_ = (("f0", ctypes.c_int), ("f1", ctypes.c_float))


class Place(ctypes.Structure):
    _fields_ = (("Origin", ctypes.c_int), ("Offset", ctypes.c_float))


class Character(ctypes.Structure):
    _fields_ = (("letter", ctypes.c_wchar), ("number", ctypes.c_int))  # NumPy has no such format


class Either(ctypes.Union):
    _fields_ = (("f0", ctypes.c_float), ("f1", ctypes.c_int))


class Reference(ctypes.Structure):
    _fields_ = (("item", ctypes.py_object),)


class Pointer(ctypes.Structure):
    _fields_ = (("place", ctypes.POINTER(ctypes.c_int)),)


CTYPES = (
    ctypes.c_bool,
    ctypes.c_int8,
    ctypes.c_uint8,
    ctypes.c_short,
    ctypes.c_uint16,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_long,
    ctypes.c_longlong,
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_float,
    ctypes.c_double,
)
SMALL_FLOATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
NUMPY = (*"?bBhHiIlLqQefdFD", "intp", "uintp")


def memory_of(source):
    """Return a Memory, which knows only the place of the array."""
    return shmring.Memory(source.ctypes.data, source.size, source.dtype.name, owner=source)


def make(rank):
    """name → (array, how to read it), three elements of rank + 1 each."""
    ones, small = np.full(3, rank + 1), {name: np.dtype(getattr(ml_dtypes, name)) for name in SMALL_FLOATS}
    made = {f"numpy {name}": ones.astype(name) for name in NUMPY}
    made |= {f"array {code}": array.array(code, [rank + 1] * 3) for code in "bBhHiIlLqQfd"}
    made |= {f"ctypes {kind.__name__}": (kind * 3)(*[rank + 1] * 3) for kind in CTYPES}
    made |= {f"ml_dtypes {name}": ones.astype(dtype) for name, dtype in small.items()}
    exported = ("bool", "uint8", "int64", "float16", "float32", "complex64")
    made |= {f"interface {name}": Interface(ones.astype(name)) for name in exported}
    made |= {f"dlpack {name}": DLPack(ones.astype(name)) for name in exported}
    made |= {f"memory {name}": memory_of(ones.astype(name)) for name in exported}
    made |= {f"memory {name}": memory_of(ones.astype(dtype)) for name, dtype in small.items()}
    matrix = np.full((3, 2), rank + 1, "f4")
    if EXPORTS_VERSIONED:
        made["versioned dlpack matrix"] = Versioned(matrix.copy())
    return made | {
        "bytearray": bytearray([rank + 1] * 3),
        "memoryview": memoryview(bytearray([rank + 1] * 3)),
        "memoryview cast": memoryview(bytearray(ones.astype("f8").tobytes())).cast("d"),
        "memoryview cast 2-d": memoryview(bytearray(matrix.tobytes())).cast("f", (3, 2)),
        "ctypes matrix": ((ctypes.c_int * 2) * 3)(*[(ctypes.c_int * 2)(rank + 1, rank + 1)] * 3),
        "dlpack matrix": DLPack(matrix.copy()),
        "interface Fortran": Interface(np.asfortranarray(matrix)),
        "subclass": ones.astype("f4").view(Subclass),
        "record field": ones.astype([("a", "f4")])["a"],
        "unaligned": np.frombuffer(bytearray(1) + bytearray(ones.astype("f4").tobytes()), "f4", offset=1),
        "0-d": np.array(rank + 1.0),
        "0-d subclass": np.array(rank + 1.0).view(Subclass),
        "0-d ml_dtypes": np.array(rank + 1, small["bfloat16"]),
        "empty": np.zeros((0, 3)),
    }


def source_of(buffer):
    """The NumPy array that is behind it."""
    if isinstance(buffer, shmring.Memory):
        return buffer.owner
    return np.asarray(getattr(buffer, "_source", buffer))


def numbers_in(buffer):
    numbers = source_of(buffer).ravel()
    return (numbers.real if numbers.dtype.kind == "c" else numbers).astype("f8").tolist()


def reduce_all_makes(comm):
    """Each kind in place, and into a NumPy array of the same kind."""
    found = {}
    for name, x in make(comm.rank).items():
        comm.all_reduce(x)
        found[name] = numbers_in(x)
    for name, x in make(comm.rank).items():
        before, out = numbers_in(x), np.zeros_like(source_of(x))
        comm.all_reduce(x, out=out)
        assert numbers_in(out) == found[name], name
        assert numbers_in(x) == before, f"{name}: x was written to"
    return found


def test_arrays_of_every_make(world_of):
    for found in world_of(2)(reduce_all_makes):
        assert found == {name: [3.0] * len(numbers_in(x)) for name, x in make(0).items()} | {
            name: [1.0] * 3 for name in found if "bool" in name or "?" in name
        }


def broadcast_all_makes(comm):
    found = {}
    for name, x in make(comm.rank).items():
        comm.broadcast(x, 1)
        found[name] = numbers_in(x)
    return found


def test_every_make_can_be_broadcast(world_of):
    want = {name: numbers_in(x) for name, x in make(1).items()}
    assert world_of(2)(broadcast_all_makes) == [want, want]


def make_results(comm):
    """Call the collectives that make an array like x, with arrays that NumPy does not take by itself."""
    calls = (comm.gather, comm.all_gather, comm.all_to_all, comm.reduce_scatter, comm.all_gather_v)
    for make in (DLPack, Interface):
        for call in calls:
            found, expected = call(make(np.arange(4.0))), call(np.arange(4.0))
            assert np.array_equal(found, expected), call.__name__


def test_results_are_made_like_arrays_of_every_make(world_of):
    world_of(2)(make_results)


def give_and_take_memory(comm):
    """Call the collectives that split or join the result, that send it, or whose lengths ranks choose."""
    size, rank = comm.size, comm.rank
    x, out = np.full(2 * size, rank, "f4"), np.zeros(2, "f4")
    comm.reduce_scatter(memory_of(x), out=memory_of(out))
    assert out.tolist() == [size * (size - 1) / 2] * 2
    out = np.zeros(size, "i8")
    assert comm.all_gather(memory_of(np.full(1, rank)), out=out) is out
    assert out.tolist() == list(range(size))
    pieces = comm.all_gather_v(np.asarray(memory_of(np.full(rank, rank, "u1"))))
    assert [piece.tolist() for piece in pieces] == [[r] * r for r in range(size)]
    came = np.zeros(3, "f8")
    comm.sendrecv(memory_of(np.full(3, rank, "f8")), (rank + 1) % size, memory_of(came))
    return came.tolist()


def test_memory_of_others(world_of):
    assert world_of(3)(give_and_take_memory) == [[2.0] * 3, [0.0] * 3, [1.0] * 3]


def test_memory_is_described_and_checked():
    x = np.arange(6, dtype="f4")
    memory = memory_of(x)
    assert (memory.address, memory.count, memory.dtype) == (x.ctypes.data, 6, "float32")
    assert (memory.nbytes, memory.shape) == (24, (6,))
    assert memory.owner is x
    assert np.shares_memory(np.asarray(memory), x)
    assert not np.shares_memory(np.array(memory), x)
    with pytest.raises(TypeError, match="dtype is 'float33'; allowed: bool"):
        shmring.Memory(0, 0, "float33")
    for wrong, text in (
        ((1, 1.5), "count is 1.5;"),
        ((1.0, 1), "address is 1.0;"),
        ((1, None), "count is None;"),
    ):
        with pytest.raises(TypeError, match=f"{text} it must be an integer"):
            shmring.Memory(*wrong, "uint8")
    assert shmring.Memory(np.uint64(x.ctypes.data), np.int8(6), "float32").count == 6
    with pytest.raises(TypeError, match="NumPy has no bfloat16"):
        np.asarray(shmring.Memory(0, 0, "bfloat16"))
    with shmring.init() as comm, pytest.raises(ValueError, match="x is read-only"):
        comm.all_reduce(shmring.Memory(x.ctypes.data, 6, "float32", readonly=True))


def test_an_array_without_elements_may_have_no_address():
    x, out = shmring.Memory(0, 0, "float32"), np.ones(4, "f4")
    with shmring.init() as comm:
        for call in (comm.all_reduce, comm.broadcast, comm.all_gather):
            with pytest.raises(ValueError, match=r"out is float32\[4\], x is float32\[0\]"):
                call(x, out=out)
            call(x, out=out[:0])


def different_makes(comm):
    """Reduce arrays of different kinds or shapes: only dtype, count and order have to be the same."""
    makes = [np.ones(1000, "u1"), bytearray(b"\1" * 1000), (ctypes.c_uint8 * 1000)(*[1] * 1000)]
    x = makes[comm.rank]
    comm.all_reduce(x)
    shapes = [np.ones((10, 20)), np.ones(200), np.ones((2, 5, 20))]
    comm.all_reduce(shapes[comm.rank])
    return set(bytes(x)), float(shapes[comm.rank].sum())


def test_ranks_may_pass_different_makes_and_shapes(world_of):
    assert world_of(3)(different_makes) == [({3}, 600.0)] * 3


# Arrays of opaque dtypes, by name three makes of the same dtype.
def opaque_makes(fill):
    times, big = np.full(3, fill, "M8[s]"), np.full(3, fill, ">f4")
    rows, text = np.full(3, fill, "i4,i4"), np.full(3, str(fill), "U2")
    small = np.full(3, fill, ml_dtypes.bfloat16)
    return {
        "times": [times, times.view(Subclass), Interface(times)],
        "big endian": [big, memoryview(big), Interface(big)],
        "rows": [rows, memoryview(rows), rows.view(Subclass)],
        "text": [text, text.view(Subclass), Interface(text)],
        "structures": [(Pair * 3)(*[(fill, fill)] * 3), np.full(3, fill, "i4,f4"), memoryview((Pair * 3)())],
        "fields with an O": [
            (Place * 3)(*[(fill, fill)] * 3),
            memoryview((Place * 3)(*[(fill, fill)] * 3)),
            np.zeros(3, [("Origin", "i4"), ("Offset", "f4")]),
        ],
        "letters": [
            np.full(3, bytes([fill])),
            (ctypes.c_char * 3)(*[fill] * 3),
            memoryview(bytearray(3)).cast("c"),
        ],
        "of ours": [small, memory_of(small), small.view(Subclass)],
    }


def move_different_makes(comm):
    for name in opaque_makes(0):
        x, expected = opaque_makes(comm.rank)[name][comm.rank], opaque_makes(1)[name][1]
        comm.broadcast(x, root=1)
        assert source_of(x).tobytes() == source_of(expected).tobytes(), name


def test_ranks_may_move_different_makes(world_of):
    world_of(3)(move_different_makes)


def split_structures(comm):
    """Three structures cannot be split between two ranks, though their bytes can."""
    for kind in (Pair, Character):
        with pytest.raises(ValueError, match="3 rows"):
            comm.all_to_all((kind * 3)(), out=(kind * 3)())
    letters = (Character * 2)()
    comm.all_to_all((Character * 2)(("a", comm.rank), ("b", comm.rank)), out=letters)
    assert [(each.letter, each.number) for each in letters] == [("ab"[comm.rank], rank) for rank in range(2)]
    out = (Pair * 2)()
    comm.all_to_all((Pair * 2)((comm.rank, 0), (comm.rank, 1)), out=out)
    return [(pair.f0, pair.f1) for pair in out]


def move_unions(comm):
    unions = (Either * 3)(*[Either(comm.rank + 1.0)] * 3)
    with pytest.raises(TypeError):
        comm.all_reduce(unions)
    comm.broadcast(unions)
    return [union.f0 for union in unions]


def test_unions_are_moved_and_not_reduced(world_of):
    assert world_of(2)(move_unions) == [[1.0] * 3] * 2


def test_structures_are_not_split(world_of):
    assert world_of(2)(split_structures) == [[(0, 0.0), (1, 0.0)], [(0, 1.0), (1, 1.0)]]


OBJECTS = r"dtype object.*convert.*object calls, such as broadcast_object, take any object"
REFUSED_EVERYWHERE = {
    "objects": (np.zeros(3, object), TypeError, OBJECTS),
    "objects' interface": (Interface(np.zeros(3, object)), TypeError, OBJECTS),
    "objects in records": (np.zeros(3, [("a", "i4"), ("b", "O")]), TypeError, "broadcast_object, take any"),
    "objects in structures": ((Reference * 3)(), TypeError, "O:item"),
    "pointers": ((ctypes.c_char_p * 3)(), TypeError, "format '<z'"),
    "pointers in structures": ((Pointer * 3)(), TypeError, "&<i:place"),
    "a column of times": (np.zeros((3, 3), "M8[s]")[:, 1], ValueError, "ascontiguousarray"),
}


@pytest.mark.parametrize("name", REFUSED_EVERYWHERE)
def test_dtypes_that_cannot_be_moved_are_refused(name):
    x, error, words = REFUSED_EVERYWHERE[name]
    with shmring.init() as comm, pytest.raises(error, match=words):
        comm.broadcast(x)


def test_fields_that_get_other_names_are_other_fields():
    x, out = np.ones(3, "i4,f4"), np.zeros((1, 3), [("a", "i4"), ("b", "f4")])
    with shmring.init() as comm:
        comm.broadcast(x)
        x.dtype.names = "a", "b"
        comm.all_gather(x, out=out)
    assert (out == x).all()


def gather_bytes(comm):
    own = b"rank %d" % comm.rank
    return comm.all_gather(own).tobytes(), [bytes(part) for part in comm.all_gather_v(own[comm.rank :])]


def test_bytes_are_gathered_as_bytes(world_of):
    assert world_of(2)(gather_bytes) == [(b"rank 0rank 1", [b"rank 0", b"ank 1"])] * 2


def test_a_result_has_the_opaque_dtype():
    with shmring.init() as comm:
        for x, out in (("M8[D]", "m8[s]"), (">f4", ">i4"), ("S4", "U1"), ("i4,f4", "f4,i4")):
            for call in (comm.broadcast, comm.all_gather, comm.all_to_all):
                with pytest.raises(ValueError, match=r"out is .*\[1\], x is .*\[1\]"):
                    call(np.zeros(1, x), out=np.zeros(1, out))


def test_buffers_are_let_go_after_a_call():
    with shmring.init() as comm:
        x = bytearray(100)
        comm.all_reduce(x)
        with pytest.raises(ValueError, match="overlap"):
            comm.all_reduce(memoryview(x)[:60], out=memoryview(x)[40:])
        x.extend(b"grows")


def grow_after(comm, name, is_waited_for):
    """The program may resize its arrays once a call in the background is finished, and keep the Work."""
    x = bytearray(5000)
    work = BACKGROUND[name](comm, x)
    if is_waited_for:
        work.wait()
    while not work.done():
        time.sleep(0.001)
    x.extend(b"grows")
    return work.result() is not None


BACKGROUND = {
    "reduce": lambda comm, x: comm.all_reduce(x, async_op=True),
    "gather": lambda comm, x: comm.all_gather(x, async_op=True),
    "gather_v": lambda comm, x: comm.all_gather_v(x, async_op=True),
    "many": lambda comm, x: comm.all_reduce_many([x], async_op=True),
}


@pytest.mark.parametrize("is_waited_for", [True, False])
@pytest.mark.parametrize("name", BACKGROUND)
def test_buffers_are_let_go_after_a_call_in_the_background(world_of, name, is_waited_for):
    found = world_of(2)(grow_after, name, is_waited_for)
    assert found == ["gather" in name] * 2


def map_file(comm, path):
    x = np.memmap(path, "f4", "r+", shape=(3000,))
    comm.all_reduce(x)
    assert (x == comm.size).all()
    comm.barrier()
    x[...] = 5
    x.flush()
    comm.broadcast(np.memmap(path, "f4", "r", shape=(3000,)) if comm.rank == 0 else np.empty(3000, "f4"))


def test_memory_mapped_files(world_of, tmp_path):
    np.ones(3000, "f4").tofile(tmp_path / "numbers")
    ranks = world_of(2)
    ranks(map_own_file, str(tmp_path))


def map_own_file(comm, folder):
    path = f"{folder}/{comm.rank}"
    np.ones(3000, "f4").tofile(path)
    map_file(comm, path)


class Contrary:
    """Says that it is contiguous nowhere."""

    def __init__(self):
        self._source = np.ones((4, 4), "f4")[:, ::2]
        self.__array_interface__ = self._source.__array_interface__


def read_only(count):
    x = np.zeros(count)
    x.flags.writeable = False
    return x


REFUSED = {
    "text": (array.array("w" if "w" in array.typecodes else "u", "abc"), TypeError, "format"),  # "w": 3.13
    "characters": ((ctypes.c_char * 3)(), TypeError, "format"),
    "structures": ((Pair * 3)(), TypeError, "format"),
    "strings": (np.array(["a", "b"]), TypeError, "dtype"),
    "records": (np.zeros(3, "i4,f4"), TypeError, "dtype"),
    "long double": (np.zeros(3, "g"), TypeError, "float128"),
    "big endian": (np.zeros(3, ">f4"), TypeError, "newbyteorder"),
    "a big endian's interface": (Interface(np.zeros(3, ">f4")), TypeError, "newbyteorder"),
    "a date's interface": (Interface(np.zeros(3, "M8[s]")), TypeError, "int64"),
    "objects' interface": (Interface(np.zeros(3, object)), TypeError, OBJECTS),
    "dates": (np.zeros(3, "M8[s]"), TypeError, "int64"),
    "objects": (np.zeros(3, object), TypeError, OBJECTS),
    "another float8": (np.zeros(3, ml_dtypes.float8_e4m3b11fnuz), TypeError, "float8_e4m3b11fnuz"),
    "4 bits": (np.zeros(3, ml_dtypes.int4), TypeError, "int4"),
    "a column": (np.zeros((3, 3))[:, 1], ValueError, "ascontiguousarray"),
    "reversed": (np.zeros(9)[::-1], ValueError, "ascontiguousarray"),
    "every other": (memoryview(bytearray(9))[::2], ValueError, "contiguous"),
    "broadcast": (np.broadcast_to(np.zeros(1), (3,)), ValueError, "contiguous"),
    "a column of bfloat16": (np.zeros((3, 3), ml_dtypes.bfloat16)[:, 1], ValueError, "ascontiguousarray"),
    "a column's interface": (Contrary(), ValueError, "contiguous"),
    "a column's DLPack": (DLPack(np.zeros((3, 3))[:, 1]), ValueError, "contiguous"),
    # An older NumPy refuses to export it.
    "read-only DLPack": (
        (Versioned(read_only(3)), ValueError, "read-only")
        if EXPORTS_VERSIONED
        else (DLPack(read_only(3)), TypeError, "readonly")
    ),
    "no capsule": (WithoutCapsule(np.zeros(3)), TypeError, "no DLPack capsule"),
    "another device": (DLPack(np.zeros(3), device=(2, 0)), TypeError, "CPU"),
    "bytes": (b"abc", ValueError, "read-only"),
    "a view of bytes": (memoryview(b"abc"), ValueError, "read-only"),
    "a list": ([1.0, 2.0], TypeError, "asarray"),
    "nothing": (None, TypeError, "array"),
    "a number": (1.0, TypeError, "0-d"),
    "a NumPy number": (np.float32(1), TypeError, "0-d"),
    "a double": (np.float64(1), TypeError, "0-d"),
    "text itself": ("abc", TypeError, "array"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_objects_are_refused_with_the_fix(name):
    x, error, words = REFUSED[name]
    with shmring.init() as comm:
        if not isinstance(x, (float, np.floating)):  # all_reduce reduces numbers: see test_numbers
            with pytest.raises(error, match=words):
                comm.all_reduce(x)
        with pytest.raises(error, match=words):
            comm.plan("all_reduce", x)
        if x is not None:
            with pytest.raises((TypeError, ValueError)):
                comm.broadcast(np.zeros(3), out=x)
        comm.barrier()


def test_read_only_results_are_refused():
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    frozen_small = np.zeros(3, ml_dtypes.bfloat16)
    frozen_small.flags.writeable = False
    of_jax = np.zeros(3, "f4").view(Frozen)
    of_jax.flags.writeable = False
    with shmring.init() as comm:
        for x in (frozen, frozen.view(Subclass), frozen_small, of_jax, np.frombuffer(b"12345678")):
            with pytest.raises(ValueError, match="read-only"):
                comm.all_reduce(x)
            with pytest.raises(ValueError, match="read-only"):
                comm.all_reduce(x.copy(), out=x)
            comm.all_reduce(x, out=x.copy())
            comm.broadcast(x)
