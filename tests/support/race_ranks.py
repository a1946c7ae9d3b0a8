"""Ranks as threads of one process over one mapping of each segment, so that ThreadSanitizer sees every access
to it and every order between them. test_tsan.py runs this with an instrumented build. Chunks, slots and rings
are tiny, so that all of them wrap many times. `race_ranks.py NAME...` runs the named ones of WORK, or all."""

import contextlib
import os
import sys
import threading
import traceback

import numpy as np

import shmring
from shmring._diagnostics import flight_recorder
from shmring._system import segments

TINY = {"SHMRING_CHUNK": "256", "SHMRING_MESSAGE_RING": "512"}


# --- one mapping for all ranks ---

_guard = threading.RLock()  # the collector may drop a mapping while another one is made
_mapped = {}  # by device and inode: [mapping of the whole segment, number of those that use it]
_map, _unmap = segments.Mapping.__init__, segments.Mapping.close


def map_once(mapping, fd, nbytes):
    mapping.address, mapping.nbytes = 0, nbytes
    there = os.fstat(fd)
    mapping.key = there.st_dev, there.st_ino
    with _guard:
        if mapping.key not in _mapped:
            whole = segments.Mapping.__new__(segments.Mapping)
            _map(whole, fd, there.st_size)
            _mapped[mapping.key] = [whole, 0]
        _mapped[mapping.key][1] += 1
        mapping.address = _mapped[mapping.key][0].address


def unmap_last(mapping):
    with _guard:
        if not mapping.address:
            return
        shared = _mapped[mapping.key]
        shared[1] -= 1
        if shared[1] == 0:
            del _mapped[mapping.key]
            _unmap(shared[0])
        mapping.address = 0


# --- ranks ---


