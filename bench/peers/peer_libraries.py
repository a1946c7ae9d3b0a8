"""Join and call each contestant's library, inside the rank processes.

Contains one class per library. Runs in the contestant's own interpreter: it may import numpy and, when a rank
joins, that one library.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.calls import (
    OBJECT_BROADCAST,
    OBJECT_PING_PONG,
    PING_PONG,
    STREAM,
    WINDOW,
    Array,
    arguments_of,
    counts_of,
    object_with,
    wrong_elements,
)

HUGE_NBYTES = 2 << 20
MALLOC_OFFSET = 16  # of an array in the pages that malloc maps for it


def private_array(count: int, dtype: np.dtype[Any], offset: int = MALLOC_OFFSET) -> Array:
    """Return zeros in private memory, with the same kind of pages and the same alignment in every process.

    Huge pages, so that an array is contiguous in physical memory, by which caches are indexed: on pages of
    4 KiB, whether arrays of about half a cache displace each other is a matter of luck. np.empty gives huge
    pages from 4 MiB on, as many as the address allows, and else what the process has freed before.
    """
    nbytes = count * dtype.itemsize + 2 * HUGE_NBYTES
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    begin = -np.frombuffer(pages, "u1").ctypes.data % HUGE_NBYTES + offset
    array: Array = np.frombuffer(pages, dtype, count, begin)
    array.fill(0)
    return array


@dataclass
class Seat:
    """The place of a rank, from its command line."""

    rank: int
    size: int
    folder: Path
    probe: Path | None
    addresses: tuple[str, ...] = ()  # by rank, where ranks are on several hosts


@dataclass(frozen=True)
class Job:
    """The call to make and its options. nbytes: of the larger of both arrays."""

    call: str
    variant: str
    nbytes: int
    dtype: np.dtype[Any]
    written: bool
    keywords: dict[str, str]

    @property
    def count(self) -> int:
        return self.nbytes // self.dtype.itemsize

    def counts(self, size: int) -> tuple[int, int]:
        return counts_of(self.call, self.count, size)

    def private(self, size: int) -> tuple[Array, Array]:
        """Return x and y in private memory."""
        x_count, y_count = self.counts(size)
        return private_array(x_count, self.dtype), private_array(y_count, self.dtype)


@dataclass
class Prepared:
    """The arrays and the call of one variant at one size."""

    x: Array
    y: Array
    call: str
    names: dict[str, Any]
    release: Callable[[], None] = field(default=lambda: None)
    count_wrong: Callable[[], int] | None = None  # for results that are not in y

    @property
    def in_place(self) -> bool:
        return self.y is self.x


class Library:
    """Joins and calls one library; subclasses are the contestants."""

    # Threads that the library starts when it joins stay on the rank's CPU too.
    pinned_with_its_threads = True

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def token(self) -> str | None:
        """Return what rank 0 hands to the others before they join."""
        return None

    def join(self, token: str | None) -> None:
        raise NotImplementedError

    def prepare(self, job: Job) -> Prepared:
        raise NotImplementedError

    def wrong(self, job: Job, x: Array, y: Array) -> int:
        """Count the elements of the last result that are wrong."""
        written = job.written and y is not x
        return wrong_elements(job.call, y, len(x), self.seat.rank, self.seat.size, written=written)

    def versions(self) -> dict[str, str]:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        return {}

    def leave(self) -> None:
        raise NotImplementedError


def ping_pong(send: Callable[..., Any], recv: Callable[..., Any], x: Array, y: Array, rank: int) -> Prepared:
    """Return the same code for every library: rank 0 begins."""
    names = {"send": send, "recv": recv, "x": x, "y": y, "other": 1 - rank}
    steps = ["send(x, other)", "recv(y, other)"]
    return Prepared(x, y, "; ".join(steps if rank == 0 else reversed(steps)), names)


def stream(isend: Callable[..., Any], irecv: Callable[..., Any], send: Callable[..., Any],
           recv: Callable[..., Any], x: Array, rooms: list[Array], rank: int) -> Prepared:
    """Return the same code for every library: rank 0 sends, and rank 1 answers."""
    answer = np.zeros(1)

    def sends() -> None:
        for transfer in [isend(x, 1) for _ in rooms]:
            transfer.wait()
        recv(answer, 1)

    def receives() -> None:
        for transfer in [irecv(room, 0) for room in rooms]:
            transfer.wait()
        send(answer, 0)

    return Prepared(x, rooms[-1], "f()", {"f": receives if rank else sends})


def object_ping_pong(send: Callable[..., Any], recv: Callable[..., Any], x: Array, rank: int) -> Prepared:
    """Return the same code for every library: rank 0 begins."""
    item, other = object_with(x), 1 - rank

    def count_wrong() -> int:
        if rank == 0:
            send(item, other)
        got = recv(other)
        if rank == 1:
            send(item, other)
        return differs(got, object_with(x))

    names = {"send": send, "recv": recv, "x": item, "other": other}
    steps = ["send(x, other)", "recv(other)"]
    return Prepared(x, np.empty_like(x), "; ".join(steps if rank == 0 else reversed(steps)), names,
                    count_wrong=count_wrong)


def object_broadcast(broadcast: Callable[..., Any], x: Array, rank: int) -> Prepared:
    item = object_with(x)
    return Prepared(x, np.empty_like(x), "f(x, 0)", {"f": broadcast, "x": item if rank == 0 else None},
                    count_wrong=lambda: differs(broadcast(item if rank == 0 else None, 0), item))


def differs(got: Any, wanted: Any) -> int:
    """Return 1 if a received object has another form than the one that was sent."""
    if isinstance(wanted[2], np.ndarray):
        x, y = wanted[2], got[2]
        return int(got[:2] != wanted[:2] or (x.dtype, x.shape) != (y.dtype, y.shape))
    return int(got != wanted)


class Mpi(Library):
    """Any MPI, through mpi4py: comm.Allreduce(x, y), whose op is SUM by default."""

    def join(self, token: str | None) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.comm = MPI.COMM_WORLD
        if (self.comm.rank, self.comm.size) != (self.seat.rank, self.seat.size):
            raise RuntimeError(f"launched as rank {self.seat.rank} of {self.seat.size}, "
                               f"but MPI says {self.comm.rank} of {self.comm.size}")

    def versions(self) -> dict[str, str]:
        import mpi4py

        library = self.mpi.Get_library_version().rstrip("\0").splitlines()[0].strip()
        return {"library": library, "mpi4py": mpi4py.__version__}

    def prepare(self, job: Job) -> Prepared:
        x, y = job.private(self.seat.size)
        if job.variant == "blocking":
            return self._blocking(job.call, x, y)
        if job.call != "all_reduce":
            raise RuntimeError("persistent collectives are compared for all_reduce only")
        request = self.comm.Allreduce_init(x, y)
        names = {"start_it": request.Start, "wait": request.Wait}
        return Prepared(x, y, "start_it(); wait()", names, request.Free)

    def _blocking(self, call: str, x: Array, y: Array) -> Prepared:
        comm = self.comm
        if call == PING_PONG:
            return ping_pong(comm.Send, comm.Recv, x, y, self.seat.rank)
        if call == STREAM:
            rooms = [private_array(len(y), y.dtype) for _ in range(WINDOW)]
            return stream(comm.Isend, comm.Irecv, comm.Send, comm.Recv, x, rooms, self.seat.rank)
        if call == OBJECT_PING_PONG:
            return object_ping_pong(comm.send, partial(comm.recv, None), x, self.seat.rank)
        if call == OBJECT_BROADCAST:
            return object_broadcast(comm.bcast, x, self.seat.rank)
        if call == "broadcast":
            return Prepared(x, x, "f(x)", {"f": comm.Bcast, "x": x})
        functions = {
            "all_reduce": comm.Allreduce, "reduce": comm.Reduce, "scan": comm.Scan, "exscan": comm.Exscan,
            "reduce_scatter": comm.Reduce_scatter_block, "scatter": comm.Scatter, "gather": comm.Gather,
            "all_gather": comm.Allgather, "all_to_all": comm.Alltoall,
        }
        given, room = arguments_of(call, x, y, self.seat.rank)
        return Prepared(x, y, "f(x, y)", {"f": functions[call], "x": given, "y": room})

    def leave(self) -> None:
        self.mpi.Finalize()


class Gloo(Library):
    """torch.distributed. It has no out-of-place form, and is not charged for a copy."""

    # Two threads serve each call; from 64 KiB on it is faster when they may leave the caller's CPU.
    pinned_with_its_threads = False

    def join(self, token: str | None) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self.torch = torch
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{self.seat.folder}/rendezvous", rank=self.seat.rank,
            world_size=self.seat.size)

    def versions(self) -> dict[str, str]:
        return {"library": "Gloo of torch " + self.torch.__version__}

    def prepare(self, job: Job) -> Prepared:
        if job.call != "all_reduce":
            raise RuntimeError("Gloo is compared for all_reduce only")
        x, _ = job.private(self.seat.size)
        tensor = self.torch.from_numpy(x)
        return Prepared(x, x, "f(t)", {"f": self.torch.distributed.all_reduce, "t": tensor})

    def leave(self) -> None:
        self.torch.distributed.destroy_process_group()


class Shmring(Library):
    """shmring through its public API alone."""

    def token(self) -> str | None:
        import pickle

        return pickle.dumps(self.invitation()).hex()

    def invitation(self) -> Any:
        """Return what `enter` needs to join, the same for every rank."""
        import shmring

        return shmring.world(self.seat.size)

    def join(self, token: str | None) -> None:
        import pickle

        import shmring

        assert token is not None
        self.module = shmring
        # Our own rank 0 made this pickle, and the socket lies in a folder that only this user may enter.
        self.enter(pickle.loads(bytes.fromhex(token)))

    def enter(self, invitation: Any) -> None:
        self.comm = self.module.init(invitation, rank=self.seat.rank)

    def versions(self) -> dict[str, str]:
        return {"library": "shmring " + self.module.__version__, "file": str(self.module.__file__)}

    def prepare(self, job: Job) -> Prepared:
        if job.variant == "zero-copy":
            x, y = (self.comm.empty(count, job.dtype) for count in job.counts(self.seat.size))
        else:
            x, y = job.private(self.seat.size)
        if job.call == PING_PONG:
            return ping_pong(self.comm.send, self.comm.recv, x, y, self.seat.rank)
        if job.call == STREAM:
            make = self.comm.empty if job.variant == "zero-copy" else private_array
            rooms = [make(len(y), y.dtype) for _ in range(WINDOW)]
            return stream(self.comm.isend, self.comm.irecv, self.comm.send, self.comm.recv, x, rooms,
                          self.seat.rank)
        if job.call == OBJECT_PING_PONG:
            return object_ping_pong(self.comm.send_object, self.comm.recv_object, x, self.seat.rank)
        if job.call == OBJECT_BROADCAST:
            return object_broadcast(self.comm.broadcast_object, x, self.seat.rank)
        if job.call == "broadcast":
            y = x
        given, room = arguments_of(job.call, x, y, self.seat.rank)
        if job.variant == "plan":
            return Prepared(x, y, "f()", {"f": self.comm.plan(job.call, given, out=room, **job.keywords)})
        arguments = "".join(f", {name}={value!r}" for name, value in job.keywords.items())
        names = {"f": getattr(self.comm, job.call), "x": given, "y": room}
        return Prepared(x, y, f"f(x, out=y{arguments})", names)

    def facts(self) -> dict[str, Any]:
        plain = (str, int, float)
        return {key: value for key, value in dict(self.comm.stats()).items() if isinstance(value, plain)}

    def leave(self) -> None:
        self.comm.close()


LIBRARIES: dict[str, type[Library]] = {"mpi": Mpi, "gloo": Gloo, "shmring": Shmring}
