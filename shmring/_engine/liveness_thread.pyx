# The thread by which other ranks see that a rank is alive. It is parked and holds a robust futex for its whole life. On
# request it wakes and writes the Python stacks of its process to the segment.
#
# It is not a threading.Thread: without memory for the first steps of the new thread, threading.Thread.start() waits
# forever (CPython issue 140746).

import _thread
import time

from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport uint64_t
from libc.string cimport memcpy
from posix.unistd cimport getpid

from .._core.segment cimport sr_lane, sr_liveness, sr_liveness_is_held, sr_now_ns, sr_stack_request
from .._diagnostics.flight_recorder cimport SR_STACKS_NBYTES

from .._diagnostics import stacks
from .._system import limits
from ..errors import Error

cdef extern from "sync/liveness.h" nogil:
    cdef struct sr_hold:
        pass
    void sr_liveness_hold(sr_liveness *, sr_hold *)
    void sr_liveness_let_go(sr_liveness *)

cdef extern from "sync/stack_request.h" nogil:
    bint sr_stack_request_await(sr_stack_request *, sr_leave *leave)
    void sr_stack_request_leave(sr_stack_request *, sr_leave *leave)
    void sr_stack_request_begin(sr_stack_request *)
    void sr_stack_request_end(sr_stack_request *)

cdef extern from "<sys/prctl.h>" nogil:
    enum: PR_SET_NAME
    int prctl(int option, const char *name)

cdef const char *NAME = "shmring-life"
cdef uint64_t LONGEST_START_NS = 60_000_000_000


cdef class ParkedThread:
    """The parked thread of one rank."""

    def __cinit__(self):
        self.at_end = _thread.allocate_lock()
        self.at_end.acquire()

    # Start the thread, and return once it holds the futex. owner: keeps the lane mapped while the thread runs.
    cdef int begin(self, sr_lane *lane, object owner) except -1:
        cdef uint64_t until_ns = sr_now_ns() + LONGEST_START_NS
        self.lane = lane
        self.kept = [owner]
        try:
            _thread.start_new_thread(self._park, ())
        except RuntimeError as error:
            raise limits.explain_thread(error, NAME.decode()) from error
        except MemoryError:   # the thread may have started nevertheless: `leave` ends it, without a wait
            self.pid, self.has_ended = getpid(), True
            raise
        self.pid = getpid()
        while not sr_liveness_is_held(&lane.liveness):
            if self.has_ended:
                raise MemoryError(f"no memory for the first steps of the thread {NAME.decode()}")
            if sr_now_ns() > until_ns:
                raise Error(f"the thread {NAME.decode()} has not begun within {LONGEST_START_NS // 1000**3} s")
            time.sleep(0.0001)
        return 0

    def _park(self):
        try:
            self.ident = PyThread_get_thread_ident()
            prctl(PR_SET_NAME, NAME)
            self.hold_word()
        finally:
            self.has_ended = True
            self.at_end.release()

    cdef int hold_word(self) except -1:
        cdef sr_lane *lane = self.lane
        cdef sr_hold hold   # must not move: this function returns only after sr_liveness_let_go
        cdef bint asked = True
        if not self.kept:   # a signal has interrupted the start of this thread, and the rank has left
            return 0
        _owner = self.kept.pop()
        sr_liveness_hold(&lane.liveness, &hold)
        try:
            while asked:
                with nogil:
                    asked = sr_stack_request_await(&lane.stack_request, &self.leave_word)
                if asked:
                    try:
                        self.write_stacks()
                    except BaseException:   # no memory; this rank is alive nevertheless
                        pass
        finally:
            sr_liveness_let_go(&lane.liveness)
        return 0

    cdef int write_stacks(self) except -1:
        cdef bytes text = stacks.of_this_process(SR_STACKS_NBYTES - 1)
        cdef size_t nbytes = min(<size_t> len(text), <size_t> SR_STACKS_NBYTES - 1)
        sr_stack_request_begin(&self.lane.stack_request)
        memcpy(self.lane.stacks, <const char *> text, nbytes)
        self.lane.stacks[nbytes] = 0
        sr_stack_request_end(&self.lane.stack_request)
        return 0

    cdef int leave(self) except -1:
        if self.pid == getpid():   # the thread was started in this process, not in its parent before a fork
            sr_stack_request_leave(&self.lane.stack_request, &self.leave_word)
            self.kept.clear()   # a thread that starts later touches nothing
            # The thread itself may have dropped the last reference, and must not wait for itself.
            if self.ident != <unsigned long> PyThread_get_thread_ident() and not self.has_ended:
                self.at_end.acquire()
                self.at_end.release()
        return 0
