# The functions of adapters that a framework calls so often that Python would take longer than a tiny collective does.
# No framework is imported here: the `prepare_` functions are given what is needed of it.

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_New
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from .._arrays.operands cimport Memory, can_read_while_writing

import threading

from shmring import Closed

# ---- torch ---------------------------------------------------------------------------------------------------

# Collectives of dense tensors that are complete when they return, as methods of the process group: nearly all calls of
# DDP, of FSDP and of tensor-parallel inference. All others are left to the group's methods of the same names with
# `_any`.

cdef object memory_of = None
cdef dict profiler_state = None
cdef tuple op_names = ()   # by ReduceOp's hash, which is its number
cdef Options for_all_reduce = None, for_broadcast = None, for_all_gather = None, for_reduce_scatter = None
cdef enum:
    AVG = 1


def prepare_torch(dict profiler, tuple ops, memory, Options all_reduce, Options broadcast, Options all_gather,
                  Options reduce_scatter):
    """Set the globals of torch's profiler, the names of torch's ops, `Memory.of`, and the calls' options."""
    global memory_of, profiler_state, op_names, for_all_reduce, for_broadcast, for_all_gather, for_reduce_scatter
    memory_of, profiler_state, op_names = memory, profiler, ops
    for_all_reduce, for_broadcast = all_reduce, broadcast
    for_all_gather, for_reduce_scatter = all_gather, reduce_scatter


# The fields of torch's options of a call; 0 for those that the call does not have.
cdef struct Fields:
    int64_t op, root, root_tensor
    bint is_async, has_timeout


cdef class Options:
    """Reads the options of one kind of call of torch's.

    Parameters
    ----------
    kind : type
        torch's class of them.
    places : dict or None
        The places of the fields in memory, which `_torch/fields.py` finds. If None, properties are read.
    """

    cdef object kind
    cdef Py_ssize_t pointer, op, is_async, timeout, root, root_tensor   # -1: there is no such field

    def __init__(self, kind, dict places):
        self.kind = kind
        found = places or {}
        self.pointer, self.op = found.get("pointer", -1), found.get("reduceOp", -1)
        self.is_async, self.timeout = found.get("asyncOp", -1), found.get("timeout", -1)
        self.root, self.root_tensor = found.get("rootRank", -1), found.get("rootTensor", -1)

    # True if `opts` are of this kind and torch's profiler does not record calls. Only then the fields are set.
    cdef inline bint read(self, object opts, Fields *fields) except -1:
        cdef const unsigned char *content = NULL
        if type(opts) is not self.kind or profiler_state["_is_profiler_enabled"]:
            return False
        if self.pointer >= 0:
            content = (<const unsigned char **> (<char *> <void *> opts + self.pointer))[0]
        if content == NULL:
            self.read_properties(opts, fields)
            return True
        fields.is_async = content[self.is_async]
        fields.has_timeout = (<const int64_t *> (content + self.timeout))[0] > 0   # torch's mark of none is negative
        fields.op = content[self.op] if self.op >= 0 else 0
        fields.root = (<const int64_t *> (content + self.root))[0] if self.root >= 0 else 0
        fields.root_tensor = (<const int64_t *> (content + self.root_tensor))[0] if self.root_tensor >= 0 else 0
        return True

    cdef int read_properties(self, object opts, Fields *fields) except -1:
        fields.is_async, fields.has_timeout = opts.asyncOp, opts.timeout.total_seconds() > 0
        fields.op = hash(opts.reduceOp) if hasattr(opts, "reduceOp") else 0
        fields.root, fields.root_tensor = getattr(opts, "rootRank", 0), getattr(opts, "rootTensor", 0)
        return 0


# The name of the operation on a tensor; None if the group's own method is to do it.
cdef inline object name_of_op(int64_t op, object tensor):
    if op >= len(op_names) or (op == AVG and not getattr(tensor.dtype, "is_floating_point", False)):
        return None
    return op_names[op]


