# One communicator's state on one rank, and the tables that Python reads: what is there, before anything is called.
# May know: _group (src), _kernels, _leg, _slots.

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from ._group cimport *
from ._leg cimport Leg, leg_of
from ._slots cimport slot_nbytes

from . import _kernels
from ._kernels import OPS, dtypes

# ---- tables that Python reads: one definition each, in C -------------------------------------------------------

DTYPES = tuple(dtypes())
MOVED_DTYPE = "bytes"   # of calls that only move items of any other dtype
DTYPE_NBYTES = tuple(dtypes().values())
KINDS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan",
         "broadcast", "scatter", "gather", "all_gather", "all_to_all", "barrier", "empty", "ping", "agree",
         "split", "group", "shared", "all_gather_v", "gather_v", "scatter_v", "all_to_all_v", "all_reduce_many")
assert len(KINDS) == NKINDS
ALGORITHMS = ("auto", "ring", "tree", "master", "direct")
PATHS = ("tiny", "small", "near", "far", "zero_copy", "ring", "tree", "master", "single_copy", "chain",
         "across")
assert len(PATHS) == NPATHS
CAUSES = {"failed": SR_RANK_FAILED, "timed out": SR_TIMED_OUT, "mismatch": SR_MISMATCHED, "aborted": SR_ABORTED,
          "told": SR_TOLD}
WIRES = tuple(_kernels.wire_formats())
TINY_NBYTES = SR_PAYLOAD_NBYTES
MAX_RANKS = SR_MAX_RANKS


def supported(str dtype, str op):
    """Whether the op has a meaning for the dtype."""
    return op in _kernels.ops(dtype)


def described(uint64_t fingerprint, uint64_t count):
    """What a fingerprint and a count say of a call, as `record_of` does; None for one that says nothing."""
    cdef uint64_t kind = fingerprint & 63
    if kind == INVALID:
        return {"kind": "something", "invalid": True}
    if kind >= NKINDS:
        return None
    return words_of(kind, fingerprint >> 6 & 63, fingerprint >> 12 & 15, fingerprint >> 16 & 7, fingerprint >> 19 & 1,
                    fingerprint >> 20 & 0xfff, count)


cdef dict words_of(int kind, int dtype, int op, int algorithm, bint order, uint32_t root, uint64_t count):
    return {"kind": KINDS[kind], "count": count, "root": root,
            "dtype": (*DTYPES, MOVED_DTYPE)[dtype % (SR_DTYPES + 1)], "op": OPS[op % SR_OPS],
            "algorithm": ALGORITHMS[algorithm % NALGORITHMS], "order": "F" if order else "C", "invalid": False}


# ---- the state -------------------------------------------------------------------------------------------------

# Two slots of the largest chunk there is fit into the ring: one is filled while the other is taken.
cdef bint fits_ring(const sr_tuning *tuning, size_t ring_nbytes) noexcept:
    cdef uint64_t largest = max(tuning.one_chunk_nbytes, tuning.chunk_nbytes, tuning.exchange_nbytes)
    return 0 < tuning.chunk_nbytes and largest < ring_nbytes and 2 * slot_nbytes(largest + SR_CACHE_LINE) <= ring_nbytes


