# Calls that were issued to be run in the background: one of them, and those of one communicator.

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from .._core.group cimport Call, Group, Stats, is_before
from .._core.segment cimport sr_event, sr_flag, sr_flag_load, sr_waitset


# One issued call.
cdef struct Task:
    Call call
    bint begun
    int turn            # enum below
    sr_flag description  # enum below
    void (*before)(Task *) noexcept nogil   # what is to be done before it begins, and after it is done; or NULL
    void (*after)(Task *) noexcept nogil
    const void *bunch   # for these two; of an election its queue
    int status          # DONE, or what ended the communicator; valid once it is finished
    sr_flag notify      # 0; an eventfd + 1 that is to be written to when it is finished; FINISHED
    sr_flag number      # its place in the queue, from 1; while it is not finished an election may change it
    void *keeper        # an Issued, to which the queue holds a reference until it is reaped
    # of a call with a priority
    uint64_t fingerprint   # of all of it, where `call` is a part
    size_t left            # elements behind that part


cdef enum:
    DESCRIBED, TO_BE_DESCRIBED, BEING_DESCRIBED    # of Task.description


cdef enum:      # of Task.turn, see progress.pyx
    IN_ORDER    # it has no priority
    CANDIDATE   # ... it has, and is yet to be chosen
    CHOSEN      # ... and was, for all of it that is left or for the next part


# Something that the thread carries on. `step` returns a Round at once; with a wait set it has entered what it waits
# for, and looked once more. After REAPABLE and WANTS_PYTHON its owner's _attend() is called.
cdef struct Pollable:
    int (*step)(Pollable *, sr_waitset *) noexcept nogil
    int news              # of what a step found WAITING: an epoll descriptor that may end it, too; 0: none
    int waker             # with it: an eventfd that ends a sleep on it; both stay until it is delisted
    Pollable *next          # of the process


# The issued calls of one communicator, the oldest first. Who *steps* it has taken `stepper`, and only then touches the
# group, `trouble` and the tasks; tasks are appended, and reaped once finished, by whoever holds the GIL.
cdef struct Queue:
    Pollable pollable         # first, so that a pointer to it is one to the queue
    Group *group
    Task **task           # by number & mask
    uint64_t mask
    sr_flag issued, finished, reaped   # numbers of the last one appended, finished, and let go
    sr_flag stepper       # 0, or who steps: enum below
    sr_flag nwaiters      # threads that wait for a task, which leaves the stepping to them
    int trouble           # the status that ends the communicator, once there is one, ...
    uint64_t trouble_number   # ... of which task, ...
    Call troubled         # ... and its call as it was then: who steps it next may wait for another rank
    sr_event *event         # signalled when tasks are finished
    # of calls with a priority, see progress.pyx
    Task election           # by which ranks agree on the next one, for as long as the oldest is a CANDIDATE
    uint64_t nready       # this rank's word in it, then that of all
    uint64_t chosen       # a hash of all that were
    Stats stats           # as they were before it

cdef enum:
    BACKGROUND = 1, WAITER = 2     # of Queue.stepper


cdef inline bint is_pending(const Queue *q) noexcept nogil:
    return sr_flag_load(&q.finished) != sr_flag_load(&q.issued)


# Of a task that was appended: nobody but who keeps it touches it any more. The number is read last: those of tasks that
# are not finished were always beyond q.finished.
cdef inline bint is_finished(const Queue *q, const Task *t) noexcept nogil:
    cdef uint64_t finished = sr_flag_load(&q.finished)
    return not is_before(finished, sr_flag_load(&t.number))


cdef inline Task *oldest(const Queue *q) noexcept nogil:
    return q.task[(sr_flag_load(&q.finished) + 1) & q.mask]


# What is to be stepped, of a queue with something pending.
cdef inline Task *next_of(Queue *q) noexcept nogil:
    cdef Task *t = oldest(q)
    return &q.election if t.turn == CANDIDATE else t
