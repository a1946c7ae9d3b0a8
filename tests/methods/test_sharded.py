"""ShardedOptimizer reaches the weights of plain data parallel, to the last bit, with a part of the state."""

import os
import signal
import tracemalloc

import numpy as np
import pytest
from injections import Interrupt, ReturningInterrupted, injection_of
from ranks import raised

from shmring.methods.rules import apply, scratch_for
from shmring.methods.sharded import SGD, Adam, ShardedOptimizer

SHAPES = [(7, 5), (), (0, 3), (64, 9), (1,), (257,)]
COUNT = sum(int(np.prod(shape)) for shape in SHAPES)
RULES = {
    "sgd": SGD(0.03),
    "momentum": SGD(0.03, momentum=0.9),
    "adam": Adam(0.01, betas=(0.8, 0.95), eps=1e-3),
}
STEPS = 4


def normal(seed, dtype):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in SHAPES]


def plain(comm, dtype, rule, op):
    """all_reduce of every gradient, and the textbook's rule written out on whole arrays."""
    params, wide = normal(0, dtype), "f4" if dtype == "f2" else dtype
    state = [[np.zeros_like(param, wide) for param in params] for _ in range(2)]
    for step in range(1, STEPS + 1):
        gradients = normal([comm.rank, step], dtype)
        for stored, each, v, m in zip(params, gradients, *state, strict=True):
            comm.all_reduce(each, op)
            param, g = stored.astype(wide), each.astype(wide)
            if isinstance(rule, Adam):
                beta1, beta2 = rule.betas
                m[...] = beta1 * m + (1 - beta1) * g
                v[...] = beta2 * v + (1 - beta2) * (g * g)
                size = rule.lr / (1 - beta1**step)
                param -= m / (np.sqrt(v / (1 - beta2**step)) + rule.eps) * size
            else:
                v[...] = rule.momentum * v + g
                param -= rule.lr * v
            stored[...] = param
    return params


def train(comm, optimizer, dtype, first, last):
    for step in range(first, last + 1):
        gradients = normal([comm.rank, step], dtype)
        if optimizer.gradients is not None and step % 2:  # written in place, or copied there
            for view, gradient in zip(optimizer.gradients, gradients, strict=True):
                view[...] = gradient
            gradients = optimizer.gradients
        for gradient in reversed(gradients):
            optimizer.add(gradient)
        optimizer.step()


