"""Arrays that all ranks map: recognised in any view, mixed with private ones, returned, and valid after the
rest.

The tests also check the names in /dev/shm, and the descriptors and mappings that are left.
"""

import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from injections import places_when_dropped
from leftovers import names_in_shm
from ranks import Died, Ranks, until_there

import shmring
from shmring._arrays.allocator import Arrays, _Block
from shmring._system import segments

MIB = 1 << 20
LARGE = 24 * MIB


def own_shared_nbytes():
    """Return the bytes of shared memory that this process has mapped and touched."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10
    return pytest.skip("this kernel does not tell RssShmem")


def resources():
    """(descriptors, mappings of segments, children) of this process."""
    fds = os.listdir("/proc/self/fd")
    maps = Path("/proc/self/maps").read_text().splitlines()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(fds), sum("shmring" in line or "/dev/shm" in line for line in maps), len(children)


# ---- making -----------------------------------------------------------------------------------------------


def make_arrays(comm):
    a = comm.empty((3, 4), "f4")
    b = comm.zeros(7, np.int64)
    c = comm.full((2, 2), 1.5)
    d = comm.full(3, 7, "u1")
    e = comm.copy_of(np.arange(6.0).reshape(2, 3)[:, ::2])
    f = comm.empty((), ml_dtypes.bfloat16)
    g = comm.empty((0, 5))
    h = comm.copy_of([comm.rank, 2])
    assert (a == 0).all()
    assert (b == 0).all()
    arrays = (a, b, c, d, e, f, g, h)
    for array in arrays:
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.flags.aligned
        assert array.ctypes.data % 64 == 0 or array.size == 0
        comm.all_reduce(array)
    return [(array.shape, array.dtype.name, array.astype("f8").tolist()) for array in arrays]


@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_arrays_are_made_as_numpy_makes_them(world_of, segment):
    for found in world_of(2, SHMRING_SEGMENT=segment)(make_arrays):
        assert found == [
            ((3, 4), "float32", np.zeros((3, 4)).tolist()),
            ((7,), "int64", [0.0] * 7),
            ((2, 2), "float64", [[3.0, 3.0]] * 2),
            ((3,), "uint8", [14.0] * 3),
            ((2, 2), "float64", [[0.0, 4.0], [6.0, 10.0]]),
            ((), "bfloat16", 0.0),
            ((0, 5), "float64", []),
            ((2,), "int64", [1.0, 4.0]),
        ]


def test_a_block_is_mapped_while_its_last_array_goes():
    """Another thread closes the communicator between the lines that free the array's pages."""
    page, mapped = mmap.PAGESIZE, []
    fd = segments.create(2 * page, kind="memfd")
    block = _Block(segments.Mapping(fd, 2 * page), page, 0, 1)
    os.close(fd)

    class Flags:
        def __setitem__(self, rank, value):
            block.orphan()
            mapped.append(block.mapping.address != 0)

    block._freed = Flags()
    block.free_own_part()
    assert mapped == [True]
    assert block.mapping.address == 0


def make_in_a_world_of_one():
    with shmring.init() as comm:
        return comm.full(3, 2.0)


def test_a_world_of_one_has_them_too():
    x = make_in_a_world_of_one()
    assert (x == 2.0).all()


REFUSED = (
    ("empty", (3, object), TypeError),
    ("empty", (3, "no such type"), TypeError),
    ("zeros", (-3,), ValueError),
    ("empty", ((2, -1),), ValueError),
    ("empty", (3.7,), TypeError),
    ("empty", ("abc",), TypeError),
    ("empty", ((1,) * 65,), ValueError),
    ("zeros", ((0, 1 << 62),), ValueError),
    ("copy_of", (np.ma.masked_array([1.0, 2.0], [True, False]),), TypeError),
    ("full", (2, np.ma.masked_array([1.0, 2.0], [True, False])), TypeError),
    ("full", (3, object()), TypeError),
    ("full", (3, "no number", "f8"), ValueError),
    ("full", (3, [1.0, 2.0]), ValueError),
    ("full", (3, 1 << 70, "u1"), OverflowError),
    # NumPy 1 wraps it around and warns.
    *([("full", (3, 1000, "u1"), OverflowError)] if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else []),
    ("copy_of", ([{}, None],), TypeError),
    ("empty", (3, "f4", -1.0), TypeError),  # timeout is a keyword
)


