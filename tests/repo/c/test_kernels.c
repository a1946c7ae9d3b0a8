/* The kernels alone, for sanitizers and for machines without Python: every dtype, op, shape, cast, wire format and
 * instruction set on reproducible numbers. tests/unit/test_kernels.py and test_casts.py check that the results are
 * right; this program checks that they are the same everywhere.
 *
 * Arm, on another machine (packages qemu-user-static, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross):
 *   aarch64-linux-gnu-gcc -O3 -ffp-contract=off -fno-strict-aliasing -Isrc -static -o /tmp/test_kernels \
 *       tests/repo/c/test_kernels.c src/kernels/kernels.c && qemu-aarch64-static /tmp/test_kernels */
#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The digest of all results, with one value for all NaNs, and positive zeros of min and max: the same on any machine.
   */
#define DIGEST 0xfc366e77869d0dadull

/* The digest of all casts and encodings, with unchanged NaNs. */
#define CASTS_DIGEST 0x74623d188252049aull

enum { MOST_SOURCES = 20, MOST_DSTS = 3 };

static uint64_t random_state = 1;

static uint64_t random_bits(void) {
    random_state += 0x9e3779b97f4a7c15ull;
    uint64_t z = random_state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static void fail(const char *what, const char *isa, int dtype, int op, size_t count, int nsrc) {
    printf("%s: %s %s %s, %zu items, %d sources\n", what, isa, sr_dtype_name[dtype], sr_op_name[op], count, nsrc);
    exit(1);
}

/* ---- results that may differ are made equal: NaNs, and zeros of min and max ---- */

struct format {
    int nbytes;
    uint64_t magnitude, infinity; /* infinity: the largest magnitude that is not NaN */
};

static struct format format_of(int dtype) {
    switch (dtype) {
    case SR_F16: return (struct format){2, 0x7fff, 0x7c00};
    case SR_BF16: return (struct format){2, 0x7fff, 0x7f80};
    case SR_F8_E4M3FN: return (struct format){1, 0x7f, 0x7e};
    case SR_F8_E5M2: return (struct format){1, 0x7f, 0x7c};
    case SR_F32: case SR_C64: return (struct format){4, 0x7fffffff, 0x7f800000};
    case SR_F64: case SR_C128: return (struct format){8, ~0ull >> 1, 0x7ffull << 52};
    default: return (struct format){0, 0, 0};
    }
}

static void make_comparable(char *items, size_t nbytes, int dtype, int op) {
    const struct format f = format_of(dtype);
    for (size_t at = 0; f.nbytes != 0 && at < nbytes; at += (size_t)f.nbytes) {
        uint64_t bits = 0;
        memcpy(&bits, items + at, (size_t)f.nbytes); /* little-endian, as are all machines that shmring runs on */
        if ((bits & f.magnitude) > f.infinity) bits = f.magnitude;
        if ((op == SR_MIN || op == SR_MAX) && (bits & f.magnitude) == 0) bits = 0;
        memcpy(items + at, &bits, (size_t)f.nbytes);
    }
}

static uint64_t digest_of(uint64_t digest, const char *items, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i++) digest = (digest ^ (uint8_t)items[i]) * 0x100000001b3ull;
    return digest;
}

/* ---- one call, with exact allocations, so that a sanitizer sees every access beyond them ---- */

struct place {
    char *block, *items;
};

static struct place allocate(size_t nbytes, size_t offset) {
    char *block = malloc(nbytes + offset);
    if (block == NULL && nbytes + offset != 0) abort();
    return (struct place){block, block + offset};
}

static void fill(char *items, size_t nbytes, int dtype) {
    for (size_t i = 0; i < nbytes; i++) items[i] = (char)(random_bits() & (dtype == SR_BOOL ? 1 : 0xff));
    const int width = format_of(dtype).nbytes;
    if (width < 4) return;
    /* Close exponents: otherwise hardly any sum would round. */
    for (size_t at = 0; at < nbytes; at += (size_t)width)
        if (random_bits() & 7) items[at + (size_t)width - 1] = (char)(random_bits() & 1 ? 0xbf : 0x40);
}

