"""The fields of torch's options, read where torch keeps them and by their properties."""

import datetime
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.autograd import profiler

from shmring import Memory
from shmring.adapters import _compiled
from shmring.adapters._torch import fields, group

OPS = [getattr(dist.ReduceOp, name) for name in group._OP_NAMES_IN_TORCH]


def found():
    return fields.find_fields(c10d.AllreduceOptions, OPS)


@pytest.fixture(params=["memory", "properties"])
def ready(request):
    """The compiled function, prepared to read the fields in one of the two ways."""
    prepare = lambda places: _compiled.prepare_torch(  # noqa: E731
        c10d.AllreduceOptions, vars(profiler), group._OPS, Memory.of, places
    )
    prepare(found() if request.param == "memory" else None)
    yield
    prepare(found())


class Recorder:
    """Has the attributes that the function uses of a group."""

    def __init__(self):
        self.calls = []
        self._calling = _compiled.CallLock()
        self.comm = types.SimpleNamespace(all_reduce=lambda memory, op: self.calls.append((op, False)))

    def _issue_all_reduce(self, tensors, memory, op):
        self.calls.append((op, True))

    def _reduce_any_for_all(self, tensors, opts, timeout, tensor, op):
        self.calls.append("other")


def options_of(op, is_async, timeout):
    options = c10d.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, is_async
    if timeout is not None:
        options.timeout = timeout
    return options


def test_the_places_are_found_in_this_torch():
    assert found() is not None


@pytest.mark.parametrize("timeout", [None, datetime.timedelta(seconds=7), datetime.timedelta(0)])
def test_each_op_is_read(ready, timeout):
    for is_async in (False, True):
        for op, name in zip(OPS, group._OPS, strict=True):
            recorder = Recorder()
            _compiled.allreduce(recorder, [torch.ones(1)], options_of(op, is_async, timeout))
            assert recorder.calls == [(name, is_async)]


def test_options_that_are_set_again_are_read_again(ready):
    recorder, options = Recorder(), c10d.AllreduceOptions()
    for op, is_async in ((dist.ReduceOp.MAX, True), (dist.ReduceOp.SUM, False), (dist.ReduceOp.BXOR, True)):
        options.reduceOp, options.asyncOp = op, is_async
        _compiled.allreduce(recorder, [torch.ones(1)], options)
    assert recorder.calls == [("max", True), ("sum", False), ("bxor", True)]


def test_an_op_with_a_factor_is_left_to_the_other_method(ready):
    recorder, options = Recorder(), c10d.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    _compiled.allreduce(recorder, [torch.ones(1)], options)
    assert recorder.calls == ["other"]


@pytest.mark.parametrize("pointer", [0, 8, 32])
def test_another_layout_is_noticed(monkeypatch, pointer):
    """At these places there are a count, the type, and other fields of the Python object."""
    monkeypatch.setattr(fields, "_POINTER", pointer)
    assert found() is None


def test_another_kind_of_class_has_no_places():
    assert fields.find_fields(int, OPS) is None
    assert fields.find_fields(types.SimpleNamespace, OPS) is None
