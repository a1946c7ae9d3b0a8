# The C declarations of the shared segment, of what works on it in src/sync/, of fault points and of single copies.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from .kernels cimport sr_kernels


cdef extern from "layout.h" nogil:
    ctypedef struct sr_flag:
        pass
    cdef struct sr_call_line:
        sr_flag seq
        uint64_t fingerprint
        unsigned char *payload
    cdef struct sr_descriptor:
        uint64_t x_block, out_block
        uint64_t x_offset, out_offset
        uint32_t far, ping, skew, next_in_place
    cdef struct sr_counter:
        sr_flag value
    cdef struct sr_event:
        pass
    cdef struct sr_liveness:
        int pid
        uint64_t start_time, address, nonce
    cdef struct sr_record:
        uint64_t seq, count
        int64_t number
        uint8_t kind, dtype, op, algorithm, order, named, wire
        uint32_t root
        uint16_t hosts_in_group
        uint8_t invalid, outcome
        uint16_t priority
        uint32_t item_nbytes
        char *item_name
    cdef struct sr_wait:
        sr_flag since_ns, until_ns, seq, what, flag, target
    cdef struct sr_stack_request:
        uint32_t rank, size
        sr_flag version
    cdef struct sr_report:
        uint64_t seq
        int64_t number
        char *op
        char *reason
    cdef struct sr_seqlock:
        pass
    cdef struct sr_lane:
        sr_call_line *line
        sr_counter *progress
        sr_event event
        sr_liveness liveness
        sr_report report
        sr_event p2p_event
        sr_flag *p2p_senders
        sr_record *record
        sr_seqlock view
        sr_wait *wait
        sr_stack_request stack_request
        char *stacks
    ctypedef struct sr_tuning "struct sr_tuning":
        uint64_t small_nbytes, far_stream_nbytes, one_chunk_nbytes, chunk_nbytes, exchange_nbytes
        uint64_t stream_out_nbytes, stream_reduced_nbytes, fuse_nbytes, ping_nbytes
        uint64_t single_copy_measured, single_copy_nbytes, single_copy_scatter_nbytes, single_copy_most_nbytes
        uint64_t cached_chunk_nbytes, cached_most_nbytes, chain_nbytes, stream_in_place_nbytes
        uint64_t single_copy_message_nbytes, small_all_reduce_nbytes
    cdef struct sr_header:
        uint64_t magic
        uint32_t nranks, forced_path
        uint64_t staging_nbytes, message_ring_nbytes, first_seq
        unsigned char *key
        sr_tuning *tuning
        sr_flag abort, quiet_until_ns
    cdef enum:
        SR_PAGE, SR_LINE, SR_LINES, SR_CACHE_LINE, SR_PAYLOAD_NBYTES, SR_RECORDS, SR_MAX_RANKS
        SR_OP_NBYTES, SR_REASON_NBYTES, SR_ITEM_NAME_NBYTES, SR_VIEW_NBYTES, SR_VIEW_WORDS, SR_KEY_NBYTES
        SR_MAGIC
        SR_STAGED, SR_REDUCED, SR_COPIED, SR_HANDED, SR_FINISHED, SR_PINGED, SR_PROGRESSES
        SR_JOINED, SR_CLOSED
        SR_NO_ABORT, SR_RANK_FAILED, SR_TIMED_OUT, SR_MISMATCHED, SR_ABORTED, SR_REMOTE_ABORT
        SR_UNDER_WAY, SR_COMPLETE, SR_RAISED
    const uint64_t SR_PRIVATE
    sr_lane *sr_layout_lane(void *segment, int rank)
    size_t sr_layout_control_nbytes(int nranks)
    size_t sr_layout_staging_offset(int nranks, size_t staging_nbytes, int rank)
    size_t sr_layout_lap_nbytes(size_t staging_nbytes)
    size_t sr_layout_message_room_nbytes(size_t message_ring_nbytes)
    size_t sr_layout_message_ring_offset(int nranks, size_t staging_nbytes, size_t message_ring_nbytes, int sender,
                                         int receiver)
    size_t sr_layout_segment_nbytes(int nranks, size_t staging_nbytes, size_t message_ring_nbytes)


