"""Numbers of Python and NumPy in reductions, and what is said about arguments that cannot be used."""

import numpy as np
import pytest

import shmring
from shmring._system.limits import size_text


def reduced(comm, numbers, op, kind):
    return getattr(comm, kind)(numbers[comm.rank], op)


def assert_same(got, wanted):
    assert [type(one) for one in got] == [type(one) for one in wanted]
    assert got == wanted


@pytest.mark.parametrize(
    ("numbers", "op", "wanted"),
    [
        ([3, 4, 5], "sum", 12),
        ([3.5, 4.0, 5.0], "max", 5.0),
        ([1 + 2j, 3j, 1.0 + 0j], "sum", 2 + 5j),
        ([True, False, True], "land", False),
        ([np.float32(1), np.float32(2), np.float32(6)], "avg", np.float32(3)),
        ([np.uint8(200), np.uint8(100), np.uint8(1)], "sum", np.uint8(45)),
    ],
)
def test_a_number_is_reduced_to_a_number_of_its_type(world_of, numbers, op, wanted):
    world = world_of(3)
    assert_same(world(reduced, numbers, op, "all_reduce"), [wanted] * 3)
    assert_same(world(reduced, numbers, op, "reduce"), [wanted, None, None])


def test_scans_of_numbers(world_of):
    world = world_of(3)
    assert_same(world(reduced, [1, 2, 3], "sum", "scan"), [1, 3, 6])
    assert_same(world(reduced, [1, 2, 3], "sum", "exscan"), [None, 1, 3])


def test_one_rank(world_of):
    assert_same(world_of(1)(reduced, [2.5], "prod", "all_reduce"), [2.5])


def in_the_background(comm):
    works = [comm.all_reduce(comm.rank + 0.5, async_op=True), comm.reduce(comm.rank, root=1, async_op=True)]
    return [work.result() for work in works]


def test_in_the_background(world_of):
    first, second = world_of(2)(in_the_background)
    assert_same(first, [2.0, None])
    assert_same(second, [2.0, 1])


def into(comm):
    out = np.zeros((), "f4")
    return comm.all_reduce(np.float32(comm.rank + 1), out=out), float(out)


def test_with_out_the_result_is_there_only(world_of):
    assert world_of(2)(into) == [(None, 3.0)] * 2


def mixed(comm):
    with pytest.raises(shmring.Mismatch) as raised:
        comm.all_reduce(1 if comm.rank else 1.0)
    return str(raised.value)


def test_int_and_float_are_a_mismatch(world_of):
    for text in world_of(2)(mixed):
        assert "int64" in text
        assert "float64" in text


def refusals(comm):
    """Every rank refuses alike, so the communicator goes on."""
    masked = np.ma.array([1.0, 2.0], mask=[0, 1])
    calls = [
        lambda: comm.all_reduce(2**70),
        lambda: comm.all_reduce("abc"),
        lambda: comm.all_reduce(masked),
        lambda: comm.all_reduce(masked[1]),
        lambda: comm.broadcast(masked),
        lambda: comm.all_reduce(np.ones(2), out=masked),
        lambda: comm.scatter(None, root=comm.rank),
        lambda: comm.all_reduce(1.0, op="nonsense"),
    ]
    texts = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        texts.append(str(raised.value))
    assert comm.all_reduce(1) == comm.size
    return texts


def test_what_cannot_be_used_is_refused_with_a_way_out(world_of):
    texts = world_of(2)(refusals)[0]
    wanted = ["64 bits", "broadcast_object", *["filled"] * 4, "pass one with rows", "nonsense"]
    for text, words in zip(texts, wanted, strict=True):
        assert words in text


@pytest.mark.parametrize(
    ("make", "way"), [(shmring.Comm, "shmring.init"), (lambda: shmring.World(3), "shmring.world(nprocs)")]
)
def test_classes_say_who_makes_them(make, way):
    with pytest.raises(TypeError) as raised:
        make()
    assert way in str(raised.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1000, "1000 bytes"),
        (1536, "1.5 KiB"),
        (300 << 20, "300 MiB"),
        ((1 << 34) - 1, "16 GiB"),
        (1 << 60, "1 EiB"),
        (1 << 72, "4096 EiB"),
    ],
)
def test_sizes_are_in_the_unit_that_a_person_reads(nbytes, text):
    assert size_text(nbytes) == text
