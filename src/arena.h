/* Hand out the pages of one block of memory in runs.
 *
 * Each run, used or free, notes its length in the entry of its first page, so that the runs form a list in the order of
 * their addresses. The first free run that is long enough is taken: it is the one whose pages were probably used last,
 * and are still in the caches. Free runs that follow each other are joined when a search passes them.
 *
 * The list is private memory, and nothing here is atomic: the caller holds a lock, in Python the GIL. */

#ifndef SR_ARENA_H
#define SR_ARENA_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "layout.h"

typedef struct {
    uint32_t npages : 31;
    uint32_t used : 1;
} sr_run;

typedef struct {
    unsigned char *begin;
    sr_run *run; /* an entry for each page; only those of the first pages of runs count */
    size_t npages;
    size_t used_pages;
} sr_arena;

/* Return 0, or -1 without memory for the list. */
static inline int sr_arena_open(sr_arena *a, void *begin, size_t npages) {
    a->begin = begin;
    a->npages = npages;
    a->used_pages = 0;
    a->run = calloc(npages, sizeof(sr_run));
    if (a->run == NULL) return -1;
    a->run[0].npages = (uint32_t)npages;
    return 0;
}

static inline void sr_arena_close(sr_arena *a) { free(a->run); }

static inline int sr_arena_has(const sr_arena *a, const void *p) {
    return (size_t)((const unsigned char *)p - a->begin) < a->npages * SR_PAGE;
}

/* Return nbytes, at least 1, at the beginning of a page; NULL if no free run has so many. */
static inline void *sr_arena_take(sr_arena *a, size_t nbytes) {
    size_t wanted = nbytes / SR_PAGE + (nbytes % SR_PAGE != 0);
    for (size_t at = 0; at < a->npages; at += a->run[at].npages) {
        sr_run *run = &a->run[at];
        if (run->used) continue;
        for (size_t end = at + run->npages; end < a->npages && !a->run[end].used; end = at + run->npages)
            run->npages += a->run[end].npages;
        if (run->npages < wanted) continue;
        if (run->npages > wanted) a->run[at + wanted] = (sr_run){run->npages - (uint32_t)wanted, 0};
        *run = (sr_run){(uint32_t)wanted, 1};
        a->used_pages += wanted;
        return a->begin + at * SR_PAGE;
    }
    return NULL;
}

static inline sr_run *sr_arena_run_of(const sr_arena *a, const void *p) {
    return &a->run[(size_t)((const unsigned char *)p - a->begin) / SR_PAGE];
}

/* Return the bytes that may be used at p, which sr_arena_take returned. */
static inline size_t sr_arena_nbytes(const sr_arena *a, const void *p) {
    return (size_t)sr_arena_run_of(a, p)->npages * SR_PAGE;
}

static inline void sr_arena_give_back(sr_arena *a, void *p) {
    sr_run *run = sr_arena_run_of(a, p);
    run->used = 0;
    a->used_pages -= run->npages;
}

#endif
