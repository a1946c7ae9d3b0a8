# Find the memory of an array of any library: the fields of a NumPy array, the buffer protocol, and slower protocols.
# `Arena` is the other direction: it provides memory for new arrays of NumPy. `FileDescriptor` owns the file of memory.

cimport cython

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.long cimport PyLong_CheckExact
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release,
    PyObject_CheckBuffer, PyObject_GetBuffer,
)
from libc.stdint cimport int64_t, uint32_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strcpy
from posix.types cimport pid_t
from posix.unistd cimport close, getpid

from .._core cimport numpy_api as cnp
from .._core.group cimport OPAQUE, Items
from .._core.kernels cimport (
    SR_BF16, SR_BOOL, SR_C128, SR_C64, SR_F16, SR_F32, SR_F64, SR_F8_E4M3FN, SR_F8_E5M2, SR_I16, SR_I32, SR_I64, SR_I8,
    SR_U16, SR_U32, SR_U64, SR_U8, dtype_nbytes,
)
from .._core.segment cimport SR_ITEM_NAME_NBYTES, SR_PAGE

import contextvars

import numpy as np

from .._arguments import integer
from .._diagnostics.flight_recorder import DTYPE_NBYTES, DTYPES
from .._system.limits import size_text
from . import buffers

cdef extern from "arena.h" nogil:
    ctypedef struct sr_arena:
        size_t npages, used_pages
    int sr_arena_open(sr_arena *, void *begin, size_t npages)
    void sr_arena_close(sr_arena *)
    bint sr_arena_has(const sr_arena *, const void *p)
    void *sr_arena_take(sr_arena *, size_t nbytes)
    size_t sr_arena_nbytes(const sr_arena *, const void *p)
    void sr_arena_give_back(sr_arena *, void *p)

cnp.import_array()

cdef enum:
    NUMPY_NUMBERS = 24   # NumPy's type numbers up to the last one in the table, NPY_HALF

cdef dict DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES)}


# Return an address or a number of elements. C's conversion alone would cut the fraction of a float off.
cdef size_t size_of(str what, object number) except? 0:
    return number if PyLong_CheckExact(number) else integer(what, number)


@cython.freelist(8)
cdef class Memory:
    """A contiguous array in another library's memory, for use as x or out of a collective.

    The array has one dimension, in C order. Nothing here can be verified: a wrong address crashes the process.

    Parameters
    ----------
    address : int
        The address of the first element, in this process.
    count : int
        Number of elements.
    dtype : str
        The name of one of shmring's dtypes; an opaque dtype may be called uint8.
    readonly : bool
        True: a call that would write to it raises.
    owner : object
        An object to keep alive as long as this.

    Raises
    ------
    TypeError
        For an unknown dtype, and for an address or count that is no integer.
    OverflowError
        For a negative one.

    Examples
    --------
    >>> import ctypes
    >>> block = (ctypes.c_float * 4)(1, 2, 3, 4)
    >>> x = shmring.Memory(ctypes.addressof(block), 4, "float32", owner=block)
    >>> comm.all_reduce(x)
    >>> list(block)
    [2.0, 4.0, 6.0, 8.0]
    """

    def __init__(self, address, count, str dtype, *, bint readonly=False, object owner=None):
        number = DTYPE_NUMBERS.get(dtype)
        if number is None:
            raise TypeError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
        self.data = <unsigned char *> size_of("address", address)
        self.count = size_of("count", count)
        self.number = number
        self.itemsize = DTYPE_NBYTES[number]
        self.readonly = readonly
        self.owner = owner

    @staticmethod
    def of(x):
        """Return x's own memory, or None unless x is on the CPU, in C order and of one of shmring's dtypes.

        Parameters
        ----------
        x : array
            Of NumPy, or of a library that exchanges arrays in C (DLPack 1.2 and later; torch's tensors, also those that
            require gradients). None for a lazily negated or conjugated tensor, whose memory has other elements.

        Returns
        -------
        Memory or None
            Its owner is x.

        Examples
        --------
        >>> shmring.Memory.of(np.zeros((2, 3))).count
        6
        """
        cdef Operand operand
        cdef Memory memory
        if not cnp.PyArray_CheckExact(x):
            return exported_memory(exporter_of(type(x)), x)
        if not take_ndarray(&operand, x, False) or operand.fortran:
            return None
        memory = Memory.__new__(Memory)
        memory.data = operand.data
        memory.count = operand.count
        memory.number = operand.dtype
        memory.itemsize = operand.itemsize
        memory.readonly = not cnp.PyArray_ISWRITEABLE(<cnp.ndarray> x)
        memory.owner = x
        return memory

    def __dealloc__(self):
        if self.exported != NULL and self.exported.deleter != NULL:
            self.exported.deleter(self.exported)

    @property
    def address(self):
        """Address of the first element."""
        return <uintptr_t> self.data

    @property
    def dtype(self):
        """Name of its dtype."""
        return DTYPES[self.number]

    @property
    def nbytes(self):
        """Bytes of all elements."""
        return self.count * self.itemsize

    @property
    def shape(self):
        """`(count,)`"""
        return (self.count,)

    def __array__(self, dtype=None, copy=None):
        """Return the same memory as a NumPy array. TypeError if NumPy lacks the dtype."""
        cdef cnp.npy_intp length = self.count
        cdef cnp.ndarray array
        cdef int number
        for number in range(NUMPY_NUMBERS):
            if DTYPE_OF_NUMPY[number] == self.number:
                break
        else:
            raise TypeError(f"NumPy has no {self.dtype}; for a result, give an out")
        if dtype is not None and np.dtype(dtype).name != self.dtype:
            raise TypeError(f"this is memory of {self.dtype}, not of {dtype}")
        array = cnp.PyArray_SimpleNewFromData(1, &length, number, self.data)
        cnp.set_array_base(array, self)
        if self.readonly:
            array.setflags(write=False)
        return array.copy() if copy else array

    def __repr__(self):
        return f"<shmring.Memory {self.dtype}[{self.count}] at {self.address:#x}>"


