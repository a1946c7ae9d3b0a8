# The part of NumPy's C API that is used here. NumPy's own declarations are 1,000 lines, which each module would
# translate, and which import a dozen types more. A module that cimports this calls `import_array` when it is imported.

from cpython.ref cimport Py_INCREF


cdef extern from "numpy/arrayobject.h" nogil:
    ctypedef signed long npy_intp
    ctypedef class numpy.dtype [object PyArray_Descr, check_size ignore]:
        pass
    ctypedef class numpy.ndarray [object PyArrayObject, check_size ignore]:
        pass
    enum:
        NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_F_CONTIGUOUS, NPY_ARRAY_WRITEABLE, NPY_ARRAY_CARRAY
        NPY_CLONGDOUBLE, NPY_HALF
    ctypedef struct PyDataMemAllocator:
        void *ctx
        void *(*malloc)(void *ctx, size_t nbytes)
        void *(*calloc)(void *ctx, size_t count, size_t item_nbytes)
        void *(*realloc)(void *ctx, void *p, size_t nbytes)
        void (*free)(void *ctx, void *p, size_t nbytes)
    ctypedef struct PyDataMem_Handler:
        char name[127]
        unsigned char version
        PyDataMemAllocator allocator
    void *PyDataMem_DefaultHandler   # a borrowed reference to a capsule
    bint PyArray_CHKFLAGS(ndarray, int flags)
    bint PyArray_ISBYTESWAPPED(ndarray)
    bint PyArray_ISNOTSWAPPED(ndarray)
    bint PyArray_ISWRITEABLE(ndarray)
    bint PyArray_IS_C_CONTIGUOUS(ndarray)
    int PyArray_FLAGS(ndarray)
    int PyArray_NDIM(ndarray)
    int PyArray_TYPE(ndarray)
    npy_intp PyArray_DIM(ndarray, size_t)
    npy_intp *PyArray_DIMS(ndarray)
    npy_intp PyArray_ITEMSIZE(ndarray)
    npy_intp PyArray_NBYTES(ndarray)
    npy_intp PyArray_SIZE(ndarray)
    npy_intp PyDataType_ELSIZE(dtype)
    void *PyArray_DATA(ndarray)
    void *PyArray_DESCR(ndarray)   # a borrowed reference

cdef extern from "numpy/arrayobject.h":
    int import_array "_import_array"() except -1
    bint PyArray_Check(object)
    bint PyArray_CheckExact(object)
    bint PyArray_CheckScalar(object)
    object PyArray_DescrFromType(int number)
    object PyArray_Empty(int ndim, npy_intp *lengths, dtype descr, bint fortran)   # steals a reference to descr
    object PyArray_SimpleNewFromData(int ndim, npy_intp *lengths, int number, void *data)
    object PyDataMem_SetHandler(object)   # returns the one before
    int PyArray_SetBaseObject(ndarray, object base) except -1   # steals a reference to base


cdef inline int set_array_base(ndarray array, object base) except -1:
    Py_INCREF(base)
    return PyArray_SetBaseObject(array, base)
