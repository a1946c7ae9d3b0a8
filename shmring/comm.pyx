# Comm and Plan: from Python's arguments to the pointers of a call. The three steps are always the same: take
# the buffers, describe the call, let the engine drive it. May know: engine, _group,
# _pipelines, buffers, arrays, memory, errors.

import operator
import os

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release,
    PyObject_CheckBuffer, PyObject_GetBuffer,
)
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memset

cimport numpy as cnp

from ._engine cimport Engine
from ._group cimport *
from ._pipelines cimport choose_pipeline

from . import _engine, buffers, memory
from .arrays import Arrays
from .arrays import check as check_array
from .errors import Closed

cnp.import_array()


cdef str SUM = "sum"   # the literal that is the default of op: the same object, so identity is enough
cdef dict OP_NUMBERS = {name: number for number, name in enumerate(_engine.OPS)}
cdef dict DTYPE_NUMBERS = {name: number for number, name in enumerate(_engine.DTYPES)}
cdef dict ALGORITHM_NUMBERS = {name: number for number, name in enumerate(_engine.ALGORITHMS)}


# ---- operands ------------------------------------------------------------------------------------------------

# NumPy's type numbers, 0 to 23, as ours; -1: not one that can be reduced.
cdef int[24] DTYPE_OF_NUMPY = [
    SR_BOOL, SR_I8, SR_U8, SR_I16, SR_U16, SR_I32, SR_U32, SR_I64, SR_U64, SR_I64, SR_U64, SR_F32, SR_F64, -1,
    SR_C64, SR_C128, -1, -1, -1, -1, -1, -1, -1, SR_F16,
]


# Straight from the array's own fields: its buffer export alone takes longer than a tiny all-reduce. False: this
# is no plain ndarray that can be used as it is, and one of the slower ways has to take it or say why not.
cdef inline bint take_ndarray(Operand *operand, object x, bint writable) noexcept:
    cdef int flags, number
    if not cnp.PyArray_CheckExact(x):
        return False
    number = cnp.PyArray_TYPE(<cnp.ndarray> x)
    flags = cnp.PyArray_FLAGS(<cnp.ndarray> x)
    if number >= 24 or DTYPE_OF_NUMPY[number] < 0:
        return False
    if not flags & (cnp.NPY_ARRAY_C_CONTIGUOUS | cnp.NPY_ARRAY_F_CONTIGUOUS):
        return False
    if cnp.PyArray_ISBYTESWAPPED(<cnp.ndarray> x) or (writable and not flags & cnp.NPY_ARRAY_WRITEABLE):
        return False
    operand.data = <unsigned char *> cnp.PyArray_DATA(<cnp.ndarray> x)
    operand.count = cnp.PyArray_SIZE(<cnp.ndarray> x)
    operand.dtype = DTYPE_OF_NUMPY[number]
    operand.itemsize = cnp.PyArray_ITEMSIZE(<cnp.ndarray> x)
    operand.fortran = not flags & cnp.NPY_ARRAY_C_CONTIGUOUS
    return True


# The dtype's number from a buffer's format, -1 if there is none. Sizes decide where C leaves them open.
cdef int dtype_of_format(const char *format, Py_ssize_t itemsize) noexcept:
    cdef char kind
    if format == NULL:
        return SR_U8
    if format[0] in b"@=<":   # the machines that shmring runs on are little-endian
        format += 1
    kind = format[0]
    if kind == b"Z" and format[1] != 0 and format[2] == 0:
        return SR_C64 if format[1] == b"f" else SR_C128 if format[1] == b"d" else -1
    if kind == 0 or format[1] != 0:
        return -1
    if kind == b"f":
        return SR_F32
    if kind == b"d":
        return SR_F64
    if kind == b"e":
        return SR_F16
    if kind == b"?":
        return SR_BOOL
    if kind in b"bhilqn":
        return SR_I8 if itemsize == 1 else SR_I16 if itemsize == 2 else SR_I32 if itemsize == 4 else SR_I64
    if kind in b"BHILQN":
        return SR_U8 if itemsize == 1 else SR_U16 if itemsize == 2 else SR_U32 if itemsize == 4 else SR_U64
    return -1


