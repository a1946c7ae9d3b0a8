# Calls in the background: the queue of each communicator, and the progress thread, which steps the calls that no thread
# waits for. A process has one such thread; it runs without the GIL.

import functools
import os
import threading
import weakref

from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.stdlib cimport posix_memalign
from posix.unistd cimport read, write

from .._core.group cimport (
    ABORTED, ALL_REDUCE, AUTO, BLOCKED, BROADCAST, DIRECT, DONE, ELECTION, INVALID, PROGRESSED, SIGNALLED, UNFILLED,
    Call, Group, begin_call, fingerprint_of, is_sliced, mixed,
)
from .._core.kernels cimport SR_MIN, SR_U64, SR_WIRE_NATIVE, sr_float_env, sr_float_env_enter, sr_float_env_leave
from .._core.segment cimport (
    SR_COMPLETE, SR_LINE, SR_NO_ABORT, SR_RAISED, sr_event, sr_event_signal, sr_flag, sr_flag_acquire, sr_flag_load,
    sr_flag_load_ordered, sr_flag_publish, sr_flag_reached, sr_flag_release, sr_flag_set, sr_flag_sleep, sr_flag_spin,
    sr_flag_swap, sr_flag_take, sr_now_ns, sr_waitset, sr_waitset_enter, sr_waitset_sleep, sr_yield,
)
from .._core.trace cimport end_call, enter_call, step_call
from .._diagnostics.flight_recorder cimport (
    SR_WAIT_CALL, begin_call_wait, end_wait, give_up_wait, is_wait_of,
)
from .._internode.context cimport call_number, inter_of, number_in, sr_conn_sleep_or, sr_conn_take_news
from .._transport.channel cimport sr_channels_poll_abort
from .queue cimport (
    BACKGROUND, CANDIDATE, ELECTED, FILLED, IN_ORDER, WAITER, Pollable, Queue, Task, is_finished, is_pending,
    next_of, oldest,
)
from .wait cimport BRIEF_NBYTES, LONG_SLEEP_NS, poll_call, sleep_ns_after, step_to_end, try_briefly

from .._system import limits

cdef extern from "Python.h":
    void *PyInterpreterState_Get()
    void *PyInterpreterState_Main()

# Python aborts when an interpreter other than the main one ends while the progress thread runs. Python itself refuses,
# from 3.12 on, only isolated interpreters.
if PyInterpreterState_Get() != PyInterpreterState_Main():
    raise ImportError("shmring's communicators work only in the main interpreter of a process, and this is another one "
                      "(mod_wsgi: set WSGIApplicationGroup %{GLOBAL})")

cdef enum:
    FIRST_CAPACITY = 16
    STEPS_AT_ONCE = 64             # steps of one queue before the next queue is stepped
    PAUSES = 30
    SPIN_NS = 20000                # blocked calls are polled without sleep for this long
    IDLE_NS = 1000000000           # longest sleep if nothing is pending
    REAP_NS = 500000000            # longest time between the end of a call and its release, if others are pending

cdef uint64_t FINISHED = ~<uint64_t> 0   # value of Task.notify


cdef class Issued:
    """A call in a queue, and the objects that must stay alive while it is there."""

    def __cinit__(self, *_, **__):
        memset(&self.task, 0, sizeof(Task))

    # Fill the call. If task.filling is TO_BE_FILLED, this is called with the GIL once the calls before it
    # are finished.
    cdef int finish_filling(self) except -1:
        return 0

    # The call is finished: release the arrays, also if the program keeps this object. This may run any Python code.
    cdef void let_go(self) noexcept:
        self.kept = None


# ---- one queue -------------------------------------------------------------------------------------------------

