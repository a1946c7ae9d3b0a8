# A rank's channels to ranks of other hosts: their memory, and sending and receiving notifications.

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

from .._core.segment cimport SR_LINE, SR_PAGE, SR_VIEW_NBYTES, sr_flag_load
from .._core.spsc_ring cimport sr_ring, sr_ring_first
from .channel cimport (
    SR_CHANNEL_ABORT, SR_CHANNEL_CALLING, SR_CHANNEL_LEAVING, SR_CHANNEL_OPEN, SR_CHANNEL_REASON_NBYTES,
    SR_CHANNEL_REST_NBYTES, SR_CHANNEL_VIEW, sr_channel, sr_channel_call, sr_channel_has_unsent,
    sr_channel_is_delivering, sr_channel_last_note, sr_channel_notify, sr_channel_open, sr_channel_probe, sr_channels,
    sr_channels_open, sr_channels_poll, sr_channels_poll_abort, sr_channels_shut, sr_channels_step,
)

cdef extern from "<sys/mman.h>":
    enum: MAP_NORESERVE

ABORT = SR_CHANNEL_ABORT
LEAVING = SR_CHANNEL_LEAVING
VIEW = SR_CHANNEL_VIEW
MOST_NBYTES = SR_CHANNEL_REASON_NBYTES

cdef enum:
    MOST_RING_NBYTES = 1 << 20
    MANY_CHANNELS = 4           # from so many on, ...
    MANY_RING_NBYTES = 1 << 18  # ... each ring is shorter