def refuse(comm):
    for name, arguments, error in REFUSED:
        with pytest.raises(error):
            getattr(comm, name)(*arguments)
    return float(comm.copy_of(np.ones(3)).sum())


def test_an_impossible_request_is_refused_without_other_effects(world_of):
    assert world_of(2)(refuse) == [3.0] * 2


def make_on_rank_0(comm, name, arguments):
    if comm.rank == 0:
        getattr(comm, name)(*arguments)
    else:
        comm.empty(3)


@pytest.mark.parametrize(("name", "arguments", "error"), REFUSED[:-1])
def test_an_error_of_construction_is_a_mismatch_on_the_others(world_of, name, arguments, error):
    own, other = world_of(2).outcomes(make_on_rank_0, name, arguments)
    assert isinstance(own, error)
    assert isinstance(other, shmring.Mismatch)
    assert "refused" in other.calls[0]
    assert other.calls[1] == "empty(24 bytes)"


def different_sizes(comm):
    with pytest.raises(shmring.Mismatch) as caught:
        comm.empty(10 + comm.rank)
    return caught.value.calls


def test_ranks_that_want_different_sizes(world_of):
    assert world_of(2)(different_sizes) == [("empty(80 bytes)", "empty(88 bytes)")] * 2


def map_in_little(comm):
    """Rank 1 has room for little more than it has."""
    if comm.rank == 1:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (4 << 20), -1))
    messages = []
    for make in (comm.empty, comm.shared):
        with pytest.raises(shmring.OutOfMemory) as caught:
            make(1 << 24)
        messages.append((str(caught.value), caught.value.wanted_nbytes))
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    return messages, float(comm.copy_of(np.ones(3)).sum())


def test_lack_of_memory_on_one_rank_is_out_of_memory_on_all(world_of):
    for rank, (messages, after) in enumerate(world_of(3)(map_in_little)):
        for text, wanted_nbytes in messages:
            assert wanted_nbytes >= 1 << 27
            assert (f"a rank other than {rank} could not map" in text) == (rank != 1)
        assert after == 3.0


def fill(comm):
    return [
        comm.full((2, 3), [1, 2, 3], "f4").tolist(),
        comm.full(2, (1, 2.5), "i4,f8").tolist(),
        comm.full((), 7).tolist(),
        comm.full((2, 0), 7).tolist(),
        comm.empty(2, ("i4", (3,))).tolist(),
        comm.full((1, 2), np.array([[[1, 2]]])).tolist(),
    ]


def test_arrays_are_filled_as_numpy_fills_them(world_of):
    rows = [[1.0, 2.0, 3.0]] * 2
    for found in world_of(2)(fill):
        assert found == [rows, [(1, 2.5)] * 2, 7, [[], []], [[0, 0, 0]] * 2, [[1, 2]]]


def absurd(comm, shape):
    with pytest.raises(shmring.OutOfMemory) as caught:
        comm.empty(shape)
    assert isinstance(caught.value, MemoryError)
    x = comm.full(5000, 1.0)
    comm.all_reduce(x)
    return caught.value.wanted_nbytes, float(x[0])


@pytest.mark.parametrize("segment", ["memfd", "posix"])
@pytest.mark.parametrize("shape", [1 << 37, 1 << 45, 1 << 55, 1 << 59, 1 << 62, (1 << 40, 1 << 40)])
def test_out_of_memory_on_all_ranks_alike_and_the_communicator_remains(world_of, shape, segment):
    outcomes = world_of(3, SHMRING_SEGMENT=segment)(absurd, shape)
    assert len(set(outcomes)) == 1
    wanted, after = outcomes[0]
    assert wanted >= 8 * np.prod(np.array(shape, object))
    assert after == 3.0


