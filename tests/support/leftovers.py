"""Possible leftovers: names in /dev/shm, processes, descriptors."""

import contextlib
import os
import time
from pathlib import Path

SHM = Path("/dev/shm")
# Python's own helpers, which live as long as the process that first needed them.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "loky")


def names_in_shm(beginnings=("shmring",)):
    """Others on this machine use it as well: only names that begin so."""
    return {path.name for path in SHM.iterdir() if path.name.startswith(beginnings)}


def parents():
    """pid → (parent's pid, state) of all processes."""
    table = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        table[int(path.parent.name)] = int(fields[1]), fields[0]
    return table


def descendants():
    """Return the living processes that descend from this one."""
    table, found = parents(), {os.getpid()}
    while True:
        more = {pid for pid, (parent, state) in table.items() if parent in found and state != "Z"} - found
        if not more:
            return found - {os.getpid()}
        found |= more


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def left_running():
    """Descendants that should have ended, by pid."""
    table = parents()
    left = {pid: command_of(pid) for pid in descendants()}
    return {
        pid: command
        for pid, command in left.items()
        if command
        and not (table.get(pid, (0,))[0] == os.getpid() and any(helper in command for helper in HELPERS))
    }


def thread_names():
    """Names of this process's threads as the kernel knows them, those that Python does not list included."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended after iterdir
            names.append((task / "comm").read_text().strip())
    return names


def our_descriptors():
    """Return the segments and sockets, which shmring could leak."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(path)
        except OSError:
            continue
        if target.startswith(("/memfd:shmring", "/dev/shm/#", "socket:")):
            found[int(path.name)] = target
    return found


def until_none(left, seconds=2):
    """Return what left() still finds after waiting up to `seconds` for it to find nothing.

    Count short waits, not the clock: what is to end does not while the machine stands still.
    """
    for _ in range(int(seconds / 0.05)):
        if not left():
            break
        time.sleep(0.05)
    return left()


def state_of(pid):
    """Return the letter that /proc gives for the state of a process, such as T if it is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"  # it has ended, and its parent knows


def is_alive(pid):
    return state_of(pid) not in "ZX"
