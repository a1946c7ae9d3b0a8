# The collectives: from Python's arguments to the pointers of a call. Each method takes the same steps: allocate the
# result, take the arrays, fill the call, let the engine run it. Work, a call in the background, is in `work`.

import inspect

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport uintptr_t
from libc.string cimport memset

from .._arrays.operands cimport Operand, fill_items_of, item_count, release, storage_of, take
from .._core cimport numpy_api as cnp
from .._core.group cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, AUTO, BARRIER, BROADCAST, EXSCAN, GATHER, REDUCE, REDUCE_SCATTER, SCAN, SCATTER,
    Call, Group, fingerprint_of, is_folded, is_joined, is_sliced, is_split, may_be_read_in_place, takes,
)
from .._core.kernels cimport SR_AVG, SR_DTYPES, SR_F32, SR_SUM, SR_WIRE_NATIVE, sr_dtype_is_widened
from .._core.segment cimport SR_PAYLOAD_NBYTES, sr_layout_staging_offset, sr_yield
from .._core.timeouts cimport ns_of, timeout_ns_of, timeout_s_of
from .._internode.context cimport inter_of
from .._internode.reductions cimport residual_count
from .arguments cimport (
    check_overlap, fill_out, has_x, is_number, is_rooted, number_named, options_of, overwrites_x, priority_code,
    return_value_of, signature_of_given, takes_result, takes_wire,
)
from .work cimport Work, number_of

import numpy as np

from .._arrays import shapes
from .._core import kernels
from .._diagnostics.flight_recorder import ALGORITHMS, DTYPES, KINDS, WIRES
from .._engine.state import TAKEN
from .._system import segments
from ..errors import Closed, Mismatch

cnp.import_array()


cdef str SUM = "sum"   # the object that is the default of op, so comparing identities is enough
cdef dict OP_NUMBERS = {name: number for number, name in enumerate(kernels.OPS)}
cdef dict WIRE_NUMBERS = {name: number for number, name in enumerate(WIRES)}
cdef dict ALGORITHM_NUMBERS = {name: number for number, name in enumerate(ALGORITHMS)}
cdef double MOST_LINGER_S = 0.05   # seconds; Ctrl-C is not handled meanwhile
cdef dict KIND_NUMBERS = {name: number for number, name in enumerate(KINDS) if number <= BARRIER}


# ---- the collectives -----------------------------------------------------------------------------------------

