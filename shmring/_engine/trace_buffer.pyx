# Record the calls and messages of one communicator on this rank in memory, for a trace file.

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from .._core.segment cimport sr_flag_set
from .._core.trace cimport NTRACED, TRACED_CALL, TRACED_SEND, Slice, Trace
from .._diagnostics.flight_recorder cimport words_of_record
from .engine cimport Engine
from .progress cimport acquire_stepper
from .queue cimport WAITER

from .._diagnostics.flight_recorder import OUTCOMES
from .state import PATHS

TRACED = ("call", "wait", "stage", "reduce", "copy", "stage and copy", "wire", "send", "recv", "probe")
assert len(TRACED) == NTRACED


cdef Slice *room_for(uint64_t capacity) except NULL:
    cdef Slice *room = <Slice *> calloc(capacity, sizeof(Slice))   # pages are allocated when first used
    if room == NULL:
        raise MemoryError()
    return room


@cython.final
@cython.no_gc_clear   # the engine must exist as long as the recorder
cdef class Recorder:
    """The last `capacity` time slices of an engine's calls, and as many of its messages, from now until `stop`.

    capacity: a power of two. Messages have slices of their own, since another thread may send and receive.
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
        with nogil:   # the thread that has the stepper may need the GIL
            acquire_stepper(self.engine.queue, WAITER)
        self.engine.g.trace = &self.calls if is_running else NULL
        sr_flag_set(&self.engine.queue.stepper, 0)
        self.engine.g.p2p_trace = &self.messages if is_running else NULL   # read with the GIL held
        self.is_running = is_running
        return 0

    def stop(self):
        """Stop recording. A second call does nothing. Raise RuntimeError while another thread is inside a call."""
        if self.is_running and self.engine.closed_because is not None:
            self.set_in_force(False)
        elif self.is_running:
            self.engine.check_idle()
            self.engine.enter_call()   # no other thread may begin a call, which would write a slice after the end
            try:
                self.set_in_force(False)
            finally:
                self.engine.leave_call()

    def slices(self):
        """Return (slices of calls, slices of messages, number of lost slices of calls, of messages), after `stop`.

        A slice is a dict: `what` (in TRACED), `begin_ns`, `end_ns` (CLOCK_MONOTONIC). Slices are in the order of their
        ends. A call and its parts have its `number`. A call has `call`, as `Flight.record_of`, and `path`. A wait has
        `awaited`, a rank as in the engine's world_rank. A message has `rank`, the other rank. A slice that moves data
        has `nbytes`.
        """
        if self.is_running:
            raise RuntimeError("it is still being recorded")
        return slices_of(&self.calls), slices_of(&self.messages), nlost(&self.calls), nlost(&self.messages)


cdef object nlost(const Trace *t):
    return max(0, <object> t.nslices - <object> t.mask - 1)


cdef list slices_of(const Trace *t):
    cdef uint64_t number
    slices = []
    for number in range(<uint64_t> nlost(t), t.nslices):
        slices.append(words_of(&t.slice[number & t.mask]))
    return slices


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
