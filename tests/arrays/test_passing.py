"""Arrays that travel between processes as descriptors: `share` and its kin."""

import concurrent.futures
import contextlib
import copy
import copyreg
import errno
import gc
import io
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import types
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
from injections import Interrupt, injection_of, places_when_dropped
from waiting import wait_until

import shmring
from shmring._arrays import passing
from shmring._system import file_descriptors
from shmring.adapters import _sharing

METHODS = ("fork", "spawn", "forkserver")
KILLS = Path(__file__).resolve().parents[1] / "support" / "share_kills.py"


def travel(obj):
    """Pickle an object as multiprocessing does, and load it."""
    return pickle.loads(ForkingPickler.dumps(obj))


def segments():
    """Return the descriptors of this process that are shared memory, by number."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the one of the listing
            continue
        if path.startswith(("/memfd:shmring", "/dev/shm/")):
            found[int(number)] = path
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    before = set(segments())
    yield
    shmring.keep_shared(0)
    gc.collect()
    assert set(segments()) <= before


def sum_of(x):
    assert not x.flags.writeable
    return float(x.sum()), shmring.share(2 * x)


def sum_all(x, into):
    into.send({"found": (x.sum(), shmring.share(2 * x)), "again": x})  # an array that it got goes on


def put(queue, count):
    for number in range(count):
        queue.put([number, {"x": shmring.share(np.full((100, 50), number))}])


class PickledLate:
    """An object with a shared array that a queue's thread pickles when its process has begun to end."""

    def __init__(self):
        self.x = shmring.share(np.arange(1000))

    def __reduce__(self):
        time.sleep(0.3)
        return list, ((self.x,),)


def put_late(queue):
    queue.put(PickledLate())


# ---- the ways between processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_ways_between_processes(method):
    context = multiprocessing.get_context(method)
    x = shmring.share(np.arange(6000).reshape(60, 100))
    with context.Pool(2) as pool:
        for total, doubled in pool.map(sum_of, [x, x[::-2], x.T[3:5], x[7]]):
            assert total == doubled.sum() / 2
            assert not doubled.flags.writeable
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        total, doubled = pool.submit(sum_of, x[1:3]).result()
        assert (doubled == 2 * x[1:3]).all()
        assert total == x[1:3].sum()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=sum_all, args=(x, sender))
    process.start()
    got = receiver.recv()
    process.join()
    assert (got["found"][1] == 2 * x).all()
    x[0, 0] = 77
    assert got["again"][0, 0] == 77


@pytest.mark.parametrize("method", METHODS)
def test_arrays_outlive_their_sender(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=put, args=(queue, 20))
    process.start()
    process.join()
    assert process.exitcode == 0
    for number in range(20):
        got = queue.get(timeout=30)
        assert got[0] == number
        assert (got[1]["x"] == number).all()