# ---- use --------------------------------------------------------------------------------------------------


def paths_of_views(comm):
    """Return the kinds of views that are recognised as parts of a shared array."""
    whole = comm.full((6, 50, 40), comm.rank + 1.0)
    private = np.ones((50, 40))
    views = {
        "whole": whole,
        "row": whole[3],
        "rows": whole[1:4],
        "flat": whole.ravel()[777:9_777],
        "transposed": whole.T,
        "other dtype": whole.view("i4"),
        "ml_dtypes": whole.view(ml_dtypes.bfloat16),
        "memoryview": memoryview(whole),
        "reshaped": whole.reshape(-1, order="A"),
        "private": private,
        "mixed": whole[5] if comm.rank else private,
        "different offsets": whole[comm.rank],
        "out is private": (whole[2], private),
        "x is private": (private, whole[2]),
        "both": (whole[1], whole[4]),
    }
    found = {}
    for name, view in views.items():
        x, out = view if isinstance(view, tuple) else (view, None)
        comm.all_reduce(x, "bor" if name == "other dtype" else "max", out=out)
        found[name] = comm.stats()["path"]
    return found


def test_views_and_slices_are_recognised(world_of):
    for found in world_of(2, SHMRING_PATH="near")(paths_of_views):
        private = {name for name, path in found.items() if path != "zero_copy"}
        assert private == {"private", "mixed", "out is private", "x is private"}
        assert set(found.values()) == {"small", "zero_copy"}


def reduce_mixed(comm):
    """Reduce the same numbers, with shared arrays on some ranks and private arrays on others."""
    found = []
    for pattern in range(1 << comm.size):
        shared = comm.empty(5000)
        x = shared if pattern >> comm.rank & 1 else np.empty(5000)
        x[...] = np.arange(5000) * (comm.rank + 1)
        comm.all_reduce(x)
        found.append((comm.stats()["path"], bool((x == np.arange(5000) * 6).all())))
    return found


def test_shared_and_private_arrays_meet_in_one_call(world_of):
    for found in world_of(3, SHMRING_PATH="far")(reduce_mixed):
        assert found == [("far", True)] * 7 + [("zero_copy", True)]


def written_at_once(comm):
    """Let every rank write to its array as soon as a call is over; no rank is disturbed."""
    x, y = comm.empty(3000, "i8"), comm.empty(3000, "i8")
    for turn in range(200):
        x[...] = turn + comm.rank
        comm.all_reduce(x, out=y)
        x[...] = -1
        assert (y == comm.size * turn + sum(range(comm.size))).all(), turn
        comm.all_reduce(y, "max")
        y[...] = -turn
    return True


def test_arrays_may_be_written_again_as_soon_as_the_call_returns(world_of):
    for size in (2, 3, 5):
        assert all(world_of(size)(written_at_once))


# ---- giving back ------------------------------------------------------------------------------------------


def give_back(comm):
    """Own RssShmem: with an array, with a view of it only, without."""
    comm.barrier()
    before = own_shared_nbytes()
    x = comm.full(LARGE, 1, "u1")
    with_array = own_shared_nbytes() - before
    view = x[5:10]
    del x
    gc.collect()
    with_view = own_shared_nbytes() - before
    assert (view == 1).all()
    del view
    gc.collect()
    without = own_shared_nbytes() - before
    comm.barrier()
    return with_array, with_view, without


@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_memory_goes_with_the_last_reference(world_of, segment):
    for with_array, with_view, without in world_of(2, SHMRING_SEGMENT=segment)(give_back):
        assert with_array >= LARGE - MIB  # the kernel counts in batches
        assert with_view >= LARGE - MIB
        assert without < MIB


def give_back_alone(comm):
    """Let one rank release the array: its own part is freed, the other rank's part is unchanged."""
    before = own_shared_nbytes()
    x = comm.full(LARGE, comm.rank, "u1")
    if comm.rank == 0:
        del x
        gc.collect()
    comm.barrier()
    more = own_shared_nbytes() - before
    y = comm.full(3000, 1.0)
    comm.all_reduce(y)
    assert comm.rank == 0 or (x == 1).all()
    assert (y == 2).all()
    return more


