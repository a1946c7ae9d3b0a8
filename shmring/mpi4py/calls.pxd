from .._comm.collectives cimport Plan
from .._comm.comm cimport Comm as ShmringComm
from .messages cimport Handle, Status


cdef enum:
    NO_RANK = -2   # PROC_NULL, in place of shmring's number of a rank; -1 is any source


cdef class Context:
    cdef ShmringComm own_comm         # None before its first use
    cdef public object open_comm     # makes it
    cdef readonly int rank, size
    cdef readonly object turns       # of the threads that send and receive, while there are several
    cdef int npersistent             # persistent collectives that were made; the same on all ranks
    cdef object frames               # of the objects of its collectives; None before the first one
    cdef object __weakref__

    cdef ShmringComm opened(self)
    cdef int peer(self, object rank, object tag, bint is_send) except? -9
    cdef int root_of(self, object root) except -1


cdef class Call:
    cdef public Context context
    cdef public object finish     # called when the call is complete; returns the result of a request
    cdef public Status empty      # status without a message, if it is not that of an empty request

    cpdef object perform(self)
    cpdef object begin(self)
    cpdef object perform_beside_threads(self)
    cpdef object begin_beside_threads(self)
    cpdef bint is_done_beside_threads(self, object work) except -1
    cpdef object wait_beside_threads(self, object work)
    cpdef object conclude(self)
    cpdef object release(self)
    cpdef object set_number(self, int number)
    cdef object run_now(self, Status status)


cdef class Pending:
    cdef public Call call
    cdef public object work          # a Work or a Transfer; None if there is nothing to wait for
    cdef public object result        # what `finish` returned
    cdef object outcome
    cdef object prepare              # of a persistent call of items with gaps: returns the call of each start
    cdef readonly object failure     # the exception of a call that has failed, until `settle` raises it
    cdef readonly int number         # of a persistent collective, in the order in which they were made; else 0
    cdef bint is_complete
    cdef public bint is_idle         # the program was told that it is complete, or it was not started
    cdef public bint is_persistent
    cdef bint is_cancelled
    cdef object __weakref__

    cpdef object start(self)
    cpdef bint poll(self) except -1
    cpdef object settle(self)
    cpdef object report(self, Status status)
    cdef bint is_done(self) except -1
    cdef object exception_for(self, object error)
    cdef int fail(self, object error) except -1
    cdef int wait(self) except -1


cdef class BaseRequest(Handle):
    cdef object complete(self, Status status)
    cdef bint is_complete(self) except -1


cdef class Collective(Call):
    cdef readonly int kind, root
    cdef readonly object x, op, out
    cdef Plan plan                # of a persistent call; else None

    cdef int make_plan(self) except -1


cdef class MessageCall(Call):
    cdef int abandon(self, object work, object error) except -1


cdef class Several:
    cdef list works


cdef class Exchange(MessageCall):
    cdef public list sent, received
    cdef int messages_context


cdef class Directed(MessageCall):
    cdef public object x
    cdef readonly int peer, tag


cdef class Sending(Directed):
    pass


cdef class Receiving(Directed):
    pass


cdef class Caller(Handle):
    pass


cpdef int end_after(Context context, object error, bint beside) except -1
cdef bint is_only_thread(Context context) noexcept
cpdef bint is_in_place(object spec) noexcept
cdef Context context_of(Handle communicator)
cdef Call sending(Context context, object x, object dest, object tag)
