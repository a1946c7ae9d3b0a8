"""One world of ranks in which some are killed. This module forks and watches the ranks, and collects what
each survivor saw.

It runs in a build with points to die at.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import mmap
import os
import pickle
import random
import selectors
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import shmring
from tests.support import leftovers

from . import builds
from .calls import CALLS

C_POINTS = (
    "before publish",
    "after publish",
    "in reduction",
    "before release",
)  # enum sr_fault of src/fault.h
POINTS = (*C_POINTS, "in init", "in close", "in shrink", "any time")
STOPPED = "stopped"  # no death: SIGSTOP, and SIGCONT after the others have gone on without it
ANSWER_S = 90.0  # after which a world hangs
LEFT_S = 2.0
TIMEOUT_S = 60.0  # of the communicator: its own error comes before those of the driver
MEETING_TIMEOUT_S = 2.0  # if a rank dies before the others know it
STOP_TIMEOUT_S = 3.0  # of a world in which one is stopped
PR_SET_PDEATHSIG = 1
PAGE_NBYTES = mmap.PAGESIZE
REST_S = 0.02
LOADED_NBYTES = 50 << 20  # about the size of a rank that has imported NumPy and shmring
WARM_STEPS, POLL_STEPS = 2, 2
LAST_STEPS = 3  # of those that are left, once the last has died
STEPS_BESIDE_THE_WOKEN = 60
LAST_STEP = 1 << 40
OUR_NAMES = ("shmring", "psm_")  # others on this machine use /dev/shm as well
# Calls and returns that Python's profiler sees in init (of others, of rank 0), close and shrink.
INIT_EVENTS, CLOSE_EVENTS, SHRINK_EVENTS = (900, 1500), 120, 1500

_libc = ctypes.CDLL(None)


class Order(ctypes.Structure):
    """The struct of faults.c, and the values that a rank shows its driver while it lives."""

    _fields_ = [
        ("passed", ctypes.c_uint64 * len(C_POINTS)),
        ("due", ctypes.c_uint64),
        ("point", ctypes.c_uint64),
        ("killed_ns", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),  # in the present communicator
        ("round", ctypes.c_uint64),  # the number of deaths that it has survived
    ]


@dataclass(frozen=True)
class Death:
    """A rank, by its number in the world, and the point of its death."""

    victim: int
    point: str


@dataclass(frozen=True)
class Trial:
    """One world: its calls, and the ranks that die, one after another; after each the others shrink and go
    on."""

    ranks: int
    call: str
    nbytes: int
    deaths: tuple[Death, ...]
    seed: int
    resident_nbytes: int = LOADED_NBYTES
    rests: bool = False  # a rank that has raised leaves the CPUs to the others for a while

    @property
    def point(self) -> str:
        return self.deaths[0].point

    def is_together(self) -> bool:
        """Return whether all ranks close when one dies in close; else the others go on and miss that rank."""
        return random.Random(self.seed).random() < 0.5


@dataclass
class Raised:
    """An error of shmring's as one rank raised it."""

    where: str  # "init", "call", "shrink"
    kind: str
    culprit: int | None  # by its number in the world
    seq: int | None
    text: str
    began_ns: int  # the call that raised
    raised_ns: int


@dataclass
class Seen:
    """The outcome of one rank, as it reports it at its end."""

    rank: int
    steps: int = 0
    wrong: str = ""
    raised: list[Raised] = field(default_factory=list)
    members: list[int] = field(default_factory=list)  # of its last communicator, as numbers in the world
    shrink_s: list[float] = field(default_factory=list)
    left: str = ""


@dataclass
class Outcome:
    trial: Trial
    seen: list[Seen] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)  # (kind of FAULT_KINDS, text)
    took_s: list[float] = field(default_factory=list)  # until each survivor raised, see judge
    shrink_s: list[float] = field(default_factory=list)
    lasted_s: float = 0.0


FAULT_KINDS = ("hang", "wrong result", "wrong error", "leak")


# ---- the rank ---------------------------------------------------------------------------------------------