cdef inline bint take_memory(Operand *operand, object x, bint writable) noexcept:
    cdef Memory memory
    if type(x) is not Memory:
        return False
    memory = <Memory> x
    if writable and memory.readonly:
        return False
    operand.data = memory.data
    operand.count = memory.count
    operand.dtype = memory.number
    operand.itemsize = memory.itemsize
    operand.fortran = False
    return True


# shmring's dtype for each of NumPy's type numbers; -1: cannot be reduced.
cdef int[NUMPY_NUMBERS] DTYPE_OF_NUMPY = [
    SR_BOOL, SR_I8, SR_U8, SR_I16, SR_U16, SR_I32, SR_U32, SR_I64, SR_U64, SR_I64, SR_U64, SR_F32, SR_F64, -1,
    SR_C64, SR_C128, -1, -1, -1, -1, -1, -1, -1, SR_F16,
]


# Fill the operand from the array's own fields: a buffer export alone takes longer than a tiny all-reduce. False if x
# is not a plain ndarray that can be used as it is; a slower path then takes or refuses it.
cdef inline bint take_ndarray(Operand *operand, object x, bint writable) noexcept:
    cdef int flags, number
    if not cnp.PyArray_CheckExact(x):
        return False
    number = cnp.PyArray_TYPE(<cnp.ndarray> x)
    flags = cnp.PyArray_FLAGS(<cnp.ndarray> x)
    if number >= NUMPY_NUMBERS or DTYPE_OF_NUMPY[number] < 0:
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


# ---- DLPack's exchange in C: https://dmlc.github.io/dlpack/latest/c_api.html ----------------------------------

cdef struct Exchange:         # the struct that a type's capsule points to
    uint32_t major, minor
    Exchange *previous        # the same for an older version
    void *allocate
    Export export_x
    void *import_x
    void *describe
    void *stream


cdef enum:
    DLPACK_MAJOR = 1
    DLPACK_CPU = 1
    DLPACK_READ_ONLY = 1


# The way in which one type of arrays exports them. torch's flags are not part of DLPack: they are read from attributes.
cdef class _Exporter:
    cdef object kind
    cdef Export export_x      # NULL: the type does not exchange arrays in C
    cdef bint is_inherited    # such a type may change what its base exports
    cdef bint has_gradients
    cdef object is_neg, is_conj, untyped_storage   # methods, None if the type has none


# The exporter of the most recent type: consecutive calls usually use arrays of one library.
cdef _Exporter known_exporter = _Exporter()


