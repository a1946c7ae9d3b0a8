/* The reduction loops, in plain C. kernels.c includes this file once for each instruction set, and defines before:
 * SR_ISA (the suffix of the names), SR_TARGET (a function attribute), SR_VECTOR_NBYTES, SR_PUT and SR_STREAM (block
 * stores), and SR_SHAPES: 1 if the most frequent numbers of sources and destinations have loops of their own.
 *
 * A block is a cache line of output; for widened items, and without shapes, it is one vector register. A run proceeds
 * block by block: load, widen and fold the items of all sources, narrow them, and write the block to every destination
 * by ordinary or streaming stores. Nothing goes through memory in between. A loop over a block has constant length, and
 * compilers make a few vector instructions of it.
 * bench/engine/bench_kernels.py measures the result. */

#define SR_JOIN_(stem, isa) stem##_##isa
#define SR_JOIN(stem, isa) SR_JOIN_(stem, isa)
#define SR_OF_ISA(stem) SR_JOIN(stem, SR_ISA)
#ifndef SR_OTHER
#define SR_OTHER SR_OF_ISA
#endif
#ifdef __OPTIMIZE__
#define SR_INLINE SR_TARGET static inline __attribute__((always_inline))
#else
#define SR_INLINE SR_TARGET static inline /* debug and sanitizer builds would take minutes */
#endif
#define SR_RUN SR_TARGET static __attribute__((noinline, unused)) /* unused: see SR_OTHER */

SR_INLINE void SR_OF_ISA(sr_put)(char *dst, const char *block, size_t nbytes, int streaming) {
    if (nbytes % SR_VECTOR_NBYTES != 0) {
        memcpy(dst, block, nbytes);
        return;
    }
    for (size_t at = 0; at < nbytes; at += SR_VECTOR_NBYTES) {
        if (streaming)
            SR_STREAM(dst + at, block + at);
        else
            SR_PUT(dst + at, block + at);
    }
}

/* A line that is streamed in parts costs several times as much as a whole one, so the edges are written by memcpy. The
 * next pages are touched a page ahead, since a processor looks up the address of a page only when it gets there: a
 * gather of 64 MiB in shared arrays, which have pages of 4 KiB, takes 0.7 of the time (bench/peers/matrix.py). */
SR_TARGET static void SR_OF_ISA(sr_stream)(char *dst, const char *src, size_t nbytes) {
    const size_t head = sr_lesser(-(uintptr_t)dst & (SR_LINE_NBYTES - 1), nbytes);
    const size_t end = nbytes - (nbytes - head) % SR_LINE_NBYTES;
    memcpy(dst, src, head);
    SR_ROLLED for (size_t at = head, page; at < end; at = page) {
        page = sr_lesser(at + SR_PAGE_NBYTES, end);
        if (page < end) {
            __builtin_prefetch(src + page);
            __builtin_prefetch(dst + page);
        }
        for (; at < page; at += SR_VECTOR_NBYTES) SR_STREAM(dst + at, src + at);
    }
    memcpy(dst + end, src + end, nbytes - end);
}

SR_INLINE size_t SR_OF_ISA(sr_block_nbytes)(const struct sr_item item) {
    return SR_SHAPES && item.acc_nbytes <= item.nbytes ? SR_LINE_NBYTES : SR_VECTOR_NBYTES;
}

/* Fold count items from item i on, at most one block. `known`: w.nsrc is a compile-time constant from 2 to
 * SR_FUSED_SOURCES, and w.from is NULL. */
SR_INLINE void SR_OF_ISA(sr_block)(const struct sr_work w, const struct sr_item item, size_t i,
                                   size_t count, int known) {
    char acc[SR_VECTOR_NBYTES * 4] __attribute__((aligned(64)));
    char block[SR_LINE_NBYTES] __attribute__((aligned(64)));
    const size_t at = w.src_offset + i * item.nbytes;
    if (known) {
        item.load_two(acc, w.src[0] + at, w.src[1] + at, count, w.parameter);
        if (w.nsrc > 2) item.add(acc, w.src[2] + at, count, w.parameter);
        if (w.nsrc > 3) item.add(acc, w.src[3] + at, count, w.parameter);
        if (w.nsrc > 4) item.add(acc, w.src[4] + at, count, w.parameter);
    } else {
        int s = 0;
        if (w.from != NULL)
            memcpy(acc, w.from + i * item.acc_nbytes, count * item.acc_nbytes);
        else if (w.nsrc > 1 && !item.is_loaded)
            item.load_two(acc, w.src[0] + at, w.src[1] + at, count, w.parameter), s = 2;
        else
            item.load(acc, w.src[0] + at, count, w.parameter), s = 1;
        SR_ROLLED for (; s < w.nsrc; s++) {
            SR_KEEP_NEST();
            item.add(acc, w.src[s] + at, count, w.parameter);
        }
    }
    if (w.to != NULL) {
        memcpy(w.to + i * item.acc_nbytes, acc, count * item.acc_nbytes);
        return;
    }
    if (item.store != NULL) item.store(block, acc, count, w.parameter);
    const char *const result = item.store != NULL ? block : acc;
    int32_t stream = (int32_t)w.stream; /* signed: the shift keeps bit 31 for dst[31] and all after it */
    SR_ROLLED for (int d = 0; d < w.ndst; d++, stream >>= 1)
        SR_OF_ISA(sr_put)(w.dst[d] + w.dst_offset + i * item.nbytes, result, count * item.nbytes, stream & 1);
}

