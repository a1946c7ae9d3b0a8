# The all_reduce of one dense tensor, as a method of the process group: nearly all calls of DDP and of tensor-parallel
# inference. In Python its lines take longer than a tiny all-reduce does. torch is not imported here: `prepare` is given
# what is needed of it.

cdef object memory_of = None
cdef object options_class = None   # torch's AllreduceOptions ...
cdef object read_op = None, read_async = None   # ... and functions that read its fields
cdef dict profiler_state = None
cdef tuple op_names = ()   # by ReduceOp's hash, which is its number
cdef enum:
    AVG = 1


def prepare(options, dict profiler, tuple ops, memory):
    """Set torch's class of options, its profiler's globals, the names of its ops, and `Memory.of`."""
    global memory_of, options_class, read_op, read_async, profiler_state, op_names
    memory_of, options_class, profiler_state, op_names = memory, options, profiler, ops
    read_op, read_async = options.reduceOp.fget, options.asyncOp.fget


def allreduce(self, tensors=None, opts=None, timeout=None, *, tensor=None, op=None):
    """Reduce tensors over all ranks. Return None if the call is complete, else its Work."""
    cdef Py_ssize_t number
    if (type(opts) is options_class and type(tensors) is list and len(<list> tensors) == 1 and timeout is None
            and tensor is None and op is None and not profiler_state["_is_profiler_enabled"]):
        number = hash(read_op(opts))
        if number < len(op_names) and (number != AVG or (<list> tensors)[0].dtype.is_floating_point):
            memory = memory_of((<list> tensors)[0])
            if memory is not None:
                name = op_names[number]
                if read_async(opts):
                    return self._issue_all_reduce(tensors, memory, name)
                calling = self._calling
                calling.acquire()   # a with statement takes longer
                try:
                    self.comm.all_reduce(memory, name)
                finally:
                    calling.release()
                return None
    return self._reduce_any_for_all(tensors, opts, timeout, tensor, op)