cdef enum:
    BETWEEN = 1, WITHIN = 2


cdef class CallLock:
    """A lock as threading.Lock, faster while no other thread waits for it, and taken in turn if others do."""

    # A thread reads and changes these with the GIL, and does not give it up between a test and a change. If threads
    # wait, a release hands the lock to the first of them: is_held stays true.
    cdef bint is_held
    cdef unsigned long owner   # while it is held: the thread, or 0 until a woken thread runs
    cdef int steps             # while it is held, for a compound call: BETWEEN or WITHIN its steps; else 0
    cdef readonly list unfinished   # operations of a group whose results are not in their tensors yet
    cdef list waiting   # a lock of each thread, in the order in which they came; a release of it wakes the thread
    cdef list queued    # the threads that wait, also while they wake

    def __cinit__(self):
        self.waiting = []
        self.queued = []
        self.unfinished = []

    def acquire(self, double timeout=-1.0):
        """Take the lock; wait without end, or for some seconds. Return whether this thread has it now.

        RuntimeError if this thread has it or waits for it already, as in a signal handler, and so would wait
        without end.
        """
        return self.take(timeout)

    def release(self):
        """Let the next thread have the lock."""
        if not self.is_held:
            raise RuntimeError("a lock is released that no thread holds")
        self.give_back()

    def release_if_mine(self):
        """Let the next thread have the lock, if this thread has it."""
        if self.is_held and self.owner == <unsigned long> PyThread_get_thread_ident():
            self.give_back()

    cpdef bint is_mine(self) noexcept:
        """Return whether this thread has the lock or waits for it, as in a handler during its own call."""
        cdef unsigned long thread = <unsigned long> PyThread_get_thread_ident()
        return (self.is_held and self.owner == thread) or thread in self.queued

    def begin_steps(self):
        """Let this thread, which has the lock, take and release it again for each step of its call.

        This ends when the thread releases the lock outside of a step. Other threads do not get it before.
        """
        if not self.is_held or self.owner != <unsigned long> PyThread_get_thread_ident() or self.steps != 0:
            raise RuntimeError("the steps of a call begin within another call, or without the lock")
        self.steps = BETWEEN

    def check_not_mine(self):
        """Raise RuntimeError if this thread has the lock or waits for it: it would wait for itself."""
        if self.is_mine():
            raise RuntimeError("a signal handler called a process group during a call of the same group; let the "
                               "handler note the signal, and act on the note after the call")

    def __enter__(self):
        self.take(-1.0)

    def __exit__(self, *_):
        self.give_back()

    cdef inline bint take(self, double timeout) except -1:
        if self.is_held:
            return self.take_later(timeout)
        self.is_held = True
        self.owner = <unsigned long> PyThread_get_thread_ident()
        return True

    cdef bint take_later(self, double timeout) except -1:
        if self.steps == BETWEEN and self.owner == <unsigned long> PyThread_get_thread_ident():
            self.steps = WITHIN
            return True
        if timeout < 0:
            self.check_not_mine()
        turn = threading.Lock()
        turn.acquire()
        thread = <unsigned long> PyThread_get_thread_ident()
        self.queued.append(thread)
        self.waiting.append(turn)
        try:
            if not turn.acquire(True, timeout) and self.leave(turn):
                return False
            self.owner = thread
        except BaseException:   # of a signal's handler
            if not self.leave(turn):
                self.give_back()
            raise
        finally:
            self.queued.remove(thread)
        return True

    # Return whether the thread was still waiting: a release may have come when its wait had just ended.
    cdef bint leave(self, object turn) except -1:
        if turn not in self.waiting:
            return False
        self.waiting.remove(turn)
        return True

    cdef inline int give_back(self) except -1:
        if self.steps == WITHIN:
            self.steps = BETWEEN
            return 0
        self.steps = 0
        if self.waiting:
            self.owner = 0
            self.waiting.pop(0).release()
        else:
            self.is_held = False
        return 0


