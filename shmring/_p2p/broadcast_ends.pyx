# The ends of a ring with one writer and several readers.

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from .._arrays.objects cimport pieces_of
from .._core.kernels cimport find_kernels
from .._core.segment cimport (
    SR_CACHE_LINE, SR_PAGE, sr_event, sr_event_signal, sr_flag_load, sr_flag_load_ordered, sr_flag_set,
)
from .._core.spsc_ring cimport (
    SR_CONSUMER, SR_MOST_READERS, SR_PLACE_CLOSED, SR_PLACE_FREE, SR_PLACE_JOINED, SR_PLACE_RESERVED, SR_PRODUCER,
    sr_broadcast, sr_broadcast_admit, sr_broadcast_drop, sr_broadcast_find_slowest, sr_broadcast_format,
    sr_broadcast_has_changed, sr_broadcast_has_readers, sr_broadcast_head_nbytes, sr_broadcast_is_valid,
    sr_broadcast_leave, sr_broadcast_open_writer, sr_broadcast_take_place, sr_broadcast_was_dropped,
    sr_broadcast_writer, sr_flag_mark, sr_flag_replace_ordered, sr_place, sr_place_get_state, sr_place_owner,
    sr_place_pid, sr_reader, sr_ring_end, sr_ring_frame_nbytes, sr_ring_has_frame, sr_ring_has_room,
    sr_ring_message_nbytes, sr_ring_open_end,
)
from .._core.timeouts cimport NEVER_NS, deadline_ns_of
from .ring_ends cimport RingEndsBase
from .ring_frames cimport JOIN_NBYTES, OBJECT, PIECE_NBYTES

from ..errors import Closed, Error

MOST_READERS = SR_MOST_READERS