cdef Queue *new_queue(Group *g) except NULL:
    cdef Queue *q = <Queue *> calloc(1, sizeof(Queue))
    if q == NULL:
        raise MemoryError()
    q.group = g
    q.pollable.step = run_queue
    q.task = <Task **> calloc(FIRST_CAPACITY, sizeof(void *))
    q.mask = FIRST_CAPACITY - 1
    if q.task == NULL or posix_memalign(<void **> &q.event, SR_LINE, sizeof(sr_event)) != 0:
        free_queue(q)
        raise MemoryError()
    memset(q.event, 0, sizeof(sr_event))
    prepare_election(q)
    return q


cdef void free_queue(Queue *q) noexcept:
    if q != NULL:
        free(q.task)
        free(q.event)
        free(q)


# Append a task. This runs no Python code, so what its caller has checked still holds.
cdef int append(Queue *q, Task *t) except -1:
    cdef uint64_t number = sr_flag_load(&q.issued) + 1
    if number - sr_flag_load(&q.reaped) > q.mask:
        grow(q)
    sr_flag_set(&t.number, number)
    if t.call.priority != 0:
        become_candidate(q, t)
    q.task[number & q.mask] = t
    if t.keeper != NULL:
        Py_INCREF(<object> t.keeper)
    sr_flag_set(&q.issued, number)
    return 0


cdef int grow(Queue *q) except -1:
    cdef uint64_t mask = 2 * q.mask + 1
    cdef uint64_t number
    cdef Task **task = <Task **> calloc(mask + 1, sizeof(void *))
    cdef Task **old = q.task
    if task == NULL:
        raise MemoryError()
    acquire_stepper(q)
    for number in range(sr_flag_load(&q.reaped) + 1, sr_flag_load(&q.issued) + 1):
        task[number & mask] = old[number & q.mask]
    q.task, q.mask = task, mask
    sr_flag_release(&q.stepper)
    free(old)
    return 0


# Drop the references to the keepers of finished calls.
cdef void reap(Queue *q) noexcept:
    cdef uint64_t number
    cdef Task *t
    while sr_flag_load(&q.reaped) != sr_flag_load(&q.finished):
        number = sr_flag_load(&q.reaped) + 1
        t = q.task[number & q.mask]
        sr_flag_set(&q.reaped, number)
        if t.keeper != NULL:
            (<Issued> t.keeper).let_go()
            Py_DECREF(<object> t.keeper)


# ---- stepping: by the thread that has taken the stepper --------------------------------------------------------

cdef void record_failure(Queue *q, Task *t, int status) noexcept nogil:
    q.failed_status = status
    q.failed_number = sr_flag_load(&t.number)
    q.failed_call = t.call


# Return the status that ended a step, and copy its call. Return DONE if there is none, or if the call has ended since.
cdef int fetch_failure(Queue *q, Call *c) noexcept nogil:
    cdef int status
    acquire_stepper(q)
    status = q.failed_status
    c[0] = q.failed_call
    if not is_pending(q) or not is_failed(q, next_of(q)):
        status = DONE
    if status == DONE or status == SIGNALLED:   # SIGNALLED only asks to poll notifications of other hosts
        q.failed_status = DONE
    sr_flag_release(&q.stepper)
    return status


# True if t is the task with the recorded status. An election has the number of the oldest call, so seq is compared,
# too.
cdef inline bint is_failed(const Queue *q, const Task *t) noexcept nogil:
    return sr_flag_load(&t.number) == q.failed_number and t.begun and t.call.seq == q.failed_call.seq


# Take the stepper, for a short time.
cdef void acquire_stepper(Queue *q) noexcept nogil:
    sr_flag_acquire(&q.stepper, WAITER)


# Copy the current call, which another thread may finish at any time. Return False if there is none, or if it is being
# stepped.
cdef bint copy_begun(Queue *q, Call *c) noexcept nogil:
    cdef bint is_there
    if not sr_flag_take(&q.stepper, WAITER):
        return False
    is_there = is_pending(q) and next_of(q).begun
    if is_there:
        c[0] = next_of(q).call
    sr_flag_release(&q.stepper)
    return is_there