@pytest.mark.parametrize("method", METHODS)
def test_arrays_outlive_a_sender_that_pickles_them_at_its_end(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=put_late, args=(queue,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (queue.get(timeout=30)[0] == np.arange(1000)).all()


def test_nobody_keeps_arrays_for_a_process_that_has_ended(tmp_path):
    """The process that keeps the memory of a child ends with the child's parent."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, sys\n"
        "import numpy as np, shmring\n"
        "def put(queue):\n"
        "    queue.put(shmring.share(np.ones(1000)))\n"
        "context = multiprocessing.get_context('fork')\n"
        "queue = context.Queue()\n"
        "process = context.Process(target=put, args=(queue,))\n"
        "process.start()\n"
        "process.join()\n"
    )
    done = subprocess.run([sys.executable, script], timeout=60)
    assert done.returncode == 0
    wait_until(lambda: not processes_of(script), "the program's processes have ended")


def processes_of(script):
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            if str(script).encode() in Path(f"/proc/{number}/cmdline").read_bytes():
                found.append(int(number))
        except OSError:
            continue
    return found


def test_a_killed_sender_is_an_error_that_says_so():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_and_stop, args=(sender,))
    process.start()
    data = receiver.recv_bytes()
    process.kill()
    process.join()
    with pytest.raises(shmring.Error, match=f"of process {process.pid} is gone: the process was killed"):
        pickle.loads(data)


REFUSES_TO_FORK = sys.version_info[:2] == (3, 12)  # in exit handlers
REFUSE_TO_FORK = (
    'import os\ndef refuse(): raise RuntimeError("can\'t fork at interpreter shutdown")\nos.fork = refuse\n'
)


@pytest.mark.parametrize(("longest_s", "refuses"), [(30, REFUSES_TO_FORK), (30, True), (0, False)])
def test_arrays_of_a_program_that_is_no_child_are_kept_for_a_time(longest_s, refuses):
    """refuses: os.fork raises in exit handlers, as in Python 3.12. The program then ends without an error."""
    code = (
        "import sys; from multiprocessing.reduction import ForkingPickler; import shmring\n"
        f"from shmring._arrays import keeper; keeper.LONGEST_S = {longest_s}\n"
        + REFUSE_TO_FORK * refuses
        + "sys.stdout.buffer.write(ForkingPickler.dumps(shmring.share([1, 2])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""
    if longest_s and not refuses:
        assert pickle.loads(done.stdout).tolist() == [1, 2]
    else:
        with pytest.raises(shmring.Error, match="no child of multiprocessing and ended"):
            pickle.loads(done.stdout)


def send_and_stop(sender):
    sender.send(shmring.share(np.ones(10)))
    signal.pause()


def test_forked_children_have_what_their_parent_has():
    x = shmring.share(np.arange(1000))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    x.flags.writeable = False
    process = context.Process(target=sum_all, args=(x, sender))
    process.start()
    del x  # the child has its own reference
    got = receiver.recv()
    process.join()
    assert (got["again"] == np.arange(1000)).all()


@pytest.mark.limit(3600)
@pytest.mark.parametrize(
    "kills", [30, pytest.param(300, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]
)
def test_kills_at_any_moment_leave_nothing_and_change_nothing(kills):
    done = subprocess.run([sys.executable, KILLS, str(kills)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills" in done.stdout


# ---- the arrays --------------------------------------------------------------------------------------------

BASE = np.arange(120.0).reshape(4, 5, 6)
VIEWS = {
    "whole": lambda a: a,
    "reversed": lambda a: a[::-1],
    "transposed": lambda a: a.T,
    "part": lambda a: a[1:3, ::-2, 2:],
    "one item": lambda a: a[1, 2, 3:4],
    "no items": lambda a: a[2:2],
    "bytes": lambda a: a.view("u1"),
    "fields": lambda a: a.view([("x", "f8"), ("y", "f8")]),
    "longer": lambda a: np.broadcast_to(a[0], (3, 5, 6)),
    "flat": lambda a: a.reshape(-1)[::7],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_travel(view):
    array = shmring.share(BASE)
    there = VIEWS[view](array)
    got = travel({"nested": [there]})["nested"][0]
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape, got.strides) == (there.dtype, there.shape, there.strides)
    assert (got == there).all()
    assert not got.size or np.shares_memory(got, array)


def test_views_without_items_travel():
    nothing, table = shmring.share(np.empty((0, 3))), shmring.share(BASE)
    for there in (nothing[:, 1:], nothing.T[2:], nothing[::-1, :0], table[::-1][4:], table[4:, 1:, :0]):
        got = travel(there)
        assert (got.dtype, got.shape) == (there.dtype, there.shape)


@pytest.mark.parametrize("dtype", ["?", "i1", ">i4", "f2", "c16", "S3", "U2", "M8[D]", "i4,(2,3)f8", "V5"])
def test_dtypes_travel(dtype):
    array = shmring.shared_zeros((3, 2), dtype)
    array.view("u1")[..., 0] = 1
    got = travel(array)
    assert got.dtype == array.dtype
    assert got.tobytes() == array.tobytes()


def test_ml_dtypes_travel():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = shmring.share(np.arange(5).astype(ml_dtypes.bfloat16))
    assert (travel(array) == array).all()


@pytest.mark.parametrize("order", ["C", "F"])
def test_shape_values_and_order_are_those_of_the_array(order):
    given = np.asarray(BASE, order=order)
    made = shmring.share(given)
    assert (made == given).all()
    assert made.strides == given.strides
    assert type(made) is np.ndarray
    assert made.flags.writeable
    assert not np.shares_memory(made, given)
    assert (shmring.share(given[:, ::2]) == given[:, ::2]).all()


@pytest.mark.parametrize(("given", "shape"), [(3.5, ()), ([], (0,)), ([[1, 2]], (1, 2))])
def test_what_is_like_an_array_is_shared(given, shape):
    made = shmring.share(given)
    assert made.shape == shape
    assert travel(made).tolist() == np.asarray(given).tolist()


@pytest.mark.parametrize("make", [shmring.shared_empty, shmring.shared_zeros])
@pytest.mark.parametrize("shape", [5, (), (2, 3), (0, 4), np.int64(3)])
def test_new_arrays(make, shape):
    made = make(shape, "i4")
    like = np.zeros(shape, "i4")
    assert (made.shape, made.dtype, made.flags.c_contiguous) == (like.shape, like.dtype, True)
    if make is shmring.shared_zeros:
        assert not made.any()


@pytest.mark.parametrize("dtype", ["S", "U", bytes, "<U0"])
def test_text_of_no_given_length_has_room_for_a_character(dtype):
    for made in (shmring.shared_empty(3, dtype), shmring.shared_zeros(3, dtype)):
        assert made.dtype == np.zeros(3, dtype).dtype
        made[:] = ["a", "b", ""]
        assert travel(made).tolist() == made.tolist() == np.array(["a", "b", ""], made.dtype).tolist()
    without = np.zeros((3, 2), [("text", dtype)])["text"]
    assert (shmring.share(without) == np.copy(without)).all()


def test_receivers_may_write_only_if_the_array_says_so():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        for writable in (False, True):
            array = shmring.share(np.zeros(4), writable=writable)
            assert pool.submit(try_to_write, array).result() == writable
            assert array[1] == (5 if writable else 0)
            array.flags.writeable = False
            assert pool.submit(try_to_write, array).result() == writable  # by setting the flag
    array = shmring.share(np.zeros(4))
    assert not travel(array).flags.writeable


def try_to_write(array):
    try:
        array[1] = 5
    except ValueError:
        try:  # the pages are read-only, so NumPy cannot be told otherwise
            array.flags.writeable = True
        except ValueError:
            return False
        array[1] = 5
    return True


def test_other_pickles_and_copies_have_the_bytes():
    array = shmring.share(BASE)
    for other in (pickle.loads(pickle.dumps(array)), copy.deepcopy(array), copy.copy(array), array + 0):
        assert (other == array).all()
        assert not np.shares_memory(other, array)
    ordinary = np.ones(3)
    assert not np.shares_memory(travel(ordinary), ordinary)
    assert (travel(ordinary) == ordinary).all()
    record = np.ones(2, "i4,f4").view(np.recarray)
    assert type(travel(record)) is np.recarray


def test_a_program_s_own_way_to_pickle_arrays_is_kept(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, lambda array: (list, (array.tolist(),)))
    array = shmring.share(BASE)
    assert travel([np.arange(3), array[0]])[0] == [0, 1, 2]
    assert np.shares_memory(travel(array), array)
    small, large = pickle.loads(_sharing.dumps([np.arange(3), np.arange(1000)], 1000, []))
    assert small == [0, 1, 2]
    assert (large == np.arange(1000)).all()


def test_arrays_that_cannot_be_shared():
    with pytest.raises(TypeError, match="Python objects"):
        shmring.share([object()])
    with pytest.raises(TypeError, match="Python objects"):
        shmring.shared_empty(3, "i4,O")
    with pytest.raises(TypeError, match=r"array\.data and array\.mask"):
        shmring.share(np.ma.masked_array([1], [True]))
    with pytest.raises(ValueError, match="must be 0 or more"):
        shmring.shared_zeros((2, -1))
    for shape in (1 << 60, 1 << 63, (1 << 62, 1 << 62)):
        with pytest.raises(shmring.OutOfMemory):
            shmring.shared_empty(shape, "u1")


def test_copies_only_where_they_are_needed():
    array = shmring.share(BASE)
    assert shmring.share(array[1], copy=None).base is array[1].base
    assert not np.shares_memory(shmring.share(array[1]), array)
    assert not np.shares_memory(shmring.share(BASE, copy=None), BASE)
    assert shmring.share(array[1], copy=False).base is array[1].base
    with pytest.raises(ValueError, match="not one that"):
        shmring.share(BASE, copy=False)


# ---- the memory --------------------------------------------------------------------------------------------


def pages_of(array):
    """Return the bytes of memory that the kernel has for a shared array."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return lambda fd=base.region.fd: os.fstat(fd).st_blocks * 512


def test_a_pickle_is_loaded_as_often_as_its_array_lives():
    array = shmring.share(BASE)
    data = bytes(ForkingPickler.dumps(array))
    first, second = pickle.loads(data), pickle.loads(data)
    del array, first
    assert (second == BASE).all()
    third = pickle.loads(data)
    del second
    assert (third == BASE).all()
    del third
    gc.collect()
    with pytest.raises(shmring.Error, match="loaded before"):
        pickle.loads(data)


def test_memory_returns_though_its_maker_does_nothing():
    """A process that has sent an array has its descriptor until it shares or pickles the next one."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=send_and_wait, args=(sender,))
    process.start()
    array = receiver.recv()
    path = f"/proc/{process.pid}/fd/{descriptor_of(process.pid)}"
    assert os.stat(path).st_blocks * 512 > array.nbytes
    assert (array == 3).all()
    del array
    assert os.stat(path).st_blocks * 512 < 8192
    process.terminate()
    process.join()


def send_and_wait(sender):
    data = ForkingPickler.dumps(shmring.share(np.full(1 << 17, 3)))
    gc.collect()
    sender.send_bytes(data)
    signal.pause()


def descriptor_of(pid):
    names = {n: os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
    (number,) = (n for n, name in names.items() if name.startswith("/memfd:shmring"))
    return number


def test_kept_memory_is_used_again():
    shmring.keep_shared(1 << 20)
    first = shmring.share(np.full(10_000, 1))
    pages = pages_of(first)
    place = first.ctypes.data
    other = travel(first)
    del first
    second = shmring.share(np.full(10_000, 2))
    assert second.ctypes.data != place  # `other` is there
    assert (other == 1).all()
    del other
    third = shmring.shared_zeros(9_000, "i8")
    assert third.ctypes.data == place
    assert not third.any()
    assert pages() >= third.nbytes
    assert (travel(third) == 0).all()
    shmring.keep_shared(0)
    del second, third


@pytest.mark.parametrize(("wrong", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_a_wrong_number_of_bytes_to_keep_changes_nothing(wrong, error):
    with pytest.raises(error, match="nbytes is"):
        shmring.keep_shared(wrong)
    assert shmring.keep_shared(0) == 0


def test_an_old_pickle_does_not_reach_memory_that_is_used_again():
    shmring.keep_shared(1 << 20)
    first = shmring.share(np.full(10_000, 1))
    data = bytes(ForkingPickler.dumps(first))
    pickle.loads(data)
    del first
    second = shmring.share(np.full(10_000, 2))
    with pytest.raises(shmring.Error, match="gone"):
        pickle.loads(data)
    assert (second == 2).all()


def test_more_pickles_under_way_than_the_head_counts_are_of_the_same_memory():
    array = shmring.shared_zeros(2100, writable=True)
    pickles = [bytes(ForkingPickler.dumps(array[n : n + 1])) for n in range(2100)]
    for data in pickles:
        pickle.loads(data)[:] += 1
    assert (array == 1).all()
    pages = pages_of(array)
    last = [bytes(ForkingPickler.dumps(array)) for _ in range(2100)]
    del array
    assert all((pickle.loads(data) == 1).all() for data in last[1:])
    assert pages() > 0
    whole = pickle.loads(last[0])
    assert (travel(whole) == 1).all()
    del whole
    gc.collect()
    with pytest.raises(shmring.Error, match="loaded before"):  # each one was counted
        pickle.loads(last[-1])


def test_too_many_pickles_under_way_are_an_error(monkeypatch):
    monkeypatch.setattr(passing, "_NFURTHER", 100)
    array = shmring.share(np.zeros(1))
    pickles = [bytes(ForkingPickler.dumps(array)) for _ in range(passing._NSLOTS + 100)]
    with pytest.raises(shmring.Error, match="were sent and not loaded"):
        ForkingPickler.dumps(array)
    pickle.loads(pickles.pop())
    pickles.append(bytes(ForkingPickler.dumps(array)))  # the slot that is free is found
    for data in pickles:
        pickle.loads(data)
    assert not travel(array)[0]


def test_no_descriptors_is_an_error_that_says_what_to_do():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    made = []
    try:
        with pytest.raises(shmring.Error, match="ulimit -n"):
            made.extend(shmring.shared_zeros(3) for _ in range(100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(not array.any() for array in made)


def test_no_locks_is_an_error_that_says_so(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    array = shmring.share(np.arange(3))
    with monkeypatch.context() as patch:
        patch.setattr(f"{passing.__name__}.segments.fcntl.flock", refuse)
        for call in (lambda: shmring.share(5), lambda: travel(array)):
            with pytest.raises(shmring.Error, match=r"locking a shared array failed: No locks .*ENOLCK"):
                call()
    assert travel(array).tolist() == [0, 1, 2]


def fail(*_, **__):
    raise MemoryError


@pytest.mark.parametrize(
    "step", ["Region.__init__", "Region.map", "segments.allocate", "segments.fcntl.fcntl"]
)
def test_no_memory_at_a_step_loses_no_descriptor(monkeypatch, step):
    before = set(segments())
    with monkeypatch.context() as patch:
        patch.setattr(f"{passing.__name__}.{step}", fail)
        with pytest.raises(MemoryError) as held:  # with its traceback
            shmring.share(np.arange(10))
    assert set(segments()) == before
    del held


def test_no_memory_to_describe_an_array_to_numpy_frees_its_region(monkeypatch):
    lost = []  # NumPy 2.4 loses its reference to the base object if it has no memory for it

    def lose(base):
        lost.append(base)
        raise MemoryError

    before = set(segments())
    with monkeypatch.context() as patch:
        patch.setattr(passing, "np", types.SimpleNamespace(**vars(np) | {"asarray": lose}))
        with pytest.raises(MemoryError):
            passing.shared_zeros(10)
    gc.collect()
    assert lost
    assert set(segments()) == before


def test_an_exception_while_a_descriptor_is_checked_closes_it(monkeypatch):
    shared = shmring.shared_zeros(10)
    number = passing.region_of(shared).fd
    identity, before = file_descriptors.identity_of(number), set(segments())
    with monkeypatch.context() as patch:
        patch.setattr(f"{file_descriptors.__name__}.identity_of", fail)
        with pytest.raises(MemoryError):
            file_descriptors.open_there(os.getpid(), number, identity, "an array")
    assert set(segments()) == before


def test_threads_share_and_drop_at_the_same_time():
    wrong = []

    def work(number):
        for turn in range(100):
            array = shmring.share(np.full(100, number * 1000 + turn))
            got = travel([array, array[1:]])
            del array
            wrong.extend(part for part in got if (part != number * 1000 + turn).any())

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "step",
    ["_used_again", "Region.begin", "Region.send", "Region.receive", "Region.drop"],
)
def test_a_signal_handler_inside_a_call_gets_an_error(monkeypatch, step):
    """Without the error it would wait for the thread that it interrupts."""
    array, errors = shmring.share(np.ones(3)), []

    def handle(*_):
        for call in (lambda: shmring.share(5), lambda: travel(array), lambda: shmring.keep_shared(1)):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    owner, name = (passing.Region, step.partition(".")[2]) if "." in step else (passing, step)
    whole = getattr(owner, name)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *given: [signal.raise_signal(signal.SIGUSR1), whole(*given)][1])
            assert there_and_back()[0][0].tolist() == list(range(10))
            gc.collect()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(errors) >= 3
    assert all("set a flag" in error for error in errors)
    assert there_and_back()[0][0].tolist() == list(range(10))


def there_and_back():
    array = shmring.share(np.arange(10))
    return travel([array, array[3:]]), travel(shmring.shared_zeros(3))


@pytest.mark.parametrize(
    ("kind", "stride"), [("point", 61), ("system", 1), pytest.param("point", 17, marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a destructor
def test_an_exception_at_any_step_leaves_the_next_calls_right(kind, stride):
    """Nothing stays locked, and each region is freed but those whose pickle the exception has lost."""
    there_and_back()
    before, n, lost = set(segments()), 1 - stride, 0
    while True:
        n += stride
        for region in passing._sent:  # those of lost pickles: with each, a call has more steps
            region.under_way.clear()
        injection = injection_of(kind, n)
        gc.disable()  # hypothesis has a callback for collections
        try:
            injection.run(there_and_back)
        except (Interrupt, OSError, shmring.Error):
            lost += 1
        finally:
            gc.enable()
        if not injection.places:
            break
        (whole, part), zeros = there_and_back()
        assert whole.tolist() == list(range(10))
        assert part.tolist() == list(range(3, 10))
        assert not zeros.any()
    assert n > 10
    del whole, part, zeros, injection  # which holds results, too
    gc.collect()
    assert len(set(segments()) - before) <= lost
    for region in passing._sent:
        region.under_way.clear()
    time.sleep(2 * passing._SWEEP_S)
    shmring.shared_zeros(1)
    gc.collect()
    left = set(segments()) - before
    assert len(left) <= 3  # an interrupt between a system call and the bytecode that stores its result
    for fd in left:
        os.close(fd)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a destructor
def test_an_exception_while_an_array_goes_only_delays_the_rest():
    shmring.shared_zeros(1)
    before, n = set(segments()), 0
    while True:
        n += 1
        places = places_when_dropped([shmring.share(np.arange(10))], n)
        if not places:
            break
        shmring.shared_zeros(1)
        assert set(segments()) == before, places
    assert n > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a destructor
def test_an_exception_while_a_region_goes_that_no_array_uses_loses_no_descriptor():
    """Such as a region whose `share` was interrupted."""
    before, n = set(segments()), 0
    while True:
        n += 1
        places = places_when_dropped([passing._make_region(10, None)], n)
        assert set(segments()) == before, places
        if not places:
            break


def sum_after(pipe, x):
    """Return the sum of an array once the other process has dropped its own."""
    assert pipe.recv_bytes() == b"dropped"
    return float(x.sum())


def drop_and_tell(pipe, arrays):
    arrays.clear()
    pipe.send_bytes(b"dropped")


def fork_without_descriptors(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        return os.fork()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def fork_interrupted(monkeypatch):
    """A signal handler raises in the hook before the fork."""
    whole = passing._is_inside

    def interrupt():
        monkeypatch.setattr(passing, "_is_inside", whole)
        raise Interrupt

    monkeypatch.setattr(passing, "_is_inside", interrupt)
    return os.fork()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in the hook
@pytest.mark.parametrize("child_drops", [True, False])
@pytest.mark.parametrize("fork", [fork_without_descriptors, fork_interrupted])
def test_a_child_whose_reference_is_not_counted_shares_the_memory(monkeypatch, fork, child_drops):
    arrays = [shmring.share(np.ones(1000))]
    (parents, of_child), (from_parent, to_child) = os.pipe(), os.pipe()
    pid = fork(monkeypatch)
    if pid == 0:
        if child_drops:
            arrays.clear()
            os.write(of_child, b"dropped")
            os._exit(0)
        os.read(from_parent, 7)
        os._exit(int(arrays[0].sum() != 1000))
    if child_drops:
        os.read(parents, 7)
        assert arrays[0].sum() == 1000
    arrays.clear()
    os.write(to_child, b"dropped")
    assert os.waitpid(pid, 0)[1] == 0
    for fd in (parents, of_child, from_parent, to_child):
        os.close(fd)
    assert travel(shmring.share(np.ones(3))).sum() == 3


def test_a_pickle_of_another_machine_is_refused():
    array = shmring.share(np.ones(3))
    function, (place, *rest) = array_reduced(array)
    with pytest.raises(shmring.Error, match="another machine or container"):
        function(("other boot", *place[1:]), *rest)
    with pytest.raises(shmring.Error, match="gone"):
        function((place[0], "0" * 32, 1 << 22, *place[3:]), (rest[0][0] + 1, *rest[0][1:]), *rest[1:])
    function(place, *rest)


def array_reduced(array):
    return ForkingPickler(io.BytesIO()).dispatch_table[np.ndarray](array)


def test_a_number_that_is_another_file_by_now_is_not_opened(tmp_path):
    array = shmring.share(np.ones(3))
    function, (place, use, *rest) = array_reduced(array)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    fd = os.open(fifo, os.O_RDWR)
    with pytest.raises(shmring.Error, match="gone"):
        function((*place[:3], fd, *place[4:]), (use[0] + 1, *use[1:]), *rest)
    os.close(fd)
    function(place, use, *rest)