cdef inline _Exporter exporter_of(object kind):
    global known_exporter
    if known_exporter.kind is not kind:
        known_exporter = new_exporter(kind)
    return known_exporter


cdef _Exporter new_exporter(object kind):
    cdef _Exporter exporter = _Exporter()
    exporter.kind = kind
    exporter.export_x = export_of(kind)
    exporter.is_inherited = "__dlpack_c_exchange_api__" not in kind.__dict__
    exporter.has_gradients = hasattr(kind, "requires_grad")
    exporter.is_neg, exporter.is_conj = getattr(kind, "is_neg", None), getattr(kind, "is_conj", None)
    exporter.untyped_storage = getattr(kind, "untyped_storage", None)
    return exporter


cdef Export export_of(object kind) except? NULL:
    cdef Exchange *exchange
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return NULL
    exchange = <Exchange *> PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while exchange != NULL and exchange.major > DLPACK_MAJOR:
        exchange = exchange.previous
    return exchange.export_x if exchange != NULL and exchange.major == DLPACK_MAJOR else NULL


cdef bint is_in_c_order(const DLTensor *tensor) noexcept:
    cdef int64_t stride = 1
    cdef int axis
    for axis in range(tensor.ndim - 1, -1, -1):
        if tensor.strides != NULL and tensor.shape[axis] != 1 and tensor.strides[axis] != stride:
            return False
        stride *= tensor.shape[axis]
    return True


def tensor_in(capsule):
    """Return the fields of the tensor in a capsule that `__dlpack__` has returned. The capsule owns the memory.

    (address or 0, shape, strides in elements or None, code of the dtype, its bits, its lanes, read-only). Raise
    BufferError if the capsule holds no tensor, or one of another version.
    """
    cdef DLTensor *tensor
    cdef Exported *exported
    cdef int axis
    readonly, strides = False, None
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        exported = <Exported *> PyCapsule_GetPointer(capsule, "dltensor_versioned")
        if exported.major != DLPACK_MAJOR:
            raise BufferError(f"the array has DLPack version {exported.major}; version {DLPACK_MAJOR} is supported")
        tensor, readonly = &exported.tensor, exported.flags & DLPACK_READ_ONLY != 0
    elif PyCapsule_IsValid(capsule, "dltensor"):
        tensor = <DLTensor *> PyCapsule_GetPointer(capsule, "dltensor")
    else:
        raise BufferError("__dlpack__() returned no DLPack capsule, or one that was used before")
    if tensor.ndim < 0 or (tensor.ndim > 0 and tensor.shape == NULL):
        raise BufferError("the DLPack tensor has no shape")
    shape = ()
    for axis in range(tensor.ndim):
        shape += (tensor.shape[axis],)
    if tensor.strides != NULL:
        strides = ()
        for axis in range(tensor.ndim):
            strides += (tensor.strides[axis],)
    address = 0 if tensor.data == NULL else <uintptr_t> tensor.data + tensor.byte_offset
    return address, shape, strides, tensor.code, tensor.bits, tensor.lanes, readonly


# Return a Memory of x, which holds x and its export until it is freed; None if x is on another device, sparse, of
# another dtype, not in C order, or lazily negated or conjugated.
cdef Memory exported_memory(_Exporter exporter, object x):
    cdef Memory memory
    cdef DLTensor *tensor
    cdef int64_t count = 1
    cdef int axis
    if exporter.export_x == NULL:
        return None
    memory = Memory.__new__(Memory)
    try:
        exporter.export_x(<void *> x, &memory.exported)
    except (BufferError, RuntimeError, TypeError, ValueError):
        memory.exported = NULL
    if memory.exported == NULL or memory.exported.major != DLPACK_MAJOR:
        return None
    tensor = &memory.exported.tensor
    memory.number = dtype_of_dlpack(tensor.code, tensor.bits)
    if tensor.device != DLPACK_CPU or tensor.lanes != 1 or memory.number < 0:
        return None
    for axis in range(tensor.ndim):
        count *= tensor.shape[axis]
    if count > 0 and not (tensor.data != NULL and is_in_c_order(tensor)):
        return None
    if exporter.is_neg is not None and exporter.is_neg(x):
        return None
    if exporter.is_conj is not None and is_complex(memory.number) and exporter.is_conj(x):
        return None
    memory.data = <unsigned char *> tensor.data + tensor.byte_offset
    memory.count = count
    memory.itemsize = tensor.bits // 8
    memory.readonly = memory.exported.flags & DLPACK_READ_ONLY
    memory.owner = x
    return memory