class Rank:
    """One rank's life in a world, with every death in it."""

    def __init__(self, trial: Trial, rank: int, world: Any, order: Order) -> None:
        self.trial, self.rank, self.world, self.order = trial, rank, world, order
        self.rng = random.Random(trial.seed * 31 + rank)
        self.seen = Seen(rank)
        self.ids = list(range(trial.ranks))
        self.met = 0  # deaths that are behind

    @property
    def death(self) -> Death | None:
        return self.trial.deaths[self.met] if self.met < len(self.trial.deaths) else None

    def is_due(self, *points: str) -> bool:
        """Return whether the next rank to die is this one, at one of these points."""
        return self.death is not None and self.death.victim == self.rank and self.death.point in points

    def live(self) -> Seen:
        builds.faults.sr_fault_obey(ctypes.byref(self.order))
        ballast = grow(self.trial.resident_nbytes)
        comm = self.init()
        while comm is not None and self.call(comm):
            comm = self.shrink(comm)
        if comm is not None:
            self.close(comm)
        del comm
        self.seen.members = self.ids
        self.seen.left = left_here()
        del ballast
        return self.seen

    def init(self) -> Any:
        meets_death = self.trial.point == "in init"
        timeout_s = MEETING_TIMEOUT_S if meets_death else TIMEOUT_S
        if self.trial.point == STOPPED:
            timeout_s = STOP_TIMEOUT_S
        if self.is_due("in init"):
            die_after(self.rng.randrange(INIT_EVENTS[self.rank == 0]))
        begin_ns = time.monotonic_ns()
        try:
            comm = shmring.init(self.world, rank=self.rank, timeout=timeout_s)
        except shmring.Error as error:
            self.note("init", error, begin_ns)
            return None
        if self.is_due("in init"):
            builds.faults.sr_fault_die()  # it is through sooner than was thought
        return comm

    def call(self, comm: Any) -> bool:
        """Steps until the last one, or until an error: then true."""
        begin_ns = time.monotonic_ns()
        try:
            calls = CALLS[self.trial.call](comm, self.trial.nbytes, self.trial.seed)
            for step in range(self.steps()):
                self.prepare_to_die(step)
                begin_ns = time.monotonic_ns()
                calls.call(step)
                self.order.steps = step + 1
                self.seen.steps += 1
                self.be_slow()
        except shmring.Error as error:
            self.note("call", error, begin_ns)
            if self.trial.rests:
                time.sleep(REST_S)
            self.call_again(comm, error)
            return True
        return False

    def steps(self) -> int:
        death = self.death
        if death is None:
            return STEPS_BESIDE_THE_WOKEN if self.trial.point == STOPPED else LAST_STEPS
        if death.point == "in close" and (death.victim == self.rank or self.trial.is_together()):
            return WARM_STEPS
        return LAST_STEP

    def be_slow(self) -> None:
        if self.trial.point == STOPPED and self.death is None:
            time.sleep(0.002)  # so that the other rank wakes in this time

    def prepare_to_die(self, step: int) -> None:
        """Let the victim die at one of the points that its next two calls pass, chosen at random."""
        if not self.is_due(*C_POINTS):
            return
        order, point = self.order, C_POINTS.index(self.death.point)
        if step == WARM_STEPS:
            self.passed_before = order.passed[point]
        elif step == WARM_STEPS + POLL_STEPS:
            each = (order.passed[point] - self.passed_before) / POLL_STEPS
            if each == 0:
                builds.faults.sr_fault_die()  # this call has no such point on this rank
            order.point = point
            order.due = order.passed[point] + 1 + self.rng.randrange(max(1, int(2 * each)))

    def note(self, where: str, error: Any, begin_ns: int) -> None:
        now_ns = time.monotonic_ns()
        culprit = self.ids[error.rank] if error.rank is not None else None
        self.seen.raised.append(
            Raised(where, type(error).__name__, culprit, error.seq, str(error), begin_ns, now_ns)
        )

    def call_again(self, comm: Any, first: Any) -> None:
        try:
            comm.barrier()
            self.seen.wrong = "a call after the error reported success"
        except shmring.Error as error:
            if (type(error), str(error), error.seq) != (type(first), str(first), first.seq):
                self.seen.wrong = f"a call after {first!r} raised another one: {error!r}"

    def shrink(self, comm: Any) -> Any:
        """A new communicator, unless it is this rank that the others have given up."""
        if self.seen.raised[-1].culprit not in {death.victim for death in self.trial.deaths[: self.met]}:
            self.met += 1
        if self.is_due("in shrink"):
            die_after(self.rng.randrange(SHRINK_EVENTS))
        begin_ns = time.monotonic_ns()
        try:
            fewer = comm.shrink()
        except shmring.Error as error:
            self.note("shrink", error, begin_ns)
            comm.close()
            return None
        if self.is_due("in shrink"):
            builds.faults.sr_fault_die()
        self.seen.shrink_s.append((time.monotonic_ns() - begin_ns) * 1e-9)
        self.ids = [self.ids[rank] for rank in fewer.parent_ranks]
        if self.death is not None and self.death.point == "in shrink":
            self.met += 1
        self.order.due = self.order.steps = 0
        self.order.round = self.met
        return fewer

    def close(self, comm: Any) -> None:
        if self.is_due("in close"):
            die_after(self.rng.randrange(CLOSE_EVENTS))
        comm.close()
        if self.is_due("in close"):
            builds.faults.sr_fault_die()


