/* The lists of dtypes, ops and wire formats; the code around the loops that streaming and many sources need; the choice
 * of an instruction set. Knows nothing of ranks, segments or Python.
 * Build with -O3 and -ffp-contract=off: a fused product and sum would change bits on some machines. */
#include "kernels.h"

#include <float.h>
#include <string.h>

#include "item.h"

#if FLT_EVAL_METHOD != 0
#error "results must not depend on excess precision"
#endif

#define SR_LINE_NBYTES 64
#define SR_PAGE_NBYTES 4096

/* Up to SR_FUSED_SOURCES sources are folded in registers and read in step with each other. More sources are folded
 * group by group and tile by tile: the accumulators stay in a tile in the L1 cache, as one more source of the next
 * group. Chosen by bench/engine/bench_kernels.py --sources 8,16,64. */
#define SR_FUSED_SOURCES 5
#define SR_GROUP_SOURCES (SR_FUSED_SOURCES - 1)
#define SR_TILE_NBYTES 8192

/* Up to this length many sources, too, are folded block by block without groups, which cost 25 ns. */
#define SR_SHORT_NBYTES 1024

/* Longer copies begin at a line of dst, so that no store touches two lines. This saves a fifth of the time if the lines
 * come from far cores, and costs about ten nanoseconds. */
#define SR_ALIGN_BEYOND_NBYTES 4096

/* A copy in turn goes through so many places at once, each at most a page long, by so many bytes of each. A processor
 * prefetches page by page, so more lines of the core that has written them are under way. On a Xeon a broadcast of 256
 * KiB takes 0.77 of the time with an ordinary copy (bench/peers/peers.py --call broadcast --input written). */
#define SR_PLACES 8
#define SR_PLACE_NBYTES SR_PAGE_NBYTES
#define SR_TURN_NBYTES 256

/* Longer folds begin at a line of dst, too. Up to this length every rank may fold a whole message by itself. Then
 * blocks begin at the first item at any address, since the bits of a NaN may depend on the length of the block. */
#define SR_ALIGN_FOLD_BEYOND_NBYTES 65536

/* Bytes of the stage in which streamed results wait until a line is whole, if the dsts have different offsets in their
 * lines. */
#define SR_STAGE_NBYTES 1024

/* Items that are widened at a time where the loops of float32 fold them. */
#define SR_WIDE_TILE 256

/* The task of a run: fold src[0..nsrc) over count items. Offsets are in bytes. */
struct sr_work {
    char *const *dst;
    const char *const *src;
    const char *from; /* accumulators that come before src[0], or NULL */
    char *to;         /* NULL, or the place for the accumulators, instead of the dsts */
    size_t dst_offset;
    size_t src_offset;
    size_t count;
    int ndst;
    int nsrc;
    uint32_t stream;
    uint32_t parameter; /* the divisor of avg; the dtype of land, lor and lxor */
};
typedef void sr_run_fn(const struct sr_work *work);

/* Write the whole lines of dst by streaming stores, and its ragged edges by ordinary stores, without a fence. */
typedef void sr_stream_fn(char *dst, const char *src, size_t nbytes);

/* The operations of one dtype and op in the loops, each on `count` items; count is a constant wherever they are used.
   */
struct sr_item {
    size_t nbytes;
    size_t acc_nbytes; /* of an accumulator */
    int is_loaded;     /* 1 if the accumulator differs from the item */
    void (*load)(void *acc, const void *src, size_t count, uint32_t parameter);
    void (*load_two)(void *acc, const void *src0, const void *src1, size_t count, uint32_t parameter);
    void (*add)(void *acc, const void *src, size_t count, uint32_t parameter);
    /* NULL: the accumulator is the item */
    void (*store)(void *block, const void *acc, size_t count, uint32_t parameter);
};

/* One dtype and op for one instruction set, for the code outside of the loops. */
struct sr_runner {
    sr_run_fn *run;
    sr_stream_fn *stream;
    size_t item_nbytes;
    size_t acc_nbytes;
};

const uint8_t sr_dtype_nbytes[SR_DTYPES] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16, 1, 1};

const char *const sr_dtype_name[SR_DTYPES] = {
    "bool",    "int8",    "uint8",   "int16",     "uint16",     "int32",         "uint32",
    "int64",   "uint64",  "float16", "bfloat16",  "float32",    "float64",       "complex64",
    "complex128", "float8_e4m3fn", "float8_e5m2",
};

const char *const sr_op_name[SR_OPS] = {"sum", "prod", "min",  "max", "avg",  "band",
                                        "bor", "bxor", "land", "lor", "lxor"};

const char *const sr_wire_name[SR_WIRE_FORMATS] = {"native", "bf16", "fp16", "int8"};

