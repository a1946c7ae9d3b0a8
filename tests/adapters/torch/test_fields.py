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

OPS = [getattr(dist.ReduceOp, name) for name in fields._OPS]


def prepare(has_places):
    _compiled.prepare_torch(
        vars(profiler),
        group._OPS,
        Memory.of,
        *(
            _compiled.Options(kind, fields.find_fields(kind) if has_places else None)
            for kind in group._OPTIONS
        ),
    )


@pytest.fixture(params=["memory", "properties"])
def ready(request):
    """The compiled methods, prepared to read the fields in one of the two ways."""
    prepare(has_places=request.param == "memory")
    yield
    prepare(has_places=True)


class Recorder:
    """Has the attributes that the compiled methods use of a group, and keeps the calls that they make."""

    def __init__(self):
        self.calls = []
        self._calling = _compiled.CallLock()
        self.comm = types.SimpleNamespace(
            rank=0,
            all_reduce=lambda memory, op: self.calls.append((op, memory.dtype)),
            broadcast=lambda memory, root: self.calls.append((root, memory.dtype)),
            all_gather=lambda memory, out: self.calls.append((out.count, memory.count)),
            reduce_scatter=lambda memory, op, out: self.calls.append((op, memory.count, out.count)),
        )

    def _issue_all_reduce(self, tensors, memory, op):
        self.calls.append((op, "issued"))

    def other(self, *arguments, **keywords):
        self.calls.append("other")

    _reduce_any_for_all = _broadcast_any = _all_gather_single_any = _reduce_scatter_single_any = other

    def call(self, method, *arguments):
        """Return what the method calls."""
        self.calls.clear()
        getattr(_compiled, method)(self, *arguments)
        return self.calls[0]


def options_of(kind, **values):
    options = kind()
    for name, value in {"asyncOp": False, **values}.items():
        setattr(options, name, value)
    return options


ONE, FOUR = torch.ones(1), torch.ones(4)
CALLS = {
    "allreduce": (c10d.AllreduceOptions, ([ONE],), ("sum", "float32")),
    "broadcast": (c10d.BroadcastOptions, ([ONE],), (0, "float32")),
    "all_gather_single": (c10d.AllgatherOptions, (FOUR, ONE), (4, 1)),
    "reduce_scatter_single": (c10d.ReduceScatterOptions, (ONE, FOUR), ("sum", 4, 1)),
}
TIMEOUTS = [datetime.timedelta(milliseconds=1), datetime.timedelta(days=40)]


@pytest.mark.parametrize("kind", group._OPTIONS)
def test_the_places_are_found_in_this_torch(kind):
    assert fields.find_fields(kind) is not None


@pytest.mark.parametrize("method", CALLS)
def test_a_plain_call_is_made(ready, method):
    kind, tensors, expected = CALLS[method]
    assert Recorder().call(method, *tensors, options_of(kind)) == expected
    assert Recorder().call(method, *tensors, options_of(kind, timeout=datetime.timedelta(0))) == expected


@pytest.mark.parametrize("method", CALLS)
def test_other_calls_are_left_to_the_group(ready, method):
    kind, tensors, _ = CALLS[method]
    assert Recorder().call(method, *tensors) == "other"
    for timeout in TIMEOUTS:
        assert Recorder().call(method, *tensors, options_of(kind, timeout=timeout)) == "other"
    if method == "allreduce":
        assert Recorder().call(method, *tensors, options_of(kind, asyncOp=True)) == ("sum", "issued")
    else:
        assert Recorder().call(method, *tensors, options_of(kind, asyncOp=True)) == "other"
    assert Recorder().call(method, *tensors, options_of(c10d.BarrierOptions)) == "other"


@pytest.mark.parametrize("method", CALLS)
def test_tensors_without_memory_of_their_own_are_left_to_the_group(ready, method):
    kind, tensors, _ = CALLS[method]
    apart = torch.ones(8)[::2]
    lists = [([apart],), ([],)] if len(tensors) == 1 else [(apart, tensors[1]), (tensors[0], apart)]
    for arguments in lists:
        assert Recorder().call(method, *arguments, options_of(kind)) == "other"


@pytest.mark.parametrize("method", ["allreduce", "reduce_scatter_single"])
def test_each_op_is_read(ready, method):
    kind, tensors, _ = CALLS[method]
    for op, name in zip(OPS, group._OPS, strict=True):
        assert Recorder().call(method, *tensors, options_of(kind, reduceOp=op))[0] == name
    integers = torch.ones(4, dtype=torch.int64)
    tensors = ([integers],) if method == "allreduce" else (integers[:1], integers)
    options = options_of(kind, reduceOp=dist.ReduceOp.AVG)
    assert Recorder().call(method, *tensors, options) == "other"
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    assert Recorder().call(method, *tensors, options) == "other"


def test_each_root_is_read(ready):
    kind = c10d.BroadcastOptions
    for root in (0, 1, 255, 256, 100_000, -1):
        assert Recorder().call("broadcast", [ONE], options_of(kind, rootRank=root)) == (root, "float32")
    assert Recorder().call("broadcast", [ONE], options_of(kind, rootTensor=1)) == "other"


def test_options_that_are_set_again_are_read_again(ready):
    recorder, options = Recorder(), c10d.AllreduceOptions()
    found = []
    for op, is_async in ((dist.ReduceOp.MAX, True), (dist.ReduceOp.SUM, False), (dist.ReduceOp.BXOR, True)):
        options.reduceOp, options.asyncOp = op, is_async
        found.append(recorder.call("allreduce", [ONE], options))
    assert found == [("max", "issued"), ("sum", "float32"), ("bxor", "issued")]


@pytest.mark.parametrize("kind", group._OPTIONS)
@pytest.mark.parametrize("pointer", [0, 8, 32])
def test_another_layout_is_noticed(monkeypatch, pointer, kind):
    """At these places there are a count, the type, and other fields of the Python object."""
    monkeypatch.setattr(fields, "_POINTER", pointer)
    assert fields.find_fields(kind) is None


def test_another_kind_of_class_has_no_places():
    assert fields.find_fields(int) is None
    assert fields.find_fields(types.SimpleNamespace) is None