static uint64_t fold_once(const struct sr_kernels *kernels, int dtype, int op, size_t count, int nsrc, int ndst,
                          uint32_t stream, int in_place) {
    const size_t nbytes = count * sr_dtype_nbytes[dtype];
    struct place src[MOST_SOURCES], dst[MOST_DSTS];
    const void *from[MOST_SOURCES];
    void *to[MOST_DSTS];
    for (int s = 0; s < nsrc; s++) {
        src[s] = allocate(nbytes, random_bits() % 64);
        fill(src[s].items, nbytes, dtype);
        from[s] = src[s].items;
    }
    for (int d = 0; d < ndst; d++) {
        dst[d] = allocate(nbytes, random_bits() % 2 ? random_bits() % 64 : 0);
        to[d] = dst[d].items;
    }
    if (in_place) to[0] = src[nsrc - 1].items;
    kernels->fold[dtype][op](to, ndst, stream, from, nsrc, count, (uint32_t)nsrc);
    for (int d = 0; d < ndst; d++) {
        make_comparable(to[d], nbytes, dtype, op);
        if (nbytes != 0 && memcmp(to[0], to[d], nbytes) != 0)
            fail("destinations differ", kernels->isa, dtype, op, count, nsrc);
    }
    const uint64_t digest = digest_of(0xcbf29ce484222325ull, to[0], nbytes);
    for (int s = 0; s < nsrc; s++) free(src[s].block);
    for (int d = 0; d < ndst; d++) free(dst[d].block);
    return digest;
}

static uint64_t fold_somehow(const struct sr_kernels *kernels, int dtype, int op, size_t count, int nsrc) {
    const int ndst = 1 + (int)(random_bits() % MOST_DSTS);
    const uint32_t stream = (uint32_t)(random_bits() & random_bits() & ((1u << ndst) - 1));
    const int in_place = random_bits() % 3 == 0;
    return fold_once(kernels, dtype, op, count, nsrc, ndst, stream, in_place);
}

static uint64_t fold_all(const struct sr_kernels *kernels) {
    static const size_t counts[] = {0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 33, 63, 64, 65, 100, 127, 257, 1500, 2600};
    static const int sources[] = {1, 2, 3, 4, 8, 9, 20};
    uint64_t digest = 0;
    random_state = 1;
    for (int dtype = 0; dtype < SR_DTYPES; dtype++)
        for (int op = 0; op < SR_OPS; op++)
            for (size_t c = 0; kernels->fold[dtype][op] != NULL && c < sizeof counts / sizeof counts[0]; c++)
                for (size_t s = 0; s < sizeof sources / sizeof sources[0]; s++)
                    digest = digest * 31 + fold_somehow(kernels, dtype, op, counts[c], sources[s]);
    return digest;
}

/* ---- casts and wire formats ---- */

static const size_t cast_counts[] = {0, 1, 2, 7, 8, 9, 15, 31, 64, 100, 255, 256, 257, 519, 1500};

/* Any bits, or close magnitudes: otherwise all but the largest item of a block would become 0 in int8. */
static struct place some_floats(size_t count) {
    const struct place p = allocate(count * 4, random_bits() % 64);
    const int any = random_bits() % 2;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)random_bits();
        if (!any) bits = (bits & 0x83ffffffu) | 0x3c000000u;
        memcpy(p.items + 4 * i, &bits, 4);
    }
    return p;
}

/* Frees the place, too. */
static uint64_t digest_and_free(uint64_t digest, struct place p, size_t nbytes) {
    digest = digest_of(digest, p.items, nbytes);
    free(p.block);
    return digest;
}

static uint64_t cast_once(const struct sr_kernels *kernels, int dtype, size_t count) {
    const size_t nbytes = count * sr_dtype_nbytes[dtype];
    const struct place x = some_floats(count), narrow = allocate(nbytes, random_bits() % 64);
    const struct place any = allocate(nbytes, random_bits() % 64), wide = allocate(count * 4, random_bits() % 64);
    for (size_t i = 0; i < nbytes; i++) any.items[i] = (char)random_bits();
    kernels->narrow[dtype](narrow.items, (const float *)(void *)x.items, count);
    kernels->widen[dtype]((float *)(void *)wide.items, any.items, count);
    free(x.block), free(any.block);
    return digest_and_free(digest_and_free(0, narrow, nbytes), wide, count * 4);
}

