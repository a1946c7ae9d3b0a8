"""The parameter server. Synchronous: all_reduce and an update, to the bit. At each worker's pace: every
gradient is applied once, and no worker gets further ahead than allowed. An end of the server ends it for all.
"""

import itertools
import os
import signal
import threading
import time
import types

import numpy as np
import pytest
from combinations import each_value, first
from injections import Interrupt, ReturningInterrupted
from ranks import Died, Ranks, raised, until_there
from waiting import wait_until

import shmring
from shmring.methods import server as module
from shmring.methods.reducers import ReductionServers
from shmring.methods.server import SGD, ParameterServer
from tests.collectives.test_errors import assert_all

COUNT = 1000
NODES = {"one host": None, "two hosts": [0, 0, 1, 1], "four hosts": [0, 1, 2, 3]}


@pytest.fixture
def four(world_of, world_over_hosts):
    """four("two hosts") → four ranks that have met."""

    def meet(where):
        return world_over_hosts(NODES[where]) if NODES[where] else world_of(4)

    return meet


def gradient_of(worker, step, count, dtype):
    """Return numbers whose sums are rounded, so that the order matters."""
    return np.random.default_rng((worker, step)).standard_normal(count).astype(dtype)


def is_server(comm, servers):
    return isinstance(servers, list) and comm.rank in servers


# ---- synchronous ------------------------------------------------------------------------------------------


def in_step(comm, servers, dtype, steps):
    """Return whether the weights are those of all_reduce, or of a sum in rank order if all_reduce folds each
    host first."""
    module._ROUND, module._CHUNK = 64, 100  # several of them
    params, velocity = np.arange(COUNT, dtype=dtype) / 7, np.zeros(COUNT, dtype)
    weights = params.copy() if comm.rank == 0 else np.zeros(COUNT, dtype)
    others = comm.split(int(is_server(comm, servers)))
    folds_in_rank_order = others.num_nodes in (1, others.size)
    with ParameterServer(comm, weights, SGD(0.1, 0.9), servers=servers) as server:
        if server.serves:
            server.serve()
            own = len(range(COUNT)[server._way._slices[comm.rank]]) * weights.itemsize
            assert server.served_nbytes == 2 * steps * (comm.size - len(servers)) * own
            return True
        for step in range(steps):
            gradient = gradient_of(comm.rank, step, COUNT, dtype)
            server.step(gradient, weights)
            if folds_in_rank_order or servers == 1:
                others.all_reduce(gradient)
            else:
                first, *more = others.all_gather(gradient)
                gradient = sum(more, start=first)
            velocity *= 0.9
            velocity += gradient
            params -= 0.1 * velocity
        assert server.most_ahead == server.served_nbytes == 0
    return weights.tobytes() == params.tobytes()


@pytest.mark.parametrize("where", NODES)
@pytest.mark.parametrize("servers", [1, 2, 4, [0], [3, 1]], ids=str)
def test_in_step_it_is_all_reduce_to_the_bit(four, where, servers):
    assert all(four(where)(in_step, servers, "f4", 4))


def test_in_step_of_float64_and_one_rank_alone(world_of):
    assert all(world_of(3)(in_step, 3, "f8", 3))
    assert world_of(1)(in_step, 1, "f8", 3) == [True]


def in_turn(comm, servers, staleness):
    """Pushes that no pull follows, of arrays of two dimensions."""
    weights, out = np.full((4, 5), 2.0), np.empty((4, 5))
    rule = SGD(0.5) if servers == 1 or comm.rank in servers else None  # only servers need one
    with ParameterServer(comm, weights, rule, servers=servers, staleness=staleness) as server:
        if server.serves:
            server.serve()
            return
        workers = comm.size - (len(servers) if isinstance(servers, list) else 0)
        for step in range(3):
            server.push(np.full((4, 5), float(step)))
        server.pull(out)
        assert (out == 2 - 0.5 * 3 * workers).all()


@pytest.mark.parametrize("servers", [1, [0], [1, 2]], ids=str)
@pytest.mark.parametrize("where", NODES)
def test_gradients_of_all_workers_are_added_up(four, where, servers):
    four(where)(in_turn, servers, 0)


def few(comm, servers, count):
    weights = np.zeros(count, "f4")
    with ParameterServer(comm, weights, SGD(1), servers=servers) as server:
        if server.serves:
            server.serve()
        else:
            server.step(np.ones(count, "f4"), weights)
    return is_server(comm, servers) or weights.tolist()


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("servers", [1, 4, [0, 3]], ids=str)
def test_fewer_params_than_servers(world_of, servers, count):
    for weights in world_of(4)(few, servers, count):
        assert weights is True or weights == [-2 if isinstance(servers, list) else -4] * count


