"""The forms in which torch binds the methods of a process group: with an options object or single options.

torch's C++ and its Python pass an options object as the last argument. All other calls are brought into that
form here.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_tensor, value))


def _are_lists(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_list, value))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_rank(value: Any) -> bool:
    return isinstance(value, int)


def _is_op(value: Any) -> bool:
    return isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType))


def _is_time(value: Any) -> bool:
    return value is None or isinstance(value, datetime.timedelta)


class FormError(TypeError):
    """For a call in none of the forms of its method; torch raises TypeError for one."""


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "tensor": _is_tensor,
    "tensors": _is_list,
    "lists": _are_lists,
    "sizes": _are_numbers,
    "rank": _is_rank,
    "op": _is_op,
    "time": _is_time,
}
# The parameters that are fields of the options.
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


@dataclass(frozen=True)
class Form:
    """One form of a method.

    parameters: by name, the kind of the values; "?" if the parameter may be left out. wraps: True if the form
    with options takes each of this form's arguments in a list.
    """

    parameters: Mapping[str, str]
    wraps: bool = False

    def bind(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the values by name, or None if the call has another form."""
        if len(arguments) > len(self.parameters):
            return None
        given = dict(zip(self.parameters, arguments, strict=False))
        if given.keys() & keywords.keys() or not keywords.keys() <= self.parameters.keys():
            return None
        given.update(keywords)
        for name, kind in self.parameters.items():
            if name not in given:
                if not kind.endswith("?"):
                    return None
            elif not _CHECKS[kind.removesuffix("?")](given[name]):
                return None
        return given

    def __str__(self) -> str:
        return f"({', '.join(f'{name}: {kind}' for name, kind in self.parameters.items())})"


@dataclass(frozen=True)
class Forms:
    """All forms of one method, whose last parameter may be an options object of the class `options`."""

    options: type
    positional: Mapping[str, str]  # the parameters before the options
    others: tuple[Form, ...]

    def resolve(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of the same call with options. FormError if it has none of the forms."""
        arguments, keywords = list(arguments), dict(keywords)
        opts = keywords.pop("opts", None)
        if opts is None and arguments and isinstance(arguments[-1], self.options):
            opts = arguments.pop()
        with_options = Form(self.positional)
        given = with_options.bind(arguments, keywords)
        if given is not None and (opts is None or isinstance(opts, self.options)):
            return (*(given[name] for name in self.positional), self.options() if opts is None else opts)
        if opts is None:
            for form in self.others:
                given = form.bind(arguments, keywords)
                if given is not None:
                    return self._with_options(form, given)
        known = " or ".join(
            map(str, (Form({**self.positional, "opts": self.options.__name__ + "?"}), *self.others))
        )
        passed = [type(value).__name__ for value in arguments]
        passed += [f"{name}={type(value).__name__}" for name, value in keywords.items()]
        raise FormError(f"the arguments are ({', '.join(passed)}); this method takes {known}")

    def _with_options(self, form: Form, given: dict[str, Any]) -> tuple[Any, ...]:
        opts = self.options()
        for name, field in _FIELDS.items():
            if given.get(name) is not None:
                setattr(opts, field, given[name])
        values = [given[name] for name in form.parameters if name not in _FIELDS]
        return (*([value] if form.wraps else value for value in values), opts)


_ALL_TO_ALL = {
    "output": "tensor",
    "input": "tensor",
    "output_split_sizes": "sizes",
    "input_split_sizes": "sizes",
}
FORMS = {
    "allreduce": Forms(
        c10d.AllreduceOptions,
        {"tensors": "tensors"},
        (
            Form({"tensors": "tensors", "op": "op?", "timeout": "time?"}),
            Form({"tensor": "tensor", "op": "op?", "timeout": "time?"}, wraps=True),
        ),
    ),
    "reduce": Forms(
        c10d.ReduceOptions,
        {"tensors": "tensors"},
        (Form({"tensor": "tensor", "root": "rank", "op": "op?", "timeout": "time?"}, wraps=True),),
    ),
    "broadcast": Forms(
        c10d.BroadcastOptions,
        {"tensors": "tensors"},
        (Form({"tensor": "tensor", "root": "rank", "timeout": "time?"}, wraps=True),),
    ),
    "allgather": Forms(
        c10d.AllgatherOptions,
        {"output_tensors": "lists", "input_tensors": "tensors"},
        (Form({"output_tensors": "tensors", "input_tensor": "tensor", "timeout": "time?"}, wraps=True),),
    ),
    "gather": Forms(
        c10d.GatherOptions,
        {"output_tensors": "lists", "input_tensors": "tensors"},
        (
            Form(
                {"output_tensors": "tensors", "input_tensor": "tensor", "root": "rank", "timeout": "time?"},
                wraps=True,
            ),
        ),
    ),
    "scatter": Forms(
        c10d.ScatterOptions,
        {"output_tensors": "tensors", "input_tensors": "lists"},
        (
            Form(
                {"output_tensor": "tensor", "input_tensors": "tensors", "root": "rank", "timeout": "time?"},
                wraps=True,
            ),
        ),
    ),
    "reduce_scatter": Forms(
        c10d.ReduceScatterOptions,
        {"output_tensors": "tensors", "input_tensors": "lists"},
        (Form({"output": "tensor", "input": "tensors", "op": "op?", "timeout": "time?"}, wraps=True),),
    ),
    "all_to_all_single": Forms(
        c10d.AllToAllOptions, _ALL_TO_ALL, (Form({**_ALL_TO_ALL, "timeout": "time?"}),)
    ),
    "alltoall": Forms(c10d.AllToAllOptions, {"output_tensors": "tensors", "input_tensors": "tensors"}, ()),
    "barrier": Forms(c10d.BarrierOptions, {}, (Form({"timeout": "time?"}),)),
}