cdef object storage_of(object x):
    cdef _Exporter exporter
    cdef object storage = None
    while type(x) is Memory:
        x = (<Memory> x).owner
    if x is None or cnp.PyArray_CheckExact(x):   # NumPy gives an array no other memory while others refer to it
        return None
    if type(x) is list:   # of tensors that lie side by side
        storage = []
        for one in x:
            storage.append(storage_of(one))
        return storage
    exporter = exporter_of(type(x))
    if exporter.untyped_storage is not None:
        try:
            storage = exporter.untyped_storage(x)
        except Exception:   # a subclass without memory of its own
            pass
    return storage


cdef inline bint is_complex(int dtype) noexcept:
    return dtype == SR_C64 or dtype == SR_C128


# Fill the operand with an array that is exchanged in C, and return the Memory that holds it. None if a slower path has
# to take or refuse x.
cdef Memory take_exported(Operand *operand, object x, bint writable, str what):
    cdef _Exporter exporter = exporter_of(type(x))
    cdef Memory memory
    if exporter.export_x == NULL or exporter.is_inherited:
        return None
    memory = exported_memory(exporter, x)
    if memory is None or (exporter.has_gradients and x.requires_grad):
        return None
    if not take_memory(operand, memory, writable):
        raise buffers.read_only(what)
    return memory


# -1: not one of shmring's dtypes. The codes are those of DLPack's DLDataTypeCode.
cdef int dtype_of_dlpack(int code, int bits) noexcept:
    if code == 0:
        return SR_I8 if bits == 8 else SR_I16 if bits == 16 else SR_I32 if bits == 32 else SR_I64 if bits == 64 else -1
    if code == 1:
        return SR_U8 if bits == 8 else SR_U16 if bits == 16 else SR_U32 if bits == 32 else SR_U64 if bits == 64 else -1
    if code == 2:
        return SR_F16 if bits == 16 else SR_F32 if bits == 32 else SR_F64 if bits == 64 else -1
    if code == 4:
        return SR_BF16 if bits == 16 else -1
    if code == 5:
        return SR_C64 if bits == 64 else SR_C128 if bits == 128 else -1
    if bits != 8:
        return -1
    return SR_BOOL if code == 6 else SR_F8_E4M3FN if code == 10 else SR_F8_E5M2 if code == 12 else -1


# Return the dtype's number for a buffer format, -1 if there is none. C leaves the sizes of integers open, so itemsize
# selects among them.
cdef int dtype_of_format(const char *format, Py_ssize_t itemsize) noexcept:
    cdef char kind
    if format == NULL:
        return SR_U8
    if format[0] in b"@=<":   # shmring runs on little-endian machines only
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
    if kind == b"b":
        return SR_I8
    if kind == b"B":
        return SR_U8 if itemsize == 1 else -1   # a larger item is a union of ctypes
    if kind in b"hilqn":
        return SR_I16 if itemsize == 2 else SR_I32 if itemsize == 4 else SR_I64
    if kind in b"HILQN":
        return SR_U16 if itemsize == 2 else SR_U32 if itemsize == 4 else SR_U64
    return -1


# ---- opaque dtypes: their items are only moved, and may be anything but references -----------------------------

# Cache for the most recent dtype: consecutive calls usually use the same one. A program may rename the fields of a
# dtype in place, which gives it another tuple of names.
cdef object cached_dtype = None
cdef object cached_names = None
cdef int cached_number   # in the table; OPAQUE: not one of shmring's dtypes
cdef Items cached_items


cdef inline object names_of(object dtype):
    return dtype.names if isinstance(dtype, cnp.dtype) else None   # a str is a format


cdef int cache_items_of(object dtype) except -1:
    global cached_dtype, cached_names, cached_number
    cdef bytes words
    cached_dtype = None
    cached_names = names_of(dtype)
    cached_items.signature, cached_items.nbytes, words, name = buffers.items_of(dtype)
    if len(words) >= SR_ITEM_NAME_NBYTES:
        words = words[:SR_ITEM_NAME_NBYTES - 4] + b"..."
    memset(cached_items.name, 0, SR_ITEM_NAME_NBYTES)
    memcpy(cached_items.name, <const char *> words, len(words))
    cached_number = DTYPE_NUMBERS.get(name, OPAQUE)
    cached_dtype = dtype
    return 0


