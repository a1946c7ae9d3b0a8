"""Rings that travel in pickles to processes that run already, and `interrupt`."""

import concurrent.futures
import contextlib
import copy
import ctypes
import functools
import gc
import multiprocessing
import operator
import os
import pickle
import queue
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from ring_items import outcome

import shmring
from shmring._p2p import ring_common

METHODS = ("fork", "spawn", "forkserver")
FORK = multiprocessing.get_context("fork")
ENOUGH_S = 20
TINY = 512
KINDS = {"Ring": shmring.Ring, "Broadcast": lambda nbytes=TINY: shmring.Broadcast(nbytes, readers=1)}
BOTH = pytest.mark.parametrize("kind", list(KINDS))


class Child:
    """A process that has nothing of its parent's, and calls what it is sent."""

    def __init__(self, method="spawn"):
        context = multiprocessing.get_context(method)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=obey, args=(theirs,))
        self.process.start()
        theirs.close()

    def send(self, function, *args):
        self.pipe.send((function, args))

    def answer(self):
        assert self.pipe.poll(ENOUGH_S), "no answer"
        return self.pipe.recv()

    def call(self, function, *args):
        self.send(function, *args)
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.pipe.close()
        self.process.join(ENOUGH_S if sys.exc_info()[0] is None else 0)
        self.kill()


kept = []  # the rings that a child keeps open


def obey(pipe):
    with contextlib.suppress(EOFError):
        while order := pipe.recv():
            function, args = order
            pipe.send(function(*args))


def get_one(ring):
    kept.append(ring)
    return outcome(ring.get, ENOUGH_S)


def put_one(ring, item):
    kept.append(ring)
    return outcome(ring.put, item, ENOUGH_S)


def keep(ring):
    kept.append(ring)


def make(kind, *args):
    kept.append(KINDS[kind](*args))
    return pickle.dumps(kept[-1])


def make_for(readers):
    kept.append(shmring.Broadcast(TINY, readers=readers))
    return pickle.dumps(kept[-1])


def load_and_keep(data):
    kept.append(pickle.loads(data))


def call_kept(name, *args):
    return outcome(getattr(kept[-1], name), *args)


def close_long_ago():
    ring_common._LINGER_S = 0
    kept.pop().close()


# ---- the ways ---------------------------------------------------------------------------------------------


ENDED = "Closed: the process that puts into this ring has closed it"


@BOTH
@pytest.mark.parametrize("method", METHODS)
def test_ways_between_processes(kind, method):
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool, KINDS[kind]() as ring:
        found = pool.apply_async(get_one, (ring,))
        ring.put(np.arange(5))
        assert (found.get(ENOUGH_S) == np.arange(5)).all()
        ring.put(b"again")
        assert pool.apply(call_kept, ("get",)) == b"again"
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool, KINDS[kind]() as ring:
        found = pool.submit(get_one, ring)
        ring.put(b"to an executor")
        assert found.result(ENOUGH_S) == b"to an executor"
        ring.close()
        assert pool.submit(call_kept, "get").result(ENOUGH_S).startswith(ENDED)
    with Child(method) as child, KINDS[kind]() as ring:
        child.send(get_one, ring)
        ring.put(b"through a pipe")
        assert child.answer() == b"through a pipe"


@BOTH
def test_a_process_that_is_no_child(kind, tmp_path):
    """The pickle travels in a file, to a program of its own."""
    with KINDS[kind]() as ring:
        (tmp_path / "pickle").write_bytes(pickle.dumps(ring))
        program = (
            "import pickle, sys\n"
            "with pickle.load(open(sys.argv[1], 'rb')) as ring:\n"
            "    print(ring.get(20).decode())\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program, tmp_path / "pickle"], stdout=subprocess.PIPE, text=True
        )
        ring.put(b"from a file")
        assert process.communicate(timeout=ENOUGH_S)[0] == "from a file\n"