# Begin a task if it has not begun. Return False if its call must be filled first.
cdef inline bint begin(Queue *q, Task *t) noexcept nogil:
    if not t.begun:
        if sr_flag_load(&t.filling) != FILLED:
            return False
        t.begun = True
        if t.before != NULL:
            t.before(t)
        enter_call(q.group, &t.call)
    return True


# Finish the oldest task. The task may be freed once its number is published, and the engine once the queue is empty.
cdef void finish_oldest(Queue *q, Task *t, int status) noexcept nogil:
    cdef uint64_t one = 1
    cdef uint64_t notify
    t.status = status
    if status == DONE and t.after != NULL:
        t.after(t)
    notify = sr_flag_swap(&t.notify, FINISHED)
    if notify != 0:
        write(<int> (notify - 1), &one, sizeof(one))
    if status == DONE and t.call.kind != INVALID:
        q.group.stats.calls += 1
    end_call(q.group, SR_COMPLETE if status == DONE else SR_RAISED)
    if status == DONE:
        end_wait(q.group, SR_WAIT_CALL)
    sr_flag_publish(&q.finished, sr_flag_load(&t.number), q.event)


# Finish a task whose call is done. An election, or a part of a call that is not the last, makes the queue continue.
cdef inline void finish_or_continue(Queue *q, Task *t) noexcept nogil:
    if t.priority_state == IN_ORDER or not continue_task(q, t):
        finish_oldest(q, t, DONE)


# Step the queue. Return PROGRESSED, BLOCKED, DONE if nothing is pending, UNFILLED, or a status that ends the
# communicator.
cdef int step_queue(Queue *q) noexcept nogil:
    cdef Task *t
    cdef int status = PROGRESSED
    cdef int steps = 0
    while status == PROGRESSED and steps < STEPS_AT_ONCE:
        if not is_pending(q):
            return DONE
        t = next_of(q)
        if not begin(q, t):
            return UNFILLED
        status = step_call(q.group, &t.call)
        if status == BLOCKED and sr_flag_spin(t.call.awaited.flag, t.call.awaited.target, PAUSES):
            status = PROGRESSED
        if status == PROGRESSED:
            t.call.interrupted = False   # the wait has ended
            end_wait(q.group, SR_WAIT_CALL)
        elif status == DONE:
            finish_or_continue(q, t)
            status = PROGRESSED
        steps += 1
    return status


# Step small calls for the thread that has just issued one, with the GIL held, as far as possible without waiting.
cdef void step_briefly(Queue *q) noexcept:
    cdef sr_float_env env
    cdef Task *t
    cdef int status = DONE
    if not sr_flag_take(&q.stepper, WAITER):
        return
    env = sr_float_env_enter()
    while status == DONE and is_pending(q):
        t = next_of(q)
        if not begin(q, t) or t.call.nbytes > BRIEF_NBYTES or t.call.interrupted:
            break
        status = try_briefly(q.group, &t.call)
        if status == DONE:
            finish_or_continue(q, t)
    sr_float_env_leave(env)
    sr_flag_release(&q.stepper)