static inline size_t sr_lesser(size_t a, size_t b) { return a < b ? a : b; }

static inline uint32_t sr_is_streamed(uint32_t stream, int d) { return stream >> (d < 31 ? d : 31) & 1; }

/* Return the bytes before the first line of dst, or 0 if the copy is too short to begin at a line. */
static inline size_t sr_bytes_before_line(const char *dst, size_t nbytes) {
    return nbytes <= SR_ALIGN_BEYOND_NBYTES ? 0 : -(uintptr_t)dst & (SR_LINE_NBYTES - 1);
}

/* Return the bytes of each place in a copy in turn, or 0 if there are too few bytes for one. */
static inline size_t sr_part_of_place(size_t nbytes) {
    return sr_lesser(nbytes / SR_PLACES & ~(size_t)(SR_TURN_NBYTES - 1), SR_PLACE_NBYTES);
}

static inline size_t sr_offset_in_line(const char *at) { return (uintptr_t)at & (SR_LINE_NBYTES - 1); }

/* Order streaming stores before the release that publishes the data: a release alone does not order them. */
static inline void sr_store_fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#else
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

/* Fold any number of sources. */
static void sr_fold_groups(const struct sr_runner *runner, struct sr_work w) {
    if (w.nsrc <= SR_FUSED_SOURCES || w.count * runner->item_nbytes <= SR_SHORT_NBYTES) {
        runner->run(&w);
        return;
    }
    char tile[SR_TILE_NBYTES] __attribute__((aligned(SR_LINE_NBYTES)));
    const size_t tile_count = SR_TILE_NBYTES / runner->acc_nbytes;
    for (size_t i = 0; i < w.count; i += tile_count) {
        struct sr_work part = w;
        part.count = sr_lesser(tile_count, w.count - i);
        part.src_offset += i * runner->item_nbytes;
        part.dst_offset += i * runner->item_nbytes;
        part.to = tile;
        part.nsrc = 2 + (w.nsrc - 2) % SR_GROUP_SOURCES; /* so that all later groups have SR_GROUP_SOURCES */
        for (int left = w.nsrc - part.nsrc; left > 0; left -= SR_GROUP_SOURCES) {
            runner->run(&part);
            part.from = tile;
            part.src += part.nsrc;
            part.nsrc = SR_GROUP_SOURCES;
        }
        part.to = NULL;
        runner->run(&part);
    }
}

/* Return the number of bytes before the first line boundary of the streamed dsts (of all dsts, if none is streamed).
 * Return SR_LINE_NBYTES if that number is not the same for all of them, or not a whole number of items. */
static size_t sr_common_head(const struct sr_runner *runner, const struct sr_work *w) {
    size_t head = SR_LINE_NBYTES;
    for (int d = 0; d < w->ndst; d++) {
        if (w->stream != 0 && !sr_is_streamed(w->stream, d)) continue;
        const size_t own = -(uintptr_t)w->dst[d] & (SR_LINE_NBYTES - 1);
        if (own % runner->item_nbytes != 0 || (head != SR_LINE_NBYTES && head != own)) return SR_LINE_NBYTES;
        head = own;
    }
    return head;
}

/* Fold to dsts that reach their line boundaries together: the run writes whole lines from registers. */
static void sr_fold_in_step(const struct sr_runner *runner, struct sr_work w, size_t head_nbytes) {
    const size_t line_count = SR_LINE_NBYTES / runner->item_nbytes;
    const size_t head = sr_lesser(head_nbytes / runner->item_nbytes, w.count);
    const size_t tail = w.stream != 0 ? (w.count - head) % line_count : 0;
    const size_t ends[3] = {head, w.count - tail, w.count};
    size_t begin = 0;
    for (int part = 0; part < 3; begin = ends[part++]) {
        if (begin == ends[part]) continue;
        struct sr_work p = w;
        p.stream = part == 1 ? w.stream : 0;
        p.src_offset = p.dst_offset = begin * runner->item_nbytes;
        p.count = ends[part] - begin;
        sr_fold_groups(runner, p);
    }
}

/* Fold to dsts that reach their line boundaries at different items. Results go through a stage in the L1 cache, and
 * each dst takes its complete lines from there. The begin of an incomplete line waits for the next stage, which
 * therefore begins with the last line of this one. */