# Fills the operand; what it returns has to live as long as the operand is used.
cdef object take(Operand *operand, object x, bint writable, str what):
    cdef int flags = PyBUF_FORMAT | PyBUF_ANY_CONTIGUOUS
    cdef int dtype
    operand.held = False
    if take_ndarray(operand, x, writable):
        return None
    if not PyObject_CheckBuffer(x):
        return take_slowly(operand, x, writable, what)
    if writable:
        flags |= PyBUF_WRITABLE
    try:
        PyObject_GetBuffer(x, &operand.view, flags)
    except (BufferError, ValueError, TypeError) as error:
        if getattr(getattr(x, "dtype", None), "name", None) in DTYPE_NUMBERS and "buffer" in str(error):
            return take_slowly(operand, x, writable, what)   # ml_dtypes: the protocol has no letter for them
        raise buffers.explain_refusal(x, what, writable, error, _engine.DTYPES) from None
    operand.held = True
    dtype = dtype_of_format(operand.view.format, operand.view.itemsize)
    if dtype < 0:
        release(operand)
        error = TypeError(f"elements of format {operand.view.format.decode()!r}")
        raise buffers.explain_refusal(x, what, False, error, _engine.DTYPES)
    operand.data = <unsigned char *> operand.view.buf
    operand.itemsize = operand.view.itemsize
    operand.count = operand.view.len // operand.view.itemsize
    operand.dtype = dtype
    operand.fortran = operand.view.ndim > 1 and not PyBuffer_IsContiguous(&operand.view, b"C")
    return None


cdef object take_slowly(Operand *operand, object x, bint writable, str what):
    taken = buffers.take(x, what)
    if taken.dtype not in DTYPE_NUMBERS:
        raise buffers.unsupported_dtype(what, taken.dtype, _engine.DTYPES)
    if writable and taken.readonly:
        raise buffers.read_only(what)
    operand.data = <unsigned char *> <uintptr_t> taken.address
    operand.count = taken.count
    operand.dtype = DTYPE_NUMBERS[taken.dtype]
    operand.itemsize = _engine.DTYPE_NBYTES[operand.dtype]
    operand.fortran = taken.fortran
    return taken


cdef inline void release(Operand *operand) noexcept:
    if operand.held:
        PyBuffer_Release(&operand.view)
        operand.held = False


cdef int check_out(Operand *x, Operand *out) except -1:
    if out.dtype != x.dtype or out.count != x.count:
        raise ValueError(
            f"out is {_engine.DTYPES[out.dtype]}[{out.count}], x is {_engine.DTYPES[x.dtype]}[{x.count}]: "
            "dtype and count must be the same")
    if out.fortran != x.fortran:
        raise ValueError("out and x differ in memory order (C and Fortran); give both the same")
    cdef size_t nbytes = x.count * x.itemsize
    if out.data != x.data and out.data < x.data + nbytes and x.data < out.data + nbytes:
        raise ValueError("out and x overlap in part; out must be x itself or disjoint from it")
    return 0


# ---- the communicator ----------------------------------------------------------------------------------------

