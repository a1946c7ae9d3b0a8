"""Random programs over hosts in which one rank calls something else once, and the result on each rank.

A program depends only on its seed, so every rank makes the same one: some calls that are the same on all
ranks, one in which the odd rank differs in kind, root, count, dtype or op, and one more that is the same on
all. Every rank raises Mismatch in one of the last two.
"""

import random
import re
from typing import NamedTuple

import numpy as np

import shmring
from shmring._transport.notifications import Notifications
from tests.collectives.test_errors import ones

LAYOUTS = {"ab": [0, 1], "aab": [0, 0, 1], "abb": [0, 1, 1], "abc": [0, 1, 2], "aabb": [0, 0, 1, 1]}
LAYOUTS |= {"abab": [0, 1, 0, 1], "abcc": [0, 1, 2, 2], "aabbc": [0, 0, 1, 1, 2], "aaabb": [0, 0, 0, 1, 1]}
SETTINGS = ({}, {"SHMRING_WIRE_SLICE": 16384, "SHMRING_CHUNK": 1024})
FOLDING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "all_reduce_many")
ROOTED = ("reduce", "broadcast", "scatter", "gather", "scatter_v", "gather_v")
UNEVEN = ("all_gather_v", "gather_v", "scatter_v", "all_to_all_v")
KINDS = (*FOLDING, *ROOTED[1:], "all_gather", "all_to_all", "all_gather_v", "all_to_all_v", "barrier")
PLANNED = (*FOLDING[:-1], "broadcast", "scatter", "gather", "all_gather", "all_to_all", "barrier")
COUNTS = (0, 1, 1, 6, 100, 3000, 9000, 40_000)
DTYPES = ("float64", "float32", "int64", "int32", "uint8")
OPS = ("sum", "min", "max")
WAYS = ("foreground", "foreground", "foreground", "background", "plan")
_TOLD = re.compile(r"ranks? ([\d, ]+) called (.*?)(?=; ranks? [\d, ]+ (?:called|had)|; every rank|$)")


class Call(NamedTuple):
    """The call of a rank; its kind ignores the fields that it does not use."""

    kind: str
    root: int
    count: int
    dtype: str
    op: str
    way: str

    def differs_in(self):
        """Return the fields of which another value makes another call."""
        if self.kind == "barrier":
            return ["kind"]
        found = ["kind", "dtype"]
        found += ["root"] * (self.kind in ROOTED)
        found += ["count"] * (self.kind not in UNEVEN)
        return found + ["op"] * (self.kind in FOLDING)

    def is_described_by(self, text):
        """Return whether a text describes this call, as errors do."""
        words = [] if self.kind == "barrier" else [f"{self.dtype}["]
        words += [f"root={self.root})"] * (self.kind in ROOTED)
        words += [f"{self.dtype}[{self.count}]"] * (self.kind not in (*UNEVEN, "barrier", "all_reduce_many"))
        words += [f", {self.op}"] * (self.kind in FOLDING)
        return text.startswith(f"{self.kind}(") and all(word in text for word in words)


class Program(NamedTuple):
    """Calls that all ranks make, the two that do not match, and the one after them."""

    before: list
    usual: Call
    odd: Call
    odd_rank: int
    after: Call

    def call_of(self, rank):
        return self.odd if rank == self.odd_rank else self.usual


def program_of(seed, size):
    """The program of a seed for `size` ranks."""
    chance = random.Random(seed)
    before = [_any_call(chance, size) for _ in range(chance.choice((0, 1, 2, 3)))]
    usual = _any_call(chance, size)
    odd = _other(chance, usual, size)
    return Program(before, usual, odd, chance.randrange(size), _any_call(chance, size))


def _any_call(chance, size):
    kind = chance.choice(KINDS)
    ways = WAYS if kind in PLANNED else WAYS[:-1]
    call = Call(kind, chance.randrange(size), chance.choice(COUNTS), chance.choice(DTYPES), "sum", "")
    return call._replace(op=chance.choice(OPS), way=chance.choice(ways))