# Step the queue for a thread that waits for a task. Return DONE once the task is finished, SIGNALLED when Python has to
# check its signals or until_ns has come, UNFILLED, or a status that ends the communicator.
cdef int step_until(Queue *q, Task *t, uint64_t until_ns) noexcept nogil:
    cdef sr_float_env env
    cdef Task *first
    cdef int status = DONE
    while not is_finished(q, t):
        if not sr_flag_take(&q.stepper, WAITER):
            if sr_flag_load(&q.stepper) != WAITER:
                sr_yield()          # the progress thread gives the stepper back after STEPS_AT_ONCE steps at most
                continue
            sr_flag_sleep(&q.finished, sr_flag_load(&t.number), q.event,
                          LONG_SLEEP_NS)   # the thread that steps signals it
            if not is_finished(q, t):
                return SIGNALLED
            continue
        env = sr_float_env_enter()
        if until_ns < q.group.signal_ns:
            q.group.signal_ns = until_ns
        while status == DONE and not is_finished(q, t):
            first = next_of(q)
            status = step_to_end(q.group, &first.call) if begin(q, first) else UNFILLED
            if status == DONE:
                finish_or_continue(q, first)
            elif status != SIGNALLED and status != UNFILLED:
                record_failure(q, first, status)
        sr_float_env_leave(env)
        sr_flag_release(&q.stepper)
        if sr_flag_load(&q.nwaiters) > 1:
            sr_event_signal(q.event)
        if status != DONE:
            return status
    return DONE


# Step the queue until until_ns for the thread that has issued a task. Python's signals are not checked. Return earlier
# at a status other than SIGNALLED: the thread that waits for the task handles it.
cdef void linger(Queue *q, Task *t, uint64_t until_ns) noexcept:
    cdef int status = SIGNALLED
    sr_flag_set(&q.nwaiters, sr_flag_load(&q.nwaiters) + 1)
    with nogil:
        while status == SIGNALLED and sr_now_ns() < until_ns:
            status = step_until(q, t, until_ns)
    sr_flag_set(&q.nwaiters, sr_flag_load(&q.nwaiters) - 1)


# Finish all tasks, since the communicator has ended. Calls that have not begun are recorded, as the error of a mismatch
# on other ranks shows them; an election in progress has recorded its call already.
cdef void finish_all(Queue *q) noexcept nogil:
    cdef Task *t
    acquire_stepper(q)
    while is_pending(q):
        t = oldest(q)
        if not next_of(q).begun:
            begin_call(q.group, &t.call)
            if q.group.inter != NULL:
                q.group.recorded.number = call_number(inter_of(q.group), inter_of(q.group).seq + 1)
        finish_oldest(q, t, ABORTED)
    sr_flag_release(&q.stepper)


# ---- all queues of the process ---------------------------------------------------------------------------------

cdef struct Background:
    sr_flag wakeups            # number of calls of wake_thread
    sr_flag guard              # taken by a thread that walks or changes the list
    Pollable *first
    sr_flag thread             # the progress thread; 0: there is none
    uint64_t blocked_since_ns
    bint has_reapable          # in the last pass a queue had finished calls and nothing else
    uint64_t reapable_since_ns
    int news                   # epoll descriptor of a pollable that waits for other hosts; 0: none does
    sr_flag at_news            # the thread sleeps on `news`
    int waker                  # eventfd of that pollable, which ends the sleep; 0: there is none

cdef Background background
cdef sr_event wakeup_event
memset(&background, 0, sizeof(background))
memset(&wakeup_event, 0, sizeof(wakeup_event))

_owners = {}   # weak references by id; unlike a WeakSet, a dict can be copied to a list atomically


# True in the progress thread.
cdef bint is_background() noexcept:
    return sr_flag_load(&background.thread) == PyThread_get_thread_ident()


# True if the process has a progress thread, which is one of Python's threads.
cdef bint is_thread_running() noexcept:
    return sr_flag_load(&background.thread) != 0


# Let the progress thread step a pollable from now on, and call owner._attend() when the GIL is needed. Another thread
# may have enlisted the pollable while this one started the thread.
cdef int enlist(Pollable *e, object owner) except -1:
    delist(e)
    _owners[id(owner)] = weakref.ref(owner, functools.partial(_owners.pop, id(owner)))
    take_guard()
    e.next = background.first
    background.first = e
    sr_flag_release(&background.guard)
    return 0


# Remove a pollable: the progress thread does not touch it, or the structure that contains it, any more.
cdef void delist(Pollable *e) noexcept nogil:
    cdef Pollable **link = &background.first
    take_guard()
    while link[0] != NULL and link[0] != e:
        link = &link[0].next
    if link[0] == e:
        link[0] = e.next
        background.waker = 0
    sr_flag_release(&background.guard)