def die_after(nevents: int) -> None:
    """This process is killed at the n-th call or return of a Python function from here on."""
    left = nevents

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            builds.faults.sr_fault_die()

    sys.setprofile(count)


def grow(resident_nbytes: int) -> Any:
    """Memory that makes this process as large as it is to be, every page of it touched."""
    more = resident_nbytes - LOADED_NBYTES
    if more <= 0:
        return None
    ballast = mmap.mmap(-1, more, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ballast.madvise(mmap.MADV_NOHUGEPAGE)
    np.frombuffer(ballast, np.uint8)[::PAGE_NBYTES] = 1
    return ballast


def left_here() -> str:
    """Return what is left some time after everything is closed: the background thread may be about to end."""
    until = time.monotonic() + LEFT_S
    while (left := found_here()) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def found_here() -> str:
    """Segments that this process maps or holds open, and threads that a communicator has."""
    gc.collect()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:shmring" in line]
    fds = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(path)
            if target.startswith(("/memfd:shmring", "/dev/shm/", "socket:")):
                fds.append(target)
    threads = [name for name in leftovers.thread_names() if name == "shmring-life"]
    return "; ".join(
        f"{name}: {found}"
        for name, found in (("maps", maps), ("descriptors", fds), ("threads", threads))
        if found
    )


# ---- the driver -------------------------------------------------------------------------------------------


def run(trial: Trial) -> Outcome:
    """Run one world; return its outcome."""
    begin_s = time.monotonic()
    outcome = Outcome(trial)
    names = set(os.listdir("/dev/shm"))
    with Watched(trial) as watched:
        watched.kill_at_random()
        watched.hear(outcome)
        for death in trial.deaths:
            if not watched.is_over_with(death):
                outcome.faults.append(
                    ("hang", f"rank {death.victim} has not come to its death {death.point}")
                )
        judge(outcome, watched.killed_ns)
    left = {name for name in set(os.listdir("/dev/shm")) - names if name.startswith(OUR_NAMES)}
    if left:
        outcome.faults.append(("leak", f"/dev/shm: {left}"))
    outcome.lasted_s = time.monotonic() - begin_s
    return outcome


class Watched:
    """The processes of one world, until the last has ended."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.memory = mmap.mmap(-1, PAGE_NBYTES * trial.ranks)
        self.orders = [Order.from_buffer(self.memory, rank * PAGE_NBYTES) for rank in range(trial.ranks)]
        self.pids: list[int] = []
        self.pipes: list[int] = []
        self.exits: dict[int, int] = {}
        self.killed_ns: dict[int, int] = {}

    def __enter__(self) -> Watched:
        world = shmring.world(self.trial.ranks)
        gc.collect()
        gc.freeze()
        for rank in range(self.trial.ranks):
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                self.be(rank, world, theirs)
            os.close(theirs)
            self.pids.append(pid)
            self.pipes.append(ours)
        return self

    def be(self, rank: int, world: Any, pipe: int) -> None:
        try:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            for other in self.pipes:
                os.close(other)
            seen = Rank(self.trial, rank, world, self.orders[rank]).live()
        except BaseException:
            seen = Seen(rank, wrong=traceback.format_exc())
        finally:
            os.write(pipe, pickle.dumps(seen))
            os._exit(0)

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            if pid not in self.exits:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.exits[pid] = os.waitpid(pid, 0)[1]
        for pipe in self.pipes:
            os.close(pipe)
        self.orders.clear()

    def kill_at_random(self) -> None:
        """Kill and stop victims from outside, some time after they have begun to call."""
        rng = random.Random(self.trial.seed)
        for number, death in enumerate(self.trial.deaths):
            if death.point not in ("any time", STOPPED):
                continue
            order = self.orders[death.victim]
            if not self.wait_until_it_calls(death.victim, number):
                return
            time.sleep(rng.random() * 0.02)
            order.killed_ns = time.monotonic_ns()
            os.kill(self.pids[death.victim], signal.SIGKILL if death.point == "any time" else signal.SIGSTOP)
            time.sleep(0.003)  # the CPU is the survivors'
            if death.point == STOPPED:
                self.wake_later(death.victim)

    def wake_later(self, victim: int) -> None:
        """Continue the victim after another rank has gone on in a new communicator."""
        other = (victim + 1) % self.trial.ranks
        self.wait_until_it_calls(other, len(self.trial.deaths))
        os.kill(self.pids[victim], signal.SIGCONT)

    def wait_until_it_calls(self, rank: int, ndeaths: int) -> bool:
        """Wait for some steps of a rank after `ndeaths` deaths; return False if it has ended, or makes
        none."""
        order = self.orders[rank]
        until = time.monotonic() + ANSWER_S
        while order.round < ndeaths or order.steps < WARM_STEPS:
            gone = os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if gone or time.monotonic() > until:
                return False
            time.sleep(0.0005)
        return True

    def hear(self, outcome: Outcome) -> None:
        until = time.monotonic() + ANSWER_S
        reported = dict.fromkeys(range(self.trial.ranks), b"")
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self.pipes):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    self.show(outcome, [key.data for key in selector.get_map().values()])
                    return
                for key, _ in ready:
                    more = os.read(key.fd, 1 << 16)
                    reported[key.data] += more
                    if not more:
                        selector.unregister(key.fd)
        for rank, text in reported.items():
            self.exits[self.pids[rank]] = os.waitpid(self.pids[rank], 0)[1]
            self.killed_ns[rank] = self.orders[rank].killed_ns
            if text:
                outcome.seen.append(pickle.loads(text))

    def is_over_with(self, death: Death) -> bool:
        return death.point == STOPPED or os.WIFSIGNALED(self.exits.get(self.pids[death.victim], 0))

    def show(self, outcome: Outcome, late: list[int]) -> None:
        """Print the state of the ranks that hang: /proc and Python's stacks, to stderr."""
        print(f"\n{self.trial} hangs in ranks {late}", file=sys.stderr, flush=True)
        for rank in late:
            pid = self.pids[rank]
            for name in ("stat", "wchan", "syscall"):
                with contextlib.suppress(OSError):
                    print(f"rank {rank} {name}: {Path(f'/proc/{pid}/{name}').read_text()}", file=sys.stderr)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)
        outcome.faults.append(("hang", f"ranks {late}"))


