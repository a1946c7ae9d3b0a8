# Mail between ranks of different hosts as Cython sees it.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from .._core.group cimport sr_copy_fn, sr_flag
from .._core.spsc_ring cimport sr_incoming, sr_outgoing, sr_ring, sr_ring_end


cdef extern from "post.h" nogil:
    cdef struct sr_post:
        int rank, error
        sr_flag end, left, opened, confirmed
        bint watched
    cdef struct sr_office:
        sr_flag heard, nopened
        int news, waker, nposts, word_from
        sr_post *post
        uint32_t word_nbytes
        unsigned char *word
    cdef enum:
        SR_POST_OVER, SR_POST_LEAVING, SR_POST_VIEW, SR_POST_CALLING, SR_POST_CONFIRMED
        SR_POST_OPEN, SR_POST_CLOSED, SR_POST_FAILED, SR_POST_DAMAGED
        SR_POST_WORD_NBYTES, SR_POST_REST_NBYTES
    cdef struct sr_post_call:
        uint64_t seq, fingerprint, count
    void sr_office_open(sr_office *, sr_post *, int nposts, int news)
    int sr_post_open(sr_office *, sr_post *, int fd, int rank, sr_ring *, void *data, uint64_t nbytes, uint64_t first,
                     void *rest)
    void sr_post_read(sr_office *, sr_post *, sr_ring_end *out_of, sr_incoming *, sr_copy_fn *)
    bint sr_office_step(sr_office *)
    bint sr_office_attend(sr_office *)
    void sr_office_wake(sr_office *)
    bint sr_office_hears(sr_office *)
    int sr_post_push(sr_office *, sr_post *, sr_outgoing *)
    int sr_post_pull(sr_office *, sr_post *)
    void sr_post_withdraw(sr_office *, sr_post *)
    void sr_post_say(sr_office *, sr_post *, int what, const void *body, uint32_t nbytes)
    uint64_t sr_post_hear(sr_office *, sr_post *, int what, void *note)
    void sr_office_look(sr_office *)
    void sr_post_check_link(sr_office *, sr_post *, uint64_t limit_ns)
    bint sr_post_owes(sr_office *, sr_post *)
    bint sr_post_is_delivering(sr_office *, sr_post *)
    void sr_office_shut(sr_office *)
