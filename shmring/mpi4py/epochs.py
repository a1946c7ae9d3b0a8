"""Epochs of windows: from when to when a rank may access the memory of others, and others its own."""

from __future__ import annotations

from typing import Any

from . import errors
from .calls import HeldLocks, end_after
from .constants import INTEGERS
from .groups import Group
from .window_state import Epochs, Window, reports

_EXCLUSIVE, _SHARED = INTEGERS["LOCK_EXCLUSIVE"], INTEGERS["LOCK_SHARED"]
_NOCHECK, _NOSTORE, _NOPUT, _NOPRECEDE, _NOSUCCEED = (
    INTEGERS["MODE_" + name] for name in ("NOCHECK", "NOSTORE", "NOPUT", "NOPRECEDE", "NOSUCCEED")
)
_POSTED, _COMPLETED = 0, 1  # tags
_NOTHING = (None, "B")  # the messages have no bytes


class Synchronisation:
    """The calls of a window that open and close epochs."""

    __slots__ = ()
    _ref: Any

    def _window(self) -> Window:
        raise NotImplementedError

    def _opening(self, assertion: int, allowed: int) -> tuple[Window, Epochs]:
        window = self._window()
        if assertion & ~allowed:
            raise window.failure(
                errors.NUMBERS["ERR_ASSERT"], f"{assertion} is not an assertion for this call"
            )
        return window, window.epochs

    @reports
    def Fence(self, assertion: int = 0) -> None:
        """Wait until all ranks have called this. After it every rank sees what any of them wrote before."""
        window, epochs = self._opening(assertion, _NOSTORE | _NOPUT | _NOPRECEDE | _NOSUCCEED)
        if epochs.describe():
            window.comm.refuse("barrier")
            raise window.failure(errors.ERR_RMA_SYNC, f"this rank has open {epochs.describe()}")
        window.comm.barrier()
        epochs.is_fenced = not assertion & _NOSUCCEED

    @reports
    def Lock(self, rank: int, lock_type: int = _EXCLUSIVE, assertion: int = 0) -> None:
        """Begin to access a rank; wait while another rank does, unless both locks are shared ones."""
        window, epochs = self._opening(assertion, _NOCHECK)
        if lock_type not in (_EXCLUSIVE, _SHARED):
            raise window.failure(errors.ERR_LOCKTYPE, f"{lock_type} is not a type of lock")
        target = window.target(rank)
        if target is None:
            return
        if epochs.is_passive(target) or epochs.started is not None:
            raise window.failure(errors.ERR_RMA_SYNC, f"this rank has open {epochs.describe()}")
        gates = window.gates[target]
        wanted = gates if lock_type == _EXCLUSIVE else [gates[window.rank]]
        epochs.locked[target] = HeldLocks([] if assertion & _NOCHECK else wanted)
        epochs.is_fenced = False

    @reports
    def Unlock(self, rank: int) -> None:
        """End the access that `Lock` began."""
        window = self._window()
        target = window.target(rank)
        if target is None:
            return
        if target not in window.epochs.locked:
            raise window.failure(errors.ERR_RMA_SYNC, f"this rank has not locked rank {target}")
        window.epochs.locked.pop(target).release()

    @reports
    def Lock_all(self, assertion: int = 0) -> None:
        """Begin to access all ranks, with shared locks."""
        window, epochs = self._opening(assertion, _NOCHECK)
        if epochs.is_passive() or epochs.started is not None:
            raise window.failure(errors.ERR_RMA_SYNC, f"this rank has open {epochs.describe()}")
        wanted = [gates[window.rank] for gates in window.gates]
        epochs.locked_all = HeldLocks([] if assertion & _NOCHECK else wanted)
        epochs.is_fenced = False

    @reports
    def Unlock_all(self) -> None:
        """End the access that `Lock_all` began."""
        window = self._window()
        held, window.epochs.locked_all = window.epochs.locked_all, None
        if held is None:
            raise window.failure(errors.ERR_RMA_SYNC, "this rank has not called Lock_all")
        held.release()

    @reports
    def Start(self, group: Group, assertion: int = 0) -> None:
        """Begin to access the ranks of a group; wait until they have called `Post`."""
        window, epochs = self._opening(assertion, _NOCHECK)
        if epochs.is_passive() or epochs.started is not None:
            raise window.failure(errors.ERR_RMA_SYNC, f"this rank has open {epochs.describe()}")
        ranks = self._ranks_of(group)
        for rank in [] if assertion & _NOCHECK else ranks:
            if rank not in epochs.ready:
                window.channel().Recv(_NOTHING, rank, _POSTED)
                epochs.ready.add(rank)
        epochs.started, epochs.is_fenced = ranks, False
        epochs.ready.difference_update(ranks)

    @reports
    def Complete(self) -> None:
        """End the access that `Start` began."""
        window = self._window()
        ranks, window.epochs.started = window.epochs.started, None
        if ranks is None:
            raise window.failure(errors.ERR_RMA_SYNC, "this rank has not called Start")
        self._notify(ranks, _COMPLETED)

    @reports
    def Post(self, group: Group, assertion: int = 0) -> None:
        """Let the ranks of a group access this rank."""
        window, epochs = self._opening(assertion, _NOCHECK | _NOSTORE | _NOPUT)
        if epochs.posted is not None:
            raise window.failure(errors.ERR_RMA_SYNC, "this rank has called Post, and not yet Wait")
        epochs.posted = self._ranks_of(group)
        self._notify([] if assertion & _NOCHECK else epochs.posted, _POSTED)

    def _notify(self, ranks: list[int], tag: int) -> None:
        """Send each rank an empty message. An exception between two of them ends the window."""
        try:
            for rank in ranks:
                self._ref.channel().Send(_NOTHING, rank, tag)
        except BaseException as error:
            end_after(self._ref, error, True)
            raise

    @reports
    def Wait(self) -> bool:
        """Wait until the ranks of `Post` have called `Complete`, and return True."""
        return self._see_completed(True)

    @reports
    def Test(self) -> bool:
        """Return whether the ranks of `Post` have called `Complete`; if so, this is the same as `Wait`."""
        return self._see_completed(False)

    def _see_completed(self, waits: bool) -> bool:
        window = self._window()
        if window.epochs.posted is None:
            raise window.failure(errors.ERR_RMA_SYNC, "this rank has not called Post")
        for rank in [*window.epochs.posted]:
            if waits or window.channel().Iprobe(rank, _COMPLETED):
                window.channel().Recv(_NOTHING, rank, _COMPLETED)
                window.epochs.posted.remove(rank)
        if window.epochs.posted:
            return False
        window.epochs.posted = None
        return True

    @reports
    def Flush(self, rank: int) -> None:
        """Order this rank's accesses to another one. Each is complete when its call returns."""
        window = self._window()
        target = window.target(rank)
        if target is not None:
            self._check_passive(target)
            window.order(target)

    Flush_local = Flush

    @reports
    def Flush_all(self) -> None:
        """Complete this rank's accesses to all ranks: they are complete when their calls return."""
        self._check_passive(None)
        self.Sync()

    Flush_local_all = Flush_all

    @reports
    def Sync(self) -> None:
        """Order this rank's accesses to its own memory before and after the call."""
        window = self._window()
        window.order(window.rank)

    def _check_passive(self, target: int | None) -> None:
        window = self._window()
        if not window.epochs.is_passive(target):
            what = "any rank" if target is None else f"rank {target}"
            raise window.failure(errors.ERR_RMA_SYNC, f"this rank has not locked {what}")

    def _ranks_of(self, group: Group) -> list[int]:
        window, processes = self._window(), group._members().processes
        unknown = [process for process in processes if process not in window.processes]
        if unknown:
            raise window.failure(errors.ERR_GROUP, f"processes {unknown} do not have the window")
        return [window.processes.index(process) for process in processes]