# Set the operand's dtype. OPAQUE operands are counted in bytes, since an item may be longer than a chunk; `items`
# describes the items.
cdef int fill_items(Operand *operand, object dtype, size_t nbytes) except -1:
    if dtype is not cached_dtype or names_of(dtype) is not cached_names:
        cache_items_of(dtype)
    operand.dtype = cached_number
    operand.items = cached_items
    operand.itemsize = 1 if cached_number == OPAQUE else dtype_nbytes(cached_number)
    operand.count = nbytes // operand.itemsize
    return 0


cdef bint take_opaque_ndarray(Operand *operand, cnp.ndarray x, bint writable) except -1:
    cdef int flags = cnp.PyArray_FLAGS(x)
    cdef cnp.dtype dtype = x.dtype
    if (dtype is not cached_dtype and dtype.hasobject) or (writable and not flags & cnp.NPY_ARRAY_WRITEABLE):
        return False
    if not flags & (cnp.NPY_ARRAY_C_CONTIGUOUS | cnp.NPY_ARRAY_F_CONTIGUOUS):
        return False
    operand.data = <unsigned char *> cnp.PyArray_DATA(x)
    operand.fortran = not flags & cnp.NPY_ARRAY_C_CONTIGUOUS
    fill_items(operand, dtype, cnp.PyArray_NBYTES(x))
    return True


# Return NumPy's dtype of a buffer's items, else the format. The protocol must not matter: all give the same dtype.
cdef object dtype_of_buffer(object x, const char *format):
    try:
        return np.asarray(x).dtype
    except (TypeError, ValueError, RuntimeError):
        pass
    return format.decode()


cdef str dtype_name(const Operand *operand):
    return (<bytes> operand.items.name).decode() if operand.dtype == OPAQUE else DTYPES[operand.dtype]


# ---- any array -----------------------------------------------------------------------------------------------

cdef object take(Operand *operand, object x, bint writable, str what, bint moves):
    cdef bint has_buffer
    operand.held = False
    if take_ndarray(operand, x, writable) or take_memory(operand, x, writable):
        return None
    has_buffer = PyObject_CheckBuffer(x)
    if type(x) is Memory:
        raise buffers.read_only(what)
    if not has_buffer:
        memory = take_exported(operand, x, writable, what)
        if memory is not None:
            return memory
    if writable and not cnp.PyArray_CheckExact(x):
        buffers.refuse_as_output(x, what)
    if cnp.PyArray_Check(x) and isinstance(x, np.ma.MaskedArray):
        raise buffers.masked(what)
    if moves and cnp.PyArray_Check(x) and take_opaque_ndarray(operand, x, writable):
        return None
    if has_buffer:
        return take_buffer(operand, x, writable, what, moves)
    return take_slowly(operand, x, writable, what, moves)


cdef object take_buffer(Operand *operand, object x, bint writable, str what, bint moves):
    cdef int flags = PyBUF_FORMAT | PyBUF_ANY_CONTIGUOUS | (PyBUF_WRITABLE if writable else 0)
    cdef int dtype
    try:
        PyObject_GetBuffer(x, &operand.view, flags)
        operand.held = True
    except (BufferError, ValueError, TypeError) as error:
        # ml_dtypes has no format letter for its dtypes.
        if getattr(getattr(x, "dtype", None), "name", None) not in DTYPE_NUMBERS or "buffer" not in str(error):
            raise buffers.explain_refusal(x, what, writable, moves, error, DTYPES) from None
    if not operand.held:
        if writable and not hasattr(x, "__array_interface__"):   # DLPack does not say that JAX's memory is read-only
            raise buffers.read_only(what)
        return take_slowly(operand, x, writable, what, moves)
    operand.data = <unsigned char *> operand.view.buf
    operand.fortran = operand.view.ndim > 1 and not PyBuffer_IsContiguous(&operand.view, b"C")
    dtype = dtype_of_format(operand.view.format, operand.view.itemsize)
    if dtype >= 0:
        operand.dtype, operand.itemsize = dtype, operand.view.itemsize
        operand.count = operand.view.len // operand.itemsize
        return None
    try:
        found = dtype_of_buffer(x, operand.view.format) if moves else None
        if found is not None and not buffers.has_references(found):
            fill_items(operand, found, operand.view.len)
            if isinstance(found, str):
                operand.items.nbytes = max(operand.view.itemsize, <Py_ssize_t> 1)
            return None
        error = TypeError(f"elements of format {operand.view.format.decode()!r}")
        raise buffers.explain_refusal(x, what, False, moves, error, DTYPES)
    except BaseException:
        release(operand)
        raise


