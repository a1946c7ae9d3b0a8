"""Ring: the other process gets what one process puts, of any size and dtype; and a side whose other side
closes, dies, never comes, or is interrupted."""

import contextlib
import functools
import multiprocessing
import os
import queue
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import interrupted as interrupted_after
from ring_items import ALIGNED, ARRAYS, BYTES, random_items, same

import shmring
from shmring._system import procfs

TINY = 512
ENOUGH_S = 20
METHODS = ("fork", "spawn", "forkserver")
FORK = multiprocessing.get_context("fork")


def give_back(there, back):
    """Run a child that returns what it gets, until the other side closes."""
    with there, back:
        try:
            while True:
                back.put(there.get(ENOUGH_S), ENOUGH_S)
        except shmring.Closed:
            pass


class Mirror:
    """A child process that returns what it gets."""

    def __init__(self, nbytes, method="fork"):
        self.there, self.back = shmring.Ring(nbytes), shmring.Ring(nbytes)
        self.process = multiprocessing.get_context(method).Process(
            target=give_back, args=(self.there, self.back)
        )

    def __enter__(self):
        self.process.start()
        return self

    def __exit__(self, *_):
        self.there.close()
        self.process.join(ENOUGH_S)
        self.back.close()
        assert self.process.exitcode == 0

    def __call__(self, item):
        """Return the echo of item; put from a thread, since an item may be larger than both rings."""
        putter = threading.Thread(target=self.there.put, args=(item, ENOUGH_S))
        putter.start()
        found = self.back.get(ENOUGH_S)
        putter.join()
        return found


# ---- items that arrive ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [TINY, 4096, 1 << 20])
def test_arrays_come_out_as_they_went_in(nbytes):
    with Mirror(nbytes) as mirror:
        for _ in range(2):
            for name, array in ARRAYS.items():
                assert same(mirror(array), np.asarray(array)), name


def test_memory_order_is_kept():
    with Mirror(TINY) as mirror:
        assert mirror(ARRAYS["Fortran order"]).flags.f_contiguous
        assert mirror(ARRAYS["strided"]).flags.c_contiguous


def test_extension_dtypes_keep_their_type():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with Mirror(TINY) as mirror:
        for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
            array = np.arange(9).astype(dtype)
            assert same(mirror(array), array)