# ---- at each worker's pace --------------------------------------------------------------------------------


class Clipped:
    """A rule that reads the weights, and has a state."""

    num_states = 1

    def update(self, weights, gradient, state, scratch, step):
        (count,) = state
        count += 1
        np.clip(weights - gradient, -10, 10, out=weights)
        weights -= (count == 60) / 2


class Doubled(SGD):
    """A rule that is no plain SGD, although its class is derived from it."""

    def update(self, weights, gradient, state, scratch, step):
        weights -= 2 * gradient


def at_own_pace(comm, servers, staleness, rule, steps):
    """Push whole numbers, so that sums are exact in any order of arrival."""
    module._CHUNK = 300  # several of them
    weights = np.zeros(COUNT, "f4")
    workers = comm.split(int(is_server(comm, servers)))
    with ParameterServer(comm, weights, rule, servers=servers, staleness=staleness) as server:
        if server.serves:
            server.serve()
            return server.most_ahead, None
        for _ in range(steps):
            server.step(np.ones(COUNT, "f4"), weights)
        workers.barrier()
        server.pull(weights)
        workers.barrier()
    return server.most_ahead, sorted(set(weights.tolist()))


@pytest.mark.parametrize("staleness", [1, 3, None])
@pytest.mark.parametrize("servers", [1, 2, [1], [0, 2]], ids=str)
def test_every_gradient_is_applied_once(world_of, servers, staleness):
    workers = 4 - (len(servers) if isinstance(servers, list) else 0)
    for most_ahead, weights in world_of(4)(at_own_pace, servers, staleness, SGD(1), 20):
        assert staleness is None or most_ahead <= staleness
        assert weights in (None, [-20 * workers])


@pytest.mark.parametrize(("rule", "expected"), [(Clipped(), -10.5), (Doubled(1), -120)], ids=["whole", "SGD"])
@pytest.mark.parametrize("servers", [1, [0]], ids=str)
def test_a_rule_of_ones_own_is_applied_for_every_gradient(world_of, servers, rule, expected):
    for _, weights in world_of(4 if servers == [0] else 3)(at_own_pace, servers, 2, rule, 20):
        assert weights in (None, [expected])  # 60 gradients


@pytest.mark.parametrize("where", ["two hosts", "four hosts"])
def test_over_hosts_ranks_serve(world_over_hosts, where):
    for most_ahead, weights in world_over_hosts(NODES[where])(at_own_pace, [0, 3], 1, SGD(1), 10):
        assert most_ahead <= 1
        assert weights in (None, [-20])


def push_while_another_holds_a_lock(comm):
    server = ParameterServer(comm, np.zeros(3 * module._CHUNK), module.SGD(1, momentum=0.5), staleness=None)
    if comm.rank == 1:
        with server._way._params.lock(1):
            comm.barrier()
            comm.barrier()
        with pytest.raises(shmring.Aborted, match="Timeout in rank 0"):
            server.pull(np.zeros(3 * module._CHUNK))
    else:
        comm.barrier()
        server._comm.timeout_s = 0.3
        with pytest.raises(shmring.Timeout):
            server.push(np.ones(3 * module._CHUNK))
        comm.barrier()
        with pytest.raises(shmring.Aborted, match="Timeout in rank 0"):
            server.push(np.ones(3 * module._CHUNK))
    comm.barrier()  # the caller's communicator goes on


def test_a_gradient_that_is_applied_in_part_ends_the_server(world_of):
    world_of(2)(push_while_another_holds_a_lock)


def run_ahead(comm, servers, staleness, steps):
    """Make steps on rank 1 but not on rank 2; return how far rank 1 gets, and the CPU seconds of its wait."""
    done = comm.shared(1, "i8")
    weights = np.zeros(10, "f4")
    with ParameterServer(comm, weights, SGD(1), servers=servers, staleness=staleness) as server:
        cpu_s = 0.0
        if server.serves:
            server.serve()
            return server.most_ahead, cpu_s
        for _ in range(steps if comm.rank < 2 else 0):
            begin_s = time.process_time()
            server.step(np.ones(10, "f4"), weights)
            cpu_s = max(cpu_s, time.process_time() - begin_s)
            done.accumulate(0, comm.rank)
        if comm.rank == 2:
            while done.get(0) < (steps if staleness is None else staleness):
                time.sleep(0.01)
            time.sleep(1)  # as long as it likes
            assert done.get(0) == (steps if staleness is None else staleness)
            for _ in range(steps):
                server.step(np.ones(10, "f4"), weights)
    return server.most_ahead, cpu_s


