# cython: language_level=3, boundscheck=False, wraparound=False
"""The kernels: the only extension that links them, and the lists of dtypes, operations and wire formats."""
# `fold` to `encode` and the schedules are for tests and benchmarks.
# Memory is passed as contiguous buffers of bytes (`array.view(numpy.uint8)`).

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from .schedule cimport (
    sr_double_tree_child, sr_ring_reduce_slice, sr_slice_begin, sr_tree_sends_to, sr_tree_steps,
)

cdef extern from "kernels/kernels.h" nogil:
    const uint8_t sr_dtype_nbytes[]
    const char *sr_dtype_name[]
    const char *sr_op_name[]
    const char *sr_wire_name[]
    const sr_kernels *sr_kernels_find(const char *isa)
    const char *sr_kernels_isas(int i)

cdef extern from "sync/clock.h" nogil:
    uint64_t sr_now_ns()

cdef enum:
    MOST = 128  # buffers in one call


cdef const sr_kernels *find_kernels(const char *isa) noexcept nogil:
    return sr_kernels_find(isa)


cdef size_t dtype_nbytes(uint32_t dtype) noexcept nogil:
    return sr_dtype_nbytes[dtype]


OPS = tuple([sr_op_name[i].decode() for i in range(SR_OPS)])


def isas() -> list[str]:
    """Return the names of the instruction sets that this machine supports, best first."""
    names = []
    while sr_kernels_isas(len(names)) is not NULL:
        names.append(sr_kernels_isas(len(names)).decode())
    return names


def dtypes() -> dict[str, int]:
    """Return the bytes of an item by dtype name."""
    return {sr_dtype_name[i].decode(): sr_dtype_nbytes[i] for i in range(SR_DTYPES)}


def ops(dtype: str) -> list[str]:
    """Return the names of the ops that have a meaning for the dtype."""
    cdef const sr_kernels *kernels = sr_kernels_find(NULL)
    cdef int d = list(dtypes()).index(dtype)
    return [OPS[i] for i in range(SR_OPS) if kernels.fold[d][i] is not NULL]


cdef const sr_kernels *_find(str isa) except NULL:
    cdef const sr_kernels *kernels = sr_kernels_find(isa.encode())
    if kernels is NULL:
        raise ValueError(f"{isa!r} is not among {isas()}")
    return kernels


cdef double _now() noexcept nogil:
    return 1e-9 * sr_now_ns()


