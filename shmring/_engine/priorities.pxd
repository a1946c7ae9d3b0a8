# Which of the calls with a priority runs next.

from .queue cimport Queue, Task


cdef void prepare_election(Queue *q) noexcept
cdef void become_candidate(Queue *q, Task *t) noexcept
cdef bint goes_on(Queue *q, Task *t) noexcept nogil
