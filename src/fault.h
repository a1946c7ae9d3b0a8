/* Builds for tests alone: points at which a rank can be made to die, and an engine that looks at nothing. In every
   other build there is not one instruction of it. */
#ifndef SR_FAULT_H
#define SR_FAULT_H

/* Where a rank may die. */
enum sr_fault {
    SR_BEFORE_PUBLISH, /* the others do not see what it has done */
    SR_AFTER_PUBLISH,  /* they do, but who sleeps is not woken */
    SR_IN_REDUCTION,   /* half of a fold, or of a copy, is done */
    SR_BEFORE_RELEASE, /* it keeps room, credit or an array that the others wait for */
    SR_FAULTS_N
};

struct sr_kernels;

/* -DSR_FAULTS: both come from a library that is loaded before, tests/repo/faults/faults.c. */
#ifdef SR_FAULTS
__attribute__((visibility("default"))) void sr_fault_pass(enum sr_fault point);
__attribute__((visibility("default"))) const struct sr_kernels *sr_fault_kernels(const struct sr_kernels *kernels);
#define SR_FAULT(point) sr_fault_pass(point)
#define SR_FAULT_KERNELS(kernels) sr_fault_kernels(kernels)
#else
#define SR_FAULT(point) ((void)0)
#define SR_FAULT_KERNELS(kernels) (kernels)
#endif

/* -DSR_NO_CHECKS: no wait looks at the abort word, at liveness, at the deadline or for signals, to see what that
 * costs. */
#ifdef SR_NO_CHECKS
#define SR_CHECKS 0
#else
#define SR_CHECKS 1
#endif

#endif
