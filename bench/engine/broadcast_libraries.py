"""Other libraries' ways to send from one process to several, as bench_broadcast.py times them.

Each library is imported when its way is opened. Its ordinary interface is used: whole arrays where it
pickles, else their bytes. Each reader has a copy of its own, as `Broadcast.get` returns one.
"""

from __future__ import annotations

import ctypes
import secrets
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.engine.broadcast_ways import FORK, Way

Array = np.ndarray[Any, Any]


class FasterFifo(Way):
    """A queue for each reader: a ring in shared memory under a mutex. It pickles."""

    def open(self) -> None:
        from faster_fifo import Queue

        room = max(1_000_000, 8 * len(self.x))
        self.queues = [Queue(max_size_bytes=room) for _ in range(self.nreaders)]

    def put(self, x: Array) -> None:
        for queue in self.queues:
            queue.put(x)

    def getter(self, reader: int) -> Callable[[], Array]:
        return lambda: self.queues[reader].get(timeout=60)


class ZeroMQ(Way):
    """A socket of the ipc transport to each reader, which blocks while 1,000 messages are under way."""

    def open(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.sockets: list[Any] = []

    def address(self, reader: int) -> str:
        return f"ipc://{self.folder}/{reader}"

    def connect(self) -> None:
        import zmq

        for reader in range(self.nreaders):
            socket = zmq.Context.instance().socket(zmq.PUSH)
            socket.connect(self.address(reader))
            self.sockets.append(socket)

    def put(self, x: Array) -> None:
        for socket in self.sockets:
            socket.send(x)

    def getter(self, reader: int) -> Callable[[], Array]:
        import zmq

        socket = zmq.Context.instance().socket(zmq.PULL)
        socket.bind(self.address(reader))
        return lambda: np.frombuffer(socket.recv(), "u1")

    def close(self) -> None:
        super().close()
        for socket in self.sockets:
            socket.close(linger=0)
        shutil.rmtree(self.folder)


class Iceoryx(Way):
    """A publisher that waits for slow readers, and an event for each message, on which they sleep."""

    def open(self) -> None:
        self.name = f"shmring-bench-{secrets.token_hex(8)}"

    def services(self) -> tuple[Any, Any, Any]:
        import iceoryx2 as iox2

        iox2.set_log_level(iox2.LogLevel.Fatal)
        node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        builder = node.service_builder(iox2.ServiceName.new(self.name))
        data = builder.publish_subscribe(iox2.Slice[ctypes.c_uint8]).enable_safe_overflow(False)
        data = data.subscriber_max_buffer_size(16).open_or_create()
        event = node.service_builder(iox2.ServiceName.new(self.name)).event().open_or_create()
        return node, data, event

    def connect(self) -> None:
        import iceoryx2 as iox2

        self.node, data, event = self.services()
        wait = iox2.BackpressureStrategy.RetryUntilDelivered
        builder = data.publisher_builder().initial_max_slice_len(len(self.x)).max_loaned_samples(2)
        self.publisher = builder.backpressure_strategy(wait).create()
        self.notifier = event.notifier_builder().create()

    def put(self, x: Array) -> None:
        sample = self.publisher.loan_slice_uninit(len(x))
        ctypes.memmove(sample.payload().as_ptr(), x.ctypes.data, len(x))
        sample.assume_init().send()
        self.notifier.notify()

    def getter(self, reader: int) -> Callable[[], Array]:
        import iceoryx2 as iox2

        node, data, event = self.services()
        subscriber = data.subscriber_builder().create()
        listener = event.listener_builder().create()
        long = iox2.Duration.from_millis(10)  # an event can be lost

        def get() -> Array:
            while (sample := subscriber.receive()) is None:
                listener.timed_wait(long)
            x = np.empty(sample.payload().len(), "u1")
            ctypes.memmove(x.ctypes.data, sample.payload().as_ptr(), len(x))
            sample.delete()
            return x

        get.node = node  # type: ignore[attr-defined]  # its end would end the services
        return get

    def close(self) -> None:
        super().close()
        for part in (self.publisher, self.notifier):
            part.delete()


class MessageQueue(Way):
    """vLLM's ring in shared memory from one writer to all readers, which poll it. It pickles."""

    def kind(self) -> Any:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        return MessageQueue

    def open(self) -> None:
        self.handles = [FORK.Pipe() for _ in range(self.nreaders)]
        self.is_ready = False

    def connect(self) -> None:
        self.queue = self.kind()(self.nreaders, self.nreaders)
        for _, pipe in self.handles:
            pipe.send(self.queue.export_handle())

    def put(self, x: Array) -> None:
        if not self.is_ready:
            self.queue.wait_until_ready()
            self.is_ready = True
        self.queue.enqueue(x)

    def getter(self, reader: int) -> Callable[[], Array]:
        found: list[Any] = []

        def get() -> Array:
            if not found:
                found.append(self.kind().create_from_handle(self.handles[reader][0].recv(), reader))
                found[0].wait_until_ready()
            return found[0].dequeue()

        return get


class Adapter(MessageQueue):
    """The same interface, of shmring.adapters.vllm."""

    def kind(self) -> Any:
        from shmring.adapters.vllm import MessageQueue

        return MessageQueue


LIBRARIES = {
    "faster_fifo": FasterFifo,
    "zmq": ZeroMQ,
    "iceoryx2": Iceoryx,
    "vllm": MessageQueue,
    "vllm_adapter": Adapter,
}
