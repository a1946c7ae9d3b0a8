"""Anomaly testing, as SQLite does it: the n-th step of a call raises, for n = 1, 2, 3 … to its end.

A trial runs one case of anomaly_case on all ranks, with an injection on one of them, the faulty rank. It
passes in two cases: all ranks go on with right results, where the faulty rank repeats a call that raised; or
all ranks raise the same error and shrink() then gives a communicator of all of them. In both cases nothing
may be left behind. The processes stay for many trials. `python tests/support/anomalies.py` runs trials and
writes the table of docs/explanation/reliability.md.
"""

import argparse
import collections
import contextlib
import gc
import itertools
import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import anomaly_calls  # noqa: F401  its cases
import anomaly_methods  # noqa: F401  its cases
import anomaly_mpi  # noqa: F401  its cases
import leftovers
import numpy as np
import ranks as rank_processes
from anomaly_case import CASES, Place, nothing, warm_up
from injections import INJECTED, KINDS, Injection, injection_of
from ranks import Ranks

import shmring
from shmring._diagnostics import describe

TIMEOUT_S = 20.0  # of the communicators; an error that came only after this time fails the trial
MOST_REPEATS = 3
ENVIRON = {"SHMRING_CHUNK": 16384}  # so that little memory is allocated for each communicator
MOST_SIGNALS = 100  # to meet the same place again
LEFT_S = 1.0  # for threads to end
IDLE_S, IDLE_CPU_S = 0.1, 0.05
# Trials without an injection, one after another, that end a series. Signals may come between two calls, and
# CPython survives some failed allocations.
MISSES = {"point": 1, "signal": 5, "memory": 40, "system": 1}

AS_IF, ENDED, COMPLETE, LOST = "as if not begun", "ended", "complete", "descriptor lost"
FAILED = "FAILED"
OUTCOMES = AS_IF, ENDED, COMPLETE, LOST
# A signal between the call that opens a descriptor or makes a mapping and the next bytecode, which stores it,
# loses it: Python cannot prevent that. So does an allocation that fails inside the standard library, or for
# the result of a system call. Any other remainder is a failure.
LOSABLE = re.compile(r"\+1 (socket|/\S+( \(deleted\))?)|\+\d+ bytes mapped")
# Raised in a function of the test itself, where the interpreter runs signal handlers after the call. It is as
# an exception in the caller's next line, which the other ranks cannot know.
OWN = re.compile(r"support/anomaly_")
OUTSIDE = re.compile(r"python3\.|shmring/_system/segments\.py:\d+ _map ")


# ---- on a rank ---------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """One rank's view of a trial."""

    places: list = field(default_factory=list)  # of its injections
    raised: list = field(default_factory=list)  # (step, type, text) of each error that was not final
    ended: tuple | None = None  # (step, type, text) of the final error
    trouble: str | None = None  # a wrong result, or an error that is not allowed
    shrunk: int | None = None  # the size of the communicator from shrink()
    left: str = ""  # the remains of the trial
    cpu: tuple = (0.0, 0.0)  # seconds of CPU and of the clock between the last trial and this one

    def end(self, step, error):
        self.ended = step, type(error).__name__, _text(error)

    def note(self, step, error):
        self.raised.append((step, type(error).__name__, _text(error)))


_prepared = {}  # the communicator of the next trial, and the one that the processes met with
_resting_since = [None]


def trial(base, name, faulty, injection, repeats):
    """Run one rank's part. injection: (kind, n, m) or None; repeats: see `_Trial.call`."""
    seen = Seen(cpu=_resting())
    if _prepared.get("base") is not base:
        _prepared.clear()
        _prepared.update(base=base, comm=base.dup())
        gc.collect()
        gc.freeze()  # later collections look only at objects of a trial
    before = found_here()
    comm = _prepared.pop("comm")
    is_faulty = base.rank == faulty and injection is not None
    run = injection_of(*injection) if is_faulty else Injection(0)
    following = None
    try:
        following = _Trial(seen, base, comm, CASES[name]).run(Place(comm, base.rank == faulty), run, repeats)
    except BaseException as error:
        seen.trouble = f"{type(error).__name__}: {error}"
        error.__traceback__ = error.__context__ = error.__cause__ = None
        with contextlib.suppress(BaseException):
            comm.close()
    seen.places = run.places
    del comm, run
    if following is not None:
        _prepared["comm"] = following
        seen.left = left_here(before)
    _resting_since[0] = time.process_time(), time.monotonic()
    return seen