cdef class Collectives:
    """The collectives of a communicator. `Comm` adds construction, shared arrays and closing.

    The docstring of `Comm` describes the parameters that several of them have.
    """

    def all_reduce(self, x, op="sum", *, out=None, algorithm=None, wire=None, group_size=None, async_op=False,
                   timeout=None, priority=None):
        """Combine x of all ranks elementwise. The result overwrites the array, or `out` if given.

        If x is a number of Python or NumPy, the result is returned as a number of its type. An int of Python is an
        int64, or a uint64 from 2**63 on, whose sums and products wrap around as NumPy's do. The sum of bools is a
        bool, True if any of them is: to count them, pass int(x).

        Parameters
        ----------
        x : array or number
            Its dtype and number of elements are the same on every rank. It is overwritten unless `out` is given. Arrays
            that come from `empty`, `zeros`, `full`, `copy_of` or `adopt` on all ranks are reduced without a copy.
        op : str or Op
            The operation.
        out : array, optional
            An array of x's dtype and number of elements, x itself or disjoint from x.
        algorithm : str, optional
            "auto" and "direct" fold in rank order. "ring" (Patarasuk and Yuan 2009) sends 2(N-1)/N of x per rank.
            "bidirectional_ring" runs two opposite rings with half of x each. "halving_doubling" is Rabenseifner's
            (2004), "tree" is binomial, "double_tree" is that of Sanders, Speck and Träff (2009), "master" reduces to
            rank 0 and broadcasts. All but "auto", "direct" and "master" fold in an order of their own and round 8- and
            16-bit floats at each hop. Ranks on several hosts need "auto".
        wire : str, optional
            The format in which sums and averages of float32 and of shorter floats travel between hosts, the same on all
            ranks: "native" (float32), "bf16", "fp16", or "int8" with one scale for each 256 elements; None means
            `Comm.wire`. All ranks get the same bits. The rounding error of an array is added to the next call on the
            same array. In "fp16", values of 65,520 and above become infinite. In "int8", an infinity or a NaN turns
            all its 256 elements into NaN. Arrays of up to 32 KiB are not compressed. Other reductions ignore
            `Comm.wire`, and refuse a `wire` other than "native".
        group_size : int, optional
            A number of hosts that divides the number of all hosts. Each group_size consecutive hosts form a group, such
            as the hosts of one data centre. Hosts reduce within their group first, then groups reduce among themselves,
            so each host sends only 1/group_size of x to other groups. Hosts are folded in the order of their lowest
            ranks: all of them without group_size, group by group with it, but arrays of up to 32 KiB without groups.
        async_op, timeout, priority
            See `Comm`.

        Returns
        -------
        None, number or Work
            None for an array, and if `out` is given. The result for a number. A `Work` with async_op=True.

        Raises
        ------
        TypeError, ValueError
            For an op that the dtype does not have, an array that is not contiguous, or an `out` that overlaps x in
            part.
        Error
            As every collective (see `Comm`).

        Examples
        --------
        >>> x = np.array([1.0, 2.0]) * (comm.rank + 1)
        >>> comm.all_reduce(x)
        >>> x
        array([3., 6.])
        >>> comm.all_reduce(10 * (comm.rank + 1), op="max")
        20
        """
        return self.run(ALL_REDUCE, x, op, None, out, None, algorithm, async_op, timeout,
                        options_of(wire, group_size, priority))

    def reduce(self, x, op="sum", root=0, *, out=None, wire=None, async_op=False, timeout=None, priority=None):
        """Combine x of all ranks elementwise. The result overwrites the root's array, or its `out` if given.

        If x is a number, the result is returned on the root, and None on the other ranks.

        Parameters
        ----------
        x : array or number
            As in `all_reduce`. The arrays of other ranks are unchanged. Values are folded in rank order.
        op : str or Op
            The operation.
        root : int
            The rank that gets the result.
        out : array, optional
            As in `all_reduce`, on the root. It is ignored on other ranks.
        wire
            As in `all_reduce`.
        async_op, timeout, priority
            See `Comm`.

        Returns
        -------
        None, number or Work
            None for an array. For a number, the result on the root.

        Raises
        ------
        TypeError, ValueError
            As in `all_reduce`, or for a root that is no rank.
        Error
            As every collective.

        Examples
        --------
        >>> x = np.full(3, comm.rank + 1)
        >>> comm.reduce(x, "prod", root=0)
        >>> x
        array([2, 2, 2])
        """
        return self.run(REDUCE, x, op, root, out, None, None, async_op, timeout,
                        options_of(wire, None, priority))

    def scan(self, x, op="sum", *, out=None, async_op=False, timeout=None):
        """Combine x of ranks 0 to this rank elementwise. The result overwrites the array, or `out` if given.

        If x is a number, the result is returned.

        Parameters
        ----------
        x : array or number
            As in `all_reduce`. Values are folded in rank order.
        op : str or Op
            Every operation but "avg".
        out : array, optional
            As in `all_reduce`.
        async_op, timeout
            See `Comm`.

        Returns
        -------
        None, number or Work
            As in `all_reduce`.

        Raises
        ------
        TypeError, ValueError
            As in `all_reduce`, and for "avg".
        Error
            As every collective.

        Examples
        --------
        >>> x = np.array([5 + comm.rank])
        >>> comm.scan(x)  # rank 1 gets 5 + 6
        >>> x
        array([5])
        """
        return self.run(SCAN, x, op, None, out, None, None, async_op, timeout)

    def exscan(self, x, op="sum", *, out=None, async_op=False, timeout=None):
        """Combine x of the ranks below this one elementwise. The result overwrites the array, or `out` if given.

        Values are folded in rank order. Nothing is stored on rank 0. If x is a number, the result is returned, and None
        on rank 0.

        Parameters
        ----------
        x, op, out
            As in `scan`.
        async_op, timeout
            See `Comm`.

        Returns
        -------
        None, number or Work
            None for an array. For a number, the result on ranks above 0.

        Raises
        ------
        TypeError, ValueError, Error
            As in `scan`.

        Examples
        --------
        >>> count = 10  # items of this rank
        >>> first = comm.exscan(count) or 0  # index of its first item among those of all ranks
        >>> first
        0
        """
        return self.run(EXSCAN, x, op, None, out, None, None, async_op, timeout)

    def reduce_scatter(self, x, op="sum", *, out=None, async_op=False, timeout=None, priority=None):
        """Combine x of all ranks elementwise and return this rank's part of the result.

        Values are folded in rank order.

        Parameters
        ----------
        x : array
            In C order, of the same dtype and shape on every rank: (size, *s), or size * k rows.
        op : str or Op
            The operation.
        out : array, optional
            An array for the part, of x's dtype, which is this rank's part of x or disjoint from x.
        async_op, timeout, priority
            See `Comm`.

        Returns
        -------
        array or Work
            Element `rank` of the result, of shape s; or k rows. A column, of shape (size, 1), gives shape (1, 1). It is
            `out` if given, else a new array.

        Raises
        ------
        TypeError, ValueError
            As in `all_reduce`, or for a number of rows that is not a multiple of `size`.
        Error
            As every collective.

        Examples
        --------
        >>> comm.reduce_scatter(np.arange(4))  # rank 1 gets [4, 6]
        array([0, 2])
        """
        return self.run(REDUCE_SCATTER, x, op, None, out, None, None, async_op, timeout,
                        options_of(None, None, priority))

    def broadcast(self, x, root=0, *, out=None, async_op=False, timeout=None, priority=None):
        """Copy the root's x to every rank, into its x or into its `out`.

        Parameters
        ----------
        x : array
            With items of a fixed size, of the same dtype and number of elements on every rank. Only the root's values
            are read, and x may be read-only on the root.
        root : int
            The rank that sends.
        out : array, optional
            As in `all_reduce`.
        async_op, timeout, priority
            See `Comm`.

        Returns
        -------
        None or Work
            A `Work` with async_op=True.

        Raises
        ------
        TypeError, ValueError
            For a wrong array or root.
        Error
            As every collective.

        Examples
        --------
        >>> x = np.arange(3) if comm.rank == 1 else np.zeros(3, int)
        >>> comm.broadcast(x, root=1)
        >>> x
        array([0, 1, 2])
        """
        return self.run(BROADCAST, x, None, root, out, None, None, async_op, timeout,
                        options_of(None, None, priority))

    def scatter(self, x=None, root=0, *, out=None, like=None, async_op=False, timeout=None):
        """Return this rank's part of the root's x.

        Parameters
        ----------
        x : array or None
            On the root, an array in C order: of shape (size, *s), or of size * k rows. None on other ranks, which give
            `out` or `like`.
        root : int
            The rank that sends.
        out : array, optional
            An array of the part's dtype and number of elements, into which the part is copied. On the root it is its
            part of x or disjoint from x.
        like : array, optional
            An array of the part's shape and dtype. Its values are not read.
        async_op, timeout
            See `Comm`.

        Returns
        -------
        array or Work
            x[rank] of shape s, or k rows. A column, of shape (size, 1), gives shape (1, 1) on the root. It is `out` if
            given, else a new array.

        Raises
        ------
        TypeError, ValueError
            For a wrong array or root, or on a rank that gives neither x, `out` nor `like`.
        Error
            As every collective.

        Examples
        --------
        >>> x = np.arange(4.0) if comm.rank == 0 else None
        >>> comm.scatter(x, like=np.empty(2))  # rank 1 gets [2, 3]
        array([0., 1.])
        """
        return self.run(SCATTER, x, None, root, out, like, None, async_op, timeout)

    def gather(self, x, root=0, *, out=None, async_op=False, timeout=None):
        """Return every rank's x on the root, as an array of shape (size, *s); return None on the other ranks.

        Parameters
        ----------
        x : array
            In C order, of the same shape s and dtype on every rank.
        root : int
            The rank that gets the result.
        out : array, optional
            On the root, an array for the result. The root's x may be its own part of `out`, else it is disjoint from
            `out`. It is ignored on other ranks.
        async_op, timeout
            See `Comm`.

        Returns
        -------
        array, None or Work
            On the root, `out` if given, else a new array.

        Raises
        ------
        TypeError, ValueError
            For a wrong array or root.
        Error
            As every collective.

        Examples
        --------
        >>> comm.gather(np.array([comm.rank, 7]))  # None on rank 1
        array([[0, 7],
               [1, 7]])
        """
        return self.run(GATHER, x, None, root, out, None, None, async_op, timeout)

    def all_gather(self, x, *, out=None, async_op=False, timeout=None, priority=None):
        """Return every rank's x on every rank, as an array of shape (size, *s).

        Parameters
        ----------
        x : array
            In C order, of the same shape s and dtype on every rank.
        out : array, optional
            An array for the result. x may be this rank's part of `out`, else it is disjoint from `out`.
        async_op, timeout, priority
            See `Comm`.

        Returns
        -------
        array or Work
            `out` if given, else a new array.

        Raises
        ------
        TypeError, ValueError
            For a wrong array.
        Error
            As every collective.

        Examples
        --------
        >>> comm.all_gather(np.array([comm.rank, 7]))
        array([[0, 7],
               [1, 7]])
        """
        return self.run(ALL_GATHER, x, None, None, out, None, None, async_op, timeout,
                        options_of(None, None, priority))

    def all_to_all(self, x, *, out=None, async_op=False, timeout=None):
        """Send block j of x to rank j, and return an array of x's shape whose block i comes from rank i.

        Parameters
        ----------
        x : array
            In C order, of the same dtype and shape on every rank: (size, *s), or size * k rows.
        out : array, optional
            An array for the result, x itself or disjoint from x.
        async_op, timeout
            See `Comm`.

        Returns
        -------
        array or Work
            `out` if given, else a new array.

        Raises
        ------
        TypeError, ValueError
            For a wrong array, or a number of rows that is not a multiple of `size`.
        Error
            As every collective.

        Examples
        --------
        >>> comm.all_to_all(10 * comm.rank + np.arange(2))  # rank 1 gets [1, 11]
        array([ 0, 10])
        """
        return self.run(ALL_TO_ALL, x, None, None, out, None, None, async_op, timeout)

    def barrier(self, *, async_op=False, timeout=None):
        """Block until every rank has called it.

        Parameters
        ----------
        async_op, timeout
            See `Comm`.

        Returns
        -------
        None or Work
            A `Work` with async_op=True.

        Raises
        ------
        Error
            As every collective.

        Examples
        --------
        >>> comm.barrier(timeout=30)
        """
        return self.run(BARRIER, None, None, None, None, None, None, async_op, timeout)

    def plan(self, str kind, *arguments, **keywords):
        """Return a `Plan` of the collective `kind`, whose arguments are checked once and whose arrays are pinned.

        Making a plan is local: a wrong argument raises here and does not affect other ranks.

        Parameters
        ----------
        kind : str
            The name of a collective from `all_reduce` to `barrier`.
        *arguments, **keywords
            The arguments of that method. Arrays, not numbers.

        Returns
        -------
        Plan
            Calling it runs the collective with the values that x holds then.

        Raises
        ------
        TypeError, ValueError
            For a wrong argument.
        Closed
            If the communicator is closed.

        Examples
        --------
        >>> x = np.ones(2)
        >>> step = comm.plan("all_reduce", x)
        >>> for _ in range(3):
        ...     step()
        >>> x
        array([8., 8.])
        """
        return Plan(self, kind, arguments, keywords)

    def refuse(self, str kind):
        """Refuse the collective `kind`, in place of calling it, since an argument is wrong.

        For code that wraps a communicator and checks arguments itself. The ranks that call the collective get
        `Mismatch` instead of waiting for this rank. If all ranks refuse it, the communicator is unchanged.

        Parameters
        ----------
        kind : str
            The name of a collective from `all_reduce` to `barrier`.

        Raises
        ------
        ValueError
            For another name.
        Closed
            If the communicator is closed. If it has ended by another error, nothing is raised: the caller's own
            exception says what was wrong.

        Examples
        --------
        >>> def sum_floats(comm, x):
        ...     if x.dtype.kind != "f":
        ...         comm.refuse("all_reduce")
        ...         raise TypeError(f"x is of {x.dtype}; give floats")
        ...     comm.all_reduce(x)
        >>> sum_floats(comm, np.ones(2))
        """
        self.engine.refuse(number_named(KIND_NUMBERS, kind, "kind"))

    # -- settings --

    @property
    def wire(self):
        """The default of `wire` in `all_reduce` and `reduce`. All ranks must set the same.

        "native", "bf16", "fp16" or "int8"; see `all_reduce`. Another name raises ValueError.

        It is "native" in every new communicator, even in one made by `split` or `dup`, which may belong to a library.
        A communicator made by `shrink` or `grow` has the value of the communicator that it replaces.
        """
        return WIRES[self.default_wire]

    @wire.setter
    def wire(self, name):
        self.default_wire = number_named(WIRE_NUMBERS, name, "wire")

    @property
    def linger_s(self):
        """The most seconds, 0 to 0.05, for which a call with async_op=True waits before it goes to the background.

        It waits for other ranks, and is finished in the foreground if they come in time. Handing a call to the
        background takes longer than a small call, so waiting pays if the ranks make the call at about the same time. If
        a call does not finish in this time, the next one waits for a quarter of it, but at least for 0.0002 seconds, or
        for `linger_s` if that is less; each call that finishes doubles the time again, up to `linger_s`. A call behind
        unfinished calls goes to the background at once. Each rank may have its own value. It is 0 after `init`. A
        communicator that is made from another one begins with the value of that one. A value that is not 0 to 0.05
        raises ValueError.
        """
        return self.engine.linger_ns * 1e-9

    @linger_s.setter
    def linger_s(self, double seconds):
        if not 0 <= seconds <= MOST_LINGER_S:
            raise ValueError(f"linger_s is {seconds:g}; it must be 0 to {MOST_LINGER_S:g} seconds")
        self.engine.set_linger(ns_of(seconds))

    @property
    def timeout_s(self):
        """The default of `timeout` in every call, in seconds. Calls under way keep theirs.

        It is that of `init` at first. A communicator that is made from another one begins with the value of that
        one. Each rank may have its own value. TypeError or ValueError unless it is set to a number above 0.
        """
        return self.engine.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds):
        try:
            self.engine.timeout_s = timeout_s_of(0, seconds)
        except (TypeError, ValueError) as error:   # it names the argument of calls, which is `timeout`
            raise type(error)(f"timeout_s is {seconds!r}; it must be a number of seconds, more than 0") from None
        self.default_timeout_ns = ns_of(self.engine.timeout_s)

    # -- from arguments to a call --

    # options: None, or (wire, group_size, priority), each of which may be None.
    cdef object run(self, int kind, object x, object op, object root, object out, object like, object algorithm,
                    object async_op, object timeout, object options=None):
        cdef Call c
        cdef Operand a, b
        cdef int number
        cdef bint is_filled = False
        if overwrites_x(kind) and kind != BROADCAST and not cnp.PyArray_Check(x) and is_number(x):
            return self.run_number(kind, x, op, root, out, algorithm, async_op, timeout, options)
        if async_op:
            return self.issue(kind, x, op, root, out, like, algorithm, timeout, options)
        a.held = b.held = False
        try:   # one `except` for both errors: each costs a small call a hundredth
            number = self.root_of(kind, root)
            result = self.out_of(kind, x, number, out, like)
            _kept = self.fill_call(&c, &a, &b, kind, x, op, number, result, algorithm, timeout, options)
            c.out_is_new = result is not out
            is_filled = True
            self.run_call(&c)
        except Exception as error:
            if not is_filled:
                self.engine.refuse(kind)
            elif isinstance(error, Mismatch):
                note_shape(error, x)
            raise
        finally:
            release(&a)
            release(&b)
        return return_value_of(&c, self.own_rank, result)

    # Reduce a number as an array of shape () and return the result as a number.
    cdef object run_number(self, int kind, object x, object op, object root, object out, object algorithm,
                           object async_op, object timeout, object options):
        cdef Work work
        try:
            array = np.array(x)
            if isinstance(x, int) and array.dtype.hasobject:
                raise TypeError("x is an int that does not fit into 64 bits; all_gather_object takes any int")
            gets_result = out is None and (
                self.own_rank == self.root_of(kind, root) if kind == REDUCE else kind != EXSCAN or self.own_rank > 0)
        except Exception:
            self.engine.refuse(kind)
            raise
        if async_op:
            work = self.issue(kind, array, op, root, out, None, algorithm, timeout, options)
            if gets_result:
                work.number, work.number_type = array, type(x)
            return work
        self.run(kind, array, op, root, out, None, algorithm, False, timeout, options)
        return number_of(array, type(x)) if gets_result else None

    # As `run`, but run the call in the background and return a Work.
    cdef object issue(self, int kind, object x, object op, object root, object out, object like, object algorithm,
                      object timeout, object options):
        cdef Work work = self.new_work()
        cdef Call *c = &work.task.call
        cdef int number
        try:
            number = self.root_of(kind, root)
            result = self.out_of(kind, x, number, out, like)
            kept = self.fill_call(c, &work.a, &work.b, kind, x, op, number, result, algorithm, timeout, options)
            c.out_is_new = result is not out
            work.kept = (x, result, kept, storage_of(x), storage_of(result))
        except Exception:
            self.engine.refuse(kind)
            raise
        work.return_value = return_value_of(c, self.own_rank, result)
        self.prepare_staging(c)
        self.engine.issue(work)
        return work

    cdef Work new_work(self):
        cdef Work work = Work.__new__(Work)
        work.communicator = self
        work.engine = self.engine
        return work

    cdef int run_call(self, Call *c) except -1:
        self.prepare_staging(c)
        return self.engine.run_call(c)

    cdef inline int prepare_staging(self, Call *c) except -1:
        if not self.staging_ready and (c.x_nbytes > SR_PAYLOAD_NBYTES or c.algorithm != AUTO
                                       or self.engine.g.inter != NULL):
            self.allocate_staging()
        return 0

    # Allocate the pages of this rank's staging buffer before it is first touched. Meanwhile no thread may close the
    # communicator: other files could get the number of its descriptor. One thread allocates, since it frees the pages
    # after an exception.
    cdef int allocate_staging(self) except -1:
        cdef const Group *g = &self.engine.g
        cdef unsigned long thread = <unsigned long> PyThread_get_thread_ident()
        if self.allocating_thread == thread:   # a signal handler or a destructor makes this call
            raise RuntimeError(TAKEN)
        while self.allocating_thread != 0 and self.engine.closed_because is None:
            with nogil:
                sr_yield()
            PyErr_CheckSignals()
        if self.engine.closed_because is not None or self.staging_ready:
            return 0   # run_call raises Closed
        self.allocating_thread = thread
        try:
            offset, nbytes = sr_layout_staging_offset(g.size, g.staging_nbytes, g.rank), g.staging_nbytes
            segments.allocate(self.fd, offset, nbytes, purpose="a staging buffer")
            self.segment.populate(offset, nbytes)
        except BaseException as error:
            self.engine.abort_by_exception(error, True, False, b"allocating its staging buffer")
            raise
        finally:
            self.allocating_thread = 0
        self.staging_ready = True
        return 0

    # Return the given out, or allocate the result if the kind returns a new array.
    cdef object out_of(self, int kind, object x, int root, object out, object like):
        cdef int size = self.nranks
        if out is not None or overwrites_x(kind) or kind == BARRIER:
            return out
        if kind == GATHER and root != self.own_rank:
            return None
        if kind == SCATTER and root != self.own_rank:
            if like is None:
                raise TypeError("a rank that is not the root must pass None and either out= or like=, "
                                "an array of the shape and dtype that it gets")
            return shapes.empty_alike(like)
        if kind == ALL_GATHER or kind == GATHER:
            return shapes.empty_joined(x, size)
        return shapes.empty_alike(x) if kind == ALL_TO_ALL else shapes.empty_part(x, size)

    # Fill a call from the arguments. Return what has to live as long as the call.
    cdef object fill_call(self, Call *c, Operand *a, Operand *b, int kind, object x, object op, int root,
                          object out, object algorithm, object timeout, object options):
        cdef Group *g = &self.engine.g
        kept = kept_out = residual = None
        memset(c, 0, sizeof(Call))
        c.kind = kind
        c.timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
        if options is not None:
            c.priority = priority_code(options[2])
        if kind == BARRIER:
            c.fingerprint = fingerprint_of(c)
            g.choose_algorithm(g, c)
            return None
        c.root = root
        if not takes_result(c, self.own_rank) or (out is x and overwrites_x(kind)):
            out = None
        if has_x(c, self.own_rank):
            kept = take(a, x, out is None and overwrites_x(kind) and takes(c, self.own_rank), "x", not is_folded(c))
            fill_x(c, a, self.nranks, x)
        if out is not None:
            kept_out = take(b, out, True, "out", not is_folded(c))
            fill_out(c, a, b, self.own_rank, self.nranks)
        elif overwrites_x(kind):
            c.out = a.data
        if is_folded(c):
            self.fill_reduction(c, op, algorithm)
        c.nbytes = c.count * c.itemsize
        c.x_nbytes = c.nbytes * self.nranks if is_split(c) else c.nbytes
        c.out_nbytes = c.nbytes * self.nranks if is_joined(c) else c.nbytes
        if c.x != NULL and out is not None:
            check_overlap(c, self.own_rank)
        if takes_wire(c) and (options is not None or self.default_wire != SR_WIRE_NATIVE):
            residual = self.fill_internode(c, x, options)
        self.find_shared(c)
        c.fingerprint = fingerprint_of(c)
        if is_joined(c):   # the result is made of x's shape: it is the same on all ranks
            c.fingerprint ^= <uint64_t> signature_of_given(x) << 45   # such a call has no wire format and no groups
        g.choose_algorithm(g, c)
        return kept if kept_out is None and residual is None else (kept, kept_out, residual)

    cdef int fill_reduction(self, Call *c, object op, object algorithm) except -1:
        c.op = SR_SUM if op is SUM else number_named(OP_NUMBERS, op, "op")
        if self.engine.g.kernels.fold[c.dtype][c.op] == NULL:
            dtype = DTYPES[c.dtype]
            known = kernels.ops(dtype)
            remedy = "; convert it to floats, or divide the sum" if c.op == SR_AVG else ""
            raise TypeError(f"op {op} has no meaning for {dtype}, which has {', '.join(known)}{remedy}")
        if c.op == SR_AVG and (c.kind == SCAN or c.kind == EXSCAN):
            raise ValueError("op avg has no meaning for a scan; scan the sum and divide")
        if c.kind == ALL_REDUCE:
            c.algorithm = self.default_algorithm
            if algorithm is not None:
                c.algorithm = number_named(ALGORITHM_NUMBERS, algorithm, "algorithm")
            if self.engine.g.inter != NULL and c.algorithm != AUTO:
                raise ValueError(f"algorithm {ALGORITHMS[c.algorithm]} is for ranks of one host; these are on "
                                 "several: leave it \"auto\", or call it on comm.split(comm.node)")
        return 0

    # Set the groups of hosts and the format of the data between hosts. Return the residuals that keep rounding errors.
    cdef object fill_internode(self, Call *c, object x, object options):
        wire, group_size, _ = options or (None, None, None)
        if group_size is not None:
            c.hosts_in_group = shapes.check_group_size(group_size, self.place.num_hosts)
        return self.fill_wire(c, x, <uintptr_t> c.x, wire)

    # place: the address of the reduced data in x, or a hash of those in several arrays, of which x is the first.
    cdef object fill_wire(self, Call *c, object x, uint64_t place, object wire):
        cdef int number = self.default_wire if wire is None else number_named(WIRE_NUMBERS, wire, "wire")
        cdef bint is_small = self.engine.g.inter == NULL or c.nbytes <= inter_of(&self.engine.g).small_nbytes
        cdef cnp.ndarray residual
        if c.dtype >= SR_DTYPES or not (c.dtype == SR_F32 or sr_dtype_is_widened(c.dtype)) or (
                c.op != SR_SUM and c.op != SR_AVG):
            if wire is None or number == SR_WIRE_NATIVE:
                return None
            raise ValueError(f"wire is {wire!r}; that is for sums and averages of float32 and shorter floats, not for "
                             f"{kernels.OPS[c.op]} of {DTYPES[c.dtype]}")
        c.wire = number
        if number == SR_WIRE_NATIVE or is_small:
            return None
        kept = self.residuals.of(x, (place, c.dtype, c.count), residual_count(inter_of(&self.engine.g), c.count))
        if kept is not None:
            residual = kept
            c.residual = <float *> cnp.PyArray_DATA(residual)
        return kept

    # As find_blocks, if the call is large enough for zero copy.
    cdef inline int find_shared(self, Call *c) except -1:
        cdef Group *g = &self.engine.g
        if g.nblocks > 0 and c.nbytes >= g.zero_copy_nbytes and g.inter == NULL:
            self.find_blocks(c)
        return 0

    # Look up the shared blocks that contain the arrays, if the call can be read in place.
    cdef int find_blocks(self, Call *c) except -1:
        if not may_be_read_in_place(&self.engine.g, c):
            return 0
        if c.x != NULL:
            self.engine.find_block(c.x, c.x_nbytes, &c.x_block, &c.x_offset)
        if c.out != NULL and is_sliced(c):
            self.engine.find_block(c.out, c.nbytes, &c.out_block, &c.out_offset)
        return 0

    cdef int root_of(self, int kind, object root) except -1:
        return self.root_number(root) if is_rooted(kind) else 0

    cdef int root_number(self, object root) except -1:
        cdef Py_ssize_t number
        try:
            number = root   # through its __index__
        except OverflowError:
            number = -1
        except TypeError:
            raise TypeError(f"root is {root!r}; it must be an integer") from None
        if not 0 <= number < self.nranks:
            raise ValueError(f"root is {root!r}; the ranks are 0 to {self.nranks - 1}")
        return number


