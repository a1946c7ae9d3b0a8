from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from .._arrays.operands cimport Operand
from .._core.group cimport OPAQUE
from .._core.spsc_ring cimport sr_frame
from .._engine.engine cimport Engine
from .._p2p.messages cimport Matching, Message, UnexpectedMessage


cdef enum:                   # the kind of a message's items: a dtype of shmring, or
    OBJECT_ARRAY = OPAQUE + 1    # ... a frame of _arrays/objects.pyx that is an array
    OBJECT_PICKLE = OPAQUE + 2   # ... one that is a pickle
    FORTRAN = 1 << 8         # bits above that: memory order, then for opaque items
    ITEM_SHIFT = 9           # ... their size
    SIGNATURE_SHIFT = 32     # ... and 24 bits of their signature
    MOST_ITEM_NBYTES = (1 << 23) - 1


cdef inline bint is_object(uint64_t kind) noexcept:
    return kind == OBJECT_ARRAY or kind == OBJECT_PICKLE


cdef class Endpoint


cdef class Status:
    cdef readonly int source
    cdef readonly int64_t tag
    cdef readonly size_t count, nbytes
    cdef uint64_t kind


cdef class Transfer:
    cdef object comm             # which is open as long as somebody has the transfer
    cdef Endpoint endpoint
    cdef Message message
    cdef Operand operand
    cdef object kept             # during the transfer: the array and the owner of its memory
    cdef bint is_released        # the transfer is complete and has released them

    cdef void release_arrays(self) noexcept


cdef class Endpoint:
    cdef Engine engine
    cdef object segment          # the communicator's memory
    cdef int fd                  # of the segment, to allocate the pages of rings
    cdef Matching matching
    cdef bint is_messaging       # a thread is inside a call that sends or receives
    cdef set transfers           # keeps pending transfers alive
    cdef bint is_enlisted        # registered with the progress thread
    cdef UnexpectedMessage *dropped   # messages that matched probes took and nothing will receive
    cdef object __weakref__

    cdef void attach(self, Engine engine, int rank, int size, object segment, int fd) noexcept
    cdef int begin(self) except -1
    cdef void end(self) noexcept
    cdef void acquire_stepper(self) noexcept
    cdef bint acquire_stepper_between_calls(self) noexcept
    cdef void release_completed(self) noexcept
    cdef Transfer next_completed(self)
    cdef int enlist(self) except -1
    cdef bint has_progress_thread(self) noexcept
    cdef void drop(self, UnexpectedMessage *unexpected) noexcept
    cdef int discard_dropped(self) except -1
    cdef int open_messages(self) except -1
    cdef void find_peers(self) noexcept
    cdef void stage_sends(self) noexcept
    cdef int close_messages(self) except -1
    cdef bint is_in_transfer(self, uintptr_t address, size_t nbytes) except -1
    cdef int post(self, Message *message) except -1
    cdef dict chosen_paths(self)
    cdef void find_address(self, Message *message) noexcept
    cdef int number_receipt(self, Message *message) except -1
    cdef int keep_own_message(self, Message *message) except -1
    cdef int open_ring_to(self, int rank) except -1
    cdef int make_room(self) except -1
    cdef int make_room_quietly(self, sr_frame *head) noexcept nogil
    cdef bint advance_quietly(self) noexcept nogil
    cdef int advance(self) except -1
    cdef bint poll_message(self, Message *message, bint leaving_ends) except -1
    cdef void probe_connection(self, const Message *message) noexcept
    cdef bint probe_once(self, Message *probe) except -1
    cdef int post_and_wait(self, Message *message, uint64_t timeout_ns) except -1
    cdef int wait_complete(self, Message *message, uint64_t timeout_ns, bint is_final) except -1
    cdef int await_message(self, Message *message, uint64_t timeout_ns, bint is_final) except -1
    cdef int trace_message(self, Message *message) noexcept
    cdef int abandon(self, Message *message, object error) except -1
    cdef int raise_for(self, int status, Message *message, int culprit, uint64_t timeout_ns, bint is_final) except -1
    cdef str cause_of_death(self, int rank)
    cdef int number_in_engine(self, int rank) noexcept
    cdef int raise_damaged(self, int source) except -1


cdef Status status_of(Message *message)
cdef object result_of(Message *message, int rank)
cdef object mismatch(Message *message, int rank, str what_now)
