"""Tensors in the calls of a Comm: taken in C as `__dlpack__` describes them, or refused as it does."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_ranks import in_child

import shmring
from shmring._arrays import buffers, operands
from shmring._diagnostics import flight_recorder

DTYPES = [getattr(torch, name) for name in flight_recorder.DTYPES]
CAN_BE_NEGATIVE = [dtype for dtype in DTYPES if dtype.is_signed and dtype.itemsize > 1] + [
    torch.int8,
    torch.uint8,
]
VIEWS = {
    "itself": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1) if x.dim() else x,
    "part": lambda x: x[1:] if x.dim() else x,
    "every other": lambda x: x[..., ::2] if x.dim() else x,
    "column": lambda x: x[..., :1] if x.dim() else x,
    "expanded": lambda x: x.expand(3, *x.shape),
    "flat": lambda x: x.flatten(),
    "detached": lambda x: x.detach(),
    "conjugated": lambda x: x.conj(),
    "imaginary": lambda x: x.conj().imag if x.is_complex() else x,
    "real": lambda x: x.real,
    "negated": lambda x: torch._neg_view(x) if x.dtype in CAN_BE_NEGATIVE else x,
    "resolved": lambda x: x.resolve_neg().resolve_conj(),
    "learnt": lambda x: x.requires_grad_() if x.is_leaf and x.is_floating_point() else x,
}


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    x = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    for name in draw(st.lists(st.sampled_from(list(VIEWS)), max_size=3)):
        x = VIEWS[name](x)
    return x


def slowly(x):
    """Return the address, count and dtype that the slower way finds, or its error."""
    try:
        taken = buffers.take(x, "x", operands.tensor_in)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return taken.address if taken.count else 0, taken.count, taken.dtype, taken.fortran


@given(tensors())
def test_a_call_takes_what_the_slower_way_takes(x):
    wanted = slowly(x)
    memory = shmring.Memory.of(x)
    with shmring.init() as comm:
        if not isinstance(wanted[0], type):
            comm.broadcast(x)
            if memory is not None:  # else in Fortran order
                address = memory.address if memory.count else 0
                assert (address, memory.count, memory.dtype, False) == wanted
            out = torch.empty_like(x)
            comm.all_reduce(x, "max", out=out) if not x.is_complex() else comm.all_reduce(x, out=out)
            assert torch.equal(out.to(torch.complex128), x.to(torch.complex128))
            return
        error, words = wanted
        with pytest.raises(error) as raised:
            comm.broadcast(x)
        assert str(raised.value) == words
        assert memory is None or x.requires_grad


@pytest.mark.parametrize("dtype", CAN_BE_NEGATIVE)
def test_lazy_bits_are_refused_with_the_mend(dtype):
    x = torch._neg_view(torch.ones(3).to(dtype))
    with shmring.init() as comm:
        with pytest.raises(TypeError, match=r"x is lazily negated.* pass a = x\.resolve_neg\(\)"):
            comm.all_reduce(x)
        comm.broadcast(x.resolve_neg())
        if dtype.is_complex:
            with pytest.raises(TypeError, match=r"out is lazily conjugated.* a = out\.resolve_conj\(\)"):
                comm.all_reduce(x.resolve_neg(), out=torch.ones(3).to(dtype).conj())


class Own(torch.Tensor):
    """A subclass, whose attributes are those of the base."""


def wrapped():
    """Return a tensor that C++ wraps, whose elements are in no memory."""
    return torch._to_functional_tensor(torch.ones(3))


def made_fake():
    with FakeTensorMode():
        return torch.ones(3)


REFUSED = {
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "compressed": lambda: torch.ones(3, 3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "learnt": lambda: torch.ones(3, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "a column": lambda: torch.ones(3, 3)[:, 1],
    "functional": wrapped,
    "fake": made_fake,
}


@pytest.mark.filterwarnings("ignore")  # of torch: quantised tensors are deprecated, sparse ones in beta
@pytest.mark.parametrize("name", REFUSED)
def test_other_tensors_are_refused_as_the_slower_way_refuses_them(name):
    x = REFUSED[name]()
    with pytest.raises(Exception) as slow:  # noqa: PT011 the error is torch's
        buffers.take(x, "x", operands.tensor_in)
    with shmring.init() as comm:
        with torch.no_grad(), pytest.raises(type(slow.value)) as raised:
            comm.broadcast(x)
        assert str(raised.value) == str(slow.value)
        comm.barrier()


@pytest.mark.filterwarnings("ignore")  # of torch: complex32 is experimental
@pytest.mark.parametrize("name", ["complex32", "float8_e8m0fnu"])
def test_other_dtypes_are_refused(name):
    x = torch.empty(3, dtype=getattr(torch, name))
    assert shmring.Memory.of(x) is None
    with shmring.init() as comm, pytest.raises(TypeError, match="x has dtype"):
        comm.all_reduce(x)


def test_subclasses_are_taken():
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    with shmring.init() as comm:
        for x in (torch.ones(3).as_subclass(Own), frozen):
            comm.all_reduce(x, out=(out := torch.zeros(3)))
            assert out.tolist() == [1.0] * 3


@in_child
def give_transformed_tensors():
    refused = []
    with shmring.init() as comm:

        def reduce(x):
            try:
                comm.all_reduce(x)
            except Exception:
                refused.append(type(x).__name__)
            return x.sum()

        torch.func.vmap(reduce)(torch.ones(3, 2))
        torch.func.grad(reduce)(torch.ones(3))
    return refused


def test_a_transformed_tensor_is_refused():
    """In a transform a tensor is wrapped in C++: its type is still torch.Tensor."""
    assert give_transformed_tensors() == ["Tensor", "Tensor"]


def use_in_background(comm):
    torch.set_num_threads(1)
    x = torch.full((50_000,), comm.rank + 1.0)
    alive = weakref.ref(x)
    if comm.rank == 1:
        comm.recv(torch.zeros(1))
    work = comm.all_reduce(x, async_op=True)
    plan = comm.plan("all_reduce", x)
    elements = x.data  # another tensor of the same memory
    del x
    gc.collect()
    assert alive() is not None
    if comm.rank == 0:
        assert not work.done()
        comm.send(torch.zeros(1), 1)
    work.wait()
    plan()
    del work
    comm.all_reduce(elements, async_op=True).wait()  # the engine keeps its last Work
    assert alive() is not None  # for the plan
    del plan
    assert alive() is None
    return elements.unique().tolist()


def test_a_call_in_the_background_keeps_the_tensor(world_of):
    assert world_of(2)(use_in_background) == [[12.0], [12.0]]


def reduce_all_dtypes(comm):
    for dtype in DTYPES:
        x = torch.full((2, 3), comm.rank + 1).to(dtype)
        comm.all_reduce(x)
        wanted = 1 if dtype is torch.bool else comm.size * (comm.size + 1) // 2
        assert (x == torch.full((2, 3), wanted).to(dtype)).all(), dtype
        came = torch.zeros(3, dtype=dtype)
        comm.sendrecv(x[0], 1 - comm.rank, came)
        assert (came == x[0]).all()
    return True


def test_all_dtypes_are_reduced_and_sent(world_of):
    assert all(world_of(2)(reduce_all_dtypes))