def allreduce(self, tensors=None, opts=None, timeout=None, *, tensor=None, op=None):
    """Reduce tensors over all ranks. Return None if the call is complete, else its Work."""
    cdef Fields fields
    cdef CallLock calling
    if (type(tensors) is list and len(<list> tensors) == 1 and timeout is None and tensor is None and op is None
            and for_all_reduce.read(opts, &fields) and not fields.has_timeout):
        memory = memory_of((<list> tensors)[0])
        name = None if memory is None else name_of_op(fields.op, (<list> tensors)[0])
        if name is not None:
            if fields.is_async:
                return self._issue_all_reduce(tensors, memory, name)
            calling = self._calling
            calling.take(-1.0)
            try:
                self.comm.all_reduce(memory, name)
            except (TypeError, ValueError) as error:
                raise self._as_in_gloo(error) from None
            finally:
                calling.give_back()
            if calling.unfinished:
                self._finish_done()
            return None
    return self._reduce_any_for_all(tensors, opts, timeout, tensor, op)


def broadcast(self, *arguments, **keywords):
    """Copy the root's tensor to all ranks. Return None if the call is complete, else its Work."""
    cdef Fields fields
    cdef CallLock calling
    if len(arguments) == 2 and not keywords and for_broadcast.read(arguments[1], &fields) and is_plain(&fields):
        tensors = arguments[0]
        memory = memory_of((<list> tensors)[0]) if type(tensors) is list and len(<list> tensors) == 1 else None
        if memory is not None:
            calling = self._calling
            calling.take(-1.0)
            try:
                self.comm.broadcast(memory, fields.root)
            except (TypeError, ValueError) as error:
                raise self._as_in_gloo(error) from None
            finally:
                calling.give_back()
            if calling.unfinished:
                self._finish_done()
            return None
    return self._broadcast_any(*arguments, **keywords)


def all_gather_single(self, *arguments, **keywords):
    """Gather all ranks' tensors in one tensor: output, input, options. Return as `broadcast`."""
    cdef Fields fields
    cdef CallLock calling
    if len(arguments) == 3 and not keywords and for_all_gather.read(arguments[2], &fields) and is_plain(&fields):
        out, memory = memory_of(arguments[0]), memory_of(arguments[1])
        if out is not None and memory is not None and fits(memory, out, self.comm.rank):
            calling = self._calling
            calling.take(-1.0)
            try:
                self.comm.all_gather(memory, out=out)
            except (TypeError, ValueError) as error:
                raise self._as_in_gloo(error) from None
            finally:
                calling.give_back()
            if calling.unfinished:
                self._finish_done()
            return None
    return self._all_gather_single_any(*arguments, **keywords)


def reduce_scatter_single(self, *arguments, **keywords):
    """Reduce tensors and keep this rank's part: output, input, options. Return as `broadcast`."""
    cdef Fields fields
    cdef CallLock calling
    if len(arguments) == 3 and not keywords and for_reduce_scatter.read(arguments[2], &fields) and is_plain(&fields):
        out, memory = memory_of(arguments[0]), memory_of(arguments[1])
        name = None if out is None or memory is None else name_of_op(fields.op, arguments[1])
        if name is not None and fits(memory, out, self.comm.rank):
            calling = self._calling
            calling.take(-1.0)
            try:
                self.comm.reduce_scatter(memory, name, out=out)
            except (TypeError, ValueError) as error:
                raise self._as_in_gloo(error) from None
            finally:
                calling.give_back()
            if calling.unfinished:
                self._finish_done()
            return None
    return self._reduce_scatter_single_any(*arguments, **keywords)


# True if the call returns when it is complete, within the group's timeout, and moves the first tensor of a list.
cdef inline bint is_plain(const Fields *fields) noexcept:
    return not fields.is_async and not fields.has_timeout and fields.root_tensor == 0