def test_one_rank_gives_its_part_back_alone(world_of):
    first, second = world_of(2)(give_back_alone)
    assert first < MIB
    assert second >= LARGE - MIB


def allocate_often(comm, times):
    kept = comm.empty(100)
    comm.all_reduce(np.ones(1000))
    before = resources()
    for turn in range(times):
        x = comm.empty(1500 + turn, "u1")
        x[...] = 1
        if turn % 100 == 0:
            comm.all_reduce(x)
            assert (x == comm.size).all()
    del x
    gc.collect()
    comm.barrier()
    comm.empty(1)
    after = resources()
    return before, after, float(kept.sum())


@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_a_thousand_allocations_leave_nothing(world_of, segment):
    for before, after, _ in world_of(2, SHMRING_SEGMENT=segment)(allocate_often, 1000):
        assert after[0] == before[0]
        assert after[1] <= before[1] + 2


def allocate_past_32_bits(comm):
    (arrays,) = (held for held in gc.get_referents(comm) if isinstance(held, Arrays))
    oldest = comm.full(MIB, comm.rank + 1, "float32")  # number 1 remains in use
    arrays._last_id = (1 << 32) - 3
    for _ in range(4):
        x = comm.full(MIB, comm.rank, "float32")
        comm.all_reduce(x)
        assert (x == 1).all()
        assert comm.stats()["path"] == "zero_copy"
        sent, received = comm.isend(x, 1 - comm.rank), np.empty_like(x)
        comm.recv(received, 1 - comm.rank)
        sent.wait()
        assert (received == 1).all()
        assert all((piece == 1).all() for piece in comm.all_gather_v(x))
    comm.all_reduce(oldest)
    return float(oldest.min()), float(oldest.max())


def test_more_arrays_than_32_bits_can_number(world_of):
    """A program that makes an array in each step reaches that number within weeks."""
    assert world_of(2)(allocate_past_32_bits) == [(3.0, 3.0)] * 2


def test_they_outlive_the_communicator(world_of):
    ranks = world_of(2)
    assert ranks(use_after_close) == [(LARGE, True)] * 2


def use_after_close(comm):
    before = own_shared_nbytes()
    x = comm.full(LARGE, comm.rank + 1, "u1")
    comm.barrier()
    comm.close()
    total = int(x.sum(dtype="i8"))
    del x
    gc.collect()
    return total // (comm.rank + 1), own_shared_nbytes() - before < MIB


def fork_with_array(comm):
    """A forked child that lets go of the array, and one that writes to it."""
    x = comm.full(50_000, 7.0)
    for write in (False, True):
        pid = os.fork()
        if pid == 0:
            if write:
                x[0] = 8.0
            del x
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
    comm.barrier()
    comm.all_reduce(x)
    return float(x[1])


def test_a_forked_child_does_not_free_its_parents_arrays(world_of):
    assert world_of(2)(fork_with_array) == [14.0] * 2


def free_after_fork(comm):
    """The parent drops an array and releases another one; return what a child then finds in both."""
    x = comm.full(50_000, 7.0)
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    adopted = np.frombuffer(memory)
    adopted[...] = 3.0
    adoption = comm.adopt(shmring.Memory(adopted.ctypes.data, adopted.size, "float64", owner=adopted))
    begin, let_begin = os.pipe()
    result, give_result = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(begin, 1)
        os.write(give_result, bytes([int(x.min()), int(x.max()), int(adopted.min()), int(adopted.max())]))
        os._exit(0)
    del x
    adoption.release()
    comm.barrier()
    os.write(let_begin, b"x")
    found = list(os.read(result, 4))
    os.waitpid(pid, 0)
    for fd in (begin, let_begin, result, give_result):
        os.close(fd)
    return found


def test_a_forked_child_keeps_its_arrays_when_the_parent_frees_its_own(world_of):
    assert world_of(2)(free_after_fork) == [[7, 7, 3, 3]] * 2


