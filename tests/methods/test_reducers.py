"""Reduction servers against all_reduce of the workers alone: the same bits, and the same errors on all ranks.

Hosts are names here, and the network is loopback: see conftest.world_over_hosts.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from combinations import each_value
from ranks import Died, Ranks

import shmring
from shmring._lifecycle import groups
from shmring.methods.reducers import ReductionServers

LAYOUTS = {  # the host of each rank, and the reducers
    "2 hosts, 1 reducer": ([0, 1, 2], [2]),
    "3 hosts, 2 reducers": ([0, 1, 2, 3, 3], [3, 4]),
    "hosts of 2 and 1, reducer first": ([9, 0, 0, 1], [0]),
    "hosts of 2 and 2, reducers on them": ([0, 0, 0, 1, 1, 1], [2, 3]),
    "1 host": ([0, 0, 0], [1]),
    "3 hosts, the first one's worker is last": ([0, 1, 2, 0], [0]),
}
COUNTS = (0, 1, 5, 999, 4096, 50_001)
TINY = {"chunk_nbytes": 4096, "depth": 2}


def items_of(rank, dtype, count):
    rng = np.random.default_rng(rank)
    if dtype.startswith("complex"):
        return (rng.standard_normal(count) + 1j * rng.standard_normal(count)).astype(dtype)
    return (rng.standard_normal(count) * 10).astype(dtype)


def reduce_beside_the_plain_one(comm, reducers, how):
    workers = comm.group([rank for rank in range(comm.size) if rank not in reducers])
    with ReductionServers(comm, reducers, **how) as servers:
        if servers.is_reducer:
            return servers.serve()
        calls = 0
        for dtype, op in (
            ("float32", "sum"),
            ("float64", "max"),
            ("float32", "avg"),
            ("int64", "prod"),
            ("complex64", "sum"),
            ("complex64", "avg"),
            ("complex128", "avg"),
            ("complex64", "prod"),
            ("complex128", "prod"),
            ("int32", "min"),
        ):
            for count in COUNTS:
                x = items_of(comm.rank, dtype, count).reshape(1, count)
                expected = x.copy()
                workers.all_reduce(expected, op)
                servers.all_reduce(x, op)
                assert x.tobytes() == expected.tobytes(), (dtype, op, count)
                calls += 1
        return calls


@each_value({"layout": LAYOUTS, "how": [{}, TINY, TINY | {"depth": 1}]})
def test_the_bits_are_those_of_all_reduce(world_over_hosts, layout, how):
    nodes, reducers = LAYOUTS[layout]
    calls = world_over_hosts(nodes)(reduce_beside_the_plain_one, reducers, how)
    assert calls == [10 * len(COUNTS)] * len(nodes)


class Counting:
    """A communicator that counts the bytes of its messages."""

    def __init__(self, comm):
        self._comm, self.sent, self.received = comm, 0, 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, x, dest):
        self.sent += x.nbytes
        return self._comm.isend(x, dest)

    def irecv(self, x, source):
        self.received += x.nbytes
        return self._comm.irecv(x, source)


def count_bytes(comm, reducers, count):
    with ReductionServers(comm, reducers, **TINY) as servers:
        counting = servers._comm = Counting(servers._comm)
        if servers.is_reducer:
            servers.serve()
        else:
            servers.all_reduce(np.ones(count, "f4"))
        return counting.sent, counting.received


def test_each_host_sends_a_message_once_and_each_reducer_its_share_for_all(world_over_hosts):
    count, nodes = 3 << 16, [0, 0, 1, 2, 3, 4]
    sent, received = np.array(world_over_hosts(nodes)(count_bytes, [4, 5], count)).T
    assert (sent == received).all()
    assert [sent[:2].sum(), *sent[2:4]] == [4 * count] * 3
    assert sent[4:].tolist() == [3 * 4 * count // 2] * 2


def close_twice(comm):
    with ReductionServers(comm, [0]) as servers:
        if servers.is_reducer:
            servers.serve()
    servers.close()


def test_a_second_close_does_nothing(world_of):
    world_of(3)(close_twice)


# --- errors ---


def refuse(comm, reducers, how):
    ReductionServers(comm, reducers, **how)


@pytest.mark.parametrize(
    ("reducers", "how", "expected"),
    [
        ([], {}, "0 of 2 ranks are reducers"),
        ([0, 1], {}, "2 of 2 ranks are reducers"),
        ([2], {}, "reducer 2 is not a rank"),
        ([1, 1], {}, "name each once"),
        ([1], {"depth": 0}, "depth 1 or more"),
    ],
)
def test_reducers_that_cannot_be_are_refused_by_all(world_of, reducers, how, expected):
    for outcome in world_of(2).outcomes(refuse, reducers, how):
        assert isinstance(outcome, ValueError), outcome
        assert expected in str(outcome)


def name_other_reducers(comm):
    refuse(comm, [comm.rank], {})


def test_ranks_that_name_other_reducers_are_reported(world_of):
    for outcome in world_of(2).outcomes(name_other_reducers):
        assert "the ranks give different reducers" in str(outcome), outcome


def disagree(comm, give):
    with ReductionServers(comm, [3]) as servers:
        if servers.is_reducer:
            servers.serve()
        else:
            servers.all_reduce(*give(comm.rank))


def give_other_counts(rank):
    return np.zeros(5 + (rank == 2)), "sum"


def give_another_op(rank):
    return np.zeros(5), "max" if rank == 2 else "sum"


def give_a_list(rank):
    return [0.0] * 5 if rank == 2 else np.zeros(5), "sum"


@pytest.mark.parametrize("give", [give_other_counts, give_another_op])
def test_hosts_that_call_different_things_are_reported(world_over_hosts, give):
    for outcome in world_over_hosts([0, 0, 1, 2]).outcomes(disagree, give):
        assert isinstance(outcome, shmring.Aborted), outcome
        assert "the workers' calls do not match: worker 0 called all_reduce(float64[5], sum)" in str(outcome)


class GivenUp(BaseException):
    pass


class GivesUp:
    """A communicator whose rank gives up once all ranks have met for a split."""

    def __init__(self, comm):
        self.rank, self._comm = comm.rank, comm

    def all_gather_object(self, *arguments, **keywords):
        self._comm.all_gather_object(*arguments, **keywords)
        raise GivenUp


def be_slow(frame, event, _):
    """A trace function: the servers' communicator ends first, and the given one later."""
    if event == "exception":
        time.sleep(0.3)
    return be_slow if frame.f_code is ReductionServers.__init__.__wrapped__.__code__ else None


