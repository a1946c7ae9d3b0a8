"""Survivors agree on their members, whichever rank dies at whatever moment. The tests choose every step of
the ranks.

The ranks are threads of which one runs at a time; a seeded choice selects it at each poll and each message.
The others receive a message at once, as in shared memory, or later and in order, as over connections.
"""

import dataclasses
import random
import threading

import pytest

from shmring._lifecycle.membership import NBYTES, Agreement, Phase, View
from shmring.errors import Error, RankFailed

STEPS = 20_000  # far more than any of these worlds needs


class Killed(BaseException):
    """It ends here."""


class Stage:
    """The state of the simulation: whose turn it is, which ranks live, what each has received, and who is at
    which meeting."""

    def __init__(self, size, seed, *, at_once, program=None):
        self.size = size
        self.program = program or go_on
        self.random = random.Random(seed)
        self.at_once = at_once
        self.living = set(range(size))
        self.views = {rank: [] for rank in range(size)}
        self.sent = {(a, b): 0 for a in range(size) for b in range(size)}  # views from a to b
        self.received = dict(self.sent)  # and b has received
        self.met = {}
        self.killed_at = {}
        self.results = {}
        self.steps = 0
        self._turn = 0
        self._running = set(range(size))
        self._change = threading.Condition()

    def run(self, killed_at):
        """killed_at: {rank: the number of its own steps after which it dies}."""
        self.killed_at = dict(killed_at)
        ranks = range(self.size)
        threads = [threading.Thread(target=self._live, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "somebody never came to an end"
        return {rank: self.results[rank] for rank in self.living}

    def step(self, rank):
        """Somebody is next; returns when it is this rank."""
        with self._change:
            self._pass_on()
            self._change.wait_for(lambda: self._turn == rank)
            self.steps += 1
            if self.steps > STEPS:
                raise AssertionError("they go round in circles")
            if rank in self.killed_at:
                self.killed_at[rank] -= 1
                if self.killed_at[rank] < 0:
                    raise Killed

    def _pass_on(self):
        if self._running:
            self._turn = self.random.choice(sorted(self._running))
        self._change.notify_all()

    def _live(self, rank):
        try:
            with self._change:
                self._change.wait_for(lambda: self._turn == rank)
            self.results[rank] = self.program(Rank(self, rank))
        except Killed:
            self.living.discard(rank)  # its sent messages arrive
        except BaseException as error:
            self.results[rank] = error
        finally:
            with self._change:
                self._running.discard(rank)
                self._pass_on()


class Rank:
    """One of them, as `membership.Ballot` has it."""

    def __init__(self, stage, rank):
        self.stage = stage
        self.rank = rank
        self.size = stage.size

    def notify(self, view):
        # To one after another: a rank that dies in between has notified only some.
        self.stage.step(self.rank)
        self.stage.views[self.rank].append(View.unpack(view.pack()))
        for other in range(self.size if not self.stage.at_once else 0):
            self.stage.step(self.rank)
            self.stage.sent[self.rank, other] = len(self.stage.views[self.rank])

    def poll(self):
        for rank in range(self.size):
            line = rank, self.rank
            if self.stage.received[line] < self.stage.sent[line] and self.stage.random.random() < 0.5:
                self.stage.received[line] += 1

    def view_of(self, rank):
        stage = self.stage
        if rank == self.rank or stage.at_once:
            return stage.views[rank][-1] if stage.views[rank] else None
        count = stage.received[rank, self.rank]
        return stage.views[rank][count - 1] if count else None

    def has_gone(self, rank):
        stage = self.stage
        if rank in stage.living:
            return False
        # A connection ends after the last message; memory shows the end at once.
        return stage.at_once or stage.received[rank, self.rank] == stage.sent[rank, self.rank]

    def pause(self):
        self.stage.step(self.rank)


def go_on(ranks):
    """Do as shrinking.shrink does, with a meeting that all ranks have to attend and that any death ends."""
    agreement = Agreement(ranks, timeout_s=1e6, invite=lambda view: f"at {ranks.rank}, {view.attempt}")
    prepared = None
    while True:
        view = agreement.settle()
        if agreement.done is None:
            prepared = meet(ranks, agreement, view)
            if prepared is None or not agreement.commit():
                continue
        assert prepared is not None
        assert prepared.matches(agreement.done or view)
        return dataclasses.replace(prepared, phase=Phase.DONE, invitation="")


def meet(ranks, agreement, view):
    members = view.members(ranks.size)
    stage = ranks.stage
    leader = ranks.view_of(members[0])
    room = stage.met.setdefault((view.attempt, view.out, leader.invitation), set())
    room.add(ranks.rank)
    while room != set(members):
        ranks.pause()
        if agreement.poll():
            return None
        if any(rank not in stage.living for rank in members):
            agreement.try_again()
            return None
    return view


@pytest.mark.parametrize("at_once", [True, False], ids=["memory", "connections"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_survivors_agree(size, at_once):
    for seed in range(150):
        chance = random.Random(seed)
        victims = chance.sample(range(size), chance.randrange(size))
        killed_at = {rank: chance.choice([0, 1, 3, 10, chance.randrange(60)]) for rank in victims}
        left = Stage(size, seed, at_once=at_once).run(killed_at)
        for result in left.values():
            if isinstance(result, BaseException):
                result.add_note(f"seed {seed}, killed {killed_at}")
                raise result
        assert len(set(left.values())) == 1, (seed, killed_at, left)
        members = next(iter(left.values())).members(size)
        assert set(left) <= set(members), (seed, left)
        # No living rank is left out; a dead member died when all were ready.
        assert all(rank in members or rank in victims for rank in range(size)), (seed, left)


def all_go_on(ranks):
    """Return the result of the agreement on a live communicator, and make no other call."""
    return Agreement(ranks, timeout_s=1e6, invite=lambda view: "").all_go_on(lambda: False)


def all_go_on_or_shrink(ranks):
    return True if all_go_on(ranks) else go_on(ranks)


@pytest.mark.parametrize("program", [all_go_on, all_go_on_or_shrink])
@pytest.mark.parametrize("at_once", [True, False], ids=["memory", "connections"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_survivors_go_on_or_none(size, at_once, program):
    found = set()
    for seed in range(200):
        chance = random.Random(seed)
        victims = chance.sample(range(size), chance.randrange(size))
        killed_at = {rank: chance.choice([0, 1, 3, 10, chance.randrange(40)]) for rank in victims}
        left = Stage(size, seed, at_once=at_once, program=program).run(killed_at)
        for result in left.values():
            if isinstance(result, BaseException):
                result.add_note(f"seed {seed}, killed {killed_at}")
                raise result
        assert len(set(left.values())) == 1, (seed, killed_at, left)
        result = next(iter(left.values()))
        assert result is True or victims, (seed, left)
        if isinstance(result, View):
            assert set(left) <= set(result.members(size)), (seed, left)
        found.add(result is True)
    assert found == ({True} if size == 1 else {True, False})


def test_all_go_on_ends_with_the_communicator():
    """A rank that raises before it takes part ends the communicator, and none waits for it."""
    agreement = Agreement(Absent([None]), 1e6, lambda view: "")
    assert not agreement.all_go_on(lambda: True)
    assert agreement.view.phase == Phase.AWAY


@pytest.mark.parametrize("other", [View(1, Phase.AWAY), View(2, Phase.COMING), View(3, Phase.AWAY, 1 << 2)])
def test_a_rank_that_goes_back_takes_the_others_with_it(other):
    """Also if it has begun to shrink before the others look."""
    ranks = Absent([View(1, Phase.COMING), View(1, Phase.COMING)])

    class Turning(Agreement):
        def _pause(self):
            assert self.view.phase == Phase.READY
            ranks.views[1] = other

    assert not Turning(ranks, 1e6, lambda view: "").all_go_on(lambda: False)


def test_views_travel():
    view = View(3, Phase.READY, 1 << 4095 | 5, "0123 [fe80::1%eth0]:4711")
    assert len(view.pack()) == NBYTES
    assert View.unpack(view.pack()) == view
    assert View.unpack(bytes(NBYTES)) == View()
    assert view.members(5) == [1, 3, 4]
    with pytest.raises(Error, match="too long"):
        dataclasses.replace(view, invitation="x" * 200).pack()
    with pytest.raises(Error, match="phase 77 of attempt 0"):
        View.unpack(b"\0\0\0\0\x4d\0\0\0" + bytes(NBYTES - 8))


class Absent:
    """Ranks from which the others have received the given messages, and which make no step."""

    def __init__(self, views):
        self.rank, self.size = 0, len(views) + 1
        self.views = dict(enumerate(views, 1))

    def notify(self, view):
        self.views[0] = view

    def poll(self):
        pass

    def view_of(self, rank):
        return self.views.get(rank)

    def has_gone(self, rank):
        return False

    def pause(self):
        pass


def test_an_absent_rank_is_left_out():
    agreement = Agreement(Absent([None, None]), 0.05, lambda view: "here")
    assert agreement.settle().members(3) == [0]


def test_a_rank_that_was_late_is_not_waited_for_long():
    agreement = Agreement(Absent([None]), 1e6, lambda view: "here", suspects=frozenset([1]))
    assert agreement.settle().members(2) == [0]


def test_a_rank_that_is_left_out_gets_an_error():
    agreement = Agreement(Absent([View(1, Phase.COMING, out=1)]), 1e6, lambda view: "here")
    with pytest.raises(RankFailed, match="without rank 0"):
        agreement.settle()


def test_a_rank_that_gave_up_the_same_rank_earlier_is_not_left_out():
    ahead = View(attempt=2, phase=Phase.COMING, out=1 << 2)  # sent since this rank polled
    agreement = Agreement(Absent([ahead, None]), 0.0, lambda view: "here")
    agreement._move(1, 0)
    agreement._leave_out_the_late(Phase.COMING)
    agreement.poll()
    assert agreement.view.members(3) == [0, 1]


class Slow(Absent):
    """A rank that comes, and is ready only some polls after this rank."""

    def __init__(self, looks):
        super().__init__([View(1, Phase.COMING)])
        self.looks = looks

    def pause(self):
        self.looks -= 1
        if self.looks == 0:
            self.views[1] = dataclasses.replace(self.views[1], phase=Phase.READY)


@pytest.mark.parametrize("suspects", [frozenset(), frozenset([1])])
def test_the_cost_of_beginning_does_not_delay_the_others(monkeypatch, suspects):
    now = 0.0
    monkeypatch.setattr("shmring._system.deadline.time.monotonic", lambda: now)
    agreement = Agreement(Slow(3), 1.0, lambda view: "here", suspects)
    assert agreement.settle().members(2) == [0, 1]
    now = 10.0  # so long it took to begin
    assert agreement.commit()
    assert agreement.view.phase == Phase.DONE