def many_at_once(comm):
    """Hundreds of arrays alive, freed in another order than they were made."""
    rng = np.random.default_rng(7)
    arrays = [comm.full(1100, i, "f8") for i in range(300)]
    for i in rng.permutation(300)[:250]:
        arrays[i] = None
    more = [comm.full(1100, 1000 + i, "f8") for i in range(50)]
    for i, array in enumerate(arrays + more):
        if array is not None:
            want = i if i < 300 else 1000 + i - 300
            comm.all_reduce(array)
            assert comm.stats()["path"] == "zero_copy"
            assert (array == comm.size * want).all(), i
    return True


def test_hundreds_of_arrays_at_once(world_of):
    assert all(world_of(2)(many_at_once))


# ---- nothing left -----------------------------------------------------------------------------------------


def busy_with_arrays(comm, ready):
    kept = comm.full(LARGE, 1, "u1")
    private = np.ones(100_000)
    while True:
        comm.all_reduce(kept)
        comm.all_reduce(private)
        Path(ready).touch()


@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_nothing_is_left_when_everybody_is_killed(segment, tmp_path):
    ready, names = tmp_path / "ready", names_in_shm()
    with Ranks(3) as ranks:
        ranks.meet(SHMRING_SEGMENT=segment)
        ranks.begin(busy_with_arrays, str(ready))
        until_there(ready, ranks)
        assert names_in_shm() == names
        for rank in range(3):
            ranks.kill(rank, signal.SIGKILL)
        assert all(isinstance(outcome, Died) for outcome in ranks.answers())
    assert names_in_shm() == names


def reopen(comm):
    return resources()


@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_nothing_is_left_after_closing(world_of, segment):
    ranks = world_of(2, SHMRING_SEGMENT=segment)
    ranks(reopen)
    before = ranks.meet(SHMRING_SEGMENT=segment)(reopen)
    for _ in range(20):
        ranks.meet(SHMRING_SEGMENT=segment)(make_arrays)
    assert ranks.meet(SHMRING_SEGMENT=segment)(reopen) == before
    assert not names_in_shm()


def test_names_of_ml_dtypes_are_known_or_say_what_to_install(tmp_path):
    """NumPy knows them only once ml_dtypes is imported."""
    program = "import shmring; print(shmring.init().zeros(3, 'bfloat16').dtype)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.stdout == "bfloat16\n"
    (tmp_path / "ml_dtypes.py").write_text("raise ModuleNotFoundError")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.stderr.endswith("dtype 'bfloat16' is of the package ml_dtypes: pip install ml_dtypes\n")


def own_mapped_nbytes():
    with open("/proc/self/maps") as maps:
        places = [line.split()[0].split("-") for line in maps if "/memfd:shmring" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in places)


def drop_with_an_interrupt_at_each_point(comm):
    sys.unraisablehook = lambda _: None
    x, n = comm.empty(MIB, "u1"), 0
    del x
    for _ in range(2):
        comm.empty(0)
        comm.empty(1)
    before = own_mapped_nbytes()
    while True:
        n += 1
        places = places_when_dropped([comm.empty(MIB, "u1")], n)
        for _ in range(2):
            comm.empty(1)  # first frees the pages, then unmaps what all ranks have freed
        assert own_mapped_nbytes() < before + MIB, places
        if comm.all_reduce(not places, "min"):
            return n


def test_an_exception_while_an_array_goes_only_delays_the_rest():
    with Ranks(2) as ranks:
        assert min(ranks.meet()(drop_with_an_interrupt_at_each_point)) > 3


def use_after_it_is_dropped(comm):
    twin = comm.dup()
    arrays = [twin.full(100_000, 7.0), twin.full(3, 7.0)[1:]]
    twin.close()
    del twin
    gc.collect()
    return [float(array.sum()) for array in arrays]


def test_they_outlive_a_communicator_that_is_dropped(world_of):
    assert world_of(2)(use_after_it_is_dropped) == [[700_000.0, 14.0]] * 2
