/* Measures the machine itself, for the figures beside every benchmark: the time of a cache line between two CPUs
 * and back, and the speed of copying bytes. probe.py compiles it at run time. Independent of shmring. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- the round trip ---- */

#define BATCHES 21
#define ROUND_TRIPS 200
#define BALLS (2u * BATCHES * ROUND_TRIPS)

/* ball: odd values are written by the server and read by the returner, even ones the other way round. */
typedef struct {
    _Alignas(128) _Atomic uint32_t ball;
    _Alignas(128) _Atomic int ready;
    int returner_cpu;
} ping_table;

static void pin_this_thread(int cpu) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cpu, &only);
    pthread_setaffinity_np(pthread_self(), sizeof only, &only);
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static void *return_the_ball(void *argument) {
    ping_table *table = argument;
    pin_this_thread(table->returner_cpu);
    atomic_store(&table->ready, 1);
    for (uint32_t ball = 1; ball < BALLS; ball += 2) {
        while (atomic_load_explicit(&table->ball, memory_order_acquire) != ball)
            ;
        atomic_store_explicit(&table->ball, ball + 1, memory_order_release);
    }
    return NULL;
}

static void serve_the_ball(ping_table *table, double *batch_ns) {
    while (!atomic_load(&table->ready))
        sched_yield();
    uint32_t ball = 0;
    for (int batch = 0; batch < BATCHES; batch++) {
        double start = now_ns();
        for (int i = 0; i < ROUND_TRIPS; i++, ball += 2) {
            atomic_store_explicit(&table->ball, ball + 1, memory_order_release);
            while (atomic_load_explicit(&table->ball, memory_order_acquire) != ball + 2)
                ;
        }
        batch_ns[batch] = (now_ns() - start) / ROUND_TRIPS;
    }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* A line's way from one CPU to the other and back, the median over batches; negative if it cannot be had. */
double probe_round_trip_ns(int server_cpu, int returner_cpu) {
    ping_table table = {.returner_cpu = returner_cpu};
    cpu_set_t before;
    pthread_t returner;
    double batch_ns[BATCHES];
    if (pthread_getaffinity_np(pthread_self(), sizeof before, &before))
        return -1;
    if (pthread_create(&returner, NULL, return_the_ball, &table))
        return -1;
    pin_this_thread(server_cpu);
    serve_the_ball(&table, batch_ns);
    pthread_join(returner, NULL);
    pthread_setaffinity_np(pthread_self(), sizeof before, &before);
    qsort(batch_ns, BATCHES, sizeof batch_ns[0], ascending);
    return batch_ns[BATCHES / 2];
}

/* ---- the copy ---- */

/* Streaming copies take whole lines: dst is aligned to a line and nbytes is a multiple of one. */
#define LINE 64

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void stream_avx512(char *dst, const char *src, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += LINE)
        _mm512_stream_si512((void *)(dst + at), _mm512_loadu_si512(src + at));
}

__attribute__((target("avx"))) static void stream_avx(char *dst, const char *src, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += 32)
        _mm256_stream_si256((__m256i *)(dst + at), _mm256_loadu_si256((const __m256i *)(src + at)));
}

static void stream_sse2(char *dst, const char *src, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += 16)
        _mm_stream_si128((__m128i *)(dst + at), _mm_loadu_si128((const __m128i *)(src + at)));
}

static void copy_streaming(char *dst, const char *src, size_t nbytes) {
    if (__builtin_cpu_supports("avx512f"))
        stream_avx512(dst, src, nbytes);
    else if (__builtin_cpu_supports("avx"))
        stream_avx(dst, src, nbytes);
    else
        stream_sse2(dst, src, nbytes);
    _mm_sfence();
}

int probe_can_stream(void) { return 1; }
#else
static void copy_streaming(char *dst, const char *src, size_t nbytes) { memcpy(dst, src, nbytes); }

int probe_can_stream(void) { return 0; }
#endif

/* The timed loops are in C, so that the limit has no interpreter in it. The empty asm keeps the compiler
 * from noticing that every turn does the same. */
#define TURN_ENDS __asm__ volatile("" ::: "memory")

void probe_copy(char *dst, const char *src, size_t nbytes, long loops, int streaming) {
    for (long i = 0; i < loops; i++) {
        if (streaming)
            copy_streaming(dst, src, nbytes);
        else
            memcpy(dst, src, nbytes);
        TURN_ENDS;
    }
}

void probe_write_and_copy(char *dst, char *src, size_t nbytes, long loops, int streaming) {
    for (long i = 0; i < loops; i++) {
        memset(src, 1, nbytes);
        probe_copy(dst, src, nbytes, 1, streaming);
    }
}

void probe_write(char *src, size_t nbytes, long loops) {
    for (long i = 0; i < loops; i++) {
        memset(src, 1, nbytes);
        TURN_ENDS;
    }
}