cpdef bint fits(Memory given, Memory out, int rank) except -1:
    """Return whether a call may read `given` while it writes `out`. The group's method copies others."""
    return can_read_while_writing(given.data, given.count * given.itemsize, out.data, out.count * out.itemsize, rank)


# ---- XLA -----------------------------------------------------------------------------------------------------

# The handler of the custom calls in a program of JAX. XLA calls it without the GIL, on any of its threads, in the order
# that the program's tokens give. `_jax/xla.py` makes the programs.

cdef extern from "xla_ffi.h" nogil:
    enum:
        SR_XLA_EXECUTE, SR_XLA_TOKEN
    struct sr_xla_buffer:
        int dtype
        void *data
    struct sr_xla_buffers:
        int64_t count
        sr_xla_buffer **buffers
    struct sr_xla_string:
        const char *text
        size_t nbytes
    struct sr_xla_attributes:
        sr_xla_string **values
    struct sr_xla_frame:
        int stage
        sr_xla_buffers arguments, results
        sr_xla_attributes attributes
    bint sr_xla_answer_version(sr_xla_frame *)
    const char *sr_xla_problem(const sr_xla_frame *)
    bint sr_xla_is_end(const sr_xla_frame *)
    void sr_xla_note_own_end()
    bint sr_xla_take_own_end()
    void sr_xla_publish_end()
    bint sr_xla_await_end(uint64_t yield_ns, uint64_t limit_ns)
    int64_t sr_xla_item_count(const sr_xla_buffer *)
    void *sr_xla_new_error(const sr_xla_frame *, const char *message)


cdef extern from "Python.h" nogil:
    void *PyGILState_GetThisThreadState()


cdef dict xla_calls = {}            # by the text in the custom call
cdef object note_xla_error = None   # given an exception, returns the message for XLA
cdef enum:
    YIELD_NS = 100000, SLEEP_NS = 5000000   # of a wait for an end; then Python looks for signals
# shmring's dtypes by XLA's number of a dtype; None: no dtype of shmring.
cdef tuple XLA_DTYPES = (
    None, "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", None, None, "complex64", "bfloat16", None, "complex128", "float8_e5m2", "float8_e4m3fn")


# The Memory of a buffer. It does not change, so two threads may use it.
cdef class _Known:
    cdef void *data
    cdef int64_t count
    cdef int dtype
    cdef object memory


cdef class XlaCall:
    """A call in a compiled program: run(comm, arrays, outs) makes it; comm() is the communicator, None if it is gone.

    If op is given, the call is `comm.all_reduce(array, op)`, and several arrays are left to `run`.
    """

    cdef object comm, run, op
    cdef _Known x, out   # the last call's buffers, which often are at the same addresses again

    def __init__(self, comm, run, op=None):
        self.comm, self.run, self.op = comm, run, op


def prepare_xla(dict calls, note_error):
    """Set the calls by their text, and the function that keeps an exception; return the handler."""
    global xla_calls, note_xla_error
    xla_calls, note_xla_error = calls, note_error
    return PyCapsule_New(<void *> handle_xla_call, NULL, NULL)


def function_of_region(region, compiled, plain, context, no_trace, tokens, nothing):
    """Return a function that calls a compiled region, and returns when its collectives are over.

    plain is called in its place while JAX traces: `context.trace` is then not no_trace. tokens.current_tokens are
    those of plain programs, which may be under way. nothing is the type of results without an array.
    """
    def call(*args, **keywords):
        if context.trace is not no_trace:
            return plain(*args, **keywords)
        if tokens.current_tokens:
            for token in tokens.current_tokens.values():
                token.block_until_ready()
        results = None
        try:
            results = compiled(*args, **keywords)
            if not sr_xla_take_own_end():   # it runs on a thread of XLA, or has failed
                region.await_end(results)
        except BaseException as error:
            region.raise_own_or_give_up(error, results, sr_xla_take_own_end())
            raise
        return results.structure.unflatten(()) if type(results) is nothing else results

    return call