cdef void take_guard() noexcept nogil:
    sr_flag_acquire(&background.guard, 1)


# Wake the progress thread: there is work for it. The thread was started before the pollable was enlisted.
cdef void wake_thread() noexcept:
    cdef uint64_t one = 1
    sr_flag_publish(&background.wakeups, sr_flag_load(&background.wakeups) + 1, &wakeup_event)
    if sr_flag_load_ordered(&background.at_news) != 0:
        if background.waker != 0:   # stays valid: its pollable is delisted with the GIL held, too
            write(background.waker, &one, sizeof(one))


# Start the progress thread if there is none. Call this before work is left to it: this may raise.
cdef int start_thread() except -1:
    if sr_flag_load(&background.thread) == 0:
        limits.start_thread(threading.Thread(target=_run, name="shmring-progress", daemon=True))
    return 0


def _run():
    # A signal may have interrupted the start of an earlier thread, which runs nevertheless.
    if not sr_flag_take(&background.thread, PyThread_get_thread_ident()):
        return
    while True:
        with nogil:
            serve()
        try:
            _attend_to_all()
        except BaseException:   # no memory for it: the next pass tries again
            sr_yield()


def _attend_to_all():   # a function, so that the thread keeps no owner alive while it sleeps
    for reference in list(_owners.values()):
        owner = reference()
        if owner is not None:
            owner._attend()


def _forget():
    """Clear the list in a forked child: it has no such thread, and the queues are the parent's."""
    _owners.clear()
    memset(&background, 0, sizeof(background))
    memset(&wakeup_event, 0, sizeof(wakeup_event))


os.register_at_fork(after_in_child=_forget)


# Run the progress thread without the GIL, until an owner's _attend() has to be called.
cdef void serve() noexcept nogil:
    cdef sr_float_env env = sr_float_env_enter()
    cdef sr_waitset waitset
    cdef uint64_t wakeups
    cdef int found
    while True:
        wakeups = sr_flag_load(&background.wakeups)
        found = go_round(NULL)
        if found != WAITING:
            background.blocked_since_ns = 0
        if found == WANTS_PYTHON or found == REAPABLE or is_reaping_due():
            background.reapable_since_ns = 0
            break
        if found == ACTIVE:
            continue
        if found == WAITING and not blocked_long():
            sr_yield()
            continue
        if background.news != 0:
            sleep_on_connections(wakeups)
            continue
        memset(&waitset, 0, sizeof(waitset))
        if sr_waitset_enter(&waitset, &background.wakeups, wakeups + 1, &wakeup_event) and go_round(&waitset) == found:
            sr_waitset_sleep(&waitset, IDLE_NS if found == IDLE else LONG_SLEEP_NS)
    sr_float_env_leave(env)


# True if finished calls have waited for their release for REAP_NS. They wait while others are pending, since this
# thread advances none of those until it has the GIL.
cdef bint is_reaping_due() noexcept nogil:
    cdef uint64_t now
    if not background.has_reapable:
        background.reapable_since_ns = 0
        return False
    now = sr_now_ns()
    if background.reapable_since_ns == 0:
        background.reapable_since_ns = now
    return now - background.reapable_since_ns > REAP_NS


cdef bint blocked_long() noexcept nogil:
    cdef uint64_t now = sr_now_ns()
    if background.blocked_since_ns == 0:
        background.blocked_since_ns = now
    return now - background.blocked_since_ns > SPIN_NS


