/* Reduction loops: dst = src[0] op src[1] op ... on plain memory, for every dtype and op, one set per
 * instruction set; copies, casts and the wire formats too. Owns the lists of dtypes, ops and wire formats. Knows
 * nothing of ranks, segments, sockets or Python. */
#ifndef SHMRING_KERNELS_H
#define SHMRING_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* The numbers travel in the fingerprint of a call: append, never reorder. */
enum sr_dtype {
    SR_BOOL, SR_I8, SR_U8, SR_I16, SR_U16, SR_I32, SR_U32, SR_I64, SR_U64,
    SR_F16, SR_BF16, SR_F32, SR_F64, SR_C64, SR_C128, SR_F8_E4M3FN, SR_F8_E5M2, SR_DTYPES
};
enum sr_op {
    SR_SUM, SR_PROD, SR_MIN, SR_MAX, SR_AVG, SR_BAND, SR_BOR, SR_BXOR, SR_LAND, SR_LOR, SR_LXOR, SR_OPS
};

extern const uint8_t sr_dtype_nbytes[SR_DTYPES];

/* Whether items are folded in wider accumulators, so that a partial result is not an item. */
static inline int sr_dtype_is_widened(int dtype) {
    return dtype == SR_F16 || dtype == SR_BF16 || dtype == SR_F8_E4M3FN || dtype == SR_F8_E5M2;
}

extern const char *const sr_dtype_name[SR_DTYPES]; /* NumPy's: "bool", "int8", ..., "float8_e5m2" */
extern const char *const sr_op_name[SR_OPS];       /* "sum", ..., "lxor" */

/* dst[d][i] = src[0][i] op src[1][i] op ... op src[nsrc-1][i], folded in that order, for every d < ndst.
 *
 * Bit d of `stream`, bit 31 from dst[31] on: dst[d] is written by streaming stores inside, in whole lines, and by
 * ordinary ones at its ragged edges; if any is, the kernel ends with its own store fence, as release alone does
 * not order them. Fastest where all streamed dsts lie alike within their lines, as slots and shared arrays do.
 * A dst may be the very same pointer as any src (in place); otherwise all are disjoint. Nothing needs to be
 * aligned. nsrc >= 1, ndst >= 1, count >= 0. `divisor`: SR_AVG divides the sum by it before the one rounding; the
 * others ignore it. 16/8-bit floats are folded in fp32 over all sources and rounded once. With one source the
 * logical ops still give 0 or 1, and SR_AVG still divides. */
typedef void sr_fold_fn(void *const *dst, int ndst, uint32_t stream, const void *const *src, int nsrc,
                        size_t count, uint32_t divisor);

/* Copies nbytes between disjoint places; stream != 0: streaming stores and a final fence, as above. */
typedef void sr_copy_fn(void *dst, const void *src, size_t nbytes, uint32_t stream);

/* Two such copies of the same length in one loop, all four places disjoint. */
typedef void sr_copy_two_fn(void *dst0, const void *src0, uint32_t stream0, void *dst1, const void *src1,
                            uint32_t stream1, size_t nbytes);

/* float32 from items of a widened dtype, exactly, and back to nearest even, rounding as the folds do (float8
 * overflows as in ml_dtypes). NaNs stay NaNs, with what fits of their payload. The two places are disjoint; nothing
 * needs to be aligned. The same bits with every instruction set, NaNs included. */
typedef void sr_widen_fn(float *dst, const void *src, size_t count);
typedef void sr_narrow_fn(void *dst, const float *src, size_t count);

/* What float32 may travel as between hosts. The numbers travel themselves: append, never reorder.
 *
 * SR_WIRE_INT8 goes in blocks that can be decoded alone: a float32 scale, then that many int8, the last block having
 * fewer. Scale: the largest magnitude of the block / 127 (but no less than 2^-126, and 127 scales never overflow); 0
 * for a block of zeros. Items: to nearest even, in [-127, 127]. What is decoded is off by no more than half a scale,
 * but for rounding in float32. A block with an infinity or a NaN has the scale NaN and decodes to NaNs. */
enum sr_wire_format { SR_WIRE_NATIVE, SR_WIRE_BF16, SR_WIRE_FP16, SR_WIRE_INT8, SR_WIRE_FORMATS };
enum { SR_WIRE_INT8_BLOCK = 256 }; /* items */

extern const char *const sr_wire_name[SR_WIRE_FORMATS]; /* "native", "bf16", "fp16", "int8" */

static inline size_t sr_encoded_nbytes(int format, size_t count) {
    if (format == SR_WIRE_NATIVE) return 4 * count;
    if (format == SR_WIRE_INT8) return count + 4 * (count / SR_WIRE_INT8_BLOCK + (count % SR_WIRE_INT8_BLOCK != 0));
    return 2 * count;
}

/* dst = what travels of src, sr_encoded_nbytes() of it. With a residual (of error feedback: count items, zeros at
 * first, the same ones with every call for the same src) what travels is y = src + residual, and the residual becomes y
 * minus what will be decoded. Infinities and NaNs travel as they are and large numbers overflow to infinities; there,
 * and in all of an int8 block that becomes NaNs, the residual is 0: an infinite one would spoil all later calls.
 *
 * Whoever must hold what it sent decodes that. All places are disjoint; nothing needs to be aligned. Pieces of src may
 * be encoded and decoded alone, if int8's begin at whole blocks. The same bits with every instruction set, but for the
 * NaN of src + residual where both are NaN, or infinities of different signs. */
typedef void sr_encode_fn(void *dst, float *residual_or_null, const float *src, size_t count);
typedef void sr_decode_fn(float *dst, const void *src, size_t count);

struct sr_kernels {
    const char *isa;
    sr_fold_fn *fold[SR_DTYPES][SR_OPS]; /* NULL where the op has no meaning for the dtype */
    sr_copy_fn *copy;
    sr_copy_two_fn *copy_two;
    sr_widen_fn *widen[SR_DTYPES]; /* NULL where sr_dtype_is_widened() says no; as in narrow */
    sr_narrow_fn *narrow[SR_DTYPES];
    sr_encode_fn *encode[SR_WIRE_FORMATS];
    sr_decode_fn *decode[SR_WIRE_FORMATS];
};

/* NULL or "": the best that this CPU and its operating system support. A name: that one, or NULL if it is unknown
 * or unsupported here. Asks the CPU anew (slow under a hypervisor): call it once and keep the result. */
const struct sr_kernels *sr_kernels_find(const char *isa);

/* The i-th name of those supported here, best first ("avx512", "avx2", "sse2" | "neon" | "scalar"), then NULL. */
const char *sr_kernels_isas(int i);

/* The caller's flush-to-zero, rounding and trap modes, set aside while kernels run: they promise IEEE defaults.
 * A register read and a compare when the modes are the default already. */
struct sr_float_env {
    uint32_t saved;
};

#if defined(__x86_64__)
/* MXCSR without its sticky exception flags: all traps masked, round to nearest, no FTZ, no DAZ. */
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
/* FPCR's default is all zero: round to nearest, no flush, no default NaN, no traps. */
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
