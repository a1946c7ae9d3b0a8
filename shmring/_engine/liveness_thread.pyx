# The thread by which others know that a rank lives: it holds a robust futex for life, parked. Woken by whoever asks, it
# writes down the Python stacks of its process.

import threading

from libc.string cimport memcpy

from .._core.group cimport *
from .._diagnostics.flight_recorder cimport SR_STACKS_NBYTES

from .._system import limits
from .._diagnostics import stacks

cdef extern from "flag.h" nogil:
    ctypedef struct sr_leave "_Atomic uint32_t":
        pass
    cdef struct sr_hold:
        pass
    void sr_life_hold(sr_life *, sr_hold *)
    void sr_life_let_go(sr_life *)
    bint sr_desk_await(sr_desk *, sr_leave *leave)
    void sr_desk_leave(sr_desk *, sr_leave *leave)
    void sr_desk_begin_telling(sr_desk *)
    void sr_desk_end_telling(sr_desk *)


cdef class ParkedLife:
    """One rank's parked thread."""

    def __cinit__(self):
        self.leave_word = bytearray(4)

    # Returns once the life is held; owner keeps the lane mapped as long as the thread is there.
    cdef int begin(self, sr_lane *lane, object owner) except -1:
        self.lane = lane
        self.kept = [owner]
        self.thread = threading.Thread(target=self._park, name=stacks.LIFE_THREAD, daemon=True)
        limits.start_thread(self.thread)
        while not sr_life_is_held(&lane.life):
            self.thread.join(0.0001)
        return 0

    def _park(self):
        cdef unsigned char[:] word = self.leave_word
        cdef sr_leave *leave = <sr_leave *> &word[0]
        cdef sr_lane *lane = self.lane
        cdef sr_hold hold   # stays where it is: this function returns when it has let go
        cdef bint asked = True
        try:
            _owner = self.kept.pop()
        except IndexError:   # a signal has interrupted the start of this thread, and the rank has left
            return
        sr_life_hold(&lane.life, &hold)
        try:
            while asked:
                with nogil:
                    asked = sr_desk_await(&lane.desk, leave)
                if asked:
                    try:
                        self.tell()
                    except BaseException:   # in want of memory; this rank lives all the same
                        pass
        finally:
            sr_life_let_go(&lane.life)

    cdef int tell(self) except -1:
        cdef bytes text = stacks.of_this_process(SR_STACKS_NBYTES - 1)
        cdef size_t nbytes = min(<size_t> len(text), <size_t> SR_STACKS_NBYTES - 1)
        sr_desk_begin_telling(&self.lane.desk)
        memcpy(self.lane.stacks, <const char *> text, nbytes)
        self.lane.stacks[nbytes] = 0
        sr_desk_end_telling(&self.lane.desk)
        return 0

    cdef int leave(self) except -1:
        cdef unsigned char[:] word = self.leave_word
        if self.thread is not None:
            sr_desk_leave(&self.lane.desk, <sr_leave *> &word[0])
            self.kept.clear()   # a thread that starts after this touches nothing
            # The last reference may have gone on the thread itself.
            if self.thread is not threading.current_thread() and self.thread.is_alive():
                self.thread.join()
        return 0