def test_structures_keep_their_fields():
    """In any order, over each other, of extension dtypes, and with names that change in place."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    whole = np.ones(
        3, [("a", "i4"), ("b", ml_dtypes.bfloat16, (2,)), (("a title", "c"), ml_dtypes.float8_e5m2)]
    )
    union = {"names": ["f", "i"], "formats": ["f4", ">i4"], "offsets": [0, 0], "itemsize": 6}
    with Mirror(TINY) as mirror:
        for array in (whole, whole[["c", "a"]], np.ones(3, union), np.ones(3, ALIGNED), np.ones(3, [])):
            found = mirror(array)
            assert same(found, array)
            assert found.dtype.isalignedstruct == array.dtype.isalignedstruct
        found = mirror(whole)
        found.dtype.names = "x", "y", "z"
        assert mirror(whole).dtype.names == ("a", "b", "c")
        whole.dtype.names = "d", "e", "f"
        assert mirror(whole).dtype.names == ("d", "e", "f")
        with pytest.raises(TypeError, match="no text form"):
            mirror.there.put(np.ones(3, [((frozenset(), "a"), "i4")]))


@pytest.mark.parametrize("nbytes", [TINY, 1 << 16])
def test_bytes_stay_bytes(nbytes):
    with Mirror(nbytes) as mirror:
        for item in BYTES:
            found = mirror(item)
            assert type(found) is bytes
            assert found == bytes(item)


@pytest.mark.parametrize("method", METHODS)
def test_every_start_method(method):
    with Mirror(4096, method) as mirror:
        assert same(mirror(ARRAYS["structures"]), ARRAYS["structures"])
        assert mirror(b"and bytes") == b"and bytes"


@pytest.mark.parametrize("kind", ["memfd", "posix"])
def test_every_kind_of_segment(monkeypatch, kind):
    monkeypatch.setenv("SHMRING_SEGMENT", kind)
    with Mirror(4096) as mirror:
        assert mirror(b"there and back") == b"there and back"


def put_many(ring, seed, count):
    with ring:
        for item in random_items(seed, count):
            ring.put(item)


@pytest.mark.parametrize("seed", range(4))
def test_random_items_in_order(seed):
    ring = shmring.Ring(TINY << seed)
    child = FORK.Process(target=put_many, args=(ring, seed, 2000))
    child.start()
    with ring:
        for wanted in random_items(seed, 2000):
            found = ring.get(ENOUGH_S)
            assert found == wanted if isinstance(wanted, bytes) else same(found, wanted)
        with pytest.raises(shmring.Closed):
            ring.get(ENOUGH_S)
    child.join()


def test_two_threads_may_have_a_side_each():
    with shmring.Ring(TINY) as ring:
        items = list(random_items(7, 300))
        putter = threading.Thread(target=lambda: [ring.put(item, ENOUGH_S) for item in items])
        putter.start()
        found = [ring.get(ENOUGH_S) for _ in items]
        putter.join()
    assert all(a == b if isinstance(a, bytes) else same(a, b) for a, b in zip(found, items, strict=True))


def test_put_copies():
    with shmring.Ring() as ring:
        x = np.zeros(3)
        ring.put(x)
        x[:] = 1
        found = ring.get()
        assert same(found, np.zeros(3))
        assert found.flags.writeable
        assert found.flags.owndata


# ---- out --------------------------------------------------------------------------------------------------


def test_out_is_filled_and_returned():
    with shmring.Ring() as ring:
        for x in (np.arange(6.0).reshape(2, 3), ARRAYS["Fortran order"], ARRAYS["structures"]):
            out = np.empty_like(x)
            ring.put(x)
            assert ring.get(out=out) is out
            assert same(out, x)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(4),
        np.zeros(3, "f4"),
        np.zeros((3, 1)),
        np.zeros(6)[::2],
        np.frombuffer(bytes(24)),
        bytearray(24),
        np.ma.masked_array([0.0, 0, 0], [True, False, False]),
    ],
    ids=["longer", "dtype", "shape", "strided", "read-only", "no array", "masked"],
)
def test_an_out_that_does_not_fit_loses_nothing(out):
    with shmring.Ring() as ring:
        ring.put(np.arange(3.0))
        with pytest.raises((ValueError, TypeError), match="out"):
            ring.get(out=out)
        assert same(ring.get(), np.arange(3.0))
        ring.put(b"bytes")
        with pytest.raises(ValueError, match="no array"):
            ring.get(out=np.zeros(5, "u1"))
        assert ring.get() == b"bytes"


LONG = np.arange(5000)  # longer than a TINY ring
RECORDS = np.zeros(10_000, [("a", "i4"), ("b", "f8")])  # longer than BRIEF_ITEM_NBYTES of ring_frames
RECORDS["b"] = np.arange(10_000)


def put_and_close(ring, items, may_close):
    """Put the items, the first of which waits for the reader when a part of it is in the ring; close."""
    with ring:
        for item in items:
            ring.put(item, ENOUGH_S)
        may_close.wait(ENOUGH_S)


@contextlib.contextmanager
def stopped_within(kind, *items, nbytes=TINY, out=None, during=contextlib.nullcontext):
    """Yield a ring of which a `get` has received a part of an item, and its writer, which is stopped."""
    ring = shmring.Ring(nbytes) if kind == "ring" else shmring.Broadcast(nbytes, readers=1)
    may_close = FORK.Event()
    writer = FORK.Process(target=put_and_close, args=(ring, items, may_close))
    writer.start()
    begun = np.empty_like(items[0]) if out is None else out
    begun.fill(0)
    try:
        for _ in range(100):  # until the writer has begun
            time.sleep(0.02)
            os.kill(writer.pid, signal.SIGSTOP)
            with during(), pytest.raises(shmring.Timeout):
                ring.get(0.05, out=begun)
            if begun.tobytes() != bytes(begun.nbytes):
                break
            os.kill(writer.pid, signal.SIGCONT)
        assert not same(begun, items[0])
        yield ring, lambda: os.kill(writer.pid, signal.SIGCONT), may_close
    finally:
        os.kill(writer.pid, signal.SIGCONT)
        may_close.set()
        ring.close()
        writer.join()


@pytest.mark.parametrize("item", [LONG, RECORDS, np.asfortranarray(LONG.reshape(50, 100))])
@pytest.mark.parametrize("kind", ["ring", "broadcast"])
def test_an_array_given_to_a_get_that_fails_is_not_written_to_later(kind, item):
    for again in (False, True):
        out = np.empty_like(item)
        with stopped_within(kind, item, out=out) as (ring, go_on, _):
            out.fill(-1)
            if again:
                with pytest.raises(shmring.Timeout):
                    ring.get(0.05, out=out)
            go_on()
            found = ring.get(ENOUGH_S, out=out) if again else ring.get(ENOUGH_S)
            assert same(found, item)
            assert found.flags.f_contiguous == item.flags.f_contiguous
            assert found is out if again else same(out, np.full_like(item, -1))


@pytest.mark.parametrize("out", [np.zeros(4), np.zeros(5000, "f4"), [0] * 5000])
@pytest.mark.parametrize("kind", ["ring", "broadcast"])
def test_an_item_begun_by_a_call_and_refused_by_another_is_not_lost(kind, out):
    for rest in ((), (b"next",)):
        with stopped_within(kind, LONG, *rest) as (ring, go_on, may_close):
            go_on()
            may_close.set()
            for _ in range(2):
                with pytest.raises((ValueError, TypeError), match="out"):
                    ring.get(ENOUGH_S, out=out)
            assert same(ring.get(ENOUGH_S), LONG)
            for item in rest:
                assert ring.get(ENOUGH_S) == item
            with pytest.raises(shmring.Closed):
                ring.get(ENOUGH_S)


@contextlib.contextmanager
def little_memory():
    """Limit the memory of this process to 16 MiB more than it has."""
    has_nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (has_nbytes + (16 << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_an_item_is_lost_with_an_error_if_a_failed_get_has_no_memory_for_its_part():
    items = np.ones(64 << 20, "u1"), b"next"
    with stopped_within("ring", *items, nbytes=1 << 16, during=little_memory) as (ring, go_on, _):
        go_on()
        with pytest.raises(MemoryError, match="lost"):
            ring.get(ENOUGH_S)
        assert ring.get(ENOUGH_S) == b"next"


# ---- full, empty, late ------------------------------------------------------------------------------------


def test_full_and_empty_as_in_queue():
    with shmring.Ring(TINY) as ring:
        with pytest.raises(queue.Empty):
            ring.get_nowait()
        for turn in range(5):
            for i in range(7):  # a line each, but one
                ring.put(bytes([turn, i]), block=False)
            with pytest.raises(queue.Full):
                ring.put(b"", block=False)
            assert take_all(ring) == [bytes([turn, i]) for i in range(7)]
            with pytest.raises(queue.Empty):
                ring.get(block=False)
        with pytest.raises(queue.Full):
            ring.put_nowait(bytes(TINY))
        ring.put_nowait(np.arange(4))
        with pytest.raises(queue.Full):
            ring.put_nowait(np.arange(100))
        assert same(ring.get_nowait(), np.arange(4))


def test_timeouts():
    with shmring.Ring(TINY) as ring:
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            ring.get(timeout=0.05)
        with pytest.raises(shmring.Timeout):
            ring.put(bytes(400), timeout=0.05)
        assert time.monotonic() - begin >= 0.1


def test_a_put_that_came_too_late_is_as_if_it_had_not_been():
    with shmring.Ring(TINY) as ring:
        for turn in range(20):
            with pytest.raises(TimeoutError):
                ring.put(np.arange(1000 + turn), timeout=0)
            with pytest.raises(queue.Empty):
                ring.get_nowait()
            ring.put(np.arange(turn), timeout=1)
            assert same(ring.get(timeout=1), np.arange(turn))


def test_the_memory_order_stays_if_the_get_that_began_had_an_out():
    ring, item = shmring.Ring(TINY), np.asfortranarray(np.arange(1 << 18).reshape(512, 512))
    putter = threading.Thread(target=ring.put, args=(item, ENOUGH_S))
    putter.start()
    out, deadline_s = np.zeros_like(item), time.monotonic() + ENOUGH_S
    while out[1, 0] == 0:  # until its first piece is there
        assert time.monotonic() < deadline_s
        with pytest.raises(queue.Empty):
            ring.get_nowait(out=out)
    found = ring.get(ENOUGH_S)
    putter.join()
    ring.close()
    assert same(found, item)
    assert found.flags.f_contiguous
    assert not np.shares_memory(found, out)


def test_a_get_that_came_too_late_has_lost_nothing():
    ring, items = shmring.Ring(TINY), [np.arange(700), b"z" * 2000]

    def put_slowly():
        for item in items:
            time.sleep(0.05)
            ring.put(item, ENOUGH_S)

    putter = threading.Thread(target=put_slowly)
    putter.start()
    found, late = [], 0
    while len(found) < 2:
        try:
            found.append(ring.get(timeout=0.00002))
        except TimeoutError:
            late += 1
    putter.join()
    ring.close()
    assert late > 0
    assert same(found[0], items[0])
    assert found[1] == items[1]


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", True])
def test_wrong_timeouts(timeout):
    with shmring.Ring() as ring:
        for call in (ring.get, lambda timeout: ring.put(b"", timeout)):
            with pytest.raises((ValueError, TypeError), match="timeout"):
                call(timeout=timeout)


# ---- refused items ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item",
    [
        None, 1, 1.5, "text", [1, 2], {}, np.float64(1), object(), np.array([None]),
        np.zeros(2, [("a", "i4"), ("b", "O")]), np.ma.array([1, 2], mask=[0, 1]),
    ],
    ids=lambda item: type(item).__name__,
)  # fmt: skip
def test_items_other_than_bytes_and_arrays_are_refused(item):
    with shmring.Ring() as ring:
        with pytest.raises(TypeError):
            ring.put(item)
        with pytest.raises(queue.Empty):
            ring.get_nowait()


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 50, 1000.0, "1000"])
def test_wrong_lengths(nbytes):
    with pytest.raises(ValueError if isinstance(nbytes, int) else TypeError, match="nbytes"):
        shmring.Ring(nbytes)


def test_lengths_are_rounded_up():
    for asked, got in ((1, 512), (512, 512), (513, 1024), (np.int64(1 << 20), 1 << 20)):
        with shmring.Ring(asked) as ring:
            assert ring.nbytes == got


def test_a_ring_without_init_is_closed():
    with pytest.raises(shmring.Closed):
        shmring.Ring.__new__(shmring.Ring).get()


def test_a_closed_ring_says_so():
    ring = shmring.Ring()
    ring.close()
    ring.close()
    for call in (ring.get, lambda: ring.put(b"")):
        with pytest.raises(shmring.Closed):
            call()
    assert "closed" in repr(ring)


def use_taken_side(ring, side, answer):
    try:
        ring.put(b"mine") if side == "put" else ring.get(timeout=1)
    except RuntimeError as error:
        answer.send(str(error))
        return
    answer.send("was allowed")


@pytest.mark.parametrize("side", ["put", "get"])
def test_each_side_is_for_one_process(side):
    ours, theirs = FORK.Pipe()
    with shmring.Ring() as ring:
        ring.put(b"first")
        assert ring.get() == b"first"
        child = FORK.Process(target=use_taken_side, args=(ring, side, theirs))
        child.start()
        assert f"process {os.getpid()}" in ours.recv()
        child.join()


def test_a_side_stays_with_its_process_after_it_has_closed_the_ring():
    with shmring.Ring() as ring:
        ring.put(b"first")
        child = FORK.Process(target=get_and_end, args=(ring, "close"))
        child.start()
        child.join()
        with pytest.raises(RuntimeError, match=f"process {child.pid} gets from this ring already"):
            ring.get()


# ---- ends -------------------------------------------------------------------------------------------------


def put_and_end(ring, how):
    ring.put(np.arange(5))
    if how == "part":
        with pytest.raises(TimeoutError):
            ring.put(bytes(100_000), timeout=0.05)
    if how == "close":
        ring.close()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["return", "close", "kill", "part"])
def test_items_put_before_the_end_arrive_before_the_error(how):
    with shmring.Ring(4096) as ring:
        child = FORK.Process(target=put_and_end, args=(ring, how))
        child.start()
        child.join()
        assert same(ring.get(ENOUGH_S), np.arange(5))
        with pytest.raises(shmring.RankFailed if how == "kill" else shmring.Closed):
            ring.get()


def get_and_end(ring, how):
    ring.get()
    if how == "close":
        ring.close()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["return", "close", "kill"])
@pytest.mark.parametrize("nbytes", [100, 100_000])
def test_a_put_whose_getter_ends_says_so(how, nbytes):
    with shmring.Ring(TINY) as ring:
        child = FORK.Process(target=get_and_end, args=(ring, how))
        child.start()
        with pytest.raises(shmring.RankFailed if how == "kill" else shmring.Closed):
            put_until_it_raises(ring, bytes(nbytes))
        child.join()


def get_and_sleep(ring):
    ring.get()
    time.sleep(60)


def test_a_put_without_waiting_says_that_the_getter_has_died():
    with shmring.Ring(TINY) as ring:
        child = FORK.Process(target=get_and_sleep, args=(ring,))
        child.start()
        ring.put(bytes(2 * TINY))  # which the child has begun to get
        with contextlib.suppress(queue.Full):
            while True:
                ring.put(bytes(100), block=False)
        child.kill()
        child.join()
        time.sleep(0.15)  # more than POLL_NS of ring_frames.pxd: it looks again
        with pytest.raises(shmring.RankFailed, match=str(child.pid)):
            ring.put(bytes(100), block=False)


def put_for_ever(ring):
    put_until_it_raises(ring, np.zeros(50_000))


def test_a_putter_killed_in_the_middle_of_an_item():
    with shmring.Ring(TINY) as ring:
        child = FORK.Process(target=put_for_ever, args=(ring,))
        child.start()
        ring.get(ENOUGH_S)
        with pytest.raises(TimeoutError):
            get_until_it_raises(ring, 0.00001)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(shmring.RankFailed, match=str(child.pid)):
            get_until_it_raises(ring)
        child.join()


def put_late(ring):
    ring.put(b"soon")
    time.sleep(0.5)  # longer than the interval of polls
    ring.put(b"late")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_a_peer_is_seen_to_live_and_to_die_without_proc(monkeypatch, has_pidfds):
    monkeypatch.setattr(procfs, "_stat", lambda pid: None)  # not mounted, or hidden (hidepid)
    if not has_pidfds:
        monkeypatch.delattr(os, "pidfd_open")
    with shmring.Ring() as ring:
        child = FORK.Process(target=put_late, args=(ring,))
        child.start()
        assert ring.get(ENOUGH_S) == b"soon"
        assert ring.get(ENOUGH_S) == b"late"
        reaper = threading.Thread(target=child.join)  # without pidfds it answers until its parent has waited
        if not has_pidfds:
            reaper.start()
        with pytest.raises(shmring.RankFailed, match=f"process {child.pid} died"):
            ring.get(ENOUGH_S)
        reaper.join() if not has_pidfds else child.join()


def do_nothing(ring):
    pass


@pytest.mark.parametrize("method", METHODS)
def test_a_child_that_ends_without_having_come(method):
    with shmring.Ring() as ring:
        child = multiprocessing.get_context(method).Process(target=do_nothing, args=(ring,))
        child.start()
        with pytest.raises(shmring.RankFailed, match="ended"):
            ring.get()
        child.join()


@pytest.mark.parametrize("side", ["put", "get"])
def test_ctrl_c(side):
    with shmring.Ring(TINY) as ring:
        with pytest.raises(KeyboardInterrupt):
            interrupted_after(lambda: ring.get() if side == "get" else ring.put(bytes(1000)), 0.2)
        if side == "put":
            assert take_all(ring) == []
        ring.put(b"next", timeout=ENOUGH_S)
        assert ring.get(ENOUGH_S) == b"next"


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("side", ["put", "get"])
def test_an_exception_in_the_first_call_leaves_the_side_usable(side, monkeypatch):
    with shmring.Ring(TINY) as ring:
        with monkeypatch.context() as patch:
            patch.setattr(shmring.Ring, "_use_side", interrupted)  # Python code, in which signal handlers run
            with pytest.raises(KeyboardInterrupt):
                ring.get() if side == "get" else ring.put(b"first")
        ring.put(b"next", ENOUGH_S)
        assert ring.get(ENOUGH_S) == b"next"


@pytest.mark.parametrize("make", [shmring.Ring, functools.partial(shmring.Broadcast, readers=1)])
@pytest.mark.parametrize("side", ["put", "get"])
def test_nothing_comes_between_in_the_first_call(make, side, monkeypatch):
    """Python code runs before this process owns the side: a signal handler, or another thread."""

    def interrupted(ring):
        if not refused:
            for call in (lambda: ring.put(b"other") if side == "put" else ring.get(0), ring.close):
                with pytest.raises(RuntimeError, match="another thread"):
                    call()
                refused.append(call)
        return come(ring)

    with make(TINY) as ring:
        come, refused = type(ring)._use_side, []
        if side == "get":
            ring.put(b"first")
        monkeypatch.setattr(type(ring), "_use_side", interrupted)
        if side == "put":
            ring.put(b"first", ENOUGH_S)
            assert len(refused) == 2
        assert ring.get(ENOUGH_S) == b"first"
        assert len(refused) == 2


def get_until_it_raises(ring, timeout=None):
    while True:
        ring.get(timeout)


def put_until_it_raises(ring, item):
    while True:
        ring.put(item)


def take_all(ring):
    found = []
    try:
        while True:
            found.append(ring.get_nowait())
    except queue.Empty:
        return found


def test_an_idle_side_costs_no_cpu():
    with shmring.Ring() as ring:
        begin = time.process_time()
        with pytest.raises(TimeoutError):
            ring.get(timeout=0.5)
        assert time.process_time() - begin < 0.25


def put_and_raise(ring):
    with contextlib.suppress(ZeroDivisionError), ring:
        ring.put(np.arange(3))
        raise ZeroDivisionError


@pytest.mark.parametrize("args", [{"timeout": ENOUGH_S}, {"block": False}], ids=str)
@pytest.mark.parametrize("make", [shmring.Ring, lambda: shmring.Broadcast(readers=1)])
def test_an_exception_of_the_producer_is_no_ordinary_end(make, args):
    with make() as ring:
        child = FORK.Process(target=put_and_raise, args=(ring,))
        child.start()
        assert ring.get(ENOUGH_S).tolist() == [0, 1, 2]
        child.join()
        with pytest.raises(shmring.Aborted, match="gave up"):
            ring.get(**args)
