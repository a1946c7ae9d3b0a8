# The C declarations of rings of frames: of layout.h, spsc_ring.h, and what only users of rings need of sync/.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from .kernels cimport sr_copy_fn
from .segment cimport sr_counter, sr_event, sr_flag


cdef extern from "layout.h" nogil:
    cdef struct sr_ring:
        sr_counter taken
    cdef struct sr_receipts:
        pass
    cdef struct sr_message_ring:
        sr_receipts receipts
    cdef struct sr_frame:
        uint64_t message_nbytes, nbytes_and_receipt
        uint32_t nbytes, flags, tag, receipt
        uint64_t kind, kind_and_flags
    cdef struct sr_offer:
        uint64_t address, block
    cdef enum:
        SR_FRAME_FIRST, SR_FRAME_CUT, SR_FRAME_OFFER
        SR_RING_LEAST_NBYTES
        SR_ORIGIN_BEGIN, SR_ORIGIN_NBYTES
        SR_PRODUCER, SR_CONSUMER
    cdef struct sr_place:
        sr_flag owner, start_time, first, first_number
    cdef struct sr_reader:
        sr_place place
        sr_ring ring
        sr_event event
    cdef struct sr_broadcast:
        uint64_t magic, nbytes
        uint32_t places, reserved, drops, single_use, aborted
        sr_place writer
        sr_counter tail
        sr_event event
        sr_reader *reader
    cdef enum sr_place_state:
        SR_PLACE_FREE, SR_PLACE_RESERVED, SR_PLACE_JOINED, SR_PLACE_CLOSED
    cdef enum:
        SR_MOST_READERS


cdef extern from "sync/event.h" nogil:
    uint32_t sr_event_watch(sr_event *own_event)
    void sr_event_sleep(sr_event *own_event, uint32_t generation, uint64_t limit_ns)


cdef extern from "sync/flag.h" nogil:
    bint sr_flag_replace_ordered(sr_flag *, uint64_t old, uint64_t value)
    void sr_flag_mark(sr_flag *, uint64_t bits, sr_event *)


cdef extern from "sync/liveness.h" nogil:
    int sr_process_open(int pid)
    bint sr_process_has_ended(int descriptor)
    void sr_process_close(int descriptor)


cdef extern from "receipts.h" nogil:
    enum: SR_RECEIPTS, SR_RECEIPTS_WORDS
    uint32_t sr_receipt_new_number(uint64_t *in_use)
    void sr_receipt_free_number(uint64_t *in_use, uint32_t number)
    uint64_t sr_receipts_count(const sr_receipts *)
    bint sr_receipt_take(sr_receipts *, uint32_t number)
    void sr_receipt_give(sr_receipts *, uint32_t number, sr_event *)


cdef extern from "spsc_ring.h" nogil:
    cdef struct sr_ring_end:
        sr_ring *ring
        unsigned char *bytes
        uint64_t nbytes, position
        size_t piece_nbytes
        sr_event *event
        uint32_t way
    cdef struct sr_outgoing:
        sr_frame head
        const unsigned char *data
        uint64_t offset
    cdef struct sr_incoming:
        unsigned char *data
        uint64_t nbytes, offset
    cdef enum:
        SR_RING_WHOLE, SR_RING_WAIT, SR_RING_CUT, SR_RING_DAMAGED
    bint sr_ring_is_valid_length(uint64_t nbytes)
    void sr_ring_open_end(sr_ring_end *, sr_ring *, void *data, uint64_t nbytes, uint64_t first, sr_event *other,
                          sr_copy_fn *, size_t piece_nbytes)
    uint64_t sr_ring_first(uint64_t near, uint64_t nbytes)
    void sr_ring_format(sr_ring *, uint64_t first)
    uint64_t sr_ring_frame_nbytes(size_t nbytes)
    uint64_t sr_ring_message_nbytes(const sr_ring_end *, uint64_t nbytes)
    void sr_ring_set_piece(sr_ring_end *, size_t nbytes)
    bint sr_ring_load_taken(sr_ring_end *)
    bint sr_ring_has_room(sr_ring_end *, uint64_t nbytes)
    void sr_ring_put(sr_ring_end *, const sr_frame *, const void *data)
    int sr_ring_push(sr_ring_end *, sr_outgoing *)
    int sr_ring_push_part(sr_ring_end *, sr_outgoing *, const unsigned char *part, uint64_t nbytes, uint64_t *done)
    bint sr_ring_has_frame(const sr_ring_end *)
    int sr_ring_peek(const sr_ring_end *, sr_frame *)
    void sr_ring_take(sr_ring_end *, const sr_frame *, void *dst)
    int sr_ring_pull(sr_ring_end *, sr_incoming *)
    void sr_ring_publish_taken(sr_ring_end *)


cdef extern from "offer.h" nogil:
    cdef enum:
        SR_OFFER_OPEN, SR_OFFER_READ, SR_OFFER_REFUSED, SR_OFFER_STAGED
    sr_offer *sr_offer_put(sr_ring_end *, sr_frame *head, uint64_t address, uint64_t block)
    int sr_offer_state(const sr_offer *)
    bint sr_offer_stage(sr_offer *)
    void sr_offer_withdraw(sr_offer *)
    sr_offer *sr_offer_at(const sr_ring_end *, const sr_frame *)
    bint sr_offer_begin(sr_offer *)
    bint sr_offer_answer(sr_offer *, int answer, sr_event *)


cdef extern from "broadcast.h" nogil:
    cdef struct sr_broadcast_writer:
        sr_ring_end end
        int slowest
    enum: SR_FRAME_CONTINUED
    size_t sr_broadcast_head_nbytes(uint64_t places)
    void sr_broadcast_format(sr_broadcast *, uint64_t nbytes, uint32_t places, uint32_t reserved, bint drops,
                             bint single_use, uint64_t first)
    bint sr_broadcast_is_valid(const sr_broadcast *, uint64_t memory_nbytes, uint64_t nbytes, uint64_t places)
    sr_place_state sr_place_get_state "sr_place_state"(uint64_t owner)
    uint32_t sr_place_pid(uint64_t owner)
    uint64_t sr_place_owner(uint32_t pid, sr_place_state state)
    int sr_broadcast_take_place(sr_broadcast *, uint32_t places, uint32_t pid)
    void sr_broadcast_leave(sr_broadcast *, uint32_t i, uint64_t owner)
    void sr_broadcast_open_writer(sr_broadcast_writer *, sr_broadcast *, void *data, uint64_t nbytes, uint64_t first,
                                  sr_copy_fn *, size_t piece_nbytes)
    bint sr_broadcast_has_readers(const sr_broadcast *, uint32_t places)
    bint sr_broadcast_has_changed(const sr_broadcast_writer *)
    uint32_t sr_broadcast_admit(sr_broadcast_writer *, uint32_t places, uint64_t number)
    void sr_broadcast_find_slowest(sr_broadcast_writer *, uint32_t places)
    bint sr_broadcast_drop(sr_broadcast_writer *, uint64_t nbytes)
    bint sr_broadcast_was_dropped(const sr_flag *tail, uint64_t position)
    int sr_broadcast_peek(sr_ring_end *, const sr_flag *tail, sr_frame *)
    int sr_broadcast_pull(sr_ring_end *, const sr_flag *tail, sr_incoming *)
