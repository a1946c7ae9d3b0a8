# Sizes and first values of a segment, and the schedules of the named algorithms, for Python.

from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy

from .group cimport INVALID, first_position
from .schedule cimport sr_double_tree_child, sr_ring_reduce_slice, sr_tree_sends_to, sr_tree_steps
from .segment cimport (
    SR_FINISHED, SR_KEY_NBYTES, SR_LINES, SR_MAGIC, SR_PROGRESSES, SR_RECORDS, sr_flag_set, sr_header, sr_lane,
    sr_layout_control_nbytes, sr_layout_lane, sr_layout_segment_nbytes, sr_slice_begin,
)


# ---- schedules, for tests and models ---------------------------------------------------------------------------

def ring_schedule(int size):
    """Return [(step, rank, slice sent to rank - 1), ...] of the reduce-scatter half of the ring."""
    return [(step, rank, sr_ring_reduce_slice(rank, size, step)) for step in range(1, size) for rank in range(size)]


def tree_schedule(int size):
    """Return [(step, sender, receiver), ...] on the way up; the way down is its mirror image."""
    return [(step, rank, sr_tree_sends_to(rank, step)) for step in range(sr_tree_steps(size)) for rank in range(size)
            if sr_tree_sends_to(rank, step) >= 0]


def double_tree(int size):
    """Return for both trees, by rank: its children, in the order in which it folds their data."""
    return [[tuple(child for child in [sr_double_tree_child(rank, size, tree, 0),
                                       sr_double_tree_child(rank, size, tree, 1)] if child >= 0)
             for rank in range(size)] for tree in range(2)]


def slice_bounds(size_t count, int size):
    """Return (begin, end) of each slice of the ring. The lengths differ by at most one element."""
    return [(sr_slice_begin(count, size, i), sr_slice_begin(count, size, i + 1)) for i in range(size)]


KEY_NBYTES = SR_KEY_NBYTES


# ---- the segment, for rank 0 -----------------------------------------------------------------------------------

def control_nbytes(int nranks):
    """Return the bytes of the header and the lanes, which are allocated when the communicator starts."""
    return sr_layout_control_nbytes(nranks)


def message_ring_nbytes(int nranks):
    """Return the default length of one message ring. There is one for each pair of ranks, and few of them are used."""
    return 1 << (20 if nranks <= 4 else 18 if nranks <= 8 else 16 if nranks <= 64 else 14)


def segment_nbytes(int nranks, size_t ring_nbytes, size_t message_nbytes=0):
    """Return the bytes of a whole segment, the staging buffers and the message rings included."""
    return sr_layout_segment_nbytes(nranks, ring_nbytes, message_nbytes or message_ring_nbytes(nranks))


def format_segment(uintptr_t address, int nranks, size_t ring_nbytes, *, tuning, int forced_path=0,
                   uint64_t first_seq=0, size_t message_nbytes=0, bytes key=bytes(SR_KEY_NBYTES)):
    """Write the first values of the header and the lanes into zeroed memory, before another process maps it.

    tuning: the tables for near and for far cores; the header keeps the values that the engine reads. key: secret.
    """
    cdef sr_header *header = <sr_header *> address
    cdef sr_lane *lane
    cdef int rank, which, i
    if len(key) != SR_KEY_NBYTES:
        raise ValueError(f"the key of a segment has {SR_KEY_NBYTES} bytes")
    header.nranks = nranks
    header.ring_nbytes = ring_nbytes
    header.forced_path = forced_path
    for i in range(2):
        header.tuning[i] = tuning[i]
    header.first_seq = first_seq
    memcpy(header.key, <const char *> key, SR_KEY_NBYTES)
    header.message_ring_nbytes = message_nbytes or message_ring_nbytes(nranks)
    for rank in range(nranks):
        lane = sr_layout_lane(header, rank)
        for which in range(SR_PROGRESSES):
            sr_flag_set(&lane.progress[which].value, first_position(header))
        sr_flag_set(&lane.progress[SR_FINISHED].value, first_seq)
        for i in range(SR_LINES):
            # One call less, so that no line announces the first call before its rank does.
            sr_flag_set(&lane.line[i].seq, first_seq - 1)
        for i in range(SR_RECORDS):
            lane.record[i].kind = INVALID
    header.magic = SR_MAGIC


def header_of(uintptr_t address):
    """Return what rank 0 wrote into the header of a segment."""
    cdef sr_header *header = <sr_header *> address
    if header.magic != SR_MAGIC:
        raise ValueError("this is not a segment of this version of shmring")
    return {"nranks": header.nranks, "ring_nbytes": header.ring_nbytes,
            "tuning": [header.tuning[0], header.tuning[1]]}
