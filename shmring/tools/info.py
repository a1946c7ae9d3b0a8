"""`shmring info`: report what this machine offers to ranks.

Each fact is determined separately. If one fails, its value is {"unknown": why}, and the others are still
reported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._system import cpulist
from .._system.limits import size_text
from . import _cli
from ._machine import machine, probes, sections, software
from ._machine.sections import Row

Fact = dict[str, Any]
Report = dict[str, Fact]
_SHOWN_GROUPS = 4


def _round_trips(root: Path) -> Fact:
    try:
        known = machine.topology(root)
    except machine.Unknown:
        known = {}
    pairs = machine.pairs(known, machine.cpus(root)["allowed"])
    found = probes.between([pair["cpus"] for pair in pairs])
    for pair, trip in zip(pairs, found["round_trips"], strict=True):
        trip["share"] = pair["share"]
    return found


def _copy_limit(root: Path) -> Fact:
    return probes.copy_limit(machine.cpus(root)["usable"], machine.memory(root)["room_nbytes"])


FACTS: dict[str, Callable[[Path], Fact]] = {
    "versions": lambda _: software.versions(),
    "cpus": machine.cpus,
    "model": machine.model,
    "topology": machine.topology,
    "instruction_set": lambda _: software.instruction_set(),
    "memory": machine.memory,
    "shared_memory": machine.shared_memory,
    "huge_pages": machine.huge_pages,
    "descriptors": lambda _: machine.descriptors(),
    "memfd": lambda _: probes.segment("memfd"),
    "posix": lambda _: probes.segment("posix"),
    "yama": lambda root: {"ptrace_scope": machine.ptrace_scope(root)},
    "between_ranks": _round_trips,
    "copy_limit": _copy_limit,
    "tuning": lambda _: software.tuning_table(),
    "settings": lambda _: software.settings(),
    "job": lambda _: software.job(),
    "threads": lambda _: software.threads(),
    "gloo": lambda _: software.gloo(),
    "jax": lambda _: software.jax(),
    "libraries": lambda _: software.libraries(),
}
MEASURED = ("between_ranks", "copy_limit")


def report(root: Path = machine.ROOT, *, measures: bool = True) -> Report:
    """Return all facts; a fact that cannot be determined is {"unknown": why}. Never raises."""
    found = {}
    for name, find in FACTS.items():
        if name in MEASURED and not measures:
            found[name] = {"unknown": "not measured, because of --no-measure"}
            continue
        try:
            found[name] = find(root)
        except Exception as error:
            found[name] = {"unknown": reason(error)}
    return found


def reason(error: Exception) -> str:
    """Return in one line why something is unknown."""
    if isinstance(error, machine.Unknown):
        return " ".join(str(error).split())
    return _cli.in_one_line(error).removesuffix(":")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="what this machine offers: CPUs, caches, memory, transports, libraries, what is in use",
        description="Report what this machine offers to ranks and what is in use. Starts a few ranks for "
        "about a second to measure the distance between cores and the speed of copies.",
    )
    add_flags(parser, "all of it")
    parser.set_defaults(run=run)


def add_flags(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flags that info and doctor share."""
    parser.add_argument("--no-measure", action="store_true", help="start no ranks and measure nothing")
    _cli.add_json(parser, what)


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit status."""
    found = report(measures=not arguments.no_measure)
    if arguments.json:
        _cli.print_json(found)
    else:
        sections.show({head: [_row(found, *one) for one in rows] for head, rows in _SECTIONS.items()})
    return 0


def _row(found: Report, label: str, name: str, describe: Callable[[Fact], str]) -> Row:
    fact = found[name]
    try:
        text = f"unknown: {fact['unknown']}" if "unknown" in fact else describe(fact)
    except Exception as error:
        text = f"unknown: {reason(error)}"
    return Row(label, text, "yellow" if text.startswith("unknown") else "cyan")


# ---- as text ----------------------------------------------------------------------------------------------


def _nbytes_text(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size_text(nbytes)


def trip_text(trip: Fact) -> str:
    """Format the round trip of one pair of CPUs."""
    one, other = trip["cpus"]
    shown = f"CPUs {one} and {other} ({trip['share']} shared)"
    if trip["round_trip_ns"] is None:
        return f"{shown}: unknown, one of them was busy"
    return f"{shown}: {trip['round_trip_ns']} ns, {trip['distance']}"


def _model(fact: Fact) -> str:
    virtual = ", in a virtual machine" if fact["virtual"] else ""
    return f"{fact['name']}, {fact['architecture']}{virtual}"


def _cpus(fact: Fact) -> str:
    allowed = fact["allowed"]
    shown = f"{fact['usable']} usable"
    if fact["usable"] < len(allowed):
        shown += f" under the cgroup's quota, {len(allowed)} allowed"
    return f"{shown} ({cpulist.spell(allowed)}) of {fact['online'] or 'an unknown number'}"


def _cores(fact: Fact) -> str:
    if not fact["cores"]:
        return "unknown: the kernel does not report which CPUs share a core"
    threads = sorted({len(core) for core in fact["cores"]})
    each = "one thread each" if threads == [1] else f"{' or '.join(map(str, threads))} threads each"
    packages = f" in {len(fact['packages'])} packages" if len(fact["packages"]) > 1 else ""
    return f"{len(fact['cores'])}{packages}, {each}{_groups(fact['cores'])}"


def _caches(fact: Fact) -> str:
    shown = [
        f"{len(cache['shared_by'])} L{cache['level']} of {_nbytes_text(cache['nbytes'])}"
        f"{_groups(cache['shared_by'])}"
        for cache in fact["caches"]
        if cache["level"] > 1
    ]
    return "; ".join(shown) or "unknown: the kernel does not report which CPUs share a cache"


def _nodes(fact: Fact) -> str:
    if len(fact["nodes"]) < 2:
        return "one node"
    return f"{len(fact['nodes'])} nodes{_groups([node['cpus'] for node in fact['nodes']])}"


def _groups(groups: list[list[int]]) -> str:
    """Format groups of CPUs; empty if every group has one CPU."""
    if max(map(len, groups)) == 1:
        return ""
    shown = " | ".join(cpulist.spell(group) for group in groups[:_SHOWN_GROUPS])
    return f" (CPUs {shown}{' | ...' if len(groups) > _SHOWN_GROUPS else ''})"


def _instruction_set(fact: Fact) -> str:
    others = [name for name in fact["there"] if name != fact["chosen"]]
    return f"{fact['chosen'] or 'none'}, {fact['why']}" + (f"; also {', '.join(others)}" if others else "")


def _trips(fact: Fact) -> str:
    return "; ".join(map(trip_text, fact["round_trips"])) or "unknown: there is one CPU for all ranks"


def _copying(fact: Fact) -> str:
    all_of_them = f", {fact['together_gb_per_s']:.3g} GB/s by {fact['ranks']} at once"
    shown = f"{fact['alone_gb_per_s']:.3g} GB/s by one rank{all_of_them if fact['ranks'] > 1 else ''}"
    return f"{shown} ({_nbytes_text(fact['nbytes'])} each)"


def _memory(fact: Fact) -> str:
    total = _nbytes_text(fact["total_nbytes"])
    room = f", {_nbytes_text(fact['room_nbytes'])} more may be taken before a limit" if fact["limit"] else ""
    return f"{total}{room}{': ' + fact['limit'] if fact['limit'] else ''}"


def _shared_memory(fact: Fact) -> str:
    if fact["nbytes"] is None:
        return "as large as memory"
    return f"{_nbytes_text(fact['nbytes'])}, {_nbytes_text(fact['room_nbytes'])} left"


def _huge_pages(fact: Fact) -> str:
    return f"{'used' if fact['shared'] else 'not used'} for shared memory: shmem_enabled is {fact['given']}"


def _descriptors(fact: Fact) -> str:
    soft, hard = ("any number" if limit is None else str(limit) for limit in (fact["soft"], fact["hard"]))
    return f"{soft} may be open in a process; at most {hard} without root"


def _segment(fact: Fact) -> str:
    return f"works, {fact['how']}" if fact["works"] else f"does not work: {fact['how']}"


def _single_copy(fact: Fact) -> str:
    refused = fact["single_copy"]["why"]
    return f"not between ranks: {refused}" if refused else "works between ranks"


def _yama(fact: Fact) -> str:
    return "not there" if fact["ptrace_scope"] is None else str(fact["ptrace_scope"])


def _tuning(fact: Fact) -> str:
    if fact["state"] == "used":
        return f"{fact['path']}, for {', '.join(map(str, fact['ranks'])) or 'no'} ranks"
    if fact["state"] == "absent":
        return f"built in, as there is no {fact['path']}"
    return f"built in: {fact['path'] + ' ' if fact['path'] else ''}{fact['why']}"


def _settings(fact: Fact) -> str:
    return (
        ", ".join(f"{name}={text}" for name, text in fact["given"].items()) or "no SHMRING_* variable is set"
    )


def _job(fact: Fact) -> str:
    if fact["wrong"]:
        return f"unknown: {fact['wrong']}"
    if fact["launcher"] is None:
        return "no launcher"
    return f"{fact['launcher']}, as rank {fact['rank']} of {fact['size']}"


def _launchers(fact: Fact) -> str:
    around = [
        ("in a Kubernetes pod", fact["kubernetes"]),
        ("in a Slurm allocation", fact["slurm_allocation"]),
    ]
    return ", ".join([*fact["commands"], *(text for text, there in around if there)]) or "none on the PATH"


def _threads(fact: Fact) -> str:
    shown = ", ".join(f"{name}={text}" for name, text in fact["given"].items())
    return shown or f"none of {', '.join(software.THREAD_VARIABLES)} is set"


def _gloo(fact: Fact) -> str:
    return f"{'replaced by shmring' if fact['replaced'] else 'not replaced'}: {fact['why']}"


def _jax(fact: Fact) -> str:
    if fact["version"] is None:
        return "not installed"
    through = {"XLA": "as custom calls of XLA", "callbacks": "through callbacks, some 100 us more each"}
    return f"{fact['version']}: programs call shmring {through[fact['calls_through']]}"


def _names_and_versions(fact: Fact) -> str:
    return ", ".join(f"{name} {version}" for name, version in fact.items() if version) or "none"


_SECTIONS: dict[str, list[tuple[str, str, Callable[[Fact], str]]]] = {
    "Processors": [
        ("CPUs", "cpus", _cpus),
        ("model", "model", _model),
        ("cores", "topology", _cores),
        ("caches", "topology", _caches),
        ("NUMA", "topology", _nodes),
        ("instructions", "instruction_set", _instruction_set),
        ("round trip", "between_ranks", _trips),
        ("copy limit", "copy_limit", _copying),
    ],
    "Limits": [
        ("memory", "memory", _memory),
        ("/dev/shm", "shared_memory", _shared_memory),
        ("huge pages", "huge_pages", _huge_pages),
        ("descriptors", "descriptors", _descriptors),
    ],
    "Transports": [
        ("memfd", "memfd", _segment),
        ("posix", "posix", _segment),
        ("process_vm_readv", "between_ranks", _single_copy),
        ("ptrace_scope", "yama", _yama),
    ],
    "In use": [
        ("settings", "settings", _settings),
        ("tuning table", "tuning", _tuning),
        ("threads", "threads", _threads),
        ("torch's gloo", "gloo", _gloo),
        ("JAX", "jax", _jax),
        ("started by", "job", _job),
    ],
    "Installed": [
        ("versions", "versions", _names_and_versions),
        ("libraries", "libraries", _names_and_versions),
        ("launchers", "job", _launchers),
    ],
}
