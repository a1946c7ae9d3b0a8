"""vLLM's queue from one process to several, with shmring's rings for the readers of its machine.

vLLM imports nothing of this; `shmring.adapters.vllm.MessageQueue` is the class.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import queue
import time
import types
import weakref
from typing import Any

import torch
import zmq
from vllm.distributed.device_communicators import shm_broadcast as upstream

import shmring

_ROOM_NBYTES = 16 << 20  # the size of a ring; smaller if vLLM's is, larger if a message needs it
_SEPARATE_NBYTES = 1 << 20  # buffers from here on are not copied into the pickle, as in vLLM
_BRIEF_MS = 20
_READY = b"READY"  # the first item of a ring; it is no pickle


class Waiting:
    """The waits of a reader, in the place of vLLM's SpinCondition. A waiting reader sleeps.

    As in vLLM, a wait is short within `busy_loop_s` of the last read, and long later.
    """

    def __init__(self, ring: shmring.Broadcast, is_reader: bool) -> None:
        self._ring = ring
        self.is_reader = is_reader
        self.last_read = time.monotonic() if is_reader else 0.0
        self.busy_loop_s = 1.0 if is_reader else 0.0
        self.item: Any = None  # the item that a wait has received

    def wait(self, timeout_ms: int | None = None) -> None:
        """Sleep until there is an item, `cancel` is called, or the time has passed."""
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            timeout_ms = _BRIEF_MS if timeout_ms is None else min(_BRIEF_MS, timeout_ms)
        with contextlib.suppress(TimeoutError):
            self.item = self._ring.get_object(None if timeout_ms is None else timeout_ms / 1e3)

    def take(self) -> Any:
        """Return the next item if there is one, else None."""
        item, self.item = self.item, None
        if item is None:
            with contextlib.suppress(queue.Empty):
                item = self._ring.get_object(block=False)
        return item

    def record_read(self) -> None:
        """Note that an item was read now."""
        self.last_read = time.monotonic()

    def notify(self) -> None:
        """Do nothing: putting an item wakes the readers."""

    def cancel(self) -> None:
        """End the waits of this process, those of other threads as well."""
        self._ring.interrupt()


_Upstream = upstream.MessageQueue  # kept here, since a program may put the class below in its place


class MessageQueue(upstream.MessageQueue):  # type: ignore[misc, unused-ignore]
    """See `shmring.adapters.vllm.MessageQueue`."""

    _is_ready: bool  # of a reader of this machine

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 1024 * 1024 * 24,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        ranks = list(range(n_local_reader)) if local_reader_ranks is None else local_reader_ranks
        assert len(ranks) == n_local_reader
        super().__init__(
            n_reader - n_local_reader,
            0,
            max_chunk_bytes=max_chunk_bytes,
            max_chunks=max_chunks,
            connect_ip=connect_ip,
        )
        self.n_local_reader = n_local_reader
        self.handle.local_reader_ranks = ranks
        if n_local_reader > 0:
            arena = enable_shm_tensor_arena and self.n_remote_reader == 0
            self._open_local(max_chunk_bytes, max_chunks, arena)

    def _open_local(self, max_chunk_bytes: int, max_chunks: int, with_arena: bool) -> None:
        room = min(max_chunk_bytes * max_chunks, _ROOM_NBYTES)
        self.buffer = shmring.Broadcast(
            max(room, max_chunk_bytes + max_chunk_bytes // 8), readers=self.n_local_reader
        )
        self.max_chunk_bytes = max_chunk_bytes
        self.current_idx = 0
        self._spin_condition = Waiting(self.buffer, is_reader=False)
        self.handle.buffer_handle = (
            self.n_local_reader,
            max_chunk_bytes,
            max_chunks,
            pickle.dumps(self.buffer),
        )
        if with_arena:
            from vllm.distributed.device_communicators import shm_tensor_arena

            self.tensor_arena = shm_tensor_arena.ShmTensorArena(self.n_local_reader)
            self.handle.tensor_arena_handle = self.tensor_arena.handle()
        # For messages of max_chunk_bytes and more, and for wait_until_ready.
        self.local_socket = self._socket(zmq.XPUB)
        self.local_socket.setsockopt(zmq.XPUB_VERBOSE, True)
        self.handle.local_subscribe_addr = upstream.get_open_zmq_ipc_path()
        self.local_socket.bind(self.handle.local_subscribe_addr)

    def _socket(self, kind: int) -> Any:
        context = zmq.Context()
        socket = context.socket(kind)
        weakref.finalize(self, upstream._close_zmq, context, [socket]).atexit = False
        return socket

    @staticmethod
    def create_from_handle(handle: Any, rank: int) -> Any:
        """Return the queue of a reader."""
        if rank not in handle.local_reader_ranks:
            return _own(_Upstream.create_from_handle)(handle, rank)
        self = MessageQueue.__new__(MessageQueue)
        self.handle = handle
        self.shutting_down = self._is_writer = self._is_remote_reader = self._is_ready = False
        self._is_local_reader = True
        self.local_reader_rank = handle.local_reader_ranks.index(rank)
        self.current_idx = 0
        self.remote_socket = self.tensor_arena = None
        if handle.tensor_arena_handle is not None:
            self._open_arena(handle.tensor_arena_handle)
        self.local_socket = self._socket(zmq.SUB)
        self.local_socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self.buffer = pickle.loads(handle.buffer_handle[3])
        self._spin_condition = Waiting(self.buffer, is_reader=True)
        self._spin_condition.item = self._spin_condition.take()  # from now on the ring counts this reader
        self.local_socket.connect(handle.local_subscribe_addr)
        return self

    def _open_arena(self, arena_handle: Any) -> None:
        from vllm.distributed.device_communicators import shm_tensor_arena

        self.tensor_arena = shm_tensor_arena.ShmTensorArena(*arena_handle, reader_rank=self.local_reader_rank)
        if hasattr(self.tensor_arena, "shared_memory"):  # else it is of another machine
            shm_tensor_arena._TENSOR_ARENAS[self.tensor_arena.shared_memory.name] = self.tensor_arena

    def wait_until_ready(self) -> None:
        """Wait until the writer and all readers have come. Collective.

        A reader of this machine waits in the ring, where it notices the death of the writer.
        """
        if self.buffer is None:
            super().wait_until_ready()
        elif self._is_local_reader:
            self._is_ready = self._is_ready or self._next_item(None, True) == _READY
            assert self._is_ready
        else:
            for _ in range(self.n_local_reader):
                self.local_socket.recv()  # a subscription
            self.buffer.put(_READY)
            for _ in range(self.n_remote_reader):
                self.remote_socket.recv()
            if self.n_remote_reader > 0:
                self.remote_socket.send(_READY)

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to all readers."""
        assert self._is_writer, "Only writers can enqueue"
        data, buffers = self._pickled(obj)
        if self.buffer is not None:
            if len(data) + sum(4 + len(each) for each in buffers) + 6 >= self.max_chunk_bytes:
                self.buffer.put(b"", timeout)  # the message comes through the socket
                self.local_socket.send_multipart([data, *buffers], copy=False)
            elif buffers:
                self.buffer.put_object([data, *map(pickle.PickleBuffer, buffers)], timeout)
            else:
                self.buffer.put(data, timeout)
        if self.n_remote_reader > 0:
            self.remote_socket.send_multipart([data, *buffers], copy=False)

    def _pickled(self, obj: Any) -> tuple[bytes, list[memoryview]]:
        """Return the pickle of an object and its large buffers, as vLLM sends them."""
        buffers: list[memoryview] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if len(raw) >= _SEPARATE_NBYTES:
                buffers.append(raw)
            return len(raw) < _SEPARATE_NBYTES

        with io.BytesIO() as file:
            if self.tensor_arena is not None:
                from vllm.distributed.device_communicators.shm_tensor_arena import _ArenaPickler

                pickler: Any = _ArenaPickler(file, self.tensor_arena, buffer_callback=is_small)
            else:
                pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=is_small)
            pickler.dispatch_table = copyreg.dispatch_table | {
                torch.Tensor: _reduce_tensor if self.n_remote_reader == 0 else upstream._reduce_tensor
            }
            pickler.dump(obj)
            return file.getvalue(), buffers

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Return the next object."""
        if not self._is_local_reader:
            return super().dequeue(timeout, indefinite)
        if self.tensor_arena is not None:
            self.tensor_arena.flush_releases()
        item = self._next_item(timeout, indefinite)
        if item == _READY:  # wait_until_ready was not called
            self._is_ready = True
            item = self._next_item(timeout, indefinite)
        if item == b"":
            return self.recv(self.local_socket, timeout)
        data, *buffers = [item] if isinstance(item, bytes) else item
        return pickle.loads(data, buffers=buffers)

    def _next_item(self, timeout: float | None, indefinite: bool) -> Any:
        limit = self.ReadTimeoutWithWarnings(timeout=timeout, should_warn=not indefinite)
        while (item := self._spin_condition.take()) is None:
            try:
                self._spin_condition.wait(timeout_ms=limit.timeout_ms())
            except shmring.Closed:
                if not self.shutting_down:
                    raise
            if self.shutting_down and self._spin_condition.item is None:
                raise RuntimeError("cancelled")
            if limit.should_warn():
                interval = upstream.VLLM_RINGBUFFER_WARNING_INTERVAL
                upstream.logger.info(upstream.LONG_WAIT_TIME_LOG_MSG, interval)
        self._spin_condition.record_read()
        return item

    @staticmethod
    def create_from_process_group_single_reader(*args: Any, **options: Any) -> tuple[Any, list[Any]]:
        """Return the queue of each rank to one reader, and on the reader the handles of all. Collective."""
        found: tuple[Any, list[Any]] = _own(_Upstream.create_from_process_group_single_reader)(
            *args, **options
        )
        return found

    @staticmethod
    def create_from_process_group(*args: Any, **options: Any) -> Any:
        """Return the queue of one writer to the other ranks of a group. Collective."""
        return _own(_Upstream.create_from_process_group)(*args, **options)


def _own(function: Any) -> Any:
    """Return a function of vLLM's module that makes queues of this class, whatever class it names."""
    names = {**vars(upstream), "MessageQueue": MessageQueue}
    own = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Return how a tensor is pickled: as in vLLM, but without another copy in a reader of this machine."""
    function, args, *more = upstream._reduce_tensor(tensor)
    return _tensor_of if function is upstream._rebuild_tensor else function, args, *more


def _tensor_of(buffer: Any, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return the tensor of a pickle. A buffer of a ring's item belongs to this process alone."""
    if isinstance(buffer, memoryview) and not buffer.readonly and len(buffer):
        return torch.frombuffer(buffer, dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)
    return upstream._rebuild_tensor(buffer, shape, dtype)
