"""Groups: ordered sets of processes. A process is an integer, its number in COMM_WORLD."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import errors, handles
from .constants import INTEGERS
from .messages import Handle, handle, integer_of
from .refused import refuse_methods

_UNDEFINED, _PROC_NULL = INTEGERS["UNDEFINED"], INTEGERS["PROC_NULL"]


class Members:
    """The processes of a group, by rank, and which of them is this process."""

    def __init__(self, processes: Iterable[int], me: int) -> None:
        self.processes, self.me = tuple(processes), me


class Group(handles.Named, Handle):
    """An ordered set of processes."""

    _null_error = errors.ERR_GROUP

    def _members(self) -> Members:
        return self._handled()

    def _with(self, processes: Iterable[int], me: int | None = None) -> Group:
        made = Members(processes, self._members().me if me is None else me)
        if not made.processes:
            made = GROUP_EMPTY._members()
        return handle(type(self), made)

    def Get_size(self) -> int:
        """Return the number of processes."""
        return len(self._members().processes)

    def Get_rank(self) -> int:
        """Return the rank of this process; UNDEFINED if it is not in the group."""
        processes, me = self._members().processes, self._ref.me
        return processes.index(me) if me in processes else _UNDEFINED

    size = property(Get_size)
    rank = property(Get_rank)

    def Translate_ranks(self, ranks: Sequence[int] | None = None, group: Group | None = None) -> list[int]:
        """Return the ranks that processes of this group have in another one; None: in COMM_WORLD."""
        mine = self._members().processes
        ranks = range(len(mine)) if ranks is None else ranks
        processes = [_PROC_NULL if rank == _PROC_NULL else mine[self._checked(rank)] for rank in ranks]
        if group is None:
            return processes
        rank_of = {process: rank for rank, process in enumerate(group._members().processes)}
        rank_of[_PROC_NULL] = _PROC_NULL
        return [rank_of.get(process, _UNDEFINED) for process in processes]

    def Compare(self, group: Group) -> int:
        """Return IDENT, SIMILAR (another order) or UNEQUAL."""
        a, b = self._members().processes, group._members().processes
        return INTEGERS["IDENT" if a == b else "SIMILAR" if sorted(a) == sorted(b) else "UNEQUAL"]

    def Dup(self) -> Group:
        """Return a group of the same processes."""
        return self._with(self._members().processes)

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Group:
        """Return the processes of the first group, then those that are only in the second."""
        first, second = group1._members(), group2._members()
        added = (process for process in second.processes if process not in first.processes)
        return group1._with([*first.processes, *added], max(first.me, second.me))

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Group:
        """Return the processes of the first group that are in the second, too."""
        return group1._with(p for p in group1._members().processes if p in group2._members().processes)

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Group:
        """Return the processes of the first group that are not in the second."""
        return group1._with(p for p in group1._members().processes if p not in group2._members().processes)

    def Incl(self, ranks: Sequence[int]) -> Group:
        """Return the processes of some ranks, in their order."""
        self._check_distinct(ranks)
        return self._with(self._members().processes[self._checked(rank)] for rank in ranks)

    def Excl(self, ranks: Sequence[int]) -> Group:
        """Return the processes of all other ranks."""
        self._check_distinct(ranks)
        left_out = {self._checked(rank) for rank in ranks}
        return self._with(p for rank, p in enumerate(self._members().processes) if rank not in left_out)

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Group:
        """Return the processes of ranges (first, last, step) of ranks."""
        return self.Incl(self._expanded(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Group:
        """Return the processes outside ranges (first, last, step) of ranks."""
        return self.Excl(self._expanded(ranks))

    def _expanded(self, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
        found: list[int] = []
        for bounds in ranges:
            first, last, step = map(integer_of, bounds)
            if step == 0 or (last - first) * step < 0:
                reason = f"a step of {step} does not lead from rank {first} to rank {last}"
                raise errors.Exception(errors.ERR_ARG, reason)
            found += range(first, last + (1 if step > 0 else -1), step)
        return found

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < len(self._members().processes):
            raise errors.Exception(
                errors.ERR_RANK, f"{rank} is not a rank of the group, which has {self.size}"
            )
        return rank

    def _check_distinct(self, ranks: Sequence[int]) -> None:
        if len(set(ranks)) != len(ranks):
            raise errors.Exception(errors.ERR_RANK, f"the ranks {list(ranks)} are not distinct")

    def Free(self) -> None:
        """Free the group; GROUP_EMPTY stays."""
        self._members()
        self._let_go()


refuse_methods(Group, "Create_from_session_pset", "sessions", "COMM_WORLD.Get_group() has all processes")
GROUP_NULL = Group()
GROUP_EMPTY: Group = handle(Group, Members((), -1))
handles.predefine({"GROUP_NULL": GROUP_NULL, "GROUP_EMPTY": GROUP_EMPTY})
