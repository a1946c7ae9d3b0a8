from libc.stdint cimport uint64_t

from .._arrays.operands cimport Operand
from .._core.group cimport Call
from .._engine.engine cimport Engine
from .work cimport Work


cdef class Collectives:
    cdef Engine engine
    cdef int own_rank, nranks     # in the communicator, over all hosts
    cdef int default_algorithm, default_wire
    cdef object residuals         # rounding errors of compressed transfers
    cdef object place             # this rank's Place
    cdef uint64_t default_timeout_ns
    cdef object segment           # the communicator's memory
    cdef int fd                   # of the segment, to allocate the pages of rings
    cdef bint staging_ready
    cdef unsigned long allocating_thread   # the thread that allocates the staging buffer; 0: none

    cdef object run(self, int kind, object x, object op, object root, object out, object like, object algorithm,
                    object async_op, object timeout, object options=*)
    cdef object issue(self, int kind, object x, object op, object root, object out, object like, object algorithm,
                      object timeout, object options)
    cdef object run_number(self, int kind, object x, object op, object root, object out, object algorithm,
                           object async_op, object timeout, object options)
    cdef Work new_work(self)
    cdef int run_call(self, Call *c) except -1
    cdef int prepare_staging(self, Call *c) except -1
    cdef int allocate_staging(self) except -1
    cdef object out_of(self, int kind, object x, int root, object out, object like)
    cdef object fill_call(self, Call *c, Operand *a, Operand *b, int kind, object x, object op, int root,
                          object out, object algorithm, object timeout, object options)
    cdef object fill_internode(self, Call *c, object x, object options)
    cdef object fill_wire(self, Call *c, object x, uint64_t place, object wire)
    cdef int fill_reduction(self, Call *c, object op, object algorithm) except -1
    cdef int find_shared(self, Call *c) except -1
    cdef int find_blocks(self, Call *c) except -1
    cdef int root_of(self, int kind, object root) except -1
    cdef int root_number(self, object root) except -1


cdef class Plan:
    cdef Collectives comm
    cdef Call c
    cdef Operand a, b
    cdef object pinned, return_value
    cdef bint in_background
    cdef uint64_t blocks_version   # version of the engine's table of shared blocks when the arrays were looked up

    cdef object prepare(self, Collectives comm, int kind, object x, object op, object root, object out, object like,
                        object algorithm, object timeout, object options)
    cdef int run_call(self) except -1
    cdef Work issue(self)
    cdef int find_shared_again(self) except -1


# Return the plan of a collective, to `run_call` or `issue`. The arguments are those of Plan.prepare.
cdef Plan plan_of(Collectives comm, int kind, object x, object op, object root, object out)