cdef class Channels:
    """One rank's channels, by the rank at the other end. It keeps the sockets; their creator closes them.

    ring_nbytes: maximum size of a receive ring. first_seq: start of its positions.
    """

    def __cinit__(self, socks, uint64_t ring_nbytes, uint64_t first_seq):
        cdef uint64_t first, most_nbytes
        cdef size_t room_nbytes
        cdef int number, error
        cdef unsigned char *room
        self.waker = -1   # first: __dealloc__ would close descriptor 0
        self.socks = dict(sorted(socks.items()))
        self.number_of = {rank: number for number, rank in enumerate(self.socks)}
        self.news = select.epoll()
        self.waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        most_nbytes = MOST_RING_NBYTES if len(socks) < MANY_CHANNELS else MANY_RING_NBYTES
        ring_nbytes = min(ring_nbytes, most_nbytes)
        first = sr_ring_first(first_seq, ring_nbytes)
        room_nbytes = SR_PAGE + ((ring_nbytes + SR_PAGE - 1) & ~<size_t> (SR_PAGE - 1)) + SR_CHANNEL_REST_NBYTES
        self.allocate(len(socks), room_nbytes)
        sr_channels_open(self.channels, self.channel, len(socks), self.news.fileno())
        self.channels.waker = self.waker
        for number, (rank, sock) in enumerate(self.socks.items()):
            room = <unsigned char *> self.memory + number * room_nbytes
            error = sr_channel_open(self.channels, &self.channel[number], sock.fileno(), rank, <sr_ring *> room,
                                    room + SR_PAGE, ring_nbytes, first, room + room_nbytes - SR_CHANNEL_REST_NBYTES)
            if error != 0:
                raise OSError(error, os.strerror(error))

    # Pages are populated on first use: few pairs of ranks ever exchange messages.
    cdef int allocate(self, int nchannels, size_t room_nbytes) except -1:
        cdef void *memory
        self.channel = <sr_channel *> calloc(nchannels + 1, sizeof(sr_channel))
        if self.channel == NULL or posix_memalign(<void **> &self.channels, SR_LINE, sizeof(sr_channels)) != 0:
            raise MemoryError()
        memset(self.channels, 0, sizeof(sr_channels))
        memory = map_memory(NULL, nchannels * room_nbytes + SR_PAGE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if memory == MAP_FAILED:
            raise MemoryError()
        self.memory, self.memory_nbytes = memory, nchannels * room_nbytes + SR_PAGE
        return 0

    def __dealloc__(self):
        if self.waker >= 0:
            os.close(self.waker)
        free(self.channel)
        free(self.channels)
        if self.memory != NULL:
            munmap(self.memory, self.memory_nbytes)

    cdef sr_channel *channel_of(self, int rank) except NULL:
        return &self.channel[self.number_of[rank]]

    def fileno(self):
        """Return a descriptor that is readable once data have arrived."""
        return self.news.fileno()

    def notify(self, int what, bytes body):
        """Notify all reachable ranks."""
        cdef int number
        for number in range(self.channels.nchannels):
            sr_channel_notify(self.channels, &self.channel[number], what, <const char *> body, len(body))

    def send_unsent(self):
        """Send what is left over until all is sent, or this is closed. For a thread of its own."""
        cdef double pause_s = 0.001
        while not self.news.closed and self.has_unsent():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def has_unsent(self):
        """Send what is left over, and return True if some of it still is."""
        cdef bint is_any = False
        cdef int number
        for number in range(self.channels.nchannels):
            is_any = sr_channel_has_unsent(self.channels, &self.channel[number]) or is_any
        return is_any

    def abort_reason(self):
        """Return (rank, reason) of the abort that another rank has sent, or None."""
        if not sr_channels_poll_abort(self.channels):
            return None
        return self.channel[self.channels.reason_from].rank, self.channels.reason[:self.channels.reason_nbytes]

    def notify_call(self, uint64_t seq, uint64_t fingerprint, uint64_t count):
        """Notify all ranks of the collective in which this rank waits."""
        cdef sr_channel_call call = sr_channel_call(seq, fingerprint, count)
        self.notify(SR_CHANNEL_CALLING, (<const char *> &call)[:sizeof(call)])

    def call_of(self, int rank):
        """Return (seq, fingerprint, count) of the collective that a rank last reported to wait in, or None."""
        cdef sr_channel_call call
        if not sr_channel_last_note(self.channels, self.channel_of(rank), SR_CHANNEL_CALLING, &call):
            return None
        return call.seq, call.fingerprint, call.count

    def other_call(self, uint64_t seq, uint64_t fingerprint):
        """Return a rank that reported to wait in a different collective with the same number, or None."""
        cdef sr_channel_call call
        cdef int number
        for number in range(self.channels.nchannels):
            if (sr_channel_last_note(self.channels, &self.channel[number], SR_CHANNEL_CALLING,
                                     &call) and call.seq == seq
                    and call.fingerprint != fingerprint):
                return self.channel[number].rank
        return None

    def await_news(self, double within_s):
        """Return when data have arrived, or after `within_s`."""
        if self.news.closed:
            time.sleep(within_s)
            return
        try:
            self.news.poll(within_s)
        except InterruptedError:
            pass

    def view_of(self, int rank):
        """Return the last view of a rank; None if it has sent none."""
        cdef unsigned char[SR_VIEW_NBYTES] view
        cdef bint is_there = sr_channel_last_note(self.channels, self.channel_of(rank), SR_CHANNEL_VIEW, view) != 0
        return view[:SR_VIEW_NBYTES] if is_there else None

    def poll(self, double cut_s):
        """Receive notifications, no messages. cut_s: a rank that does not answer for this long is gone."""
        cdef int number
        sr_channels_poll(self.channels)
        for number in range(self.channels.nchannels):
            sr_channel_probe(self.channels, &self.channel[number], <uint64_t> (cut_s * 1e9))

    def has_ended(self, int rank):
        """True if no more data will come from a rank."""
        return sr_flag_load(&self.channel_of(rank).end) != SR_CHANNEL_OPEN

    def error_of(self, int rank):
        """Return the errno with which the channel to a rank has ended; 0: it was closed, or has not ended."""
        return self.channel_of(rank).error

    def has_left(self, int rank):
        """True if a rank has notified that it leaves."""
        return sr_flag_load(&self.channel_of(rank).left) != 0

    def deliver(self, double within_s, double cut_s, bint unless_over=True):
        """Wait until sent messages and the last view have reached the hosts of their receivers.

        Return early if they cannot and, with unless_over, if a rank reports an abort. cut_s: a rank that does not
        answer for this long is gone. Data that arrive meanwhile are received, so two ranks that call this at once do
        not wait for each other.
        """
        cdef double until = time.monotonic() + within_s
        cdef double pause_s = 0.001
        while self.is_delivering(<uint64_t> (cut_s * 1e9)) and time.monotonic() < until:
            self.await_news(pause_s)   # an acknowledgement does not wake it
            sr_channels_step(self.channels)
            if unless_over and self.abort_reason() is not None:
                return
            pause_s = min(2 * pause_s, 0.02)

    cdef bint is_delivering(self, uint64_t cut_ns):
        cdef bint is_any = False
        cdef int number
        for number in range(self.channels.nchannels if not self.news.closed else 0):
            if sr_channel_is_delivering(self.channels, &self.channel[number]):
                sr_channel_probe(self.channels, &self.channel[number], cut_ns)
                is_any = True
        return is_any

    def close(self, double within_s):
        """Send pending notifications and stop. The creator closes the sockets. A second call does nothing."""
        cdef double until = time.monotonic() + within_s
        if self.news.closed:
            return
        sr_channels_step(self.channels)
        while self.has_unsent() and time.monotonic() < until:
            self.await_news(0.02)
            sr_channels_step(self.channels)
        sr_channels_shut(self.channels)
        self.close_fds()

    def close_fds(self):
        """Close the descriptors, and nothing else: in a forked child they are inherited."""
        self.news.close()
        if self.waker >= 0:
            os.close(self.waker)
            self.waker = -1
