"""vLLM's MessageQueue on rings, with vLLM itself. vllm_upstream.py runs vLLM's own tests of it."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
from ring_items import outcome

torch = pytest.importorskip("torch")
upstream = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")

import shmring
from shmring.adapters.vllm import MessageQueue

FORK = multiprocessing.get_context("fork")
ENOUGH_S = 20
CHUNK = 1 << 20
BUSY_S = 1.0  # vLLM's busy_loop_s

torch.set_num_threads(1)  # forked children have no others


def objects():
    """Return objects of all ways: in the pickle, beside it, and through the socket."""
    whole = torch.arange(1 << 17)  # 1 MiB
    return [
        None,
        b"",
        b"bytes",
        {"a": [1, "two"], "b": np.arange(5)},
        np.arange(1 << 17),
        {"tensor": torch.arange(1 << 16, dtype=torch.int32).to(torch.bfloat16), "row": torch.ones(3)},
        [np.arange(100_000), np.arange(60_000), torch.zeros(0, 3)],
        whole.view(512, 256)[:, ::2],
        np.arange(1 << 18),  # 2 MiB
    ]


def same(found, wanted):
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, np.ndarray):
        return found.dtype == wanted.dtype and np.array_equal(found, wanted) and found.flags.writeable
    return type(found) is type(wanted) and found == wanted


class Readers:
    """Child processes that each have a reader's queue, and run `function(queue, pipe)`."""

    def __init__(self, handle, ranks, function, wait=True):
        self.pipes, self.processes = [], []
        for rank in ranks:
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=read, args=(pickle.dumps(handle), rank, function, theirs, wait))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def answers(self):
        return [pipe.recv() if pipe.poll(ENOUGH_S) else "no answer" for pipe in self.pipes]

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        for process in self.processes:
            process.join(0 if kind else ENOUGH_S)
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def read(handle, rank, function, pipe, wait):
    reader = MessageQueue.create_from_handle(pickle.loads(handle), rank)
    assert isinstance(reader, MessageQueue)
    if wait:
        reader.wait_until_ready()
    function(reader, pipe)


def get_all(reader, pipe):
    pipe.send([same(reader.dequeue(ENOUGH_S), wanted) for wanted in objects()])


def test_every_reader_gets_every_object():
    writer = MessageQueue(2, 2, max_chunk_bytes=3 * CHUNK // 2, max_chunks=2)
    with Readers(writer.export_handle(), [0, 1], get_all) as readers:
        writer.wait_until_ready()
        for obj in objects():
            writer.enqueue(obj, ENOUGH_S)
        assert readers.answers() == [[True] * len(objects())] * 2
    assert outcome(writer.dequeue).startswith("RuntimeError: Only readers")


def test_readers_on_other_hosts_have_the_socket():
    writer = MessageQueue(3, 2, local_reader_ranks=[5, 3], connect_ip="127.0.0.1")
    with Readers(writer.export_handle(), [5, 4, 3], get_all) as readers:
        writer.wait_until_ready()
        for obj in objects():
            assert same(writer.broadcast_object(obj), obj)
        assert readers.answers() == [[True] * len(objects())] * 3


def test_tensors_are_not_copied_after_they_came():
    writer, reader = pair()
    wanted = torch.arange(1 << 18)
    writer.enqueue(wanted)
    found = reader.dequeue(ENOUGH_S)
    writer.enqueue(torch.zeros(1 << 18))
    found[0] = 7
    assert torch.equal(found[1:], wanted[1:])
    assert found.untyped_storage().nbytes() > wanted.nbytes - 1
    assert not torch.any(reader.dequeue(ENOUGH_S))


def pair(**options):
    writer = MessageQueue(1, 1, **options)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.wait_until_ready()
    reader.wait_until_ready()
    return writer, reader


def test_timeouts():
    writer, reader = pair(max_chunk_bytes=1024, max_chunks=2)
    for timeout in (0, 0.02, 1.2):
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=timeout)
        assert time.monotonic() - begin > timeout - 0.002
    sent = 0
    with contextlib.suppress(TimeoutError):
        while True:
            writer.enqueue(bytes(500), timeout=0.05)
            sent += 1
    assert sent >= 2
    for _ in range(sent):
        assert reader.dequeue(ENOUGH_S) == bytes(500)
    writer.enqueue("next", timeout=1)
    assert reader.dequeue(ENOUGH_S) == "next"


