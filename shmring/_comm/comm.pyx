# Comm: construction, groups, shrink and grow, traces, and closing. The other methods of a communicator are in its base
# classes: collectives, vector, fused, object_collectives, point_to_point and allocation.

import atexit
import logging
import os
import weakref

from cpython.ref cimport Py_DECREF, Py_INCREF

from .._core.group cimport FORM_GROUP, GROW, SPLIT
from .._core.kernels cimport SR_SUM
from .._core.timeouts cimport ns_of, timeout_s_of
from .._engine.engine cimport ALONE, IN_STEPS, STEPS, Engine
from .allocation cimport Allocation

from .._diagnostics import failures, flight_recorder
from .._engine.state import MEANWHILE
from .._lifecycle import groups, grow as growing, shrink as shrinking
from .._lifecycle.membership import left_behind
from .._system import ended_ranks
from ..errors import Error, Timeout
from .error_feedback import Residuals

open_comms = weakref.WeakSet()   # of this process

cdef extern from "Python.h":
    int Py_AddPendingCall(int (*function)(void *) except -1, void *argument)


# Raise an exception in the main thread before one of its next bytecodes. A wait of shmring does not raise it.
cdef int raise_later(object error) except -1:
    Py_INCREF(error)
    if Py_AddPendingCall(raise_now, <void *> error) != 0:
        Py_DECREF(error)
    return 0


cdef int raise_now(void *argument) except -1:
    error = <object> argument
    Py_DECREF(error)
    raise error