cdef class Comm:
    """One rank's place in a group of ranks, and the collectives between them.

    Made by `shmring.init` or `shmring.spawn`; a context manager. Every collective is called by all ranks, in the
    same order, with matching arguments. Results are the same bits on every rank: values are folded in rank order.
    Errors: TypeError or ValueError for an argument that is wrong here (the others get `Mismatch`), else one of
    `shmring.Error`, the same on every rank and final for this communicator.
    """

    def __init__(self, Engine engine, links, segment, int fd, settings):
        self.engine = engine
        self.links = links
        self.segment = segment
        self.fd = fd
        self.default_algorithm = ALGORITHM_NUMBERS[settings.algorithm]
        self.default_timeout_ns = timeout_ns_of(engine.timeout_s)
        self.arrays = Arrays(engine, links, settings.segment)
        self.staging_ready = engine.size == 1

    @property
    def rank(self):
        """This rank's number, 0 to size - 1."""
        return self.links.rank

    @property
    def size(self):
        """How many ranks there are."""
        return self.links.size

    @property
    def local_rank(self):
        """This rank's number among the ranks of its host."""
        return self.links.local_rank

    @property
    def local_size(self):
        """How many ranks share this host's memory."""
        return self.links.local_size

    @property
    def node(self):
        """This host's number, 0 to num_nodes - 1."""
        return self.links.node

    @property
    def num_nodes(self):
        """How many hosts there are."""
        return self.links.num_nodes

    # -- collectives --

    def all_reduce(self, x, op="sum", *, out=None, algorithm=None, timeout=None):
        """Combine x of all ranks elementwise, for every rank: in place, or into `out`.

        x: any contiguous array, the same dtype and number of elements on every rank. op: a name or `shmring.Op`.
        out: same dtype and count, x itself or disjoint from it. algorithm: "auto" or "direct" (folded in rank
        order), "ring" (Patarasuk and Yuan 2009, 2(N-1)/N of x sent per rank), "tree" (binomial), "master"
        (reduce to rank 0, broadcast); ring and tree fold, and round 8/16-bit floats, in an order of their own.
        timeout: seconds. Arrays from `empty` and its kin on all ranks are reduced without a copy.
        """
        cdef Call c
        cdef Operand a, b
        a.held = b.held = False
        try:
            try:
                kept = self.describe_all_reduce(&c, &a, &b, x, op, out, algorithm, timeout)
            except Exception:
                self.engine.refuse(ALL_REDUCE)
                raise
            self.drive(&c)
        finally:
            release(&a)
            release(&b)

    def broadcast(self, x, root=0, *, out=None, timeout=None):
        """root's x for every rank: in place, or into `out`.

        x: any contiguous array, the same dtype and number of elements on every rank; it may be read-only on the
        root, which is the only rank whose values are read. timeout: seconds.
        """
        cdef Call c
        cdef Operand a, b
        a.held = b.held = False
        try:
            try:
                kept = self.describe_broadcast(&c, &a, &b, x, root, out, timeout)
            except Exception:
                self.engine.refuse(BROADCAST)
                raise
            self.drive(&c)
        finally:
            release(&a)
            release(&b)

    def barrier(self, *, timeout=None):
        """Return when every rank has called it. timeout: seconds."""
        cdef Call c
        try:
            self.describe_barrier(&c, timeout)
        except Exception:
            self.engine.refuse(BARRIER)
            raise
        self.engine.drive(&c)

    def plan(self, str kind, *arguments, **keywords):
        """The call `kind` with its arguments checked once and its arrays pinned: a callable that runs it.

        kind: "all_reduce", "broadcast" or "barrier"; the arguments are those of the method of that name. Local:
        a wrong argument is an error here and harms nobody. What lies in x is read anew at each call.
        """
        return Plan(self, kind, arguments, keywords)

    # -- arrays that all ranks map --

    def empty(self, shape, dtype="float64", *, timeout=None):
        """Collective: an array in memory that every rank of the host maps; collectives on it copy nothing.

        shape and dtype are the same on every rank, and each has an array of its own. It reads as zeros. Freed when
        the last reference goes, also after the communicator is closed. Raises OutOfMemory, on every rank alike.
        """
        try:
            lengths, numpy_dtype = check_array(shape, dtype)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.arrays.empty(lengths, numpy_dtype, timeout_s)

    def zeros(self, shape, dtype="float64", *, timeout=None):
        """Collective: `empty`, with the promise that it holds zeros."""
        return self.empty(shape, dtype, timeout=timeout)

    def full(self, shape, fill_value, dtype=None, *, timeout=None):
        """Collective: `empty`, filled with `fill_value`; its dtype unless one is given."""
        import numpy as np

        if dtype is None:
            try:
                dtype = np.asarray(fill_value).dtype
            except Exception:
                self.engine.refuse(ALLOCATE)
                raise
        array = self.empty(shape, dtype, timeout=timeout)
        array[...] = fill_value
        return array

    def copy_of(self, a, *, timeout=None):
        """Collective: an `empty` of a's shape and dtype that holds a copy of it."""
        import numpy as np

        try:
            a = np.asarray(a)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        array = self.empty(a.shape, a.dtype, timeout=timeout)
        array[...] = a
        return array

    # -- the rest --

    def stats(self):
        """Counters of this rank since it joined, and what the engine knows of the machine.

        `calls`; `bytes_sent`, payload that this rank put where others read it; `steps` of ring and tree calls;
        `paths`, calls by the path they took; `path`, that of the last one; `distance` ("near" or "far") and
        `round_trip_ns` between the cores, as rank 0 measured it; `isa` of the reduction loops.
        """
        return self.engine.stats()

    def abort(self, str reason):
        """Give up: every rank's present or next call raises `Aborted` with this reason."""
        self.engine.abort(reason)

    def close(self):
        """Leave. Local; ranks that still call the communicator get RankFailed. Closing twice is harmless."""
        if self.engine.closed_because is not None:
            return
        self.engine.close()
        self.forget()

    cdef int forget(self) except -1:
        self.arrays.close()
        self.links.close()
        self.close_descriptor()
        self.staging_ready = True
        return 0

    cdef int close_descriptor(self) except -1:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        return 0

    def _disown(self):
        """In a forked child: descriptors go, shared memory stays untouched."""
        if self.engine.closed_because is None:
            self.engine.disown()
            self.links.close()
            self.close_descriptor()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        leaves_in_order = error is None or (kind is SystemExit and not error.code)
        try:
            if not leaves_in_order and self.engine.closed_because is None and self.engine.abort_report() is None:
                # The others must not wait for a rank that has left in the middle.
                self.engine.abort(f"{kind.__name__} in rank {self.rank}: {text_of(error)}"[:150])
        finally:
            self.close()

    def __del__(self):
        try:
            self.close()
        except Exception:   # in the middle of a call of another thread, or of the interpreter's end
            pass

    def __reduce__(self):
        raise TypeError("a communicator belongs to its process; send its World instead, and join it there")

    def __repr__(self):
        state = "" if self.engine.closed_because is None else ", closed"
        return f"<shmring.Comm rank {self.rank} of {self.size}{state}>"

    # -- from arguments to a call --

    cdef int drive(self, Call *c) except -1:
        self.prepare_staging(c)
        return self.engine.drive(c)

    cdef inline int prepare_staging(self, Call *c) except -1:
        if not self.staging_ready and (c.nbytes > SR_PAYLOAD_NBYTES or c.algorithm != AUTO):
            self.allocate_staging()
        return 0

    cdef int allocate_staging(self) except -1:
        """This rank's staging ring gets its pages before it is first touched."""
        if self.engine.closed_because is not None:
            return 0   # drive says so
        offset, nbytes = self.engine.own_ring()
        try:
            memory.allocate(self.fd, offset, nbytes, purpose="a staging ring")
            self.segment.populate(offset, nbytes)
        except BaseException as error:
            self.engine.abort(f"rank {self.rank} has no memory for its staging ring: {error}")
            raise
        self.close_descriptor()
        self.staging_ready = True
        return 0

    cdef object describe_all_reduce(self, Call *c, Operand *a, Operand *b, object x, object op, object out,
                                    object algorithm, object timeout):
        kept = self.describe(c, ALL_REDUCE, a, b, x, out, True, timeout)
        c.op = SR_SUM if op is SUM else op_number(op)
        if self.engine.g.kernels.fold[c.dtype][c.op] == NULL:
            dtype = _engine.DTYPES[c.dtype]
            known = [name for name in _engine.OPS if _engine.supported(dtype, name)]
            raise TypeError(f"op {op} has no meaning for {dtype}, which has {', '.join(known)}")
        c.algorithm = self.default_algorithm
        if algorithm is not None:
            c.algorithm = algorithm_number(algorithm)
        c.fingerprint = fingerprint_of(c)
        choose_pipeline(&self.engine.g, c)
        return kept

    cdef object describe_broadcast(self, Call *c, Operand *a, Operand *b, object x, object root, object out,
                                   object timeout):
        try:
            number = operator.index(root)
        except TypeError:
            raise TypeError(f"root is {root!r}; it must be an integer") from None
        if not 0 <= number < self.engine.g.size:
            raise ValueError(f"root is {root!r}; the ranks are 0 to {self.engine.g.size - 1}")
        kept = self.describe(c, BROADCAST, a, b, x, out, number != self.engine.g.rank, timeout)
        c.root = number
        c.fingerprint = fingerprint_of(c)
        choose_pipeline(&self.engine.g, c)
        return kept

    cdef int describe_barrier(self, Call *c, object timeout) except -1:
        memset(c, 0, sizeof(Call))
        c.kind = BARRIER
        c.timeout_ns = self.default_timeout_ns if timeout is None else timeout_ns_of(timeout)
        c.fingerprint = fingerprint_of(c)
        choose_pipeline(&self.engine.g, c)
        return 0

    # What all calls on an array and an optional `out` have in common.
    cdef object describe(self, Call *c, int kind, Operand *a, Operand *b, object x, object out, bint writes,
                         object timeout):
        memset(c, 0, sizeof(Call))
        kept = take(a, x, writes and out is None, "x")
        c.x = a.data
        c.out = a.data
        if out is not None and out is not x:
            kept_out = take(b, out, True, "out")
            if kept_out is not None:
                kept = (kept, kept_out)
            check_out(a, b)
            c.out = b.data
        c.kind = kind
        c.dtype = a.dtype
        c.order = a.fortran
        c.count = a.count
        c.itemsize = a.itemsize
        c.nbytes = a.count * a.itemsize
        c.timeout_ns = self.default_timeout_ns if timeout is None else timeout_ns_of(timeout)
        if self.engine.g.nblocks > 0 and c.nbytes >= self.engine.g.zero_copy_nbytes:
            if self.engine.find_block(c.x, c.nbytes, &c.x_block, &c.x_offset):
                self.engine.find_block(c.out, c.nbytes, &c.out_block, &c.out_offset)
        return kept


