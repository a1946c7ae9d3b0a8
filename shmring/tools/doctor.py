"""`shmring doctor`: list what is wrong or slow on this machine, one line each, with a remedy.

There is one check for each kind of problem. Each check reads the report of `info`. A fact that is unknown, or
a check that raises, gives a note.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from .._system import cpulist
from .._system.limits import size_text
from . import _cli, info
from ._machine import machine, sections
from ._machine.sections import Row

Level = Literal["ok", "note", "problem"]
_STYLES: dict[Level, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}
_DOCKER_SHM_NBYTES = 64 << 20  # a container's default
_LITTLE_NBYTES, _HARDLY_NBYTES = 1 << 30, 128 << 20  # too little for many communicators, for even one
_FEW_DESCRIPTORS, _TOO_FEW_DESCRIPTORS = 1024, 128
_BASELINES = ("sse2", "scalar")


class Finding(NamedTuple):
    """The severity, the finding, its remedy, and the subject."""

    level: Level
    what: str
    fix: str | None = None
    about: str = ""


_ok = functools.partial(Finding, "ok")
_note = functools.partial(Finding, "note")
_problem = functools.partial(Finding, "problem")


class _Facts(dict[str, dict[str, Any]]):
    """A report that raises Unknown when an unknown fact is read."""

    def __getitem__(self, name: str) -> dict[str, Any]:
        fact = super().__getitem__(name)
        if "unknown" in fact:
            raise machine.Unknown(fact["unknown"])
        return fact


Check = Callable[[_Facts], Iterator[Finding]]


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="list what is wrong or slow on this machine, and how to fix it",
        description="Check everything that `shmring info` reports. Exit status 0: no problem; 1: a problem.",
    )
    info.add_flags(parser, "the findings")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings and return the exit status."""
    found = findings(info.report(measures=not arguments.no_measure))
    problems, notes = (sum(one.level == level for one in found) for level in ("problem", "note"))
    if arguments.json:
        all_of_it = [one._asdict() for one in found]
        _cli.print_json({"problems": problems, "notes": notes, "findings": all_of_it})
    else:
        summary = f"{_counted(problems, 'problem')}, {_counted(notes, 'note')}"
        sections.show({f"shmring doctor: {summary}": [_row(one) for one in found]})
    return 1 if problems else 0


def findings(report: info.Report) -> list[Finding]:
    """Return at least one finding of every check. Never raises."""
    facts, found = _Facts(report), list[Finding]()
    for about, check in CHECKS.items():
        try:
            for one in check(facts):
                found.append(one._replace(about=about))
        except Exception as error:
            found.append(Finding("note", f"unknown: {info.reason(error)}", about=about))
    return found


def _row(one: Finding) -> Row:
    text = f"{one.what} -> {one.fix}" if one.fix else one.what
    return Row(f"{one.level:7}  {one.about}", text, _STYLES[one.level])


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


# ---- the checks -------------------------------------------------------------------------------------------


def _settings(facts: _Facts) -> Iterator[Finding]:
    fact = facts["settings"]
    for text in fact["wrong"]:
        yield _problem(text, "set it so, or unset it")
    for name, meant in fact["unknown_names"].items():
        yield _note(f"{name} is set, but nothing reads it", f"is {meant} meant?" if meant else "unset it")
    if not fact["wrong"]:
        yield _ok(f"{_counted(len(fact['given']), 'SHMRING_* variable')} set")


def _job(facts: _Facts) -> Iterator[Finding]:
    fact, usable = facts["job"], facts["cpus"]["usable"]
    if fact["wrong"]:
        yield _problem(fact["wrong"], "start this by its launcher, or unset the variable")
    elif fact["launcher"] and fact["local_size"] > usable:
        what = f"{fact['local_size']} ranks share {_counted(usable, 'CPU')}"
        yield _note(what, f"start {usable}, or give the job more CPUs")
    elif fact["slurm_allocation"] and not fact["launcher"]:
        yield _note("this is a Slurm batch script, not a task of a step", "start ranks with srun or shmrun")
    else:
        yield _ok(f"started by {fact['launcher'] or 'no launcher'}")