/* Fold all whole blocks, and return the number of items that are done. `by_registers`: each block is folded register by
 * register. */
SR_INLINE size_t SR_OF_ISA(sr_blocks)(const struct sr_work w, const struct sr_item item, int known,
                                      int by_registers) {
    const size_t step = SR_OF_ISA(sr_block_nbytes)(item) / item.nbytes;
    const size_t part = by_registers ? SR_VECTOR_NBYTES / item.nbytes : step;
    size_t i = 0;
    SR_ROLLED for (; i + step <= w.count; i += step) {
        SR_OF_ISA(sr_block)(w, item, i, part, known);
        if (step > part) SR_OF_ISA(sr_block)(w, item, i + part, part, known);
        if (step > 2 * part) SR_OF_ISA(sr_block)(w, item, i + 2 * part, part, known);
        if (step > 2 * part) SR_OF_ISA(sr_block)(w, item, i + 3 * part, part, known);
    }
    return i;
}

/* Fold the remaining items in whole blocks, then in at most one block of a half, of a quarter, and so on: a dozen items
 * take a few nanoseconds. There is a whole block only if an instruction set with longer blocks leaves its remainder to
 * this one. Halves would be much code for little gain for widened items, which go by eights and ones, and without
 * shapes, where all go by ones. */
SR_INLINE void SR_OF_ISA(sr_remainder)(const struct sr_work w, const struct sr_item item, size_t i) {
    const size_t step = SR_OF_ISA(sr_block_nbytes)(item) / item.nbytes;
    SR_ROLLED for (; SR_SHAPES && i + step <= w.count; i += step) SR_OF_ISA(sr_block)(w, item, i, step, 0);
    if (!SR_SHAPES || item.acc_nbytes > item.nbytes) {
        for (; SR_SHAPES && step > 8 && i + 8 <= w.count; i += 8) SR_OF_ISA(sr_block)(w, item, i, 8, 0);
        for (; i < w.count; i++) SR_OF_ISA(sr_block)(w, item, i, 1, 0);
        return;
    }
    const size_t left = w.count - i;
    if (step > 32 && left & 32) SR_OF_ISA(sr_block)(w, item, i, 32, 0), i += 32;
    if (step > 16 && left & 16) SR_OF_ISA(sr_block)(w, item, i, 16, 0), i += 16;
    if (step > 8 && left & 8) SR_OF_ISA(sr_block)(w, item, i, 8, 0), i += 8;
    if (step > 4 && left & 4) SR_OF_ISA(sr_block)(w, item, i, 4, 0), i += 4;
    if (step > 2 && left & 2) SR_OF_ISA(sr_block)(w, item, i, 2, 0), i += 2;
    if (step > 1 && left & 1) SR_OF_ISA(sr_block)(w, item, i, 1, 0);
}

/* Fold whole blocks of one shape. The shape is passed as compile-time constants, so the loop does not test it. */
SR_INLINE size_t SR_OF_ISA(sr_shape)(struct sr_work w, const struct sr_item item, int nsrc, int ndst,
                                     uint32_t stream, int by_registers) {
    w.nsrc = nsrc, w.ndst = ndst, w.stream = stream, w.from = NULL;
    return SR_OF_ISA(sr_blocks)(w, item, 1, by_registers);
}

/* Two sources, whose results go to the dsts. */
SR_INLINE size_t SR_OF_ISA(sr_two)(struct sr_work w, const struct sr_item item, int ndst, uint32_t stream,
                                   int by_registers) {
    const char *const src[2] = {w.src[0], w.src[1]};
    w.src = src, w.to = NULL;
    return SR_OF_ISA(sr_shape)(w, item, 2, ndst, stream, by_registers);
}

/* The most frequent shapes: two sources, and one or two destinations by ordinary stores. One destination is faster
 * register by register, and two destinations line by line (bench/regress.py, private and zero-copy, 64 KiB). */
SR_INLINE size_t SR_OF_ISA(sr_pair)(struct sr_work w, const struct sr_item item) {
    char *const dst[2] = {w.dst[0], w.dst[w.ndst - 1]};
    w.dst = dst;
    return w.ndst == 1 ? SR_OF_ISA(sr_two)(w, item, 1, 0, 1) : SR_OF_ISA(sr_two)(w, item, 2, 0, 0);
}

/* Two sources in other shapes. Those of large calls have loops of their own, which take a tenth less time: shared
 * results are streamed to one or two destinations, private ones to out and stored to a slot (bench/regress.py,
 * all_reduce of 64 MiB). */
SR_INLINE size_t SR_OF_ISA(sr_streamed)(struct sr_work w, const struct sr_item item) {
    char *const dst[2] = {w.dst[0], w.dst[w.ndst - 1]};
    if (item.acc_nbytes <= item.nbytes && w.ndst <= 2) {
        w.dst = dst;
        if (w.ndst == 1) return SR_OF_ISA(sr_two)(w, item, 1, 1, 0);
        if (w.stream == 3) return SR_OF_ISA(sr_two)(w, item, 2, 3, 0);
        if (w.stream == 1) return SR_OF_ISA(sr_two)(w, item, 2, 1, 0);
    }
    return SR_OF_ISA(sr_two)(w, item, w.ndst, w.stream, 0);
}

/* Up to SR_FUSED_SOURCES sources. Accumulators, which must be items here, are one source more. */
SR_INLINE size_t SR_OF_ISA(sr_few)(const struct sr_work w, const struct sr_item item) {
    const char *src[SR_FUSED_SOURCES] = {NULL};
    int nsrc = 0;
    if (w.from != NULL) src[nsrc++] = w.from;
    for (int s = 0; s < w.nsrc; s++) src[nsrc++] = w.src[s] + w.src_offset;
    struct sr_work few = w;
    few.src = src, few.src_offset = 0;
    if (nsrc <= 3) return SR_OF_ISA(sr_shape)(few, item, 3, w.ndst, w.stream, 0);
    if (nsrc == 4) return SR_OF_ISA(sr_shape)(few, item, 4, w.ndst, w.stream, 0);
    return SR_OF_ISA(sr_shape)(few, item, SR_FUSED_SOURCES, w.ndst, w.stream, 0);
}

/* ---- one dtype and op: its loops, its run, and the function that the table holds ---- */