cdef class Plan:
    """A collective with its arguments checked and its arrays pinned; each call is the bare collective."""

    def __init__(self, Comm comm, str kind, tuple arguments, dict keywords):
        self.a.held = self.b.held = False
        self.comm = comm
        if comm.engine.closed_because is not None:
            raise Closed(comm.engine.closed_because, rank=comm.rank)
        kinds = {"all_reduce": self._all_reduce, "broadcast": self._broadcast, "barrier": self._barrier}
        if kind not in kinds:
            raise ValueError(f"kind is {kind!r}; allowed: {', '.join(kinds)}")
        kinds[kind](*arguments, **keywords)
        comm.prepare_staging(&self.c)

    def _all_reduce(self, x, op="sum", *, out=None, algorithm=None, timeout=None):
        self.arrays = (x, out)
        self.kept = self.comm.describe_all_reduce(&self.c, &self.a, &self.b, x, op, out, algorithm, timeout)

    def _broadcast(self, x, root=0, *, out=None, timeout=None):
        self.arrays = (x, out)
        self.kept = self.comm.describe_broadcast(&self.c, &self.a, &self.b, x, root, out, timeout)

    def _barrier(self, *, timeout=None):
        self.comm.describe_barrier(&self.c, timeout)

    def __reduce__(self):
        raise TypeError("a plan belongs to its process; make one from the communicator there")

    def __call__(self):
        """Run the collective once."""
        self.comm.engine.drive(&self.c)

    def __dealloc__(self):
        release(&self.a)
        release(&self.b)


