"""Convert torch tensors to the memory that shmring's collectives take, and copy results back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from shmring import Memory

from .. import _compiled

# Return a tensor's own memory; None if its elements are stored there in another order, negated or conjugated.
memory_of = Memory.of


class ArgumentError(ValueError, RuntimeError):
    """For tensors, ranks, tags and sizes that are wrong; gloo raises RuntimeError for them."""


class DtypeError(TypeError, RuntimeError):
    """For a dtype that an op does not have, and other wrong types; gloo raises RuntimeError for most."""


class WaitTimeout(TimeoutError, RuntimeError):
    """For a call that goes on after the timeout of `Work.wait`; gloo raises RuntimeError."""


def as_in_gloo(error: Exception) -> Exception:
    """Return the error of a wrong argument, or of a wait, as a RuntimeError; other errors as they are."""
    kinds: dict[type, type[Exception]] = {
        ValueError: ArgumentError,
        TypeError: DtypeError,
        TimeoutError: WaitTimeout,
    }
    kind = kinds.get(type(error))
    return error if kind is None else kind(*error.args).with_traceback(error.__traceback__)


class NotServed(Exception):
    """A tensor of a kind that shmring does not take; raised before the call has begun."""


class NoElements(Exception):
    """A meta tensor or a fake one, which has no elements: the call does nothing, as with gloo."""


class _OtherTensor(NotServed, ArgumentError):
    """A tensor on another device than the CPU, or of another layout."""


class _OtherDtype(NotServed, DtypeError):
    """A tensor of a dtype that shmring does not know."""


@contextlib.contextmanager
def plain_torch(*, inference: bool = True) -> Iterator[None]:
    """Disable the caller's torch modes, overrides and gradients within the block.

    inference: True if the tensors that the block makes stay within the adapter, and may be inference tensors.
    """
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(inference),
        torch.no_grad(),
    ):
        yield


class Taken:
    """The memories of one call's tensors, and what is left to do to the results when it is complete."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._in_place: list[torch.Tensor] = []
        self._divisor = 1

    def given(self, tensor: torch.Tensor) -> Memory:
        """Return memory of a tensor that is only read."""
        return _own_memory(tensor) or stage_memory(_staged(_behind(tensor)))

    def changed(self, tensor: torch.Tensor) -> Memory:
        """Return memory of a tensor that is written."""
        return self._changed(tensor, _own_memory(tensor))

    def _changed(self, tensor: torch.Tensor, own: Memory | None) -> Memory:
        """Return the tensor's own memory, or if it is None that of a copy."""
        if own is not None:
            self._in_place.append(tensor)
            return own
        tensor = _behind(tensor)
        _check_elements(tensor)  # only a dense tensor has strides
        dimensions = zip(tensor.shape, tensor.stride(), strict=True)
        if any(length > 1 and stride == 0 for length, stride in dimensions):
            raise ValueError(
                "an expanded tensor has no room for a result; pass tensor.contiguous() and use that"
            )
        stage = _staged(tensor)
        self.copy_back(tensor, stage)
        return stage_memory(stage)

    def all_changed(self, tensors: Sequence[torch.Tensor]) -> list[Memory]:
        """Return disjoint memories of tensors that are written: copies of those that overlap others.

        So each tensor gets the result for its values before the call, as with gloo.
        """
        memories = list(map(_own_memory, tensors))
        spans = sorted((*_span(own), number) for number, own in enumerate(memories) if own is not None)
        last = 0
        for begin, end, number in spans:
            if begin < last:
                memories[number] = None
            else:
                last = end
        return list(map(self._changed, tensors, memories))

    def copy_back(self, tensor: torch.Tensor, stage: torch.Tensor) -> None:
        """Register a copy from stage to tensor, made when the call is complete."""
        self._copies.append((tensor, stage))

    def divide(self, divisor: int) -> None:
        """Register a division of all results, which are integers, toward zero, at the end of the call."""
        self._divisor = divisor

    def joined(self, tensors: Sequence[torch.Tensor], *, given: bool) -> Memory:
        """Return one memory for tensors of one length and dtype: their own if adjacent, else a stage.

        given: True if the tensors are read; else they are written at the end.
        """
        side_by_side = _side_by_side(tensors)
        if side_by_side is not None:
            return side_by_side
        for tensor in tensors:
            _check_elements(tensor)
        with plain_torch():
            stage = torch.empty((len(tensors), tensors[0].numel()), dtype=tensors[0].dtype)
            for row, tensor in zip(stage, tensors, strict=True):
                if given:
                    row.copy_(tensor.reshape(-1))
                else:
                    self.copy_back(tensor, row.view(tensor.shape))
        return stage_memory(stage)

    @property
    def finish(self) -> Callable[[], None] | None:
        """Return the function to call when the call is complete; None if there is nothing to do."""
        return self._finish if self._copies or self._divisor > 1 else None

    def _finish(self) -> None:
        with plain_torch():
            if self._divisor > 1:
                for result in (*self._in_place, *(stage for _, stage in self._copies)):
                    result.div_(self._divisor, rounding_mode="trunc")
            for tensor, stage in self._copies:
                tensor.copy_(stage)
        self._copies.clear()
        self._in_place.clear()


