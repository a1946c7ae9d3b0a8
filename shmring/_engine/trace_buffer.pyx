# What one communicator does on this rank from a moment on, kept in memory until somebody writes it down.

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from .._core.segment cimport sr_flag_set
from .._core.trace cimport NTRACED, TRACED_CALL, TRACED_SEND, Slice, Trace
from .._diagnostics.flight_recorder cimport words_of_record
from .engine cimport Engine
from .progress cimport take_turn
from .queue cimport WAITER

from .._diagnostics.flight_recorder import OUTCOMES
from .state import PATHS

TRACED = ("call", "wait", "stage", "reduce", "copy", "stage and copy", "wire", "send", "recv", "probe")
assert len(TRACED) == NTRACED


cdef Slice *room_for(uint64_t capacity) except NULL:
    cdef Slice *room = <Slice *> calloc(capacity, sizeof(Slice))   # no page of it is there before it is used
    if room == NULL:
        raise MemoryError()
    return room


@cython.final
@cython.no_gc_clear   # the engine has to be there until the end
cdef class Recorder:
    """The last `capacity` slices of time, a power of two, of what an engine does, from now until `stop`.

    Those of messages are beside those of its calls, as another thread may send and receive.
    """

    cdef Trace calls, messages
    cdef Engine engine
    cdef bint is_running

    def __cinit__(self, Engine engine, uint64_t capacity):
        if capacity == 0 or capacity & (capacity - 1):
            raise ValueError(f"the capacity is {capacity}; it must be a power of two")
        memset(&self.calls, 0, sizeof(Trace))
        memset(&self.messages, 0, sizeof(Trace))
        self.calls.mask = self.messages.mask = capacity - 1
        self.calls.slice = room_for(capacity)
        self.messages.slice = room_for(capacity)

    def __init__(self, Engine engine, capacity):
        engine.check_idle()
        if engine.g.trace != NULL:
            raise RuntimeError("this communicator is being traced already; stop that trace before")
        self.engine = engine
        self.set_in_force(True)

    def __dealloc__(self):
        if self.is_running:
            self.engine.g.trace = self.engine.g.p2p_trace = NULL
        free(self.calls.slice)
        free(self.messages.slice)

    cdef int set_in_force(self, bint is_running) except -1:
        with nogil:   # who has it may need the GIL before it is done
            take_turn(self.engine.queue, WAITER)
        self.engine.g.trace = &self.calls if is_running else NULL
        sr_flag_set(&self.engine.queue.stepper, 0)
        self.engine.g.p2p_trace = &self.messages if is_running else NULL   # read by who has the GIL
        self.is_running = is_running
        return 0

    def stop(self):
        """Nothing more is recorded; a second call does nothing. RuntimeError while another thread is inside a call."""
        if self.is_running and self.engine.closed_because is not None:
            self.set_in_force(False)
        elif self.is_running:
            self.engine.check_idle()
            self.engine.enter_call()   # or another thread might begin a call meanwhile, and write behind the end
            try:
                self.set_in_force(False)
            finally:
                self.engine.leave_call()

    def slices(self):
        """(what was recorded of calls, of messages, how many of these are lost, of those), once it has stopped.

        Dicts in the order of their ends, times by CLOCK_MONOTONIC: `what` (in TRACED), `begin_ns`, `end_ns`. A call and
        its parts have its `number`, a call `call`, as `Flight.record_of`, and `path`; a wait `awaited`, as the engine's
        world_rank understands it; a message `rank`, the other one; what moves something `nbytes`.
        """
        if self.is_running:
            raise RuntimeError("it is still being recorded")
        return slices_of(&self.calls), slices_of(&self.messages), nlost(&self.calls), nlost(&self.messages)


cdef object nlost(const Trace *t):
    return max(0, <object> t.nslices - <object> t.mask - 1)


cdef list slices_of(const Trace *t):
    return [words_of(&t.slice[i & t.mask]) for i in range(nlost(t), t.nslices)]


cdef dict words_of(const Slice *s):
    words = {"what": TRACED[s.traced], "begin_ns": s.begin_ns, "end_ns": s.end_ns}
    if s.traced >= TRACED_SEND:
        return words | {"rank": s.awaited, "nbytes": s.nbytes, "outcome": OUTCOMES[s.call.outcome % len(OUTCOMES)]}
    words["number"] = s.call.number
    if s.traced == TRACED_CALL:
        return words | {"call": words_of_record(&s.call), "path": PATHS[s.path]}
    if s.is_wait:
        words["awaited"] = s.awaited
    if s.nbytes:
        words["nbytes"] = s.nbytes
    return words
