"""Random programs of collectives, and the rank that runs them and checks each result against NumPy.

A program depends only on its seed, so every rank makes the same one. It has calls of every kind on every
dtype, on the world, its groups and their groups, with private and shared arrays, in the foreground, in the
background and by plans, with and without a priority. It also has bursts of background calls that each rank
makes in its own order.
"""

import random
from typing import NamedTuple

import numpy as np
from cases import DTYPES, Placed, all_reduced, assert_same, rng_of, same_bytes

from shmring._core import kernels
from shmring._diagnostics.flight_recorder import ALGORITHMS
from tests.collectives.test_collectives import FOLDING, IN_PLACE, MOVING, inputs, out_shape, outcomes
from tests.collectives.test_fused import fused_and_separate
from tests.collectives.test_vector import FACTORS, assert_uneven, call_once

KINDS = ("all_reduce", *FOLDING, *MOVING)
WAYS = ("foreground", "foreground", "background", "background", "plan", "background plan")
PRIORITISED = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
PRIORITIES = (None, None, -1, 0, 3)
MOST_GROUPS = 6
MEMORIES = ("private", "private", "unaligned", "shared", "slice", "mixed")


class Call(NamedTuple):
    """One collective on one group: `row` describes it, as in test_collectives."""

    group: int
    row: dict
    way: str


class VectorCall(NamedTuple):
    """A call whose pieces differ in length: `row` describes it, as in test_vector."""

    group: int
    row: dict


class Many(NamedTuple):
    """Arrays reduced together and one by one, as in test_fused."""

    group: int
    arguments: tuple


class Form(NamedTuple):
    """New groups of a group: split by colors and keys, or the same ranks again."""

    parent: int
    colors: tuple | None  # by rank of the parent; None: dup
    keys: tuple | None


class Burst(NamedTuple):
    """Calls in the background that each rank issues in its own order; within a group as they stand."""

    calls: tuple


class Wait(NamedTuple):
    """For everything that was issued, or for some of it."""

    share: float


class Close(NamedTuple):
    group: int


def program_of(seed, size, length=14):
    """The steps of a program for `size` ranks."""
    chance = random.Random(seed)
    groups = {0: tuple(range(size))}  # world ranks of each, by number, without closed groups
    last, steps = 0, []
    for _ in range(length):
        kinds = ("call", "uneven", "many", "form", "burst", "wait", "close")
        kind = chance.choices(kinds, (8, 2, 1, 2, 3, 2, 1))[0]
        number = chance.choice(sorted(groups))
        if kind == "form" and len(groups) < MOST_GROUPS:
            step = _form(chance, number, len(groups[number]))
            steps.append(step)
            for ranks in members_of(step, groups[number]):
                last += 1
                groups[last] = ranks
        elif kind == "burst":
            calls = (_call(chance, groups, chance.choice(sorted(groups))) for _ in range(6))
            steps.append(Burst(tuple(calls)))
        elif kind == "uneven":
            names = ("kind", "dtype", "most", "trailing", "memory", "out", "root", "background")
            row = {name: chance.choice(FACTORS[name]) for name in names}
            steps.append(VectorCall(number, row | {"seed": chance.random()}))
        elif kind == "many":
            steps.append(_many(chance, number))
        elif kind == "wait":
            steps.append(Wait(chance.choice((0.3, 1.0))))
        elif kind == "close" and number != 0:
            steps.append(Close(number))
            del groups[number]
        else:
            steps.append(_call(chance, groups, number))
    return steps


def _form(chance, parent, size):
    if chance.random() < 0.2:
        return Form(parent, None, None)
    colors = tuple(chance.choice((None, 0, 1, 1)) for _ in range(size))
    return Form(parent, colors, tuple(chance.randrange(3) for _ in range(size)))


def members_of(step, parent):
    """The world ranks of each group that a step makes, in the order of their colors."""
    if step.colors is None:
        return [parent]
    found = []
    for color in sorted({color for color in step.colors if color is not None}):
        ranks = [rank for rank, own in enumerate(step.colors) if own == color]
        ranks.sort(key=lambda rank: (step.keys[rank], rank))
        found.append(tuple(parent[rank] for rank in ranks))
    return found