def make_servers(comm):
    last = comm.size - 1
    if comm.rank < last:
        with contextlib.suppress(shmring.Error):  # it learns of the end here or in the next call
            ReductionServers(comm, [last])
        return
    real, made = groups.form_across, itertools.count()

    def form(comm, *arguments):  # first for the dup
        return real(GivesUp(comm) if next(made) else comm, *arguments)

    groups.form_across = form
    sys.settrace(be_slow)
    try:
        with pytest.raises(GivenUp):
            ReductionServers(comm, [last])
    finally:
        sys.settrace(None)
        groups.form_across = real


def error_of_the_next_call(comm):
    with pytest.raises(shmring.Error) as caught:
        comm.barrier()
    return str(caught.value)


def test_a_rank_that_gives_up_while_groups_are_made_is_named_by_all(world_over_hosts):
    ranks = world_over_hosts([0, 0, 1])
    ranks(make_servers)
    texts = set(ranks(error_of_the_next_call))
    assert len(texts) == 1, texts
    assert texts.pop().startswith("rank 2 gave up: GivenUp")


@pytest.mark.parametrize("nodes", [[0, 0, 1, 2], [0, 1, 1, 2]])
def test_a_wrong_argument_ends_it_for_all(world_over_hosts, nodes):
    outcomes = world_over_hosts(nodes).outcomes(disagree, give_a_list)
    assert isinstance(outcomes[2], TypeError), outcomes
    for rank in 0, 1, 3:
        assert isinstance(outcomes[rank], shmring.Error), outcomes
    assert "worker 2 refused its arguments: x is list" in str(outcomes[3])


def give_one_less(rank):
    """Give the second worker a shorter array, whose first pieces are as long as the others'."""
    return np.ones(999 if rank == 1 else 1000), "sum"


def give_nothing(rank):
    return np.ones(0 if rank == 1 else 5), "sum"


