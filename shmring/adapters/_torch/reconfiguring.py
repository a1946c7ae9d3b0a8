"""Change the members of a process group: torch's reconfigure, from torch 2.14 on.

Each member has a handle. The program passes the handles of all new members, and a number that it has not used
before, to each of them by its own means. They meet in the group's store under that number, so a meeting sees
nothing of earlier ones, and the group goes on with a new communicator.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

import shmring

from .._compiled import CallLock
from . import meeting
from .parent import check_of_members
from .work import finished

_KIND = "shmring"
_PATIENCE_S = 0.5  # for a call of another thread, before it is ended


class NoMembers:
    """Takes the place of the communicator of a group that has no members yet, or none any more."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s, self.linger_s = rank, size, timeout_s, 0.0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "this process group has no members: pass their handles to torch.distributed._reconfigure"
        )

    def refuse(self, kind: Any) -> None:
        """Do nothing: no rank waits."""

    def abort(self, reason: str) -> None:
        """Do nothing: no rank is in a call."""

    def close(self) -> None:
        """Do nothing."""


def group_for(options: Any, group_class: Callable[..., Any], meet: Callable[..., Any]) -> Any:
    """Return this rank's process group. Its members meet now, unless they are to be given by reconfigure."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    if getattr(options, "enable_reconfigure", False):  # from torch 2.14 on
        return group_class(NoMembers(rank, size, timeout.total_seconds()), store, timeout)
    check = check_of_members(options.global_ranks_in_group)
    return group_class(meet(store, rank, size, timeout, check), store, timeout)


class Reconfigurable:
    """The methods of a process group by which its members change."""

    comm: shmring.Comm
    _calling: CallLock
    _messaging: CallLock
    _handle: str
    _first_store: dist.Store
    _timeout_s: float
    _begin: Callable[[Any, dist.Store], None]
    _unfinished: list[Any]

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        return self._handle

    def reconfigure(self, opts: Any) -> dist.Work:
        """Replace the members of the group by those of the handles: a list keeps its order, a set is sorted.

        Return when all have met. If they do not meet, the group has no members until the next call.
        """
        handles = list(opts.handles) if isinstance(opts.handles, list) else sorted(opts.handles)
        if len(set(handles)) < len(handles):
            raise RuntimeError("a handle is given twice to reconfigure")
        if self._handle not in handles:
            raise RuntimeError("the handles given to reconfigure do not contain this rank's own")
        unknown = [handle for handle in handles if _process_of(handle) is None]
        if unknown:
            raise RuntimeError(f"{unknown[0]!r:.80} is not a handle of a process group of shmring")
        rank = handles.index(self._handle)
        timeout = opts.timeout or datetime.timedelta(seconds=self._timeout_s)
        store = dist.PrefixStore(f"reconfigured {opts.uuid}/", self._first_store)
        _claim(store, opts.uuid, self._handle, rank)
        self._leave(rank, len(handles))
        check = _Check(handles, rank)
        comm = meeting.meet_afresh(store, rank, len(handles), timeout, check)
        comm.timeout_s = self._timeout_s
        self._begin(comm, store)
        return finished([])

    def poll(self) -> None:
        """Raise the error that has ended the group, if one has. In a signal handler's call, raise nothing."""
        if isinstance(self.comm, NoMembers) or self._messaging.is_mine():
            return
        with self._messaging:
            self.comm.iprobe()

    def get_error(self) -> Any:
        """Return the kind of error that has ended the group; an abort is none."""
        try:
            self.poll()
        except shmring.Timeout:
            return ErrorType.TIMEOUT
        except shmring.Aborted:
            return ErrorType.SUCCESS
        except shmring.RankFailed:
            return ErrorType.REMOTE_ERROR
        except shmring.Error:
            return ErrorType.COMM_ERROR
        return ErrorType.SUCCESS

    def _leave(self, rank: int, size: int) -> None:
        """Close the communicator. A call of another thread that does not return is ended."""
        self._calling.check_not_mine()
        self._messaging.check_not_mine()
        try:
            for lock in (self._calling, self._messaging):
                if not lock.acquire(timeout=_PATIENCE_S):
                    self.comm.abort("the process group is reconfigured")
                    lock.acquire()
            self.comm.close()
            self.comm = cast(Any, NoMembers(rank, size, self._timeout_s))
            self._unfinished.clear()
        finally:  # a signal handler may have raised when `acquire` had just taken a lock, so ask the locks
            try:
                self._calling.release_if_mine()
            finally:
                self._messaging.release_if_mine()


def new_handle() -> str:
    """Return a text that no other process group has, and that names this process."""
    pid = os.getpid()
    return ":".join((_KIND, secrets.token_hex(8), shmring.host_id(), str(pid), _start_time(pid)))


def _process_of(handle: str) -> tuple[str, int, str] | None:
    """Return the host, number and start time of the process of a handle; None for another text."""
    kind, _, rest = handle.partition(":")
    fields = rest.split(":")
    if kind != _KIND or len(fields) != 4 or not fields[2].isdecimal():
        return None
    return fields[1], int(fields[2]), fields[3]


def _start_time(pid: int) -> str:
    """Return the kernel's text for the time at which a process started; "" if there is no such process."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") != str(os.getpid()):  # that of another PID namespace
            return ""
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""


class _Check:
    """Raises RankFailed if a member's process on this host has ended; those of other hosts cannot be seen.

    Rank 0 looks at all members, and tells the others. They look at rank 0.
    """

    def __init__(self, handles: Sequence[str], rank: int) -> None:
        host = shmring.host_id()
        watched = enumerate(handles if rank == 0 else handles[:1])
        processes = [(other, _process_of(handle) or ("", 0, "")) for other, handle in watched]
        self._local = [(other, *process[1:]) for other, process in processes if process[0] == host]

    def __call__(self) -> None:
        for rank, pid, start_time in self._local:
            if _start_time(pid) != start_time:
                raise shmring.RankFailed(
                    f"rank {rank} of the new group, process {pid}, has ended: reconfigure without it",
                    rank=rank,
                )


def _claim(store: dist.Store, uuid: int, handle: str, rank: int) -> None:
    """Raise unless the number is new to this member, and to the first one also in the whole store."""
    keys = [f"used by {handle}", *(["used"] if rank == 0 else [])]
    own = f"{handle} {secrets.token_hex(8)}"
    for key in keys:
        if store.compare_set(key, "", own).decode() != own:
            raise RuntimeError(f"the uuid {uuid} was already used to reconfigure: give another one each time")