# Sleep on the connections to other hosts. A flag does not end such a sleep, so it is short at first, then longer.
cdef void sleep_on_connections(uint64_t wakeups) noexcept nogil:
    cdef uint64_t blocked_ns = sr_now_ns() - background.blocked_since_ns
    cdef uint64_t ignored = 0
    sr_flag_publish(&background.at_news, 1, &wakeup_event)
    if sr_flag_load_ordered(&background.wakeups) == wakeups:
        sr_conn_sleep_or(background.news, background.waker, sleep_ns_after(blocked_ns))
    sr_flag_set(&background.at_news, 0)
    take_guard()
    if background.waker != 0:   # always read: it may have been written to after the last sleep
        read(background.waker, &ignored, sizeof(ignored))
    sr_flag_release(&background.guard)
    if sr_flag_load(&background.wakeups) != wakeups:
        background.blocked_since_ns = 0


# Step all pollables once. Return the most urgent result. waitset: if not NULL, they also enter the events they wait
# for.
cdef int go_round(sr_waitset *waitset) noexcept nogil:
    cdef int found = IDLE
    cdef int status
    cdef Pollable *e
    background.news = 0
    background.has_reapable = False
    take_guard()
    e = background.first
    while e != NULL:
        status = e.step(e, waitset)
        found = max(found, status)
        background.has_reapable = background.has_reapable or status == REAPABLE
        if e.news != 0:
            background.news, background.waker = e.news, e.waker
        e = e.next
    sr_flag_release(&background.guard)
    return found


# Step one communicator's calls, unless a thread waits for one of them: that thread steps them.
cdef int run_queue(Pollable *e, sr_waitset *waitset) noexcept nogil:
    cdef Queue *q = <Queue *> e
    cdef int found
    cdef int news = e.news   # the thread may have slept on it
    e.news = 0
    if not is_pending(q):
        return REAPABLE if sr_flag_load(&q.reaped) != sr_flag_load(&q.finished) else IDLE
    if sr_flag_load(&q.nwaiters) != 0:
        return IDLE
    if not sr_flag_take(&q.stepper, BACKGROUND):
        return WAITING   # another thread has it for a moment, and wakes nobody afterwards
    if news != 0:
        sr_conn_take_news(news)
    found = step_in_background(q, waitset)
    sr_flag_release(&q.stepper)
    return found


cdef int step_in_background(Queue *q, sr_waitset *waitset) noexcept nogil:
    cdef int status = step_queue(q)
    cdef uint64_t now
    if status == DONE or status == PROGRESSED:
        return ACTIVE
    if status == BLOCKED:
        now = sr_now_ns()
        status = poll_call(q.group, &next_of(q).call, now)
        if status == PROGRESSED or status == SIGNALLED:
            if waitset == NULL and warning_is_due(q.group, now):
                return WANTS_PYTHON
            if q.group.inter == NULL:
                return wait_locally(q.group, &next_of(q).call, waitset)
            if not sr_channels_poll_abort(inter_of(q.group).channels):
                return wait_across(q, &next_of(q).call)
            status = SIGNALLED
    if status != UNFILLED:
        record_failure(q, next_of(q), status)
        give_up_wait(q.group)
    return WANTS_PYTHON


# Enter the event of the awaited flag, if there is a wait set. Return ACTIVE if the call need not wait any more.
cdef int wait_locally(Group *g, const Call *c, sr_waitset *waitset) noexcept nogil:
    if waitset == NULL:
        return WAITING
    publish_wait(g, c)
    if not sr_waitset_enter(waitset, c.awaited.flag, c.awaited.target, &g.lane[c.awaited.rank].event):
        return ACTIVE
    return WAITING if sr_flag_load_ordered(&g.header.abort) == SR_NO_ABORT else ACTIVE


# Let the progress thread sleep on the connections. Return as wait_locally.
cdef int wait_across(Queue *q, const Call *c) noexcept nogil:
    q.pollable.news = inter_of(q.group).news
    q.pollable.waker = inter_of(q.group).channels.waker
    if sr_flag_reached(c.awaited.flag, c.awaited.target):   # by a notification that was just received
        return ACTIVE
    publish_wait(q.group, c)
    return WAITING


