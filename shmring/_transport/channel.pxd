# C declarations of channels between ranks of different hosts.

from libc.stdint cimport uint32_t, uint64_t

from .._core.kernels cimport sr_copy_fn
from .._core.segment cimport sr_flag
from .._core.spsc_ring cimport sr_incoming, sr_outgoing, sr_receipts, sr_ring, sr_ring_end


cdef extern from "channel.h" nogil:
    cdef struct sr_channel:
        int rank, error
        sr_flag end, left, opened, confirmed
        bint watched
        sr_receipts receipts
    cdef struct sr_channels:
        sr_flag aborted_by, nopened
        int news, waker, nchannels, reason_from
        sr_channel *channel
        uint32_t reason_nbytes
        unsigned char *reason
    cdef enum:
        SR_CHANNEL_ABORT, SR_CHANNEL_LEAVING, SR_CHANNEL_VIEW, SR_CHANNEL_CALLING, SR_CHANNEL_CONFIRMED
        SR_CHANNEL_OPEN, SR_CHANNEL_DAMAGED
        SR_CHANNEL_REASON_NBYTES, SR_CHANNEL_REST_NBYTES
    cdef struct sr_channel_call:
        uint64_t seq, fingerprint, count
    void sr_channels_open(sr_channels *, sr_channel *, int nchannels, int news)
    int sr_channel_open(sr_channels *, sr_channel *, int fd, int rank, sr_ring *, void *data, uint64_t nbytes,
                        uint64_t first, void *rest)
    void sr_channel_read(sr_channels *, sr_channel *, sr_ring_end *out_of, sr_incoming *, sr_copy_fn *)
    bint sr_channels_step(sr_channels *)
    bint sr_channels_attend(sr_channels *)
    void sr_channels_wake(sr_channels *)
    bint sr_channels_poll_abort(sr_channels *)
    int sr_channel_push(sr_channels *, sr_channel *, sr_outgoing *)
    int sr_channel_pull(sr_channels *, sr_channel *)
    void sr_channel_withdraw(sr_channels *, sr_channel *)
    void sr_channel_give_receipt(sr_channels *, sr_channel *, uint32_t number)
    void sr_channel_notify(sr_channels *, sr_channel *, int what, const void *body, uint32_t nbytes)
    uint64_t sr_channel_last_note(sr_channels *, sr_channel *, int what, void *note)
    void sr_channels_poll(sr_channels *)
    void sr_channel_probe(sr_channels *, sr_channel *, uint64_t limit_ns)
    bint sr_channel_has_unsent(sr_channels *, sr_channel *)
    bint sr_channel_is_delivering(sr_channels *, sr_channel *)
    void sr_channels_shut(sr_channels *)