cdef class Comm(Allocation):
    """A communicator: one rank's membership in a group of ranks, with the calls among them.

    `shmring.init` and `shmring.spawn` make it. It is a context manager that closes it. All ranks must call every
    collective, in the same order, with matching arguments. Values are folded in rank order, so the result has the same
    bits on every rank. Messages of one tag between two ranks are received in sending order; they never wait for a
    collective. One thread at a time may call collectives, while another one sends and receives.

    Examples of its methods run on two ranks, as `comm`. The printed results are those of rank 0.

    Parameters of several methods
    -----------------------------
    x, out : array
        A NumPy array, a `Memory`, or any object with the buffer protocol, `__array_interface__` or DLPack on the CPU,
        contiguous in memory. Collectives that only move items take any dtype without references; calls that reduce take
        bool, integers, floats (also float16, bfloat16 and float8) and complex numbers.
    op : str or Op
        The name of an operation, as in `Op`.
    root, dest, source : int
        A rank, 0 to size - 1. The root is the same on all ranks.
    context : 0 or 1
        A message that is sent in one context is received and probed only in the same context, also by `ANY_SOURCE` and
        `ANY_TAG`. 1 is for libraries that use the communicator of a program beside it.
    async_op : bool
        True: run in the background, after the calls made before, and return a `Work` that holds the result. The call's
        arrays must not be touched until the `Work` is finished.
    timeout : float, optional
        Seconds until the call raises `Timeout`. None: the timeout of `init`, by default that of SHMRING_TIMEOUT.
    priority : int, optional
        -4095 to 4095, the same on all ranks. Among the calls with a priority that every rank has issued, the call with
        the highest priority runs next; among equal priorities, the earliest call. The ranks agree on it before each
        call. A large all_reduce, reduce or broadcast runs in parts of 4 MiB, and calls of higher priority may run
        between two parts; the bits of the result are the same. A call without a priority runs after all calls made
        before it and before all calls made after it. (Peng et al. 2019, ByteScheduler; Jayarajan et al. 2019, P3.)

    Errors of every collective
    --------------------------
    TypeError, ValueError
        On the rank that passed a wrong argument. The others get `Mismatch`, and the communicator has ended. If all
        ranks pass a wrong argument, it stays usable.
    Error
        One of its subclasses: `Mismatch` if the ranks' calls differ, `Timeout`, `RankFailed`, `Aborted`. All ranks
        raise it, and it ends the communicator. `Closed` if this rank has closed it.

    Examples
    --------
    >>> comm.rank, comm.size
    (0, 2)
    >>> comm.all_reduce(comm.rank + 1)
    3
    """

    def __cinit__(self, Engine engine=None, *_, **__):
        if engine is None:   # not in __init__, which a subclass may replace: methods access the engine without a check
            raise TypeError("a Comm is made by shmring.init() or shmring.spawn(), and by split(), group(), dup() and "
                            "shrink() of another Comm")

    def __init__(self, Engine engine=None, local_sockets=None, segment=None, int fd=-1, settings=None, place=None,
                 internode=None, parent_ranks=None, Comm parent=None, epoch=0):
        # Take ownership first: from here on `close` releases everything, whatever raises.
        self.engine = engine
        self.fd = fd
        self.local_sockets = local_sockets
        self.internode = internode
        self.place = place
        self.segment = segment
        self.settings = settings
        self.parent_ranks = parent_ranks
        self.own_rank, self.nranks = place.rank, place.size
        self.endpoint.attach(engine, self.own_rank, self.nranks, segment, fd)
        if parent is None:
            self.origin = engine.flight.nonce, self.own_rank, self.nranks, place.host
        else:
            self.origin = parent.origin
            ranks = parent.world_ranks
            self.world_ranks = tuple(parent_ranks if ranks is None else map(ranks.__getitem__, parent_ranks))
        self.epoch = epoch
        # Between hosts there is one algorithm; the groups of one host have the chosen one.
        algorithm = settings.algorithm if internode is None else "auto"
        self.default_algorithm = flight_recorder.ALGORITHMS.index(algorithm)
        self.residuals = Residuals()
        self.default_timeout_ns = ns_of(engine.timeout_s)
        self.begin_arrays(local_sockets, settings.segment)
        self.staging_ready = engine.size == 1
        open_comms.add(self)
        failures.rehearse(engine)

    @property
    def rank(self):
        """This rank's number, 0 to size - 1."""
        return self.place.rank

    @property
    def size(self):
        """Number of ranks."""
        return self.place.size

    @property
    def local_rank(self):
        """This rank's number among the ranks of its host."""
        return self.place.local_rank

    @property
    def local_size(self):
        """Number of ranks on this host, which share its memory."""
        return self.place.local_size

    @property
    def node(self):
        """This host's number, 0 to num_nodes - 1."""
        return self.place.host

    @property
    def num_nodes(self):
        """Number of hosts."""
        return self.place.num_hosts

    def run_steps(self, function, *arguments, bint begun=False, **keywords):
        """Run function(*arguments, **keywords), which makes several calls of this communicator, as one call.

        For code that wraps a communicator. An exception that the function raises after its first call, also a
        KeyboardInterrupt, ends the communicator. Every other rank then raises `Aborted`, instead of waiting for this
        rank or making calls that do not match this rank's.

        These exceptions have no such effect: one before the first call, refused arguments (`refuse`), errors that
        shmring raises on all ranks, such as the OutOfMemory of `empty`, and errors marked by `shmring.errors.agreed`,
        which all ranks raise. An error of one rank alone does end the communicator, such as the Timeout of a lock, or
        an error of another communicator.

        Parameters
        ----------
        function : callable
            Calls by other threads raise RuntimeError while it runs.
        *arguments
            Its arguments.
        begun : bool
            True if the function continues a sequence of calls, so that an exception before its first call ends the
            communicator, too.
        **keywords
            Its keyword arguments.

        Returns
        -------
        object
            The result of the function.

        Raises
        ------
        BaseException
            Any exception of the function.

        Examples
        --------
        >>> def mean_and_max(comm, x):
        ...     return comm.all_reduce(x, "avg"), comm.all_reduce(x, "max")
        >>> comm.run_steps(mean_and_max, comm, float(comm.rank))
        (0.5, 1.0)
        """
        return self.engine.run_steps(STEPS, function, *arguments, begun=begun, **keywords)

    # -- groups --

    def split(self, color, key=0, *, timeout=None):
        """Collective: make a communicator for each color, and return the one of this rank's color.

        Parameters
        ----------
        color : int or None
            The ranks of one color form a group. With None the rank joins no group.
        key : int
            The ranks of a group are ordered by key, then by rank.
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        Comm or None
            None if color is None. It begins with this communicator's `timeout_s` and `linger_s`. The communicators
            are independent: an abort, an error or the closing of one does not affect the others. The death of a rank
            ends all communicators of that rank.

        Raises
        ------
        TypeError, ValueError
            For a color or key that is no integer of 64 bits.
        Error
            As every collective. If a group cannot start, for example with `OutOfMemory`, only its ranks raise the
            error.

        Notes
        -----
        As MPI_Comm_split.

        Examples
        --------
        >>> with comm.split(color=comm.rank % 2) as half:
        ...     half.size, half.parent_ranks
        (1, (0,))
        """
        try:
            packed = groups.pack_color(color, key)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(SPLIT)
            raise
        return self.engine.run_steps(IN_STEPS, self._split, packed, timeout_s)

    def _split(self, packed, double timeout_s):
        self.engine.call_tiny(SPLIT, SR_SUM, 0, NULL, 0, timeout_s)
        return self.form(groups.by_color(self.all_gather(packed, timeout=timeout_s)), timeout_s)

    def group(self, ranks, *, timeout=None):
        """Collective: make a communicator of the listed ranks, and return it on them; return None on other ranks.

        All ranks must call it.

        Parameters
        ----------
        ranks : list of int
            The same on all ranks. ranks[i] becomes rank i.
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        Comm or None
            As `split`.

        Raises
        ------
        TypeError, ValueError
            For a list with a rank that does not exist or occurs twice.
        Error
            As `split`.

        Examples
        --------
        >>> swapped = comm.group([1, 0])
        >>> swapped.rank
        1
        >>> swapped.close()
        """
        try:
            wanted = groups.listed(ranks, self.nranks)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(FORM_GROUP)
            raise
        return self.engine.run_steps(IN_STEPS, self._group, wanted, timeout_s)

    def _group(self, wanted, double timeout_s):
        self.engine.call_tiny(FORM_GROUP, SR_SUM, len(wanted), NULL, 0, timeout_s)
        groups.check_same(self.all_gather(wanted, timeout=timeout_s))
        return self.form([wanted.tolist()] if len(wanted) else [], timeout_s)

    def dup(self, *, timeout=None):
        """Collective: return another communicator of the same ranks, as `split(0)` does.

        Parameters
        ----------
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        Comm
            Its calls are independent of those of this one, so another thread may use it.

        Raises
        ------
        Error
            As `split`.

        Examples
        --------
        >>> with comm.dup() as other:
        ...     other.all_reduce(1)
        2
        """
        return self.split(0, timeout=timeout)

    cdef object form(self, list members, double timeout_s):
        if self.internode is None:
            formed = groups.form(self.engine, self.local_sockets, members, self.settings, timeout_s)
        else:
            formed = groups.form_across(self, self.engine, self.internode, members, self.settings, timeout_s)
        if formed is None:
            return None
        parts, ranks = formed
        return self.group_of(parts, ranks)

    def _group_of_callers(self, ranks, secret, share):
        """Return a communicator of some ranks, which alone call this. For libraries.

        secret: bytes, the same on these ranks and different for each group. share: a function that returns the value
        which ranks[0] passes to it, on all of these ranks; it is called once, if the communicator has several hosts.
        """
        self.engine.check_open()
        try:
            parts = groups.form_of_callers(self.own_rank, self.engine, self.internode, ranks, secret, share,
                                           self.settings, self.engine.timeout_s)
            return self.group_of(parts, ranks)
        except BaseException as error:   # the others wait until this rank comes, or until this communicator ends
            self.engine.abort_by_exception(error, False, True, b"making a group of some ranks")
            raise

    # Copy the settings that a user may change to a communicator that replaces this one. Its engine has the timeout.
    cdef int pass_settings(self, Comm made) except -1:
        made.default_wire = self.default_wire
        made.engine.set_linger(self.engine.linger_ns)
        return 0

    # Return the communicator of a group that has started. ranks: its ranks' numbers in this communicator.
    cdef object group_of(self, parts, ranks):
        cdef Comm comm = None
        try:
            comm = Comm(*parts, parent_ranks=ranks, parent=self)
            comm.engine.set_linger(self.engine.linger_ns)
            return self.traced_alike(comm)
        except BaseException:   # the other ranks have the group and must not wait for this rank
            leave_group(parts, comm)
            raise

    # -- fewer ranks, more ranks --

    def shrink(self, *, timeout=None):
        """Collective over the surviving ranks: return a new communicator of them, in the order of their ranks.

        Call it after any `Error` but `Closed`. If no rank has ended the communicator, this rank does. The survivors
        agree on the membership, even if more ranks die meanwhile. Excluded are ranks that have ended, have left or
        cannot be reached, and ranks that do not call shrink within the timeout. A rank that a Timeout has named has
        only one second, counted from the time when every other rank has called shrink; if it calls shrink before, it
        is included. This communicator is closed, and its shared arrays become private. The survivors may differ by
        one call, which some have completed and others have not, so they have to agree from which step to continue.

        Parameters
        ----------
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        Comm
            Its `parent_ranks` are the ranks' numbers in this communicator, its `epoch` is one more. It has this
            communicator's `timeout_s`, `linger_s` and `wire`.

        Raises
        ------
        RankFailed
            On an excluded rank that calls it later, for that rank.
        RuntimeError
            While another thread is inside a call.
        Error
            If the survivors cannot agree within the timeout.

        Notes
        -----
        As MPI_Comm_shrink in the ULFM proposal for MPI.

        Examples
        --------
        >>> other = comm.dup()
        >>> if comm.rank == 1:
        ...     other.close()  # as if it had died
        ... else:
        ...     try:
        ...         other.barrier()
        ...     except shmring.RankFailed as error:
        ...         with other.shrink() as left:
        ...             print(error.rank, left.size, left.epoch)
        1 1 1
        """
        timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        self.engine.check_idle()
        if self.is_in_use():
            raise RuntimeError(f"shrink() {MEANWHILE}")
        if self.is_unconfirmed:
            self.close()   # if others shrink, they need not wait for this rank
            raise left_behind(self.own_rank)
        outer = self.engine.begin_compound(ALONE)
        try:
            late = self.abort_for_shrink()
            failed = shrinking.FailedComm(self.engine, self.place, self.internode, self.settings, late)
            parts, parent_ranks = shrinking.shrink(failed, timeout_s)
            left = None
            try:
                left = Comm(*parts, parent_ranks=parent_ranks, parent=self, epoch=self.epoch + 1)
                self.pass_settings(left)
                self.traced_alike(left)
                if self.internode is not None:
                    self.internode.deliver_view()
            except BaseException:   # the other ranks have it and must not wait for this rank
                leave_group(parts, left)
                raise
        finally:
            self.engine.end_compound(outer, None)
        self.close()
        ended_ranks.go_on()
        return left

    def grow(self, count, invite, *, address=None, timeout=None):
        """Collective: return a new communicator of these ranks and of `count` others, which join by `shmring.init`.

        The ranks keep their numbers. Each new rank calls `shmring.init(world, rank)` with the two arguments that
        `invite` gets. This communicator is closed once all have met. If they do not meet, all its ranks raise, and may
        go on with it, or grow it again. After a death, `shrink` comes first.

        Parameters
        ----------
        count : int
            Number of new ranks, at least 1, the same on all ranks.
        invite : callable
            Rank 0 calls invite(world, rank) once for each new rank, to pass a `World` and a number to it, for example
            by starting it. Whoever has the world can join, so pass it to the new rank only. invite must not wait until
            the new rank has joined. The other ranks do not use it.
        address : str, optional
            "host:port" of rank 0's host, if new ranks are on other hosts. Only rank 0's is used. If this communicator
            has several hosts, rank 0 listens for them in any case, at an address of its own if None.
        timeout : float, optional
            Seconds until all have joined; see `Comm`.

        Returns
        -------
        Comm
            Its `epoch` is one more, also on the new ranks. On these ranks it has this communicator's `timeout_s`,
            `linger_s` and `wire`.

        Raises
        ------
        TypeError, ValueError
            For a wrong argument.
        Timeout, RankFailed
            Naming a new rank that does not come or that ends meanwhile. This communicator is still usable. RankFailed
            also if one of these ranks ends: `shrink` goes on without it.
        Exception
            On rank 0, any exception of `invite`, and TypeError if invite is no function. The others raise `Error`. This
            communicator is still usable.
        Error
            As every collective, and as `shmring.init`.

        Examples
        --------
        ::

            def start(world, rank):
                worker = subprocess.Popen([sys.executable, "worker.py"], stdin=subprocess.PIPE)
                pickle.dump((world, rank), worker.stdin)
                worker.stdin.close()

            comm = comm.grow(2, start)
            # in worker.py: comm = shmring.init(*pickle.load(sys.stdin.buffer))
        """
        try:
            number = growing.check_arguments(count, address, self.nranks)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(GROW)
            raise
        self.engine.check_idle()
        if self.is_in_use():
            raise RuntimeError(f"grow() {MEANWHILE}")
        larger = self.engine.run_steps(IN_STEPS, self._grow, number, invite, address, timeout_s)
        self.close()
        return larger

    def _grow(self, size_t count, invite, address, double timeout_s):
        cdef Comm larger = None
        self.engine.call_tiny(GROW, SR_SUM, count, NULL, 0, timeout_s)
        wanted = growing.Wanted(count, invite, address, self.epoch + 1)
        parts = growing.grow(self, self.engine, self.place, self.internode, self.settings, wanted, timeout_s)
        try:
            larger = Comm(*parts, epoch=self.epoch + 1)
            self.pass_settings(larger)
            larger._confirm_start(timeout_s, False)
            larger._begin_own_trace()
            return larger
        except BaseException:   # the other ranks have it and must not wait for this rank
            leave_group(parts, larger)
            raise

    def _confirm_start(self, double timeout_s, bint is_new):
        """Collective over the ranks of a `grow`: by this barrier new ranks learn that old ranks use this communicator.

        An error of it is raised by the next call. A new rank that got one cannot shrink, since the old ranks may have
        abandoned this communicator.
        """
        try:
            self.barrier(timeout=timeout_s)
        except Error:
            self.is_unconfirmed = is_new

    # Abort unless a rank has. Return the set of the rank that a Timeout names, or an empty one.
    cdef object abort_for_shrink(self):
        cdef object named = None
        if self.engine.flight.abort_report() is None:
            self.engine.abort(f"rank {self.rank} goes on with fewer ranks")
        try:
            self.engine.raise_abort_error()
        except Timeout as error:
            named = error.rank
        except Error:
            pass
        return frozenset() if named is None else frozenset((named,))

    # -- what it has done --

    def stats(self):
        """Return counters of this rank since it joined, and properties of the machine, as a dict. Local.

        Returns
        -------
        dict
            `calls`: number of calls. `bytes_sent`: payload bytes that this rank stored for other ranks to read.
            `bytes_over_wire`: payload bytes of collectives that this rank sent to other hosts, after compression.
            `steps`: steps of ring and tree calls. `messages_in_place`: number of received messages that this rank has
            copied directly from the sender's array, and not from a ring. `paths`: number of calls by path. `path`: path
            of the last call. `chosen_paths` and `chosen_paths_of_shared`: by call, and by the least length of a size
            class in bytes, the path of the next call with private or shared arrays, as far as this rank knows. One rank
            has chosen it by measurement (docs/explanation/algorithms.md). `chosen_paths_of_messages`: by destination,
            by "private" or "shared", and by size class, the path of the next message, which this rank chose: "ring",
            "streamed_ring" (a ring between far cores), "single_copy" or "zero_copy". Messages that are too short for
            one copy are not listed, as their path is not chosen.
            `distance` ("near" or "far") and `round_trip_ns` (nanoseconds) between the cores, as rank 0 measured them.
            `isa`: the instruction set of the kernels.

        Examples
        --------
        >>> before = comm.stats()["calls"]
        >>> comm.barrier()
        >>> comm.stats()["calls"] - before
        1
        """
        return self.engine.stats() | {"chosen_paths_of_messages": self.endpoint.chosen_paths()}

    def trace(self, path):
        """Record this rank's calls from now on, with their waits and their work, as one track for Perfetto. Local.

        Usually all ranks call it with the same path. Groups that are made during the trace are traced, too. A small
        call takes about 0.15 µs longer.

        Parameters
        ----------
        path : path
            A JSON file in Chrome's trace event format; open it at ui.perfetto.dev. `Trace.stop`, or the end of the
            communicator, adds this rank's track to it. A file that another world wrote there is replaced. Ranks of
            another host write to a file of that host, such as t.node1.json. The last 65,536 slices of a rank are kept.

        Returns
        -------
        Trace
            A context manager that stops it.

        Raises
        ------
        OSError
            If the file cannot be written.
        RuntimeError
            During another trace, or while another thread is inside a call.

        Examples
        --------
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.gettempdir(), "trace-of-an-example.json")
        >>> with comm.trace(path):
        ...     comm.barrier()
        >>> comm.barrier()
        >>> if comm.rank == 0:
        ...     os.remove(path)
        """
        if self.tracer is not None and self.tracer.is_automatic:   # an explicit trace replaces it
            self.tracer.stop_quietly()
        return self._begin_trace(path)

    def _begin_trace(self, path, bint is_automatic=False):
        """Begin a trace. is_automatic: SHMRING_TRACE requests it, and a call of `trace` replaces it."""
        from . import trace_file   # imported on demand: it takes some ms

        self.tracer = trace_file.Trace(self.engine, path, trace_file.Origin(*self.origin), ranks=self.world_ranks,
                                       is_automatic=is_automatic)
        return self.tracer

    def _begin_own_trace(self):
        """Begin the trace that SHMRING_TRACE requests for this world, if it does.

        A communicator made by `grow` goes on without a trace that cannot be written, on all its ranks.
        """
        if self.settings.trace is not None:
            from . import trace_file

            try:
                self._begin_trace(trace_file.of_epoch(self.settings.trace, self.epoch), is_automatic=True)
            except (MemoryError, OSError) as error:
                if self.epoch == 0:
                    raise
                self.report_untraced(error)

    # Trace a new group of these ranks if this communicator is traced, until its trace stops. Return the group.
    cdef object traced_alike(self, Comm group):
        if self.tracer is not None and self.tracer.is_running:
            try:
                group._begin_trace(self.tracer.asked_path, is_automatic=True)
                self.tracer.groups.add(group.tracer)
            except (MemoryError, OSError) as error:   # the group itself is usable
                self.report_untraced(error)
        return group

    # Log that a new communicator, which would have been traced, is not.
    cdef object report_untraced(self, object error):
        logging.getLogger("shmring").warning("rank %d: a new communicator is not traced: %s", self.own_rank, error)

    # -- the end --

    def abort(self, str reason not None):
        """End the communicator: the current or next call of every rank raises `Aborted` with this reason. Local.

        Parameters
        ----------
        reason : str
            For the text of the error.

        Raises
        ------
        TypeError
            For a reason that is no text. The communicator stays usable.
        Closed
            If the communicator is closed.

        Examples
        --------
        >>> other = comm.dup()
        >>> if comm.rank == 1:
        ...     other.abort("the loss is not a number")
        >>> try:
        ...     other.barrier()
        ... except shmring.Aborted as error:
        ...     error.rank, error.reason
        (1, 'the loss is not a number')
        """
        self.engine.abort(reason)

    def close(self):
        """Leave the communicator. Local; ranks that still call it get RankFailed. A second close does nothing.

        Waits for calls that run in the background, up to their timeouts. Sent messages can still be received. close
        waits until messages to ranks of other hosts have arrived there, at most for the communicator's timeout; a rank
        that is not in a call takes in about 64 KiB. A message is lost if it has not arrived by then, or if the
        communicator ends while the message is in transit; its receiver gets RankFailed. A `Transfer` that is not
        complete is lost, too.

        Raises
        ------
        RuntimeError
            While another thread is inside a call of this communicator.

        Examples
        --------
        >>> other = comm.dup()
        >>> other.close()
        >>> try:
        ...     other.barrier()
        ... except shmring.Closed:
        ...     print("closed")
        closed
        """
        if self.engine is None or self.engine.closed_because is not None:   # None: __cinit__ has raised
            return
        self.engine.finish_issued()
        if self.engine.closed_because is not None:   # by another thread
            return
        if self.is_in_use():
            raise RuntimeError(f"close() {MEANWHILE}")
        self.endpoint.stage_sends()
        try:
            self.engine.close()   # returns at once: nothing is pending
        finally:   # also if a signal interrupted close
            if self.engine.closed_because is not None:
                self.endpoint.close_messages()
                self.release_resources()

    # True while a thread is in a call of messages, or allocates the staging buffer for another call.
    cdef bint is_in_use(self) noexcept:
        return self.endpoint.is_messaging or self.allocating_thread != 0

    cdef int release_resources(self) except -1:
        self.engine.set_shared_arrays(None)
        self.close_fd()   # first: a signal may interrupt what follows
        if self.arrays is not None:
            self.arrays.close()
        self.local_sockets.close()
        self.staging_ready = True
        try:
            if self.tracer is not None:
                self.tracer.stop_quietly()
        finally:
            if self.internode is not None:   # last: it may wait, and a signal may interrupt it
                self.internode.close(self.engine.timeout_s if self.engine.flight.abort_report() is None else 0.0)
        return 0

    cdef int close_fd(self) except -1:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = self.endpoint.fd = -1
        return 0

    def _disown(self):
        """Close the descriptors in a forked child, without touching shared memory."""
        if self.engine.closed_because is None:
            self.engine.disown()
            self.local_sockets.close()
            self.close_fd()
        if self.internode is not None:   # even if a thread of the parent waits in close
            self.internode.disown()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        leaves_in_order = error is None or (kind is SystemExit and not error.code)
        try:
            if not leaves_in_order and self.engine.closed_because is None and self.engine.flight.abort_report() is None:
                # The other ranks must not wait for a rank that left during a call.
                self.engine.abort_by_exception(error, True, True)
        finally:
            self.close()

    def __del__(self):
        try:
            self.close()
        except Exception:   # another thread is in a call, or the interpreter shuts down
            pass
        except BaseException as error:   # of a signal handler; by a SystemExit, Cython would end the process here
            open_comms.discard(self)   # else the callback of this weak reference would run next, and raise in vain
            raise_later(error)

    def __reduce__(self):
        raise TypeError("a communicator belongs to its process; send its World instead, and join it there")

    def __repr__(self):
        closed = "" if self.engine.closed_because is None else ", closed"
        return f"<shmring.Comm rank {self.rank} of {self.size}{closed}>"


@atexit.register
def _close_all():
    for comm in list(open_comms):
        try:
            comm.close()
        except RuntimeError:   # a daemon thread is inside a call; close the other communicators anyway
            pass


def _disown_all():
    for comm in list(open_comms):
        comm._disown()


os.register_at_fork(after_in_child=_disown_all)


# Release a group that this rank cannot use. comm: the communicator made of `parts`, or None if making it raised.
cdef int leave_group(parts, Comm comm) except -1:
    if comm is None:
        parts.engine.abandon(parts)
    else:
        comm.close()
    return 0
