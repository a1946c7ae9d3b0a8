"""Read from the kernel a machine's CPUs, shared caches, memory and limits.

All paths are below a root folder, which tests replace. A missing value is None or empty. A function raises
`Unknown` if it finds nothing at all.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..._system import cpulist, limits

ROOT = Path("/")
_CPUS = "sys/devices/system/cpu"
_NAMES = ("model name", "cpu model", "cpu", "uarch")  # names of a processor in /proc/cpuinfo, by architecture
_HUGE_WITHOUT_ADVICE = ("always", "within_size", "force")  # shmring does not advise (madvise)
_MOST_HEADROOM = 1 << 60  # more means that there is no limit


class Unknown(Exception):
    """A fact cannot be determined; the text says why."""


# ---- CPUs -------------------------------------------------------------------------------------------------


def cpus(root: Path = ROOT) -> dict[str, Any]:
    """Return the CPUs that are online, allowed for this process, and usable under its cgroups' quotas."""
    allowed = sorted(os.sched_getaffinity(0))
    online = _cpu_list(root / _CPUS / "online")
    usable = limits.usable_cpus()
    return {"online": len(online) or None, "allowed": allowed, "usable": usable}


def model(root: Path = ROOT) -> dict[str, Any]:
    """Return the processor's name or identifiers, its architecture, and if it is virtual (None: unknown)."""
    fields: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    parts = [f"{name} {fields[name]}" for name in ("CPU implementer", "CPU part") if name in fields]
    found = next((fields[name] for name in _NAMES if fields.get(name)), ", ".join(parts))
    if not found:
        raise Unknown(f"{root / 'proc/cpuinfo'} names no processor")
    flags = fields.get("flags")  # x86 only
    virtual = None if flags is None else "hypervisor" in flags.split()
    return {"name": found, "architecture": platform.machine(), "virtual": virtual}


def topology(root: Path = ROOT) -> dict[str, Any]:
    """Return the lists of CPUs that share a core, a package, a node and each cache."""
    folder = root / _CPUS
    online = _cpu_list(folder / "online") or sorted(_numbers_of(folder, "cpu"))
    if not online:
        raise Unknown(f"there is nothing about CPUs in {folder}")
    nodes = {
        node: _cpu_list(root / f"sys/devices/system/node/node{node}/cpulist")
        for node in sorted(_numbers_of(root / "sys/devices/system/node", "node"))
    }
    return {
        "cores": _shared(folder, online, "core_cpus_list", "thread_siblings_list"),
        "packages": _shared(folder, online, "package_cpus_list", "core_siblings_list"),
        "caches": _caches(folder, online),
        "nodes": [{"node": node, "cpus": its} for node, its in nodes.items() if its],
    }


def pairs(known: dict[str, Any], allowed: Sequence[int]) -> list[dict[str, Any]]:
    """Pair the first allowed CPU with another CPU for each level of sharing; the nearest pair comes first."""
    first, *others = sorted(allowed)
    levels = sorted({cache["level"] for cache in known.get("caches", ()) if cache["level"] > 1})
    ways = [("one core", known.get("cores", []))]
    for level in levels:
        groups = [
            group for cache in known["caches"] if cache["level"] == level for group in cache["shared_by"]
        ]
        ways.append((f"one L{level}", groups))
    ways.append(("one node", [node["cpus"] for node in known.get("nodes", ())]))
    ways.append(("one package", known.get("packages", [])))
    rest = "nothing" if known.get("packages") else "nothing known"
    found: dict[str, list[int]] = {}
    for other in others:
        way = next((way for way, groups in ways if _together(groups, first, other)), rest)
        found.setdefault(way, [first, other])
    order = [*(way for way, _ in ways), rest]
    return [{"share": way, "cpus": found[way]} for way in sorted(found, key=order.index)]


def _shared(folder: Path, online: list[int], *names: str) -> list[list[int]]:
    """Return the groups of CPUs in the first of `names`, files of a CPU's topology folder, that has any."""
    for name in names:
        found = {tuple(_cpu_list(folder / f"cpu{cpu}/topology/{name}")) for cpu in online} - {()}
        if found:
            return [list(group) for group in sorted(found)]
    return []


