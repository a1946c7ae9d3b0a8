from .._core.segment cimport sr_waitset
from .._engine.queue cimport Pollable
from .messages cimport Matching, Message, UnexpectedMessage, Wait


cdef void complete(Matching *m, Message *message) noexcept nogil
cdef int step_messages(Matching *m) noexcept nogil
cdef void post_send(Matching *m, Message *message) noexcept nogil
cdef void post_receive(Matching *m, Message *message) noexcept nogil
cdef void receive_unexpected(Matching *m, Message *message, UnexpectedMessage *unexpected) noexcept nogil
cdef void discard_unexpected(Matching *m, UnexpectedMessage *unexpected) noexcept nogil
cdef bint has_moved(const Matching *m, const Message *message) noexcept nogil
cdef void withdraw(Matching *m, Message *message) noexcept nogil
cdef void withdraw_all(Matching *m) noexcept nogil
cdef void stage_offers(Matching *m) noexcept nogil
cdef void keep_unexpected(Matching *m, UnexpectedMessage *unexpected) noexcept nogil
cdef bint deliver_to_self(Matching *m, Message *message) noexcept nogil
cdef void open_ring(Matching *m, int receiver) noexcept nogil
cdef int try_message_briefly(Matching *m, Message *message) noexcept nogil
cdef int poll_messages(Pollable *e, sr_waitset *waitset) noexcept nogil
cdef int wait_for_message(Matching *m, Message *message, Wait *wait) noexcept nogil
cdef int status_of_peers(Matching *m, Message *message, int *culprit) noexcept nogil
