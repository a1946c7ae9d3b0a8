/* The kernels: reduction loops (dst = src[0] op src[1] op ...) on plain memory for every dtype and op, copies, casts
 * and wire formats, once for each instruction set. This file defines the lists of dtypes, ops and wire formats. It
 * knows nothing of ranks, segments, sockets or Python. */
#ifndef SR_KERNELS_H
#define SR_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* The numbers are part of a call's fingerprint: append, never reorder. */
enum sr_dtype {
    SR_BOOL, SR_I8, SR_U8, SR_I16, SR_U16, SR_I32, SR_U32, SR_I64, SR_U64,
    SR_F16, SR_BF16, SR_F32, SR_F64, SR_C64, SR_C128, SR_F8_E4M3FN, SR_F8_E5M2, SR_DTYPES
};
enum sr_op {
    SR_SUM, SR_PROD, SR_MIN, SR_MAX, SR_AVG, SR_BAND, SR_BOR, SR_BXOR, SR_LAND, SR_LOR, SR_LXOR, SR_OPS
};

extern const uint8_t sr_dtype_nbytes[SR_DTYPES];

/* Return whether items are folded in wider accumulators, so that a partial result is not an item. */
static inline int sr_dtype_is_widened(int dtype) {
    return dtype == SR_F16 || dtype == SR_BF16 || dtype == SR_F8_E4M3FN || dtype == SR_F8_E5M2;
}

extern const char *const sr_dtype_name[SR_DTYPES]; /* NumPy's: "bool", "int8", ..., "float8_e5m2" */
extern const char *const sr_op_name[SR_OPS];       /* "sum", ..., "lxor" */

/* dst[d][i] = src[0][i] op src[1][i] op ... op src[nsrc-1][i], folded in that order, for every d < ndst.
 *
 * If bit d of `stream` is set (bit 31 for dst[31] and all after it), the whole lines of dst[d] are written by streaming
 * stores, and its ragged edges by ordinary stores. The kernel then ends with a store fence, since a release does not
 * order streaming stores. It is fastest if all streamed dsts have the same offset in their lines, as slots and shared
 * arrays have.
 *
 * A dst may be the same pointer as a src (in place); otherwise all places are disjoint. Nothing needs to be aligned.
 * nsrc >= 1, ndst >= 1, count >= 0. SR_AVG divides the sum by `divisor` before the only rounding; other ops ignore
 * `divisor`. 16- and 8-bit floats are folded in float32 over all sources and rounded once. With one source the logical
 * ops still give 0 or 1, and SR_AVG still divides. */
typedef void sr_fold_fn(void *const *dst, int ndst, uint32_t stream, const void *const *src, int nsrc,
                        size_t count, uint32_t divisor);

/* Ways to copy. Callers pass whether stores stream, or one of the names. Streaming: by streaming stores and a final
 * fence, as above. In turn: parts of several places one after another, for data that another core has written. */
enum sr_copy_way { SR_COPY_ORDINARY = 0, SR_COPY_STREAMING = 1, SR_COPY_IN_TURN = 2 };

/* Copy nbytes between disjoint places. */
typedef void sr_copy_fn(void *dst, const void *src, size_t nbytes, uint32_t way);

/* Make two copies of the same length in one loop, each by ordinary or by streaming stores. All four places are
 * disjoint. */
typedef void sr_copy_two_fn(void *dst0, const void *src0, uint32_t stream0, void *dst1, const void *src1,
                            uint32_t stream1, size_t nbytes);

/* Convert items of a widened dtype to float32 (exact), and float32 to such items (to nearest even, as in the folds;
 * float8 overflows as in ml_dtypes). NaNs stay NaNs and keep what fits of their payload. The two places are disjoint;
 * nothing needs to be aligned. Every instruction set gives the same bits, also of NaNs. */
typedef void sr_widen_fn(float *dst, const void *src, size_t count);
typedef void sr_narrow_fn(void *dst, const float *src, size_t count);

/* The formats in which float32 is sent between hosts. The numbers are sent too: append, never reorder.
 *
 * SR_WIRE_INT8 consists of blocks that can be decoded one by one: a float32 scale, then SR_WIRE_INT8_BLOCK int8; the
 * last block may have fewer. The scale is the largest magnitude of the block / 127, at least 2^-126, and such that 127
 * scales do not overflow; it is 0 for a block of zeros. Items are rounded to nearest even and lie in [-127, 127]. A
 * decoded value is off by at most half a scale, apart from rounding in float32. A block with an infinity or a NaN has
 * the scale NaN and decodes to NaNs. */
