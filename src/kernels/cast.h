/* The casts and the wire formats. loop.h includes this file, which uses its helpers. As in the folds, a block of narrow
 * items is one vector register and goes through the same arithmetic; unlike in a fold, items must keep their order.
 * bench/engine/bench_kernels.py --casts measures the result. */

/* Run `call` with i and n in scope, for n items from item i on: whole blocks of `step` first, then eights, then ones.
   */
#define SR_BY_BLOCKS(step, count, call)                                                                      \
    do {                                                                                                     \
        size_t i = 0;                                                                                        \
        SR_ROLLED for (; i + (step) <= (count); i += (step)) {                                               \
            const size_t n = (step);                                                                         \
            call;                                                                                            \
        }                                                                                                    \
        SR_ROLLED for (; (step) > 8 && i + 8 <= (count); i += 8) {                                           \
            const size_t n = 8;                                                                              \
            call;                                                                                            \
        }                                                                                                    \
        SR_ROLLED for (; i < (count); i++) {                                                                 \
            const size_t n = 1;                                                                              \
            call;                                                                                            \
        }                                                                                                    \
    } while (0)

/* Items become words, and words become items, in separate loops. In one loop GCC 12 compares bytes in one place and
 * words in another, and spends half of the time moving masks from one width to the other. `wide` needs no alignment. */