def _caches(folder: Path, online: list[int]) -> list[dict[str, Any]]:
    """Return the data caches. A level with two sizes, on a chip with two kinds of cores, has two entries."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for cpu in online:
        for index in _numbers_of(folder / f"cpu{cpu}/cache", "index"):
            cache = folder / f"cpu{cpu}/cache/index{index}"
            level, shared_by = _text(cache / "level").strip(), tuple(_cpu_list(cache / "shared_cpu_list"))
            if level.isdigit() and shared_by and _text(cache / "type").strip() != "Instruction":
                found.setdefault((int(level), _nbytes(_text(cache / "size"))), set()).add(shared_by)
    return [
        {"level": level, "nbytes": nbytes or None, "shared_by": [list(group) for group in sorted(groups)]}
        for (level, nbytes), groups in sorted(found.items())
    ]


def _together(groups: Iterable[Sequence[int]], one: int, other: int) -> bool:
    return any(one in group and other in group for group in groups)


# ---- memory and limits ------------------------------------------------------------------------------------


def memory(root: Path = ROOT) -> dict[str, Any]:
    """Return the host's bytes, the bytes left before a limit, and the name of that limit."""
    table = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    total = _nbytes(table.get("MemTotal", ""))
    room = limits.MemoryLimits().headroom()
    known = room.nbytes < _MOST_HEADROOM
    return {
        "total_nbytes": total or None,
        "room_nbytes": room.nbytes if known else None,
        "limit": room.limit if known else None,
    }


def shared_memory(root: Path = ROOT) -> dict[str, Any]:
    """Return the size of /dev/shm and the room left; None for both if unlimited (tmpfs with size=0)."""
    folder = root / "dev/shm"
    try:
        there = os.statvfs(folder)
    except OSError as error:
        raise Unknown(f"{folder}: {error.strerror}") from None
    if not there.f_blocks:
        return {"nbytes": None, "room_nbytes": None}
    return {"nbytes": there.f_blocks * there.f_frsize, "room_nbytes": there.f_bavail * there.f_frsize}


def huge_pages(root: Path = ROOT) -> dict[str, Any]:
    """Return when the kernel gives huge pages to memfd segments: its word, and if shmring's get them."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    found = re.search(r"\[(\w+)\]", text)
    if not found:
        raise Unknown("the kernel does not report when shared memory gets huge pages")
    return {"given": found[1], "shared": found[1] in _HUGE_WITHOUT_ADVICE}


def descriptors() -> dict[str, Any]:
    """Return the soft and the hard limit of open descriptors in a process; None means no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        name: None if limit == resource.RLIM_INFINITY else limit
        for name, limit in (("soft", soft), ("hard", hard))
    }


def ptrace_scope(root: Path = ROOT) -> int | None:
    """Return Yama's ptrace_scope. None: no Yama, so a user's processes may read each other's memory."""
    text = _text(root / "proc/sys/kernel/yama/ptrace_scope").strip()
    return int(text) if text.isdigit() else None


# ---- files ------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # missing in this kernel, or hidden from a container
        return ""


def _cpu_list(path: Path) -> list[int]:
    """Return the numbers in a file such as "0-3,8"; empty if the file is missing or malformed."""
    try:
        return cpulist.parse(_text(path))
    except ValueError:
        return []


def _numbers_of(folder: Path, word: str) -> list[int]:
    """Return N of each entry `word`N in a folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    ends = [name.removeprefix(word) for name in names if name.startswith(word)]
    return sorted(int(end) for end in ends if end.isascii() and end.isdigit())


def _nbytes(text: str) -> int:
    """Parse a size such as "2048K" or "16318480 kB"; return 0 if it is malformed."""
    words = text.strip().upper().removesuffix("B").rstrip()
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(words[-1:], 1)
    digits = words.rstrip("KMG ").strip()
    return int(digits) * factor if digits.isascii() and digits.isdigit() else 0
