"""shmring as a process group of torch.distributed.

This module is loaded when the first group is made, since the class derives from a class of torch. Its methods
have the names and arguments that torch.distributed and its C++ call. The methods run in the caller's torch
modes, so they read only the metadata and addresses of tensors; code that needs torch operations runs in
`plain_torch`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.utils import _pytree as pytree

import shmring

from .. import _compiled
from .derived import Derivable
from .fields import find_fields
from .monitored import monitored_barrier
from .overloads import FORMS, FormError
from .reconfiguring import NoMembers, Reconfigurable, new_handle
from .sparse import gather_entries
from .tensors import (
    ArgumentError,
    NoElements,
    Taken,
    apart,
    as_in_gloo,
    bytes_apart,
    bytes_of,
    check_alike,
    memory_of,
    plain_torch,
    stage_memory,
)
from .work import (
    Completer,
    Handle,
    LentWork,
    Message,
    Operation,
    StagedOperation,
    UnknownWork,
    Work,
    abort_message,
    are_any_halves,
    finished,
    operation_of,
    together,
    unknown_work_of,
    work_of,
)

# Indexed by ReduceOp's hash, which is its number. Reading its other attributes takes longer than a tiny
# all-reduce.
_OPS: tuple[Any, ...] = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor")
_SUM, _AVG, _PREMUL_SUM = 0, _OPS.index("avg"), len(_OPS)
# torch's div_ takes no other dtypes of integers.
_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
# torch's functions that reduce several tensors of one rank, by the op's number. AVG has none.
_FOLDS: dict[int, Callable[..., torch.Tensor]] = {
    _OPS.index(name): fold
    for name, fold in (
        ("sum", torch.add),
        ("prod", torch.mul),
        ("min", torch.minimum),
        ("max", torch.maximum),
        ("band", torch.bitwise_and),
        ("bor", torch.bitwise_or),
        ("bxor", torch.bitwise_xor),
    )
}
_OPTIONS = (c10d.AllreduceOptions, c10d.BroadcastOptions, c10d.AllgatherOptions, c10d.ReduceScatterOptions)


def prepare_compiled(memory_of: Callable[[Any], shmring.Memory | None]) -> None:
    """Let the compiled methods make calls. They leave a tensor without memory_of(tensor) to other methods."""
    options = [_compiled.Options(kind, find_fields(kind)) for kind in _OPTIONS]
    _compiled.prepare_torch(vars(profiler), _OPS, memory_of, *options)


prepare_compiled(memory_of)
_CPU = torch.device("cpu")
# The default options of a call: asynchronous, with the group's timeout.
_ALLGATHER = c10d.AllgatherOptions()
_ALLREDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
_GATHER = c10d.GatherOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_OF_PYTHON = vars(c10d)  # globals of the module that makes most calls from Python
_UNSEEN = contextlib.nullcontext()
# The most time for which the issuing thread itself waits for a call. A bucket of DDP takes some tenths of a
# millisecond, and the ranks come to it at different times. In the background the call would take CPU time
# from the backward pass.
_LINGER_S = 2e-3

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Pending: TypeAlias = "dist.Work | None"  # the Work of a call; None if the call is complete


def _refusing(kind: str, name: str | None = None) -> Callable[[_Method], _Method]:
    """Decorate a method that makes a collective: if it raises before the collective, other ranks raise, too.

    name: the key in FORMS of a method that has several forms; the method gets the form with options.
    """
    forms = None if name is None else FORMS[name]

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def refusing(self: Group, *arguments: Any, **keywords: Any) -> Any:
            try:
                if forms is not None:
                    if len(keywords) == 1 and "opts" in keywords:  # dist.barrier passes them so
                        arguments, keywords = (*arguments, keywords["opts"]), {}
                    if keywords or not arguments or type(arguments[-1]) is not forms.options:
                        arguments, keywords = forms.resolve(arguments, keywords), {}
                return method(self, *arguments, **keywords)
            except NoElements:
                return self._do_nothing([*arguments, *keywords.values()])
            except Exception as error:
                self._refuse(kind, error)
                raised = as_in_gloo(error)
                _mark_reported(raised)
                try:
                    if raised is error:
                        raise
                    raise raised from None
                finally:
                    del raised  # its traceback has this frame

        return cast(_Method, refusing)

    return decorate


class _OneByOne(Backend):  # type: ignore[misc, unused-ignore]
    """The answer to torch's C++, which asks a group's backend whether it combines messages into one call."""

    supports_coalescing = False

    def getBackendName(self) -> str:
        return "shmring"


class Group(Reconfigurable, Derivable, dist.ProcessGroup):  # type: ignore[misc, unused-ignore]
    """One rank's membership in a process group; `comm` is its communicator."""

    _as_in_gloo = staticmethod(as_in_gloo)  # for the compiled methods
    _frames_to_caller = 1  # from `send`, `recv` and `recv_anysource`

    def __init__(
        self, comm: shmring.Comm | NoMembers, store: dist.Store, timeout: datetime.timedelta
    ) -> None:
        dist.ProcessGroup.__init__(self, comm.rank, comm.size)
        try:
            backend = _OneByOne(comm.rank, comm.size)
        except TypeError:
            pass  # before torch 2.14 Python cannot make a Backend
        else:
            self._register_backend(_CPU, dist.ProcessGroup.BackendType.CUSTOM, backend)
        self._first_store = store
        self._handle = new_handle()
        self._timeout_s = timeout.total_seconds()
        self._name = self._description = ""
        self._nsplits = 0
        self._calling = _compiled.CallLock()  # a communicator has one caller of collectives at a time, ...
        self._messaging = _compiled.CallLock()  # ... and one of messages
        self._unfinished = self._calling.unfinished  # with staged results, not yet waited for
        self._completer = Completer(f"shmring-futures-{id(self):x}")
        # Shared by all messages that are sent when `send` returns: making a Work takes longer than sending.
        self._sent = unknown_work_of(Operation((), [], self._completer))
        self._coalesced: list[Operation] | None = None
        self._begin(comm, store)

    def _begin(self, comm: Any, store: dist.Store) -> None:
        """Go on with this communicator, whose ranks share the store."""
        comm.linger_s = _LINGER_S
        self.comm = comm
        self._store = store
        self._nmonitored = 0

    # -- reductions --

    allreduce = _compiled.allreduce

    def _issue_all_reduce(self, tensors: list[Any], memory: shmring.Memory, op: Any) -> dist.Work:
        try:
            with self._calling:
                part = self.comm.all_reduce(memory, op, async_op=True)
        except (TypeError, ValueError) as error:
            raise as_in_gloo(error) from None
        operation = Operation((part,), tensors, self._completer)
        return self._answer(operation, _globals_of_caller(1))

    def _reduce_any_for_all(self, tensors: Any, opts: Any, timeout: Any, tensor: Any, op: Any) -> _Pending:
        """Reduce what is not one dense tensor, or is given in another form than with options."""
        given = {"timeout": timeout, "tensor": tensor, "op": op}
        if tensors is not None:
            given["tensor" if isinstance(tensors, torch.Tensor) else "tensors"] = tensors
        if opts is not None:
            given["opts" if isinstance(opts, c10d.AllreduceOptions) else "op"] = opts
        return self._reduce_for_all(**{name: value for name, value in given.items() if value is not None})

    @_refusing("all_reduce", "allreduce")
    def _reduce_for_all(self, tensors: Any, opts: Any) -> _Pending:
        taken, number = Taken(), hash(opts.reduceOp)
        if len(tensors) > 1:
            check_alike(tensors[1:], tensors[0], "the list of tensors", first=1)
            stage = _folded(tensors, number)
            for tensor in tensors:
                taken.copy_back(tensor, stage)
            return self._call(opts, taken, list(tensors), "all_reduce", stage_memory(stage), _op(number))
        tensor = _only(tensors)
        if tensor.is_sparse:
            return self._add_sparse(tensor, opts)
        memory = taken.changed(tensor) if number < _PREMUL_SUM else _multiplied(taken, tensor, opts.reduceOp)
        if self._is_whole_average(number, [tensor]):
            taken.divide(self.comm.size)
            # A call of another kind than a sum, so that ranks which ask for a sum raise Mismatch.
            return self._call(opts, taken, [tensor], "all_reduce_many", [memory], "sum")
        return self._call(opts, taken, [tensor], "all_reduce", memory, _op(number))

    def _is_whole_average(self, number: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a call averages integers: it adds them and divides the sums, rounded toward zero."""
        return number == _AVG and bool(tensors) and all(tensor.dtype in _INTEGERS for tensor in tensors)

    def _add_sparse(self, tensor: Any, opts: Any) -> _Pending:
        if hash(opts.reduceOp) != _SUM:
            raise ArgumentError("shmring only sums sparse tensors")

        def add_all() -> _Pending:
            calls, add = gather_entries(self.comm, tensor)
            operation = operation_of(calls, [tensor], self._completer, add)
            if opts.asyncOp:
                return self._answer(operation)
            operation.wait()
            return None

        with self._calling:
            return self.comm.run_steps(add_all)

    @_refusing("all_reduce")
    def allreduce_coalesced(self, tensors: Any, opts: Any = _ALLREDUCE_COALESCED) -> _Pending:
        taken, number = Taken(), hash(opts.reduceOp)
        if number >= _PREMUL_SUM:
            memories = [_multiplied(taken, tensor, opts.reduceOp) for tensor in tensors]
        else:
            memories = taken.all_changed(tensors)
        if self._is_whole_average(number, tensors):
            taken.divide(self.comm.size)
            number = _SUM
        return self._call(opts, taken, list(tensors), "all_reduce_many", memories, _op(number))

    @_refusing("reduce", "reduce")
    def reduce(self, tensors: Any, opts: Any) -> _Pending:
        tensor, taken, number = _only(tensors), Taken(), hash(opts.reduceOp)
        is_root = opts.rootRank == self.comm.rank
        if number >= _PREMUL_SUM:
            memory = _multiplied(taken if is_root else Taken(), tensor, opts.reduceOp)
        else:
            memory = taken.changed(tensor) if is_root else taken.given(tensor)
        if self._is_whole_average(number, [tensor]):
            taken.divide(self.comm.size)
            number = _SUM
        return self._call(opts, taken, [tensor], "reduce", memory, _op(number), opts.rootRank)

    @_refusing("reduce_scatter", "reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> _Pending:
        output, parts, taken = _only(outputs), _only(inputs), Taken()
        check_alike(parts, output, "the list of inputs")
        self._check_length(parts, "inputs")
        return self._reduce_scatter(opts, taken, output, parts, taken.joined(parts, given=True))

    reduce_scatter_single = _reduce_scatter_base = _compiled.reduce_scatter_single

    @_refusing("reduce_scatter")
    def _reduce_scatter_single_any(
        self, outputTensor: Any, inputTensor: Any, opts: Any = _REDUCE_SCATTER
    ) -> _Pending:
        taken = Taken()
        return self._reduce_scatter(opts, taken, outputTensor, [inputTensor], taken.given(inputTensor))

    @_refusing("reduce_scatter")
    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = _REDUCE_SCATTER
    ) -> _Pending:
        return self._each(opts, self._reduce_scatter_single_any, outputs, inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, opts: Any, taken: Taken, output: Any, inputs: Any, memory: Any) -> _Pending:
        number = hash(opts.reduceOp)
        if number >= _PREMUL_SUM:
            with plain_torch():
                whole = torch.cat([tensor.reshape(-1) for tensor in inputs])
                memory = stage_memory((whole * _factor(opts.reduceOp)).to(whole.dtype))
        out = taken.changed(output)
        if self._is_whole_average(number, [output, *inputs]):
            taken.divide(self.comm.size)
            number = _SUM
        return self._call(opts, taken, [output], "reduce_scatter", memory, _op(number), out=out)

    # -- moving --

    broadcast = _compiled.broadcast

    @_refusing("broadcast", "broadcast")
    def _broadcast_any(self, tensors: Any, opts: Any) -> _Pending:
        taken = Taken()
        if len(tensors) > 1:
            check_alike(tensors[1:], tensors[0], "the list of tensors", first=1)
        tensor = tensors[opts.rootTensor] if len(tensors) > opts.rootTensor >= 0 else _only(tensors)
        memory = taken.given(tensor) if opts.rootRank == self.comm.rank else taken.changed(tensor)
        for other in tensors:
            if other is not tensor:
                taken.copy_back(other, tensor)
        return self._call(opts, taken, list(tensors), "broadcast", memory, opts.rootRank)

    @_refusing("all_gather", "allgather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> _Pending:
        parts, tensor, taken = _only(outputs), _only(inputs), Taken()
        self._check_length(parts, "outputs")
        if all(part.numel() == tensor.numel() for part in parts):
            check_alike(parts, tensor, "the list of outputs")
            out = taken.joined(parts, given=False)
            return self._call(opts, taken, list(parts), "all_gather", taken.given(tensor), out=out)
        outs = [taken.changed(part) for part in parts]
        [given] = bytes_apart({self.comm.rank: taken.given(tensor)}, outs)
        return self._call(opts, taken, list(parts), "all_gather_v", given, out=list(map(bytes_of, outs)))

    all_gather_single = _allgather_base = _compiled.all_gather_single

    @_refusing("all_gather")
    def _all_gather_single_any(self, output: Any, input: Any, opts: Any = _ALLGATHER) -> _Pending:
        taken = Taken()
        out = taken.changed(output)
        return self._call(opts, taken, [output], "all_gather", taken.given(input), out=out)

    @_refusing("all_gather")
    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = _ALLGATHER) -> _Pending:
        """Copy rank r's input_list[k] to output_lists[r][k]."""
        by_input = [[outputs[k] for outputs in output_lists] for k in range(len(input_list))]
        return self._each(opts, self.allgather, [[parts] for parts in by_input], [[x] for x in input_list])

    @_refusing("all_gather")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = _ALLGATHER) -> _Pending:
        return self._each(opts, self._all_gather_single_any, outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_refusing("gather", "gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> _Pending:
        tensor, taken = _only(inputs), Taken()
        if opts.rootRank != self.comm.rank:
            return self._call(opts, taken, [], "gather", taken.given(tensor), opts.rootRank)
        parts = _only(outputs)
        self._check_length(parts, "outputs")
        check_alike(parts, tensor, "the list of outputs")
        out = taken.joined(parts, given=False)
        return self._call(opts, taken, list(parts), "gather", taken.given(tensor), opts.rootRank, out=out)

    @_refusing("gather")
    def gather_single(self, output: Any, input: Any, opts: Any = _GATHER) -> _Pending:
        """Gather into one tensor of the root; the other ranks' output is not used. From torch 2.14 on."""
        taken, root = Taken(), opts.rootRank
        if root != self.comm.rank:
            return self._call(opts, taken, [], "gather", taken.given(input), root)
        out = taken.changed(output)
        return self._call(opts, taken, [output], "gather", taken.given(input), root, out=out)

    gather_into_tensor = gather_single

    @_refusing("scatter", "scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> _Pending:
        output, taken = _only(outputs), Taken()
        out = taken.changed(output)
        given = None
        if opts.rootRank == self.comm.rank:
            parts = _only(inputs)
            self._check_length(parts, "inputs")
            check_alike(parts, output, "the list of inputs")
            given = taken.joined(parts, given=True)
        return self._call(opts, taken, [output], "scatter", given, opts.rootRank, out=out)

    @_refusing("all_to_all", "all_to_all_single")
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_lengths: Any,
        input_lengths: Any,
        opts: Any,
    ) -> _Pending:
        """Exchange rows. lengths: the rows for each rank, or empty if all are equal."""
        taken = Taken()
        out, given = taken.changed(output), taken.given(input)
        if not output_lengths and not input_lengths:
            for tensor, what in ((output, "output"), (input, "input")):
                if tensor.dim() > 0 and tensor.shape[0] % self.comm.size:
                    raise ArgumentError(
                        f"the {what} has {tensor.shape[0]} rows, which {self.comm.size} ranks cannot share "
                        "evenly; give split sizes"
                    )
            return self._call(opts, taken, [output], "all_to_all", given, out=out)
        [data] = bytes_apart({-1: given}, [out])  # -1: an input that overlaps the output is always copied
        pieces = self._rows(data, input, input_lengths, "input")
        outs = self._rows(bytes_of(out), output, output_lengths, "output")
        return self._call(opts, taken, [output], "all_to_all_v", pieces, out=outs)

    alltoall_base = all_to_all_single

    @_refusing("all_to_all", "alltoall")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> _Pending:
        taken = Taken()
        self._check_length(outputs, "outputs")
        self._check_length(inputs, "inputs")
        outs = [taken.changed(tensor) for tensor in outputs]
        given = bytes_apart({k: taken.given(tensor) for k, tensor in enumerate(inputs)}, outs)
        return self._call(opts, taken, list(outputs), "all_to_all_v", given, out=list(map(bytes_of, outs)))

    # -- one to one --

    def send(self, tensors: Any, dstRank: int, tag: int) -> dist.Work:
        begun, transfer = False, None
        try:
            tensor, taken = _only(tensors), Taken()
            memory = taken.given(tensor)
            with _profiled("send", tensors), self._messaging:
                begun = True
                transfer = self.comm.isend(memory, dstRank, tag)
                if transfer.done():
                    return self._sent
            message = Message(transfer, self._messaging, self._timeout_s, comm=self.comm)
            operation = Operation((message,), [tensor], self._completer)
            return self._answer(operation, _globals_of_caller(self._frames_to_caller))
        except NoElements:
            return self._sent
        except BaseException as error:
            self._fail_message(begun, transfer, error)

    def _fail_message(self, begun: bool, transfer: Any, error: BaseException) -> NoReturn:
        """Raise the error of a message as gloo does, where it refuses arguments.

        First end the communicator if a message is, or may be, under way without a Work. begun: isend or irecv
        was called. transfer: its result. If it has none, an error that it raises itself means that no message
        has begun. Other errors may be a signal handler's, so a RuntimeError of the call itself ends the
        communicator, too.
        """
        is_refusal = isinstance(error, (TypeError, ValueError))
        is_own = is_refusal or isinstance(error, (MemoryError, shmring.Error))
        if transfer is not None or (begun and not is_own):
            abort_message(self.comm, error)
        if is_refusal:
            raise as_in_gloo(cast(Exception, error)) from None
        raise error

    def recv(self, tensors: Any, srcRank: int, tag: int) -> dist.Work:
        if srcRank < 0:
            raise ArgumentError(f"srcRank is {srcRank}; the ranks are 0 to {self.comm.size - 1}")
        return self._receive(tensors, srcRank, tag, _globals_of_caller(self._frames_to_caller))

    def recv_anysource(self, tensors: Any, tag: int) -> dist.Work:
        caller = _globals_of_caller(self._frames_to_caller)
        return self._receive(tensors, shmring.ANY_SOURCE, tag, caller)

    def _receive(self, tensors: Any, source: int, tag: int, caller: dict[str, Any] | None) -> dist.Work:
        if tag < 0:  # -1 is shmring's wildcard
            raise ArgumentError(f"tag is {tag}; tags are not negative")
        begun, transfer = False, None
        try:
            tensor, taken = _only(tensors), Taken()
            memory = taken.changed(tensor)
            with _profiled("recv", tensors), self._messaging:
                begun = True
                transfer = self.comm.irecv(memory, source, tag)
            is_own, comm = source == self.comm.rank, self.comm
            message = Message(transfer, self._messaging, self._timeout_s, is_from_self=is_own, comm=comm)
            operation = operation_of((message,), [tensor], self._completer, taken.finish)
            return self._answer(operation, caller)
        except NoElements:
            return self._answer(Operation((), [tensor], self._completer), caller)
        except BaseException as error:
            self._fail_message(begun, transfer, error)

    # -- meeting --

    @_refusing("barrier", "barrier")
    def barrier(self, opts: Any) -> _Pending:
        work = self._call(opts, Taken(), [], "barrier")
        if work is None:
            self._finish_done(messages=True)
        return work

    def adopt(self, tensor: torch.Tensor) -> shmring.Adoption:
        """Share a tensor in torch's shared memory with all ranks by `Comm.adopt`. Collective."""
        memory = memory_of(tensor)
        if memory is None:
            raise ValueError("only a dense, contiguous CPU tensor can be adopted")
        with self._calling:
            return self.comm.adopt(memory)

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Run a barrier in which rank 0 reports the ranks that did not arrive in time; the group goes on.

        timeout: None means the group's. `torch.distributed.monitored_barrier` supports gloo only: call this
        method instead.
        """
        self._nmonitored += 1
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        monitored_barrier(self.comm, self._messaging, self._nmonitored, limit_s, wait_all_ranks)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of later calls."""
        if not isinstance(timeout, datetime.timedelta):
            raise TypeError(f"the timeout of a group is a datetime.timedelta, not {timeout!r:.80}")
        self.comm.timeout_s = self._timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        self.comm.abort("abort() of the process group")

    def shutdown(self) -> None:
        self._completer.close()
        self._finish_done(messages=True)
        self.comm.close()
        self._finish_done()  # calls for which `close` has waited

    # -- from arguments to calls --

    def _call(
        self, opts: Any, taken: Taken, result: list[torch.Tensor], kind: str, *arguments: Any, **keywords: Any
    ) -> _Pending:
        """Make one collective; return None if it is complete, else the Work of the call."""
        try:
            with _profiled(kind, result):
                return self._make(opts, taken, result, kind, *arguments, **keywords)
        except Exception as error:
            _mark_reported(error)  # by the communicator
            raise

    def _make(
        self, opts: Any, taken: Taken, result: list[torch.Tensor], kind: str, *arguments: Any, **keywords: Any
    ) -> _Pending:
        method = getattr(self.comm, kind)
        if isinstance(keywords.get("out"), shmring.Memory) and arguments[0] is not None:
            arguments = (apart(arguments[0], keywords["out"], self.comm.rank), *arguments[1:])
        keywords["timeout"] = _seconds(opts.timeout)
        if not opts.asyncOp:
            with self._calling:
                finish = taken.finish
                if finish is None:
                    method(*arguments, **keywords)
                else:  # an exception before the result is in place ends the communicator
                    self.comm.run_steps(self._make_and_finish, finish, method, arguments, keywords)
            self._finish_done()
            return None
        with self._calling:
            part = method(*arguments, async_op=True, **keywords)
        return self._answer(operation_of((part,), result, self._completer, taken.finish))

    def _make_and_finish(
        self,
        finish: Callable[[], None],
        method: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: dict[str, Any],
    ) -> None:
        method(*arguments, **keywords)
        self._finish_done()  # of earlier calls, which may have the same tensors
        finish()

    def _do_nothing(self, arguments: Sequence[Any]) -> _Pending:
        """Return what a complete call returns: the tensors of this one have no elements."""
        if any(getattr(argument, "asyncOp", None) is False for argument in arguments):
            return None
        return self._answer(Operation((), pytree.tree_leaves(arguments[0]), self._completer))

    def _answer(self, operation: Operation, caller: dict[str, Any] | None = None) -> dist.Work:
        """Record an issued operation and return its Work. caller: the globals of the caller's module."""
        if self._coalesced is not None:
            self._coalesced.append(operation)
        if isinstance(operation, StagedOperation):  # finish it even if no caller waits for it
            self._finish_done(messages=True)
            self._unfinished.append(operation)
        if caller is _OF_PYTHON:
            return work_of(operation)
        return self._work_of(operation)

    def _work_of(self, operation: Operation) -> dist.Work:
        caller = _calling_module()
        if caller == _OF_PYTHON["__name__"]:
            return work_of(operation)
        if caller and not caller.startswith("torch."):
            return unknown_work_of(operation)
        # The caller is torch's C++. The `wait` of a Work of `finished` takes no timeout, and some of torch's
        # Python gives one to messages.
        is_plain = not (isinstance(operation, StagedOperation) or operation.may_never_come)
        if is_plain and not are_any_halves(operation.tensors) and operation.has_succeeded():
            return finished(operation.tensors)
        return LentWork(operation)

    def _refuse(self, kind: Any, error: Exception) -> None:
        if _is_reported(error) or isinstance(error, shmring.Error):
            return
        with self._calling:
            self.comm.refuse(kind)

    def _each(self, opts: Any, call: Callable[..., _Pending], outputs: Any, inputs: Any) -> _Pending:
        """Make several calls as one: an exception after the first call ends the group.

        Refused arguments do not end it.
        """
        if len(outputs) != len(inputs):
            raise ValueError(f"there are {len(outputs)} outputs for {len(inputs)} inputs")

        def make_all() -> _Pending:
            works = [call(output, given, opts) for output, given in zip(outputs, inputs, strict=True)]
            return self._work_of(together(works, self._completer)) if opts.asyncOp else None

        with self._calling:
            self._calling.begin_steps()
            return self.comm.run_steps(make_all)

    def _finish_done(self, *, messages: bool = False) -> None:
        """Finish the results of all completed collectives: after a synchronous call, of all earlier ones.

        messages: finish received messages as well. This may wait for a thread that is in a call on messages.
        """
        for operation in tuple(self._unfinished):
            if (messages or not operation.may_never_come) and operation.is_completed():
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._unfinished.remove(operation)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        operations, self._coalesced = self._coalesced, None
        return self._work_of(together(operations or [], self._completer))

    def _check_length(self, tensors: Sequence[Any], what: str) -> None:
        if len(tensors) != self.comm.size:
            raise ArgumentError(
                f"there are {len(tensors)} {what} for {self.comm.size} ranks; give one for each"
            )

    def _rows(self, data: Any, tensor: torch.Tensor, lengths: Any, what: str) -> list[Any]:
        """Return the pieces of a tensor's bytes, lengths[r] rows for rank r."""
        size = self.comm.size
        nrows = tensor.shape[0] if tensor.dim() else 0
        lengths = lengths or [nrows // size] * size
        self._check_length(lengths, f"split sizes of the {what}")
        if sum(lengths) != nrows or min(lengths) < 0:
            raise ValueError(f"the split sizes of the {what} are {lengths}; it has {nrows} rows")
        row_nbytes = data.size // nrows if nrows else 0
        pieces, begin = [], 0
        for length in lengths:
            pieces.append(data[begin : begin + length * row_nbytes])
            begin += length * row_nbytes
        return pieces

    # -- the interface that torch reads --

    def getBackendName(self) -> str:
        return "shmring"

    name = _get_backend_name = getBackendName

    def rank(self) -> int:
        return self.comm.rank

    getRank = rank

    def size(self) -> int:
        return self.comm.size

    getSize = size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = _text(name)

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = _text(description)

    _set_group_desc = setGroupDesc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Group:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"a process group of shmring is for CPU tensors, not for tensors on {device}")
        return self

    @property
    def options(self) -> types.SimpleNamespace:
        """The options that torch reads of gloo's groups."""
        return types.SimpleNamespace(_timeout=self._timeout())

    use_pg_for_symm_mem_rendezvous = False
    supports_shrinking = supports_splitting = supports_coalescing = supports_time_estimate = (
        supports_window
    ) = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: all ranks are connected already."""

    def register_pre_hook(self, hook_id: int, hook: Any) -> None:
        # torch's dispatcher runs hooks, and no call of shmring passes it.
        raise RuntimeError("a process group of shmring runs no hooks before and after its calls")

    register_post_hook = register_pre_hook

    def memory_stats(self) -> Any:
        raise RuntimeError("a process group of shmring has no statistics of a device's memory")

    def suspend(self) -> None:
        raise RuntimeError("a process group of shmring cannot be suspended")

    def resume(self) -> None:
        raise RuntimeError("a process group of shmring cannot be suspended, and so not resumed")

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every call has a sequence number in any case."""

    def _get_sequence_number_for_group(self) -> int:
        return int(self.comm.stats()["calls"])

    def get_group_store(self) -> dist.Store:
        return self._store

    def __repr__(self) -> str:
        return f"<shmring's process group {self._name!r}: {self.comm!r}>"


# The error has the mark, since a group that kept its last error would keep the frames of the traceback, too.
def _mark_reported(error: Exception) -> None:
    """Note that the other ranks learn of the error without `refuse`."""
    error.__dict__["is_reported_by_shmring"] = True


def _is_reported(error: Exception) -> bool:
    return "is_reported_by_shmring" in error.__dict__


def _profiled(kind: str, tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Record a call in torch's profiler as "shmring:all_reduce", with its result, until it returns."""
    if not profiler._is_profiler_enabled:
        return _UNSEEN
    name = kind.removesuffix("_v").removesuffix("_many")
    recorded: contextlib.AbstractContextManager[Any] = _RecordFunctionFast(f"shmring:{name}", list(tensors))
    return recorded


def _globals_of_caller(depth: int) -> dict[str, Any] | None:
    """Return the globals `depth` frames above the method that calls this; None if there is no such frame.

    C++ calls methods also in threads that have no frames of Python.
    """
    try:
        return sys._getframe(depth + 1).f_globals
    except ValueError:
        return None


def _calling_module() -> str:
    """Return the name of the module that called the group: torch.distributed, another module, or "".

    A future's callback may itself make calls. These have the same order on all ranks only if the callback
    runs at once. Python callers may have such callbacks; DDP's buckets come from C++.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def _only(tensors: Sequence[Any]) -> Any:
    if isinstance(tensors, torch.Tensor):
        raise FormError("pass a list of one tensor, or lists of tensors, to the form of a call with options")
    if len(tensors) != 1:
        raise ArgumentError(f"a rank passed {len(tensors)} tensors, or lists of tensors; shmring takes one")
    return tensors[0]


def _op(number: int) -> str:
    return _OPS[number] if number < len(_OPS) else "sum"


def _folded(tensors: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    """Return a new tensor with the reduction of this rank's tensors, which is then reduced over the ranks."""
    fold = _FOLDS.get(number)
    if fold is None:
        raise ArgumentError(f"shmring does not reduce {len(tensors)} tensors of a rank by this op; pass one")
    with plain_torch():
        return functools.reduce(fold, tensors).contiguous()


def _factor(op: Any) -> Any:
    return op.factor if hasattr(op, "factor") else op.__getstate__()[1]


def _multiplied(taken: Taken, tensor: torch.Tensor, op: Any) -> Any:
    """Return the memory of a stage for PREMUL_SUM's product; the result is copied back to the tensor."""
    with plain_torch():
        stage = (tensor * _factor(op)).to(tensor.dtype).contiguous()
    taken.copy_back(tensor, stage)
    return stage_memory(stage)


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a group's name and its description are texts, not {name!r:.80}")
    return name


def _seconds(timeout: datetime.timedelta | None) -> float | None:
    """Return seconds, or None for the group's timeout, which torch's options express as a negative one."""
    return timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None


def hide_from_dynamo(*owners: type) -> None:
    """Make torch.compile skip the methods of these classes and everything that they call."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for owner in owners:
        for method in vars(owner).values():
            if hasattr(method, "__code__"):
                eval_frame.set_code_exec_strategy(method.__code__, skip)


hide_from_dynamo(Group, Operation, StagedOperation, Handle, Work, UnknownWork, LentWork)
