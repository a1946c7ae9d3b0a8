# Calls that were issued to be run in the background, in order, and who steps them. May know: _group.

from libc.stdint cimport uint32_t, uint64_t

from ._group cimport Call, Group, sr_bell, sr_flag, sr_nap


# One issued call.
cdef struct Task:
    Call call
    bint begun
    sr_flag description  # enum below
    void (*before)(Task *) noexcept nogil   # what is to be done before it begins, and after it is done; or NULL
    void (*after)(Task *) noexcept nogil
    const void *bunch   # for these two
    int status          # DONE, or what ended the communicator; valid once it is finished
    sr_flag notify      # 0; an eventfd + 1 that is to be written to when it is finished; FINISHED
    uint64_t number     # its place in the queue, from 1
    void *keeper        # an Issued, to which the queue holds a reference until it is reaped


cdef enum Round:      # what a round found, the most urgent last
    IDLE, REAPABLE, WAITING, ACTIVE, WANTS_PYTHON


# Something that the thread carries on. `step` returns a Round at once; with a nap it has entered what it waits for,
# and looked once more. After REAPABLE and WANTS_PYTHON its owner's _attend() is called.
cdef struct Errand:
    int (*step)(Errand *, sr_nap *) noexcept nogil
    int news              # of what a step found WAITING: an epoll descriptor that may end it, too; 0: none
    int waker             # with it: an eventfd that ends a sleep on it; both stay until it is delisted
    Errand *next          # of the process


# The issued calls of one communicator, the oldest first. Who *steps* it has taken `stepper`, and only then touches the
# group, `trouble` and the tasks; tasks are appended, and reaped once finished, by whoever holds the GIL.
cdef struct Queue:
    Errand errand         # first, so that a pointer to it is one to the queue
    Group *group
    Task **task           # by number & mask
    uint64_t mask
    sr_flag issued, finished, reaped   # numbers of the last one appended, finished, and let go
    sr_flag stepper       # 0, or who steps: enum below
    sr_flag nwaiters      # threads that wait for a task, which leaves the stepping to them
    int trouble           # the status that ends the communicator, once there is one, ...
    uint64_t trouble_number   # ... of which task, ...
    Call troubled         # ... and its call as it was then: who steps it next may wait for another rank
    sr_bell *bell         # rung when tasks are finished

cdef enum:
    BACKGROUND = 1, WAITER = 2     # of Queue.stepper


cdef enum:
    DESCRIBED, TO_BE_DESCRIBED, BEING_DESCRIBED    # of Task.description


cdef class Issued:
    cdef Task task
    cdef object communicator, kept   # stay until the call is finished

    cdef int describe(self) except -1


cdef Queue *new_queue(Group *g) except NULL
cdef void free_queue(Queue *q) noexcept
cdef bint is_pending(const Queue *q) noexcept nogil
cdef bint is_finished(const Queue *q, const Task *t) noexcept nogil
cdef int append(Queue *q, Task *t) except -1
cdef void step_briefly(Queue *q) noexcept
cdef int step_until(Queue *q, Task *t, uint64_t until_ns) noexcept nogil
cdef void linger(Queue *q, Task *t, uint64_t until_ns) noexcept
cdef void take_turn(Queue *q, uint64_t who) noexcept nogil
cdef Task *oldest(Queue *q) noexcept nogil
cdef bint copy_oldest_begun(Queue *q, Call *c) noexcept nogil
cdef int take_trouble(Queue *q, Call *c) noexcept nogil
cdef void finish_all(Queue *q, int status) noexcept nogil
cdef void reap(Queue *q) noexcept
cdef int run_queue(Errand *e, sr_nap *nap) noexcept nogil
cdef int rouse() except -1
cdef bint is_background() except -1
cdef int enlist(Errand *e, object owner) except -1
cdef void delist(Errand *e) noexcept nogil