def both(comm, dtype, rule, stage, op="avg", bucket_nbytes=300):
    start = normal(0 if comm.rank == 0 else 99, dtype)  # only rank 0's values count
    optimizer = ShardedOptimizer(comm, start, rule, stage=stage, op=op, bucket_nbytes=bucket_nbytes)
    train(comm, optimizer, dtype, 1, STEPS)
    assert all((a == b).all() for a, b in zip(start, normal(0, dtype), strict=True)) or comm.rank
    sharded = [param.tobytes() for param in optimizer.params]
    return sharded == [param.tobytes() for param in plain(comm, dtype, rule, op)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_weights_are_those_of_plain_data_parallel(world_of, size, stage, rule):
    ranks = world_of(size)
    for dtype in ("f2", "f4", "f8"):
        assert all(ranks(both, dtype, RULES[rule], stage)), dtype


@pytest.mark.parametrize(("op", "bucket_nbytes"), [("sum", 1), ("avg", 1 << 20)])
def test_whatever_the_buckets(world_of, op, bucket_nbytes):
    assert all(world_of(3)(both, "f4", RULES["momentum"], 2, op, bucket_nbytes))


@pytest.mark.parametrize("stage", [1, 2])
def test_over_hosts_too(world_over_hosts, stage):
    ranks = world_over_hosts([0, 0, 1, 1])
    assert all(ranks(both, "f4", RULES["adam"], stage))
    assert all(ranks(both, "f2", RULES["momentum"], stage))


def updated_in_halves(comm):
    """Return the weights of float16 after two steps by Adam's own eps, with the second's state saved."""
    optimizer = ShardedOptimizer(comm, [np.ones(5, "f2")], Adam(0.01))
    gradient = np.array([1, 0, 1e-4, 2**-24, -300], "f2")
    optimizer.add(gradient)
    optimizer.step()
    other = ShardedOptimizer(comm, optimizer.params, Adam(0.01))
    other.load(optimizer.save())
    other.add(gradient)
    other.step()
    return other.params[0].tolist()


def test_adam_of_float16_updates_by_small_and_large_gradients(world_of):
    expected = [0.98, 1, 0.98, 0.983, 1.02]  # eps is a sixth of the smallest gradient
    for weights in world_of(2)(updated_in_halves):
        assert np.allclose(weights, expected, atol=1e-3)


def test_state_of_float16_is_refused_by_adam():
    half = np.ones(3, "f2")
    with pytest.raises(TypeError, match="state is float16"):
        apply(Adam(), half, half, [half * 0, half * 0], scratch_for(half.dtype), 1)


def memory(comm, rule, stage, bucket_nbytes):
    optimizer = ShardedOptimizer(comm, normal(0, "f4"), rule, stage=stage, bucket_nbytes=bucket_nbytes)
    held = sum(array.nbytes for array in [*optimizer._state, *optimizer._buffers])
    return optimizer.state_nbytes, optimizer.gradient_nbytes, held


@pytest.mark.parametrize(("name", "states"), [("sgd", 0), ("momentum", 1), ("adam", 2)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_memory_is_what_the_formula_says(world_of, size, name, states):
    padded = -(-COUNT // size) * size
    for state, gradient, held in world_of(size)(memory, RULES[name], 1, 400):
        assert state == 4 * states * padded // size
        assert gradient == 4 * padded
        assert held == state + gradient
    bucket = -(-100 // size) * size
    for state, gradient, held in world_of(size)(memory, RULES[name], 2, 400):
        assert state == 4 * states * padded // size
        assert gradient == 4 * (padded // size + 2 * bucket)
        assert held == state + gradient - 4 * padded // size


def most_allocated(comm, stage, count):
    """Return the bytes that a step allocates at most, besides those before."""
    optimizer = ShardedOptimizer(comm, [np.ones(count, "f4")], Adam(), stage=stage)
    gradient = np.ones(count, "f4")
    tracemalloc.start()
    for _ in range(2):
        optimizer.add(gradient)
        optimizer.step()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_allocates_no_arrays(world_of, stage):
    assert max(world_of(2)(most_allocated, stage, 1 << 20)) < 1 << 16


def train_and_save(comm, stage, steps):
    optimizer = ShardedOptimizer(comm, normal(0, "f4"), RULES["adam"], stage=stage, bucket_nbytes=300)
    train(comm, optimizer, "f4", 1, steps)
    return optimizer.save(root=comm.size - 1), [param.copy() for param in optimizer.params]


def load_and_train(comm, stage, saved, params, steps):
    optimizer = ShardedOptimizer(comm, params, RULES["adam"], stage=stage, bucket_nbytes=500)
    optimizer.load(saved if comm.rank == 0 else None)
    again = optimizer.save()
    if comm.rank == 0:
        assert again["steps"] == saved["steps"]
        assert all((a == b).all() for a, b in zip(again["state"], saved["state"], strict=True))
    train(comm, optimizer, "f4", saved["steps"] + 1, saved["steps"] + steps)
    return [param.copy() for param in optimizer.params]


def same(ours, theirs):
    return all((a == b).all() for a, b in zip(ours, theirs, strict=True))


def test_a_saved_state_continues_with_the_same_bits(world_of):
    (other, _), (saved, params) = world_of(2)(train_and_save, 2, 2)
    assert other is None
    went_on = world_of(2)(load_and_train, 1, saved, params, 2)
    _, uninterrupted = world_of(2)(train_and_save, 2, 4)[0]
    assert all(same(ours, uninterrupted) for ours in went_on)


def test_a_saved_state_loads_on_another_number_of_ranks(world_of):
    _, (saved, params) = world_of(2)(train_and_save, 1, 3)
    world_of(3)(load_and_train, 2, saved, params, 0)  # asserts that it saves the same


class RuleOnce(SGD):
    """A rule whose first update on a rank raises after it has changed the weights."""

    has_raised = False

    def update(self, *arguments):
        super().update(*arguments)
        if not self.has_raised:
            self.has_raised = True
            raise Interrupt


def step_again(comm, place):
    """Interrupt rank 0's step, then repeat it. Rank 1 fills the last bucket only after the interrupt."""
    own = comm.dup()
    rule = RuleOnce(1.0) if place == "update" and comm.rank == 0 else SGD(1.0)
    optimizer = ShardedOptimizer(own, [np.zeros(8)], rule, stage=2, op="sum", bucket_nbytes=64)
    if comm.rank == 1:
        if place == "wait":
            comm.recv(np.empty(1), 0)
        return raised(optimizer.add, np.ones(8)) or raised(optimizer.step)
    optimizer.add(np.ones(8))
    with pytest.raises(Interrupt):
        injection_of("signal", 20 if place == "wait" else 0).run(optimizer.step)
    if place == "wait":
        comm.send(np.empty(1), 1)
    return raised(optimizer.step)


@pytest.mark.parametrize("place", ["wait", "update"])
def test_a_step_that_is_interrupted_ends_the_communicator(world_of, place):
    """The last bucket is full, so its reduction began in `add`: the step makes no call before the update."""
    for error in world_of(2)(step_again, place):
        assert error.startswith("Aborted"), error


def add_again(comm):
    """Interrupt each rank's add as it returns, and repeat it."""
    shapes = [(3,), (2, 2)]
    optimizer = ShardedOptimizer(comm, [np.zeros(shape) for shape in shapes], SGD(1.0), stage=2)
    optimizer._comm = ReturningInterrupted(comm)
    with pytest.raises(Interrupt):
        optimizer.add(np.ones(shapes[1]))
    optimizer._comm = comm
    return raised(optimizer.add, np.ones(shapes[1]))


def test_a_gradient_is_not_added_twice(world_of):
    assert "the next parameter, 0" in world_of(1)(add_again)[0]


def killed_while(comm, stage):
    optimizer = ShardedOptimizer(comm, normal(0, "f4"), SGD(1), stage=stage, bucket_nbytes=300)
    train(comm, optimizer, "f4", 1, 1)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return raised(train, comm, optimizer, "f4", 2, 3)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_dead_rank_is_named(three, stage):
    first, _, third = three.outcomes(killed_while, stage)
    assert first.startswith("RankFailed")
    assert third.startswith("RankFailed")


def wrong(comm, case):
    good, zeros = normal(0, "f4"), [np.zeros(3, "f4"), np.zeros((2, 2), "f4")]
    if comm.rank == 0 and case in ("stage", "op", "bucket_nbytes"):
        return raised(ShardedOptimizer, comm, good, SGD(1), **{case: 0})
    if comm.rank == 0 and case == "rule":
        return raised(ShardedOptimizer, comm, good, SGD)
    if comm.rank == 0 and case in ("dtypes", "integers", "long doubles", "nothing"):
        params = {
            "dtypes": [good[0], good[1].astype("f8")],
            "integers": [np.ones(3, int)],
            "long doubles": [np.ones(3, np.longdouble)],
            "nothing": [],
        }
        return raised(ShardedOptimizer, comm, params[case], SGD(1))
    if comm.rank > 0 and case not in ("order", "missing", "many", "load"):
        return raised(ShardedOptimizer, comm, good, SGD(1))
    optimizer = ShardedOptimizer(comm, zeros, SGD(1, 0.5), stage=2, bucket_nbytes=8)
    if case == "load":
        return raised(optimizer.load, {"steps": 1, "state": [np.zeros(6)]})
    gradients = zeros[:: 1 if comm.rank == 0 and case == "order" else -1]
    for gradient in gradients[: 1 if comm.rank == 0 and case == "missing" else None]:
        if found := raised(optimizer.add, gradient):
            return found
    if comm.rank == 0 and case == "many":
        return raised(optimizer.add, zeros[0])
    return raised(optimizer.step)


@pytest.mark.parametrize(
    ("case", "kind", "expected"),
    [
        ("stage", "ValueError", "it must be 1 or 2"),
        ("op", "ValueError", "'avg' or 'sum'"),
        ("bucket_nbytes", "ValueError", "1 byte or more"),
        ("dtypes", "TypeError", "separately"),
        ("rule", "TypeError", "rule=SGD(0.1)"),
        ("integers", "TypeError", "int64"),
        ("long doubles", "TypeError", "float16, float32 or float64"),
        ("nothing", "ValueError", "give at least one"),
        ("order", "ValueError", "last parameter first"),
        ("missing", "ValueError", "1 of 2 gradients are missing"),
        ("many", "ValueError", "call step()"),
        ("load", "ValueError", "arrays of 7 elements"),
    ],
)
def test_wrong_use_is_an_error_there_and_no_hang_elsewhere(world_of, case, kind, expected):
    first, second = world_of(2)(wrong, case)
    assert first.startswith(kind)
    assert expected in first
    assert second.startswith("Mismatch")
