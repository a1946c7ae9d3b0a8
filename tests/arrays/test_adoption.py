"""Arrays of other libraries that all ranks map in place: their contents and their lifetime."""

import contextlib
import errno
import gc
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from injections import places_when_dropped
from ranks import Ranks, until_stopped, until_there

import shmring
from shmring._arrays import allocator
from shmring._system import segments

PAGES = 100
NBYTES = PAGES * mmap.PAGESIZE


def own_array(kind="shared", nbytes=NBYTES):
    """An array of bytes that is a mapping of its own, and never touches another of its kind."""
    how = mmap.MAP_SHARED if kind == "shared" else mmap.MAP_PRIVATE
    fd = os.memfd_create("of another library")
    os.ftruncate(fd, nbytes)
    mapping = mmap.mmap(fd, nbytes, how)
    os.close(fd)
    return np.frombuffer(mapping, "u1")


def memory_of(array):
    return shmring.Memory(array.ctypes.data, array.nbytes, "uint8", owner=array)


def adopt(comm, kind="shared"):
    array = own_array(kind)
    array[:] = comm.rank + 1
    return array, comm.adopt(memory_of(array))


def use(comm, kind):
    array, adoption = adopt(comm, kind)
    assert (array == comm.rank + 1).all()
    numbers = array.view("f4")
    numbers[:] = comm.rank
    before = comm.stats()["paths"]["zero_copy"]
    comm.all_reduce(numbers)
    comm.all_reduce(numbers[5:-7], "max")
    assert (numbers == sum(range(comm.size))).all()
    assert comm.stats()["paths"]["zero_copy"] == before + 2
    private = np.full(numbers.size, float(comm.rank), "f4")
    comm.all_reduce(private, out=numbers)
    assert (numbers == sum(range(comm.size))).all()
    other = comm.empty(numbers.size, "f4")
    comm.all_reduce(numbers, out=other)
    assert (other == numbers * comm.size).all()
    before = comm.stats()["paths"]["zero_copy"]
    adoption.release()
    assert (numbers == sum(range(comm.size))).all()
    numbers[:] = comm.rank
    comm.barrier()
    comm.all_reduce(numbers)
    assert (numbers == sum(range(comm.size))).all()
    assert comm.stats()["paths"]["zero_copy"] == before
    adoption.release()


@pytest.mark.parametrize("kind", ["shared", "private"])
@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_adopted_arrays_are_reduced_in_place(kind, segment):
    with Ranks(3) as ranks:
        ranks.meet(SHMRING_SEGMENT=segment)(use, kind)


def adopt_again_and_again(comm):
    array = own_array()
    before = _mapped()
    for number in range(20):
        adoption = comm.adopt(memory_of(array))
        array[:] = number
        comm.all_reduce(array, "max")
        assert (array == number).all()
        if number % 2:
            adoption.release()
        del adoption
        gc.collect()
    comm.barrier()
    comm.empty(1)  # this frees the arrays that all ranks have returned
    return _mapped() - before


def _mapped():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("shmring" in line and "rw-s" in line for line in lines)


def test_nothing_is_left_of_those_that_were_given_back():
    with Ranks(2) as ranks:
        assert max(ranks.meet()(adopt_again_and_again)) <= 2