def check_alike(tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str, *, first: int = 0) -> None:
    """Raise ArgumentError unless all have the dtype and the number of elements of `like`.

    first: the number of the first of them in the list that the user passed.
    """
    for number, tensor in enumerate(tensors, first):
        if tensor.dtype != like.dtype or tensor.numel() != like.numel():
            raise ArgumentError(
                f"{what}[{number}] is {tensor.dtype}[{tensor.numel()}]; "
                f"the others and this rank's tensor are {like.dtype}[{like.numel()}]"
            )


def bytes_of(memory: Memory) -> np.ndarray[Any, Any]:
    """Return the memory as a NumPy array of bytes, for calls whose pieces differ in length."""
    owners: list[Any] = memory.owner if isinstance(memory.owner, list) else [memory.owner]
    # The tensor alone does not keep its memory: `tensor.data = other` frees it.
    held = [memory, *(owner.untyped_storage() for owner in owners)]
    return Memory(memory.address, memory.nbytes, "uint8", owner=held).__array__()


def apart(given: Memory, out: Memory, rank: int) -> Memory:
    """Return `given`, or a copy of it if a call may not read it while it writes `out`.

    shmring takes an input that begins where this rank's part of the output does; gloo takes any overlap.
    """
    if _compiled.fits(given, out, rank):
        return given
    copy = bytes_of(given).copy()
    return Memory(copy.__array_interface__["data"][0], given.count, given.dtype, owner=copy)


def bytes_apart(given: dict[int, Memory], outs: Sequence[Memory]) -> list[np.ndarray[Any, Any]]:
    """Return the bytes of inputs, copied if they overlap an output. given[k] may begin where outs[k] does."""
    spans = [_span(out) for out in outs]
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    found = []
    for place, memory in given.items():
        begin, end = _span(memory)
        is_apart = (
            end <= first
            or last <= begin
            or all(
                end <= out_begin or out_end <= begin or (number == place and begin == out_begin)
                for number, (out_begin, out_end) in enumerate(spans)
            )
        )
        found.append(bytes_of(memory) if is_apart else bytes_of(memory).copy())
    return found


def _span(memory: Memory) -> tuple[int, int]:
    """Return the address of the first byte and that of the byte behind the last."""
    begin = memory.address
    return begin, begin + memory.nbytes


def _own_memory(tensor: torch.Tensor) -> Memory | None:
    return memory_of(tensor) or memory_of(_behind(tensor))


def _behind(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself; wait for it first if it is the result of a functional collective."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def _check_elements(tensor: torch.Tensor) -> None:
    """Raise NotServed unless the tensor is dense and on the CPU; NoElements for a meta or fake tensor."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        raise NoElements
    if not tensor.is_cpu:
        raise _OtherTensor(
            f"shmring takes CPU tensors, not tensors on {tensor.device}; use the accelerator's own backend "
            "for its tensors, and shmring for CPU tensors"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise _OtherTensor(f"this call takes dense tensors, not {kind} tensors; convert it to a dense one")


def check_kind(tensor: torch.Tensor) -> None:
    """Raise NotServed for a tensor on another device, or of a layout or dtype that shmring does not take."""
    if memory_of(tensor) is None:
        with contextlib.suppress(NoElements), plain_torch():
            _check_elements(tensor)
            stage_memory(torch.empty(0, dtype=tensor.dtype))


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    _check_elements(tensor)
    if tensor.data_ptr() == 0 and tensor.numel() > 0:
        raise ValueError(
            f"a {type(tensor).__name__} of {tensor.numel()} elements has no memory of its own: pass the "
            "underlying tensor, such as DTensor.to_local()"
        )
    with plain_torch():
        return tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


def stage_memory(stage: torch.Tensor) -> Memory:
    """Return the memory of a tensor that is made for a call: contiguous, on the CPU."""
    memory = Memory.of(stage)
    if memory is None:
        _check_elements(stage)
        raise _OtherDtype(
            f"shmring has no {stage.dtype}; convert the tensor, or send its bytes: .view(torch.uint8)"
        )
    return memory


def _side_by_side(tensors: Sequence[torch.Tensor]) -> Memory | None:
    first = memory_of(tensors[0])
    if first is None:
        return None
    for number, tensor in enumerate(tensors[1:], 1):
        if tensor.data_ptr() != first.address + number * first.nbytes or memory_of(tensor) is None:
            return None
    if tensors[0].untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return None
    return Memory(first.address, first.count * len(tensors), first.dtype, owner=list(tensors))
