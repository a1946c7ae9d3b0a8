/* The items of each dtype: their type in memory, their accumulator, the conversions between the two, and the ops on
 * accumulators. All is scalar C without branches, so that a compiler can vectorise a loop over it. */
#ifndef SR_KERNELS_ITEM_H
#define SR_KERNELS_ITEM_H

#include <stdint.h>
#include <string.h>

/* A user's items may have any alignment, and may be aliased by pointers of any type. */
#define SR_ANYWHERE(T) typedef T T##_anywhere __attribute__((aligned(1), may_alias));
SR_ANYWHERE(uint8_t) SR_ANYWHERE(uint16_t) SR_ANYWHERE(uint32_t) SR_ANYWHERE(uint64_t)
SR_ANYWHERE(int8_t) SR_ANYWHERE(int16_t) SR_ANYWHERE(int32_t) SR_ANYWHERE(int64_t)
SR_ANYWHERE(float) SR_ANYWHERE(double)
typedef struct __attribute__((packed, may_alias)) { float re, im; } sr_c64, sr_c64_anywhere;
typedef struct __attribute__((packed, may_alias)) { double re, im; } sr_c128, sr_c128_anywhere;

/* ---- ops ---- (1u: two uint16 would be multiplied as int, and overflow) */
#define SR_ADD(a, b) ((a) + (b))
#define SR_MULTIPLY(a, b) ((a) * (b))
#define SR_MULTIPLY_INT(a, b) (1u * (a) * (b))
#define SR_LESSER(a, b) ((a) < (b) ? (a) : (b))
#define SR_GREATER(a, b) ((a) > (b) ? (a) : (b))
#define SR_AND(a, b) ((a) & (b))
#define SR_OR(a, b) ((a) | (b))
#define SR_XOR(a, b) ((a) ^ (b))

/* As np.minimum and np.maximum: NaN if one of the two is NaN. */
#define SR_LESSER_OR_NAN(a, b) ((((a) < (b)) | ((a) != (a))) ? (a) : (b))
#define SR_GREATER_OR_NAN(a, b) ((((a) > (b)) | ((a) != (a))) ? (a) : (b))