cdef class State:
    """One communicator's state on one rank, over a segment that `format_segment` has begun.

    `segment` has `.address` and `.nbytes` and is kept alive.
    """

    def __cinit__(self, segment, int rank, int size, **_):
        cdef Group *g = &self.g
        cdef uintptr_t base = segment.address
        cdef int i
        memset(g, 0, sizeof(Group))
        g.header = <sr_header *> base
        if g.header.magic != SR_MAGIC or g.header.nranks != size or size > SR_MAX_RANKS or not 0 <= rank < size:
            raise ValueError(f"this is not a segment of {size} ranks, or not one of this version of shmring")
        if segment.nbytes < sr_layout_segment_nbytes(size, g.header.ring_nbytes, g.header.message_ring_nbytes):
            raise ValueError(f"the segment of {size} ranks is only {segment.nbytes} bytes long")
        g.lane = <sr_lane **> calloc(size, sizeof(void *))
        g.ring = <unsigned char **> calloc(size, sizeof(void *))
        g.source = <const void **> calloc(size + 1, sizeof(void *))
        g.target = <void **> calloc(size + 1, sizeof(void *))
        if g.lane == NULL or g.ring == NULL or g.source == NULL or g.target == NULL:
            raise MemoryError()
        for i in range(size):
            g.lane[i] = sr_layout_lane(g.header, i)
            g.ring[i] = <unsigned char *> base + sr_layout_ring_offset(size, g.header.ring_nbytes, i)
        g.rank = rank
        g.size = size
        g.me = g.lane[rank]

    def __init__(self, segment, int rank, int size, *, str isa, list tuning, double timeout_s):
        cdef Group *g = &self.g
        self.segment = segment
        self.timeout_s = timeout_s
        isa_bytes = isa.encode()
        g.kernels = find_kernels(isa_bytes)
        if g.kernels == NULL:
            raise ValueError(f"SHMRING_ISA={isa}: this machine has {', '.join(_kernels.isas())}")
        g.seq = g.verified = g.header.first_seq
        g.position = g.credit = g.pings = first_position(g.header)
        g.tunings[0], g.tunings[1] = tuning
        g.next_far = g.header.forced_path == 2
        set_far(g, g.next_far)
        self.be_patient(pauses=20, brief_pauses=0, brief_yields=0, yield_ns=200_000, sleep_ns=4_000_000,
                        look_ns=100_000, ping_interval_ns=1_000_000_000, zero_copy_nbytes=0, crowded=False)
        g.ring_nbytes = g.header.ring_nbytes
        g.lap_nbytes = sr_layout_lap_nbytes(g.ring_nbytes)
        if not fits_ring(&g.tunings[0], g.ring_nbytes) or not fits_ring(&g.tunings[1], g.ring_nbytes):
            raise ValueError("the staging rings of this communicator are smaller than its tuning needs")
        if (g.tunings[0].small_nbytes != g.tunings[1].small_nbytes
                or g.tunings[0].fuse_nbytes != g.tunings[1].fuse_nbytes
                or g.tunings[0].chain_nbytes != g.tunings[1].chain_nbytes):
            raise ValueError("the tuning of this communicator differs near and far where it must not")

    def __dealloc__(self):
        free(self.g.lane)
        free(self.g.ring)
        free(self.g.source)
        free(self.g.target)
        free(self.g.block)

    def be_patient(self, *, int pauses, int brief_pauses, int brief_yields, uint64_t yield_ns, uint64_t sleep_ns,
                   uint64_t look_ns, uint64_t ping_interval_ns, size_t zero_copy_nbytes, bint crowded):
        """How to wait from now on: pauses, then yields, then sleep, with a look at all else now and then.

        brief_pauses and brief_yields are for small calls, before the GIL is let go. ping_interval_ns is the
        least time between two measurements of the distance; from zero_copy_nbytes on messages are worth
        zero-copy's second synchronisation. crowded: there are more ranks than CPUs.
        """
        self.g.pauses = pauses
        self.g.brief_pauses = brief_pauses
        self.g.brief_yields = brief_yields
        self.g.yield_ns = yield_ns
        self.g.sleep_ns = sleep_ns
        self.g.look_ns = look_ns
        self.g.ping_interval_ns = ping_interval_ns
        self.g.zero_copy_nbytes = zero_copy_nbytes
        self.g.crowded = crowded

    # The shared block that holds these bytes in this rank's part of it; False: private memory.
    cdef bint find_block(self, const void *address, size_t nbytes, uint32_t *block, uint64_t *offset) noexcept:
        cdef Group *g = &self.g
        cdef uintptr_t begin = <uintptr_t> address
        cdef uintptr_t part
        cdef size_t stride
        cdef int low = 0, high = g.nblocks, middle
        while low < high:
            middle = (low + high) // 2
            if g.block[middle].begin <= begin:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return False
        part = g.block[low - 1].begin + <uintptr_t> g.rank * g.block[low - 1].stride
        stride = g.block[low - 1].stride
        if begin < part or begin - part > stride or nbytes > stride - (begin - part):
            return False
        block[0] = g.block[low - 1].id
        offset[0] = begin - part
        return True

    # -- what tools and errors read --

    @property
    def rank(self):
        return self.g.rank

    @property
    def size(self):
        return self.g.size

    @property
    def seq(self):
        return self.g.seq

    def number_of(self, uint64_t seq):
        """Which of the user's calls a sequence number means: the first is 1, the engine's own are 0 or less.

        Of several hosts' calls, which have several local ones each, it is the last one that this rank has begun.
        """
        if self.g.leg != NULL:
            return <int64_t> (leg_of(&self.g).seq - leg_of(&self.g).first_user_seq) + 1
        return <int64_t> (seq - self.first_user_seq) + 1

    @property
    def isa(self):
        return self.g.kernels.isa.decode()

    def abort_report(self):
        """(cause, culprit, the reporter's sequence number, reason), or None while nobody has given up."""
        cdef uint64_t word = sr_flag_load(&self.g.header.abort)
        cdef int reporter = sr_abort_reporter(word)
        cdef sr_report *report
        if word == SR_NO_ABORT:
            return None
        if reporter >= self.g.size or sr_abort_culprit(word) >= self.g.size + SR_MAX_RANKS:
            raise ValueError("the abort word of this communicator is damaged")
        report = &self.g.lane[reporter].report
        reason = (<bytes> report.reason[:SR_REASON_NBYTES]).split(b"\0")[0].decode(errors="replace")
        cause = next(name for name, value in CAUSES.items() if value == sr_abort_cause(word))
        return cause, sr_abort_culprit(word), report.seq, reason

    def record_of(self, int rank, seq):
        """What a rank called as its seq-th call, as a dict; None when it has not, or too long ago."""
        cdef sr_record record = self.g.lane[rank].record[<uint64_t> seq & (SR_RECORDS - 1)]
        if record.kind >= NKINDS or record.seq != <uint64_t> seq:
            return None
        words = words_of(record.kind, record.dtype, record.op, record.algorithm, record.order, record.root,
                         record.count)
        return words | {"seq": record.seq, "invalid": bool(record.invalid)}

    def own_call(self, seq):
        """As record_of, of this rank; of a call of several hosts also where no local step of it has begun."""
        cdef Leg *leg = leg_of(&self.g)
        if leg == NULL or leg.fingerprint == 0:
            return self.record_of(self.g.rank, seq)
        return described(leg.fingerprint, leg.count)

    def last_seq_of(self, int rank):
        """The highest sequence number that a rank has begun."""
        cdef uint64_t last = sr_flag_load(&self.g.lane[rank].line[0].seq)
        cdef uint64_t seq
        cdef int i
        for i in range(1, SR_LINES):
            seq = sr_flag_load(&self.g.lane[rank].line[i].seq)
            if <int64_t> (seq - last) > 0:
                last = seq
        return last

    def life_of(self, int rank):
        """(pid, start time) of a rank, as it said when it joined."""
        return self.g.lane[rank].life.pid, self.g.lane[rank].life.start_time

    def message_rings(self):
        """(bytes of each, first sequence number), as rank 0 of the host has laid them out."""
        return self.g.header.message_ring_nbytes, self.g.header.first_seq

    def stats(self):
        """Counters since the communicator began; see Comm.stats."""
        cdef Group *g = &self.g
        cdef int i
        far = "far" if g.far else "near"
        return {
            "calls": g.stats.calls, "bytes_sent": g.stats.bytes_sent,
            "bytes_over_wire": g.stats.bytes_over_wire, "steps": g.stats.steps,
            "paths": {name: g.stats.path[i] for i, name in enumerate(PATHS)},
            "path": PATHS[g.stats.last_path] if g.stats.calls else None,
            "distance": far, "round_trip_ns": g.round_trip_ns, "isa": self.isa,
        }
