# A rank's mail to ranks of other hosts as Python sees it: the memory that it is made of, and the words that are said
# and heard.

import contextlib
import os
import select
import time

from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE
from posix.mman cimport mmap as map_memory
from posix.mman cimport munmap
from posix.stdlib cimport posix_memalign

from .._core.group cimport SR_LINE, SR_PAGE, SR_VIEW_NBYTES, sr_flag_load
from .._core.spsc_ring cimport sr_ring, sr_ring_first
from .channel cimport *

cdef extern from "<sys/mman.h>":
    enum: MAP_NORESERVE

OVER = SR_POST_OVER
LEAVING = SR_POST_LEAVING
MOST_NBYTES = SR_POST_WORD_NBYTES

cdef enum:
    MOST_RING_NBYTES = 1 << 20
    CROWD = 4                    # with more ranks than these ...
    CROWD_RING_NBYTES = 1 << 18  # ... there are more rings, and each is shorter


cdef class Office:
    """One rank's connections for mail, by the rank at the other end: they are kept, and closed by their maker.

    ring_nbytes, first_seq: how long the rings for what comes are at most, and where their positions begin.
    """

    def __cinit__(self, lines, uint64_t ring_nbytes, uint64_t first_seq):
        cdef uint64_t first
        cdef size_t room_nbytes
        cdef int number, error
        cdef unsigned char *room
        self.lines = dict(sorted(lines.items()))
        self.number_of = {rank: number for number, rank in enumerate(self.lines)}
        self.waker = -1
        self.news = select.epoll()
        self.waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        ring_nbytes = min(ring_nbytes, <uint64_t> (MOST_RING_NBYTES if len(lines) < CROWD else CROWD_RING_NBYTES))
        first = sr_ring_first(first_seq, ring_nbytes)
        room_nbytes = SR_PAGE + ((ring_nbytes + SR_PAGE - 1) & ~<size_t> (SR_PAGE - 1)) + SR_POST_REST_NBYTES
        self.allocate(len(lines), room_nbytes)
        sr_office_open(self.office, self.post, len(lines), self.news.fileno())
        self.office.waker = self.waker
        for number, (rank, line) in enumerate(self.lines.items()):
            room = <unsigned char *> self.memory + number * room_nbytes
            error = sr_post_open(self.office, &self.post[number], line.fileno(), rank, <sr_ring *> room,
                                 room + SR_PAGE, ring_nbytes, first, room + room_nbytes - SR_POST_REST_NBYTES)
            if error != 0:
                raise OSError(error, os.strerror(error))

    # Its pages come when they are touched: few pairs of ranks ever have messages.
    cdef int allocate(self, int nposts, size_t room_nbytes) except -1:
        cdef void *memory
        self.post = <sr_post *> calloc(nposts + 1, sizeof(sr_post))
        if self.post == NULL or posix_memalign(<void **> &self.office, SR_LINE, sizeof(sr_office)) != 0:
            raise MemoryError()
        memset(self.office, 0, sizeof(sr_office))
        memory = map_memory(NULL, nposts * room_nbytes + SR_PAGE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if memory == MAP_FAILED:
            raise MemoryError()
        self.memory, self.memory_nbytes = memory, nposts * room_nbytes + SR_PAGE
        return 0

    def __dealloc__(self):
        if self.waker >= 0:
            os.close(self.waker)
        free(self.post)
        free(self.office)
        if self.memory != NULL:
            munmap(self.memory, self.memory_nbytes)

    cdef sr_post *post_of(self, int rank) except NULL:
        return &self.post[self.number_of[rank]]

    def fileno(self):
        """A descriptor that is readable when something has come."""
        return self.news.fileno()

    def say(self, int what, bytes body):
        """Tell everyone, as far as they are there."""
        cdef int number
        for number in range(self.office.nposts):
            sr_post_say(self.office, &self.post[number], what, <const char *> body, len(body))

    def hear(self):
        """(rank, what it has said of why it is over), or None so far."""
        if not sr_office_hears(self.office):
            return None
        return self.post[self.office.word_from].rank, self.office.word[:self.office.word_nbytes]

    def say_call(self, uint64_t seq, uint64_t fingerprint, uint64_t count):
        """Tell everyone in which collective this rank waits."""
        cdef sr_post_call call = sr_post_call(seq, fingerprint, count)
        self.say(SR_POST_CALLING, (<const char *> &call)[:sizeof(call)])

    def call_of(self, int rank):
        """(seq, fingerprint, count) of the collective in which a rank has said last that it waits, or None."""
        cdef sr_post_call call
        if not sr_post_hear(self.office, self.post_of(rank), SR_POST_CALLING, &call):
            return None
        return call.seq, call.fingerprint, call.count

    def other_call(self, uint64_t seq, uint64_t fingerprint):
        """A rank that has said that it waits in the collective of that number, but in another one; None: none has."""
        cdef sr_post_call call
        cdef int number
        for number in range(self.office.nposts):
            if (sr_post_hear(self.office, &self.post[number], SR_POST_CALLING, &call) and call.seq == seq
                    and call.fingerprint != fingerprint):
                return self.post[number].rank
        return None

    def await_news(self, double within_s):
        """Returns when something has come, or a little later."""
        if self.news.closed:
            time.sleep(within_s)
            return
        with contextlib.suppress(InterruptedError):
            self.news.poll(within_s)

    def tell_view(self, bytes view):
        """Say to all others which of them this rank goes on with; see views."""
        self.say(SR_POST_VIEW, view)

    def view_of(self, int rank):
        """What a rank has said so last; None: nothing."""
        cdef unsigned char[SR_VIEW_NBYTES] view
        return view[:SR_VIEW_NBYTES] if sr_post_hear(self.office, self.post_of(rank), SR_POST_VIEW, view) else None

    def look(self, double cut_s):
        """Take in what has come, and nothing of messages. cut_s: who does not answer for so long is gone."""
        cdef int number
        sr_office_look(self.office)
        for number in range(self.office.nposts):
            sr_post_check_link(self.office, &self.post[number], <uint64_t> (cut_s * 1e9))

    def has_ended(self, int rank):
        """Whether nothing comes from a rank any more."""
        return sr_flag_load(&self.post_of(rank).end) != SR_POST_OPEN

    def has_left(self, int rank):
        """Whether a rank has said that it leaves."""
        return sr_flag_load(&self.post_of(rank).left) != 0

    def deliver(self, double within_s, double cut_s, bint unless_over=True):
        """Wait until what was sent of messages, and the last view, have reached the hosts of those they are for.

        It ends sooner where they cannot, and unless_over where somebody says that it is over. cut_s: who does not
        answer for so long is gone. What they send meanwhile is taken in: two that do this at once do not wait for
        each other.
        """
        cdef double until = time.monotonic() + within_s
        cdef double pause_s = 0.001
        while self.is_delivering(<uint64_t> (cut_s * 1e9)) and time.monotonic() < until:
            self.await_news(pause_s)   # of an acknowledgement there is none
            sr_office_step(self.office)
            if unless_over and self.hear() is not None:
                return
            pause_s = min(2 * pause_s, 0.02)

    cdef bint is_delivering(self, uint64_t cut_ns):
        cdef bint is_any = False
        cdef int number
        for number in range(self.office.nposts if not self.news.closed else 0):
            if sr_post_is_delivering(self.office, &self.post[number]):
                sr_post_check_link(self.office, &self.post[number], cut_ns)
                is_any = True
        return is_any

    def close(self, double within_s):
        """Send what was promised, and stop; the connections are their maker's. A second call does nothing."""
        cdef int number
        cdef double until = time.monotonic() + within_s
        if self.news.closed:
            return
        sr_office_step(self.office)
        for number in range(self.office.nposts):
            while sr_post_owes(self.office, &self.post[number]) and time.monotonic() < until:
                self.await_news(0.02)
                sr_office_step(self.office)
        sr_office_shut(self.office)
        self.close_descriptors()

    def disown(self):
        """In a forked child: all of it belongs to the parent."""
        self.close_descriptors()

    cdef int close_descriptors(self) except -1:
        self.news.close()
        if self.waker >= 0:
            os.close(self.waker)
            self.waker = -1
        return 0
