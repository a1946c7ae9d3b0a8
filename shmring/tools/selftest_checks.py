"""The checks of `shmring selftest` (`python -m shmring.selftest`): this installation works on this machine.

They compare every call bit by bit with NumPy on several dtypes and sizes, with one rank, two ranks, and more
ranks than CPUs, in both kinds of segment. They also check messages, errors, and that nothing is left behind.
The ranks use only the public API.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import shmring

from .._config.settings import SEGMENTS, Survey
from .._system import segments
from ._cli import in_one_line

Array = np.ndarray[Any, Any]

LIMIT_S = 30  # for one check with processes; a check normally takes about a second
MANY_RANKS = 5  # ranks on two CPUs
ROOM_NBYTES = 32 << 20  # MANY_RANKS need 20 MiB
LOOK_AGAIN_S = 0.2
SHM = Path("/dev/shm")
TINY, SMALL, LARGE = 40, 6_000, 1_500_000  # bytes: fit a call line, one slot, many slots
FOLDS: dict[str, np.ufunc] = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor,
}  # fmt: skip
OPS = {
    "?": ("land", "lor", "lxor"),
    "u1": ("sum", "bor"),
    "i2": ("max", "band"),
    "i4": ("sum", "prod", "min"),
    "i8": ("sum", "bxor", "max"),
    "f2": ("sum",),
    "f4": ("sum", "prod", "max"),
    "f8": ("sum", "min"),
    "c8": ("sum",),
}
LARGE_DTYPES = ("i4", "f2", "f8")


@dataclass
class Tally:
    """The comparisons of one rank in one check."""

    results: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def same(self, what: str, got: Any, want: Any) -> None:
        """Compare arrays, or lists of arrays: dtype, shape and bits must be equal."""
        self.results += 1
        if not _is_same(got, want) and len(self.problems) < 3:
            self.problems.append(f"{what}: {_short(got)} where NumPy has {_short(want)}")


def _is_same(got: Any, want: Any) -> bool:
    if type(got) is not type(want):
        return False
    if isinstance(want, list):
        return len(got) == len(want) and all(map(_is_same, got, want))
    if isinstance(want, np.ndarray):
        return (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())
    return bool(got == want)


def _short(value: Any) -> str:
    return " ".join(repr(value).split())[:80]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    results: int
    seconds: float
    problem: str | None = None
    skipped: str | None = None  # why the check cannot run here; not a defect of the installation


# ---- in the ranks: each function takes the communicator and a tally ---------------------------------------


def _cases() -> Iterator[tuple[str, int, bool]]:
    """Yield (dtype, bytes of a rank's array, True if that array is zero-copy)."""
    for shared in (False, True):
        for dtype in OPS:
            yield from ((dtype, nbytes, shared) for nbytes in (TINY, SMALL))
            if dtype in LARGE_DTYPES:
                yield dtype, LARGE, shared


@functools.cache
def _numbers(size: int, count: int) -> Array:
    return np.random.default_rng(count).standard_normal((size, count), "f4")


def _by_rank(size: int, dtype: str, nbytes: int) -> Array:
    """Return the arrays of all ranks, each of `size` equal blocks. All ranks compute the same arrays."""
    numbers = _numbers(size, max(1, nbytes // np.dtype(dtype).itemsize // size) * size)
    if np.dtype(dtype).kind not in "fc":
        numbers = (100 * numbers).astype("i4")
    return numbers.astype(dtype)


def _folded(op: str, stack: Array) -> Array:
    """Return by rank the fold of ranks 0 to that rank, in rank order; 16-bit floats are rounded once."""
    wide = stack.astype("f4") if stack.dtype == np.float16 else stack
    return FOLDS[op].accumulate(wide, axis=0, dtype=wide.dtype).astype(stack.dtype)


def _reductions(comm: shmring.Comm, tally: Tally) -> None:
    rank, root = comm.rank, comm.size - 1
    for dtype, nbytes, shared in _cases():
        by_rank = _by_rank(comm.size, dtype, nbytes)
        mine = by_rank[rank]
        x = comm.copy_of(mine) if shared else mine.copy()
        for op in OPS[dtype][: 1 if nbytes == LARGE else None]:
            folds = _folded(op, by_rank)
            wanted = {
                "all_reduce": folds[-1],
                "reduce": folds[-1] if rank == root else mine,
                "scan": folds[rank],
                "exscan": folds[rank - 1] if rank else mine,
            }
            for kind, want in wanted.items():
                x[...] = mine
                getattr(comm, kind)(x, op, **({"root": root} if kind == "reduce" else {}))
                tally.same(f"{kind}({dtype}[{len(x)}], {op})", x, want)
            x[...] = mine
            part: Array = comm.reduce_scatter(x, op)  # type: ignore[call-overload]
            want = np.split(folds[-1], comm.size)[rank]
            tally.same(f"reduce_scatter({dtype}[{len(x)}], {op})", part.ravel(), want)


def _moves(comm: shmring.Comm, tally: Tally) -> None:
    rank, root = comm.rank, comm.size - 1
    for dtype, nbytes, shared in _cases():
        by_rank = _by_rank(comm.size, dtype, nbytes)
        blocks = by_rank.reshape(comm.size, comm.size, -1)
        x = comm.copy_of(by_rank[rank]) if shared else by_rank[rank].copy()
        every = x.reshape(comm.size, -1)
        shown = f"({dtype}[{len(x)}])"
        tally.same(f"all_gather{shown}", comm.all_gather(x), by_rank)
        tally.same(f"gather{shown}", comm.gather(x, root), by_rank if rank == root else None)
        tally.same(f"all_to_all{shown}", comm.all_to_all(every), np.ascontiguousarray(blocks[:, rank]))
        part = comm.scatter(every if rank == root else None, root, like=every[0])
        tally.same(f"scatter{shown}", part.ravel(), blocks[root, rank])
        comm.broadcast(x, root)
        tally.same(f"broadcast{shown}", x, by_rank[root])
    comm.barrier()


def _uneven(comm: shmring.Comm, tally: Tally) -> None:
    rank, ranks = comm.rank, range(comm.size)
    for count in (3, 700, 70_000):
        pieces = [[np.arange(i * count + j, dtype="f4") + i for j in ranks] for i in ranks]
        first = [pieces[i][0] for i in ranks]
        tally.same("all_to_all_v", comm.all_to_all_v(pieces[rank]), [pieces[i][rank] for i in ranks])
        tally.same("all_gather_v", comm.all_gather_v(first[rank]), first)
        tally.same("gather_v", comm.gather_v(first[rank]), first if rank == 0 else None)
        part = comm.scatter_v(pieces[0] if rank == 0 else None, like=first[rank])
        tally.same("scatter_v", part, pieces[0][rank])


def _ways(comm: shmring.Comm, tally: Tally) -> None:
    """Check plans, background calls, fused arrays, objects, groups and a shared array."""
    rank, size = comm.rank, comm.size
    total = size * (size + 1) / 2
    x = np.full(5000, rank + 1.0)
    out = np.empty_like(x)
    plan = comm.plan("all_reduce", x, out=out)
    plan()
    tally.same("plan", out, np.full(5000, total))
    works = [comm.all_reduce(y, async_op=True) for y in (x.copy(), x)]
    for work in works:
        work.wait(LIMIT_S)
    tally.same("async_op", x, out)
    many = [np.full(count, rank + 1.0) for count in (1, 30, 4000)]
    comm.all_reduce_many(many)
    for y in many:
        tally.same("all_reduce_many", y, np.full(len(y), total))
    tally.same("all_gather_object", comm.all_gather_object({rank: 1}), [{r: 1} for r in range(size)])
    with comm.dup() as other:
        tally.same("dup", other.all_gather(np.array(rank)), np.arange(size))
    seen = comm.shared(size, "i8")
    np.asarray(seen)[rank] = rank
    seen.fence()
    tally.same("shared", np.array(seen), np.arange(size))


def _messages(comm: shmring.Comm, tally: Tally) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for nbytes in (TINY, SMALL, LARGE):
        sent = np.arange(nbytes // 4, dtype="i4") + comm.rank
        got = np.empty_like(sent)
        status = comm.sendrecv(sent, after, got, before)
        tally.same("sendrecv", got, np.arange(nbytes // 4, dtype="i4") + before)
        tally.same("status", (status.source, status.count), (before, len(sent)))
        work = comm.isend(sent, after, tag=7)
        comm.recv(got, shmring.ANY_SOURCE, 7)
        work.wait(LIMIT_S)
        tally.same("isend and recv", got, np.arange(nbytes // 4, dtype="i4") + before)
    comm.barrier()


FAMILIES: dict[str, Callable[[shmring.Comm, Tally], None]] = {
    "reductions": _reductions,
    "moves": _moves,
    "uneven pieces": _uneven,
    "plans, background, groups": _ways,
    "messages": _messages,
}


def _in_rank(comm: shmring.Comm) -> list[Tally]:
    """Return a tally for each family. Stop at a family that raised, since the communicator may have ended."""
    found = []
    for family in FAMILIES.values():
        tally, began = Tally(), time.perf_counter()
        found.append(tally)
        try:
            family(comm, tally)
        except Exception as error:
            tally.problems.append(in_one_line(error))
            break
        finally:
            tally.seconds = time.perf_counter() - began
    return found


# ---- checks -----------------------------------------------------------------------------------------------


def checks() -> Iterator[Check]:
    """Run all checks and yield each result. Never raises."""
    try:
        before, unseen = _held(), None
    except OSError as error:  # without /proc
        before, unseen = set(), in_one_line(error)
    for segment in SEGMENTS:
        yield from _in_segment(segment)
    yield _single("a killed rank is named, the others go on", _a_killed_rank)
    yield _single("different calls are a Mismatch", _different_calls)
    yield _single("a rank's exception arrives", _an_exception)
    name = "nothing is left behind"
    yield Check(name, 0, 0.0, skipped=unseen) if unseen else _single(name, lambda: _nothing_since(before))


def _in_segment(segment: str) -> Iterator[Check]:
    """Check worlds of several sizes in one kind of segment. Only the kind in use must be available."""
    is_used = segment == (Survey.of().given.get("SHMRING_SEGMENT", "").strip().lower() or SEGMENTS[0])
    if why := None if is_used else _refusal(segment):
        yield Check(segment, 0, 0.0, skipped=why)
        return
    for nprocs in (1, 2, MANY_RANKS):
        yield from _calls(segment, nprocs)


def _refusal(segment: str) -> str | None:
    """Return why a segment of this kind and ROOM_NBYTES cannot be made; None if it can."""
    try:
        fd = segments.create(ROOM_NBYTES, kind=segment)
    except (shmring.Error, OSError) as error:
        return in_one_line(error)
    try:
        segments.allocate(fd, 0, ROOM_NBYTES, purpose="the self-test")
    except (shmring.Error, OSError) as error:
        return in_one_line(error)
    finally:
        os.close(fd)
    return None


def _calls(segment: str, nprocs: int) -> Iterator[Check]:
    """Run one world and yield a check for each family."""
    where = f"{segment}, {nprocs} {'rank' if nprocs == 1 else 'ranks'}"
    try:
        with _environment(SHMRING_SEGMENT=segment), _few_cpus(2):
            # A fork server would give the ranks the environment in which the server began.
            ranks = shmring.spawn(_in_rank, nprocs, timeout=LIMIT_S, method="fork")
    except Exception as error:
        yield Check(where, 0, 0.0, in_one_line(error))
        return
    for number, family in enumerate(FAMILIES):
        here = {rank: found[number] for rank, found in enumerate(ranks) if len(found) > number}
        problems = [f"rank {rank}: {text}" for rank, tally in here.items() for text in tally.problems]
        if len(here) < nprocs and not problems:
            problems = ["not reached"]
        results = sum(tally.results for tally in here.values())
        seconds = max((tally.seconds for tally in here.values()), default=0.0)
        yield Check(f"{where}: {family}", results, seconds, "; ".join(problems) or None)


def _single(name: str, check: Callable[[], int]) -> Check:
    began, results, problem = time.perf_counter(), 0, None
    try:
        results = check()
    except Exception as error:
        problem = in_one_line(error)
    return Check(name, results, time.perf_counter() - began, problem)


def _expect(got: Any, want: Any) -> int:
    """Raise AssertionError unless got == want; return 1, the number of results."""
    if got != want:
        raise AssertionError(f"{got!r} where it should be {want!r}")
    return 1


@contextmanager
def _environment(**names: str) -> Iterator[None]:
    kept = dict(os.environ)
    os.environ.update(names)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def _few_cpus(count: int) -> Iterator[None]:
    """Bind to at most `count` CPUs, so that MANY_RANKS exceed them. Does nothing if a sandbox forbids it."""
    cpus = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, sorted(cpus)[:count])
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)


def _nothing_since(before: set[str]) -> int:
    """Check that nothing is left since `before`. Look twice: other processes may make names briefly."""
    left = _held() - before
    if left:
        time.sleep(LOOK_AGAIN_S)
        left &= _held()
    return _expect(left, set())


def _held() -> set[str]:
    """Return what shmring could leave behind: this user's names in /dev/shm, descriptors, processes."""
    links = (os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())
    names = {str(path) for path in SHM.glob("shmring*") if _is_ours(path)}
    names |= {link for link in links if "memfd:shmring" in link or link.startswith("/dev/shm/#")}
    return names | {f"process {child.pid}" for child in multiprocessing.active_children()}


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:  # removed meanwhile
        return False


# ---- intended failures ------------------------------------------------------------------------------------


def _die_in_the_middle(comm: shmring.Comm) -> tuple[int | None, float]:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.barrier()
    except shmring.RankFailed as error:
        with comm.shrink() as rest:
            x = np.ones(10)
            rest.all_reduce(x)
        return error.rank, float(x[0])
    return None, 0.0


def _a_killed_rank() -> int:
    ranks = shmring.spawn(_die_in_the_middle, 3, timeout=LIMIT_S, return_exceptions=True)
    dead = ranks.pop(1)
    return _expect(type(dead), shmring.RankFailed) + _expect(ranks, [(1, 2.0)] * 2)


def _disagree(comm: shmring.Comm) -> bool:
    try:
        for _ in range(100):  # the mismatch is reported in this call or a later one
            comm.all_reduce(np.ones(4, "f4" if comm.rank else "f8"))
    except shmring.Mismatch:
        return True
    return False


def _different_calls() -> int:
    return _expect(shmring.spawn(_disagree, 2, timeout=LIMIT_S), [True, True])


def _raise(comm: shmring.Comm) -> None:
    if comm.rank == 1:
        raise LookupError("on purpose")
    comm.barrier()


def _an_exception() -> int:
    try:
        shmring.spawn(_raise, 2, timeout=LIMIT_S)
    except LookupError as error:
        return _expect((str(error), getattr(error, "rank", None)), ("on purpose", 1))
    raise AssertionError("spawn raised nothing")
