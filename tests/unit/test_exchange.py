"""Arrays whose library exports them in C (DLPack's exchange API), made here with ctypes."""

import ctypes
import gc

import numpy as np
import pytest

import shmring

CPU, GPU = 1, 2
READ_ONLY = 1
FLOAT = 2
NAME = b"dlpack_exchange_api"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("device_number", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Exported(ctypes.Structure):
    pass


_Deleter = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_Exported))
_Exported._fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
    ("flags", ctypes.c_uint64),
    ("tensor", _Tensor),
)
_Export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.POINTER(_Exported)))


class _Exchange(ctypes.Structure):
    pass


_Exchange._fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("previous", ctypes.POINTER(_Exchange)),
    ("allocate", ctypes.c_void_p),
    ("export_x", _Export),
    ("import_x", ctypes.c_void_p),
    ("describe", ctypes.c_void_p),
    ("stream", ctypes.c_void_p),
)

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
alive = {}  # by address: the exported struct, its parts


@_Deleter
def _delete(exported):
    del alive[ctypes.addressof(exported.contents)]


@_Export
def _export(x, place):
    source = x.source
    shape = (ctypes.c_int64 * 8)(*source.shape)
    strides = (ctypes.c_int64 * 8)(*(stride // source.itemsize for stride in source.strides))
    tensor = _Tensor(
        source.ctypes.data - x.offset,
        x.device,
        0,
        source.ndim,
        FLOAT,
        8 * source.itemsize,
        x.lanes,
        shape,
        None if x.has_no_strides else strides,
        x.offset,
    )
    exported = _Exported(1, 3, None, _delete, x.flags, tensor)
    alive[ctypes.addressof(exported)] = exported, shape, strides
    place[0] = ctypes.pointer(exported)
    return 0


_of_1 = _Exchange(1, 3, None, None, _export, None, None, None)
_of_2 = _Exchange(2, 0, ctypes.pointer(_of_1), None, _Export(), None, None, None)
_only_of_2 = _Exchange(2, 0, None, None, _Export(), None, None, None)


class Array:
    """Floats, which only its exchange exports; its `__dlpack__` raises."""

    __dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(_of_1), NAME, None)

    def __init__(self, source, *, device=CPU, flags=0, lanes=1, offset=0, has_no_strides=False):
        self.source, self.device, self.flags, self.lanes = source, device, flags, lanes
        self.offset, self.has_no_strides = offset, has_no_strides

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **_):
        raise BufferError("the slow way")


class Newer(Array):
    """Exchanges arrays in a later major version, and in this one."""

    __dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(_of_2), NAME, None)


class TooNew(Array):
    __dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(_only_of_2), NAME, None)


class Misnamed(Array):
    __dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(_of_1), b"another", None)


class Inheriting(Array):
    """May override what its base exports: it is asked itself."""


@pytest.fixture(autouse=True)
def no_export_is_left():
    yield
    gc.collect()
    assert not alive


def pass_everywhere(comm):
    size, rank = comm.size, comm.rank
    x = Array(np.full((2, 3), rank + 1.0), offset=16, has_no_strides=True)
    comm.all_reduce(x)
    assert x.source.tolist() == [[size * (size + 1) / 2] * 3] * 2
    assert not alive
    x = Newer(np.full(size, rank + 1, "f4"))
    work = comm.all_reduce(x, async_op=True)
    work.wait()
    out = np.zeros(1, "f4")
    comm.reduce_scatter(x, out=Array(out))
    assert out.tolist() == [size * size * (size + 1) / 2]
    plan = comm.plan("broadcast", x)
    assert len(alive) == 1  # the plan's: the work is finished
    del work
    x.source[:] = rank
    plan()
    assert x.source.tolist() == [0] * size
    del plan
    assert not alive
    many = [Array(np.full(n, rank, "f8")) for n in (1, 5)]
    comm.all_reduce_many(many)
    assert [array.source.tolist() for array in many] == [[size * (size - 1) / 2] * n for n in (1, 5)]
    came = Array(np.zeros(3))
    comm.sendrecv(Array(np.full(3, float(rank))), (rank + 1) % size, came)
    assert came.source.tolist() == [(rank - 1) % size] * 3
    pieces = comm.all_gather_v(np.full(rank, 1.0), out=[Array(np.zeros(r)) for r in range(size)])
    return [piece.source.tolist() for piece in pieces]