cdef class BroadcastEnds(RingEndsBase):
    """The writer's end and one reader's end of a ring with several readers."""

    cdef sr_broadcast *shared
    cdef sr_broadcast_writer writer
    cdef uint32_t places                # a copy that has been checked
    cdef bint keeps_readers             # only the readers of the beginning count: without them, a put is an error
    cdef int place, pid                 # of this reader
    cdef bint has_entered               # the writer has admitted this reader
    cdef readonly object _last_death    # how the last reader that was found dead died

    def __dealloc__(self):   # as that of RingEndsBase
        if self.shared != NULL and self.is_mapped():
            self.leave()

    def __init__(self, mapping, int pauses):
        cdef uintptr_t address = mapping.address
        cdef sr_broadcast *shared = <sr_broadcast *> address
        cdef uint64_t nbytes = 0, places = 0
        if mapping.nbytes >= SR_PAGE:
            nbytes, places = shared.nbytes, shared.places
        if not sr_broadcast_is_valid(shared, mapping.nbytes, nbytes, places):
            raise Error("this memory is not a broadcast ring of this version of shmring")
        self.mapping = mapping
        self.nbytes_of_ring = nbytes
        self.places = <uint32_t> places
        self.keeps_readers = shared.reserved == places
        self.shared = shared
        self.aborted = &shared.aborted
        self.producer = &self.writer.end
        self.tail = &shared.tail.value if shared.drops else NULL
        self.pauses = pauses
        self.closed_because = None

    @staticmethod
    def _format(uintptr_t address, uint64_t nbytes, uint32_t places, uint32_t reserved, bint drops):
        """Format a ring of nbytes, a power of two, in zeroed memory."""
        cdef sr_broadcast *shared = <sr_broadcast *> address
        sr_broadcast_format(shared, nbytes, places, reserved, drops, 0)

    @staticmethod
    def _head_nbytes(uint64_t places):
        """Return the bytes before the ring's data."""
        return sr_broadcast_head_nbytes(places)

    # -- objects --

    def put_object(self, obj, timeout=None, *, bint block=True):
        """Pickle an object, and wait until all of it is in the ring. Its arrays are not copied before.

        Parameters
        ----------
        obj : object
            Anything that can be pickled.
        timeout : float, optional
            Seconds; None waits for ever.
        block : bool
            As in `put`.

        Raises
        ------
        Timeout, Closed, RankFailed, ValueError
            As `put`.
        """
        cdef uint64_t deadline = deadline_ns_of(timeout)
        cdef uint64_t room_nbytes = 0
        cdef size_t nbytes = 0
        cdef list parts = pieces_of(obj)
        for part in parts:
            nbytes += len(part)
        if nbytes <= JOIN_NBYTES:
            parts = [b"".join(parts)]
        self.begin_put()
        try:
            for part in parts:
                room_nbytes += sr_ring_message_nbytes(self.producer, len(part))
            self.check_room(room_nbytes, block)
            self.send_parts(OBJECT, parts, nbytes, &deadline)
            self.number += 1
        finally:
            self.is_putting = False

    def get_object(self, timeout=None, *, bint block=True):
        """Return the next item: an object unpickled, bytes and arrays as `get` returns them.

        Unpickling runs code that the pickle names, so only get from processes that you trust.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits for ever.
        block : bool
            As in `get`.

        Returns
        -------
        object
            The item. Arrays in it are writable.

        Raises
        ------
        Timeout, Closed, RankFailed
            As `get`.
        """
        return self.next_item(timeout, block, None, True)

    @property
    def lost(self):
        """Number of items that this reader has lost, since the writer dropped them before they were got."""
        return self.nlost

    @property
    def readers(self):
        """Number of readers that have come and not left. Those that were killed may still count."""
        cdef uint32_t i
        cdef int count = 0
        if self.closed_because is not None:
            raise Closed(self.closed_because)
        for i in range(self.places):
            count += sr_place_pid(sr_flag_load(&self.shared.reader[i].place.owner)) != 0
        return count

    # -- places --

    cdef int take_side(self, int side) except -1:
        pid, start_time = self._come()
        if side == SR_PRODUCER:
            self.become_writer(pid, start_time)
        else:
            self.become_reader(pid, start_time)
        return 0

    cdef int become_writer(self, int pid, uint64_t start_time) except -1:
        cdef sr_place *place = &self.shared.writer
        if not sr_flag_replace_ordered(&place.owner, SR_PLACE_FREE, sr_place_owner(pid, SR_PLACE_JOINED)):
            raise RuntimeError(f"process {sr_place_pid(sr_flag_load(&place.owner))} puts into this ring already, or "
                               "has done so; a broadcast ring has one writer")
        sr_flag_set(&place.start_time, start_time)
        sr_broadcast_open_writer(&self.writer, self.shared, self.data(), self.nbytes_of_ring, 0,
                                 find_kernels(NULL).copy, PIECE_NBYTES)
        self.puts = True
        return 0

    cdef int become_reader(self, int pid, uint64_t start_time) except -1:
        cdef int place = sr_broadcast_take_place(self.shared, self.places, pid)
        cdef uint32_t i
        if place < 0:
            for i in range(self.places):
                self.free_place_of_the_dead(i)
            place = sr_broadcast_take_place(self.shared, self.places, pid)
        if place < 0:
            raise RuntimeError(f"{self.places} processes get from this ring already, as many as it was made for")
        sr_flag_set(&self.shared.reader[place].place.start_time, start_time)
        memset(&self.consumer, 0, sizeof(sr_ring_end))
        self.place, self.pid, self.has_entered = place, pid, False
        self.gets = True
        return 0

    # Free a reader's place if its owner is dead. Return whether the place is free now.
    cdef bint free_place_of_the_dead(self, uint32_t i) except -1:
        cdef sr_place *place = &self.shared.reader[i].place
        cdef uint64_t owner = sr_flag_load(&place.owner)
        if sr_place_pid(owner) == 0:
            return False
        cause = self._cause_of_death(sr_place_pid(owner), sr_flag_load(&place.start_time))
        if cause is None:
            return False
        self._last_death = cause
        sr_broadcast_leave(self.shared, i, owner)
        return True

    cdef unsigned char *data(self) noexcept nogil:
        return <unsigned char *> self.shared + sr_broadcast_head_nbytes(self.places)

    cdef bint may_take(self) except -1:
        cdef sr_reader *reader = &self.shared.reader[self.place]
        cdef uint64_t first
        if self.has_entered:
            return True
        if not self.is_admitted():
            return False
        first = sr_flag_load(&reader.place.first)
        if first % SR_CACHE_LINE:
            raise self._damaged()
        sr_ring_open_end(&self.consumer, &reader.ring, self.data(), self.nbytes_of_ring, first, &reader.event,
                         find_kernels(NULL).copy, PIECE_NBYTES)
        self.next_number = sr_flag_load(&reader.place.first_number)
        self.nlost = 0
        self.has_entered = True
        return True

    cdef bint is_admitted(self) noexcept nogil:
        return sr_place_get_state(sr_flag_load_ordered(&self.shared.reader[self.place].place.owner)) == SR_PLACE_JOINED

    # -- what RingEndsBase needs --

    cdef int check_readers(self) except -1:
        cdef uint64_t no_deadline = NEVER_NS
        if not sr_broadcast_has_changed(&self.writer):
            return 0
        # A reader's first frame must not be the end of an item that it has not seen.
        if self.must_send_cut and self.is_ready(SR_PRODUCER, sr_ring_frame_nbytes(0)):
            self.send_cut(&no_deadline)
        if not self.must_send_cut:
            if sr_broadcast_admit(&self.writer, self.places, self.number):
                self.put_dtype = None    # describe the next array again
        if self.keeps_readers and not sr_broadcast_has_readers(self.shared, self.places):
            raise self._closed_there(True)
        return 0

    cdef bint is_ready(self, int side, uint64_t room_nbytes) noexcept nogil:
        if side == SR_CONSUMER:
            if not self.has_entered:
                return self.is_admitted()
            return sr_ring_has_frame(&self.consumer) or sr_broadcast_was_dropped(self.tail, self.consumer.position)
        if sr_ring_has_room(self.producer, room_nbytes):
            return True
        if self.tail != NULL:
            return False
        sr_broadcast_find_slowest(&self.writer, self.places)
        if self.writer.slowest < 0 and self.keeps_readers:
            return False
        return sr_ring_has_room(self.producer, room_nbytes)

    cdef sr_event *event_of(self, int side) noexcept nogil:
        if side == SR_CONSUMER:
            return &self.shared.event
        return &self.shared.reader[self.writer.slowest].event if self.writer.slowest >= 0 else NULL

    cdef bint is_closed_there(self, int side) noexcept nogil:
        if side == SR_CONSUMER:
            return sr_place_get_state(sr_flag_load(&self.shared.writer.owner)) == SR_PLACE_CLOSED
        return self.writer.slowest < 0 and self.keeps_readers

    cdef int awaited_pid(self, int side) noexcept nogil:
        if side == SR_CONSUMER:
            return sr_place_pid(sr_flag_load(&self.shared.writer.owner))
        if self.writer.slowest < 0:
            return 0
        return sr_place_pid(sr_flag_load(&self.shared.reader[self.writer.slowest].place.owner))

    cdef int poll_awaited(self, int side) except -1:
        cdef sr_place *place = &self.shared.writer
        cdef int slowest = self.writer.slowest
        cdef uint32_t i
        if side == SR_CONSUMER:
            self._poll_writer(sr_place_pid(sr_flag_load(&place.owner)), sr_flag_load(&place.start_time),
                              self.readers_pids())
        elif slowest >= 0 and not self.free_place_of_the_dead(slowest):
            if sr_place_pid(sr_flag_load(&self.shared.reader[slowest].place.owner)) == 0:
                cause = self._why_none_comes(self.readers_pids())
                if cause is not None:
                    self._last_death = cause
                    for i in range(self.places):
                        if sr_flag_load(&self.shared.reader[i].place.owner) == SR_PLACE_RESERVED:
                            sr_broadcast_leave(self.shared, i, SR_PLACE_RESERVED)
        return 0

    cdef object readers_pids(self):
        cdef uint32_t i
        pids = set()
        for i in range(self.places):
            pids.add(sr_place_pid(sr_flag_load(&self.shared.reader[i].place.owner)))
        return pids

    cdef int drop_for(self, uint64_t room_nbytes) except -1:
        if room_nbytes + SR_CACHE_LINE > self.nbytes_of_ring:
            raise ValueError(f"the item needs {room_nbytes} bytes; with drop=True it has to fit into the ring, which "
                             f"has {self.nbytes_of_ring - SR_CACHE_LINE}: make a larger ring")
        if not sr_broadcast_drop(&self.writer, room_nbytes):
            raise self._damaged()
        return 0

    # The writer may sleep on the event of any reader.
    cdef int set_interrupted(self) except -1:
        cdef uint32_t i
        sr_flag_mark(&self.interrupted, 1, &self.shared.event)
        for i in range(self.places):
            sr_flag_mark(&self.interrupted, 1, &self.shared.reader[i].event)
        return 0

    cdef int leave(self) except -1:
        cdef sr_place *place = &self.shared.writer
        cdef uint64_t owner
        cdef int _attempt
        if self.gets:
            for _attempt in range(2):    # in between the writer may admit this reader
                owner = sr_flag_load(&self.shared.reader[self.place].place.owner)
                if sr_place_pid(owner) == <uint32_t> self.pid:
                    sr_broadcast_leave(self.shared, self.place, owner)
        if self.puts:
            owner = sr_flag_load(&place.owner)
            sr_flag_replace_ordered(&place.owner, owner, sr_place_owner(sr_place_pid(owner), SR_PLACE_CLOSED))
            sr_event_signal(&self.shared.event)
        self.shared = NULL
        self.tail = NULL
        return 0