def test_one_message_fits_without_a_reader_that_takes_it():
    """vLLM's have the same room, in chunks."""
    for nbytes in (1 << 16, 1 << 20, 20 << 20):
        writer, reader = pair(max_chunk_bytes=nbytes, max_chunks=1)
        wanted = np.arange(nbytes // 8 - 100)
        writer.enqueue(wanted, timeout=1)
        assert same(reader.dequeue(ENOUGH_S), wanted)


@pytest.mark.parametrize("after_s", [0, 0.1, BUSY_S + 0.8])
def test_shutdown_wakes_a_reader_at_once(after_s):
    _writer, reader = pair()
    ended = []

    def wait():
        ended.append((outcome(reader.dequeue, indefinite=True), time.monotonic()))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(after_s)
    begin = time.monotonic()
    reader.shutdown()
    thread.join(ENOUGH_S)
    [(found, end)] = ended
    assert found == "RuntimeError: cancelled"
    if after_s > BUSY_S:
        assert end - begin < 1  # the ring's next poll would be 2 s later
    assert reader.shutting_down


def test_what_has_come_is_got_after_shutdown():
    writer, reader = pair()
    writer.enqueue("first")
    writer.enqueue("second")
    reader.shutdown()
    assert reader.dequeue() == "first"
    assert reader.dequeue(timeout=1) == "second"
    assert outcome(reader.dequeue, 1) == "RuntimeError: cancelled"


def test_an_idle_reader_costs_no_cpu():
    _writer, reader = pair()
    reader._spin_condition.last_read = 0
    before = time.thread_time()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=2)
    assert time.thread_time() - before < 0.02


def get_and_die(reader, pipe):
    pipe.send(reader.dequeue(ENOUGH_S))
    os.kill(os.getpid(), signal.SIGKILL)


def die(reader, pipe):
    os.kill(os.getpid(), signal.SIGKILL)


def get_until_it_raises(reader, pipe):
    count = 0
    with contextlib.suppress(shmring.Closed):
        while True:
            reader.dequeue(ENOUGH_S)
            count += 1
    pipe.send(count)


@pytest.mark.parametrize("function", [get_and_die, die])
def test_a_dead_reader_is_left_behind(function):
    """vLLM's writer waits for it for ever. One that has not dequeued is known as well."""
    writer = MessageQueue(2, 2, max_chunk_bytes=1024, max_chunks=2)
    handle = writer.export_handle()
    with Readers(handle, [0], function) as dead, Readers(handle, [1], get_until_it_raises) as alive:
        writer.wait_until_ready()
        for _ in range(100):
            writer.enqueue(bytes(500), ENOUGH_S)
        if function is get_and_die:
            assert dead.answers() == [bytes(500)]
        del writer
        gc.collect()
        assert alive.answers() == [100]


def test_a_writer_without_readers_says_so():
    writer = MessageQueue(1, 1, max_chunk_bytes=1024, max_chunks=2)
    with Readers(writer.export_handle(), [0], die):
        writer.wait_until_ready()
        with pytest.raises(shmring.RankFailed, match="died"):
            enqueue_until_it_raises(writer)


def enqueue_until_it_raises(writer):
    for _ in range(100_000):
        writer.enqueue(bytes(500), ENOUGH_S)


def test_a_reader_need_not_wait_until_it_is_ready():
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.wait_until_ready()
    writer.enqueue("item")
    assert reader.dequeue(ENOUGH_S) == "item"
    reader.wait_until_ready()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.01)


def wait_until_ready_and_send(reader, pipe):
    pipe.send(outcome(reader.wait_until_ready))


def test_a_reader_that_waits_for_a_writer_that_dies():
    """vLLM's waits for ever."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=make_and_wait, args=(theirs,))
    process.start()
    with Readers(ours.recv(), [0], wait_until_ready_and_send, wait=False) as readers:
        time.sleep(0.5)
        process.kill()
        process.join()
        assert readers.answers()[0].startswith("RankFailed")


def make_and_wait(pipe):
    writer = MessageQueue(2, 2)
    pipe.send(writer.export_handle())
    writer.wait_until_ready()  # only one comes


def write_and_die(pipe):
    writer = MessageQueue(1, 1)
    pipe.send(writer.export_handle())
    writer.wait_until_ready()
    writer.enqueue("last")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_writer_is_an_error():
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=write_and_die, args=(theirs,))
    process.start()
    reader = MessageQueue.create_from_handle(ours.recv(), 0)
    reader.wait_until_ready()
    process.join()
    assert reader.dequeue(ENOUGH_S) == "last"
    with pytest.raises(shmring.RankFailed, match=f"process {process.pid} died"):
        reader.dequeue(indefinite=True)


def test_a_handle_of_another_machine_is_an_error_only_where_it_is_used():
    writer = MessageQueue(2, 1, local_reader_ranks=[0], connect_ip="127.0.0.1")
    handle = writer.export_handle()
    load, place = pickle.loads(handle.buffer_handle[3]).__reduce__()
    handle.buffer_handle = (*handle.buffer_handle[:3], pickle.dumps(Elsewhere(load, ("other", *place[1:]))))
    MessageQueue.create_from_handle(pickle.loads(pickle.dumps(handle)), 1)
    with pytest.raises(shmring.Error, match="another machine or container"):
        MessageQueue.create_from_handle(handle, 0)


class Elsewhere:
    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced
