/* The copies. loop.h includes this file, which uses its helpers. They are loops over whole cache lines, except for long
 * copies on processors whose string move is faster (sr_string_nbytes). */

SR_INLINE void SR_OF_ISA(sr_copy_line)(char *dst, const char *src, int streaming) {
    for (size_t at = 0; at < SR_LINE_NBYTES; at += SR_VECTOR_NBYTES)
        SR_OF_ISA(sr_put)(dst + at, src + at, SR_VECTOR_NBYTES, streaming);
}

/* Copy all from `at` on, line by line. */
SR_INLINE void SR_OF_ISA(sr_copy_from)(char *dst, const char *src, size_t at, size_t nbytes) {
    SR_ROLLED for (; at + SR_LINE_NBYTES <= nbytes; at += SR_LINE_NBYTES)
        SR_OF_ISA(sr_copy_line)(dst + at, src + at, 0);
    memcpy(dst + at, src + at, nbytes - at);
}

SR_TARGET static inline void SR_OF_ISA(sr_copy_ordinary)(char *dst, const char *src, size_t nbytes) {
    const size_t at = sr_bytes_before_line(dst, nbytes);
    memcpy(dst, src, at);
    if (nbytes >= sr_string_nbytes)
        sr_copy_string(dst + at, src + at, nbytes - at);
    else
        SR_OF_ISA(sr_copy_from)(dst, src, at, nbytes);
}

/* Copy a turn of each of SR_PLACES places of `part` bytes, then the next turn of each, and so on. */
SR_INLINE void SR_OF_ISA(sr_copy_places)(char *dst, const char *src, size_t part) {
    SR_ROLLED for (size_t turn = 0; turn < part; turn += SR_TURN_NBYTES)
        SR_ROLLED for (size_t begin = turn; begin < SR_PLACES * part; begin += part)
            for (size_t at = begin; at < begin + SR_TURN_NBYTES; at += SR_LINE_NBYTES)
                SR_OF_ISA(sr_copy_line)(dst + at, src + at, 0);
}

SR_TARGET static void SR_OF_ISA(sr_copy_in_turn)(char *dst, const char *src, size_t nbytes) {
    size_t at = sr_bytes_before_line(dst, nbytes), part;
    memcpy(dst, src, at);
    for (; (part = sr_part_of_place(nbytes - at)) != 0; at += SR_PLACES * part)
        SR_OF_ISA(sr_copy_places)(dst + at, src + at, part);
    SR_OF_ISA(sr_copy_from)(dst, src, at, nbytes);
}

SR_TARGET static void SR_OF_ISA(sr_copy)(void *dst, const void *src, size_t nbytes, uint32_t way) {
    if (way == SR_COPY_STREAMING) {
        SR_OF_ISA(sr_stream)(dst, src, nbytes);
        sr_store_fence();
    } else if (way == SR_COPY_IN_TURN && (nbytes < sr_string_nbytes || !sr_string_beats_turns)) {
        SR_OF_ISA(sr_copy_in_turn)(dst, src, nbytes);
    } else {
        SR_OTHER(sr_copy_ordinary)(dst, src, nbytes);
    }
}

SR_INLINE void SR_OF_ISA(sr_copy_lines)(char *dst0, const char *src0, int stream0, char *dst1, const char *src1,
                                        int stream1, size_t nlines) {
    SR_ROLLED for (size_t at = 0; at < nlines * SR_LINE_NBYTES; at += SR_LINE_NBYTES) {
        SR_OF_ISA(sr_copy_line)(dst0 + at, src0 + at, stream0);
        SR_OF_ISA(sr_copy_line)(dst1 + at, src1 + at, stream1);
    }
}

/* Copy a line of each pair in turn: the loads of one pair proceed while the stores of the other drain. */
SR_TARGET static void SR_OF_ISA(sr_copy_two)(void *dst0, const void *src0, uint32_t stream0, void *dst1,
                                             const void *src1, uint32_t stream1, size_t nbytes) {
    const size_t head0 = sr_lesser(-(uintptr_t)dst0 & (SR_LINE_NBYTES - 1), nbytes);
    const size_t head1 = sr_lesser(-(uintptr_t)dst1 & (SR_LINE_NBYTES - 1), nbytes);
    const size_t nlines = (nbytes - (head0 > head1 ? head0 : head1)) / SR_LINE_NBYTES;
    const size_t end0 = head0 + nlines * SR_LINE_NBYTES, end1 = head1 + nlines * SR_LINE_NBYTES;
    char *const to0 = (char *)dst0 + head0, *const to1 = (char *)dst1 + head1;
    const char *const from0 = (const char *)src0 + head0, *const from1 = (const char *)src1 + head1;
    memcpy(dst0, src0, head0);
    memcpy(dst1, src1, head1);
    if (stream0 && stream1)
        SR_OF_ISA(sr_copy_lines)(to0, from0, 1, to1, from1, 1, nlines);
    else if (stream0)
        SR_OF_ISA(sr_copy_lines)(to0, from0, 1, to1, from1, 0, nlines);
    else if (stream1)
        SR_OF_ISA(sr_copy_lines)(to0, from0, 0, to1, from1, 1, nlines);
    else
        SR_OF_ISA(sr_copy_lines)(to0, from0, 0, to1, from1, 0, nlines);
    memcpy((char *)dst0 + end0, (const char *)src0 + end0, nbytes - end0);
    memcpy((char *)dst1 + end1, (const char *)src1 + end1, nbytes - end1);
    if (stream0 || stream1) sr_store_fence();
}
