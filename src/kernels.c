/* The lists of dtypes and ops, the element arithmetic, the table for each instruction set, and the choice among
 * them. Knows nothing of ranks, segments or Python. Build with -ffp-contract=off: no result may be fused. */
#include "kernels.h"

#include <float.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "results must not depend on excess precision"
#endif

const uint8_t sr_dtype_nbytes[SR_DTYPES] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16, 1, 1};

const char *const sr_dtype_name[SR_DTYPES] = {
    "bool",    "int8",     "uint8",   "int16",   "uint16",    "int32",      "uint32",        "int64",       "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
};

const char *const sr_op_name[SR_OPS] = {"sum",  "prod", "min",  "max",  "avg", "band",
                                        "bor",  "bxor", "land", "lor",  "lxor"};

/* ---- small floats: S sign bit, exponent, M mantissa bits, bias B; all arithmetic on 32-bit lanes ---- */

static inline float sr_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t sr_bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct sr_small_float {
    int mantissa;      /* explicit bits */
    int bias;
    uint32_t sign;     /* the sign bit */
    uint32_t top;      /* the smallest magnitude that is not finite: infinity, or NaN where there is none */
    uint32_t nan;      /* the magnitude of the NaN that is written */
};
static const struct sr_small_float sr_f16 = {10, 15, 0x8000, 0x7c00, 0x7e00};
static const struct sr_small_float sr_e5m2 = {2, 15, 0x80, 0x7c, 0x7e};
static const struct sr_small_float sr_e4m3fn = {3, 7, 0x80, 0x7f, 0x7f};

static inline float sr_widen(uint32_t bits, struct sr_small_float f) {
    uint32_t magnitude = bits & (f.sign - 1);
    uint32_t sign = (bits & f.sign) ? 0x80000000u : 0;
    uint32_t normal = (magnitude << (23 - f.mantissa)) + ((uint32_t)(127 - f.bias) << 23);
    uint32_t special = (magnitude << (23 - f.mantissa)) | 0x7f800000u;
    float ulp = sr_float_of((uint32_t)(127 + 1 - f.bias - f.mantissa) << 23);
    uint32_t subnormal = sr_bits_of((float)(int32_t)magnitude * ulp);
    uint32_t wide = magnitude < (1u << f.mantissa) ? subnormal : normal;
    if (f.top == f.nan)
        wide = magnitude == f.nan ? 0x7fc00000u : wide;
    else
        wide = magnitude >= f.top ? special : wide;
    return sr_float_of(wide | sign);
}