# Publish the wait, unless a thread that has stopped waiting for the call has already published it.
cdef inline void publish_wait(Group *g, const Call *c) noexcept nogil:
    cdef uint64_t since_ns = sr_flag_load(&g.me.wait[SR_WAIT_CALL].since_ns)
    if since_ns == 0:
        since_ns = sr_now_ns()
        begin_call_wait(g, c, since_ns)
        g.warning_due_ns = since_ns + g.stall_ns
    elif not is_wait_of(g, c):   # one step has passed the flag of that wait, and met the next one
        end_wait(g, SR_WAIT_CALL)
        begin_call_wait(g, c, since_ns)


# True if the wait has become long enough for a warning. Stalls decides; the next check is after the same time.
cdef inline bint warning_is_due(Group *g, uint64_t now) noexcept nogil:
    if g.stall_ns == 0 or now < g.warning_due_ns or sr_flag_load(&g.me.wait[SR_WAIT_CALL].since_ns) == 0:
        return False
    g.warning_due_ns = now + g.stall_ns
    return True


# ---- calls with a priority -------------------------------------------------------------------------------------

# Choose the call with a priority that runs next, among those that every rank has issued. All ranks choose the same one.
# Large calls run in parts, so an urgent call waits for one part at most (Peng et al. 2019, ByteScheduler; Jayarajan et
# al. 2019, P3).
#
# A queue holds calls in the order of issue, and the oldest one runs. Consecutive calls with a priority form a *priority
# run*; a call without a priority ends it:
#
#       finished |  a   B   C   D  |  e   F ...       capitals: with a priority; B, C and D are a run once a is done
#                   oldest
#
# When the oldest call has a priority, the queue first runs its own *election*: a tiny all_reduce(min) of the number of
# calls from the oldest to the end of its run on each rank. Every rank has issued the calls that the minimum counts.
# They were issued and reordered alike everywhere, so all ranks know the same calls. The call with the highest priority,
# the first one of several, moves to the front. The queue is then as if this call had been issued there: numbers, waits,
# reaping and the end need no special cases.
#
#       B2 C1 D7 | e    min 2: all ranks issued C, not all D      ->   choose among B, C   ->   B2 C1 D7
#       C1 D7    | e    min 2 once all ranks have issued D        ->   choose among C, D   ->   D7 C1
#
#                             append                the election is done, it is the first
#    Task.priority_state: ------------>  CANDIDATE  ----------------------------------->  ELECTED  --->  finished
#                                            ^                                               |
#                                            +-----------  a part is done, more is left  <---+
#
# The fingerprint of an election contains the oldest call and all earlier choices. If ranks give a call different
# priorities, the election shows the mismatch, at the latest the one after a choice that differed. An election has a
# sequence number and a record like every call, but is not counted in stats or among the user's calls.

cdef enum:
    MOST_PART_NBYTES = 4 << 20   # of a call that runs in parts (bench/engine/bench_priority.py)


cdef void prepare_election(Queue *q) noexcept:
    cdef Call *c = &q.election.call
    q.election.priority_state = ELECTED
    q.election.argument = q
    c.kind, c.named = ALL_REDUCE, ELECTION
    c.dtype, c.op = SR_U64, SR_MIN
    c.count = 1
    c.itemsize = c.nbytes = c.x_nbytes = c.out_nbytes = sizeof(q.nready)
    c.x = c.out = <unsigned char *> &q.nready
    c.recorded_as = &q.candidate
    c.enter = enter_election


cdef void enter_election(Group *g, Call *c) noexcept nogil:
    cdef Queue *q = <Queue *> (<Task *> c).argument
    cdef Task *first = oldest(q)
    q.election.number = first.number
    q.candidate = first.call
    q.candidate.named = ELECTION
    q.candidate.count += first.left
    q.candidate.number = number_in(g, g.seq) + 1
    q.stats = g.stats
    q.nready = nready(q)
    c.timeout_ns = first.call.timeout_ns
    c.fingerprint = fingerprint_of(c) ^ mixed(q.elected_hash ^ first.fingerprint) >> 32 << 32
    g.choose_algorithm(g, c)
    c.enter(g, c)
    c.enter = enter_election


