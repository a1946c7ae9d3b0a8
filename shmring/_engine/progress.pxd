# Calls in the background, and the threads that step them.

from libc.stdint cimport uint64_t

from .._core.group cimport Call, Group
from .._core.segment cimport sr_waitset
from .queue cimport Pollable, Queue, Task


cdef enum Pass:       # result of a pass of the progress thread over its queues, the most urgent last
    IDLE, REAPABLE, WAITING, ACTIVE, WANTS_PYTHON


cdef class Issued:
    cdef Task task
    cdef object communicator, kept   # kept alive until the call is finished

    cdef int finish_filling(self) except -1
    cdef void let_go(self) noexcept


cdef Queue *new_queue(Group *g) except NULL
cdef void free_queue(Queue *q) noexcept
cdef int append(Queue *q, Task *t) except -1
cdef void step_briefly(Queue *q) noexcept
cdef int step_until(Queue *q, Task *t, uint64_t until_ns) noexcept nogil
cdef void linger(Queue *q, Task *t, uint64_t until_ns) noexcept
cdef void acquire_stepper(Queue *q) noexcept nogil
cdef bint copy_begun(Queue *q, Call *c) noexcept nogil
cdef int fetch_failure(Queue *q, Call *c) noexcept nogil
cdef void finish_all(Queue *q) noexcept nogil
cdef void reap(Queue *q) noexcept
cdef void wake_thread() noexcept
cdef int start_thread() except -1
cdef bint is_background() noexcept
cdef bint is_thread_running() noexcept
cdef int enlist(Pollable *e, object owner) except -1
cdef void delist(Pollable *e) noexcept nogil