def await_end():
    """Wait some milliseconds until a region ends on a thread of XLA, or a call of one fails. Return whether."""
    cdef bint has_ended
    with nogil:
        has_ended = sr_xla_await_end(YIELD_NS, SLEEP_NS)
    return has_ended


cdef void *handle_xla_call(sr_xla_frame *frame) noexcept nogil:
    cdef const char *problem
    if sr_xla_answer_version(frame) or frame.stage != SR_XLA_EXECUTE:
        return NULL
    problem = sr_xla_problem(frame)
    if problem != NULL:
        return sr_xla_new_error(frame, problem)
    if sr_xla_is_end(frame):
        if PyGILState_GetThisThreadState() == NULL:
            sr_xla_publish_end()
        else:   # this thread has called the program
            sr_xla_note_own_end()
        return NULL
    with gil:
        return run_xla_call(frame)


cdef void *run_xla_call(sr_xla_frame *frame) noexcept:
    cdef sr_xla_string *text = frame.attributes.values[0]
    message = None
    try:
        call = xla_calls.get(PyBytes_FromStringAndSize(text.text, text.nbytes))
        if call is None:
            raise LookupError(
                f"a compiled program calls {text.text[:text.nbytes].decode()!r}, which no program that was traced in "
                "this process has: a compiled program with collectives cannot be taken to another process")
        make_call(call, &frame.arguments, &frame.results)
    except BaseException as error:
        message = message_of(error)
        sr_xla_publish_end()
    return NULL if message is None else sr_xla_new_error(frame, message)


cdef bytes message_of(object error):
    cdef bytes message
    try:
        message = note_xla_error(error).encode("utf-8", "replace")
    except BaseException:   # no memory for a better one
        message = b"a collective of shmring failed"
    return message


cdef int make_call(XlaCall call, const sr_xla_buffers *arguments, const sr_xla_buffers *results) except -1:
    cdef const sr_xla_buffer *x
    cdef const sr_xla_buffer *out
    cdef _Known given, taken
    comm = call.comm()
    if comm is None:
        raise Closed("the communicator of this compiled program does not exist any more")
    if call.op is None or arguments.count != 2:   # the first one is the token
        call.run(comm, memories_of(arguments), memories_of(results))
        return 0
    x, out = arguments.buffers[1], results.buffers[1]
    given = known_as(call.x, x)
    call.x = given
    if x.data == out.data:
        comm.all_reduce(given.memory, call.op)
        return 0
    taken = known_as(call.out, out)
    call.out = taken
    comm.all_reduce(given.memory, call.op, out=taken.memory)
    return 0


# Return `known` if it is the buffer's, else a new one.
cdef _Known known_as(_Known known, const sr_xla_buffer *buffer):
    cdef int64_t count = sr_xla_item_count(buffer)
    if known is None or known.data != buffer.data or known.count != count or known.dtype != buffer.dtype:
        known = _Known.__new__(_Known)
        known.data, known.count, known.dtype = buffer.data, count, buffer.dtype
        known.memory = memory_of_buffer(buffer)
    return known


cdef object memory_of_buffer(const sr_xla_buffer *buffer):
    return Memory(<uintptr_t> buffer.data, sr_xla_item_count(buffer), name_of(buffer.dtype))


cdef list memories_of(const sr_xla_buffers *buffers):
    cdef list found = []
    cdef const sr_xla_buffer *buffer
    cdef int64_t i
    for i in range(buffers.count):
        buffer = buffers.buffers[i]
        if buffer.dtype != SR_XLA_TOKEN:
            found.append(memory_of_buffer(buffer))
    return found


cdef object name_of(int dtype):
    return XLA_DTYPES[dtype] if 0 <= dtype < len(XLA_DTYPES) else None
