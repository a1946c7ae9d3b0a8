# The engine of one communicator on one rank.

from libc.stdint cimport uint64_t

from .._core.group cimport Call
from .._diagnostics.flight_recorder cimport TraceBuffer
from .progress cimport Issued
from .queue cimport Queue, Task
from .state cimport LivenessThread, Stalls, State


# Kinds of compound calls, several calls that succeed or fail as one. While one runs, other threads cannot call. An
# inner one is a part of the outer one; RuntimeError if the outer one may not have this part. Between the calls of an
# IN_STEPS or IN_ANY one, only shmring, signal handlers and unpickled objects make calls.
#
#   outer                  inner:  ALONE   IN_STEPS   IN_ANY   STEPS
#   ALONE, IN_STEPS, IN_ANY        -       -          part     part
#   STEPS                          -       part       part     part
cdef enum Nesting:
    OUTSIDE    # no compound call
    ALONE      # shrink, stop_trace
    IN_STEPS   # those that make something or use objects, such as split, empty and broadcast_object
    IN_ANY     # vector and fused calls, and the object collectives that are used by others
    STEPS      # Comm.run_steps


cdef class Engine(State):
    cdef Queue *queue                     # the calls that run in the background
    cdef readonly object closed_because   # None while open, else the text of the Closed error
    cdef bint busy, enlisted
    cdef uint64_t linger_ns               # most time for which an issued call waits in the foreground
    cdef uint64_t next_linger_ns          # time for which the next one does
    cdef LivenessThread liveness_thread
    cdef readonly Stalls stalls           # logs warnings about calls that take long
    cdef object conns                     # if there are several hosts, else None
    cdef unsigned long thread             # the thread that made it, which usually calls the collectives
    cdef uint64_t nbegun                  # number of calls that this rank has begun, issued or refused
    cdef int compound                     # Nesting of the innermost compound call of the thread call_owner
    cdef uint64_t nbegun_before           # nbegun at the start of the outermost one
    cdef uint64_t nrefused                # nbegun after the last refused call
    cdef readonly uint64_t blocks_version   # increased when the table of shared blocks changes
    cdef object arrays                    # shared arrays that other ranks write to; None if there are none
    cdef void *traced                     # TraceBuffer, owned; NULL: none. No gc clears it: g.trace points into it
    cdef object __weakref__

    cdef int set_trace(self, TraceBuffer buffer) except -1
    cdef int run_call(self, Call *c) except -1
    cdef int refuse(self, int kind) except -1
    cdef int publish_refusal(self, int kind) except -1
    cdef int run_without_gil(self, Call *c) except -1
    cdef int raise_for_status(self, Call *c, int status) except -1
    cdef int abort_for_status(self, Call *c, int status) except -1
    cdef int raise_abort_error(self, bint beside=*) except -1
    cdef int abort_by_exception(self, object error, bint in_call=*, bint beside=*, const char *doing=*) except -1
    cdef int begin_compound(self, int nesting) except -1
    cdef int end_compound(self, int outer, object error) except -1
    cdef int judge_compound_error(self, int outer, object error) except -1
    cdef int await_death(self) except -1
    cdef int abort_for_rank_in(self, object error) except -1
    cdef int abort_for_remote(self, Call *c, int status) except -1
    cdef int poll_abort(self, object seq, bint beside=*) except -1
    cdef int compare_calls(self, Call *c) except -1
    cdef int await_better_report(self, Call *c, int culprit) except -1
    cdef int abort_with(self, int cause, int culprit, object seq, str reason, str op=*) except -1
    cdef int prepare_to_begin(self, Call *c) except -1
    cdef int call_tiny(self, int kind, int op, size_t count, void *data, size_t nbytes, double timeout_s,
                       uint64_t signature=*) except -1
    cdef int fill_refusal(self, Call *c, int kind) except -1
    cdef int issue(self, Issued issued) except -1
    cdef void set_linger(self, uint64_t ns) noexcept
    cdef int enqueue(self, Issued issued) except -1
    cdef void leave_to_background(self) noexcept
    cdef int run_queued_call(self, Call *c) except -1
    cdef bint wait_for(self, Task *task, uint64_t until_ns) except -1
    cdef bint fill_oldest(self) except -1
    cdef int end_issued(self) except -1
    cdef int finish_issued(self) except -1
    cdef int check_open(self) except -1
    cdef int check_signals(self) except -1
