from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t

from .._arrays.operands cimport Operand
from .._p2p.messages cimport Message, UnexpectedMessage
from .endpoint cimport Endpoint
from .object_collectives cimport ObjectCollectives


cdef class ProbedMessage


# Properties of a received message, for callers in Cython.
cdef struct Envelope:
    int source
    int64_t tag
    size_t nbytes


cdef class Messages(ObjectCollectives):
    cdef Endpoint endpoint

    cdef object fill_message(self, Message *message, Operand *operand, object x, bint is_send, object peer,
                             object tag, object context, str what)
    cdef int fill_frame(self, Message *message, Operand *operand, object frame, bint is_send, object peer,
                        object tag, object context) except -1
    cdef int set_envelope(self, Message *message, bint is_send, object peer, object tag, object context) except -1
    cdef int set_pattern(self, Message *message, object source, object tag, object context) except -1
    cdef object begin_transfer(self, object x, bint is_send, object peer, object tag, object context,
                               bint wants_receipt, UnexpectedMessage *taken)
    cdef ProbedMessage new_probe(self)
    cdef object fill_object(self, Message *message, Operand *operand, const Message *found)
    cdef object unpack_received(self, object frame, Message *message, bint with_status)
    cdef int send_bytes(self, const void *data, size_t nbytes, int dest, int64_t tag) except -1
    cdef int recv_bytes(self, void *data, size_t nbytes, int source, int64_t tag, Envelope *envelope) except -1
    cdef bytes recv_new_bytes(self, int source, int64_t tag, Envelope *envelope)
    cdef int set_envelope_of(self, Message *message, Envelope *envelope) except -1
    cdef object result_of_received(self, Message *message)
    cdef int rank_number(self, object rank, str what, bint may_be_any) except -2


cdef class ProbedMessage:
    cdef Messages comm
    cdef Endpoint endpoint
    cdef Message probe

    cdef int check_unreceived(self) except -1