def in_threads(size, work, environ):
    """Run work(comm) in every rank of a new world; return the exceptions."""
    for name in [name for name in os.environ if name.startswith("SHMRING_")]:
        del os.environ[name]
    os.environ.update(environ)
    world, failures = shmring.world(size), []

    def live(rank):
        try:
            with shmring.init(world, rank=rank, timeout=60) as comm:
                work(comm)
        except BaseException as error:
            failures.append(error)

    ranks = [threading.Thread(target=live, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return failures


# --- the calls ---

COUNTS = (1, 12, 50, 700, 3001)  # in a call line, in a slot, in some chunks, in many


def array(comm, shape, shared, value):
    x = comm.empty(shape, "f4") if shared else np.empty(shape, "f4")
    x[...] = value
    return x


def reduce_all(comm, count, shared=False, **how):
    x = array(comm, count, shared, comm.rank + 1)
    comm.all_reduce(x, **how)
    assert (x == comm.size * (comm.size + 1) / 2).all()


def call_everything(comm, count, shared):
    n, rank = comm.size, comm.rank
    one, many = array(comm, count, shared, rank), array(comm, (n, count), shared, rank)
    for root in range(n):
        comm.broadcast(one, root)
        assert (one == root).all()
        one[...] = rank
        comm.reduce(one, root=root)
        one[...] = rank
        found = comm.gather(one, root)
        assert found is None or (found == np.arange(n)[:, None]).all()
        assert (comm.scatter(many if rank == root else None, root, like=one) == root).all()
    assert (comm.all_gather(one) == np.arange(n)[:, None]).all()
    assert (comm.all_to_all(many) == np.arange(n)[:, None]).all()
    assert (comm.reduce_scatter(many) == n * (n - 1) / 2).all()
    comm.scan(one)
    assert (one == rank * (rank + 1) / 2).all()
    one[...] = rank
    comm.exscan(one)
    comm.barrier()


def collectives(comm):
    for shared in (False, True):
        for count in COUNTS:
            for _ in range(2):
                reduce_all(comm, count, shared)
                call_everything(comm, count, shared)


def algorithms(comm):
    for algorithm in flight_recorder.ALGORITHMS[1:]:
        for count in COUNTS:
            reduce_all(comm, count, algorithm=algorithm)


def again_and_again(comm):
    # With more ranks than CPUs those that have nothing to wait for go ahead.
    for kind in ("broadcast", "reduce", "scan", "gather", "all_reduce"):
        for count in (1, 500, 3001):
            x = np.full(count, comm.rank, "f4")
            for _ in range(60):
                getattr(comm, kind)(x)


def uneven(comm):
    n, rank = comm.size, comm.rank
    for count in (3, 900):
        pieces = [np.full(count * (peer + 1), rank, "f4") for peer in range(n)]
        comm.all_to_all_v(pieces)
        comm.all_gather_v(pieces[rank])
        comm.gather_v(pieces[rank], n - 1)
        comm.scatter_v(pieces if rank == 0 else None, 0, like=pieces[rank])
    comm.all_reduce_many([np.ones(count, "f4") for count in (3, 100, 1, 800)])
    assert comm.all_gather_object(rank) == list(range(n))


def issue(comm):
    arrays = [np.full(count, comm.rank, "f4") for count in COUNTS] * 4
    for _ in range(4):
        works = [comm.all_reduce(x, op="max", async_op=True) for x in arrays]
        comm.barrier()
        for work in works:
            work.wait()
        assert all((x == comm.size - 1).all() for x in arrays)
        works = [comm.all_gather(x, async_op=True) for x in arrays]
        while not all(work.done() for work in works):
            pass


def swapped_buffers(comm):
    algorithms(comm)
    again_and_again(comm)
    uneven(comm)
    issue(comm)


def messages(comm):
    n, rank = comm.size, comm.rank
    for count in (1, 30, 5000):
        x, y = np.full(count, rank, "f4"), np.empty(count, "f4")
        for _ in range(10):
            comm.sendrecv(x, (rank + 1) % n, y, (rank - 1) % n)
            assert (y == (rank - 1) % n).all()
        transfers = [comm.isend(x, peer, tag=7) for peer in range(n) if peer != rank]
        for _ in range(n - 1):
            comm.recv(y, tag=7)
        for transfer in transfers:
            transfer.wait()
    comm.barrier()


def messages_in_place(comm):
    """Offers of private and of shared arrays, which are written again as soon as a send has returned; and
    blocks that come and go meanwhile."""
    messages(comm)
    n, rank = comm.size, comm.rank
    for count in (30, 5000):
        x, y = comm.empty(count, "f4"), comm.empty(count, "f4")
        for turn in range(10):
            x.fill(rank + turn)
            comm.sendrecv(x, (rank + 1) % n, y, (rank - 1) % n)
            assert (y == (rank - 1) % n + turn).all()
        transfers = [comm.isend(x, peer, tag=7) for peer in range(n) if peer != rank]
        comm.empty(1, "f4")
        for _ in range(n - 1):
            comm.recv(y, tag=7)
        for transfer in transfers:
            transfer.wait()
        x.fill(-1)
    comm.barrier()


def locks(comm):
    table = comm.shared(2, "i8", locks=2)
    for turn in range(200):
        with table.lock(turn % 2):
            table[turn % 2] += 1
    table.fence()
    assert list(table) == [100 * comm.size] * 2


def groups(comm):
    part = comm.split(comm.rank % 2)
    for count in COUNTS:
        reduce_all(part, count)
        reduce_all(comm, count)


def part_ways(comm):
    for turn in range(30):
        if turn == 20 and comm.rank == 0:
            with contextlib.suppress(shmring.Mismatch):
                comm.barrier()
        try:
            comm.all_reduce(np.ones(700, "f4"))
        except shmring.Mismatch:
            return
    raise AssertionError("nobody saw that their calls differ")


WORK = {
    "near": (2, collectives, {**TINY, "SHMRING_PATH": "near"}),
    "far": (3, collectives, {**TINY, "SHMRING_PATH": "far"}),
    "single copy": (2, collectives, {**TINY, "SHMRING_SINGLE_COPY": "64"}),
    "algorithms": (5, algorithms, TINY),
    "again and again": (4, again_and_again, TINY),
    "uneven": (3, uneven, TINY),
    "issue": (3, issue, TINY),
    "swapped buffers": (2, swapped_buffers, {**TINY, "SHMRING_PATH": "far"}),
    "messages": (3, messages, TINY),
    "messages in place": (3, messages_in_place, {**TINY, "SHMRING_SINGLE_COPY": "64"}),
    "locks": (3, locks, TINY),
    "groups": (4, groups, TINY),
    "part ways": (3, part_ways, TINY),
}

if __name__ == "__main__":
    segments.Mapping.__init__, segments.Mapping.close = map_once, unmap_last
    for name in sys.argv[1:] or WORK:
        print(name, flush=True)
        failures = in_threads(*WORK[name])
        for failure in failures:
            traceback.print_exception(failure)
        if failures:
            sys.exit(3)