static uint64_t encode_once(const struct sr_kernels *kernels, int format, size_t count, int feeds) {
    const size_t nbytes = sr_encoded_nbytes(format, count);
    const struct place x = some_floats(count), residual = allocate(count * 4, random_bits() % 64);
    const struct place sent = allocate(nbytes, random_bits() % 64), kept = allocate(count * 4, random_bits() % 64);
    for (size_t i = 0; i < count; i++) {
        const float some = (float)(int32_t)random_bits() * 0x1p-40f; /* a number: the sum of two NaNs may be either */
        memcpy(residual.items + 4 * i, &some, 4);
    }
    float *const left = feeds ? (float *)(void *)residual.items : NULL;
    kernels->encode[format](sent.items, left, (const float *)(void *)x.items, count);
    kernels->decode[format]((float *)(void *)kept.items, sent.items, count);
    free(x.block);
    const uint64_t digest = digest_and_free(digest_and_free(0, sent, nbytes), kept, count * 4);
    return digest_and_free(digest, residual, count * 4);
}

static uint64_t cast_all(const struct sr_kernels *kernels) {
    uint64_t digest = 0;
    random_state = 2;
    for (size_t c = 0; c < sizeof cast_counts / sizeof cast_counts[0]; c++) {
        for (int dtype = 0; dtype < SR_DTYPES; dtype++) {
            const int widened = sr_dtype_is_widened(dtype);
            if ((kernels->widen[dtype] != NULL) != widened || (kernels->narrow[dtype] != NULL) != widened)
                fail("cast where there is none, or none where there is one", kernels->isa, dtype, 0, 0, 0);
            if (widened) digest = digest * 31 + cast_once(kernels, dtype, cast_counts[c]);
        }
        for (int format = 0; format < SR_WIRE_FORMATS; format++)
            for (int feeds = 0; feeds < 2; feeds++)
                digest = digest * 31 + encode_once(kernels, format, cast_counts[c], feeds);
    }
    return digest;
}

/* ---- the caller's floating-point modes ---- */

static float smallest_sum(const struct sr_kernels *kernels) {
    float subnormal = 1e-45f, zero = 0, sum = -1;
    kernels->fold[SR_F32][SR_SUM]((void *[]){&sum}, 1, 0, (const void *[]){&subnormal, &zero}, 2, 1, 1);
    return sum;
}

static void check_float_env(const struct sr_kernels *kernels) {
#if defined(__x86_64__)
    const uint32_t flush_round_up = 0x1f80u | 0x8040u | 0x4000u, before = _mm_getcsr();
    _mm_setcsr(flush_round_up);
    const struct sr_float_env env = sr_float_env_enter();
    const float sum = smallest_sum(kernels);
    const uint32_t inside = _mm_getcsr();
    sr_float_env_leave(env);
    const uint32_t after = _mm_getcsr();
    _mm_setcsr(before);
    if ((inside & SR_MXCSR_MODES) != SR_MXCSR_DEFAULT || ((after ^ flush_round_up) & SR_MXCSR_MODES) != 0)
        fail("floating-point modes not set aside and restored", kernels->isa, SR_F32, SR_SUM, 1, 2);
#else
    const struct sr_float_env env = sr_float_env_enter();
    const float sum = smallest_sum(kernels);
    sr_float_env_leave(env);
#endif
    if (sum == 0) fail("subnormal lost", kernels->isa, SR_F32, SR_SUM, 1, 2);
}

int main(void) {
    const struct sr_kernels *const best = sr_kernels_find(sr_kernels_isas(0));
    if (sr_kernels_find("no such thing") != NULL || sr_kernels_find(NULL) != best || sr_kernels_find("") != best) {
        puts("the choice of an instruction set is wrong");
        return 1;
    }
    int failed = 0;
    for (int i = 0; sr_kernels_isas(i) != NULL; i++) {
        const struct sr_kernels *kernels = sr_kernels_find(sr_kernels_isas(i));
        check_float_env(kernels);
        const uint64_t digest = fold_all(kernels), casts = cast_all(kernels);
        const int differs = digest != DIGEST || casts != CASTS_DIGEST;
        printf("%s: results 0x%016llx, casts 0x%016llx, %s\n", kernels->isa, (unsigned long long)digest,
               (unsigned long long)casts, differs ? "NOT as everywhere" : "as everywhere");
        failed |= differs;
    }
    return failed;
}
