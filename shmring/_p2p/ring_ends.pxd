# The base class of Ring and Broadcast.

from libc.stdint cimport uint32_t, uint64_t

from .._core cimport numpy_api as cnp
from .._core.segment cimport sr_event, sr_flag
from .._core.spsc_ring cimport sr_broadcast, sr_broadcast_writer, sr_frame, sr_incoming, sr_outgoing, sr_ring_end
from .ring_frames cimport Shape


cdef class RingEnds:
    cdef sr_broadcast *shared           # NULL: closed
    cdef sr_broadcast_writer writer     # with the end at which this process puts
    cdef sr_ring_end consumer           # the end at which this process gets
    cdef object mapping                 # keeps the memory mapped
    cdef bint puts, gets                # this process uses that side
    cdef bint is_putting, is_getting    # a thread of this process is in put or get
    cdef int pauses
    cdef uint64_t nbytes_of_ring        # a copy that has been checked, as ...
    cdef uint32_t places                # ... this one of the number of readers' places
    cdef bint keeps_readers             # only the readers of the beginning count: without them, a put is an error
    cdef bint has_readers               # when the writer last looked
    cdef int place, pid                 # of this reader
    cdef bint has_entered               # the writer has admitted this reader
    cdef uint64_t[2] slept_ns, checked_ns    # by side: when the last sleep was to end; when check_if_due last checked
    cdef int[2] watched_pid, watched_fd    # by side: the process for which it waits, and a descriptor of that process
    cdef bint must_send_cut             # the last put was interrupted: the frame `cut` must still be sent
    cdef sr_frame cut
    cdef object put_dtype, put_names, put_text    # from the last description sent; None: the next array sends one
    cdef Shape put_shape
    cdef object got_dtype, got_names, got_text    # from the last description received; names to see renamed fields
    cdef Shape got_shape
    cdef sr_incoming incoming           # the message being received
    cdef object item                    # its destination; None: no message is being received
    cdef object item_kind
    cdef bint item_is_given             # ... and it is the caller's array; never so between calls
    cdef bint item_is_whole             # ... and all of it has come; so between calls only if a get has refused it
    cdef sr_flag interrupted            # 1: no call of this process waits any more
    cdef const sr_flag *tail            # if the writer drops items: position of the oldest item; else NULL
    cdef uint64_t number, next_number   # of the next item that goes in, and of the next one that comes out
    cdef readonly uint64_t _nlost       # items that the writer has dropped before this process could get them
    cdef readonly object _last_death    # how the last reader that was found dead died
    cdef readonly object closed_because
    cdef public int _fd                 # of the memory; -1: not open, or given up. Setting it allocates nothing

    cdef int begin_put(self) except -1
    cdef int put_array(self, object given, bint block, uint64_t *deadline) except -1
    cdef bint is_described(self, cnp.ndarray x) except -1
    cdef int send_description(self, cnp.ndarray x, size_t nbytes, bint block, uint64_t *deadline) except -1
    cdef int check_room(self, uint64_t room_nbytes, bint block) except -1
    cdef int begin_message(self, sr_outgoing *message, int kind, uint64_t nbytes, uint64_t *deadline) except -1
    cdef int send(self, int kind, const unsigned char *data, size_t nbytes, uint64_t *deadline) except -1
    cdef int send_parts(self, int kind, list parts, size_t nbytes, uint64_t *deadline) except -1
    cdef int send_part(self, object part, sr_outgoing *message, uint64_t *deadline) except -1
    cdef int void_message(self, sr_outgoing *message) except -1
    cdef int send_cut(self, uint64_t *deadline) except -1
    cdef object next_item(self, object timeout, bint block, object out, bint takes_objects)
    cdef object unpickled(self, object item)
    cdef int release_given(self) except -1
    cdef object new_array(self, bint is_fortran)
    cdef int begin_get(self) except -1
    cdef bint begin_item(self, object out, bint takes_objects, bint block, uint64_t *deadline) except -1
    cdef object room_for_array(self, sr_frame *head, int kind, object out)
    cdef int check_out(self, object out, bint is_fortran) except -1
    cdef bint finish_item(self, bint block, uint64_t *deadline) except -1
    cdef object deliver(self, object out, bint takes_objects)
    cdef int keep_description(self, bytes words) except -1
    cdef int wait_for_frame(self, bint block, uint64_t *deadline) except -1
    cdef int take_side(self, int side) except -1
    cdef int become_writer(self, int pid, uint64_t start_time) except -1
    cdef int become_reader(self, int pid, uint64_t start_time) except -1
    cdef bint vacate_if_dead(self, uint32_t i) except -1
    cdef unsigned char *data(self) noexcept nogil
    cdef bint may_take(self) except -1
    cdef bint is_admitted(self) noexcept nogil
    cdef int check_readers(self) except -1
    cdef bint is_ready(self, int side, uint64_t room_nbytes) noexcept nogil
    cdef sr_event *event_of(self, int side) noexcept nogil
    cdef bint is_closed_there(self, int side) noexcept nogil
    cdef int awaited_pid(self, int side) noexcept nogil
    cdef int poll_awaited(self, int side) except -1
    cdef int drop_for(self, uint64_t room_nbytes) except -1
    cdef int wait(self, int side, uint64_t room_nbytes, uint64_t *deadline) except -1
    cdef bint spin(self, int side, uint64_t room_nbytes, int pauses) noexcept nogil
    cdef bint sleep(self, int side, uint64_t room_nbytes, uint64_t until_ns) noexcept nogil
    cdef bint sleep_and_poll(self, int side, uint64_t room_nbytes, uint64_t deadline, uint64_t *next_poll,
                             int *npolls) noexcept nogil
    cdef int check_awaited(self, int side, uint64_t room_nbytes, int npolls) except -1
    cdef int check_if_due(self, int side, uint64_t room_nbytes) except -1
    cdef int check_closed(self, int side, uint64_t room_nbytes) except -1
    cdef int stop_watching(self, int side) except -1
    cdef int set_interrupted(self) except -1
    cdef int leave(self) except -1