def _cpus(facts: _Facts) -> Iterator[Finding]:
    fact = facts["cpus"]
    allowed, usable = len(fact["allowed"]), fact["usable"]
    online = fact["online"] or allowed
    if usable < allowed:
        limited = _problem if usable == 1 else _note
        what = f"the cgroup's quota gives {usable} of the {allowed} CPUs that are allowed"
        yield limited(what, "raise it (docker run --cpus, resources.limits.cpu, cpu.max of the cgroup)")
    if allowed < online:
        what = f"this process may use {allowed} of {online} CPUs ({cpulist.spell(fact['allowed'])})"
        fix = "allow it more (taskset -c, docker run --cpuset-cpus, srun --cpus-per-task)"
        yield _note(what, f"if this is not intended, {fix}")
    if usable == online == 1:
        yield _note("there is one CPU, which all ranks share", "use a machine with more")
    elif usable >= online:  # usable exceeds online if a container hides some CPUs
        yield _ok(f"all {usable} are usable")


def _distance(facts: _Facts) -> Iterator[Finding]:
    trips = facts["between_ranks"]["round_trips"]
    if not trips:
        raise machine.Unknown("there is one CPU for all ranks")
    if all(trip["distance"] is None for trip in trips):
        raise machine.Unknown("the CPUs were busy while it was measured")
    far = [trip for trip in trips if trip["distance"] == "far"]
    if not far:
        yield _ok("; ".join(map(info.trip_text, trips)))
        return
    what = f"cores are far from each other: {'; '.join(map(info.trip_text, far))}"
    near = _around(facts["topology"]["caches"], far[0]["cpus"][0])
    if near and not set(near) >= set(far[0]["cpus"]):
        yield _note(what, f"ranks that fit within one L3 are faster there: taskset -c {cpulist.spell(near)}")
    else:
        yield _note(what, "nothing to do: shmring uses the thresholds for far cores")


def _around(caches: list[dict[str, Any]], cpu: int) -> list[int]:
    """Return the CPUs that share an L3 cache with `cpu`; empty if that is unknown."""
    groups = (group for cache in caches if cache["level"] == 3 for group in cache["shared_by"])
    return next((group for group in groups if cpu in group), [])


def _copying(facts: _Facts) -> Iterator[Finding]:
    fact = facts["copy_limit"]
    yield _ok(f"{fact['together_gb_per_s']:.3g} GB/s by {_counted(fact['ranks'], 'rank')} at once")


def _instructions(facts: _Facts) -> Iterator[Finding]:
    fact = facts["instruction_set"]
    best = fact["there"][0]
    if fact["chosen"] is None:
        yield _problem(fact["why"], f"unset it, or set it to one of {', '.join(fact['there'])}")
    elif fact["chosen"] != best:
        yield _note(f"{fact['chosen']} is used where {best} is faster: {fact['why']}", "unset it")
    elif best in _BASELINES:
        fix = "let a virtual machine see its host's processor (qemu -cpu host)"
        yield _note(f"reductions use {best}, the best that this processor reports", fix)
    else:
        yield _ok(f"{best}, {fact['why']}")


def _memory(facts: _Facts) -> Iterator[Finding]:
    fact = facts["memory"]
    if fact["limit"] is None:
        raise machine.Unknown("the kernel reports neither limits nor free memory")
    room = f"{fact['limit']} has {size_text(fact['room_nbytes'])} left"
    if fact["room_nbytes"] >= _LITTLE_NBYTES:
        yield _ok(room)
    else:
        short = _problem if fact["room_nbytes"] < _HARDLY_NBYTES else _note
        yield short(room, "raise it, end what else runs, or use fewer ranks and a smaller SHMRING_CHUNK")


def _shared_memory(facts: _Facts) -> Iterator[Finding]:
    fix = "mount a larger one (docker run --shm-size=1g)"
    if _given(facts, "SHMRING_SEGMENT") == "posix":
        short, who = _problem, "SHMRING_SEGMENT=posix uses it"
        fix += ", or unset SHMRING_SEGMENT, as memfd is not limited by it"
    else:
        short, who = _note, "shmring does not use it, other libraries do"
    try:
        fact = facts["shared_memory"]
    except machine.Unknown as why:
        yield short(f"{why}; {who}", fix)
        return
    if fact["nbytes"] is None:
        yield _ok("it is as large as memory")
        return
    summary = f"{size_text(fact['nbytes'])}, of which {size_text(fact['room_nbytes'])} are left"
    if fact["nbytes"] <= _DOCKER_SHM_NBYTES or fact["room_nbytes"] < _HARDLY_NBYTES:
        yield short(f"it has only {summary}; {who}", fix)
    else:
        yield _ok(f"it has {summary}")