def _resting():
    if _resting_since[0] is None:
        return 0.0, 0.0
    cpu_s, clock_s = _resting_since[0]
    return time.process_time() - cpu_s, time.monotonic() - clock_s


class _Trial:
    def __init__(self, seen, base, comm, case):
        self._seen, self._base, self._comm, self._case = seen, base, comm, case

    def run(self, place, run, repeats):
        """Make the call with its injection, and the calls after it; return the communicator of the next
        trial."""
        steps = self._case(place)
        try:
            if not self._case.is_first:
                warm_up(self._comm)
            results = self.call(next(steps), run, repeats)
            # Without repeats, the result of the faulty rank may be lost: a check may need those of all ranks.
            if self._seen.ended is None and results and (repeats or not self._case.ends_in_python):
                self.check(steps, results[0])
            if self._seen.ended is None and not self._case.is_last:
                for number in range(1, 4):
                    go_on(self._comm, number)
        except shmring.Error as error:  # before or after the call, and maybe in a group that it has made
            self._seen.end("beside", error if self._case.is_last else self.final(error))
        results = None
        steps.close()
        del steps, place
        forget()
        return self.following()

    def call(self, call, run, repeats):
        """Return the result of the call, in a list; an empty list if it raised and is not repeated.

        After an error that is not final the call is repeated. repeats: False if the faulty rank is to take an
        injected exception for one that came after the end of the call.
        """
        if call is nothing:
            return [None]
        for attempt in range(MOST_REPEATS):
            step = "repeated" if attempt else "call"
            try:
                return [run.run(call)]
            except AssertionError:
                raise
            except BaseException as error:
                if self.is_over(step, error):
                    return []
                self._seen.note(step, error)
                if isinstance(error, INJECTED) and not repeats:
                    return []
            run = Injection(0)
            forget()
        raise AssertionError(f"raised {MOST_REPEATS} times: {self._seen.raised}")

    def check(self, steps, result):
        """Check the result. The Work of a call refused in the background raises what was injected."""
        try:
            with contextlib.suppress(StopIteration):
                steps.send(result)
        except INJECTED as error:
            if not self.is_over("result", error):
                self._seen.note("result", error)

    def is_over(self, step, error):
        """Return whether the communicator is over; if so, note its final error."""
        if self._case.is_last and not self._case.may_end:  # it is closed, or over from the beginning
            return isinstance(error, shmring.Closed) or getattr(error, "cause", None) == "left behind"
        try:
            self._comm.iprobe(tag=99)
        except shmring.Error as final:
            if not isinstance(error, shmring.Error):
                self._seen.note(step, error)
            self._seen.end(step, final)
        return self._seen.ended is not None

    def final(self, error):
        """The error of the communicator itself."""
        try:
            self._comm.barrier()
        except shmring.Error as final:
            return final
        raise AssertionError(f"the communicator goes on after {type(error).__name__}: {error}")

    def following(self):
        comm, seen = self._comm, self._seen
        if self._case.is_last:
            comm.close()
            return self._base.dup()
        if seen.ended is not None:
            self.check_that_it_is_over()
            over, comm = comm, comm.shrink()
            over.close()  # a failed allocation may leave a reference to it: CPython and Cython lose some
            seen.shrunk = comm.size
            go_on(comm, 5)
        following = comm.dup()
        comm.close()
        return following

    def check_that_it_is_over(self):
        """A further call raises the same error."""
        try:
            self._comm.barrier()
        except shmring.Error as error:
            again = type(error).__name__, _text(error)
            assert again == self._seen.ended[1:], f"raised {self._seen.ended[1:]} and then {again}"
        else:
            raise AssertionError(f"a barrier passes after {self._seen.ended}")


