"""Objects between ranks: everything that pickles, of any size, arrays inside at full length, and refused
objects."""

import collections
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks

import shmring
from shmring._arrays import objects


@dataclasses.dataclass
class Model:
    name: str
    weights: list[np.ndarray]


def model(rank, count):
    weights = [np.full((count, 3), rank, "f4"), np.asfortranarray(np.eye(4)), np.zeros(0)]
    return Model(f"of rank {rank}", weights)


def same(a, b):
    return a.name == b.name and all(
        np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a.weights, b.weights, strict=True)
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=30,
)


@settings(max_examples=100)
@given(item=JSON)
def test_frames_hold_what_was_packed(item):
    assert objects.unpack(objects.pack(item)) == item


def test_arrays_come_back_writable_aligned_and_alone():
    item = {"a": np.arange(7.0), "b": [np.ones((3, 5), "c16"), np.array(3)], "c": bytearray(b"buffer")}
    frame = objects.pack(item)
    found = objects.unpack(frame)
    assert np.array_equal(found["a"], item["a"])
    assert np.array_equal(found["b"][0], item["b"][0])
    assert found["c"] == b"buffer"
    found["a"][0] = 9
    assert item["a"][0] == 0
    assert found["a"].flags.aligned
    assert np.shares_memory(found["a"], frame)


def test_the_pieces_of_a_frame_are_the_frame():
    item = [np.arange(7.0), np.zeros(0), {"a": np.ones(33, "u1")}, bytearray(100)]
    assert b"".join(objects.pieces_of(item)) == objects.pack(item).tobytes()


def arrays_of(dtype):
    for shape in [(), (0,), (3,), (2, 3), (0, 4), (2, 3, 4)]:
        for order in "CF":
            x = np.arange(np.prod(shape)).astype(dtype).reshape(shape, order=order)
            read_only = x.copy(order)
            read_only.flags.writeable = False
            yield from [x, x.T, x[..., ::2] if shape else x, read_only, x.view(Subclass)]


class Subclass(np.ndarray):
    pass


DTYPES = [*"?bhilqBHILQefdgFDG", ">f8", "M8[ns]", "S3", "U4", "O", [("a", "f4"), ("b", ">i2")]]


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("f8", metadata={"unit": "m"})], ids=str)
@pytest.mark.parametrize("wrap", [lambda x: [x, x], lambda x: {"x": ((x,), 1)}, lambda x: [0] * 20 + [x]])
def test_arrays_come_back_as_from_pickle(dtype, wrap):
    for x in arrays_of(dtype):
        found, wanted = objects.unpack(objects.pack(wrap(x))), pickle.loads(pickle.dumps(wrap(x), 5))
        assert describe(found) == describe(wanted)


def describe(item):
    """Return all that one can see of an object with arrays."""
    if isinstance(item, list) and len(item) == 2:
        return [describe(item[0]), item[0] is item[1]]
    if isinstance(item, list | tuple):
        return [describe(part) for part in item]
    if isinstance(item, dict):
        return {key: describe(part) for key, part in item.items()}
    if isinstance(item, np.ndarray):
        flags = [item.flags[name] for name in ("C_CONTIGUOUS", "F_CONTIGUOUS", "WRITEABLE")]
        return type(item), item.dtype, item.dtype.metadata, item.shape, flags, item.tolist()
    return item


def every_call(comm, counts):
    rank, size = comm.rank, comm.size
    own = model(rank, counts[rank])
    root = size - 1
    received = comm.broadcast_object(own if rank == root else None, root)
    everyone = comm.all_gather_object(own)
    gathered = comm.gather_object(own, 0)
    dealt = comm.scatter_object([model(r, counts[r]) for r in range(size)] if rank == root else None, root)
    wanted = [model(r, counts[r]) for r in range(size)]
    return {
        "broadcast": same(received, wanted[root]) and (rank != root or received is own),
        "all_gather": all(map(same, everyone, wanted)),
        "gather": all(map(same, gathered, wanted)) if rank == 0 else gathered is None,
        "scatter": same(dealt, wanted[rank]),
    }


@pytest.mark.parametrize("counts", [(0, 1, 2), (5, 5, 5), (100_000, 1, 300_000), (200_000, 200_000, 200_000)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_call(world_of, size, counts):
    for found in world_of(size)(every_call, counts):
        assert all(found.values()), found


class Unpicklable:
    def __reduce__(self):
        raise TypeError("no pickle of this")


def refused(comm):
    text = {}
    attempts = {
        "pickle": lambda: comm.all_gather_object(Unpicklable()),
        "root": lambda: comm.broadcast_object(1, comm.size),
        "items": lambda: comm.scatter_object([1], comm.rank),
        "no items": lambda: comm.scatter_object(None, comm.rank),
        "a dict": lambda: comm.scatter_object({0: "first", 1: "second"}, comm.rank),
        "a mapping": lambda: comm.scatter_object(collections.UserDict(first=0, second=1), comm.rank),
        "a text": lambda: comm.scatter_object("ab", comm.rank),
    }
    for name, attempt in attempts.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            attempt()
        text[name] = str(caught.value)
    comm.barrier()
    return text


def test_a_refusal_on_all_ranks_has_no_other_effect(world_of):
    for text in world_of(2)(refused):
        assert "no pickle" in text["pickle"]
        assert "root is 2" in text["root"]
        assert "1 items for 2 ranks" in text["items"]
        assert "items is None; give a list" in text["no items"]
        assert "items is a dict; give a list" in text["a dict"]
        assert "items is a UserDict; give a list" in text["a mapping"]
        assert "items is a str; give a list" in text["a text"]


def refused_by_one(comm):
    try:
        comm.broadcast_object(Unpicklable(), 0)
    except (TypeError, shmring.Mismatch) as error:
        return type(error).__name__
    return None


def test_a_pickling_error_on_the_root_is_a_mismatch_on_the_others():
    with Ranks(3) as ranks:
        assert ranks.meet()(refused_by_one) == ["TypeError", "Mismatch", "Mismatch"]