static void sr_fold_staged(const struct sr_runner *runner, struct sr_work w) {
    char stage[SR_LINE_NBYTES + SR_STAGE_NBYTES] __attribute__((aligned(SR_LINE_NBYTES)));
    char *const fresh = stage + SR_LINE_NBYTES;
    const size_t nbytes = w.count * runner->item_nbytes;
    for (size_t begin = 0, end; begin < nbytes; begin = end) {
        end = sr_lesser(begin + SR_STAGE_NBYTES, nbytes);
        struct sr_work part = w;
        part.dst = &fresh, part.ndst = 1, part.stream = 0;
        part.src_offset = begin;
        part.count = (end - begin) / runner->item_nbytes;
        sr_fold_groups(runner, part);
        for (int d = 0; d < w.ndst; d++) {
            size_t from = begin, to = end;
            if (sr_is_streamed(w.stream, d)) {
                if (begin != 0) from -= sr_offset_in_line(w.dst[d] + begin);
                if (end != nbytes) to -= sr_offset_in_line(w.dst[d] + end);
                runner->stream(w.dst[d] + from, fresh + from - begin, to - from);
            } else {
                memcpy(w.dst[d] + from, fresh, to - from);
            }
        }
        memcpy(stage, fresh + SR_STAGE_NBYTES - SR_LINE_NBYTES, SR_LINE_NBYTES);
    }
}

/* Fold everything that is not a single short run of ordinary stores. */
static void sr_fold(const struct sr_runner *runner, struct sr_work w) {
    if (w.ndst < 32) w.stream &= (1u << w.ndst) - 1;
    const int begins_at_item = w.stream == 0 && w.count * runner->item_nbytes <= SR_ALIGN_FOLD_BEYOND_NBYTES;
    const size_t head_nbytes = begins_at_item ? SR_LINE_NBYTES : sr_common_head(runner, &w);
    if (head_nbytes < SR_LINE_NBYTES)
        sr_fold_in_step(runner, w, head_nbytes);
    else if (w.stream != 0)
        sr_fold_staged(runner, w);
    else
        sr_fold_groups(runner, w);
    if (w.stream != 0) sr_store_fence();
}

/* ---- the loops, once for each instruction set ---- */

#if defined(__clang__)
#define SR_ROLLED _Pragma("clang loop unroll(disable)")
#define SR_VECTOR _Pragma("clang loop vectorize(assume_safety)")
#define SR_KEEP_NEST()
#else
/* If a loop over the items of a block is unrolled early, GCC does not vectorise it. */
#define SR_ROLLED _Pragma("GCC unroll 1")
#define SR_VECTOR _Pragma("GCC unroll 1")
/* Nor does GCC vectorise it if it unrolls and jams the loop over the sources. */
#define SR_KEEP_NEST() __asm__ volatile("")
#endif

/* Copies of this length or more are string moves. Those of Intel are up to a third faster than loops if another core
 * has just written the source. Those of Zen 4 are a few per cent slower if another core has just read the destination.
 * Those of Zen 5 are up to a third faster from 16 KiB on, and also faster than copies in turn, but not than streaming.
 * Measured by bench/peers/peers.py with SHMRING_SINGLE_COPY=off, all_gather and ping_pong. sr_kernels_find sets it. */
static size_t sr_string_nbytes = SIZE_MAX;
static int sr_string_beats_turns; /* string moves replace copies in turn, too */
#define SR_STRING_NBYTES 2048u
#define SR_STRING_ZEN5_NBYTES 16384u
#ifndef __x86_64__
#define sr_copy_string memcpy
static void sr_find_string(void) {}
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static inline void sr_copy_string(void *dst, const void *src, size_t nbytes) {
    __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(nbytes) : : "memory");
}

/* For processors older than 2013, so the time to compile and the size of the code count more than its speed. */
#if !defined(__clang__) && defined(__OPTIMIZE__)
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif
#define SR_ISA sse2
#define SR_SHAPES 0
#define SR_TARGET
#define SR_VECTOR_NBYTES 16
#define SR_PUT(dst, block) _mm_storeu_si128((void *)(dst), _mm_loadu_si128((const void *)(block)))
#define SR_STREAM(dst, block) _mm_stream_si128((void *)(dst), _mm_loadu_si128((const void *)(block)))
#include "loop.h"
#if !defined(__clang__) && defined(__OPTIMIZE__)
#pragma GCC pop_options
#endif

#define SR_ISA avx2
#define SR_SHAPES 1
#define SR_TARGET __attribute__((target("avx2,f16c")))
#define SR_VECTOR_NBYTES 32
#define SR_F16C
#define SR_PUT(dst, block) _mm256_storeu_si256((void *)(dst), _mm256_loadu_si256((const void *)(block)))
#define SR_STREAM(dst, block) _mm256_stream_si256((void *)(dst), _mm256_loadu_si256((const void *)(block)))
#include "loop.h"

