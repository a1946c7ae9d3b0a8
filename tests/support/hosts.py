"""Stand-ins for hosts: network namespaces on one switch, whose links have a rate and can be unplugged.

Contains the namespaces, their names, addresses and links, and their removal. Independent of shmring:
benchmarks use it as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

# Everything is in namespaces of our own, the switch too: so addresses and names of interfaces need not differ
# from those of another run at the same time; the links of a namespace end with it.
PREFIX = "shmring-host"
NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"
CLONE_NEWNET = 0x40000000
GBIT_S = 10**9
# tbf splits packets that are larger than its bucket, and TCP passes on up to 64 KiB and headers in one piece.
BURST_NBYTES = 256 << 10
QUEUE_MS = 50
KILL_TIMEOUT_S = 5.0

_libc = ctypes.CDLL(None, use_errno=True)
_serials = itertools.count()


class NoHosts(Exception):
    """No hosts can be made here; the message names the cause."""


def _ip(*arguments: object, program: str = "ip") -> str:
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _started_at(pid: int) -> int | None:
    """When a living process began, in ticks since boot: with its id it names the process for ever."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def our_namespaces() -> list[str]:
    """Names of all namespaces that any run of this has made and not removed."""
    return sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}-*"))


def sweep() -> list[str]:
    """Remove the leftovers of killed runs, and return their names; running ones keep theirs."""
    left = []
    for name in our_namespaces():
        found = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", name)
        if found and _started_at(int(found[1])) != int(found[2]):
            left.append(name)
            _remove(name)
    return left


def _processes_in(namespace: str) -> list[int]:
    try:
        return [int(pid) for pid in _ip("netns", "pids", namespace).split()]
    except NoHosts:  # another sweep was faster
        return []


def _send(pids: Sequence[int], sig: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def _kill_all_in(namespace: str, sig: int) -> None:
    """Kill until no process is left, including those forked in the meantime; once if the signal can be
    caught."""
    until = time.monotonic() + KILL_TIMEOUT_S
    while pids := _processes_in(namespace):
        if sig == signal.SIGKILL:  # as with a machine's end, none of them sees another one die
            _send(pids, signal.SIGSTOP)
        _send(pids, sig)
        if sig != signal.SIGKILL:
            return
        if time.monotonic() > until:
            raise RuntimeError(f"processes {pids} of {namespace} do not end")
        time.sleep(0.01)


def _remove(namespace: str) -> None:
    _kill_all_in(namespace, signal.SIGKILL)
    if (NAMESPACES / namespace).exists():
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


class Host:
    """One namespace, with its link to the switch. Addresses: the same for a host's index in every run."""

    def __init__(self, index: int, namespace: str, switch: str) -> None:
        self.index, self.namespace = index, namespace
        self.address, self.address6 = f"10.77.0.{index + 1}", f"fd77::{index + 1:x}"
        self.interface = INTERFACE
        self._switch, self._port = switch, f"port{index}"

    def __repr__(self) -> str:
        return f"Host({self.index}, {self.namespace!r})"

    def _make(self) -> None:
        here = ("-n", self.namespace)
        _ip("netns", "add", self.namespace)
        _ip(
            "-n",
            self._switch,
            "link",
            "add",
            self._port,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            self.namespace,
        )
        _ip("-n", self._switch, "link", "set", self._port, "master", "switch", "up")
        _ip(*here, "addr", "add", f"{self.address}/24", "dev", INTERFACE)
        # Without nodad the address could not be used for the first seconds.
        _ip(*here, "addr", "add", f"{self.address6}/64", "dev", INTERFACE, "nodad")
        _ip(*here, "link", "set", "lo", "up")
        _ip(*here, "link", "set", INTERFACE, "up")

    def limit(self, rate_bit_s: int | None) -> None:
        """The link's rate, frames and all, in each direction; None: as fast as the CPUs are."""
        for namespace, interface in ((self.namespace, INTERFACE), (self._switch, self._port)):
            where = ("-n", namespace, "qdisc")
            if rate_bit_s is not None:
                _ip(
                    *where,
                    "replace",
                    "dev",
                    interface,
                    "root",
                    "tbf",
                    "rate",
                    f"{rate_bit_s}bit",
                    "burst",
                    BURST_NBYTES,
                    "latency",
                    f"{QUEUE_MS}ms",
                    program="tc",
                )
            elif " tbf " in _ip(*where, "show", "dev", interface, program="tc"):
                _ip(*where, "del", "dev", interface, "root", program="tc")

    def down(self) -> None:
        """Pull the cable out at the switch: sent packets are lost, and no connection is notified."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def up(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def command(self, *command: object) -> list[str]:
        """Return the command that runs `command` here, with the same files and processes visible as
        elsewhere."""
        return ["ip", "netns", "exec", self.namespace, *map(str, command)]

    def run(self, *command: object, **how: Any) -> subprocess.CompletedProcess[Any]:
        """subprocess.run of it; how: as there."""
        return subprocess.run(self.command(*command), **{"check": True, **how})

    def start(self, *command: object, **how: Any) -> subprocess.Popen[Any]:
        """Run subprocess.Popen, and return once the process is here: before that, kill() would not find
        it."""
        started = subprocess.Popen(self.command(*command), **how)
        while started.poll() is None and not self._has(started.pid):
            time.sleep(0.001)
        return started

    def enter(self) -> None:
        """Moves this thread here, for good: in a child before it has any other thread."""
        with open(NAMESPACES / self.namespace, "rb") as namespace:
            if _libc.setns(namespace.fileno(), CLONE_NEWNET):
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}", self.namespace)

    def is_here(self) -> bool:
        """Return whether this process is on the host; a host may be pickled to any process."""
        return self._has(os.getpid())

    def _has(self, pid: int) -> bool:
        try:
            return os.path.samefile(f"/proc/{pid}/ns/net", NAMESPACES / self.namespace)
        except FileNotFoundError:  # it has ended
            return False

    def pids(self) -> list[int]:
        return _processes_in(self.namespace)

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Kill every process here. Their kernel goes on and closes their connections: after down() no peer is
        notified, as in a power failure."""
        _kill_all_in(self.namespace, sig)


class Hosts(Sequence[Host]):
    """A context manager; the hosts and all processes on them are always gone afterwards."""

    def __init__(self, count: int, rate_bit_s: int | None = None) -> None:
        self.rate_bit_s = rate_bit_s
        run = f"{PREFIX}-{os.getpid()}-{_started_at(os.getpid())}-{next(_serials)}"
        self._switch = f"{run}-switch"
        self._hosts = [Host(index, f"{run}-{index}", self._switch) for index in range(count)]

    def __enter__(self) -> Hosts:
        for program in ("ip", "tc"):
            if shutil.which(program) is None:
                raise NoHosts(f"needs the program {program} (of iproute2)")
        if os.geteuid() != 0:
            raise NoHosts("needs root, who may make network namespaces")
        sweep()
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge", "mcast_snooping", 0)
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for host in self._hosts:
                host._make()
                host.limit(self.rate_bit_s)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for namespace in [*(host.namespace for host in self._hosts), self._switch]:
            _remove(namespace)

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def mend(self) -> None:
        """All links up, at the rate they began with."""
        for host in self:
            host.up()
            host.limit(self.rate_bit_s)

    def clear(self) -> None:
        """Ends every process on any of them."""
        for host in self:
            host.kill()