def _other(chance, call, size):
    what = chance.choice(call.differs_in())
    while True:
        other = _any_call(chance, size)
        if what != "kind":
            other = call._replace(**{what: getattr(other, what)})
        if getattr(other, what) != getattr(call, what):
            may_be_like_it = other.kind in PLANNED or call.way != "plan"
            return other._replace(way=call.way if may_be_like_it else "foreground")


# ---- a rank -----------------------------------------------------------------------------------------------


def _arguments(comm, call):
    """(positional, keyword) arguments of the call on this rank, which gives its rank + 1."""
    x = np.full(call.count, comm.rank + 1, call.dtype)
    rows = np.full((comm.size, call.count), comm.rank + 1, call.dtype)
    is_root = comm.rank == call.root
    keywords = {"op": call.op} if call.kind in FOLDING else {}
    if call.kind in ROOTED:
        keywords["root"] = call.root
    if call.kind in ("scatter", "scatter_v") and not is_root:
        keywords["like"] = x
    given = {
        "barrier": (),
        "scatter": (rows if is_root else None,),
        "scatter_v": (list(rows) if is_root else None,),
        "all_to_all": (rows,),
        "all_to_all_v": (list(rows),),
        "reduce_scatter": (rows,),
        "all_reduce_many": ([x, ones(7, call.dtype)],),
    }
    return given.get(call.kind, (x,)), keywords


def _begin(comm, call):
    """Makes the call; a function that returns its result, or the array that it is in."""
    given, keywords = _arguments(comm, call)
    if call.way == "background":
        end = getattr(comm, call.kind)(*given, async_op=True, **keywords).result
        return lambda: (end(), given[0])[1] if call.kind in ("all_reduce", "broadcast") else end()
    make = comm.plan(call.kind, *given, **keywords) if call.way == "plan" else None
    result = make() if make is not None else getattr(comm, call.kind)(*given, **keywords)
    return lambda: given[0] if call.kind in ("all_reduce", "broadcast") else result


def _is_right(comm, call, result):
    """Return whether a result is right; only some kinds are checked."""
    everyone = range(1, comm.size + 1)
    if call.kind == "all_reduce":
        return (result == {"sum": sum, "min": min, "max": max}[call.op](everyone)).all()
    if call.kind in ("broadcast", "scatter"):
        return (result == call.root + 1).all()
    if call.kind == "all_gather" or (call.kind == "gather" and comm.rank == call.root):
        return all((row == rank + 1).all() for rank, row in enumerate(result))
    return True


def run_odd_program(comm, seed):
    """Return what is wrong with this rank's results, in words; None if nothing is."""
    program = program_of(seed, comm.size)
    # Two that wait for each other would ask after a second. Nobody needs that: else this is a Timeout.
    Notifications.compare_calls = lambda *_: None
    made = 0
    with comm.dup() as group:
        try:
            for call in program.before:
                if not _is_right(group, call, _begin(group, call)()):
                    return f"seed {seed}, rank {comm.rank}: a wrong result of {call}"
                made += 1
            ends = [_begin(group, call) for call in (program.call_of(comm.rank), program.after)]
            for end in ends:
                end()
        except shmring.Error as error:
            reported = _what_is_wrong(program, error, made)
            return reported and f"seed {seed}, rank {comm.rank}: {reported}: {error!r} {program}"
    return f"seed {seed}, rank {comm.rank}: no error: {program}"


def _what_is_wrong(program, error, made):
    if type(error) is not shmring.Mismatch:
        return "no Mismatch"
    # Others may have gone on and connected while this rank is in the last one.
    if made < len(program.before) - 1:
        return f"in call {made + 1}"
    named = set()
    for ranks, call in _TOLD.findall(str(error)):
        for rank in map(int, ranks.split(",")):
            named.add(rank)
            if not program.call_of(rank).is_described_by(call):
                return f"rank {rank} did not call {call}"
    if program.odd_rank not in named or len(named) < 2:
        return "it does not tell both calls"
    return None