#define SR_ISA avx512
#define SR_SHAPES 1
#define SR_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#define SR_VECTOR_NBYTES 64
#define SR_F16C
#define SR_PUT(dst, block) _mm512_storeu_si512((void *)(dst), _mm512_loadu_si512((const void *)(block)))
#define SR_STREAM(dst, block) _mm512_stream_si512((void *)(dst), _mm512_loadu_si512((const void *)(block)))
/* GCC 12 fuses the alternating differences and sums of a complex product even with -ffp-contract=off. AVX2 without FMA
 * has no instruction for that. */
#define SR_UNFUSED(function) function##_avx2
/* Folds of two sources, and remainders, go by half lines: on Zen 4 these are up to 12 % faster from L3 and memory than
 * whole lines, and equally fast from L1 and L2 (bench/engine/bench_kernels.py --isa avx512,avx2). On a Xeon, half lines
 * take twice as long from L2 with one source or three. */
#define SR_OTHER(function) function##_avx2
#include "loop.h"

/* Return whether the CPU has the instructions (CPUID) and the operating system saves their registers (XCR0). */
static int sr_cpu_has(const struct sr_kernels *kernels) {
    unsigned eax, ebx, ecx, edx;
    if (kernels == &sr_kernels_sse2) return 1;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return 0;
    if (!(ecx & bit_OSXSAVE) || !(ecx & bit_AVX) || !(ecx & bit_F16C)) return 0;
    unsigned xcr0, xcr0_high;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return 0;
    const unsigned avx_state = 0x06, avx512_state = 0xe6; /* XMM, YMM; and opmask, both halves of ZMM */
    if (kernels == &sr_kernels_avx2) return (xcr0 & avx_state) == avx_state && (ebx & bit_AVX2);
    const unsigned avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    return (xcr0 & avx512_state) == avx512_state && (ebx & avx512) == avx512;
}
static const struct sr_kernels *const sr_kernels_built[] = {&sr_kernels_avx512, &sr_kernels_avx2,
                                                           &sr_kernels_sse2};

static void sr_find_string(void) {
    const unsigned fast_short = 1u << 4; /* "fast short rep movsb": Ice Lake and later */
    const unsigned zen5 = 26;
    unsigned eax, vendor, ebx, ecx, edx;
    if (!__get_cpuid(0, &eax, &vendor, &ecx, &edx)) return;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & fast_short)) return;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return;
    const unsigned family = (eax >> 8 & 15) + (eax >> 20 & 255);
    if (vendor == signature_INTEL_ebx) {
        sr_string_nbytes = SR_STRING_NBYTES;
    } else if (vendor == signature_AMD_ebx && family >= zen5) {
        sr_string_nbytes = SR_STRING_ZEN5_NBYTES;
        sr_string_beats_turns = 1;
    }
}

#elif defined(__aarch64__)
#include <arm_neon.h>
typedef __fp16 half_anywhere __attribute__((aligned(1), may_alias));

/* On aarch64 a streaming store (STNP) is a hint with hardly any effect, so ordinary stores are used. */
#define SR_ISA neon
#define SR_SHAPES 1
#define SR_TARGET
#define SR_VECTOR_NBYTES 16
#define SR_PUT(dst, block) vst1q_u8((uint8_t *)(dst), vld1q_u8((const uint8_t *)(block)))
#define SR_STREAM SR_PUT
#include "loop.h"

static int sr_cpu_has(const struct sr_kernels *kernels) { return kernels == &sr_kernels_neon; }
static const struct sr_kernels *const sr_kernels_built[] = {&sr_kernels_neon};

#else
#define SR_ISA scalar
#define SR_SHAPES 0
#define SR_TARGET
#define SR_VECTOR_NBYTES 16
#define SR_PUT(dst, block) memcpy((dst), (block), 16)
#define SR_STREAM SR_PUT
#include "loop.h"

static int sr_cpu_has(const struct sr_kernels *kernels) { return kernels == &sr_kernels_scalar; }
static const struct sr_kernels *const sr_kernels_built[] = {&sr_kernels_scalar};
#endif

#define SR_BUILT (int)(sizeof sr_kernels_built / sizeof sr_kernels_built[0])

const char *sr_kernels_isas(int i) {
    for (int k = 0; k < SR_BUILT; k++)
        if (sr_cpu_has(sr_kernels_built[k]) && i-- == 0) return sr_kernels_built[k]->isa;
    return NULL;
}

const struct sr_kernels *sr_kernels_find(const char *isa) {
    const int any = isa == NULL || isa[0] == '\0';
    sr_find_string();
    for (int k = 0; k < SR_BUILT; k++)
        if ((any || strcmp(isa, sr_kernels_built[k]->isa) == 0) && sr_cpu_has(sr_kernels_built[k]))
            return sr_kernels_built[k];
    return NULL;
}