cdef extern from "sync/clock.h" nogil:
    uint64_t sr_now_ns()
    uint64_t sr_time_away(uint64_t polled_ns, uint64_t now_ns)


cdef extern from "sync/cpu.h" nogil:
    void sr_pause()
    void sr_yield()
    void sr_prefetch_for_write(void *there, size_t nbytes)


cdef extern from "sync/event.h" nogil:
    void sr_event_signal(sr_event *)


cdef extern from "sync/flag.h" nogil:
    uint64_t sr_flag_load(const sr_flag *)
    uint64_t sr_flag_load_after_reads(const sr_flag *)
    uint64_t sr_flag_load_ordered(const sr_flag *)
    bint sr_flag_reached(const sr_flag *, uint64_t target)
    void sr_flag_set(sr_flag *, uint64_t value)
    void sr_flag_publish(sr_flag *, uint64_t value, sr_event *own_event)
    bint sr_flag_spin(const sr_flag *, uint64_t target, int pauses)
    void sr_flag_sleep(const sr_flag *, uint64_t target, sr_event *owner_event, uint64_t limit_ns)
    bint sr_flag_take(sr_flag *, uint64_t value)
    void sr_flag_acquire(sr_flag *, uint64_t value)
    void sr_flag_release(sr_flag *)
    bint sr_flag_replace(sr_flag *, uint64_t old, uint64_t value)
    uint64_t sr_flag_swap(sr_flag *, uint64_t value)


cdef extern from "sync/waitset.h" nogil:
    ctypedef struct sr_waitset "struct sr_waitset":
        int n
    void sr_waitset_watch(sr_waitset *, sr_event *own_event)
    bint sr_waitset_enter(sr_waitset *, const sr_flag *, uint64_t target, sr_event *owner_event)
    void sr_waitset_sleep(sr_waitset *, uint64_t limit_ns)
    bint sr_waitset_watch_liveness(sr_waitset *, sr_liveness *)
    bint sr_waitset_sleep_until_death(sr_waitset *, uint64_t limit_ns)


cdef extern from "sync/abort.h" nogil:
    uint64_t sr_abort_pack(int cause, int culprit, int reporter)
    int sr_abort_cause(uint64_t word)
    int sr_abort_culprit(uint64_t word)
    int sr_abort_reporter(uint64_t word)
    void sr_abort_set(sr_header *, uint64_t word)


cdef extern from "sync/seqlock.h" nogil:
    void sr_seqlock_write(sr_seqlock *, const uint64_t *word)
    uint64_t sr_seqlock_read(const sr_seqlock *, uint64_t *word)


cdef extern from "sync/liveness.h" nogil:
    int sr_liveness_set_cpu(sr_liveness *)
    int sr_liveness_cpu(const sr_liveness *)
    bint sr_liveness_died(const sr_liveness *)
    int sr_liveness_state(const sr_liveness *)
    void sr_liveness_set_state(sr_liveness *, int state)
    bint sr_liveness_is_held(const sr_liveness *)
    int sr_liveness_task(const sr_liveness *)
    bint sr_liveness_is_unwatched(const sr_liveness *)
    int sr_liveness_find_thread(const sr_liveness *)
    void sr_liveness_check(sr_liveness *)
    void sr_liveness_wake_sleepers(sr_liveness *)


cdef extern from "fault.h" nogil:
    enum: SR_BEFORE_RELEASE
    void SR_FAULT(int point)
    const sr_kernels *SR_FAULT_KERNELS(const sr_kernels *)
    const bint SR_CHECKS


cdef extern from "single_copy.h" nogil:
    int sr_single_copy(int task, void *there, uint64_t address, size_t nbytes)
