# Work: a collective that runs in the background.

import os
from types import GenericAlias

cimport cython
from posix.unistd cimport close

from .._arrays.operands cimport release
from .._core.group cimport DONE
from .._core.segment cimport sr_flag_take
from .._core.timeouts cimport deadline_ns_of
from .._engine.progress cimport reap
from .._engine.queue cimport is_finished

import numpy as np

from . import awaitable
from .._system import limits
from ..errors import Error


# The element of an array of shape (), as a number of Python or NumPy like the one that the array was made of.
cdef object number_of(object array, type kind):
    return array[()] if issubclass(kind, np.generic) else array.item()


cdef class Work(Issued):
    """A collective that runs in the background. Every collective returns one with async_op=True.

    Calls of one communicator run in the order in which they were made; calls with a `priority` run by priority. Do not
    touch a call's arrays before it is finished. They stay alive until then, even if this object is deleted. In asyncio,
    `await work` returns the call's result and uses no thread. Cancelling the awaiting coroutine does not affect the
    call.

    Examples
    --------
    >>> x = np.ones(2)
    >>> work = comm.all_reduce(x, async_op=True)
    >>> work.wait()
    >>> x
    array([2., 2.])
    >>> comm.all_gather(np.array([comm.rank]), async_op=True).result()
    array([[0],
           [1]])
    """

    __class_getitem__ = classmethod(GenericAlias)   # Work[None] in annotations

    def __cinit__(self, *_, **__):
        self.a.held = self.b.held = False
        self.notice_fd = -1

    def __init__(self, *_, **__):
        raise TypeError("a Work is made by a collective with async_op=True")

    @cython.nonecheck(True)   # Work.__new__ alone makes a Work without an engine
    def wait(self, timeout=None):
        """Block until the call is finished.

        Parameters
        ----------
        timeout : float, optional
            Seconds, 0 or more. None waits until the call ends, at most for its own timeout.

        Raises
        ------
        TimeoutError
            After `timeout` seconds. The call goes on, as it does after a Ctrl-C.
        TypeError, ValueError
            For a wrong timeout, and for a wrong argument of the call that could be checked only when the call ran.
        Error
            If the communicator has ended.
        """
        try:
            finished = self.engine.wait_for(&self.task, deadline_ns_of(timeout))
        except Error:
            if self.refusal is None:
                raise
        else:
            if not finished:
                raise TimeoutError(f"the call is not finished after {float(timeout):g} s; it goes on")
        if self.refusal is not None:
            raise self.refusal

    # As wait without a timeout.
    cdef int finish(self) except -1:
        if not is_finished(self.engine.queue, &self.task) or self.task.status != DONE or self.refusal is not None:
            self.wait()
        return 0

    cdef void let_go(self) noexcept:
        release(&self.a)
        release(&self.b)
        self.kept = None

    @cython.nonecheck(True)
    def done(self):
        """Return whether the call is finished, successfully or not.

        Returns
        -------
        bool
            Does not block. True: the arrays may be used again.
        """
        if not is_finished(self.engine.queue, &self.task):
            return False
        reap(self.engine.queue)   # or their buffers would stay exported until the progress thread comes
        return True

    def result(self, timeout=None):
        """Wait as `wait` does, and return what the call returns without async_op=True.

        Parameters
        ----------
        timeout : float, optional
            Seconds, as in `wait`.

        Returns
        -------
        array, number, list or None
            The result of the call.

        Raises
        ------
        TimeoutError, TypeError, ValueError, Error
            As `wait`.
        """
        self.wait(timeout)
        return self.return_value if self.number is None else number_of(self.number, self.number_type)

    @cython.nonecheck(True)
    def fileno(self):
        """Return a file descriptor that becomes readable when the call is finished, as for `select`.

        Returns
        -------
        int
            The `Work` owns the descriptor.

        Raises
        ------
        Error
            If the communicator has ended.
        OSError
            If the process has too many open files.
        """
        if not is_finished(self.engine.queue, &self.task):
            self.engine.check_open()   # raises in a forked child, where the call would never finish
        if self.notice_fd < 0:
            try:
                fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            except OSError as error:
                raise limits.explain(error, "creating the event descriptor of a call") from error
            if self.notice_fd >= 0:   # another thread has created it meanwhile
                close(fd)
            else:
                self.notice_fd = fd
                if not sr_flag_take(&self.task.notify, self.notice_fd + 1):
                    os.eventfd_write(self.notice_fd, 1)
        return self.notice_fd

    def __await__(self):
        return awaitable.result_of(self).__await__()

    def __reduce__(self):
        raise TypeError("a Work belongs to its process")

    @cython.nonecheck(True)
    def __repr__(self):
        progress = "under way"
        if is_finished(self.engine.queue, &self.task):
            progress = "finished" if self.task.status == DONE else "failed"
        return f"<shmring.Work {progress}>"

    def __dealloc__(self):
        release(&self.a)
        release(&self.b)
        if self.notice_fd >= 0:
            close(self.notice_fd)
