# The engine of one communicator on one rank: it runs calls to their end, in the foreground or in the background, and
# reports errors. It opens and allocates nothing shared.

import os
import sys
import time

from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint8_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strlen, strrchr
from posix.unistd cimport close as close_fd

from .._algorithms.choice cimport enter_refused, step_refused
from .._core.core_distance cimport enter_ping, step_ping_call
from .._core.group cimport (
    ALLOCATE, ALL_REDUCE, BLOCKED, BROADCAST, DEAD, DONE, LATE, LEFT, LOST, MISMATCHED, PING, REMOTE_MISMATCH,
    SIGNALLED, UNFILLED, UNREADABLE, Block, Call, Group, Stats, check_liveness, fingerprint_of, is_before,
    record_call, set_abort, set_far,
)
from .._core.kernels cimport SR_BOR, SR_MIN, SR_SUM, SR_U8, sr_float_env, sr_float_env_enter, sr_float_env_leave
from .._core.segment cimport (
    SR_ABORTED, SR_BEFORE_RELEASE, SR_CHECKS, SR_CLOSED, SR_COMPLETE, SR_FAULT, SR_JOINED, SR_MISMATCHED, SR_NO_ABORT,
    SR_PAYLOAD_NBYTES, SR_RAISED, SR_RANK_FAILED, SR_REASON_NBYTES, SR_REMOTE_ABORT, SR_TIMED_OUT, sr_event_signal,
    sr_flag_acquire, sr_flag_load, sr_flag_release, sr_flag_set, sr_flag_take, sr_liveness, sr_liveness_died,
    sr_liveness_set_state,
    sr_liveness_task, sr_now_ns, sr_report, sr_single_copy, sr_yield,
)
from .._core.timeouts cimport NEVER_NS, ns_of
from .._core.trace cimport end_call, enter_call
from .._diagnostics.flight_recorder cimport SR_WAIT_CALL, TraceBuffer
from .._internode.choice cimport choose_algorithm_across, enter_refused_across, step_refused_across
from .._internode.context cimport InterNodeConns, inter_of, remote
from .progress cimport (
    Issued, append, copy_begun, delist, enlist, finish_all, free_queue, is_background, linger, new_queue, reap,
    start_thread, step_briefly, step_until, fetch_failure, acquire_stepper, wake_thread,
)
from .queue cimport BEING_FILLED, FILLED, TO_BE_FILLED, WAITER, Queue, Task, is_finished, is_pending, oldest
from .state cimport (
    LivenessThread, Stalls, await_same_call, begin_report, find_remote_mismatch, last_call_of, mismatched_calls,
    most_suspect, world_number,
)
from .wait cimport BRIEF_NBYTES, step_to_end, try_briefly

from . import state
from .._diagnostics import failures
from .._system import procfs
from ..errors import Closed, Error, RankFailed, Timeout


cdef double GRACE_S = 0.15     # delay between the reports of ranks that know different amounts about a late call
cdef double DEATH_S = 0.2      # busy CPUs may delay the end of a process for as long
cdef double NOTIFIED_S = 1.0   # wait for a notification that was sent before a connection ended

cdef enum:
    WAKE_NS = 200000   # about the time to wake a thread; calls linger at least so long, or for a shorter linger_ns
    ATTEMPTS = 8   # attempts to end a communicator while signal handlers raise during it


# True if this process can read the memory of that rank. A process with the same pid in another container has another
# value at the nonce's address.
cdef bint can_read_memory_of(const sr_liveness *liveness) noexcept:
    cdef uint64_t nonce = 0
    return (sr_single_copy(sr_liveness_task(liveness), &nonce,
                           <uintptr_t> &(<sr_liveness *> <uintptr_t> liveness.address).nonce,
                           sizeof(nonce)) == 0 and nonce == liveness.nonce)


cdef extern from "Python.h":
    unsigned long Py_TPFLAGS_HEAPTYPE
    bint PyType_HasFeature(void *kind, unsigned long feature)
    const char *PyUnicode_AsUTF8(object) except NULL
    ctypedef struct TypeObject "PyTypeObject":
        const char *tp_name
        void *tp_str
    ctypedef struct ExceptionObject "PyBaseExceptionObject":
        void *args
    TypeObject *Py_TYPE(object)
    TypeObject *BaseExceptionType "((PyTypeObject *)PyExc_BaseException)"


# True if str(error) runs no Python code.
cdef bint has_plain_text(object error) noexcept:
    cdef TypeObject *kind = Py_TYPE(error)
    cdef void *args = (<ExceptionObject *> <void *> error).args
    if args == NULL or (kind.tp_str != BaseExceptionType.tp_str and PyType_HasFeature(kind, Py_TPFLAGS_HEAPTYPE)):
        return False
    for argument in <tuple> <object> args:
        if type(argument) is not str and type(argument) is not int:
            return False
    return True