def _text(error):
    """Return an error's text; of a Mismatch the calls that differ, without the ranks.

    A rank that comes late to a call that does not match adds itself to the text.
    """
    if isinstance(error, shmring.Mismatch):
        text, _, _ = str(error).partition(":")
        return f"{text}: {sorted({*error.calls} - {describe.NOTHING})}"[:300]
    return str(error)[:300]


def forget():
    """Free the objects that exceptions refer to: frames, and with them arrays and communicators."""
    sys.last_value = None
    gc.collect()


def go_on(comm, number):
    """Make further calls with checked results: a sum, a message, a sum in shared arrays."""
    x = np.array([comm.rank + number], "i8")
    comm.all_reduce(x)
    wanted = sum(rank + number for rank in range(comm.size))
    assert x[0] == wanted, f"a following sum is {x[0]}, not {wanted}"
    if number == 2:
        got, before, after = np.zeros(1, "i8"), (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        comm.sendrecv(np.array([comm.rank + 10]), after, got, before, 5, 5)
        assert got[0] == before + 10, f"a following message is {got[0]}"
        assert comm.iprobe() is None, "a message is left over"
    elif number == 3:
        y = comm.empty(9000, "f4")
        y[:] = comm.rank + 1
        comm.all_reduce(y)
        assert (y == sum(range(1, comm.size + 1))).all(), f"a following shared array holds {y[:4]}"
        del y


def found_here():
    """Return what a trial could leave: bytes of mappings, descriptors, threads."""
    with open("/proc/self/maps") as maps:
        mapped = sum(_nbytes(line) for line in maps if "memfd:" in line or "/dev/shm/" in line)
    descriptors = collections.Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors[os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]] += 1
    threads = collections.Counter(thread.name for thread in threading.enumerate() if thread.is_alive())
    threads["shmring-life"] += leftovers.thread_names().count("shmring-life")
    return mapped, descriptors, +threads


def _nbytes(line):
    begin, _, end = line.split(" ", 1)[0].partition("-")
    return int(end, 16) - int(begin, 16)


def left_here(before):
    """Return the difference from `before`, in words."""
    until = time.monotonic() + LEFT_S
    while (now := found_here()) != before and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    left = [] if now[0] == before[0] else [f"{now[0] - before[0]:+} bytes mapped"]
    left += [f"+{count} {name}" for some in (1, 2) for name, count in (now[some] - before[some]).items()]
    left += [f"-{count} {name}" for some in (1, 2) for name, count in (before[some] - now[some]).items()]
    return ", ".join(left)


def idle(base):
    """CPU seconds of this process while it does nothing."""
    begin_s = time.process_time()
    time.sleep(IDLE_S)
    return time.process_time() - begin_s


# ---- over the ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """The number of ranks, the faulty one, and their hosts."""

    size: int
    faulty: int
    nodes: tuple | None = None

    def __str__(self):
        hosts = "" if self.nodes is None else " on hosts " + "".join("abc"[node] for node in self.nodes)
        return f"{self.size} ranks{hosts}, rank {self.faulty} faulty"


WORLDS = (
    World(2, 0),
    World(2, 1),
    World(3, 1),
    World(2, 0, (0, 1)),
    World(2, 1, (0, 1)),
    World(3, 0, (0, 0, 1)),
    World(3, 1, (0, 0, 1)),
    World(3, 2, (0, 0, 1)),
)


@dataclass
class Verdict:
    outcome: str  # one of OUTCOMES, or FAILED
    places: list  # of the injections
    has_raised: bool = True
    why: str = ""