# The calls that a Mismatch shows have numbers of elements, not shapes, which only the rank itself knows.
cdef int note_shape(object error, object x) except -1:
    if hasattr(x, "shape"):
        error.add_note(f"this rank's x has shape {tuple(x.shape)} and dtype {getattr(x, 'dtype', 'unknown')}")
    return 0


# Return the arguments of the method `kind` by name. A TypeError names the method, as it does if the method is called.
cdef object bound_to(str kind, Collectives comm, tuple arguments, dict keywords):
    try:
        return inspect.signature(getattr(Collectives, kind)).bind(comm, *arguments, **keywords)
    except TypeError as error:
        text = str(error)
        verb = "" if text.startswith(("got ", "missing ")) else "got "
        raise TypeError(f"{kind}() {verb}{text}") from None


cdef int fill_x(Call *c, Operand *x, int size, object given) except -1:
    c.x = x.data
    c.order = x.fortran
    c.count = x.count
    fill_items_of(c, x)
    if x.fortran and (is_split(c) or is_joined(c)):
        raise ValueError("x is in Fortran order, whose memory is not split along the first dimension; "
                         "pass np.ascontiguousarray(x)")
    if is_split(c):
        if not cnp.PyArray_CheckExact(given) or cnp.PyArray_NDIM(given) == 0 or cnp.PyArray_DIM(given, 0) % size:
            shapes.rows_of_a_part(tuple(getattr(given, "shape", (item_count(x, x.count),))), size)
        c.count = x.count // size
    return 0