def wrong_arrays(comm):
    array = own_array()
    other = np.zeros(NBYTES, "u1")
    for wrong, kind, match in (
        (lambda: other, TypeError, "shmring.Memory"),
        (lambda: shmring.Memory(array.ctypes.data, 1, "uint8"), TypeError, "with an owner"),
        (lambda: memory_of(other), ValueError, "not a writable mapping of their own"),
        (lambda: memory_of(array[: NBYTES // 2]), ValueError, "not a writable mapping of their own"),
    ):
        with pytest.raises(kind, match=match):
            comm.adopt(wrong())
    return "refused"


def test_unsuitable_arrays_are_refused_by_adopt():
    with shmring.init() as comm:
        assert wrong_arrays(comm) == "refused"
        array, adoption = adopt(comm)
        comm.all_reduce(array)
        assert (array == 1).all()
        adoption.release()


def one_cannot(comm):
    array = own_array()
    wanted = memory_of(array if comm.rank != 1 else np.zeros(NBYTES, "u1"))
    try:
        comm.adopt(wanted)
    except (ValueError, shmring.Mismatch) as error:
        array[:] = 7  # still private
        return type(error).__name__
    return "adopted"


def test_an_adopt_error_on_one_rank_is_a_mismatch_on_the_others():
    with Ranks(3) as ranks:
        assert ranks.meet()(one_cannot) == ["Mismatch", "ValueError", "Mismatch"]


def look_in_vain(*_, **__):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def one_cannot_look(comm):
    array = own_array()
    array[:] = 7
    if comm.rank == 1:
        segments.open = look_in_vain  # in place of the built-in function
    try:
        comm.adopt(memory_of(array))
    except Exception as error:
        outcome = type(error).__name__, str(error)
    finally:
        vars(segments).pop("open", None)
    again = comm.adopt(memory_of(array))
    comm.all_reduce(array)
    assert (array == 7 * comm.size).all()
    again.release()
    return outcome


def test_memory_that_one_rank_cannot_inspect_is_an_error_on_all():
    with Ranks(3) as ranks:
        outcomes = ranks.meet()(one_cannot_look)
    assert [kind for kind, _ in outcomes] == ["Error"] * 3
    assert "/proc/self/maps" in outcomes[1][1]
    assert "rank other than 0 could not adopt its array" in outcomes[0][1]


def outlive(comm):
    array, adoption = adopt(comm)
    comm.all_reduce(array)
    comm.close()
    array += 1
    adoption.release()
    array += 1
    return int(array[0]), int(array[-1])


def test_they_outlive_the_communicator():
    with Ranks(2) as ranks:
        assert ranks.meet()(outlive) == [(5, 5)] * 2


PIDS = {}  # by rank, known to each of them


def remember_pids(comm):
    PIDS.update(enumerate(comm.all_gather_object(os.getpid())))


def stop_in_the_middle(comm):
    """Stop a rank until the others have raised; its later writes reach no other rank."""
    array, adoption = adopt(comm)
    comm.all_reduce(array, "max")
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        array[:] = 99
        return None
    until_stopped(PIDS[1])
    with pytest.raises(shmring.Timeout):
        comm.all_reduce(array, timeout=0.5)
    held = array.copy()
    array[0] = 50
    os.kill(PIDS[1], signal.SIGCONT)
    time.sleep(0.3)
    adoption.release()
    return array[0] == 50 and (array[1:] == held[1:]).all()


def test_a_rank_that_goes_on_later_writes_to_its_own():
    with Ranks(2) as ranks:
        ranks.meet()(remember_pids)
        outcomes = ranks.outcomes(stop_in_the_middle)
    assert outcomes[0]


def test_adopted_memory_is_not_adopted_again():
    with shmring.init() as comm, shmring.init() as other:
        array, adoption = adopt(comm)
        for again in (comm, other):
            with pytest.raises(ValueError, match="adopted already"):
                again.adopt(memory_of(array))
            array[:] = 3
        adoption.release()


def release_during_a_transfer(comm, how):
    """A message lies in the adopted memory until its receiver has copied it from there."""
    array, adoption = adopt(comm)
    other = 1 - comm.rank
    if comm.rank == 0:
        transfer = getattr(comm, how)(array, other)
        with pytest.raises(RuntimeError, match="under way"):
            adoption.release()
        comm.barrier()
        if how == "isend":
            del adoption
        comm.empty(3)  # gives back what was dropped, but not what is being sent
        transfer.wait()
    else:
        comm.barrier()
        comm.empty(3)
        message = np.zeros_like(array)
        if how == "isend":
            comm.recv(message, other)
        else:
            comm.send(array, other)
        adoption.release()
    if how == "isend":
        return None if comm.rank == 0 else set(message.tolist())
    comm.barrier()
    if comm.rank == 0:
        adoption.release()
    return set(array.tolist())


def release_beside_a_send(comm):
    array, adoption = adopt(comm)
    if comm.rank == 0:
        thread = threading.Thread(target=send, args=(comm, array))
        thread.start()
        while is_free(comm):
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="under way"):
            adoption.release()
        comm.barrier()
        thread.join()
        adoption.release()
        return None
    comm.barrier()
    message = np.zeros_like(array)
    comm.recv(message, 0)
    adoption.release()
    return set(message.tolist())


def send(comm, array):
    with contextlib.suppress(RuntimeError):  # the other thread was in is_free
        return comm.send(array, 1, matched=True)
    return send(comm, array)


def is_free(comm):
    try:
        comm.iprobe()
    except RuntimeError:  # another thread is sending
        return False
    return True


def test_memory_in_a_call_of_another_thread_is_not_released(world_of):
    assert world_of(2)(release_beside_a_send) == [None, {1}]


@pytest.mark.parametrize("how", ["isend", "irecv"])
def test_memory_in_a_transfer_of_an_ended_communicator_is_released(how):
    with shmring.init() as world:
        comm = world.dup()
        array, adoption = adopt(comm)
        transfer = comm.isend(array, 0, matched=True) if how == "isend" else comm.irecv(array, 0)
        with contextlib.suppress(shmring.Error):
            comm.abort("for this test")
        with pytest.raises(shmring.Aborted):
            transfer.wait()
        adoption.release()
        world.adopt(memory_of(array)).release()


@pytest.mark.parametrize(("how", "results"), [("isend", [None, {1}]), ("irecv", [{2}, {2}])])
def test_memory_in_a_transfer_is_not_released(world_of, how, results):
    ranks = world_of(2, SHMRING_MESSAGE_RING=1 << 16)  # the message does not fit: it stays where it is
    assert ranks(release_during_a_transfer, how) == results


def release_early(comm, refused_path):
    array, adoption = adopt(comm)
    numbers = array.view("f4")
    numbers[:] = comm.rank + 1
    if comm.rank == 0:
        until_there(refused_path)
    work = comm.all_reduce(numbers, async_op=True)
    if comm.rank == 1:
        with pytest.raises(RuntimeError, match="under way"):
            adoption.release()
        refused_path.touch()
    del adoption
    gc.collect()
    work.wait()
    assert (numbers == 3).all()
    again = comm.adopt(memory_of(array))
    comm.all_reduce(numbers)
    assert (numbers == 6).all()
    again.release()


def test_nothing_is_given_back_in_the_middle_of_a_call(tmp_path):
    with Ranks(2) as ranks:
        ranks.meet()(release_early, tmp_path / "refused")


def fail_to_keep(comm):
    """The exception, its traceback, the Adoption and the mapping are garbage in a cycle."""
    keep, array = allocator.Arrays._keep, own_array()
    array[:] = comm.rank + 1

    def raise_in_a_cycle(arrays, block):
        if comm.rank > 0:
            return keep(arrays, block)
        error = MemoryError()
        error.itself = error
        raise error

    allocator.Arrays._keep = raise_in_a_cycle
    try:
        comm.adopt(memory_of(array))
    except MemoryError:
        assert comm.rank == 0
    else:
        assert comm.rank > 0
    finally:
        allocator.Arrays._keep = keep
    gc.collect()
    with pytest.raises(shmring.Aborted):
        comm.barrier()
    comm.close()
    assert (array == comm.rank + 1).all()
    array[:] = 7
    return np.array(array).sum().item()


def test_an_adoption_that_failed_late_is_given_back():
    with Ranks(2) as ranks:
        assert ranks.meet()(fail_to_keep) == [7 * NBYTES] * 2


class PausedEngine:
    """An engine that holds up one change of the table of shared blocks, which another thread has prepared."""

    def __init__(self, engine):
        self._engine = engine
        self.has_come, self.may_go_on = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def set_blocks(self, *arguments):
        if not self.has_come.is_set():
            self.has_come.set()
            self.may_go_on.wait()
        return self._engine.set_blocks(*arguments)


@contextlib.contextmanager
def releasing(adoption):
    """Release the adoption in another thread, which pauses while the block runs. Yield its errors, a list."""
    errors = []

    def release():
        try:
            adoption.release()
        except RuntimeError as error:
            errors.append(error)

    arrays = adoption._arrays
    engine = arrays._engine
    arrays._engine = paused = PausedEngine(engine)
    thread = threading.Thread(target=release)
    thread.start()
    paused.has_come.wait()
    try:
        yield errors
    finally:
        paused.may_go_on.set()
        thread.join()
        arrays._engine = engine


def calls_in_place(comm, array):
    """Sum up an array, and return how many of the calls took it in place: 0 or 1."""
    array[:] = comm.rank + 1
    before = comm.stats()["paths"]["zero_copy"]
    comm.all_reduce(array)
    assert (array == 3).all()
    return comm.stats()["paths"]["zero_copy"] - before


def allocate_beside_a_release(comm):
    array, adoption = adopt(comm)
    with releasing(adoption) as errors:
        new = comm.empty(NBYTES, "u1")
    assert not errors
    return calls_in_place(comm, new), calls_in_place(comm, array)


def test_an_array_made_beside_a_release_is_shared(world_of):
    assert world_of(2)(allocate_beside_a_release) == [(1, 0)] * 2


def release_as_a_call_begins(comm, refused_path):
    array, adoption = adopt(comm)
    x = np.full(NBYTES, comm.rank + 1, "u1")
    if comm.rank == 0:
        until_there(refused_path)
        comm.all_reduce(x)
    else:
        calling = threading.Thread(target=comm.all_reduce, args=(x,))
        with releasing(adoption) as errors:
            calling.start()
            while not adoption._arrays._engine.has_pending():
                time.sleep(0.001)
        refused_path.touch()
        calling.join()
        assert "inside a call" in str(errors[0])
    assert (x == 3).all()
    still_shared = calls_in_place(comm, array)
    adoption.release()
    return still_shared, calls_in_place(comm, array)


def test_a_release_leaves_the_table_of_a_call_that_has_begun(world_of, tmp_path):
    """That call reads the table of shared blocks, and so the release raises. It succeeds later."""
    assert world_of(2)(release_as_a_call_begins, tmp_path / "refused") == [(1, 0)] * 2


def release_while_closing(comm):
    """One thread releases the array, and another one closes the communicator meanwhile."""
    array, adoption = adopt(comm)
    begun, make_private = threading.Event(), segments.Adopted.make_private

    def make_private_slowly(adopted):
        begun.set()
        make_private(adopted)
        time.sleep(0.2)

    segments.Adopted.make_private = make_private_slowly
    thread = threading.Thread(target=adoption.release)
    thread.start()
    begun.wait()
    comm.close()
    thread.join()
    return array.sum().item()


def test_close_waits_for_a_release():
    with Ranks(1) as ranks:
        assert ranks.meet()(release_while_closing) == [NBYTES]


def close_while_releasing(comm, method):
    """A signal handler closes the communicator while this thread releases the array."""
    array, adoption = adopt(comm)
    kind = segments.Adopted if method == "make_private" else segments.Mapping
    call = getattr(kind, method)

    def call_and_close(*arguments):
        setattr(kind, method, call)
        call(*arguments)
        comm.close()

    setattr(kind, method, call_and_close)
    adoption.release()
    return array.sum().item()


@pytest.mark.parametrize("method", ["make_private", "discard"])
def test_a_signal_handler_may_close_during_a_release(method):
    with Ranks(1) as ranks:
        assert ranks.meet()(close_while_releasing, method) == [NBYTES]


def fail_to_map(comm):
    """Rank 1 cannot map its array, and then rank 0 cannot make its own array private again."""
    mapped, array = segments.Adopted, own_array()

    class Failing(mapped):
        def __init__(self, *place):
            if comm.rank == 1:
                raise shmring.Error("cannot map")
            super().__init__(*place)

        def make_private(self):
            raise shmring.OutOfMemory("no memory", wanted_nbytes=NBYTES)

    segments.Adopted = Failing
    try:
        with pytest.raises(shmring.Error, match="cannot map" if comm.rank else "no memory"):
            comm.adopt(memory_of(array))
    finally:
        segments.Adopted = mapped
    return comm.all_reduce(1)


def test_two_failures_of_adopt_leave_the_communicator_usable():
    with Ranks(2) as ranks:
        assert ranks.meet()(fail_to_map) == [2, 2]


def release_in_a_child(comm):
    array, adoption = adopt(comm)
    pid = os.fork()
    if pid == 0:
        adoption.release()
        os._exit(9)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    array[:] = 1
    comm.all_reduce(array)
    assert (array == comm.size).all()
    adoption.release()
    return status


def test_a_forked_child_gives_nothing_back():
    with Ranks(2) as ranks:
        assert ranks.meet()(release_in_a_child) == [9, 9]


def drop_with_an_interrupt_at_each_point(comm):
    """An exception in a destructor only delays the release to the next allocation."""
    sys.unraisablehook = lambda _: None
    n = 0
    while True:
        n += 1
        array = own_array()
        place, adoptions = array.ctypes.data, [comm.adopt(memory_of(array))]
        array[:] = 7
        del array
        places = places_when_dropped(adoptions, n)
        other = own_array()
        assert other.ctypes.data != place or not allocator._adopted, places
        other[:] = 1
        comm.all_reduce(other)
        assert (other == comm.size).all(), places
        comm.empty(1)
        assert not allocator._adopted, places
        if comm.all_reduce(not places, "min"):
            return n


def test_an_exception_while_an_adoption_goes_only_delays_the_rest():
    with Ranks(2) as ranks:
        assert min(ranks.meet()(drop_with_an_interrupt_at_each_point)) > 3
