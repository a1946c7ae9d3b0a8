# Frames of a ring that needs no communicator, and the intervals of its waits: constants of ring_ends.pyx.

from libc.stdint cimport int64_t

from .._core.segment cimport sr_event

cdef extern from "sync/watcher.h" nogil:
    cdef struct sr_watcher:
        pass
    bint sr_watcher_start(sr_watcher *, int process, sr_event *)
    void sr_watcher_stop(sr_watcher *)

cdef enum:
    # Measured with bench/engine/bench_ring.py: one piece is put in while the previous one is taken out.
    PIECE_NBYTES = 16384
    BRIEF_ITEM_NBYTES = 65536   # copying such a small item takes less time than releasing and taking the GIL
    BRIEF_PAUSES = 50           # pauses with the GIL held
    # The end of an interval costs 25 to 50 us of CPU, nearly all of it in the kernel. An idle reader is to cost at most
    # 1 ms in 5 s (bench/engine/bench_broadcast.py), so a thread watches the writer during a long sleep.
    POLL_NS = 100000000         # the first check for the other process, after which ...
    LONG_POLL_NS = 250000000    # ... this is the interval, or ...
    WATCHED_POLL_NS = 2000000000    # ... this, while a thread watches the process
    POLLS_A_SIGNAL_CHECK = 4    # signals for which the kernel does not end the sleep are looked for so often
    POLLS_A_FULL_CHECK = 40     # /proc is read once in so many intervals, if a descriptor shows the end of the process
    POLLS_AN_ABSENT_CHECK = 3   # a process that has not come is looked for once in so many long intervals
    MOST_DIMENSIONS = 64        # NPY_MAXDIMS of numpy 2
    JOIN_NBYTES = 65536         # the parts of such a small object are copied together
    KIND_BITS = 8               # of a frame's kind; the others are the number of the item, which wraps
    NUMBER_BITS = 48

cdef enum Kind:      # kind of a frame
    BYTES, ARRAY, FORTRAN_ARRAY, DESCRIPTION, OBJECT


# Shape and dtype of the arrays that follow, as transferred: ndim, the lengths, then the dtype's text.
cdef struct Shape:
    int64_t ndim
    int64_t length[MOST_DIMENSIONS]
