"""Make process groups of the ranks of others: torch's split_group and merge_remote_group.

torch's C++ asks the backend of a group for these. A group written in Python has no such backend, and without
the methods here the process would crash.
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

import shmring

from . import meeting


class Derivable:
    """The methods of a process group that make others."""

    comm: shmring.Comm
    _store: dist.Store
    _timeout_s: float
    _name: str
    _description: str
    _nsplits: int
    setGroupName: Callable[[str], None]
    setGroupDesc: Callable[[str], None]

    def split_group(
        self,
        ranks: Iterable[int],
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Any:
        """Return a group of these ranks, in their order; None on others. All ranks of this group call it."""
        members = [operator.index(rank) for rank in ranks]
        if not members:
            raise RuntimeError("split_group needs the ranks of the new group; the list is empty")
        if not set(members) <= set(range(self.comm.size)) or len(set(members)) < len(members):
            raise RuntimeError(
                f"split_group takes each of the group's ranks, 0 to {self.comm.size - 1}, at most once, "
                f"not {members}"
            )
        name = f"{self._name}:split:{members}" if group_name is None else group_name
        description = group_desc
        if description is None:
            description = f"{self._description}:split:{self._nsplits}"
            self._nsplits += 1
        if self.comm.rank not in members:
            return None
        # Groups of other members may have the same name. The members come first: a name may contain anything.
        rank, store = members.index(self.comm.rank), dist.PrefixStore(f"{members} {name}/", self._store)
        return self._derive(store, rank, len(members), timeout or self._timeout(), name, description)

    def merge_remote_group(
        self,
        store: dist.Store,
        size: int,
        timeout: datetime.timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Any:
        """Return a group of all ranks of several groups, `size` in all, that call it with one store.

        Ranks are numbered in the order of their calls.
        """
        if not isinstance(store, dist.Store):
            raise TypeError(f"merge_remote_group takes a store of torch.distributed, not {store!r:.80}")
        rank = store.add("mergeGroupRank", 1) - 1
        name = f"{self._name}:merge" if group_name is None else group_name
        description = f"{self._description}:merge" if group_desc is None else group_desc
        store = dist.PrefixStore("merged group/", store)
        return self._derive(store, rank, size, timeout or self._timeout(), name, description)

    def _timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._timeout_s)

    def _derive(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        name: str,
        description: str,
    ) -> Any:
        make: Any = type(self)
        group = make(meeting.meet(store, rank, size, timeout), store, timeout)
        group.setGroupName(name)
        group.setGroupDesc(description)
        return group