# ---- small arguments -----------------------------------------------------------------------------------------

cdef str text_of(object error):
    try:
        return str(error)
    except Exception:
        return "(its text cannot be had)"


cdef int op_number(object op) except -1:
    number = OP_NUMBERS.get(op) if isinstance(op, str) else None
    if number is None:
        raise ValueError(f"op is {op!r}; allowed: {', '.join(OP_NUMBERS)}")
    return number


cdef int algorithm_number(object algorithm) except -1:
    number = ALGORITHM_NUMBERS.get(algorithm) if isinstance(algorithm, str) else None
    if number is None:
        raise ValueError(f"algorithm is {algorithm!r}; allowed: {', '.join(ALGORITHM_NUMBERS)}")
    return number


cdef double timeout_s_of(double default_s, object timeout) except -1:
    cdef double seconds
    try:
        seconds = default_s if timeout is None else timeout
    except TypeError:
        raise TypeError(f"timeout is {timeout!r}; it must be a number of seconds") from None
    if not seconds > 0:
        raise ValueError(f"timeout is {timeout!r}; it must be more than 0 seconds")
    return seconds


cdef uint64_t timeout_ns_of(object timeout) except? 0:
    cdef double seconds = timeout_s_of(0, timeout)
    return <uint64_t> (min(seconds, 1e9) * 1e9)
