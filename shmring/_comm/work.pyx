# Work: a collective that runs in the background, as its caller sees it.

import os

from posix.unistd cimport close

from .._arrays.operands cimport release
from .._core.group cimport DONE, sr_flag_take
from .._core.timeouts cimport deadline_ns_of
from .._engine.progress cimport is_finished

from . import awaitable
from .._system import limits
from ..errors import Error


cdef class Work(Issued):
    """A collective that runs in the background: what every collective returns with `async_op=True`.

    Calls of one communicator run in the order in which they were made, those with a `priority` by that. Their arrays
    must not be touched before they are finished, and stay alive until then, whatever becomes of this object. `await
    work` in asyncio waits for it without a thread, and gives its result; cancelling the one that awaits does not touch
    the call.
    """

    def __cinit__(self, *_, **__):
        self.a.held = self.b.held = False
        self.notice_fd = -1

    def __init__(self, *_, **__):
        raise TypeError("a Work is made by a collective with async_op=True")

    def wait(self, timeout=None):
        """Returns when the call is finished; raises what ended the communicator instead.

        After timeout seconds without: TimeoutError, which harms nothing. Ctrl-C harms nothing either.
        """
        try:
            finished = self.engine.wait_for(&self.task, deadline_ns_of(timeout))
        except Error:
            if self.refusal is None:
                raise
        else:
            if not finished:
                raise TimeoutError(f"the call is not finished after {timeout:g} s; it goes on")
        if self.refusal is not None:
            raise self.refusal

    def done(self):
        """Whether the call has come to its end, a good one or not."""
        return is_finished(self.engine.queue, &self.task)

    def result(self, timeout=None):
        """What the call returns when it is not in the background; waits for it as `wait` does."""
        self.wait(timeout)
        return self.answer

    def fileno(self):
        """A descriptor that is readable once the call is finished, for select and its kin. It belongs to the Work."""
        if not is_finished(self.engine.queue, &self.task):
            self.engine.check_open()   # in a forked child it never would be
        if self.notice_fd < 0:
            try:
                self.notice_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            except OSError as error:
                raise limits.explain(error, "making what tells that a call is finished") from error
            if not sr_flag_take(&self.task.notify, self.notice_fd + 1):
                os.eventfd_write(self.notice_fd, 1)
        return self.notice_fd

    def __await__(self):
        return awaitable.result_of(self).__await__()

    def __reduce__(self):
        raise TypeError("a Work belongs to its process")

    def __repr__(self):
        state = "under way"
        if is_finished(self.engine.queue, &self.task):
            state = "finished" if self.task.status == DONE else "failed"
        return f"<shmring.Work {state}>"

    def __dealloc__(self):
        release(&self.a)
        release(&self.b)
        if self.notice_fd >= 0:
            close(self.notice_fd)
