# The C declarations of src/kernels/kernels.h, and the functions that find the kernels. One extension links the kernels,
# 1.3 MB of code, for all others.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t


cdef extern from "kernels/kernels.h" nogil:
    ctypedef void sr_fold_fn(void **dst, int ndst, uint32_t stream, const void **src, int nsrc,
                             size_t count, uint32_t divisor) noexcept
    ctypedef void sr_copy_fn(void *dst, const void *src, size_t nbytes, uint32_t way) noexcept
    ctypedef void sr_copy_two_fn(void *dst0, const void *src0, uint32_t stream0, void *dst1, const void *src1,
                                 uint32_t stream1, size_t nbytes) noexcept
    ctypedef void sr_widen_fn(float *dst, const void *src, size_t count) noexcept
    ctypedef void sr_narrow_fn(void *dst, const float *src, size_t count) noexcept
    ctypedef void sr_encode_fn(void *dst, float *residual_or_null, const float *src, size_t count) noexcept
    ctypedef void sr_decode_fn(float *dst, const void *src, size_t count) noexcept
    size_t sr_encoded_nbytes(int format, size_t count)
    cdef struct sr_kernels:
        const char *isa
        sr_fold_fn *fold[17][11]
        sr_copy_fn *copy
        sr_copy_two_fn *copy_two
        sr_widen_fn *widen[17]
        sr_narrow_fn *narrow[17]
        sr_encode_fn *encode[4]
        sr_decode_fn *decode[4]
    cdef enum:
        SR_BOOL, SR_I8, SR_U8, SR_I16, SR_U16, SR_I32, SR_U32, SR_I64, SR_U64
        SR_F16, SR_BF16, SR_F32, SR_F64, SR_C64, SR_C128, SR_F8_E4M3FN, SR_F8_E5M2, SR_DTYPES
        SR_SUM, SR_PROD, SR_MIN, SR_AVG, SR_BOR, SR_LAND, SR_OPS
        SR_WIRE_NATIVE, SR_WIRE_FORMATS
        SR_COPY_ORDINARY, SR_COPY_STREAMING, SR_COPY_IN_TURN
    bint sr_dtype_is_widened(int dtype)
    struct sr_float_env:
        pass
    sr_float_env sr_float_env_enter()
    void sr_float_env_leave(sr_float_env)


# As sr_kernels_find. isa: a name; NULL or "" for the best that this machine has. NULL if this machine has not the named
# one.
cdef const sr_kernels *find_kernels(const char *isa) noexcept nogil
cdef size_t dtype_nbytes(uint32_t dtype) noexcept nogil