@BOTH
def test_a_receiver_may_be_the_writer_and_send_the_ring_on(kind):
    with Child() as writer, Child() as reader:
        with KINDS[kind]() as ring:
            writer.call(keep, ring)
            reader.call(load_and_keep, writer.call(dump_kept))
        assert writer.call(call_kept, "put", b"item") is None  # its maker has closed it
        assert reader.call(call_kept, "get", ENOUGH_S) == b"item"
        reader.send(call_kept, "get", ENOUGH_S)
        writer.kill()
        assert reader.answer().startswith("RankFailed")


@BOTH
def test_a_pickle_may_be_loaded_twice(kind):
    with KINDS[kind]() as ring:
        data = pickle.dumps(ring)
        with pickle.loads(data) as first, pickle.loads(data) as second, copy.copy(ring) as third:
            ring.put(b"item")
            assert first.get() == b"item"
            for other in (second, third):
                with pytest.raises(RuntimeError, match="from this ring already"):
                    other.get()
        with pytest.raises(shmring.Closed):
            ring.put(b"item")


def test_every_receiver_is_a_reader():
    ring = shmring.Broadcast(TINY, readers=3)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(method)) for method in METHODS]
        with ring:
            for child in children:
                child.send(get_one, ring)
            ring.put(np.full(3, 7))
            for child in children:
                assert (child.answer() == 7).all()
        for child in children:
            assert child.call(call_kept, "get").startswith(ENDED)


@pytest.mark.parametrize("kind", ["memfd", "posix"])
def test_every_kind_of_segment(monkeypatch, kind):
    monkeypatch.setenv("SHMRING_SEGMENT", kind)
    with shmring.Ring() as ring, Child() as child:
        child.send(get_one, ring)
        ring.put(b"item")
        assert child.answer() == b"item"


@BOTH
@pytest.mark.parametrize("method", METHODS)
def test_a_ring_may_be_closed_before_it_has_been_loaded(kind, method):
    with Child(method) as child:
        child.send(time.sleep, 0.5)
        with KINDS[kind]() as ring:
            child.send(get_one, ring)
            ring.put(b"item")
        del ring
        assert child.answer() is None
        assert child.answer() == b"item"
        assert child.call(call_kept, "get").startswith(ENDED)
    for is_there in (True, False):  # the next ring closes the descriptor
        assert bool(ring_common._lingering) == is_there
        KINDS[kind]().close()


@BOTH
def test_closed_rings_are_kept_for_their_pickles_alone(kind):
    gc.collect()
    before, before_in_child = segments(), segments_of_a_child()
    rings = [KINDS[kind](TINY) for _ in range(3)]
    pickles = [
        [pickle.dumps(ring) for _ in range(count)] for ring, count in zip(rings, (0, 1, 300), strict=True)
    ]
    for ring in rings:
        ring.close()
    assert len(ring_common._lingering) == 2
    assert segments_of_a_child() == before_in_child
    for data in pickles[2][:192]:  # as many are counted
        pickle.loads(data).close()
    assert len(ring_common._lingering) == 1
    pickle.loads(pickles[1][0]).close()
    assert not ring_common._lingering
    assert segments() == before
    with pytest.raises(shmring.Error, match="gone"):
        pickle.loads(pickles[2][-1])


def segments():
    """Return the number of this process's descriptors of shared memory."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the listing
            count += os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:shmring")
    return count


@BOTH
def test_a_close_that_was_interrupted_is_completed(monkeypatch, kind):
    def interrupt():
        raise KeyboardInterrupt

    gc.collect()
    before = segments()
    ring = KINDS[kind]()
    with monkeypatch.context() as patch:
        patch.setattr(ring_common.time, "monotonic", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ring.close()
    ring.close()
    assert segments() == before


send_signal = ctypes.CDLL(None)["raise"]  # signal.raise_signal runs the handler itself


def interrupt(*_):
    raise KeyboardInterrupt


@BOTH
def test_an_interrupted_destructor_closes_the_ring(monkeypatch, kind):
    """The other side hears of it, and no descriptor is left."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps the ring with the traceback
    gc.collect()
    before = segments()
    with Child() as child:
        rings = [KINDS[kind]()]
        child.call(keep, rings[0])
        rings[0].put(b"item")
        before_handler = signal.signal(signal.SIGUSR1, interrupt)
        try:  # C code sends the signal and drops the ring: the handler runs in the destructor
            list(map(operator.call, (functools.partial(send_signal, signal.SIGUSR1), rings.clear)))
        finally:
            signal.signal(signal.SIGUSR1, before_handler)
        assert segments() == before
        assert child.call(call_kept, "get", ENOUGH_S) == b"item"
        assert child.call(call_kept, "get", ENOUGH_S).startswith(ENDED)