class Campaign:
    """Trials in one world. After a failure the ranks meet anew, in new processes if one hangs or ended."""

    def __init__(self, world, timeout_s=TIMEOUT_S):
        self.world = world
        self._timeout_s = timeout_s
        self._ranks = None
        self._has_failed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._ranks is not None:
            self._ranks.__exit__()
            self._ranks = None

    def check_without(self, name):
        """See that the case passes without an injection; nothing is done for the first time after that."""
        for _ in range(2):
            self._try(name, None, True)
        verdict = self.verdict(name, None)
        assert verdict.outcome == COMPLETE, verdict.why

    def verdict(self, name, injection):
        """Run one trial and judge it."""
        seen = self._try(name, injection, True)
        verdict = judge(seen, self.world, injection and injection[0], CASES[name].is_last)
        if verdict.outcome == FAILED:
            self._has_failed = True
            if verdict.places and all(map(OWN.match, verdict.places)):
                return Verdict(COMPLETE, verdict.places)
            if not isinstance(seen, str) and _is_injected(seen[self.world.faulty]):
                again = self._without_repeats(name, injection, verdict.places)
                self._has_failed = again.outcome == FAILED
                if again.outcome == AS_IF and CASES[name].ends_in_python:
                    return Verdict(COMPLETE, verdict.places)
                if again.outcome == AS_IF:
                    verdict.why = f"complete, and raised all the same; repeated: {verdict.why}"
        return verdict

    def _without_repeats(self, name, injection, places):
        """Return the verdict if the faulty rank does not repeat a call that raises at the same places."""
        kind = injection[0]
        for _ in range(MOST_SIGNALS):
            verdict = judge(self._try(name, injection, False), self.world, kind, CASES[name].is_last)
            if verdict.outcome == FAILED or verdict.places == places or kind != "signal":
                return verdict
        return Verdict(FAILED, places, why="no other signal came there")  # they come anywhere

    def is_idle(self):
        """Return whether no process uses a CPU while it has nothing to do."""
        self._meet("barrier")
        return max(self._ranks(idle)) < IDLE_CPU_S

    def _try(self, name, injection, repeats):
        """Return the outcome of each rank; a text if some rank did not answer."""
        self._meet(name)
        try:
            answers = self._ranks.outcomes(trial, name, self.world.faulty, injection, repeats)
        except AssertionError as late:
            return f"hang: {late}"
        bad = [answer for answer in answers if not isinstance(answer, Seen)]
        if bad:
            self._has_failed = True
            return f"died: {bad!r:.600}"
        return answers

    def _meet(self, name):
        if self._ranks is None or not self._ranks.are_idle():
            self.__exit__()
            self._ranks = Ranks(self.world.size, nodes=self.world.nodes).__enter__()
            self._has_failed = True
            self._ranks.meet(timeout_s=self._timeout_s, **ENVIRON)
            for known in ("all_reduce_async", "transfer_wait", name, name):  # for one-time work in a process
                self._ranks.outcomes(trial, known, self.world.faulty, None, True)
            self._has_failed = False
        elif self._has_failed:
            self._ranks.meet(timeout_s=self._timeout_s, **ENVIRON)
            self._has_failed = False


def _is_injected(seen):
    names = {kind.__name__ for kind in INJECTED}
    return any(name in names for _, name, _ in seen.raised)


def is_lost_by_python(seen):
    """Return whether a failed allocation in CPython or its standard library has lost what remains.

    In a call with keyword arguments CPython loses a reference, and with it the mapping of a communicator.
    """
    return "bytes mapped" in seen.left or all(map(OUTSIDE.match, seen.places))


