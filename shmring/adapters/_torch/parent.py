"""Watch the members of a new group while they meet: a group that they already share knows who has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed.distributed_c10d as c10d

import shmring


def check_of_members(ranks: Sequence[int]) -> Callable[[], None] | None:
    """Return a function that raises RankFailed if one of these ranks of the default group has ended.

    ranks: by rank of the new group; empty for the default group itself. Return None if there is no default
    group, or it is not shmring's.
    """
    parent = c10d.GroupMember.WORLD if ranks else None
    if not isinstance(getattr(parent, "comm", None), shmring.Comm):
        return None
    return _Check(parent, ranks)


class _Check:
    def __init__(self, parent: Any, ranks: Sequence[int]) -> None:
        self._parent, self._ranks = parent, list(ranks)

    def __call__(self) -> None:
        try:
            self._parent.poll()
        except shmring.RankFailed as error:
            if error.rank in self._ranks:
                rank = self._ranks.index(error.rank)
                raise shmring.RankFailed(
                    f"rank {rank} of the new group has ended: {error}", rank=rank
                ) from None
        except shmring.Error:
            pass  # of a call, which says nothing about who can come