def _call(chance, groups, number):
    kind = chance.choice(KINDS)
    dtype = chance.choice(sorted(DTYPES))
    ops = kernels.ops(dtype)
    if kind in ("scan", "exscan"):
        ops = [op for op in ops if op != "avg"]
    row = {
        "kind": kind,
        "dtype": dtype,
        "op": chance.choice(ops),
        "rows": chance.choice((0, 1, 2, 5)),
        "columns": chance.choice((None, 1, 7, 100, 3000, 9000)),
        "memory": chance.choice(MEMORIES),
        "out": chance.random() < 0.3,
        "root": chance.choice(("first", "last", "middle")),
        "priority": chance.choice(PRIORITIES) if kind in PRIORITISED else None,
        "seed": chance.random(),
    }
    if kind == "all_reduce":
        row["algorithm"] = chance.choice(("auto", "auto", *ALGORITHMS))
    return Call(number, row, chance.choice(WAYS))


def _many(chance, number):
    op = chance.choice(("sum", "max"))
    dtypes = [dtype for dtype in sorted(DTYPES) if op in kernels.ops(dtype)]
    specs = [(chance.choice(dtypes), chance.choice((0, 1, 90, 4000))) for _ in range(chance.randrange(9))]
    place = chance.choice(("private", "shared", "out"))
    return Many(number, (specs, op, chance.choice((None, 0, 1000)), place, chance.random() < 0.5))


# ---- running one ------------------------------------------------------------------------------------------


def run_program(comm, seed, nodes=None):
    """Run one rank's part of a program; return its number of steps. Raise if a result differs from NumPy's.

    nodes: by rank, if there are several hosts.
    """
    steps = program_of(seed, comm.size)
    try:
        _Rank(comm, seed, nodes or [0] * comm.size).run(steps)
    except BaseException as error:
        error.add_note(f"program {seed} of {comm.size} ranks")
        raise
    return len(steps)


class _Rank:
    def __init__(self, comm, seed, nodes):
        self._nodes = nodes
        self._me = comm.rank
        self._groups = {0: (comm, tuple(range(comm.size)))}  # (None, ranks): this rank is not in it
        self._last = 0
        self._chance = random.Random(f"{seed} of rank {comm.rank}")
        self._pending = []  # (group, work, check of its result)

    def run(self, steps):
        for step in steps:
            if isinstance(step, Call):
                self._call(step)
            elif isinstance(step, Burst):
                self._burst(step.calls)
            elif isinstance(step, (VectorCall, Many)):
                self._check_at_once(step)
            elif isinstance(step, Form):
                self._form(step)
            elif isinstance(step, Wait):
                self._wait([entry for entry in self._pending if self._chance.random() < step.share])
            else:
                self._close(step.group)
        self._wait(list(self._pending))
        for number in [number for number in self._groups if number != 0]:
            self._close(number)

    def _form(self, step):
        parent, ranks = self._groups[step.parent]
        group = None
        if parent is not None and step.colors is None:
            group = parent.dup()
        elif parent is not None:
            group = parent.split(step.colors[parent.rank], step.keys[parent.rank])
        for members in members_of(step, ranks):
            self._last += 1
            self._groups[self._last] = (group if self._me in members else None, members)

    def _close(self, number):
        group, _ = self._groups.pop(number)
        if group is not None:
            self._wait([entry for entry in self._pending if entry[0] is group])
            group.close()

    def _call(self, step):
        if self._groups[step.group][0] is None:
            return
        prepared = self._prepared(step)
        result = prepared.make(step.way)
        if step.way.startswith("background"):
            self._pending.append((prepared.group, result, prepared))
        else:
            prepared.check(result)

    def _prepared(self, step):
        group, ranks = self._groups[step.group]
        return Prepared(group, step.row, [self._nodes[rank] for rank in ranks])

    def _check_at_once(self, step):
        group, _ = self._groups[step.group]
        if group is None:
            return
        if isinstance(step, VectorCall):
            assert_uneven(call_once(group, step.row), step.row, group.rank, group.size)
        else:
            fused_and_separate(group, *step.arguments)

    def _burst(self, calls):
        """Make the collective calls on the world first; then each rank mixes the groups' calls in its own
        order."""
        waiting = {}
        for step in calls:
            group, _ = self._groups[step.group]
            if group is not None:
                waiting.setdefault(step.group, []).append(self._prepared(step))
        while waiting:
            number = self._chance.choice(sorted(waiting))
            prepared = waiting[number].pop(0)
            if not waiting[number]:
                del waiting[number]
            self._pending.append((prepared.group, prepared.make("background"), prepared))

    def _wait(self, entries):
        self._chance.shuffle(entries)
        for entry in entries:
            _, work, prepared = entry
            prepared.check(work.result())
            self._pending.remove(entry)