def _descriptors(facts: _Facts) -> Iterator[Finding]:
    soft, hard = facts["descriptors"]["soft"], facts["descriptors"]["hard"]
    if soft is None or soft >= _FEW_DESCRIPTORS:
        yield _ok(f"{'any number' if soft is None else soft} may be open in a process")
        return
    more = 4 * _FEW_DESCRIPTORS if hard is None else min(hard, 4 * _FEW_DESCRIPTORS)
    fix = f"ulimit -n {more}" if more > soft else "have root raise the hard limit (ulimit -Hn)"
    short = _problem if soft < _TOO_FEW_DESCRIPTORS else _note
    yield short(f"only {soft} may be open in a process; ranks, groups and arrays take some each", fix)


def _segments(facts: _Facts) -> Iterator[Finding]:
    kinds = ["memfd", "posix"] if _given(facts, "SHMRING_SEGMENT") != "posix" else ["posix", "memfd"]
    for kind, other in (kinds, kinds[::-1]):
        fact = facts[kind]
        if fact["works"]:
            yield _ok(f"{kind} works, {fact['how']}")
        elif kind == kinds[0]:
            yield _problem(f"{kind} does not work: {fact['how']}", f"set SHMRING_SEGMENT={other}")
        else:
            yield _note(f"{kind} does not work: {fact['how']}", "nothing to do: it is not used")


def _single_copy(facts: _Facts) -> Iterator[Finding]:
    refused = facts["between_ranks"]["single_copy"]["why"]
    if refused is None:
        yield _ok("ranks may read each other's memory")
        return
    scope = facts["yama"]["ptrace_scope"]
    fix = "give the container CAP_SYS_PTRACE (docker run --cap-add=SYS_PTRACE)"
    if scope:
        refused += f" (kernel.yama.ptrace_scope is {scope})"
        fix = "sysctl kernel.yama.ptrace_scope=0"
    missed = _note if _given(facts, "SHMRING_SINGLE_COPY") in ("", "auto", "off") else _problem
    what = f"ranks may not read each other's memory: {refused}; large private arrays are copied twice"
    yield missed(what, f"{fix}, or leave it: only speed is affected")


def _tuning(facts: _Facts) -> Iterator[Finding]:
    fact = facts["tuning"]
    if fact["state"] == "unusable":
        fix = "measure again with shmring tune, delete it, or set SHMRING_TUNING=none"
        yield _problem(f"the table {fact['path']} cannot be used: {fact['why']}", fix)
    elif fact["state"] == "used":
        yield _ok(f"{fact['path']} is used")
    else:
        yield _ok("built-in values are used; shmring tune measures the best values for this machine")


def _threads(facts: _Facts) -> Iterator[Finding]:
    fact, usable = facts["threads"], facts["cpus"]["usable"]
    if fact["given"]:
        yield _ok(", ".join(f"{name}={text}" for name, text in fact["given"].items()))
    elif usable == 1:
        yield _ok("one CPU, so one thread for each rank's numerical libraries")
    else:
        what = f"each rank's numerical libraries start {usable} threads, as OMP_NUM_THREADS is not set"
        yield _note(what, f"export OMP_NUM_THREADS=1, or {usable} divided by the number of ranks")


def _given(facts: _Facts, name: str) -> str:
    text: str = facts["settings"]["given"].get(name, "")
    return text.strip().lower()


CHECKS: dict[str, Check] = {
    "settings": _settings,
    "launcher": _job,
    "CPUs": _cpus,
    "round trip": _distance,
    "copying": _copying,
    "instructions": _instructions,
    "memory": _memory,
    "/dev/shm": _shared_memory,
    "descriptors": _descriptors,
    "segments": _segments,
    "single copies": _single_copy,
    "tuning table": _tuning,
    "threads": _threads,
}
