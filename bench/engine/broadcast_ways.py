"""The ways that bench_broadcast.py times: one process sends arrays to `nreaders` children."""

from __future__ import annotations

import mmap
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import shmring

FORK = multiprocessing.get_context("fork")
PATIENCE_S = 60


class Way:
    """One way to send from this process to `nreaders` children. """

    def __init__(self, nreaders: int, nbytes: int) -> None:
        self.nreaders, self.x = nreaders, np.zeros(nbytes, "u1")
        self.open()
        self.pipes, self.children = [], []
        for reader in range(nreaders):
            ours, theirs = FORK.Pipe()
            child = FORK.Process(target=self.obey, args=(reader, theirs))
            child.start()
            self.pipes.append(ours)
            self.children.append(child)
        self.answers()  # all can receive
        self.connect()

    def open(self) -> None:
        """Make what the processes send through, before they start."""

    def connect(self) -> None:
        """Make what this process sends with, after the children can receive."""

    def put(self, x: np.ndarray[Any, Any]) -> None:
        raise NotImplementedError

    def getter(self, reader: int) -> Callable[[], np.ndarray[Any, Any]]:
        raise NotImplementedError

    def obey(self, reader: int, pipe: Any) -> None:
        get = self.getter(reader)
        pipe.send(None)
        while order := pipe.recv():
            pipe.send(getattr(self, order[0])(get, *order[1:]))

    def take(self, get: Callable[[], np.ndarray[Any, Any]], count: int) -> int:
        for _ in range(count):
            x = get()
        return int(x[-1])

    def note(self, get: Callable[[], np.ndarray[Any, Any]], count: int) -> tuple[list[int], float]:
        """Return how many ns each of the messages was under way, and the CPU seconds spent."""
        begin = time.process_time()
        found = [-int(get()[:8].view("i8")[0]) + time.perf_counter_ns() for _ in range(count)]
        return found, time.process_time() - begin

    def wait(self, get: Callable[[], np.ndarray[Any, Any]]) -> float:
        """Return the CPU seconds until the one message comes."""
        begin = time.process_time()
        get()
        return time.process_time() - begin

    def order(self, *order: Any) -> None:
        for pipe in self.pipes:
            pipe.send(order)

    def answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self.pipes]

    def seconds(self, count: int) -> float:
        """Return the seconds until all children have taken all items."""
        self.order("take", count)
        begin = time.perf_counter()
        for number in range(count):
            self.x[-1] = number % 100
            self.put(self.x)
        last = self.answers()
        took = time.perf_counter() - begin
        if set(last) != {(count - 1) % 100}:
            raise RuntimeError(f"the last arrays hold {last}")
        return took

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for child in self.children:
            child.join()


class Broadcast(Way):
    def open(self) -> None:
        self.ring = shmring.Broadcast(readers=self.nreaders)

    def put(self, x: np.ndarray[Any, Any]) -> None:
        self.ring.put(x, PATIENCE_S)

    def getter(self, reader: int) -> Callable[[], np.ndarray[Any, Any]]:
        return self.ring.get

    def close(self) -> None:
        super().close()
        self.ring.close()


class Ring(Way):
    """One ring for each reader; the table has it with one reader only."""

    def open(self) -> None:
        self.rings = [shmring.Ring() for _ in range(self.nreaders)]

    def put(self, x: np.ndarray[Any, Any]) -> None:
        for ring in self.rings:
            ring.put(x, PATIENCE_S)

    def getter(self, reader: int) -> Callable[[], np.ndarray[Any, Any]]:
        return self.rings[reader].get

    def close(self) -> None:
        super().close()
        for ring in self.rings:
            ring.close()


class Queue(Way):
    def open(self) -> None:
        self.queues = [FORK.Queue() for _ in range(self.nreaders)]

    def put(self, x: np.ndarray[Any, Any]) -> None:
        for queue in self.queues:
            queue.put(x)

    def getter(self, reader: int) -> Callable[[], np.ndarray[Any, Any]]:
        return self.queues[reader].get


class Copies(Way):
    """Nothing is sent: this process copies into shared memory, and each child out of it into a new array."""

    def open(self) -> None:
        self.shared = np.frombuffer(mmap.mmap(-1, 4 << 20), "u1")
        self.at = 0

    def slot(self) -> np.ndarray[Any, Any]:
        nbytes = len(self.x)
        self.at = (self.at + nbytes) % (len(self.shared) - nbytes + 1) if nbytes < len(self.shared) else 0
        return self.shared[self.at : self.at + nbytes]

    def put(self, x: np.ndarray[Any, Any]) -> None:
        self.slot()[:] = x

    def getter(self, reader: int) -> Callable[[], np.ndarray[Any, Any]]:
        return lambda: self.slot().copy()

    def take(self, get: Callable[[], np.ndarray[Any, Any]], count: int) -> int:
        super().take(get, count)
        return (count - 1) % 100