def test_exported_arrays_are_used_in_place(world_of):
    assert world_of(3)(pass_everywhere) == [[[], [1.0], [1.0, 1.0]]] * 3


def test_an_array_stays_alive_as_long_as_a_call_uses_it(world_of):
    world_of(2)(drop_while_it_is_used)


def drop_while_it_is_used(comm):
    if comm.rank == 1:
        comm.recv(np.zeros(1))
    work = comm.all_reduce(Array(np.ones(100_000)), async_op=True)
    gc.collect()
    if comm.rank == 0:  # rank 1 has not begun the call
        assert len(alive) == 1
        assert not work.done()
        comm.send(np.zeros(1), 1)
    work.wait()


def test_a_read_only_array_is_refused_as_a_result():
    x = Array(np.ones(3), flags=READ_ONLY)
    with shmring.init() as comm:
        with pytest.raises(ValueError, match="x is read-only"):
            comm.all_reduce(x)
        with pytest.raises(ValueError, match="out is read-only"):
            comm.all_reduce(np.ones(3), out=x)
        comm.all_reduce(x, out=Array(np.zeros(3)))
    assert shmring.Memory.of(x).readonly
    assert not shmring.Memory.of(Array(np.ones(3))).readonly


SLOW = {
    "another device": (Array(np.ones(3), device=GPU), "not in this machine's memory"),
    "vectors": (Array(np.ones(3), lanes=2), "the slow way"),
    "a column": (Array(np.ones((3, 3))[:, 1]), "the slow way"),
    "128 bits": (Array(np.ones(3, "g")), "the slow way"),
    "a subclass": (Inheriting(np.ones(3)), "the slow way"),
    "a later version": (TooNew(np.ones(3)), "the slow way"),
    "another capsule": (Misnamed(np.ones(3)), "the slow way"),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_the_exchange_cannot_describe_goes_the_slow_way(name):
    x, words = SLOW[name]
    with shmring.init() as comm, pytest.raises(TypeError, match=words):
        comm.all_reduce(x)


@pytest.mark.parametrize("name", SLOW)
def test_memory_of_what_the_exchange_cannot_describe_is_none(name):
    x, _ = SLOW[name]
    assert (shmring.Memory.of(x) is None) == (type(x) is not Inheriting)


class Lazy(Array):
    """Has torch's bits that DLPack does not export."""

    __dlpack_c_exchange_api__ = Array.__dlpack_c_exchange_api__
    bits = frozenset()
    requires_grad = False

    def is_neg(self):
        return "neg" in self.bits

    def is_conj(self):
        return "conj" in self.bits

    def resolve_neg(self):
        return Lazy(-self.source)

    def resolve_conj(self):
        return Lazy(self.source.conj())


def test_a_lazily_negated_array_is_refused_with_the_mend():
    x = Lazy(np.ones(3))
    with shmring.init() as comm:
        comm.all_reduce(x)
        x.bits = {"neg"}
        with pytest.raises(TypeError, match=r"x is lazily negated.* pass a = x\.resolve_neg\(\)"):
            comm.all_reduce(x)
        with pytest.raises(TypeError, match=r"pass a = arrays\[1\]\.resolve_neg\(\)"):
            comm.all_reduce_many([np.ones(3), x])
        assert shmring.Memory.of(x) is None
        x.bits, x.requires_grad = set(), True
        with pytest.raises(TypeError, match="the slow way"):
            comm.all_reduce(x)
        assert shmring.Memory.of(x).address == x.source.ctypes.data