static inline sr_c64 sr_multiply_c64(sr_c64 a, sr_c64 b) {
    return (sr_c64){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
static inline sr_c128 sr_multiply_c128(sr_c128 a, sr_c128 b) {
    return (sr_c128){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

/* ---- from memory to the accumulator and back ---- */
#define SR_AS_IS(x) (x)

/* The truth of items for land, lor and lxor: an item is true if a bit of its dtype's mask is set. `parameter`, the
 * dtype, must be in scope. The accumulator is 1 or 0; `one` is the dtype's one. */
static const struct { uint64_t mask, one; } sr_truth[SR_DTYPES] = {
    [SR_U8] = {UINT8_MAX, 1},
    [SR_U16] = {UINT16_MAX, 1},
    [SR_U32] = {UINT32_MAX, 1},
    [SR_U64] = {UINT64_MAX, 1},
    [SR_F16] = {0x7fff, 0x3c00},
    [SR_BF16] = {0x7fff, 0x3f80},
    [SR_F32] = {0x7fffffff, 0x3f800000},
    [SR_F64] = {INT64_MAX, 0x3ff0000000000000},
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    [SR_C64] = {0x7fffffff7fffffff, 0x3f800000},
#else
    [SR_C64] = {0x7fffffff7fffffff, 0x3f80000000000000},
#endif
    [SR_F8_E4M3FN] = {0x7f, 0x38},
    [SR_F8_E5M2] = {0x7f, 0x3c},
};
#define SR_IS_TRUE(x) (((x) & (__typeof__(x))sr_truth[parameter].mask) != 0)
#define SR_ONE(x) ((x) * (__typeof__(x))sr_truth[parameter].one)
#define SR_IS_TRUE_C128(x) (((x).re != 0) | ((x).im != 0))
#define SR_ONE_C128(x) ((sr_c128){(x) ? 1 : 0, 0})

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

static inline float sr_widen_bf16(uint32_t x) { return sr_float_of(x << 16); }

static inline uint32_t sr_narrow_bf16(float x) {
    uint32_t bits = sr_bits_of(x);
    uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1);
    return (x != x ? bits | 0x400000u : rounded) >> 16;
}

/* The parameters in which the other small floats differ. */
struct sr_small_float {
    int mantissa;  /* explicit bits */
    int bias;
    uint32_t sign; /* the sign bit */
    uint32_t top;  /* the least magnitude that is not finite: infinity, or NaN if the format has no infinity */
    uint32_t nan;  /* the magnitude of the quiet NaN */
};
#define SR_SMALL_F16 ((struct sr_small_float){10, 15, 0x8000, 0x7c00, 0x7e00})
#define SR_SMALL_E5M2 ((struct sr_small_float){2, 15, 0x80, 0x7c, 0x7e})
#define SR_SMALL_E4M3FN ((struct sr_small_float){3, 7, 0x80, 0x7f, 0x7f})

static inline float sr_widen(uint32_t bits, const struct sr_small_float f) {
    int drop = 23 - f.mantissa;
    uint32_t magnitude = bits & (f.sign - 1);
    uint32_t sign = (bits & f.sign) * (0x80000000u / f.sign);
    float ulp = sr_float_of((uint32_t)(128 - f.bias - f.mantissa) << 23); /* of the subnormals */
    uint32_t subnormal = sr_bits_of((float)(int32_t)magnitude * ulp);
    uint32_t normal = (magnitude << drop) + ((uint32_t)(127 - f.bias) << 23);
    uint32_t special = f.top == f.nan ? 0x7fc00000u : (magnitude << drop) | 0x7f800000u;
    if (f.top != f.nan) special |= (uint32_t)(magnitude > f.top) << 22; /* NaNs become quiet, as with F16C */
    uint32_t wide = magnitude < (1u << f.mantissa) ? subnormal : normal;
    wide = magnitude >= f.top ? special : wide;
    return sr_float_of(wide | sign);
}

/* Round to nearest even. A value that rounds beyond the largest finite number becomes `top`, as in ml_dtypes. */
static inline uint32_t sr_narrow(float value, const struct sr_small_float f) {
    int drop = 23 - f.mantissa;
    uint32_t rebias = (uint32_t)(127 - f.bias) << 23;
    uint32_t bits = sr_bits_of(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t sign = (bits >> 31) * f.sign;
    uint32_t half = (1u << (drop - 1)) - 1 + ((magnitude >> drop) & 1);
    uint32_t normal = (magnitude - rebias + half) >> drop;
    normal = normal > f.top ? f.top : normal;
    /* A float whose last bit has the weight of the smallest subnormal: adding it rounds to multiples of that weight. */
    uint32_t coarse = (uint32_t)(151 - f.bias - f.mantissa) << 23;
    uint32_t subnormal = sr_bits_of(sr_float_of(magnitude) + sr_float_of(coarse)) - coarse;
    uint32_t nan = f.nan | (f.top == f.nan ? 0 : (magnitude >> drop) & (f.sign - 1));
    uint32_t small = magnitude < rebias + (1u << 23) ? subnormal : normal;
    small = magnitude > 0x7f800000u ? nan : small;
    return small | sign;
}

static inline float sr_widen_f16(uint32_t x) { return sr_widen(x, SR_SMALL_F16); }
static inline float sr_widen_e5m2(uint32_t x) { return sr_widen(x, SR_SMALL_E5M2); }
static inline float sr_widen_e4m3fn(uint32_t x) { return sr_widen(x, SR_SMALL_E4M3FN); }
static inline uint32_t sr_narrow_f16(float x) { return sr_narrow(x, SR_SMALL_F16); }
static inline uint32_t sr_narrow_e5m2(float x) { return sr_narrow(x, SR_SMALL_E5M2); }
static inline uint32_t sr_narrow_e4m3fn(float x) { return sr_narrow(x, SR_SMALL_E4M3FN); }

/* ---- wire formats ---- */

/* The residual of an infinity or a NaN is 0. */
static inline float sr_finite_or_zero(float x) { return (sr_bits_of(x) & 0x7fffffffu) < 0x7f800000u ? x : 0; }

/* Added to a float32 of magnitude below 2^22, this constant leaves the nearest integer (ties to even) in the last bits
 * of the sum. It replaces a conversion, whose result C does not define for a NaN. */
#define SR_SHIFT_TO_INTEGER 0x1.8p23f

/* Return the scale of a block whose largest magnitude has these bits. Below `least`, a magnitude could be more than 127
 * scales, since subnormals are coarse. With `greatest`, 127 scales are just finite. In between, a magnitude times the
 * inverse of the scale rounds to at most 127. */
static inline float sr_int8_scale(uint32_t magnitude) {
    const float least = 0x1p-126f, greatest = 0x1.020406p121f;
    if (magnitude >= 0x7f800000u) return sr_float_of(0x7fc00000u);
    if (magnitude == 0) return 0;
    const float scale = sr_float_of(magnitude) / 127;
    return scale < least ? least : scale > greatest ? greatest : scale;
}

/* SR_AVG: `parameter`, the divisor, must be in scope. */
#define SR_DIVIDED_F32(x) ((x) / (float)parameter)
#define SR_DIVIDED_F64(x) ((x) / (double)parameter)

#endif