# ---- the verdict ------------------------------------------------------------------------------------------


def judge(outcome: Outcome, killed_ns: dict[int, int]) -> None:
    """Record the faults of the outcome.

    Detection counts from the kill, or from the call that raised if that began later: until then its rank was
    busy with other things.
    """
    trial = outcome.trial
    victims = [death.victim for death in trial.deaths]
    survivors = [seen for seen in outcome.seen if seen.rank not in victims]
    for seen in outcome.seen:
        if seen.wrong:
            outcome.faults.append(("wrong result", f"rank {seen.rank}: {seen.wrong}"))
        if seen.left:
            outcome.faults.append(("leak", f"rank {seen.rank}: {seen.left}"))
    for seen in survivors:
        outcome.shrink_s += seen.shrink_s
        for raised in seen.raised:
            judge_error(outcome, seen, raised, victims)
            if raised.where == "call" and killed_ns.get(raised.culprit or 0):
                begun_ns = max(killed_ns[raised.culprit or 0], raised.began_ns)
                outcome.took_s.append((raised.raised_ns - begun_ns) * 1e-9)
        if trial.point not in ("in init", "in close") and seen.members != [s.rank for s in survivors]:
            outcome.faults.append(("wrong error", f"rank {seen.rank} is left with {seen.members}"))
    # A rank that has finished may leave before another dies in close; in init ranks see different sides of a
    # death.
    received = {tuple((raised.kind, raised.seq, raised.text) for raised in seen.raised) for seen in survivors}
    if len(received - {()} if trial.point == "in close" else received) > 1 and trial.point != "in init":
        differ = [(seen.rank, [(r.where, r.kind, r.seq, r.text) for r in seen.raised]) for seen in survivors]
        outcome.faults.append(("wrong error", f"they differ: {differ}"))
    for woken in outcome.seen:
        if woken.rank in victims:
            judge_woken(outcome, woken, survivors)


def judge_error(outcome: Outcome, seen: Seen, raised: Raised, victims: list[int]) -> None:
    allowed = {"in init": {"RankFailed", "Timeout"}, STOPPED: {"Timeout"}}.get(
        outcome.trial.point, {"RankFailed"}
    )
    if raised.where == "shrink" or raised.kind not in allowed or raised.culprit not in victims:
        outcome.faults.append(
            ("wrong error", f"rank {seen.rank} in {raised.where}: {raised.kind} {raised.text}")
        )


def judge_woken(outcome: Outcome, woken: Seen, survivors: list[Seen]) -> None:
    """Check that a rank that was stopped has the others' error, and learns that they have gone on without
    it."""
    messages = [(raised.kind, raised.seq, raised.text) for raised in woken.raised]
    theirs = [(raised.kind, raised.seq, raised.text) for raised in survivors[0].raised] if survivors else []
    if messages[:1] != theirs[:1] or len(messages) != 2 or woken.raised[1].where != "shrink":
        outcome.faults.append(
            ("wrong error", f"the woken rank {woken.rank} was told {messages}, the others {theirs}")
        )