def give_avg(rank):
    """Give avg on the second worker, whose host adds for it as for sum."""
    return np.ones(5), "avg" if rank == 1 else "sum"


@pytest.mark.parametrize(
    ("give", "expected"),
    [
        (give_one_less, "with 999 and with 1000 elements"),
        (give_nothing, "with 0 and with 5 elements"),
        (give_avg, "with sum and with avg"),
    ],
)
@pytest.mark.parametrize("nodes", [[0, 0, 1, 2], [0, 0, 0, 1], [0, 0, 0, 0]])
def test_workers_of_one_host_with_other_counts_or_ops_get_an_error(world_over_hosts, nodes, give, expected):
    for outcome in world_over_hosts(nodes).outcomes(disagree, give):
        assert isinstance(outcome, shmring.Aborted), outcome
        assert f"workers of one host called all_reduce {expected}" in str(outcome)


def interrupt_one(comm):
    """Rank 1 gives up in the middle, while rank 0 waits for it in a collective of their host.

    No rank frees its communicators before the others have ended, since that would end them, too.
    """
    with ReductionServers(comm, [2], **TINY) as servers:
        if comm.rank == 1:
            servers._finish = give_up
        try:
            if servers.is_reducer:
                servers.serve()
            servers.all_reduce(np.zeros(50_001))
        except BaseException as error:
            end_together(comm, error)
            raise


def end_together(comm, error):
    comm.barrier()
    waited = comm.rank == 0 and isinstance(error.__context__, shmring.Timeout)
    assert not waited, "the wait for rank 1 ended at the timeout"


def give_up(block, chunk, back, transfers):
    for transfer in transfers:
        transfer.wait()
    time.sleep(0.3)  # rank 0 has its own, and waits for this rank
    raise GivenUp


def leave_with_an_error(comm):
    """Rank 1 leaves with an error of another communicator, and lives on."""
    servers = ReductionServers(comm, [2])
    try:
        with servers:
            if servers.is_reducer:
                servers.serve()
            if comm.rank == 1:
                raise shmring.Timeout("no such batch")
            servers.all_reduce(np.zeros(5))
    except shmring.Error as error:
        end_together(comm, error)
        raise


@pytest.mark.parametrize(
    ("leave", "nodes", "text"),
    [
        (interrupt_one, [0, 0, 1], "rank 1 gave up: GivenUp"),
        (leave_with_an_error, [0, 0, 1], "rank 1 left with Timeout: no such batch"),
        (leave_with_an_error, [0, 1, 2], "rank 1 left with Timeout: no such batch"),
    ],
)
def test_a_worker_that_gives_up_ends_it_for_all(world_over_hosts, leave, nodes, text):
    first, _, reducer = world_over_hosts(nodes).outcomes(leave)
    for outcome in first, reducer:
        assert isinstance(outcome, shmring.Aborted), outcome
        assert text in str(outcome)


def serve_on_a_worker(comm):
    with ReductionServers(comm, [0]) as servers:
        if servers.is_reducer:
            with pytest.raises(ValueError, match="rank 0 is a reducer"):
                servers.all_reduce(np.zeros(1))
            return servers.serve()
        with pytest.raises(ValueError, match="rank 1 is a worker"):
            servers.serve()
        return 0


def test_each_has_a_call_of_its_own(world_of):
    assert world_of(2)(serve_on_a_worker) == [0, 0]


def go_on_until_one_dies(comm, victim):
    with ReductionServers(comm, [4], **TINY) as servers:
        comm.barrier()
        if comm.rank == victim:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if servers.is_reducer:
            servers.serve()
        while True:
            servers.all_reduce(np.zeros(9999))


@pytest.mark.parametrize("victim", [3, 4], ids=["a worker", "the reducer"])
def test_a_killed_rank_is_named_on_all(victim):
    with Ranks(5, nodes=[0, 0, 1, 1, 2]) as ranks:
        outcomes = ranks.meet().outcomes(go_on_until_one_dies, victim)
    assert isinstance(outcomes[victim], Died)
    for rank in set(range(5)) - {victim}:
        assert isinstance(outcomes[rank], shmring.RankFailed), outcomes
        assert outcomes[rank].rank == victim, outcomes
