"""Limits of this process: CPUs (affinity and cgroup quota) and memory (cgroups and host).

Only this module reads cgroup files and /proc/vmstat, and, `shmring info` apart, /proc/meminfo. It also has
the messages for limits that are reached.
"""

from __future__ import annotations

import errno
import os
import resource  # at the top: it cannot be loaded once descriptors have run out
import threading
from dataclasses import dataclass

from ..errors import Error, OutOfMemory

MIB = 1 << 20
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # limits of this process, of this host
_UNLIMITED = 1 << 62  # version 1 writes "no limit" as 2**63 rounded down to a page


@dataclass(frozen=True)
class Headroom:
    """The bytes that can be allocated without waking the OOM killer, and the limit that sets them."""

    nbytes: int
    limit: str


def size_text(nbytes: int) -> str:
    """Return a size in the unit that a person reads, as "1.5 GiB"."""
    size, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 100 or unit == "bytes" else f"{size:.3g} {unit}"


def usable_cpus(allowed: int | None = None) -> int:
    """Return the CPUs that can be kept busy: `allowed` (default: the affinity), limited by cgroup quotas."""
    cpus = float(len(os.sched_getaffinity(0)) if allowed is None else allowed)
    version, directories = _cgroup_directories("cpu")
    for directory in directories:
        quota = _cpu_quota(version, directory)
        if quota is not None:
            cpus = min(cpus, quota)
    return max(1, int(cpus))


