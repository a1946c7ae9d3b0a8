/* Builds for tests alone: with points at which a rank can be made to die, or without checks. Other builds contain no
   instruction of this. */
#ifndef SR_FAULT_H
#define SR_FAULT_H

/* The points at which a rank may die. */
enum sr_fault {
    SR_BEFORE_PUBLISH, /* other ranks do not see what the rank has done */
    SR_AFTER_PUBLISH,  /* other ranks see it, but no sleeping rank is woken */
    SR_IN_REDUCTION,   /* half of a fold, or of a copy, is done */
    SR_BEFORE_RELEASE, /* the rank keeps room, credit or an array for which other ranks wait */
    SR_FAULTS_N
};

struct sr_kernels;

/* With -DSR_FAULTS both functions come from a library that is loaded before, tests/repo/faults/faults.c. */
#ifdef SR_FAULTS
__attribute__((visibility("default"))) void sr_fault_pass(enum sr_fault point);
__attribute__((visibility("default"))) const struct sr_kernels *sr_fault_kernels(const struct sr_kernels *kernels);
#define SR_FAULT(point) sr_fault_pass(point)
#define SR_FAULT_KERNELS(kernels) sr_fault_kernels(kernels)
#else
#define SR_FAULT(point) ((void)0)
#define SR_FAULT_KERNELS(kernels) (kernels)
#endif

/* With -DSR_NO_CHECKS no wait checks the abort word, liveness, the deadline or signals: to measure the cost of these
   checks. */
#ifdef SR_NO_CHECKS
#define SR_CHECKS 0
#else
#define SR_CHECKS 1
#endif

#endif