enum sr_wire_format { SR_WIRE_NATIVE, SR_WIRE_BF16, SR_WIRE_FP16, SR_WIRE_INT8, SR_WIRE_FORMATS };
enum { SR_WIRE_INT8_BLOCK = 256 }; /* items */

extern const char *const sr_wire_name[SR_WIRE_FORMATS]; /* "native", "bf16", "fp16", "int8" */

static inline size_t sr_encoded_nbytes(int format, size_t count) {
    if (format == SR_WIRE_NATIVE) return 4 * count;
    if (format == SR_WIRE_INT8) return count + 4 * (count / SR_WIRE_INT8_BLOCK + (count % SR_WIRE_INT8_BLOCK != 0));
    return 2 * count;
}

/* Encode src to dst, sr_encoded_nbytes() bytes, and decode it. With a residual (error feedback: count items, zeros at
 * first, the same array in every call for the same src), y = src + residual is encoded, and the residual becomes y
 * minus the decoded values. Infinities and NaNs are kept, and large numbers overflow to infinities. For these, and for
 * a whole int8 block that decodes to NaNs, the residual becomes 0: an infinite residual would spoil all later calls.
 *
 * A rank that must hold the same values as the receivers decodes what it has sent. All places are disjoint; nothing
 * needs to be aligned. Pieces of src may be encoded and decoded one by one, if those of int8 begin at whole blocks.
 * Every instruction set gives the same bits, except for the NaN of src + residual if both are NaN, or infinities of
 * different signs. */
typedef void sr_encode_fn(void *dst, float *residual_or_null, const float *src, size_t count);
typedef void sr_decode_fn(float *dst, const void *src, size_t count);

struct sr_kernels {
    const char *isa;
    sr_fold_fn *fold[SR_DTYPES][SR_OPS]; /* NULL if the op has no meaning for the dtype */
    sr_copy_fn *copy;
    sr_copy_two_fn *copy_two;
    sr_widen_fn *widen[SR_DTYPES]; /* NULL if not sr_dtype_is_widened(); narrow likewise */
    sr_narrow_fn *narrow[SR_DTYPES];
    sr_encode_fn *encode[SR_WIRE_FORMATS];
    sr_decode_fn *decode[SR_WIRE_FORMATS];
};

/* Return the kernels of the named instruction set, or NULL if its name is unknown or it is unsupported here. NULL or
 * "": the best that this CPU and its operating system support. Every call executes CPUID, which is slow under a
 * hypervisor: call it once and keep the result. */
const struct sr_kernels *sr_kernels_find(const char *isa);

/* Return the i-th name of those supported here, best first ("avx512", "avx2", "sse2" | "neon" | "scalar"), or NULL. */
const char *sr_kernels_isas(int i);

/* The caller's flush-to-zero, rounding and trap modes, which are replaced by the IEEE defaults while kernels run. If
 * the modes are the defaults already, this costs a register read and a comparison. */
struct sr_float_env {
    uint32_t saved;
};

#if defined(__x86_64__)
/* MXCSR without its sticky exception flags. The default: all traps masked, round to nearest, no FTZ, no DAZ. */
#define SR_MXCSR_MODES 0xffc0u
#define SR_MXCSR_DEFAULT 0x1f80u

static inline struct sr_float_env sr_float_env_enter(void) {
    struct sr_float_env env = {_mm_getcsr()};
    if ((env.saved & SR_MXCSR_MODES) != SR_MXCSR_DEFAULT) _mm_setcsr(SR_MXCSR_DEFAULT);
    return env;
}

static inline void sr_float_env_leave(struct sr_float_env env) {
    if ((env.saved & SR_MXCSR_MODES) != SR_MXCSR_DEFAULT) _mm_setcsr(env.saved);
}
#elif defined(__aarch64__)
/* The default of FPCR is zero: round to nearest, no flush, no default NaN, no traps. */
static inline struct sr_float_env sr_float_env_enter(void) {
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    if ((uint32_t)fpcr != 0) __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return (struct sr_float_env){(uint32_t)fpcr};
}

static inline void sr_float_env_leave(struct sr_float_env env) {
    if (env.saved != 0) __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)env.saved) : "memory");
}
#else
static inline struct sr_float_env sr_float_env_enter(void) { return (struct sr_float_env){0}; }
static inline void sr_float_env_leave(struct sr_float_env env) { (void)env; }
#endif

#endif