class Prepared:
    """A call with its arrays in place: makes it, and checks its result.

    nodes: by rank of the group, if there are several hosts.
    """

    def __init__(self, group, row, nodes=None):
        self.group, self._row, self._nodes = group, row, nodes
        size, rank = group.size, group.rank
        self._xs = inputs(row, size)
        values = self._xs[rank]
        self._x = Placed(group, values, row["memory"])
        self._root = {"first": 0, "last": size - 1, "middle": size // 2}[row["root"]]
        self._out = None
        if row["out"]:
            room = np.zeros(values.shape if self._in_place() else out_shape(row, values, size), values.dtype)
            if row["kind"] == "exscan" and rank == 0:
                room[...] = values  # which it leaves as it is
            self._out = Placed(group, room, row["memory"])

    def _in_place(self):
        return self._row["kind"] in (*IN_PLACE, "all_reduce")

    def _algorithm(self):
        """Ring and tree are of ranks of one host."""
        return self._row["algorithm"] if self.group.num_nodes == 1 else "auto"

    def make(self, way):
        kind, row = self._row["kind"], self._row
        given, keywords = self._x.array, {}
        if kind in (*FOLDING, "all_reduce"):
            keywords["op"] = row["op"]
        if kind == "all_reduce":
            keywords["algorithm"] = self._algorithm()
        if kind in ("reduce", "broadcast", "scatter", "gather"):
            keywords["root"] = self._root
        if self._out is not None:
            keywords["out"] = self._out.array
        if row.get("priority") is not None:
            keywords["priority"] = row["priority"]
        if kind == "scatter" and self.group.rank != self._root:
            given = None
            if self._out is None:
                keywords["like"] = np.empty(
                    out_shape(row, self._x.array, self.group.size), self._x.array.dtype
                )
        keywords["async_op"] = way.startswith("background")
        if way.endswith("plan"):
            return self.group.plan(kind, given, **keywords)()
        return getattr(self.group, kind)(given, **keywords)

    def check(self, result):
        row, size, rank = self._row, self.group.size, self.group.rank
        self._x.assert_surroundings()
        if row["kind"] == "all_reduce":
            flat = [x.ravel() for x in self._xs]
            want = all_reduced(row["dtype"], row["op"], flat, self._algorithm(), self._nodes)
        else:
            want = outcomes(row, self._xs, self._nodes)[rank]
        has_result = want is not None and not (row["kind"] == "reduce" and rank != self._root)
        if self._out is not None or not self._in_place():
            assert same_bytes(self._x.array, self._xs[rank]), ("x was written to", rank, size, row)
        if self._out is not None:
            self._out.assert_surroundings()
            result = self._out.array if has_result else None
        elif self._in_place():
            result = self._x.array
        if not has_result:
            return
        got = np.ascontiguousarray(result).ravel()
        where = (rank, size, row)
        if row["kind"] in (*FOLDING, "all_reduce") and not (row["kind"] == "exscan" and rank == 0):
            with np.errstate(all="ignore"):
                assert_same(got, want.ravel(), row["op"], where)
        else:
            assert got.tobytes() == want.tobytes(), where


def seeds_of(name, count):
    """Seeds of a run of programs, the same every time."""
    return rng_of("programs", name).integers(1 << 31, size=count).tolist()