static inline uint32_t sr_narrow(float value, struct sr_small_float f) {
    int drop = 23 - f.mantissa;
    uint32_t bits = sr_bits_of(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t sign = (bits >> 31) ? f.sign : 0;
    uint32_t rebias = (uint32_t)(127 - f.bias) << 23;
    uint32_t normal = (magnitude - rebias + ((1u << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop;
    /* Adding a float whose last bit weighs as much as the smallest subnormal rounds to a multiple of that. */
    uint32_t magic = (uint32_t)(127 + 23 + 1 - f.bias - f.mantissa) << 23;
    uint32_t subnormal = sr_bits_of(sr_float_of(magnitude) + sr_float_of(magic)) - magic;
    uint32_t small = magnitude < ((uint32_t)(127 + 1 - f.bias) << 23) ? subnormal : normal;
    small = magnitude >= rebias + (f.top << drop) ? f.top : small; /* also keeps `normal` from running over */
    small = small > f.top ? f.top : small;
    small = magnitude > 0x7f800000u ? f.nan : small;
    return small | sign;
}

static inline float sr_widen_f16(uint16_t x) { return sr_widen(x, sr_f16); }
static inline uint16_t sr_narrow_f16(float x) { return (uint16_t)sr_narrow(x, sr_f16); }
static inline float sr_widen_e5m2(uint8_t x) { return sr_widen(x, sr_e5m2); }
static inline uint8_t sr_narrow_e5m2(float x) { return (uint8_t)sr_narrow(x, sr_e5m2); }
static inline float sr_widen_e4m3fn(uint8_t x) { return sr_widen(x, sr_e4m3fn); }
static inline uint8_t sr_narrow_e4m3fn(float x) { return (uint8_t)sr_narrow(x, sr_e4m3fn); }
static inline float sr_widen_bf16(uint16_t x) { return sr_float_of((uint32_t)x << 16); }
static inline uint16_t sr_narrow_bf16(float x) {
    uint32_t bits = sr_bits_of(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

typedef struct { float re, im; } sr_c64;
typedef struct { double re, im; } sr_c128;

#define SUM(a, b) ((a) + (b))
#define PROD(a, b) ((a) * (b))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define FMIN(a, b) (((a) < (b)) | ((a) != (a)) ? (a) : (b))
#define FMAX(a, b) (((a) > (b)) | ((a) != (a)) ? (a) : (b))
#define SAME(a) (a)
#define TRUTH(a) ((a) != 0)
#define CTRUTH(a) (((a).re != 0) | ((a).im != 0))
#define MAGNITUDE16(a) (((a) & 0x7fff) != 0)
#define MAGNITUDE8(a) (((a) & 0x7f) != 0)
#define DIVIDED(a) ((a) / divisor)
static inline sr_c64 sr_sum_c64(sr_c64 a, sr_c64 b) { return (sr_c64){a.re + b.re, a.im + b.im}; }
static inline sr_c128 sr_sum_c128(sr_c128 a, sr_c128 b) { return (sr_c128){a.re + b.re, a.im + b.im}; }
static inline sr_c64 sr_prod_c64(sr_c64 a, sr_c64 b) {
    return (sr_c64){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
static inline sr_c128 sr_prod_c128(sr_c128 a, sr_c128 b) {
    return (sr_c128){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

#define FOLD(name, T, A, LOAD, OP, STORE)                                                                     \
    static void name(void *const *dst, int ndst, uint32_t stream, const void *const *src, int nsrc,           \
                     size_t count, uint32_t whole) {                                                          \
        (void)stream;                                                                                         \
        typedef float divisor_type;                                                                           \
        double divisor = whole;                                                                               \
        (void)divisor, (void)sizeof(divisor_type);                                                            \
        for (size_t i = 0; i < count; i++) {                                                                  \
            T x;                                                                                              \
            memcpy(&x, (const T *)src[0] + i, sizeof x);                                                      \
            A acc = LOAD(x);                                                                                  \
            for (int s = 1; s < nsrc; s++) {                                                                  \
                memcpy(&x, (const T *)src[s] + i, sizeof x);                                                  \
                acc = (A)OP(acc, (A)LOAD(x));                                                                 \
            }                                                                                                 \
            x = STORE(acc);                                                                                   \
            for (int d = 0; d < ndst; d++) memcpy((T *)dst[d] + i, &x, sizeof x);                             \
        }                                                                                                     \
    }
#define F32_DIVIDED(a) ((a) / (float)divisor)
#define F16_DIVIDED(a) sr_narrow_f16(F32_DIVIDED(a))
#define BF16_DIVIDED(a) sr_narrow_bf16(F32_DIVIDED(a))
#define E4M3FN_DIVIDED(a) sr_narrow_e4m3fn(F32_DIVIDED(a))
#define E5M2_DIVIDED(a) sr_narrow_e5m2(F32_DIVIDED(a))
#define C64_DIVIDED(a) ((sr_c64){(a).re / (float)divisor, (a).im / (float)divisor})
#define C128_DIVIDED(a) ((sr_c128){(a).re / divisor, (a).im / divisor})
#define ONE_F16(a) ((a) ? 0x3c00 : 0)
#define ONE_BF16(a) ((a) ? 0x3f80 : 0)
#define ONE_E4M3FN(a) ((a) ? 0x38 : 0)
#define ONE_E5M2(a) ((a) ? 0x3c : 0)
#define ONE_C64(a) ((sr_c64){(a), 0})
#define ONE_C128(a) ((sr_c128){(a), 0})

#define LOGICAL(tag, T, TRUE, ONE)                                                                            \
    FOLD(tag##_land, T, int, TRUE, AND, ONE) FOLD(tag##_lor, T, int, TRUE, OR, ONE)                           \
    FOLD(tag##_lxor, T, int, TRUE, XOR, ONE)
#define UINT(tag, T)                                                                                          \
    FOLD(tag##_sum, T, T, SAME, SUM, SAME) FOLD(tag##_prod, T, T, SAME, PROD, SAME)                           \
    FOLD(tag##_band, T, T, SAME, AND, SAME) FOLD(tag##_bor, T, T, SAME, OR, SAME)                             \
    FOLD(tag##_bxor, T, T, SAME, XOR, SAME) FOLD(tag##_min, T, T, SAME, MIN, SAME)                            \
    FOLD(tag##_max, T, T, SAME, MAX, SAME) LOGICAL(tag, T, TRUTH, SAME)
#define INT(tag, T) FOLD(tag##_min, T, T, SAME, MIN, SAME) FOLD(tag##_max, T, T, SAME, MAX, SAME)
#define FLOAT(tag, T, A, LOAD, STORE, AVG, TRUE, ONE)                                                         \
    FOLD(tag##_sum, T, A, LOAD, SUM, STORE) FOLD(tag##_prod, T, A, LOAD, PROD, STORE)                         \
    FOLD(tag##_min, T, A, LOAD, FMIN, STORE) FOLD(tag##_max, T, A, LOAD, FMAX, STORE)                         \
    FOLD(tag##_avg, T, A, LOAD, SUM, AVG) LOGICAL(tag, T, TRUE, ONE)
#define COMPLEX(tag)                                                                                          \
    FOLD(tag##_sum, sr_##tag, sr_##tag, SAME, sr_sum_##tag, SAME)                                             \
    FOLD(tag##_prod, sr_##tag, sr_##tag, SAME, sr_prod_##tag, SAME)

UINT(u8, uint8_t) UINT(u16, uint16_t) UINT(u32, uint32_t) UINT(u64, uint64_t)
INT(i8, int8_t) INT(i16, int16_t) INT(i32, int32_t) INT(i64, int64_t)
FLOAT(f32, float, float, SAME, SAME, F32_DIVIDED, TRUTH, SAME)
FLOAT(f64, double, double, SAME, SAME, DIVIDED, TRUTH, SAME)
FLOAT(f16, uint16_t, float, sr_widen_f16, sr_narrow_f16, F16_DIVIDED, MAGNITUDE16, ONE_F16)
FLOAT(bf16, uint16_t, float, sr_widen_bf16, sr_narrow_bf16, BF16_DIVIDED, MAGNITUDE16, ONE_BF16)
FLOAT(e4m3fn, uint8_t, float, sr_widen_e4m3fn, sr_narrow_e4m3fn, E4M3FN_DIVIDED, MAGNITUDE8, ONE_E4M3FN)
FLOAT(e5m2, uint8_t, float, sr_widen_e5m2, sr_narrow_e5m2, E5M2_DIVIDED, MAGNITUDE8, ONE_E5M2)
COMPLEX(c64) COMPLEX(c128)
FOLD(c64_avg, sr_c64, sr_c64, SAME, sr_sum_c64, C64_DIVIDED)
FOLD(c128_avg, sr_c128, sr_c128, SAME, sr_sum_c128, C128_DIVIDED)
LOGICAL(c64, sr_c64, CTRUTH, ONE_C64) LOGICAL(c128, sr_c128, CTRUTH, ONE_C128)

static void sr_copy_plain(void *dst, const void *src, size_t nbytes, uint32_t stream) {
    (void)stream;
    memcpy(dst, src, nbytes);
}

#define ROW_LOGICAL(tag) [SR_LAND] = tag##_land, [SR_LOR] = tag##_lor, [SR_LXOR] = tag##_lxor
#define ROW_INT(u, i)                                                                                         \
    {[SR_SUM] = u##_sum, [SR_PROD] = u##_prod, [SR_MIN] = i##_min, [SR_MAX] = i##_max, [SR_BAND] = u##_band,  \
     [SR_BOR] = u##_bor, [SR_BXOR] = u##_bxor, ROW_LOGICAL(u)}
#define ROW_FLOAT(tag)                                                                                        \
    {[SR_SUM] = tag##_sum, [SR_PROD] = tag##_prod, [SR_MIN] = tag##_min, [SR_MAX] = tag##_max,                \
     [SR_AVG] = tag##_avg, ROW_LOGICAL(tag)}
#define ROW_COMPLEX(tag) {[SR_SUM] = tag##_sum, [SR_PROD] = tag##_prod, [SR_AVG] = tag##_avg, ROW_LOGICAL(tag)}

static const struct sr_kernels sr_scalar = {
    "scalar",
    {
        [SR_BOOL] = {[SR_SUM] = u8_lor, [SR_PROD] = u8_land, [SR_MIN] = u8_land, [SR_MAX] = u8_lor,
                     [SR_BAND] = u8_land, [SR_BOR] = u8_lor, [SR_BXOR] = u8_lxor, ROW_LOGICAL(u8)},
        [SR_I8] = ROW_INT(u8, i8), [SR_U8] = ROW_INT(u8, u8), [SR_I16] = ROW_INT(u16, i16),
        [SR_U16] = ROW_INT(u16, u16), [SR_I32] = ROW_INT(u32, i32), [SR_U32] = ROW_INT(u32, u32),
        [SR_I64] = ROW_INT(u64, i64), [SR_U64] = ROW_INT(u64, u64), [SR_F16] = ROW_FLOAT(f16),
        [SR_BF16] = ROW_FLOAT(bf16), [SR_F32] = ROW_FLOAT(f32), [SR_F64] = ROW_FLOAT(f64),
        [SR_C64] = ROW_COMPLEX(c64), [SR_C128] = ROW_COMPLEX(c128), [SR_F8_E4M3FN] = ROW_FLOAT(e4m3fn),
        [SR_F8_E5M2] = ROW_FLOAT(e5m2),
    },
    sr_copy_plain,
};

const char *sr_kernels_isas(int i) { return i == 0 ? sr_scalar.isa : NULL; }

const struct sr_kernels *sr_kernels_find(const char *isa) {
    if (isa == NULL || isa[0] == '\0' || strcmp(isa, sr_scalar.isa) == 0) return &sr_scalar;
    return NULL;
}
