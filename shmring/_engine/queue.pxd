# Structures of calls in the background: one issued call, and the queue of one communicator.

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from .._core.group cimport Call, Group, Stats, is_before
from .._core.segment cimport sr_event, sr_flag, sr_flag_load, sr_waitset


# One issued call.
cdef struct Task:
    Call call
    bint begun
    int priority_state   # enum below
    sr_flag filling      # enum below
    void (*before)(Task *) noexcept nogil   # called before the call begins; or NULL
    void (*after)(Task *) noexcept nogil    # called after the call is done; or NULL
    const void *argument   # of these two; for an election its queue
    int status          # DONE, or the status that ended the communicator; valid once finished
    sr_flag notify      # 0; or eventfd + 1, written to when the call is finished; or FINISHED
    sr_flag number      # place in the queue, from 1; an election may change it until the call is finished
    void *keeper        # an Issued, to which the queue holds a reference until the call is reaped
    # for a call with a priority
    uint64_t fingerprint   # of the whole call, if `call` is a part of it
    size_t left            # number of elements after that part


cdef enum:
    FILLED, TO_BE_FILLED, BEING_FILLED    # of Task.filling: whether Task.call has its arguments


cdef enum:      # of Task.priority_state, see progress.pyx
    IN_ORDER    # a call without a priority
    CANDIDATE   # a call with a priority that is not elected yet
    ELECTED     # a call with a priority that is elected, for its next part or for the whole rest


# Work of the progress thread. `step` advances it and returns a Pass without blocking. Given a wait set, `step` enters
# the events that it waits for, and polls once more afterwards. After REAPABLE and WANTS_PYTHON the owner's _attend() is
# called.
cdef struct Pollable:
    int (*step)(Pollable *, sr_waitset *) noexcept nogil
    int news              # after WAITING: an epoll descriptor that may end the wait, too; 0: none
    int waker             # with `news`: an eventfd that ends a sleep on it; both stay open until it is delisted
    Pollable *next        # list of the process


# The issued calls of one communicator, the oldest first. Only a thread that has taken `stepper` may step them, and
# touch the group, `failed_status` and the tasks. A thread that holds the GIL appends tasks, and reaps finished ones.
cdef struct Queue:
    Pollable pollable         # first, so that a pointer to it is one to the queue
    Group *group
    Task **task           # by number & mask
    uint64_t mask
    sr_flag issued, finished, reaped   # numbers of the last task appended, finished, and reaped
    sr_flag stepper       # 0, or the kind of thread that steps: enum below
    sr_flag nwaiters      # number of threads that wait for a task; they step while there are any
    int failed_status        # the status that ends the communicator; DONE while there is none
    uint64_t failed_number   # number of the task with that status
    Call failed_call         # copy of its call at that time: a later step may change the awaited rank
    sr_event *event       # signalled when tasks are finished
    # for calls with a priority, see progress.pyx
    Task election         # the call by which ranks agree on the next one, while the oldest is a CANDIDATE
    Call candidate        # what the election's record shows: the oldest call
    uint64_t nready       # this rank's value in the election, then the result
    uint64_t elected_hash   # of all elections so far
    Stats stats           # copy of the counters before the election

cdef enum:
    BACKGROUND = 1, WAITER = 2     # of Queue.stepper


cdef inline bint is_pending(const Queue *q) noexcept nogil:
    return sr_flag_load(&q.finished) != sr_flag_load(&q.issued)


# True if an appended task is finished: then only its keeper touches it. The task's number is read last: the number of
# an unfinished task may change, but was always greater than q.finished.
cdef inline bint is_finished(const Queue *q, const Task *t) noexcept nogil:
    cdef uint64_t finished = sr_flag_load(&q.finished)
    return not is_before(finished, sr_flag_load(&t.number))


cdef inline Task *oldest(const Queue *q) noexcept nogil:
    return q.task[(sr_flag_load(&q.finished) + 1) & q.mask]


# Return the task to step, of a queue with a pending task.
cdef inline Task *next_of(Queue *q) noexcept nogil:
    cdef Task *t = oldest(q)
    return &q.election if t.priority_state == CANDIDATE else t