# Write the reason of this rank's abort: the exception's name and text. This runs no Python code, so no signal handler
# can raise before the other ranks know the reason.
cdef void describe_raised(object error, int rank, const char *doing, char *reason) noexcept:
    cdef const char *name = Py_TYPE(error).tp_name
    cdef const char *last = strrchr(name, b'.')
    cdef size_t nbytes
    if last != NULL:
        name = last + 1
    if doing == NULL:
        snprintf(reason, SR_REASON_NBYTES, b"%s in rank %d", name, rank)
    else:
        snprintf(reason, SR_REASON_NBYTES, b"%s in rank %d, %s", name, rank, doing)
    if has_plain_text(error):
        try:
            text = str(error)
            if text:
                nbytes = strlen(reason)
                snprintf(reason + nbytes, SR_REASON_NBYTES - nbytes, b": %s", PyUnicode_AsUTF8(text))
        except BaseException:   # no memory, or not valid UTF-8: the name is enough
            pass


# ---- the engine ------------------------------------------------------------------------------------------------

cdef void release_trace(Engine engine) noexcept:
    if engine.traced != NULL:
        (<TraceBuffer> engine.traced).is_in_use = False
        Py_DECREF(<TraceBuffer> engine.traced)
        engine.traced = NULL


cdef class Engine(State):
    """The engine of one communicator on one rank."""

    def __cinit__(self, *_, **__):
        self.queue = new_queue(&self.g)
        self.liveness_thread = LivenessThread()
        self.thread = <unsigned long> PyThread_get_thread_ident()
        self.stalls = Stalls()

    def __dealloc__(self):
        if self.queue != NULL:
            delist(&self.queue.pollable)
            free_queue(self.queue)
        release_trace(self)   # a function: if State.__cinit__ raises, the object has only State's methods

    def adopt_wait_policy(self, Engine parent):
        """Adopt the wait policy and the core distance of an engine whose ranks include this engine's ranks."""
        cdef Group *g = &parent.g
        self.set_wait_policy(pauses=g.pauses, brief_pauses=g.brief_pauses, brief_yields=g.brief_yields,
                             yield_ns=g.yield_ns, sleep_ns=g.sleep_ns, poll_ns=g.poll_ns,
                             ping_interval_ns=g.ping_interval_ns, zero_copy_nbytes=g.zero_copy_nbytes,
                             oversubscribed=g.oversubscribed)
        self.g.single_copy = g.single_copy
        self.g.next_far = g.far
        set_far(&self.g, g.far)

    # -- liveness --

    def arrive(self, int pid, uint64_t start_time):
        """Make this rank known to the others. From now on they detect its death."""
        self.g.me.liveness.pid = pid
        self.g.me.liveness.start_time = start_time
        self.g.me.liveness.address = <uintptr_t> &self.g.me.liveness
        self.g.me.liveness.nonce = int.from_bytes(os.urandom(8), "little")
        self.g.me.stack_request.rank, self.g.me.stack_request.size = self.g.rank, self.g.size
        self.liveness_thread.begin(self.g.me, self)
        sr_liveness_set_state(&self.g.me.liveness, SR_JOINED)

    def close(self, str because="the communicator is closed"):
        """Finish the issued calls, then leave. Ranks that still wait for this rank are notified.

        A second close does nothing.
        """
        if self.closed_because is not None:
            return
        self.finish_issued()
        self.closed_because = because   # set at once, so that no other thread begins a call
        sr_liveness_set_state(&self.g.me.liveness, SR_CLOSED)
        sr_event_signal(&self.g.me.event)
        delist(&self.queue.pollable)
        try:
            if self.notifications is not None:
                self.notifications.leave()
        finally:
            self.liveness_thread.leave()

    def abandon(self, parts):
        """Release the parts of this rank if no communicator was made of them. Other ranks see that it has left.

        Does nothing if a communicator has already closed them. It is C code, as the interpreter runs no signal handler
        before a call of C code: the exception of a second signal, right after the first one, cannot prevent it. The
        descriptor is closed first, since a signal may interrupt what follows.
        """
        if self.closed_because is not None:
            return
        close_fd(parts.fd)
        try:
            self.close()
        finally:
            try:
                parts.local_sockets.close()
            finally:
                if parts.internode is not None:
                    parts.internode.close(0.0)

    def disown(self):
        """Mark the communicator as the parent's, in a forked child. Shared memory is not touched."""
        self.closed_because = "this communicator belongs to the parent of this forked process; join a new world"

    # -- calls --

    cdef int check_open(self) except -1:
        if self.closed_because is not None:
            raise Closed(self.closed_because, rank=world_number(&self.g, self.g.rank))
        return 0

    # Run Python's signal handlers during a wait. Raise Closed if a handler has closed the communicator. Raise it, too,
    # in a child that a handler has forked: the call and the published wait are the parent's.
    cdef int check_signals(self) except -1:
        PyErr_CheckSignals()
        return self.check_open()

    cdef int prepare_to_begin(self, Call *c) except -1:
        cdef bint is_aborted = SR_CHECKS and sr_flag_load(&self.g.header.abort) != SR_NO_ABORT
        if self.closed_because is not None or self.busy or self.call_owner != 0 or is_aborted:
            if (is_aborted and self.closed_because is None and not self.busy and self.may_call()
                    and self.g.recorded.seq != self.g.seq + 1):
                # Record the call: the error of a mismatch on other ranks shows it. A call over several hosts that ended
                # before its first local step has its record already.
                c.seq = self.g.seq + 1
                c.number = self.number_of(self.g.seq) + 1
                record_call(&self.g, c)
            self.check()
        self.nbegun += 1
        return 0

    cdef int run_call(self, Call *c) except -1:
        """Run a call to its end. Raise the error if it fails."""
        cdef Group *g = &self.g
        cdef sr_float_env env
        cdef int status = BLOCKED
        self.prepare_to_begin(c)
        if is_pending(self.queue) or c.priority != 0:
            return self.run_queued_call(c)
        self.busy = True
        env = sr_float_env_enter()
        try:
            enter_call(g, c)
            if c.nbytes <= BRIEF_NBYTES:
                status = try_briefly(g, c)
            if status != DONE:
                self.run_without_gil(c)
            end_call(g, SR_COMPLETE)
            SR_FAULT(SR_BEFORE_RELEASE)
            g.stats.calls += 1
        finally:
            sr_float_env_leave(env)
            self.busy = False
        return 0

    cdef int run_without_gil(self, Call *c) except -1:
        cdef Group *g = &self.g
        cdef int status
        while True:
            with nogil:
                status = step_to_end(g, c)
            if status == DONE:
                return 0
            self.raise_for_status(c, status)

    # Raise the error of a status, on all ranks. Return if the status is a signal whose handler raised nothing. Any
    # exception raised here, also while an error is built, ends the communicator, except in a forked child.
    cdef int raise_for_status(self, Call *c, int status) except -1:
        cdef Group *g = &self.g
        if status != SIGNALLED:
            end_call(g, SR_RAISED)
        try:
            if status == SIGNALLED:
                self.check_signals()
                self.stalls.warn_if_due(self, SR_WAIT_CALL)
                self.poll_abort(c.seq)
                self.compare_calls(c)
                return 0
            self.abort_for_status(c, status)
        except BaseException as error:
            if self.closed_because is not None:
                raise
            if status == SIGNALLED:
                end_call(g, SR_RAISED)
            self.abort_by_exception(error)
            raise
        self.raise_abort_error()
        return 0

    # Report the error of a call that ended with this status.
    cdef int abort_for_status(self, Call *c, int status) except -1:
        cdef Group *g = &self.g
        cdef int culprit = c.awaited.rank
        seq = c.seq
        if status == LOST or status == REMOTE_MISMATCH:
            self.abort_for_remote(c, status)
        elif status == MISMATCHED:
            self.abort_with(SR_MISMATCHED, culprit, c.mismatch_seq, "")
        elif status == LATE:
            culprit = failures.late_in_the_end(self, most_suspect(self, c))
            if g.inter != NULL:
                self.await_better_report(c, culprit)
            self.abort_with(SR_TIMED_OUT, culprit, seq, failures.describe_late(self, culprit, seq, c.timeout_ns * 1e-9))
        elif status == DEAD:
            self.abort_with(SR_RANK_FAILED, culprit, seq, procfs.how_it_ended(*self.flight.liveness_of(culprit)))
        elif status == LEFT:
            self.abort_with(SR_RANK_FAILED, culprit, seq, failures.CLOSED_IT)
        elif status == UNREADABLE:
            self.abort_with(SR_ABORTED, g.rank, seq, failures.describe_unreadable(culprit, c.error))
        return 0

    # -- the end --

    # Raise the error of the abort word, the same on every rank of this host. Before that, notify the other hosts and
    # make this rank's shared arrays private. If a signal handler raises meanwhile, its exception is raised instead,
    # after both. beside: the calling thread need not be the one that makes the collectives.
    cdef int raise_abort_error(self, bint beside=False) except -1:
        cdef int _attempt
        error = interrupt = None
        for _attempt in range(ATTEMPTS):
            try:
                error = failures.prepare_abort_error(self, beside=beside)
                break
            except BaseException as raised:
                interrupt = raised
        if interrupt is not None:
            raise interrupt
        raise error

    # End the communicator on all ranks because `error` was raised here. The abort word is set and the queue is emptied
    # before any Python code runs, so a second exception, as of a second signal, cannot prevent it. in_call: the error
    # was raised in a collective, whose name and number go into the report. beside: see raise_abort_error. doing:
    # another description of this rank's action, or NULL.
    cdef int abort_by_exception(self, object error, bint in_call=True, bint beside=False,
                                const char *doing=NULL) except -1:
        cdef sr_report report
        if self.closed_because is not None:
            return 0
        if isinstance(error, Error) and sr_flag_load(&self.g.header.abort) != SR_NO_ABORT:
            finish_all(self.queue)
            return 0
        begin_report(&self.g, &report, in_call, self.g.seq)
        describe_raised(error, world_number(&self.g, self.g.rank), doing, report.reason)
        set_abort(self.g.header, SR_ABORTED, self.g.rank, self.g.rank, &report)
        finish_all(self.queue)
        try:
            self.raise_abort_error(beside)
        except Error:   # the other ranks raise it; this rank raises `error`
            pass
        return 0

    # -- compound calls --

    # Begin a compound call of this thread, or a part of one; see Nesting. Return the innermost compound call before it,
    # for end_compound. Raise RuntimeError if it is another thread's, or may not have this part.
    cdef int begin_compound(self, int nesting) except -1:
        cdef int outer = self.compound
        if outer != OUTSIDE and (not self.may_call() or nesting == ALONE
                                 or (nesting == IN_STEPS and outer != STEPS)):
            raise RuntimeError(state.TAKEN)
        if outer == OUTSIDE:
            self.call_owner = <unsigned long> PyThread_get_thread_ident()
            self.nbegun_before = self.nbegun
            self.nrefused = ~<uint64_t> 0   # none yet
        if nesting != STEPS or outer == OUTSIDE:
            self.compound = nesting
        return outer

    # End what begin_compound has begun. error: the exception that leaves it, or None.
    cdef int end_compound(self, int outer, object error) except -1:
        try:
            if error is not None:
                self.judge_compound_error(outer, error)
        finally:
            self.compound = outer
            if outer == OUTSIDE:
                self.call_owner = 0
        return 0

    # Before the first call, the error of a compound call has no effect. After that, other ranks wait in the next call
    # or have made others, so the communicator ends, unless all ranks raise the same error, or arguments were refused.
    # If one of shmring's own compound calls raises an Error while the communicator is usable, all ranks that need to
    # know raise it. Other errors of shmring, such as the Timeout of a lock, may be this rank's alone.
    cdef int judge_compound_error(self, int outer, object error) except -1:
        if (self.compound != STEPS and isinstance(error, Error)
                and sr_flag_load(&self.g.header.abort) == SR_NO_ABORT):
            error.shmring_agreed = id(self)   # a compound call of another communicator may be around this one
        if (outer == OUTSIDE and self.nbegun != self.nbegun_before and self.nbegun != self.nrefused
                and getattr(error, "shmring_agreed", None) not in (True, id(self))):
            if isinstance(error, RankFailed):
                self.await_death()
            self.abort_by_exception(error)
        return 0

    # After a RankFailed of another communicator: if the rank has died, end this one by a RankFailed, too.
    cdef int await_death(self) except -1:
        cdef double until = sr_now_ns() * 1e-9 + DEATH_S
        try:
            while sr_now_ns() * 1e-9 < until:
                self.poll()
                time.sleep(0.005)
        except BaseException:   # the RankFailed, or another exception, after which the caller ends the communicator
            pass
        return 0

    def run_steps(self, int nesting, function, /, *arguments, bint begun=False, **keywords):
        """Run function(*arguments, **keywords), which makes several calls, as one compound call.

        begun: an exception ends the communicator even before the first call, since the function has changed something
        else, or earlier calls were made before by another call of run_steps.
        """
        cdef int outer = self.begin_compound(nesting)
        if outer == OUTSIDE:
            self.nbegun_before -= begun
        try:
            result = function(*arguments, **keywords)
        except BaseException as error:
            if outer != OUTSIDE and begun and self.nbegun_before == self.nbegun:
                self.nbegun_before -= 1   # for the outer call
            self.end_compound(outer, error)
            raise
        self.end_compound(outer, None)
        return result

    # Report the end of a connection to another host. The rank that ended it may have sent a notification of the reason.
    cdef int abort_for_remote(self, Call *c, int status) except -1:
        cdef int rank
        if status == REMOTE_MISMATCH:
            await_same_call(self, c)
        rank = self.world_rank(c.awaited.rank)
        if self.notifications.await_abort(rank, NOTIFIED_S if status == LOST else 0.0) is not None:
            self.poll_abort(c.seq)
        elif status == REMOTE_MISMATCH:
            text = failures.describe_remote_mismatch(self, rank, *mismatched_calls(self))
            self.abort_with(SR_MISMATCHED, c.awaited.rank, c.seq, text)
        elif self.notifications.channels.has_left(rank):
            self.abort_with(SR_RANK_FAILED, c.awaited.rank, c.seq, failures.CLOSED_IT)
        else:
            self.abort_with(SR_RANK_FAILED, c.awaited.rank, c.seq, failures.describe_lost(c.error))
        return 0

    # End the communicator if a rank of another host has ended it. beside: see raise_abort_error.
    cdef int poll_abort(self, object seq, bint beside=False) except -1:
        if self.notifications is not None and self.notifications.poll() is not None:
            self.abort_with(SR_REMOTE_ABORT, self.g.rank, seq, str(self.notifications.error))
            self.raise_abort_error(beside)
        return 0

    # Raise Mismatch if a rank of another host waits in a different call.
    cdef int compare_calls(self, Call *c) except -1:
        found = find_remote_mismatch(self, c)
        if found is not None:
            text = failures.describe_remote_mismatch(self, *found, None)
            self.abort_with(SR_MISMATCHED, remote(&self.g, found[0]), c.seq, text)
            self.raise_abort_error()
        return 0

    def remote_call(self, int rank):
        """Return (number, call) of the last call that a rank of another host is known to have made, or None."""
        return last_call_of(self, rank - self.g.size)

    # Wait for the report of a rank that knows more about the late call. A rank that waits for a waiting rank would
    # blame the wrong one, so it delays its report. Ranks that wait for a local rank which has not entered the call
    # report first, then ranks that wait for another host, then ranks that wait for a local rank which may wait for
    # another host.
    cdef int await_better_report(self, Call *c, int culprit) except -1:
        cdef uint64_t first = inter_of(&self.g).first_local
        if c.awaited.rank >= self.g.size:
            grace_s = GRACE_S
        elif culprit >= self.g.size or not is_before(self.last_seq_of(culprit), first):
            grace_s = 3 * GRACE_S   # another local rank waits for that host, and knows more about it
        else:
            grace_s = 0.0   # ranks of a host synchronise before they wait for another host
        cdef double until = sr_now_ns() * 1e-9 + grace_s
        while sr_flag_load(&self.g.header.abort) == SR_NO_ABORT and sr_now_ns() * 1e-9 < until:
            self.poll_abort(c.seq)
            time.sleep(0.005)
        return 0

    cdef int abort_with(self, int cause, int culprit, object seq, str reason, str op=None) except -1:
        cdef sr_report report = self.report_of(seq, reason, op)
        set_abort(self.g.header, cause, culprit, self.g.rank, &report)
        return 0

    def abort(self, str reason):
        """End the communicator for the caller: every rank raises Aborted with this reason."""
        self.check_open()
        self.abort_with(SR_ABORTED, self.g.rank, self.g.seq, reason)
        if self.notifications is not None:
            try:
                self.raise_abort_error(beside=True)
            except Error:
                pass

    def attach_hosts(self, InterNodeConns conns, notifications):
        """Run all later calls over several hosts."""
        self.conns, self.notifications = conns, notifications
        self.g.inter = &conns.inter
        self.g.choose_algorithm = choose_algorithm_across
        self.g.me.stack_request.rank, self.g.me.stack_request.size = self.world_rank(self.g.rank), self.world_size

    def end_sharing(self, bint beside=False):
        """Make this rank's shared arrays private after the end, so that no other rank writes to them later.

        Return a text if that failed, else None. The progress thread, and a thread beside that of the collectives, do
        nothing: the latter may write to these arrays until it raises.
        """
        if is_background() or (beside and (self.busy or self.thread != <unsigned long> PyThread_get_thread_ident())):
            return None
        finish_all(self.queue)
        return None if self.arrays is None else self.arrays.make_private()

    def check_idle(self):
        """Raise if the communicator is closed, or another thread is inside a call of it."""
        self.check_open()
        if self.busy or not self.may_call():
            raise RuntimeError(state.TAKEN)

    def has_pending(self):
        """Return whether a call of this rank is in progress."""
        return self.closed_because is None and (self.busy or is_pending(self.queue))

    def set_shared_arrays(self, arrays):
        """Set the arrays that become private when the communicator ends."""
        self.arrays = arrays

    def notify_others(self, error):
        """Notify the ranks of other hosts that the communicator has ended."""
        if self.notifications is not None:
            self.notifications.notify_abort(error)

    def remote_error(self):
        """Return the error that a rank of another host has sent to all ranks; None if it does not arrive here."""
        return self.notifications.await_abort(None, NOTIFIED_S) if self.notifications is not None else None

    def host_of(self, int rank):
        """Return the address of the host of a rank; None for a local rank. Numbers as in `world_rank`."""
        return self.notifications.address_of(rank - self.g.size) if rank >= self.g.size else None

    def abort_outside_call(self, error):
        """End the communicator because of an error outside any call.

        If the error is a `shmring.Error`, raise the error that all ranks raise.
        """
        if self.closed_because is not None:
            return
        try:
            if isinstance(error, (RankFailed, Timeout)) and error.rank is not None:
                self.abort_for_rank_in(error)
        except BaseException as raised:
            self.abort_by_exception(raised)
            raise
        self.abort_by_exception(error)
        if isinstance(error, Error):
            self.raise_abort_error()

    cdef int abort_for_rank_in(self, object error) except -1:
        cause = SR_RANK_FAILED if isinstance(error, RankFailed) else SR_TIMED_OUT
        reason = str(error).removeprefix(f"rank {error.rank} ")
        reason += f"; {failures.describe_doing(self, error.rank)}" if cause == SR_TIMED_OUT else ""
        return self.abort_with(cause, error.rank, self.g.seq, reason)

    cdef int refuse(self, int kind) except -1:
        """Publish that this rank refused a call because of a wrong argument, so that other ranks do not wait for it.

        If the current exception is a lack of memory, the communicator ends instead. If it has ended already, nothing is
        raised here: the caller's exception says what was wrong in this rank's call.
        """
        try:
            self.publish_refusal(kind)
        except Closed:
            raise
        except Error:
            pass
        return 0

    cdef int publish_refusal(self, int kind) except -1:
        error = sys.exc_info()[1]
        if isinstance(error, MemoryError) and not isinstance(error, Error):
            return self.abort_by_exception(error)
        cdef Issued refusal = Issued()
        cdef Call *c = &refusal.task.call
        self.fill_refusal(c, kind)
        self.prepare_to_begin(c)
        self.nrefused = self.nbegun
        if is_pending(self.queue):
            refusal.communicator = self
            return self.enqueue(refusal)
        self.busy = True
        try:
            enter_call(&self.g, c)
            self.run_without_gil(c)
            end_call(&self.g, SR_COMPLETE)
        finally:
            self.busy = False
        return 0

    cdef int fill_refusal(self, Call *c, int kind) except -1:
        c.kind = kind
        c.timeout_ns = ns_of(self.timeout_s)
        c.enter = enter_refused if self.g.inter == NULL else enter_refused_across
        c.step = step_refused if self.g.inter == NULL else step_refused_across
        return 0

    # -- calls in the background --

    cdef int issue(self, Issued issued) except -1:
        """Run a call in the background, after the calls issued before it. Small calls are run at once if possible."""
        self.prepare_to_begin(&issued.task.call)
        return self.enqueue(issued)

    cdef int enqueue(self, Issued issued) except -1:
        issued.task.keeper = <void *> issued
        if not self.enlisted:
            start_thread()   # before the call is in the queue: it may raise
            enlist(&self.queue.pollable, self)
            self.enlisted = True
        reap(self.queue)   # may run any Python code
        if self.closed_because is not None or self.busy or not self.may_call():
            self.check_idle()   # meanwhile, another thread has closed the communicator or begun a call
        append(self.queue, &issued.task)
        step_briefly(self.queue)
        while self.fill_oldest():
            step_briefly(self.queue)
        if self.linger_ns > 0 and is_pending(self.queue) and oldest(self.queue) == &issued.task:
            linger(self.queue, &issued.task, sr_now_ns() + self.next_linger_ns)
            if is_pending(self.queue):
                self.next_linger_ns = max(self.next_linger_ns // 4, min(self.linger_ns, WAKE_NS))
            else:
                self.next_linger_ns = min(2 * self.next_linger_ns, self.linger_ns)
        reap(self.queue)
        self.leave_to_background()
        return 0

    # Let an issued call wait in the foreground for at most this time. After a call that has not finished there, the
    # next one waits for a shorter time: perhaps the other ranks always come late, and this one has other work to do.
    cdef void set_linger(self, uint64_t ns) noexcept:
        self.linger_ns = self.next_linger_ns = ns

    # Wake the progress thread for pending calls, unless a thread waits for a call: that thread steps them.
    cdef void leave_to_background(self) noexcept:
        if is_pending(self.queue) and sr_flag_load(&self.queue.nwaiters) == 0:
            wake_thread()

    # Run a call in the foreground that is behind issued calls or has a priority.
    cdef int run_queued_call(self, Call *c) except -1:
        cdef Task task
        memset(&task, 0, sizeof(Task))
        task.call = c[0]
        self.busy = True
        try:
            append(self.queue, &task)
            self.wait_for(&task, NEVER_NS)
        except BaseException as error:
            if sr_flag_load(&task.number) != 0:   # the task is on this stack and must not stay in the queue
                self.abort_by_exception(error)
            raise
        finally:
            reap(self.queue)
            self.busy = False
        return 0

    cdef bint wait_for(self, Task *task, uint64_t until_ns) except -1:
        """Wait for an issued call, and step it. Return False if it is not finished at until_ns. Raise its error."""
        cdef Queue *q = self.queue
        cdef Call call
        cdef int status
        if not is_finished(q, task):
            self.check_open()
            sr_flag_set(&q.nwaiters, sr_flag_load(&q.nwaiters) + 1)
            try:
                step_briefly(q)
                while not is_finished(q, task) and sr_now_ns() < until_ns:
                    with nogil:
                        status = step_until(q, task, until_ns)
                    if status == SIGNALLED:
                        PyErr_CheckSignals()
                        if not is_finished(q, task):
                            self.check_open()   # as check_signals; a finished call returns
                        try:
                            self.poll_abort(self.g.seq)
                            if self.g.inter != NULL and copy_begun(q, &call):
                                self.compare_calls(&call)
                        except Error:   # the next step ends all issued calls
                            pass
                        self.stalls.warn_if_due(self, SR_WAIT_CALL)
                    elif status == UNFILLED:
                        self.fill_oldest()
                    elif status != DONE:
                        self.end_issued()
            finally:
                sr_flag_set(&q.nwaiters, sr_flag_load(&q.nwaiters) - 1)
                self.leave_to_background()
            if not is_finished(q, task):
                return False
        reap(q)   # the progress thread may sleep, and would keep the arrays of this call
        if task.status != DONE:
            self.raise_abort_error()
        return True

    # Fill the oldest call, if it could not be filled when it was issued. Return False if it has been.
    cdef bint fill_oldest(self) except -1:
        cdef Issued issued
        cdef Task *task = oldest(self.queue)
        if not is_pending(self.queue) or sr_flag_load(&task.filling) != TO_BE_FILLED:
            return False
        issued = <Issued> task.keeper
        sr_flag_set(&task.filling, BEING_FILLED)
        try:
            issued.finish_filling()
        except BaseException as error:   # otherwise the call would stay in this state forever
            self.abort_by_exception(error)
            raise
        sr_flag_set(&task.filling, FILLED)
        return True

    # Report the error of a step in the background to all ranks, and end all issued calls.
    cdef int end_issued(self) except -1:
        cdef Queue *q = self.queue
        cdef Call c
        cdef int status = fetch_failure(q, &c)
        if status == DONE:
            return 0
        try:
            self.raise_for_status(&c, status)
        except Exception:   # the error of all ranks, or MemoryError if it could not be built
            finish_all(q)
        return 0

    # Finish all issued calls before a close. Raise RuntimeError if another thread is inside a call.
    cdef int finish_issued(self) except -1:
        cdef Queue *q = self.queue
        cdef Issued last
        while True:
            reap(q)   # may run any Python code, and so may the wait below
            if self.busy or self.call_owner != 0:
                raise RuntimeError(f"close() {state.MEANWHILE}")
            if not is_pending(q):
                return 0
            last = <Issued> q.task[sr_flag_load(&q.issued) & q.mask].keeper
            try:
                self.wait_for(&last.task, NEVER_NS)
            except Error:   # a thread that waits for the call raises it
                pass

    def _attend(self):
        """Do the work of the progress thread that needs the GIL. It raises nothing."""
        try:
            self.fill_oldest()
            if self.queue.failed_status != DONE:
                self.end_issued()
            elif is_pending(self.queue) and sr_flag_load(&self.queue.nwaiters) == 0:   # else the waiting threads do
                self.stalls.warn_if_due(self, SR_WAIT_CALL)
        except BaseException as error:
            try:
                self.abort_by_exception(error)
            except BaseException:
                pass
        reap(self.queue)

    def check(self):
        """Raise if the communicator is closed or has ended, or if another thread is inside a call of it."""
        self.check_idle()
        if sr_flag_load(&self.g.header.abort) != SR_NO_ABORT:
            self.raise_abort_error()

    def poll(self):
        """As `check`, and raise if a rank has died. For waits outside of any call."""
        cdef Group *g = &self.g
        cdef int rank
        self.check()
        self.poll_abort(g.seq)
        check_liveness(g)
        for rank in range(g.size):
            if rank != g.rank and sr_liveness_died(&g.lane[rank].liveness):
                self.abort_with(SR_RANK_FAILED, rank, g.seq, procfs.how_it_ended(*self.flight.liveness_of(rank)))
                self.raise_abort_error()
        for rank in range(self.world_size if g.inter != NULL else 0):
            if (inter_of(g).conn[rank] != NULL and self.notifications.channels.has_ended(rank)
                    and not self.notifications.channels.has_left(rank)):
                cause = failures.describe_lost(self.notifications.channels.error_of(rank))
                self.abort_with(SR_RANK_FAILED, remote(g, rank), g.seq, cause)
                self.raise_abort_error()

    # Run a tiny call of the engine's own, for start-up and agreements.
    cdef int call_tiny(self, int kind, int op, size_t count, void *data, size_t nbytes, double timeout_s,
                       uint64_t signature=0) except -1:
        cdef Call c
        memset(&c, 0, sizeof(c))
        c.kind, c.dtype, c.op = kind, SR_U8, op
        c.count, c.itemsize = count, 1
        c.nbytes = c.x_nbytes = nbytes
        c.x = c.out = <unsigned char *> data
        c.timeout_ns = ns_of(timeout_s)
        c.fingerprint = fingerprint_of(&c) ^ signature << 32
        self.g.choose_algorithm(&self.g, &c)
        return self.run_call(&c)

    def broadcast_word(self, uint64_t word):
        """Collective: return rank 0's word on every rank."""
        self.call_tiny(BROADCAST, SR_SUM, sizeof(word), &word, sizeof(word), self.timeout_s)
        return word

    def all_agree(self, bint yes, double timeout_s):
        """Collective: return whether `yes` is true on every rank."""
        cdef uint8_t answer = yes
        self.call_tiny(ALL_REDUCE, SR_MIN, 1, &answer, 1, timeout_s)
        return bool(answer)

    def union(self, bytes bits):
        """Collective: return the bits that any rank has set, as an int."""
        cdef unsigned char[SR_PAYLOAD_NBYTES] part
        cdef size_t begin, nbytes
        result = b""
        for begin in range(0, len(bits), SR_PAYLOAD_NBYTES):
            nbytes = min(<size_t> SR_PAYLOAD_NBYTES, len(bits) - begin)
            memcpy(part, <const char *> bits + begin, nbytes)
            self.call_tiny(ALL_REDUCE, SR_BOR, nbytes, part, nbytes, self.timeout_s)
            result += part[:nbytes]
        return int.from_bytes(result, "little")

    def announce_allocation(self, size_t nbytes, uint64_t signature, double timeout_s):
        """Collective: compare the size and the 32-bit signature of an allocation. Raise Mismatch if they differ."""
        self.call_tiny(ALLOCATE, SR_SUM, nbytes, NULL, 0, timeout_s, signature)

    def measure_distance(self):
        """Measure the core distance: flip a line between rank 0 and each other rank in turn. All ranks adopt it."""
        cdef Call c
        cdef Group *g = &self.g
        if g.size == 1:
            return
        memset(&c, 0, sizeof(c))
        c.kind = PING
        c.fingerprint = fingerprint_of(&c)
        c.timeout_ns = ns_of(self.timeout_s)
        c.enter = enter_ping
        c.step = step_ping_call
        self.run_call(&c)
        g.next_far = self.broadcast_word(g.next_far)
        set_far(g, g.next_far)

    def probe_single_copy(self, bint wanted):
        """Use single copy from now on if every rank wants to read, and can read, the private memory of all others."""
        cdef Group *g = &self.g
        cdef int rank
        for rank in range(g.size):
            wanted = wanted and (rank == g.rank or can_read_memory_of(&g.lane[rank].liveness))
        g.single_copy = self.all_agree(wanted, self.timeout_s)

    def open_for_calls(self, double timeout_s):
        """End the start-up: count calls from now on, with `timeout_s` as their default timeout."""
        self.timeout_s = timeout_s
        self.g.first_user_seq = self.g.seq + 1
        if self.g.inter != NULL:
            inter_of(&self.g).first_user_seq = inter_of(&self.g).seq + 1
        memset(&self.g.stats, 0, sizeof(Stats))

    # -- the trace --

    def trace_into(self, TraceBuffer buffer not None):
        """Record calls and messages in the buffer from now on. Raise RuntimeError during another trace."""
        self.check_idle()
        if self.traced != NULL:
            raise RuntimeError("this communicator is being traced already; stop that trace before")
        self.set_trace(buffer)

    def stop_trace(self, TraceBuffer buffer not None):
        """Stop recording in the buffer, if it is the current one. Raise RuntimeError while a thread is in a call."""
        if self.traced != <void *> buffer:
            return
        if self.closed_because is not None:
            self.set_trace(None)
            return
        self.check_idle()
        outer = self.begin_compound(ALONE)   # no other thread may begin a call, which would write a slice after the end
        try:
            self.set_trace(None)
        finally:
            self.end_compound(outer, None)

    cdef int set_trace(self, TraceBuffer buffer) except -1:
        # A thread may have the stepper for a whole call, so others get the GIL meanwhile. This thread never waits for
        # the GIL with the stepper: a thread that has the GIL may wait for the stepper.
        while not sr_flag_take(&self.queue.stepper, WAITER):
            with nogil:
                sr_yield()
        self.g.trace = NULL if buffer is None else &buffer.calls
        sr_flag_release(&self.queue.stepper)
        self.g.p2p_trace = NULL if buffer is None else &buffer.messages   # read with the GIL held
        if buffer is not None:
            Py_INCREF(buffer)
            buffer.is_in_use = True
        release_trace(self)
        self.traced = NULL if buffer is None else <void *> buffer
        return 0

    # -- shared blocks --

    def set_blocks(self, list blocks, uint64_t version):
        """Set the shared arrays that this process maps: (id, begin of rank 0's part, begin of the own part, stride).

        version: that of the table, `blocks_version`, before `blocks` was made. Return False, and change nothing, if
        another thread has set the table since. Raise RuntimeError if another thread is inside a call.
        """
        cdef int i = 0
        cdef Group *g = &self.g
        cdef list by_own = sorted(blocks, key=lambda entry: entry[2])
        cdef Block *table = <Block *> calloc(len(blocks) + 1, sizeof(Block))
        if table == NULL:
            raise MemoryError()
        for block in by_own:
            table[i].id, table[i].begin, table[i].own, table[i].stride = block
            i += 1
        # From here on, this thread keeps the GIL: no other thread sets the table or begins a call.
        if self.busy or version != self.blocks_version:
            free(table)
            if self.busy:   # the call reads the table without the GIL
                raise RuntimeError(state.TAKEN)
            return False
        acquire_stepper(self.queue)
        sr_flag_acquire(&g.blocks_lock, 1)   # a message is copied out of a block: at most one step of it
        free(g.block)
        g.block = table
        g.nblocks = len(blocks)
        sr_flag_release(&g.blocks_lock)
        self.blocks_version += 1
        sr_flag_release(&self.queue.stepper)
        return True