cdef class Plan:
    """A collective whose arguments are checked and whose arrays are pinned. Each call runs the collective.

    `Comm.plan` makes it.
    """

    def __cinit__(self, *_, **__):
        self.a.held = self.b.held = False

    def __init__(self, Collectives comm, str kind, tuple arguments, dict keywords):
        cdef int number
        if comm.engine.closed_because is not None:
            raise Closed(comm.engine.closed_because, rank=comm.own_rank)
        number = number_named(KIND_NUMBERS, kind, "kind")
        bound = bound_to(kind, comm, arguments, keywords)
        bound.apply_defaults()
        given = bound.arguments
        self.in_background = given["async_op"]
        self.prepare(comm, number, given.get("x"), given.get("op"), given.get("root"), given.get("out"),
                     given.get("like"), given.get("algorithm"), given.get("timeout"),
                     (given.get("wire"), given.get("group_size"), given.get("priority")))

    cdef object prepare(self, Collectives comm, int kind, object x, object op, object root, object out, object like,
                        object algorithm, object timeout, object options):
        cdef int number = comm.root_of(kind, root)
        self.comm = comm
        out = comm.out_of(kind, x, number, out, like)
        kept = comm.fill_call(&self.c, &self.a, &self.b, kind, x, op, number, out, algorithm, timeout, options)
        self.blocks_version = comm.engine.blocks_version
        self.pinned = (x, out, kept, storage_of(x), storage_of(out))
        self.return_value = return_value_of(&self.c, comm.own_rank, out)
        comm.prepare_staging(&self.c)

    def __reduce__(self):
        raise TypeError("a plan belongs to its process; make one from the communicator there")

    def __call__(self):
        """Run the collective once, with the values that its arrays hold now.

        Returns
        -------
        array, None or Work
            The result, as of the method. A `Work` if the plan was made with async_op=True. A new array that the method
            would return is the same one in each call.

        Raises
        ------
        Error
            As the method.
        """
        if self.in_background:
            return self.issue()
        self.run_call()
        return self.return_value

    @cython.nonecheck(True)   # Plan.__new__ alone makes a plan without a communicator
    cdef int run_call(self) except -1:
        if self.blocks_version != self.comm.engine.blocks_version:
            self.find_shared_again()
        return self.comm.engine.run_call(&self.c)

    # Look the arrays up again: the set of shared blocks has changed since the call was filled.
    cdef int find_shared_again(self) except -1:
        self.c.x_block = self.c.out_block = 0
        self.blocks_version = self.comm.engine.blocks_version
        self.comm.find_shared(&self.c)
        return 0

    @cython.nonecheck(True)
    cdef Work issue(self):
        cdef Work work = self.comm.new_work()
        if self.blocks_version != self.comm.engine.blocks_version:
            self.find_shared_again()
        work.task.call = self.c
        work.kept = self
        work.return_value = self.return_value
        self.comm.engine.issue(work)
        return work

    def __dealloc__(self):
        release(&self.a)
        release(&self.b)


cdef Plan plan_of(Collectives comm, int kind, object x, object op, object root, object out):
    cdef Plan plan = Plan.__new__(Plan)
    plan.prepare(comm, kind, x, op, root, out, None, None, None, None)
    return plan