def cpus_for_each(nprocs: int) -> int:
    """Return the share of the usable CPUs for each of `nprocs` processes, at least 1."""
    return max(1, usable_cpus() // nprocs)


class MemoryLimits:
    """The memory limits of this process, found once; `headroom()` reads their current use."""

    def __init__(self) -> None:
        self._version, directories = _cgroup_directories("memory")
        self._capped: list[tuple[str, int]] = []
        for directory in directories:
            limit = _read_number(directory, "memory.max" if self._version == 2 else "memory.limit_in_bytes")
            if limit is not None and limit < _UNLIMITED:
                self._capped.append((directory, limit))

    def headroom(self) -> Headroom:
        """Return the least room under any limit, less a margin for the growth of other processes."""
        tightest = _host_headroom()
        for directory, limit in self._capped:
            left = limit - self._used(directory) - _margin(limit)
            if left < tightest.nbytes:
                name = f"the memory cgroup {directory} (limit {size_text(limit)})"
                tightest = Headroom(max(left, 0), name)
        return tightest

    def _used(self, directory: str) -> int:
        used = _read_number(directory, "memory.current" if self._version == 2 else "memory.usage_in_bytes")
        # The kernel reclaims file pages under pressure, active ones less readily; MemAvailable is computed
        # the same way. Shared memory counts as anonymous, not as file pages.
        prefix = "" if self._version == 2 else "total_"
        statistics = _read_table(os.path.join(directory, "memory.stat"))
        inactive = statistics.get(prefix + "inactive_file", 0)
        active = statistics.get(prefix + "active_file", 0)
        return max((used or 0) - inactive - active // 2, 0)


def oom_kills() -> int | None:
    """Return the number of OOM kills in all cgroups since boot; None if unknown."""
    return _read_table("/proc/vmstat").get("oom_kill")


def scheduling_group() -> str:
    """Return the scheduler's groups of this process: its cgroup and its session's autogroup."""
    enabled = _read("/proc/sys/kernel", "sched_autogroup_enabled").strip() == "1"
    return _read("/proc/self", "cgroup") + (_read("/proc/self", "autogroup") if enabled else "")


def explain(error: OSError, doing: str, wanted_nbytes: int | None = None) -> Error:
    """Return the Error that names the limit reached while `doing` something, and the remedy."""
    code = error.errno
    if code == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return Error(
            f"{doing} failed: this process has all the {soft} descriptors open that it may have; "
            f"raise the limit (ulimit -n, at most {hard} without root) or close some"
        )
    if code == errno.ENFILE:
        return Error(f"{doing} failed: this host has no descriptors left; raise sysctl fs.file-max")
    if code == errno.EFBIG:
        return Error(f"{doing} failed: it is above the file size limit of this process; raise it (ulimit -f)")
    if code == errno.EAGAIN:
        soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        return Error(
            f"{doing} failed: no more processes or threads can start; check the limits ulimit -u "
            f"({_limit_text(soft)} of this user, at most {_limit_text(hard)} without root), pids.max of the "
            "cgroup, and ulimit -v"
        )
    if code == errno.ENOMEM:
        return OutOfMemory(
            f"{doing} failed: the kernel has no memory or address space for it; check the limits "
            "ulimit -v, sysctl vm.max_map_count and vm.overcommit_memory",
            wanted_nbytes=wanted_nbytes,
        )
    if code is None:  # raised by Python itself
        return Error(f"{doing} failed: {error}")
    return Error(f"{doing} failed: {error.strerror or error} ({errno.errorcode.get(code, code)})")


def start_thread(thread: threading.Thread) -> None:
    """Start the thread, or raise the Error that names the limit."""
    raised: BaseException | None = None
    try:
        thread.start()
    except (RuntimeError, KeyError) as error:
        if isinstance(error, RuntimeError) and "new thread" in str(error):  # Python gives no further reason
            raise explain_thread(error, thread.name) from error
        raised = error
        if error.__context__ is not None and _comes_from_threading(error):
            raised = error.__context__  # of a signal handler in start(), which then failed itself
    if raised is not None:
        raise raised


def _comes_from_threading(error: BaseException) -> bool:
    """Return whether a line of the module threading has raised the exception."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_globals.get("__name__") == threading.__name__


def explain_thread(error: RuntimeError, name: str) -> Error:
    """Return the Error that names the limit that keeps a thread from starting, and the remedy."""
    if "shutdown" in str(error):  # in exit handlers of Python 3.12, in destructors of later ones
        return Error(f"starting the thread {name} failed: {error}")
    return explain(OSError(errno.EAGAIN, str(error)), f"starting the thread {name}")


def _host_headroom() -> Headroom:
    table = _read_table("/proc/meminfo")
    if "MemAvailable:" not in table:
        return Headroom(_UNLIMITED, "this host's memory")
    total = table.get("MemTotal:", 0) * 1024
    available = (table["MemAvailable:"] + table.get("SwapFree:", 0)) * 1024
    return Headroom(max(available - _margin(total), 0), f"this host's memory ({size_text(total)})")


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _margin(limit_nbytes: int) -> int:
    return min(max(limit_nbytes // 16, 4 * MIB), 128 * MIB)


def _cpu_quota(version: int, directory: str) -> float | None:
    if version == 2:
        words = _read(directory, "cpu.max").split()
        quota, period = [*words, "", ""][:2]
    else:
        quota, period = _read(directory, "cpu.cfs_quota_us"), _read(directory, "cpu.cfs_period_us")
    try:
        quota_us, period_us = int(quota), int(period)
    except ValueError:  # "max", or no such file at the root
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _cgroup_directories(controller: str) -> tuple[int, list[str]]:
    """Return (cgroup version, this process' directory and its parents up to the mount) of a controller."""
    version, path = 2, ""
    for line in _read("/proc/self", "cgroup").splitlines():
        _, controllers, its_path = line.split(":", 2)
        if controller in controllers.split(","):
            version, path = 1, its_path
            break
        if not controllers:
            path = its_path
    mount = _cgroup_mount(version, controller)
    if mount is None:
        return version, []
    root, top = mount
    # The path is relative to the cgroup namespace. In a container without a namespace, the mount's root is
    # the container's cgroup; strip that root to get the path below the mount point.
    below = path[len(root.rstrip("/")) :] if path.startswith(root) else ""
    own = os.path.normpath(top + "/" + below)
    if os.path.commonpath((own, top)) != top or not os.path.isdir(own):
        own = top
    directories = [own]
    while own != top:
        own = os.path.dirname(own)
        directories.append(own)
    return version, directories


def _cgroup_mount(version: int, controller: str) -> tuple[str, str] | None:
    """Return (root inside the hierarchy, mount point); None if the controller is not mounted."""
    for line in _read("/proc/self", "mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        # The mount source is arbitrary and may be empty: two spaces in a row.
        words, (fstype, _, options) = place.split(), [*kind.split(" ", 2), "", "", ""][:3]
        if (fstype == "cgroup2" and version == 2) or (
            fstype == "cgroup" and version == 1 and controller in options.split(",")
        ):
            return words[3], words[4].replace("\\040", " ")
    return None


def _read(directory: str, name: str) -> str:
    try:
        with open(os.path.join(directory, name), errors="surrogateescape") as file:
            return file.read()
    except OSError:  # missing at the root of a hierarchy, or hidden from a container
        return ""


def _read_number(directory: str, name: str) -> int | None:
    text = _read(directory, name).strip()
    return int(text) if text.isdigit() else None


def _read_table(path: str) -> dict[str, int]:
    directory, name = os.path.split(path)
    rows = (line.split() for line in _read(directory, name).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