cdef class _Pointers:
    """The addresses of a few buffers, which stay exported as long as this object lives."""
    cdef Py_buffer views[MOST]
    cdef void *at[MOST]
    cdef int count

    def __cinit__(self, buffers, bint writable):
        if not 0 < len(buffers) <= MOST:
            raise ValueError(f"{len(buffers)} buffers; there must be 1 to {MOST}")
        for buffer in buffers:
            PyObject_GetBuffer(buffer, &self.views[self.count], PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
            self.at[self.count] = self.views[self.count].buf
            self.count += 1

    cdef size_t nbytes(self) except? 0:
        for i in range(self.count):
            if self.views[i].len != self.views[0].len:
                raise ValueError("buffers of different sizes")
        return self.views[0].len

    def __dealloc__(self):
        for i in range(self.count):
            PyBuffer_Release(&self.views[i])


def fold(dtype: str, op: str, srcs, dsts, isa: str = "", divisor: int = 1, stream: int = 0, long loops=1) -> float:
    """Run dsts[d] = srcs[0] op srcs[1] ... for every d, `loops` times. Return the seconds it took."""
    cdef const sr_kernels *kernels = _find(isa)
    cdef int d = list(dtypes()).index(dtype)
    cdef int o = OPS.index(op)
    cdef sr_fold_fn *function = kernels.fold[d][o]
    if function is NULL:
        raise ValueError(f"{op} has no meaning for {dtype}")
    cdef _Pointers src = _Pointers(srcs, False)
    cdef _Pointers dst = _Pointers(dsts, True)
    if src.nbytes() != dst.nbytes():
        raise ValueError("buffers of different sizes")
    cdef size_t count = dst.nbytes() // sr_dtype_nbytes[d]
    cdef uint32_t divisor_ = divisor, mask = stream
    cdef double begin = _now()
    for _ in range(loops):
        function(dst.at, dst.count, mask, <const void **> src.at, src.count, count, divisor_)
    return _now() - begin


cdef void _memcpy(void *dst, const void *src, size_t nbytes, uint32_t way) noexcept nogil:
    memcpy(dst, src, nbytes)


def copy(dsts, srcs, isa: str = "", uint32_t way=SR_COPY_ORDINARY, long loops=1) -> float:
    """Run dsts[i] = srcs[i] for every i, `loops` times. Return the seconds. isa="memcpy": the C library's function.
    way: 0 ordinary, 1 by streaming stores, 2 in turn."""
    cdef sr_copy_fn *function = _memcpy if isa == "memcpy" else _find(isa).copy
    cdef _Pointers to = _Pointers(dsts, True)
    cdef _Pointers source = _Pointers(srcs, False)
    for i in range(to.count):
        if to.views[i].len != source.views[i].len:
            raise ValueError("buffers of different sizes")
    cdef double begin = _now()
    for _ in range(loops):
        for i in range(to.count):
            function(to.at[i], source.at[i], to.views[i].len, way)
    return _now() - begin


def copy_two(dsts, srcs, isa: str = "", streams=(0, 0)) -> None:
    """Run dsts[0] = srcs[0] and dsts[1] = srcs[1] in one loop. All buffers have one size."""
    cdef _Pointers to = _Pointers(dsts, True)
    cdef _Pointers source = _Pointers(srcs, False)
    if to.count != 2 or source.count != 2 or to.nbytes() != source.nbytes():
        raise ValueError("two pairs of buffers of one size are needed")
    _find(isa).copy_two(to.at[0], source.at[0], streams[0], to.at[1], source.at[1], streams[1], to.nbytes())


def wire_formats() -> list[str]:
    """Return the names of the formats in which float32 is sent between hosts."""
    return [sr_wire_name[i].decode() for i in range(SR_WIRE_FORMATS)]


def encoded_nbytes(format: str, count: int) -> int:
    """Return the bytes of count float32 in a wire format."""
    return sr_encoded_nbytes(wire_formats().index(format), count)


cdef size_t _count_of(_Pointers wide) except? 0:
    if wide.views[0].len % 4:
        raise ValueError("a buffer that is not of float32")
    return wide.views[0].len // 4


cdef _check(_Pointers buffer, size_t nbytes):
    if buffer.views[0].len != <Py_ssize_t> nbytes:
        raise ValueError(f"a buffer of {buffer.views[0].len} bytes; it must have {nbytes}")


cdef double _run_widening(sr_widen_fn *function, _Pointers dst, _Pointers src, long loops) noexcept:
    cdef size_t count = dst.views[0].len // 4
    cdef double begin = _now()
    for _ in range(loops):
        function(<float *> dst.at[0], src.at[0], count)
    return _now() - begin


def widen(dtype: str, dst, src, isa: str = "", long loops=1) -> float:
    """Widen src, 16- or 8-bit floats, to dst, float32, `loops` times. Return the seconds it took."""
    cdef int d = list(dtypes()).index(dtype)
    cdef sr_widen_fn *function = _find(isa).widen[d]
    if function is NULL:
        raise ValueError(f"{dtype} is not folded in float32")
    cdef _Pointers to = _Pointers([dst], True), source = _Pointers([src], False)
    _check(source, _count_of(to) * sr_dtype_nbytes[d])
    return _run_widening(function, to, source, loops)


def decode(format: str, dst, src, isa: str = "", long loops=1) -> float:
    """Decode src, in a wire format, to dst, float32, `loops` times. Return the seconds it took."""
    cdef int f = wire_formats().index(format)
    cdef _Pointers to = _Pointers([dst], True), source = _Pointers([src], False)
    _check(source, sr_encoded_nbytes(f, _count_of(to)))
    return _run_widening(<sr_widen_fn *> _find(isa).decode[f], to, source, loops)


def narrow(dtype: str, dst, src, isa: str = "", long loops=1) -> float:
    """Narrow src, float32, to dst, 16- or 8-bit floats, `loops` times. Return the seconds it took."""
    cdef int d = list(dtypes()).index(dtype)
    cdef sr_narrow_fn *function = _find(isa).narrow[d]
    if function is NULL:
        raise ValueError(f"{dtype} is not folded in float32")
    cdef _Pointers to = _Pointers([dst], True), source = _Pointers([src], False)
    cdef size_t count = _count_of(source)
    _check(to, count * sr_dtype_nbytes[d])
    cdef double begin = _now()
    for _ in range(loops):
        function(to.at[0], <const float *> source.at[0], count)
    return _now() - begin


def encode(format: str, dst, src, residual=None, isa: str = "", long loops=1) -> float:
    """Encode src, float32, to dst, `loops` times; with error feedback if residual. Return the seconds."""
    cdef int f = wire_formats().index(format)
    cdef sr_encode_fn *function = _find(isa).encode[f]
    cdef _Pointers to = _Pointers([dst], True), source = _Pointers([src], False)
    cdef _Pointers left_over = _Pointers([dst if residual is None else residual], True)
    cdef float *at = NULL if residual is None else <float *> left_over.at[0]
    cdef size_t count = _count_of(source)
    _check(to, sr_encoded_nbytes(f, count))
    if residual is not None:
        _check(left_over, 4 * count)
    cdef double begin = _now()
    for _ in range(loops):
        function(to.at[0], at, <const float *> source.at[0], count)
    return _now() - begin


# ---- schedules of the named algorithms, for the tests --------------------------------------------------------------

def ring_schedule(int size):
    """Return [(step, rank, slice sent to rank - 1), ...] of the reduce-scatter half of the ring."""
    return [(step, rank, sr_ring_reduce_slice(rank, size, step)) for step in range(1, size) for rank in range(size)]


def tree_schedule(int size):
    """Return [(step, sender, receiver), ...] on the way up; the way down is its mirror image."""
    return [(step, rank, sr_tree_sends_to(rank, step)) for step in range(sr_tree_steps(size)) for rank in range(size)
            if sr_tree_sends_to(rank, step) >= 0]


def double_tree(int size):
    """Return for both trees, by rank: its children, in the order in which it folds their data."""
    return [[tuple([child for child in [sr_double_tree_child(rank, size, tree, 0),
                                        sr_double_tree_child(rank, size, tree, 1)] if child >= 0])
             for rank in range(size)] for tree in range(2)]


def slice_bounds(size_t count, int size):
    """Return (begin, end) of each slice of the ring. The lengths differ by at most one element."""
    return [(sr_slice_begin(count, size, i), sr_slice_begin(count, size, i + 1)) for i in range(size)]