@each_value({"staleness": [1, 4, None], "servers": [1, [0]]})
def test_no_worker_gets_further_ahead_than_allowed(world_of, servers, staleness):
    found = world_of(3)(run_ahead, servers, staleness, 8)
    assert max(most_ahead for most_ahead, _ in found) == (8 if staleness is None else staleness)
    assert found[1][1] < 0.5  # while it waited for a second


def leave_early(comm, servers):
    """Leave early: a worker that has left holds no other back."""
    weights = np.zeros(10, "f4")
    with ParameterServer(comm, weights, SGD(1), servers=servers, staleness=1) as server:
        if server.serves:
            server.serve()
        for _ in range(0 if server.serves else 3 * comm.rank):
            server.step(np.ones(10, "f4"), weights)
        server.leave()
        if not server.serves:
            with pytest.raises(ValueError, match="has left"):
                server.pull(weights)
    return float(weights[0])


@pytest.mark.parametrize("servers", [1, [0]], ids=str)
def test_a_leaving_rank_is_not_waited_for(world_of, servers):
    assert world_of(4)(leave_early, servers)[3] == -18


def pull_once_more(comm):
    weights = np.zeros(10, "f4")
    with ParameterServer(comm, weights, SGD(1), servers=[0]) as server:
        if server.serves:
            return server.serve()
        if comm.rank == 2:
            server.pull(weights)
        server.step(np.ones(10, "f4"), weights)
        return server.step(np.ones(10, "f4"), weights)


def test_synchronous_workers_that_make_different_calls_are_named(world_of):
    text = "the workers' calls do not match: worker 1 pushes, worker 2 pulls"
    for error in assert_all(world_of(4).outcomes(pull_once_more), shmring.Aborted):
        assert text in str(error)


def close_twice(comm, servers, staleness):
    with ParameterServer(comm, np.zeros(3), SGD(1), servers=servers, staleness=staleness) as server:
        if server.serves:
            server.serve()
    server.close()
    server.leave()
    return raised(server.push, np.ones(3))


@pytest.mark.parametrize(("servers", "staleness"), [(1, 0), (1, 1), ([0], 0), ([0], 1)], ids=str)
def test_a_second_close_does_nothing(world_of, servers, staleness):
    *_, error = world_of(2)(close_twice, servers, staleness)
    assert error.startswith("ValueError: this worker has left")


# ---- ends -------------------------------------------------------------------------------------------------