def fill(ring):
    for _ in range(4):
        ring.put(bytes(ring.nbytes // 3), ENOUGH_S)


@BOTH
def test_a_child_that_others_have_waited_for_has_ended(kind):
    """multiprocessing never learns of its end, as in a program that ignores SIGCHLD."""
    with KINDS[kind]() as ring:
        child = FORK.Process(target=keep, args=(ring,))
        child.start()
        os.waitpid(child.pid, 0)
        with pytest.raises(shmring.RankFailed, match="ended"):
            fill(ring)


def segments_of_a_child():
    """Return the number of those that a forked child keeps: none of arrays whose pickles are its parent's."""
    child = FORK.Process(target=exit_with_segments)
    child.start()
    child.join()
    return child.exitcode


def exit_with_segments():
    os._exit(segments())


# ---- pickles that cannot be loaded -----------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_sender_that_ends_before_the_ring_is_loaded(kind, how):
    with Child() as sender:
        data = sender.call(make, kind)
        if how == "kill":
            sender.kill()
        else:
            sender.call(close_long_ago)
        with pytest.raises(shmring.Error, match=f"the ring of process {sender.process.pid} is gone"):
            pickle.loads(data)
        if how == "close":
            sender.call(make, kind)  # a later ring, whose descriptor may have the same number
            with pytest.raises(shmring.Error, match="is gone"):
                pickle.loads(data)


@BOTH
def test_pickles_of_other_places_are_refused(kind, tmp_path):
    with KINDS[kind]() as ring:
        load, (machine, pid, number, identity, nonce, pickle_number) = ring.__reduce__()
        with pytest.raises(shmring.Error, match="another machine or container"):
            load("other boot", pid, number, identity, nonce, pickle_number)
        os.mkfifo(tmp_path / "fifo")
        fifo = os.open(tmp_path / "fifo", os.O_RDWR)
        with (tmp_path / "zeros").open("wb+") as zeros:
            zeros.truncate(1 << 16)
            its = [os.fstat(zeros.fileno()).st_dev, os.fstat(zeros.fileno()).st_ino]
            before = len(os.listdir("/proc/self/fd"))
            for place, match in [
                ((1 << 22, number, identity, nonce), "gone"),
                ((pid, fifo, identity, nonce), "gone"),
                ((pid, fifo, [os.fstat(fifo).st_dev, os.fstat(fifo).st_ino], nonce), "gone"),
                ((pid, number, [identity[0], identity[1] + 1], nonce), "gone"),
                ((pid, number, identity, nonce + 1), "gone"),
                ((pid, zeros.fileno(), its, nonce), "not a (broadcast )?ring of this version"),
            ]:
                with pytest.raises(shmring.Error, match=match):
                    load(machine, *place, pickle_number)
            assert len(os.listdir("/proc/self/fd")) == before
        os.close(fifo)
        load(machine, pid, number, identity, nonce, pickle_number).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_may_not_open_it():
    with shmring.Ring() as ring:
        answers, data = FORK.SimpleQueue(), pickle.dumps(ring)
        child = FORK.Process(target=load_as_nobody, args=(data, answers))
        child.start()
        assert "both must be of one user" in answers.get()
        child.join()
        pickle.loads(data).close()


def load_as_nobody(data, answers):
    os.setgid(65534)
    os.setuid(65534)
    answers.put(outcome(pickle.loads, data))


@BOTH
def test_a_closed_ring_is_not_pickled(kind):
    ring = KINDS[kind]()
    ring.close()
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(ring)


# ---- waits for a process that has not come ---------------------------------------------------------------


@BOTH
def test_a_process_that_may_load_the_pickle_is_waited_for(kind):
    """There is no child, and a pickle under way."""
    with KINDS[kind]() as ring:
        data = pickle.dumps(ring)
        with pytest.raises(TimeoutError):
            fill_up(ring)(1.2)  # longer than the first check for a process
        with pickle.loads(data) as other:
            assert other.get(ENOUGH_S) == bytes(100)


@BOTH
def test_a_receiver_is_waited_for_after_the_end_of_the_maker(kind):
    with Child() as maker, Child() as writer, Child() as reader:
        data = maker.call(make, kind, TINY)
        for child in (writer, reader):
            child.call(load_and_keep, data)
        maker.kill()
        writer.send(call_kept, "put", bytes(5000), ENOUGH_S)
        assert not writer.pipe.poll(1.2)
        assert reader.call(call_kept, "get", ENOUGH_S) == bytes(5000)
        assert writer.answer() is None


@pytest.mark.parametrize("sent_on", [False, True])
def test_readers_do_not_wait_for_each_other(sent_on):
    """Each of them has the ring, so the other one could think that it will put."""
    with Child() as maker, Child() as first, Child() as second:
        data = maker.call(make_for, 2)
        for child in (first, second):
            child.call(load_and_keep, data)
        if sent_on:
            second.call(dump_kept)
        for child in (first, second):
            child.send(call_kept, "get", 3.0 if sent_on else ENOUGH_S)
        maker.kill()
        answers = [child.answer() for child in (first, second)]
        # If the second one has pickled the ring, a process that is to put may still load that.
        wanted = (
            "Timeout" if sent_on else f"RankFailed: nobody puts into this ring: process {maker.process.pid}"
        )
        for answer in answers:
            assert answer.startswith(wanted)


def dump_kept():
    return pickle.dumps(kept[-1])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@BOTH
def test_a_reader_that_dies_before_its_first_get_beside_other_children(kind, method):
    """The other child has not got the ring, so the writer need not wait for it."""
    with Child(method), KINDS[kind](TINY) as ring:
        child = multiprocessing.get_context(method).Process(target=die, args=(ring,))
        child.start()
        with pytest.raises(shmring.RankFailed, match="ended, or closed it"):
            fill_up(ring)(ENOUGH_S)
        child.join()


def die(ring):
    os.kill(os.getpid(), signal.SIGKILL)


@BOTH
def test_a_grandchild_that_has_the_ring_is_waited_for(kind):
    """Its parent, to which the ring was given, has ended."""
    ours, theirs = FORK.Pipe()
    with KINDS[kind](TINY) as ring:
        child = FORK.Process(target=leave_a_child, args=(ring, theirs))
        child.start()
        child.join()
        ring.put(bytes(5000), ENOUGH_S)
        assert ours.poll(ENOUGH_S)
        assert ours.recv() == bytes(5000)


def leave_a_child(ring, pipe):
    if os.fork() == 0:
        time.sleep(1.2)
        pipe.send(outcome(ring.get, ENOUGH_S))
    os._exit(0)


# ---- killed at any moment --------------------------------------------------------------------------------

PLENTY = 200


def load_and(data, function):
    """Load a ring and call function(ring); return the name of the error that ended it."""
    try:
        with pickle.loads(data) as ring:
            return function(ring)
    except shmring.Error as error:
        return type(error).__name__


def put_numbers(ring):
    for number in range(PLENTY):
        ring.put(np.full(20, number), ENOUGH_S)
    return PLENTY


def get_numbers(ring):
    for number in range(PLENTY):
        if not (ring.get(ENOUGH_S) == np.full(20, number)).all():
            return "wrong"
    return PLENTY


def kill_one_at_random(seed):
    """One makes a ring, and sends pickles of it to a writer and a reader; one of the three is killed.

    The maker is killed in the end in any case: while it lives, it could send the ring to others.
    """
    dice = random.Random(seed)
    kind = dice.choice(list(KINDS))
    with Child("fork") as maker, Child("fork") as writer, Child("fork") as reader:
        data = maker.call(make, kind, TINY)
        users = [(writer, put_numbers), (reader, get_numbers)]
        dice.shuffle(users)
        for child, function in users:
            child.send(load_and, data, function)
            time.sleep(dice.choice([0, dice.random() * 0.003]))
        time.sleep(dice.choice([0, dice.random() * 0.01]))
        killed = dice.choice([maker, writer, reader])
        killed.kill()
        time.sleep(dice.choice([0, dice.random() * 0.01]))
        maker.kill()
        answers = {child: child.answer() for child, _ in users if child is not killed}
    for child, answer in answers.items():  # Error: the maker died before this one had loaded the ring
        assert answer in {PLENTY, "Error", "RankFailed"}, (seed, kind, child is writer, answer)
    if killed is maker:
        assert (answers[reader] == PLENTY) == (answers[writer] == PLENTY), (seed, kind, answers)


def test_one_of_three_is_killed_at_any_moment():
    for seed in range(25):
        kill_one_at_random(seed)


@pytest.mark.soak
@pytest.mark.limit(4000)
def test_one_of_three_is_killed_again_and_again():
    for seed in range(5000):
        kill_one_at_random(seed)


# ---- interrupt -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("side", ["get", "put"])
@pytest.mark.parametrize("after_s", [0, 0.02, 0.8])  # at the beginning, asleep, and while a thread watches
def test_interrupt_wakes_a_thread_at_once(kind, side, after_s):
    with KINDS[kind](TINY) as ring, Child() as child:
        if side == "get":
            child.call(put_one, ring, b"first")
            assert ring.get(ENOUGH_S) == b"first"
        else:
            child.send(get_one, ring)
            ring.put(b"first")
            assert child.answer() == b"first"
        ended = []

        def wait():
            call, args = (ring.get, ()) if side == "get" else (ring.put, (bytes(5000),))
            ended.append((outcome(call, *args), time.monotonic()))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(after_s)
        begin = time.monotonic()
        ring.interrupt()
        thread.join(ENOUGH_S)
        [(found, end)] = ended
        assert found.startswith("Closed: interrupt()")
        if side == "get" and after_s == 0.8:
            assert end - begin < 1  # the next poll would be 2 s later
        assert outcome(ring.get if side == "get" else fill_up(ring), timeout=5).startswith("Closed: interr")


def fill_up(ring):
    def put(timeout):
        while True:
            ring.put(bytes(100), timeout)

    return put


@BOTH
def test_calls_that_need_not_wait_go_on_after_interrupt(kind):
    with KINDS[kind]() as ring:
        ring.interrupt()
        ring.put(b"item")
        ring.put_nowait(b"last")
        assert ring.get() == b"item"
        assert ring.get_nowait() == b"last"
        with pytest.raises(queue.Empty):
            ring.get_nowait()
        with pytest.raises(shmring.Closed, match="interrupt"):
            ring.get(timeout=0)
    ring.interrupt()  # a closed ring has nothing to interrupt


def test_only_this_process_is_interrupted():
    ours, theirs = FORK.Pipe()
    with shmring.Broadcast(TINY, readers=2) as ring:
        ring.interrupt()
        child = FORK.Process(target=send_item, args=(ring, theirs))
        child.start()
        time.sleep(0.3)
        ring.interrupt()
        ring.put(b"item")
        assert ours.poll(ENOUGH_S)
        assert ours.recv() == b"item"
        child.join()


def send_item(ring, pipe):
    pipe.send(outcome(ring.get, ENOUGH_S))