cdef object take_slowly(Operand *operand, object x, bint writable, str what, bint moves):
    taken = buffers.take(x, what, tensor_in)
    if writable and taken.readonly:
        raise buffers.read_only(what)
    if taken.dtype not in DTYPE_NUMBERS:
        array = np.asarray(x) if moves and hasattr(x, "__array_interface__") else None
        if array is not None and take_opaque_ndarray(operand, array, writable):
            return array
        raise buffers.unsupported_dtype(what, taken.dtype, DTYPES)
    operand.data = <unsigned char *> <uintptr_t> taken.address
    operand.count = taken.count
    operand.dtype = DTYPE_NUMBERS[taken.dtype]
    operand.itemsize = DTYPE_NBYTES[operand.dtype]
    operand.fortran = taken.fortran
    return taken


cdef void release(Operand *operand) noexcept:
    if operand.held:
        operand.held = False   # first: the release may run Python code
        PyBuffer_Release(&operand.view)


# ---- an arena: shared memory for the arrays that NumPy makes ----

# NumPy asks the handler of the current context (`contextvars`; so of one thread or one task) for the memory of each new
# array (NEP 49). An array keeps a reference to its handler, which keeps the memory. NumPy holds the GIL in these
# functions.

cdef struct Handler:
    cnp.PyDataMem_Handler of_numpy   # the first member, since NumPy knows only this
    cnp.PyDataMemAllocator other     # NumPy's own, for what does not come from the arena
    sr_arena arena
    void *memory                     # a reference to the array whose memory the arena hands out
    size_t smallest_nbytes
    int nentered                     # `with` statements that have not ended
    pid_t pid


cdef inline void *take_from_arena(Handler *h, size_t nbytes) noexcept:
    # A forked child has the handler, too; its arrays would overwrite its parent's.
    if nbytes < h.smallest_nbytes or h.nentered == 0 or getpid() != h.pid:
        return NULL
    return sr_arena_take(&h.arena, nbytes)


cdef void *arena_malloc(void *handler, size_t nbytes) noexcept:
    cdef Handler *h = <Handler *> handler
    cdef void *p = take_from_arena(h, nbytes)
    return p if p != NULL else h.other.malloc(h.other.ctx, nbytes)


cdef void *arena_calloc(void *handler, size_t count, size_t item_nbytes) noexcept:
    cdef Handler *h = <Handler *> handler
    cdef void *p = NULL
    if item_nbytes == 0 or count <= (<size_t> -1) // item_nbytes:
        p = take_from_arena(h, count * item_nbytes)
    if p == NULL:
        return h.other.calloc(h.other.ctx, count, item_nbytes)
    return memset(p, 0, count * item_nbytes)


cdef void arena_free(void *handler, void *p, size_t nbytes) noexcept:
    cdef Handler *h = <Handler *> handler
    if sr_arena_has(&h.arena, p):
        sr_arena_give_back(&h.arena, p)
    else:
        h.other.free(h.other.ctx, p, nbytes)


cdef void *arena_realloc(void *handler, void *p, size_t nbytes) noexcept:
    cdef Handler *h = <Handler *> handler
    cdef size_t had_nbytes
    cdef void *moved
    if not sr_arena_has(&h.arena, p):
        return h.other.realloc(h.other.ctx, p, nbytes)
    had_nbytes = sr_arena_nbytes(&h.arena, p)
    if nbytes <= had_nbytes:
        return p
    moved = arena_malloc(h, nbytes)
    if moved != NULL:
        memcpy(moved, p, had_nbytes)
        sr_arena_give_back(&h.arena, p)
    return moved