#define SR_IN_ORDER(tag, T)                                                                                  \
    SR_INLINE void SR_OF_ISA(tag##_widen_in_order)(void *wide, const void *items, size_t count) {            \
        uint32_t words[SR_VECTOR_NBYTES / sizeof(T)];                                                        \
        float_anywhere *const to = wide;                                                                     \
        SR_VECTOR for (size_t i = 0; i < count; i++) words[i] = ((const T##_anywhere *)items)[i];            \
        SR_VECTOR for (size_t i = 0; i < count; i++) to[i] = sr_widen_##tag(words[i]);                       \
    }                                                                                                        \
    SR_INLINE void SR_OF_ISA(tag##_narrow_in_order)(void *items, const void *wide, size_t count) {           \
        uint32_t words[SR_VECTOR_NBYTES / sizeof(T)];                                                        \
        const float_anywhere *const from = wide;                                                             \
        SR_VECTOR for (size_t i = 0; i < count; i++) words[i] = sr_narrow_##tag(from[i]);                    \
        SR_VECTOR for (size_t i = 0; i < count; i++)((T##_anywhere *)items)[i] = (T)words[i];                \
    }

/* The float16 instructions keep the order. */
#if defined(SR_F16C) || defined(__aarch64__)
SR_INLINE void SR_OF_ISA(f16_widen_in_order)(void *wide, const void *items, size_t count) {
    SR_OF_ISA(f16_widen)(wide, items, count);
}
SR_INLINE void SR_OF_ISA(f16_narrow_in_order)(void *items, const void *wide, size_t count) {
    SR_OF_ISA(f16_narrow)(items, wide, count);
}
#else
SR_IN_ORDER(f16, uint16_t)
#endif
SR_IN_ORDER(bf16, uint16_t)
SR_IN_ORDER(e4m3fn, uint8_t)
SR_IN_ORDER(e5m2, uint8_t)

#define SR_CAST(tag, T)                                                                                      \
    SR_TARGET static void SR_OF_ISA(widen_##tag)(float *dst, const void *src, size_t count) {                \
        const T##_anywhere *const from = src;                                                                \
        float_anywhere *const to = dst;                                                                      \
        SR_BY_BLOCKS(SR_VECTOR_NBYTES / sizeof(T), count,                                                    \
                     SR_OF_ISA(tag##_widen_in_order)(to + i, from + i, n));                                  \
    }                                                                                                        \
    SR_TARGET static void SR_OF_ISA(narrow_##tag)(void *dst, const float *src, size_t count) {               \
        const float_anywhere *const from = src;                                                              \
        T##_anywhere *const to = dst;                                                                        \
        SR_BY_BLOCKS(SR_VECTOR_NBYTES / sizeof(T), count,                                                    \
                     SR_OF_ISA(tag##_narrow_in_order)(to + i, from + i, n));                                 \
    }

SR_CAST(f16, uint16_t)
SR_CAST(bf16, uint16_t)
SR_CAST(e4m3fn, uint8_t)
SR_CAST(e5m2, uint8_t)

/* ---- wire formats ---- */

#define SR_ENCODE(tag, T)                                                                                    \
    SR_INLINE void SR_OF_ISA(tag##_encode_block)(void *dst, float_anywhere *residual, const float_anywhere *src, \
                                                 size_t count) {                                             \
        float whole[SR_VECTOR_NBYTES / sizeof(T)], sent[SR_VECTOR_NBYTES / sizeof(T)];                       \
        char items[SR_VECTOR_NBYTES] __attribute__((aligned(64)));                                           \
        SR_VECTOR for (size_t i = 0; i < count; i++) whole[i] = src[i] + residual[i];                        \
        SR_OF_ISA(tag##_narrow_in_order)(items, whole, count);                                               \
        SR_OF_ISA(tag##_widen_in_order)(sent, items, count);                                                 \
        SR_VECTOR for (size_t i = 0; i < count; i++) residual[i] = sr_finite_or_zero(whole[i] - sent[i]);    \
        memcpy(dst, items, count * sizeof(T));                                                               \
    }                                                                                                        \
    SR_TARGET static void SR_OF_ISA(encode_##tag)(void *dst, float *residual, const float *src, size_t count) { \
        if (residual == NULL) {                                                                              \
            SR_OF_ISA(narrow_##tag)(dst, src, count);                                                        \
            return;                                                                                          \
        }                                                                                                    \
        const float_anywhere *const from = src;                                                              \
        float_anywhere *const left = residual;                                                               \
        T##_anywhere *const to = dst;                                                                        \
        SR_BY_BLOCKS(SR_VECTOR_NBYTES / sizeof(T), count,                                                    \
                     SR_OF_ISA(tag##_encode_block)(to + i, left + i, from + i, n));                          \
    }

SR_ENCODE(f16, uint16_t)
SR_ENCODE(bf16, uint16_t)

/* The native format loses nothing, so the new residual is 0. */
SR_TARGET static void SR_OF_ISA(encode_native)(void *dst, float *residual, const float *src, size_t count) {
    if (residual == NULL) {
        SR_OF_ISA(sr_copy)(dst, src, count * sizeof(float), 0);
        return;
    }
    const float_anywhere *restrict const from = src;
    float_anywhere *restrict const left = residual, *restrict const to = dst;
    SR_VECTOR for (size_t i = 0; i < count; i++) {
        to[i] = from[i] + left[i];
        left[i] = 0;
    }
}

SR_TARGET static void SR_OF_ISA(decode_native)(float *dst, const void *src, size_t count) {
    SR_OF_ISA(sr_copy)(dst, src, count * sizeof(float), 0);
}

/* It is a compile-time constant whether `residual` is NULL; so is count, except for the last block. */
SR_INLINE void SR_OF_ISA(int8_encode_block)(char *restrict dst, float_anywhere *restrict residual,
                                            const float_anywhere *restrict src, size_t count) {
    float whole[SR_WIRE_INT8_BLOCK];
    uint8_t *restrict const items = (uint8_t *)dst + sizeof(float);
    int32_t most = 0; /* signed: SSE2 has no comparison of unsigned words */
    SR_VECTOR for (size_t i = 0; i < count; i++) {
        whole[i] = residual != NULL ? src[i] + residual[i] : src[i];
        const int32_t magnitude = (int32_t)(sr_bits_of(whole[i]) & 0x7fffffffu);
        most = SR_GREATER(magnitude, most);
    }
    const float scale = sr_int8_scale((uint32_t)most);
    memcpy(dst, &scale, sizeof scale);
    if (!(scale > 0)) {
        memset(items, 0, count);
        if (residual != NULL) memset(residual, 0, count * sizeof(float));
        return;
    }
    const float inverse = 1 / scale;
    SR_VECTOR for (size_t i = 0; i < count; i++) {
        const float shifted = whole[i] * inverse + SR_SHIFT_TO_INTEGER;
        items[i] = (uint8_t)sr_bits_of(shifted);
        if (residual != NULL) residual[i] = whole[i] - (shifted - SR_SHIFT_TO_INTEGER) * scale;
    }
}

SR_INLINE void SR_OF_ISA(int8_decode_block)(float_anywhere *restrict dst, const char *restrict src, size_t count) {
    const int8_t *restrict const items = (const int8_t *)src + sizeof(float);
    float scale;
    memcpy(&scale, src, sizeof scale);
    SR_VECTOR for (size_t i = 0; i < count; i++) dst[i] = (float)items[i] * scale;
}

#define SR_INT8_BLOCK_NBYTES (sizeof(float) + SR_WIRE_INT8_BLOCK)

SR_TARGET static void SR_OF_ISA(encode_int8)(void *dst, float *residual, const float *src, size_t count) {
    const float_anywhere *from = src;
    float_anywhere *left = residual;
    char *to = dst;
    for (; count >= SR_WIRE_INT8_BLOCK; count -= SR_WIRE_INT8_BLOCK) {
        if (left != NULL)
            SR_OF_ISA(int8_encode_block)(to, left, from, SR_WIRE_INT8_BLOCK), left += SR_WIRE_INT8_BLOCK;
        else
            SR_OF_ISA(int8_encode_block)(to, NULL, from, SR_WIRE_INT8_BLOCK);
        to += SR_INT8_BLOCK_NBYTES, from += SR_WIRE_INT8_BLOCK;
    }
    if (count != 0 && left != NULL)
        SR_OF_ISA(int8_encode_block)(to, left, from, count);
    else if (count != 0)
        SR_OF_ISA(int8_encode_block)(to, NULL, from, count);
}

SR_TARGET static void SR_OF_ISA(decode_int8)(float *dst, const void *src, size_t count) {
    const char *from = src;
    float_anywhere *to = dst;
    for (; count >= SR_WIRE_INT8_BLOCK; count -= SR_WIRE_INT8_BLOCK) {
        SR_OF_ISA(int8_decode_block)(to, from, SR_WIRE_INT8_BLOCK);
        to += SR_WIRE_INT8_BLOCK, from += SR_INT8_BLOCK_NBYTES;
    }
    if (count != 0) SR_OF_ISA(int8_decode_block)(to, from, count);
}