# Return the number of calls from the oldest one to the end of its run.
cdef uint64_t nready(const Queue *q) noexcept nogil:
    cdef uint64_t first = sr_flag_load(&q.finished) + 1
    cdef uint64_t end = sr_flag_load(&q.issued) + 1
    cdef uint64_t number = first
    while number != end and q.task[number & q.mask].priority_state != IN_ORDER:
        number += 1
    return number - first


# Move the elected call to the front. Every rank has issued the first q.nready calls.
cdef void elect(Queue *q) noexcept nogil:
    cdef uint64_t first = sr_flag_load(&q.finished) + 1
    cdef uint64_t best = first
    cdef uint64_t number
    cdef Task *t
    for number in range(first + 1, first + q.nready):
        if q.task[number & q.mask].call.priority > q.task[best & q.mask].call.priority:
            best = number
    t = q.task[best & q.mask]
    q.elected_hash = mixed(q.elected_hash ^ t.fingerprint ^ best - first)
    number = best
    while number != first:
        put(q, number, q.task[(number - 1) & q.mask])
        number -= 1
    put(q, first, t)
    t.priority_state = ELECTED


cdef inline void put(Queue *q, uint64_t number, Task *t) noexcept nogil:
    q.task[number & q.mask] = t
    sr_flag_set(&t.number, number)


# ---- parts -----------------------------------------------------------------------------------------------------

# True if the call may run in parts: the bits of an element do not depend on its part, and it has the same offset in x
# and out.
cdef inline bint may_go_in_parts(const Call *c) noexcept nogil:
    if c.kind != BROADCAST and (not is_sliced(c) or c.wire != SR_WIRE_NATIVE):
        return False
    return c.nbytes > MOST_PART_NBYTES and (c.algorithm == AUTO or c.algorithm == DIRECT)


# Change the call into its next part.
cdef void take_part(Group *g, Task *t) noexcept nogil:
    cdef Call *c = &t.call
    cdef uint64_t signature = c.fingerprint ^ fingerprint_of(c)   # of the list of arrays, if it is of one
    c.x += c.nbytes
    c.out += c.nbytes
    c.x_offset += c.nbytes
    c.out_offset += c.nbytes
    c.count = min(t.left, <size_t> MOST_PART_NBYTES // c.itemsize)
    c.nbytes = c.x_nbytes = c.out_nbytes = c.count * c.itemsize
    t.left -= c.count
    c.fingerprint = fingerprint_of(c) ^ signature
    g.choose_algorithm(g, c)


# Prepare a call with a priority that is about to be appended.
cdef void become_candidate(Queue *q, Task *t) noexcept:
    t.priority_state = CANDIDATE
    t.fingerprint = t.call.fingerprint
    if may_go_in_parts(&t.call):
        t.left = t.call.count
        t.call.nbytes = 0
        take_part(q.group, t)


# Continue after an election or a part of a call. Return False if the task is finished instead.
cdef bint continue_task(Queue *q, Task *t) noexcept nogil:
    cdef Group *g = q.group
    cdef bint is_election = t == &q.election
    if not is_election and t.left == 0:
        return False
    end_call(g, SR_COMPLETE)
    end_wait(g, SR_WAIT_CALL)
    g.first_user_seq += 1   # the next call has the same number among the user's calls
    if g.inter != NULL:
        inter_of(g).first_user_seq += 1
    t.begun = False
    if is_election:
        g.stats = q.stats
        elect(q)
    else:
        take_part(g, t)
        t.priority_state = CANDIDATE
    return True