cdef void free_handler(object capsule) noexcept:
    cdef Handler *h = <Handler *> PyCapsule_GetPointer(capsule, b"mem_handler")
    sr_arena_close(&h.arena)
    Py_DECREF(<object> h.memory)
    free(h)


cdef object handler_over(cnp.ndarray memory, size_t smallest_nbytes):
    cdef cnp.PyDataMem_Handler *other = <cnp.PyDataMem_Handler *> PyCapsule_GetPointer(
        <object> cnp.PyDataMem_DefaultHandler, b"mem_handler")
    cdef Handler *h = <Handler *> calloc(1, sizeof(Handler))
    cdef object capsule
    if h == NULL or sr_arena_open(&h.arena, cnp.PyArray_DATA(memory), cnp.PyArray_NBYTES(memory) // SR_PAGE) < 0:
        free(h)
        raise MemoryError()
    strcpy(h.of_numpy.name, b"shmring_arena")
    h.of_numpy.version = 1
    h.of_numpy.allocator = cnp.PyDataMemAllocator(h, arena_malloc, arena_calloc, arena_realloc, arena_free)
    h.other = other.allocator
    h.smallest_nbytes, h.pid = smallest_nbytes, getpid()
    h.memory = <void *> memory
    try:
        capsule = PyCapsule_New(h, b"mem_handler", free_handler)
    except BaseException:
        sr_arena_close(&h.arena)
        free(h)
        raise
    Py_INCREF(memory)
    return capsule


cdef class Arena:
    """Shared memory for the arrays that NumPy makes in a `with` statement; `Comm.arena` makes it.

    Its arrays are ordinary arrays, and may be kept after the `with` statement, the arena and the communicator. The
    memory is freed with the last array. An arena is for the thread, or the task of asyncio, that enters it: other
    threads make arrays as before. `with` statements may be repeated, and nested.

    Attributes
    ----------
    nbytes : int
        Bytes of this rank's memory.
    used_nbytes : int
        Bytes that arrays use now, in whole pages of 4 KiB.

    Examples
    --------
    >>> with comm.arena() as arena:
    ...     gradient = np.ones(100_000) * (comm.rank + 1)
    ...     comm.all_reduce(gradient)  # no copy
    >>> gradient[0], arena.used_nbytes
    (np.float64(3.0), 802816)
    """

    cdef object capsule
    cdef Handler *handler

    # Each method runs without a bytecode, so that no handler of a signal can raise between its lines.

    def __init__(self, cnp.ndarray memory, size_t smallest_nbytes):
        self.capsule = handler_over(memory, smallest_nbytes)
        self.handler = <Handler *> PyCapsule_GetPointer(self.capsule, b"mem_handler")

    @property
    def nbytes(self):
        return 0 if self.handler == NULL else self.handler.arena.npages * <size_t> SR_PAGE

    @property
    def used_nbytes(self):
        return 0 if self.handler == NULL else self.handler.arena.used_pages * <size_t> SR_PAGE

    def __repr__(self):
        return f"<shmring.Arena of {size_text(self.nbytes)}, {size_text(self.used_nbytes)} in use>"

    def __enter__(self):
        before = cnp.PyDataMem_SetHandler(self.capsule)
        try:
            _entered.set((self, before, _entered.get()))
        except BaseException:
            cnp.PyDataMem_SetHandler(before)
            raise
        self.handler.nentered += 1
        return self

    def __exit__(self, *_):
        cdef object innermost = _entered.get()
        if self.handler.nentered > 0:
            self.handler.nentered -= 1
        if innermost is None or innermost[0] is not self:
            raise RuntimeError(
                "the arena is left in another thread or task than it was entered in, or before one that was entered "
                "later; new arrays do not come from it any more"
            )
        _, before, outer = innermost
        cnp.PyDataMem_SetHandler(before)
        _entered.set(outer)


# The innermost arena of this context: (arena, handler before it, the same of the arena around it or None).
_entered = contextvars.ContextVar("shmring_arenas", default=None)


# ---- a file descriptor: the file of shared memory ---------------------------------------------------------------

cdef class FileDescriptor:
    """A file descriptor, -1 at first: set `fd`. It is closed with this object, unless `fd` is -1.

    C code closes it, so no exception of a signal handler in a destructor can prevent it.
    """

    cdef public int fd

    def __cinit__(self):
        self.fd = -1

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)