def judge(seen, world, kind, is_last):
    """Return the verdict on the outcomes of one trial."""
    if isinstance(seen, str):
        return Verdict(FAILED, [], why=seen)
    faulty = seen[world.faulty]
    has_raised = bool(faulty.places or faulty.raised)
    ends = {one.ended and one.ended[1:] for one in seen}
    end = max(ends, key=bool)  # in the last cases, of communicators that shrink() gave
    others = [one for one in seen if one is not faulty]
    is_lost = (
        LOSABLE.fullmatch(faulty.left)
        and not any(one.left for one in others)
        and (kind in ("point", "signal") or (kind == "memory" and is_lost_by_python(faulty)))
    )
    why = ""
    if any(one.trouble for one in seen):
        why = "trouble"
    elif len(ends) > 1 and not is_last:
        why = "errors differ"
    elif any(one is not None and one[0] == "Timeout" for one in ends):
        why = "only the timeout told"
    elif end is not None and end[0] == "Mismatch" and faulty.ended and faulty.ended[0] == "repeated":
        why = "the call had begun, and nobody was told"
    elif end is not None and not is_last and any(one.shrunk != world.size for one in seen):
        why = f"shrink() gave {[one.shrunk for one in seen]} ranks"
    elif any(one.left for one in seen) and not is_lost:
        why = f"left: {[one.left for one in seen]}"
    elif any(clock > 0.05 and cpu > 0.5 * clock for cpu, clock in (one.cpu for one in seen)):
        why = f"a thread spins: {[one.cpu for one in seen]}"
    if why:
        reported = (
            f"rank {at}: {one.trouble or one.ended or 'right'} {one.raised}" for at, one in enumerate(seen)
        )
        return Verdict(FAILED, faulty.places, has_raised, f"{why} | {'; '.join(reported)}")
    outcome = LOST if is_lost else ENDED if end is not None else AS_IF if faulty.raised else COMPLETE
    return Verdict(outcome, faulty.places, has_raised)


def inject_all(campaign, name, kind, *, numbers=None, until=None):
    """Verdicts by (n, m = None), for n = 1, 2, 3 … to the end of the call, or for n in `numbers`.

    until: a time.monotonic() value at which the series ends early.
    """
    campaign.check_without(name)
    misses, found = 0, {}
    for n in itertools.count(1) if numbers is None else numbers:
        verdict = campaign.verdict(name, (kind, n, None))
        misses = 0 if verdict.has_raised else misses + 1
        if verdict.has_raised or verdict.outcome == FAILED:
            found[n, None] = verdict
        if misses >= MISSES[kind] or (until is not None and time.monotonic() > until):
            break
    return found


def inject_twice(campaign, name, kind, n, *, until=None):
    """Return verdicts by (n, m), with a second injection at m = 1, 2, 3 … in the handling of the first one at
    n."""
    found = {}
    for m in itertools.count(1):
        verdict = campaign.verdict(name, (kind, n, m))
        if len(verdict.places) == 2 or verdict.outcome == FAILED:
            found[n, m] = verdict
        if len(verdict.places) < 2 or (until is not None and time.monotonic() > until):
            return found


# ---- many of them, and their table -------------------------------------------------------------------------


TWICE = " twice"
COLUMNS = {
    "point": "interrupts",
    "point" + TWICE: "two interrupts",
    "signal": "signals",
    "signal" + TWICE: "two signals",
    "memory": "allocations",
    "system": "system calls",
}
BEGIN, END = "<!-- anomalies -->", "<!-- end of anomalies -->"