def die(comm, servers, staleness, victim):
    weights = np.zeros(100_000, "f4")
    with ParameterServer(comm, weights, SGD(1), servers=servers, staleness=staleness) as server:
        if server.serves:
            if comm.rank == victim:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
            server.serve()
        for step in range(1 << 30 if staleness is not None else 100):
            if (comm.rank, step) == (victim, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            server.step(np.ones(100_000, "f4"), weights)


@pytest.mark.parametrize(
    ("servers", "staleness", "victim"),
    [(1, 0, 1), (3, 0, 1), ([0], 0, 1), (1, 2, 1), (1, None, 1), ([0, 2], 2, 1), ([1], 2, 1)],
    ids=str,
)
def test_the_death_of_a_rank_ends_it_for_all(servers, staleness, victim):
    with Ranks(4) as ranks:
        first, gone, *others = ranks.meet().outcomes(die, servers, staleness, victim)
        assert isinstance(gone, Died)
        for error in assert_all([first, *others], shmring.RankFailed):
            assert error.rank == 1


class Interrupted(BaseException):
    """As of a signal handler."""


def raise_interrupted(*_):
    raise Interrupted


class InterruptedRule(SGD):
    def update(self, *_):
        raise Interrupted


def interrupt_a_push(comm, staleness):
    """Interrupt rank 0 in the middle of a push: rank 1 waits for its params, or for its message."""
    weights = np.zeros(10, "f4")
    server = ParameterServer(comm, weights, SGD(1) if staleness else InterruptedRule(1), staleness=staleness)
    if comm.rank == 1:
        for _ in range(1 + staleness):
            server.push(weights)
        server.pull(weights)
    if staleness:
        wait_until(lambda: server._way._pace._waits[1], "rank 1 waits")
        server._way._pace._comm = types.SimpleNamespace(rank=0, send=raise_interrupted)
    with pytest.raises(Interrupted):
        server.push(weights)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_push_that_is_interrupted_ends_it_for_all(world_of, staleness):
    _, waiting = world_of(2).outcomes(interrupt_a_push, staleness)
    assert isinstance(waiting, shmring.Aborted), waiting
    assert "rank 0 gave up: Interrupted" in str(waiting)


def leave_again(comm):
    """Interrupt leave as it returns, and repeat it. Return how many steps the worker is ahead then."""
    with ParameterServer(comm, np.zeros(3), SGD(1), staleness=1) as server:
        server._comm = ReturningInterrupted(own := server._comm)
        with pytest.raises(Interrupt):
            server.leave()
        server._comm = own
        server.leave()
        return int(server._way._pace._steps[comm.rank])


def test_a_worker_does_not_leave_twice(world_of):
    assert world_of(1)(leave_again) == [module._GONE]


def leave_with_an_error(comm, servers, staleness, kind):
    """Rank 1 lives on, and its communicator is open."""
    weights = np.zeros(1000, "f4")
    with ParameterServer(comm, weights, SGD(1), servers=servers, staleness=staleness) as server:
        if server.serves:
            server.serve()
        for step in itertools.count():
            if (comm.rank, step) == (1, 3):
                raise kind("no such batch")
            server.step(np.ones(1000, "f4"), weights)


# The last kind may be of another communicator, such as one that loads the batches.
@pytest.mark.parametrize(
    ("servers", "staleness", "kind"),
    [
        *[(servers, 0, LookupError) for servers in (1, 3, [0])],
        *[(servers, 2, LookupError) for servers in (1, [0], [0, 2])],
        *[(servers, 2, shmring.Timeout) for servers in (1, [0])],
    ],
    ids=str,
)
def test_an_exception_on_one_rank_ends_it_for_all_with_its_text(world_of, servers, staleness, kind):
    first, wrong, last = world_of(3).outcomes(leave_with_an_error, servers, staleness, kind)
    assert isinstance(wrong, kind), wrong
    for error in assert_all([first, last], shmring.Aborted):
        assert f"rank 1 left with {kind.__name__}: no such batch" in str(error)


def leave_after_a_death(comm, make, path):
    """Rank 2 dies. Rank 1 leaves the block with comm's error, then rank 0 looks."""
    try:
        with make(comm) as servers:
            comm.barrier()
            if comm.rank == 2:
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
            if comm.rank == 0:
                until_there(path)
                servers.serve()
            comm.barrier()
    finally:
        path.touch()


def server_of_params(comm):
    return ParameterServer(comm, np.zeros(10), SGD(1), servers=[0])


def reduction_server(comm):
    return ReductionServers(comm, [0])


@pytest.mark.parametrize("make", [server_of_params, reduction_server])
def test_an_exit_after_a_death_leaves_the_death_as_the_reason(tmp_path, make):
    with Ranks(3) as ranks:
        first, second, _ = ranks.meet().outcomes(leave_after_a_death, make, tmp_path / "left")
    for error in assert_all([first, second], shmring.RankFailed):
        assert error.rank == 2


SHORT_S = 2


def take_long(comm, servers, staleness):
    """Let the last worker take long, while the first leaves."""
    weights = np.zeros(10, "f4")
    with ParameterServer(comm, weights, SGD(1), servers=servers, staleness=staleness) as server:
        if server.serves:
            server.serve()
        elif comm.rank == 2:
            time.sleep(1.5 * SHORT_S)  # longer than a call may take
            server.step(np.ones(10, "f4"), weights)
    return float(weights[0])


@pytest.mark.parametrize(("servers", "staleness"), first(1, [([0], 2), ([0], 0), (1, None)]), ids=str)
def test_servers_and_who_has_left_wait_for_slow_workers(world_of, servers, staleness):
    assert world_of(3, timeout_s=SHORT_S)(take_long, servers, staleness) == [0, 0, -1]


# ---- wrong arguments --------------------------------------------------------------------------------------

WRONG = {
    "no server": ({"servers": 0}, ValueError, "1 to 2"),
    "too many": ({"servers": 3}, ValueError, "1 to 2"),
    "nobody": ({"servers": []}, ValueError, "one or more"),
    "twice": ({"servers": [1, 1]}, ValueError, "each once"),
    "unknown": ({"servers": [2]}, ValueError, "2 ranks"),
    "no worker": ({"servers": [0, 1]}, ValueError, "leave one out"),
    "staleness": ({"staleness": -1}, ValueError, "staleness"),
    "half a step": ({"staleness": 0.5}, TypeError, "integer"),
    "a float": ({"servers": 1.0}, TypeError, "servers is 1.0; it must be an integer"),
}


def refuse(comm):
    for name, (wrong, kind, words) in WRONG.items():
        with pytest.raises(kind) as caught:
            ParameterServer(comm, np.zeros(3), SGD(1), **wrong)
        assert words in str(caught.value), f"{name}: {caught.value}"
    for params, kind in (
        ([1.0], TypeError),
        (np.zeros(3, "i4"), TypeError),
        (np.zeros((4, 4)).T[1:], ValueError),
    ):
        with pytest.raises(kind):
            ParameterServer(comm, params, SGD(1))
    with ParameterServer(comm, np.zeros(3), SGD(1)) as server:
        for wrong in (np.zeros(4), np.zeros(3, "f4"), np.zeros((3, 1))):
            with pytest.raises(ValueError, match="for params"):
                server.push(wrong)
        with pytest.raises(ValueError, match="worker"):
            server.serve()
    if comm.rank == 1:  # The other rank is in no call.
        with pytest.raises(ValueError, match="has left"):
            server.push(np.zeros(3))
    server = ParameterServer(comm, np.zeros(3), SGD(1), staleness=1)
    with pytest.raises(TypeError, match="mask would be ignored"):
        server.push(np.ma.zeros(3))
    server.close()
    with pytest.raises(TypeError, match="rule is None"):
        ParameterServer(comm, np.zeros(3), None)
    comm.barrier()
    return True


def test_wrong_arguments_are_refused(world_of):
    assert all(world_of(2)(refuse))


OTHERS = {
    "servers": lambda rank: {"servers": [rank]},
    "kind": lambda rank: {"servers": [0] if rank else 1},
    "staleness": lambda rank: {"servers": [0], "staleness": rank},
    "shape": lambda rank: {"params": np.zeros((2, 3) if rank else (3, 2))},
}


def give_others(comm, what):
    with pytest.raises(ValueError, match="different servers, staleness or shapes"):
        ParameterServer(comm, **{"params": np.zeros(3), "rule": SGD(1), **OTHERS[what](comm.rank)})
    comm.barrier()


@pytest.mark.parametrize("what", OTHERS)
def test_ranks_that_give_other_servers_are_reported(world_of, what):
    world_of(2)(give_others, what)


def refuse_one(comm):
    with ParameterServer(comm, np.zeros(3), SGD(1)) as server:
        server.push(np.zeros(4 if comm.rank == 1 else 3))


def test_a_wrong_push_is_a_mismatch_on_the_others(world_of):
    first, wrong, last = world_of(3).outcomes(refuse_one)
    assert "params of float64[3]" in str(wrong)
    for error in first, last:  # in either order: the refused call, or its departure
        assert isinstance(error, shmring.Mismatch) or "left with ValueError: an array of" in str(error)


def construct_wrongly(comm, name):
    wrong = WRONG[name][0] if comm.rank == 1 else {}
    ParameterServer(comm, np.zeros(3), SGD(1), **wrong)


@pytest.mark.parametrize("name", ["too many", "no server", "twice", "staleness", "half a step"])
def test_a_wrong_start_on_one_rank_is_a_mismatch_on_the_others(world_of, name):
    first, wrong = world_of(2).outcomes(construct_wrongly, name)
    assert isinstance(wrong, WRONG[name][1]), wrong
    assert isinstance(first, shmring.Mismatch), first


def refuse_over_hosts(comm):
    with pytest.raises(ValueError, match="servers="):
        ParameterServer(comm, np.zeros(3), SGD(1), staleness=1)
    comm.barrier()
    return True


def test_hosts_at_their_own_pace_need_ranks_that_serve(world_over_hosts):
    assert all(world_over_hosts([0, 1])(refuse_over_hosts))


def refuse_to_serve(comm):
    with ParameterServer(comm, np.zeros(3), SGD(1), servers=[0]) as server:
        if server.serves:
            for wrong in (server.push, server.pull):
                with pytest.raises(ValueError, match="serves"):
                    wrong(np.zeros(3))
            server.serve()
        else:
            read_only = np.zeros(3)
            read_only.flags.writeable = False
            with pytest.raises(ValueError, match="read-only"):
                server.pull(read_only)
            server.step(read_only, np.zeros(3))
    return True


def test_what_a_rank_refuses_leaves_the_others_as_they_were(world_of):
    assert all(world_of(2)(refuse_to_serve))