#define SR_ITEM_LOAD(tag, T, A, LOAD, OP)                                                                    \
    SR_INLINE void SR_OF_ISA(tag##_load)(void *acc, const void *src, size_t count, uint32_t parameter) {     \
        const T##_anywhere *x = src;                                                                         \
        (void)parameter;                                                                                     \
        SR_VECTOR for (size_t i = 0; i < count; i++)((A##_anywhere *)acc)[i] = (A)LOAD(x[i]);                \
    }                                                                                                        \
    SR_INLINE void SR_OF_ISA(tag##_load_two)(void *acc, const void *src0, const void *src1, size_t count,    \
                                             uint32_t parameter) {                                           \
        const T##_anywhere *x = src0, *y = src1;                                                             \
        (void)parameter;                                                                                     \
        SR_VECTOR for (size_t i = 0; i < count; i++) {                                                       \
            const A a = (A)LOAD(x[i]), b = (A)LOAD(y[i]);                                                    \
            ((A##_anywhere *)acc)[i] = (A)OP(a, b);                                                          \
        }                                                                                                    \
    }                                                                                                        \
    SR_INLINE void SR_OF_ISA(tag##_add)(void *acc, const void *src, size_t count, uint32_t parameter) {      \
        const T##_anywhere *x = src;                                                                         \
        (void)parameter;                                                                                     \
        SR_VECTOR for (size_t i = 0; i < count; i++) {                                                       \
            const A a = ((A##_anywhere *)acc)[i], b = (A)LOAD(x[i]);                                         \
            ((A##_anywhere *)acc)[i] = (A)OP(a, b);                                                          \
        }                                                                                                    \
    }

#define SR_ITEM_STORE(tag, T, A, STORE)                                                                      \
    SR_INLINE void SR_OF_ISA(tag##_store)(void *block, const void *acc, size_t count, uint32_t parameter) {  \
        (void)parameter;                                                                                     \
        SR_VECTOR for (size_t i = 0; i < count; i++) {                                                       \
            const A a = ((const A##_anywhere *)acc)[i];                                                      \
            ((T##_anywhere *)block)[i] = (T)STORE(a);                                                        \
        }                                                                                                    \
    }

#define SR_ITEM(tag, T, A, IS_LOADED, STORE)                                                                 \
    ((struct sr_item){sizeof(T), sizeof(A), IS_LOADED, SR_OF_ISA(tag##_load), SR_OF_ISA(tag##_load_two),     \
                      SR_OF_ISA(tag##_add), STORE})

/* SR_OTHER names the function of another instruction set, if that is as fast. */
#define SR_ITEM_RUN(tag, T, A, IS_LOADED, STORE)                                                             \
    SR_RUN size_t SR_OF_ISA(tag##_pair)(const struct sr_work *w) {                                           \
        return SR_OF_ISA(sr_pair)(*w, SR_ITEM(tag, T, A, IS_LOADED, STORE));                                 \
    }                                                                                                        \
    SR_RUN size_t SR_OF_ISA(tag##_two)(const struct sr_work *w) {                                            \
        return SR_OF_ISA(sr_streamed)(*w, SR_ITEM(tag, T, A, IS_LOADED, STORE));                             \
    }                                                                                                        \
    SR_RUN size_t SR_OF_ISA(tag##_few)(const struct sr_work *w) {                                            \
        return SR_OF_ISA(sr_few)(*w, SR_ITEM(tag, T, A, IS_LOADED, STORE));                                  \
    }                                                                                                        \
    SR_RUN size_t SR_OF_ISA(tag##_any)(const struct sr_work *w) {                                            \
        return SR_OF_ISA(sr_blocks)(*w, SR_ITEM(tag, T, A, IS_LOADED, STORE), 0, 0);                         \
    }                                                                                                        \
    SR_RUN void SR_OF_ISA(tag##_remainder)(const struct sr_work *w, size_t done) {                           \
        SR_OF_ISA(sr_remainder)(*w, SR_ITEM(tag, T, A, IS_LOADED, STORE), done);                             \
    }                                                                                                        \
    SR_TARGET static void SR_OF_ISA(tag##_run)(const struct sr_work *w) {                                    \
        const int is_widened = sizeof(A) > sizeof(T), nall = w->nsrc + (w->from != NULL);                    \
        const int is_two = SR_SHAPES && w->nsrc == 2 && w->from == NULL && w->to == NULL;                    \
        size_t done = 0;                                                                                     \
        if (w->count >= SR_VECTOR_NBYTES / sizeof(T)) {                                                      \
            if (is_two && !is_widened && w->ndst <= 2 && w->stream == 0)                                     \
                done = SR_OTHER(tag##_pair)(w);                                                              \
            else if (is_two)                                                                                 \
                done = SR_OF_ISA(tag##_two)(w);                                                              \
            else if (SR_SHAPES && !IS_LOADED && nall > 2 && nall <= SR_FUSED_SOURCES)                        \
                done = SR_OF_ISA(tag##_few)(w);                                                              \
            else                                                                                             \
                done = SR_OF_ISA(tag##_any)(w);                                                              \
        }                                                                                                    \
        if (done < w->count) SR_OTHER(tag##_remainder)(w, done);                                             \
    }

/* The function that the table holds, for a run. */
#define SR_FOLD_OF_RUN(tag, T, A)                                                                            \
    static void SR_OF_ISA(tag)(void *const *dst, int ndst, uint32_t stream, const void *const *src, int nsrc, \
                               size_t count, uint32_t parameter) {                                           \
        static const struct sr_runner runner = {SR_OF_ISA(tag##_run), SR_OF_ISA(sr_stream), sizeof(T),       \
                                                sizeof(A)};                                                  \
        const struct sr_work w = {(char *const *)dst, (const char *const *)src, NULL, NULL, 0, 0, count,     \
                                  ndst, nsrc, stream, parameter};                                            \
        const size_t short_nbytes = nsrc <= SR_FUSED_SOURCES ? SR_ALIGN_FOLD_BEYOND_NBYTES : SR_SHORT_NBYTES;  \
        if (stream == 0 && count * sizeof(T) <= short_nbytes)                                                \
            SR_OF_ISA(tag##_run)(&w);                                                                        \
        else                                                                                                 \
            sr_fold(&runner, w);                                                                             \
    }

#define SR_ITEM_FOLD(tag, T, A, IS_LOADED, STORE)                                                            \
    SR_ITEM_RUN(tag, T, A, IS_LOADED, STORE)                                                                 \
    SR_FOLD_OF_RUN(tag, T, A)

#define SR_FOLD(tag, T, A, LOAD, IS_LOADED, OP, STORE)                                                       \
    SR_ITEM_LOAD(tag, T, A, LOAD, OP)                                                                        \
    SR_ITEM_STORE(tag, T, A, STORE)                                                                          \
    SR_ITEM_FOLD(tag, T, A, IS_LOADED, SR_OF_ISA(tag##_store))

#define SR_PLAIN(tag, T, OP)                                                                                 \
    SR_ITEM_LOAD(tag, T, T, SR_AS_IS, OP)                                                                    \
    SR_ITEM_FOLD(tag, T, T, 0, NULL)

#define SR_MIN_MAX(tag, T) SR_PLAIN(tag##_min, T, SR_LESSER) SR_PLAIN(tag##_max, T, SR_GREATER)

#define SR_INT(tag, T)                                                                                       \
    SR_PLAIN(tag##_sum, T, SR_ADD)                                                                           \
    SR_PLAIN(tag##_prod, T, SR_MULTIPLY_INT)                                                                 \
    SR_MIN_MAX(tag, T)

#define SR_FLOAT(tag, T, DIVIDED)                                                                            \
    SR_PLAIN(tag##_sum, T, SR_ADD)                                                                           \
    SR_PLAIN(tag##_prod, T, SR_MULTIPLY)                                                                     \
    SR_PLAIN(tag##_min, T, SR_LESSER_OR_NAN)                                                                 \
    SR_PLAIN(tag##_max, T, SR_GREATER_OR_NAN)                                                                \
    SR_FOLD(tag##_avg, T, T, SR_AS_IS, 0, SR_ADD, DIVIDED)

SR_INT(u8, uint8_t)
SR_INT(u16, uint16_t)
SR_INT(u32, uint32_t)
SR_INT(u64, uint64_t)
SR_MIN_MAX(i8, int8_t)
SR_MIN_MAX(i16, int16_t)
SR_MIN_MAX(i32, int32_t)
SR_MIN_MAX(i64, int64_t)
SR_PLAIN(u8_band, uint8_t, SR_AND)
SR_PLAIN(u8_bor, uint8_t, SR_OR)
SR_PLAIN(u8_bxor, uint8_t, SR_XOR)
SR_FLOAT(f32, float, SR_DIVIDED_F32)
SR_FLOAT(f64, double, SR_DIVIDED_F64)
#ifndef SR_UNFUSED
#define SR_UNFUSED SR_OF_ISA
SR_PLAIN(c64_prod, sr_c64, sr_multiply_c64)
SR_PLAIN(c128_prod, sr_c128, sr_multiply_c128)
#endif

/* ---- land, lor, lxor: one loop for all dtypes of a size ---- */

#define SR_LOGICAL(tag, T, A, TRUTH, ONE)                                                                    \
    SR_FOLD(tag##_land, T, A, TRUTH, 1, SR_AND, ONE)                                                         \
    SR_FOLD(tag##_lor, T, A, TRUTH, 1, SR_OR, ONE)                                                           \
    SR_FOLD(tag##_lxor, T, A, TRUTH, 1, SR_XOR, ONE)

SR_LOGICAL(bits8, uint8_t, uint8_t, SR_IS_TRUE, SR_ONE)
SR_LOGICAL(bits16, uint16_t, uint16_t, SR_IS_TRUE, SR_ONE)
SR_LOGICAL(bits32, uint32_t, uint32_t, SR_IS_TRUE, SR_ONE)
SR_LOGICAL(bits64, uint64_t, uint64_t, SR_IS_TRUE, SR_ONE)
SR_LOGICAL(c128, sr_c128, uint64_t, SR_IS_TRUE_C128, SR_ONE_C128)

#define SR_LOGICAL_OF(tag, op, bits, dtype)                                                                  \
    static void SR_OF_ISA(tag##_##op)(void *const *dst, int ndst, uint32_t stream, const void *const *src,   \
                                      int nsrc, size_t count, uint32_t divisor) {                            \
        (void)divisor;                                                                                       \
        SR_OF_ISA(bits##_##op)(dst, ndst, stream, src, nsrc, count, dtype);                                  \
    }
#define SR_LOGICAL_OPS(tag, bits, dtype)                                                                     \
    SR_LOGICAL_OF(tag, land, bits, dtype)                                                                    \
    SR_LOGICAL_OF(tag, lor, bits, dtype)                                                                     \
    SR_LOGICAL_OF(tag, lxor, bits, dtype)

SR_LOGICAL_OPS(u8, bits8, SR_U8)
SR_LOGICAL_OPS(u16, bits16, SR_U16)
SR_LOGICAL_OPS(u32, bits32, SR_U32)
SR_LOGICAL_OPS(u64, bits64, SR_U64)
SR_LOGICAL_OPS(f16, bits16, SR_F16)
SR_LOGICAL_OPS(bf16, bits16, SR_BF16)
SR_LOGICAL_OPS(f32, bits32, SR_F32)
SR_LOGICAL_OPS(f64, bits64, SR_F64)
SR_LOGICAL_OPS(c64, bits64, SR_C64)
SR_LOGICAL_OPS(e4m3fn, bits8, SR_F8_E4M3FN)
SR_LOGICAL_OPS(e5m2, bits8, SR_F8_E5M2)

/* ---- floats of 16 bits: accumulators of a block in an order of its own ---- */

#if SR_SHAPES
/* A block is read as words of two items. The first items of all words come first in `wide`, so that neither widening
 * nor narrowing moves anything between the lanes of a vector. */
SR_INLINE void SR_OF_ISA(bf16_widen)(float *wide, const void *items, size_t count) {
    const size_t words = count / 2;
    if (count == 1) *wide = sr_widen_bf16(*(const uint16_t_anywhere *)items);
    for (size_t k = 0; k < 2; k++)
        SR_VECTOR for (size_t i = 0; i < words; i++) wide[k * words + i] =
            sr_widen_bf16(((const uint32_t_anywhere *)items)[i] >> k * 16 & 0xffffu);
}

SR_INLINE void SR_OF_ISA(bf16_narrow)(void *items, const float *wide, size_t count) {
    const size_t words = count / 2;
    if (count == 1) *(uint16_t_anywhere *)items = (uint16_t)sr_narrow_bf16(*wide);
    SR_VECTOR for (size_t i = 0; i < words; i++)((uint32_t_anywhere *)items)[i] =
        sr_narrow_bf16(wide[i]) | sr_narrow_bf16(wide[words + i]) << 16;
}
#endif

#ifdef SR_F16C
SR_INLINE void SR_OF_ISA(f16_widen)(float *wide, const void *items, size_t count) {
    if (count == 1) *(float_anywhere *)wide = _cvtsh_ss(*(const uint16_t_anywhere *)items);
#if SR_VECTOR_NBYTES == 64
    for (; count >= 16; wide += 16, items = (const char *)items + 32, count -= 16)
        _mm512_storeu_ps(wide, _mm512_cvtph_ps(_mm256_loadu_si256(items)));
#endif
    for (; count >= 8; wide += 8, items = (const char *)items + 16, count -= 8)
        _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128(items)));
}

/* Round to nearest even. A whole block is stored by one instruction, since it is loaded by one soon after: a load of
 * two separately stored halves would stall. */
SR_INLINE void SR_OF_ISA(f16_narrow)(void *items, const float *wide, size_t count) {
    if (count == 1) *(uint16_t_anywhere *)items = _cvtss_sh(*(const float_anywhere *)wide, 0);
    if (count == 8) _mm_storeu_si128(items, _mm256_cvtps_ph(_mm256_loadu_ps(wide), 0));
#if SR_VECTOR_NBYTES == 64
    if (count == 32) {
        const __m256i low = _mm512_cvtps_ph(_mm512_loadu_ps(wide), 0);
        const __m256i high = _mm512_cvtps_ph(_mm512_loadu_ps(wide + 16), 0);
        _mm512_storeu_si512(items, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
    }
#else
    if (count == 16) {
        const __m128i low = _mm256_cvtps_ph(_mm256_loadu_ps(wide), 0);
        const __m128i high = _mm256_cvtps_ph(_mm256_loadu_ps(wide + 8), 0);
        _mm256_storeu_si256(items, _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
    }
#endif
}
#elif defined(__aarch64__)
SR_INLINE void SR_OF_ISA(f16_widen)(float *wide, const void *items, size_t count) {
    if (count == 1) *(float_anywhere *)wide = *(const half_anywhere *)items;
    if (count != 8) return;
    const float16x8_t half = vreinterpretq_f16_u8(vld1q_u8(items));
    vst1q_f32(wide, vcvt_f32_f16(vget_low_f16(half)));
    vst1q_f32(wide + 4, vcvt_f32_f16(vget_high_f16(half)));
}

SR_INLINE void SR_OF_ISA(f16_narrow)(void *items, const float *wide, size_t count) {
    if (count == 1) *(half_anywhere *)items = *(const float_anywhere *)wide;
    if (count != 8) return;
    const float16x8_t half = vcombine_f16(vcvt_f16_f32(vld1q_f32(wide)), vcvt_f16_f32(vld1q_f32(wide + 4)));
    vst1q_u8(items, vreinterpretq_u8_f16(half));
}
#endif

#define SR_SMALL_FOLD(tag, op, OP, FINISH)                                                                   \
    SR_INLINE void SR_OF_ISA(tag##_##op##_load)(void *acc, const void *src, size_t count,                    \
                                                uint32_t parameter) {                                        \
        (void)parameter;                                                                                     \
        SR_OF_ISA(tag##_widen)(acc, src, count);                                                             \
    }                                                                                                        \
    SR_INLINE void SR_OF_ISA(tag##_##op##_add)(void *acc, const void *src, size_t count, uint32_t parameter) { \
        float wide[SR_VECTOR_NBYTES / sizeof(uint16_t)];                                                     \
        (void)parameter;                                                                                     \
        SR_OF_ISA(tag##_widen)(wide, src, count);                                                            \
        SR_VECTOR for (size_t i = 0; i < count; i++) {                                                       \
            const float a = ((float_anywhere *)acc)[i], b = wide[i];                                         \
            ((float_anywhere *)acc)[i] = OP(a, b);                                                           \
        }                                                                                                    \
    }                                                                                                        \
    SR_INLINE void SR_OF_ISA(tag##_##op##_load_two)(void *acc, const void *src0, const void *src1,           \
                                                    size_t count, uint32_t parameter) {                      \
        SR_OF_ISA(tag##_##op##_load)(acc, src0, count, parameter);                                           \
        SR_OF_ISA(tag##_##op##_add)(acc, src1, count, parameter);                                            \
    }                                                                                                        \
    SR_INLINE void SR_OF_ISA(tag##_##op##_store)(void *block, const void *acc, size_t count,                 \
                                                 uint32_t parameter) {                                       \
        float wide[SR_VECTOR_NBYTES / sizeof(uint16_t)];                                                     \
        (void)parameter;                                                                                     \
        SR_VECTOR for (size_t i = 0; i < count; i++) wide[i] = FINISH(((const float_anywhere *)acc)[i]);     \
        SR_OF_ISA(tag##_narrow)(block, wide, count);                                                         \
    }                                                                                                        \
    SR_ITEM_FOLD(tag##_##op, uint16_t, float, 1, SR_OF_ISA(tag##_##op##_store))

#define SR_SMALL_FLOAT(tag)                                                                                  \
    SR_SMALL_FOLD(tag, sum, SR_ADD, SR_AS_IS)                                                                \
    SR_SMALL_FOLD(tag, prod, SR_MULTIPLY, SR_AS_IS)                                                          \
    SR_SMALL_FOLD(tag, min, SR_LESSER_OR_NAN, SR_AS_IS)                                                      \
    SR_SMALL_FOLD(tag, max, SR_GREATER_OR_NAN, SR_AS_IS)                                                     \
    SR_SMALL_FOLD(tag, avg, SR_ADD, SR_DIVIDED_F32)

#include "copy.h"
/* cast.h uses the copies for the native wire format. */
#include "cast.h"

/* ---- floats of 8 bits, and of 16 bits without loops of their own: through the loops of float32 ---- */

/* Widen a tile of each source, fold it by `fold`, divide it, and narrow it. The casts take most of the time. */
SR_RUN void SR_OF_ISA(sr_run_widened)(const struct sr_work *w, size_t nbytes, sr_widen_fn *widen,
                                      sr_narrow_fn *narrow, sr_run_fn *fold, float divisor) {
    float acc[SR_WIDE_TILE], wide[SR_WIDE_TILE];
    char tile[SR_WIDE_TILE * sizeof(uint16_t)] __attribute__((aligned(SR_LINE_NBYTES)));
    char *const to = (char *)acc;
    const char *const both[2] = {(char *)acc, (char *)wide};
    for (size_t i = 0; i < w->count; i += SR_WIDE_TILE) {
        const size_t count = sr_lesser(SR_WIDE_TILE, w->count - i), at = w->src_offset + i * nbytes;
        const struct sr_work two = {.dst = &to, .src = both, .count = count, .ndst = 1, .nsrc = 2};
        if (w->from != NULL)
            memcpy(acc, w->from + i * sizeof(float), count * sizeof(float));
        else
            widen(acc, w->src[0] + at, count);
        for (int s = w->from == NULL; s < w->nsrc; s++) {
            widen(wide, w->src[s] + at, count);
            fold(&two);
        }
        if (w->to != NULL) {
            memcpy(w->to + i * sizeof(float), acc, count * sizeof(float));
            continue;
        }
        if (divisor != 1) SR_VECTOR for (size_t k = 0; k < count; k++) acc[k] /= divisor;
        narrow(tile, acc, count);
        for (int d = 0; d < w->ndst; d++) {
            char *const dst = w->dst[d] + w->dst_offset + i * nbytes;
            if (sr_is_streamed(w->stream, d))
                SR_OF_ISA(sr_stream)(dst, tile, count * nbytes);
            else
                memcpy(dst, tile, count * nbytes);
        }
    }
}

#define SR_WIDENED_FOLD(tag, op, T, f32_op, divisor)                                                         \
    SR_TARGET static void SR_OF_ISA(tag##_##op##_run)(const struct sr_work *w) {                             \
        SR_OF_ISA(sr_run_widened)(w, sizeof(T), SR_OF_ISA(widen_##tag), SR_OF_ISA(narrow_##tag),             \
                                  SR_OF_ISA(f32_op##_run), divisor);                                         \
    }                                                                                                        \
    SR_FOLD_OF_RUN(tag##_##op, T, float)
#define SR_WIDENED_FLOAT(tag, T)                                                                             \
    SR_WIDENED_FOLD(tag, sum, T, f32_sum, 1)                                                                 \
    SR_WIDENED_FOLD(tag, prod, T, f32_prod, 1)                                                               \
    SR_WIDENED_FOLD(tag, min, T, f32_min, 1)                                                                 \
    SR_WIDENED_FOLD(tag, max, T, f32_max, 1)                                                                 \
    SR_WIDENED_FOLD(tag, avg, T, f32_sum, (float)w->parameter)

#if SR_SHAPES
SR_SMALL_FLOAT(f16)
SR_SMALL_FLOAT(bf16)
#else
SR_WIDENED_FLOAT(f16, uint16_t)
SR_WIDENED_FLOAT(bf16, uint16_t)
#endif
SR_WIDENED_FLOAT(e4m3fn, uint8_t)
SR_WIDENED_FLOAT(e5m2, uint8_t)

/* ---- all of them ---- */

/* Ops that treat an item as several smaller ones: the bytes of an integer, the two reals of a complex number. */
#define SR_AS_PARTS(op, part_op, parts)                                                                      \
    static void SR_OF_ISA(op)(void *const *dst, int ndst, uint32_t stream, const void *const *src, int nsrc, \
                              size_t count, uint32_t divisor) {                                              \
        SR_OF_ISA(part_op)(dst, ndst, stream, src, nsrc, parts * count, divisor);                            \
    }
#define SR_AS_BYTES(tag, nbytes)                                                                             \
    SR_AS_PARTS(tag##_band, u8_band, nbytes)                                                                 \
    SR_AS_PARTS(tag##_bor, u8_bor, nbytes)                                                                   \
    SR_AS_PARTS(tag##_bxor, u8_bxor, nbytes)

SR_AS_BYTES(u16, 2)
SR_AS_BYTES(u32, 4)
SR_AS_BYTES(u64, 8)
SR_AS_PARTS(c64_sum, f32_sum, 2)
SR_AS_PARTS(c64_avg, f32_avg, 2)
SR_AS_PARTS(c128_sum, f64_sum, 2)
SR_AS_PARTS(c128_avg, f64_avg, 2)

#define SR_ROW_LOGICAL(tag)                                                                                  \
    [SR_LAND] = SR_OF_ISA(tag##_land), [SR_LOR] = SR_OF_ISA(tag##_lor), [SR_LXOR] = SR_OF_ISA(tag##_lxor)
#define SR_ROW_BOOL                                                                                          \
    {                                                                                                        \
        [SR_SUM] = SR_OF_ISA(u8_lor), [SR_PROD] = SR_OF_ISA(u8_land), [SR_MIN] = SR_OF_ISA(u8_land),         \
        [SR_MAX] = SR_OF_ISA(u8_lor), [SR_BAND] = SR_OF_ISA(u8_land), [SR_BOR] = SR_OF_ISA(u8_lor),          \
        [SR_BXOR] = SR_OF_ISA(u8_lxor), SR_ROW_LOGICAL(u8)                                                   \
    }
#define SR_ROW_INT(u, tag)                                                                                   \
    {                                                                                                        \
        [SR_SUM] = SR_OF_ISA(u##_sum), [SR_PROD] = SR_OF_ISA(u##_prod), [SR_MIN] = SR_OF_ISA(tag##_min),     \
        [SR_MAX] = SR_OF_ISA(tag##_max), [SR_BAND] = SR_OF_ISA(u##_band), [SR_BOR] = SR_OF_ISA(u##_bor),     \
        [SR_BXOR] = SR_OF_ISA(u##_bxor), SR_ROW_LOGICAL(u)                                                   \
    }
#define SR_ROW_FLOAT(tag)                                                                                    \
    {                                                                                                        \
        [SR_SUM] = SR_OF_ISA(tag##_sum), [SR_PROD] = SR_OF_ISA(tag##_prod), [SR_MIN] = SR_OF_ISA(tag##_min), \
        [SR_MAX] = SR_OF_ISA(tag##_max), [SR_AVG] = SR_OF_ISA(tag##_avg), SR_ROW_LOGICAL(tag)                \
    }
#define SR_ROW_COMPLEX(tag)                                                                                  \
    {                                                                                                        \
        [SR_SUM] = SR_OF_ISA(tag##_sum), [SR_PROD] = SR_UNFUSED(tag##_prod), [SR_AVG] = SR_OF_ISA(tag##_avg), \
        SR_ROW_LOGICAL(tag)                                                                                  \
    }
#define SR_STRING_(word) #word
#define SR_STRING(word) SR_STRING_(word)

static const struct sr_kernels SR_OF_ISA(sr_kernels) = {
    .isa = SR_STRING(SR_ISA),
    .copy = SR_OF_ISA(sr_copy),
    .copy_two = SR_OF_ISA(sr_copy_two),
    .fold = {
        [SR_BOOL] = SR_ROW_BOOL,
        [SR_I8] = SR_ROW_INT(u8, i8),
        [SR_U8] = SR_ROW_INT(u8, u8),
        [SR_I16] = SR_ROW_INT(u16, i16),
        [SR_U16] = SR_ROW_INT(u16, u16),
        [SR_I32] = SR_ROW_INT(u32, i32),
        [SR_U32] = SR_ROW_INT(u32, u32),
        [SR_I64] = SR_ROW_INT(u64, i64),
        [SR_U64] = SR_ROW_INT(u64, u64),
        [SR_F16] = SR_ROW_FLOAT(f16),
        [SR_BF16] = SR_ROW_FLOAT(bf16),
        [SR_F32] = SR_ROW_FLOAT(f32),
        [SR_F64] = SR_ROW_FLOAT(f64),
        [SR_C64] = SR_ROW_COMPLEX(c64),
        [SR_C128] = SR_ROW_COMPLEX(c128),
        [SR_F8_E4M3FN] = SR_ROW_FLOAT(e4m3fn),
        [SR_F8_E5M2] = SR_ROW_FLOAT(e5m2),
    },
    .widen = {
        [SR_F16] = SR_OF_ISA(widen_f16),
        [SR_BF16] = SR_OF_ISA(widen_bf16),
        [SR_F8_E4M3FN] = SR_OF_ISA(widen_e4m3fn),
        [SR_F8_E5M2] = SR_OF_ISA(widen_e5m2),
    },
    .narrow = {
        [SR_F16] = SR_OF_ISA(narrow_f16),
        [SR_BF16] = SR_OF_ISA(narrow_bf16),
        [SR_F8_E4M3FN] = SR_OF_ISA(narrow_e4m3fn),
        [SR_F8_E5M2] = SR_OF_ISA(narrow_e5m2),
    },
    .encode = {
        [SR_WIRE_NATIVE] = SR_OF_ISA(encode_native),
        [SR_WIRE_BF16] = SR_OF_ISA(encode_bf16),
        [SR_WIRE_FP16] = SR_OF_ISA(encode_f16),
        [SR_WIRE_INT8] = SR_OF_ISA(encode_int8),
    },
    .decode = {
        [SR_WIRE_NATIVE] = SR_OF_ISA(decode_native),
        [SR_WIRE_BF16] = SR_OF_ISA(widen_bf16),
        [SR_WIRE_FP16] = SR_OF_ISA(widen_f16),
        [SR_WIRE_INT8] = SR_OF_ISA(decode_int8),
    },
};

#undef SR_INLINE
#undef SR_ISA
#undef SR_TARGET
#undef SR_VECTOR_NBYTES
#undef SR_PUT
#undef SR_STREAM
#undef SR_UNFUSED
#undef SR_OTHER
#undef SR_SHAPES
#undef SR_F16C