def main():
    parser = argparse.ArgumentParser(description="Run trials; print what they come to.")
    parser.add_argument("--calls", help="names of cases, separated by commas (default: all)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of injections (default: all)")
    parser.add_argument("--worlds", default=",".join(map(str, range(len(WORLDS)))), help="numbers of WORLDS")
    parser.add_argument("--whole", type=int, default=10**9, help="every n up to this")
    parser.add_argument("--stride", type=int, default=1, help="after that every so manieth")
    parser.add_argument(
        "--twice", type=int, default=0, help="a second injection after every so manieth first"
    )
    parser.add_argument("--seconds", type=float, help="limit for one kind in one case")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="of the communicators, seconds")
    parser.add_argument(
        "--json", type=Path, help="append a line for each failure, and each series, to this file"
    )
    parser.add_argument(
        "--markdown", type=Path, help="write the table of all series, of those in --json as well"
    )
    asked = parser.parse_args()
    rank_processes.ANSWER_S = 2 * asked.timeout + 4
    rows = []
    for number in map(int, asked.worlds.split(",") if asked.worlds else ()):
        for name in asked.calls.split(",") if asked.calls else CASES:
            if WORLDS[number].nodes is None or not CASES[name].one_host:
                with Campaign(WORLDS[number], asked.timeout) as campaign:
                    for kind in asked.kinds.split(","):
                        rows += _series(campaign, name, kind, asked)
    nfailures = sum(row["counts"].get(FAILED, 0) for row in rows)
    if asked.markdown:
        if asked.json and asked.json.exists():
            rows = [json.loads(line) for line in asked.json.read_text().splitlines()]
        before, _, rest = asked.markdown.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        asked.markdown.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n{END}{after}")
    sys.exit(nfailures > 0)


def _series(campaign, name, kind, asked):
    """Run the trials of one kind in one case; return and print the counts."""
    begin_s = time.monotonic()
    until = begin_s + asked.seconds if asked.seconds else None
    numbers = itertools.chain(range(1, asked.whole), itertools.count(asked.whole, asked.stride))
    try:
        found = {kind: inject_all(campaign, name, kind, numbers=numbers, until=until)}
        if asked.twice and kind in ("point", "signal"):
            found[kind + TWICE] = {}
            for n, _ in list(found[kind])[:: asked.twice]:
                found[kind + TWICE] |= inject_twice(campaign, name, kind, n, until=until)
        if not campaign.is_idle():
            found[kind][0, None] = Verdict(FAILED, [], why="a process uses a CPU while it is idle")
    except AssertionError as error:
        found = {kind: {(0, None): Verdict(FAILED, [], why=f"without an injection: {error}")}}
    rate = sum(map(len, found.values())) / (time.monotonic() - begin_s)
    rows = []
    for what, verdicts in found.items():
        counts = collections.Counter(verdict.outcome for verdict in verdicts.values())
        failures = [
            {"n": n, "m": m, "places": verdict.places, "why": verdict.why}
            for (n, m), verdict in verdicts.items()
            if verdict.outcome == FAILED
        ]
        row = {"world": str(campaign.world), "call": name, "kind": what, "counts": dict(counts)}
        rows.append(row | {"failures": failures})
        print(f"{campaign.world}: {name}, {what}: {dict(counts)}, {rate:.0f}/s", flush=True)
        for failure in failures:
            print("   ", *failure.values(), flush=True)
    if asked.json:
        with asked.json.open("a") as report:
            report.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def table(rows):
    """The outcomes of all series by call and kind, as Markdown."""
    sums = collections.defaultdict(collections.Counter)
    for row in rows:
        sums[row["call"], row["kind"]].update(row["counts"])
    kinds = [kind for kind in COLUMNS if any(kind == other for _, other in sums)]
    lines = [f"| call | {' | '.join(COLUMNS[kind] for kind in kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name in CASES:
        if any(name == other for other, _ in sums):
            cells = (_cell(sums[name, kind]) for kind in kinds)
            lines.append(f"| {name} | {' | '.join(cells)} |")
    whole = sum(sums.values(), collections.Counter())
    totals = ", ".join(f"{whole[outcome]} {outcome}" for outcome in OUTCOMES)
    worlds = len({row["world"] for row in rows})
    head = (
        f"{time.strftime('%Y-%m-%d')}, {machine()}: {whole.total()} injections in {worlds} worlds: {totals}; "
        f"**{whole[FAILED]} failures.**"
    )
    return "\n".join([head, "", *lines, ""])


def _cell(counts):
    return " ".join(f"{counts[outcome]}" for outcome in OUTCOMES) if counts.total() else "-"


def machine():
    uname = os.uname()
    version = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} CPUs, Linux {uname.release}, Python {version}"


if __name__ == "__main__":
    main()
