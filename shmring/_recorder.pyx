# What one communicator does on this rank from a moment on, kept in memory until somebody writes it down.
# May know: _engine, _flight, _group, _progress, _state, _trace.

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from ._engine cimport Engine
from ._flight cimport words_of_record
from ._group cimport sr_flag_set
from ._progress cimport WAITER, take_turn
from ._trace cimport NTRACED, TRACED_CALL, Slice, Trace

from ._state import PATHS

TRACED = ("call", "wait", "stage", "reduce", "copy", "stage and copy", "wire")
assert len(TRACED) == NTRACED


@cython.final
@cython.no_gc_clear   # the engine has to be there until the end
cdef class Recorder:
    """The last `capacity` slices of time, a power of two, of what an engine does, from now until `stop`."""

    cdef Trace trace
    cdef Engine engine
    cdef bint is_running

    def __cinit__(self, Engine engine, uint64_t capacity=1 << 16):
        if capacity == 0 or capacity & (capacity - 1):
            raise ValueError(f"the capacity is {capacity}; it must be a power of two")
        memset(&self.trace, 0, sizeof(Trace))
        self.trace.slice = <Slice *> calloc(capacity, sizeof(Slice))   # no page of it is there before it is used
        if self.trace.slice == NULL:
            raise MemoryError()
        self.trace.mask = capacity - 1

    def __init__(self, Engine engine, capacity=0):
        engine.check_idle()
        if engine.g.trace != NULL:
            raise RuntimeError("this communicator is being traced already; stop that trace before")
        self.engine = engine
        self.set_in_force(&self.trace)

    def __dealloc__(self):
        if self.is_running:
            self.engine.g.trace = NULL
        free(self.trace.slice)

    cdef int set_in_force(self, Trace *trace) except -1:
        take_turn(self.engine.queue, WAITER)
        self.engine.g.trace = trace
        sr_flag_set(&self.engine.queue.stepper, 0)
        self.is_running = trace != NULL
        return 0

    def stop(self):
        """Nothing more is recorded; a second call does nothing."""
        if self.is_running:
            self.set_in_force(NULL)

    @property
    def nlost(self):
        """How many slices there were before those that it still has."""
        return max(0, <object> self.trace.nslices - <object> self.trace.mask - 1)

    def slices(self):
        """What was recorded, once it has stopped: dicts, in the order of their ends; times by CLOCK_MONOTONIC.

        `what` (in TRACED), `begin_ns`, `end_ns`, `number` of the call. A call has `call`, as `Flight.record_of`, and
        `path`; a wait `awaited`, as the engine's world_rank understands it; work `nbytes`.
        """
        cdef uint64_t i
        if self.is_running:
            raise RuntimeError("it is still being recorded")
        return [self.told(&self.trace.slice[i & self.trace.mask]) for i in range(self.nlost, self.trace.nslices)]

    cdef dict told(self, const Slice *s):
        words = {"what": TRACED[s.traced], "begin_ns": s.begin_ns, "end_ns": s.end_ns, "number": s.call.number}
        if s.traced == TRACED_CALL:
            return words | {"call": words_of_record(&s.call), "path": PATHS[s.path]}
        if s.is_wait:
            words["awaited"] = s.awaited
        if s.nbytes:
            words["nbytes"] = s.nbytes
        return words
