"""1F1B has the properties of the paper, and a pipeline the weights of the delayed update, bit for bit."""

import os
import signal
import time

import numpy as np
import pytest
from ranks import raised, until_there

import shmring
from shmring.methods.pipeline import Pipeline, one_forward_one_backward, version_of
from shmring.methods.rules import SGD, Adam

# ---- the schedule alone ---------------------------------------------------------------------------------

STAGES = [1, 2, 3, 4, 7]


def played(num_stages, count):
    """Return (time, stage, step) of all steps; each takes one unit, and a stage waits for the inputs of its
    step."""
    schedules = [one_forward_one_backward(stage, num_stages, count) for stage in range(num_stages)]
    todo, done, events, time = [list(schedule) for schedule in schedules], set(), [], 0
    while any(todo):
        ready = []
        for stage, steps in enumerate(todo):
            if not steps:
                continue
            kind, number = steps[0]
            neighbour = stage - 1 if kind == "forward" else stage + 1
            if neighbour in (-1, num_stages) or (neighbour, kind, number) in done:
                ready.append((stage, steps[0]))
        assert ready, f"nobody can go on: {[steps[:1] for steps in todo]}"
        for stage, step in ready:
            todo[stage].pop(0)
            done.add((stage, *step))
            events.append((time, stage, step))
        time += 1
    return events


@pytest.mark.parametrize("count", [0, 1, 2, 5, 16])
@pytest.mark.parametrize("num_stages", STAGES)
def test_every_micro_batch_goes_there_and_back_in_order(num_stages, count):
    for stage in range(num_stages):
        steps = one_forward_one_backward(stage, num_stages, count)
        for kind in ("forward", "backward"):
            assert [number for kind_, number in steps if kind_ == kind] == list(range(count))
        in_flight = np.cumsum([1 if kind == "forward" else -1 for kind, _ in steps])
        assert in_flight.size == 0 or (in_flight.min() == 0 and in_flight.max() <= num_stages - stage)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
@pytest.mark.parametrize("num_stages", STAGES)
def test_no_rank_waits_but_at_the_beginning_and_the_end(num_stages, count):
    assert played(num_stages, count)[-1][0] + 1 == 2 * (count + num_stages - 1)


def versions_in_use(num_stages, micro_batches, batches):
    """Return the most versions that a stage needs at once, for batches in flight and the newest one; None if
    one is missing."""
    most = 0
    for stage in range(num_stages):
        newest, in_flight = 0, {}
        for kind, number in one_forward_one_backward(stage, num_stages, micro_batches * batches):
            if kind == "forward":
                in_flight[number] = version_of(number // micro_batches)
                if in_flight[number] > newest:
                    return None
            most = max(most, len({*in_flight.values(), newest}))
            if kind == "backward":
                del in_flight[number]
                newest = (number + 1) // micro_batches
    return most


@pytest.mark.parametrize("num_stages", STAGES)
def test_two_versions_suffice_with_as_many_micro_batches_as_stages(num_stages):
    for micro_batches in (num_stages, num_stages + 3):
        assert versions_in_use(num_stages, micro_batches, 6) == 2


def test_fewer_micro_batches_do_not():
    assert versions_in_use(7, 3, 6) is None


# ---- runs -----------------------------------------------------------------------------------------------

LAYERS, ROWS = 4, 3


def width(layer):
    return 5 + 2 * layer


def start(dtype):
    random = np.random.default_rng(5)
    return [random.standard_normal((width(layer), width(layer + 1))).astype(dtype) for layer in range(LAYERS)]


def forward(weights, x):
    saved = [x]
    for matrix in weights:
        saved.append(np.tanh(saved[-1] @ matrix))
    return saved[-1], saved


def backward(weights, saved, gradient):
    gradients = []
    for matrix, x, y in zip(weights[::-1], saved[-2::-1], saved[:0:-1], strict=True):
        gradient = gradient * (1 - y * y)
        gradients.append(x.T @ gradient)
        gradient = gradient @ matrix.T
    return gradient, gradients[::-1]


def x_of(number, dtype):
    return np.random.default_rng([1, number]).standard_normal((ROWS, width(0))).astype(dtype)


def loss_gradient_of(number, y):
    return y - np.random.default_rng([2, number]).standard_normal(y.shape).astype(y.dtype)


def simulated(dtype, lr, micro_batches, batches):
    """One process, all versions: w(t + 1) = w(t) - lr · gradient_t(w(t - 1))."""
    versions = [start(dtype)]
    for batch in range(batches):
        delayed, sums = versions[max(batch - 1, 0)], [np.zeros_like(each) for each in versions[0]]
        for number in range(batch * micro_batches, (batch + 1) * micro_batches):
            y, saved = forward(delayed, x_of(number, dtype))
            for total, part in zip(
                sums, backward(delayed, saved, loss_gradient_of(number, y))[1], strict=True
            ):
                total += part
        versions.append([w - lr * total for w, total in zip(versions[-1], sums, strict=True)])
    return versions[-1]


def layers_of(rank, size):
    return np.array_split(np.arange(LAYERS), size)[rank]


def piped(comm, dtype, rule, micro_batches, runs):
    mine = layers_of(comm.rank, comm.size)
    receives = ((ROWS, width(mine[0])), dtype) if comm.rank else None
    weights = [start(dtype)[layer] for layer in mine]
    pipeline = Pipeline(
        comm, forward, backward, weights, rule, micro_batches=micro_batches, receives=receives
    )
    for batches in runs:
        begin = pipeline.batches * micro_batches
        pipeline.run(
            batches,
            inputs=lambda number, begin=begin: x_of(begin + number, dtype),
            loss_gradient=lambda number, y, begin=begin: loss_gradient_of(begin + number, y),
        )
    assert pipeline.weights_nbytes == 2 * sum(each.nbytes for each in weights)
    return [each.copy() for each in pipeline.weights]


def together(parts):
    return [weight for part in parts for weight in part]


def same(ours, theirs):
    return [each.tobytes() for each in ours] == [each.tobytes() for each in theirs]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_weights_are_those_of_the_delayed_update(world_of, size, dtype):
    ranks = world_of(size)
    for micro_batches in (4, 7):
        expected = simulated(dtype, 0.01, micro_batches, 5)
        assert same(together(ranks(piped, dtype, SGD(0.01), micro_batches, [5])), expected)
        assert same(together(ranks(piped, dtype, SGD(0.01), micro_batches, [0, 1, 3, 1])), expected)


def test_other_rules_and_numbers_of_stages_agree(world_of):
    rule = Adam(0.01)
    expected = together(world_of(1)(piped, "f8", rule, 4, [6]))
    assert same(together(world_of(4)(piped, "f8", rule, 4, [6])), expected)
    assert not same(expected, simulated("f8", 0.01, 4, 6))


def large(comm):
    """Send activations that are larger than any ring: a send waits until the other rank receives."""
    weight, count = np.full(1, 1 / 2), 6

    def passes(weights, x):
        return x * weights[0], x

    def back(weights, x, gradient):
        return gradient, [gradient[:1] * x[:1]]  # the received array itself

    receives = ((1 << 21,), "f8") if comm.rank else None
    pipeline = Pipeline(comm, passes, back, [weight], SGD(1.0), micro_batches=3, receives=receives)
    pipeline.run(
        count // 3,
        inputs=lambda number: np.full(1 << 21, number + 1.0),
        loss_gradient=lambda number, y: np.full_like(y, 2.0**number),
    )
    return pipeline.weights[0].item()


def test_large_activations_neither_wait_for_each_other_nor_mix(world_of):
    per_micro_batch = sum((number + 1) * 2.0**number for number in range(6))
    assert world_of(3)(large) == [1 / 2 - per_micro_batch / 2**stage for stage in range(3)]


def killed_while(comm):
    def forward_or_die(weights, x):
        if comm.rank == 1 and dies.pop():
            os.kill(os.getpid(), signal.SIGKILL)
        return x, x

    dies = [True, *[False] * 7]
    receives = ((4,), "f8") if comm.rank else None
    passes = forward_or_die, lambda weights, x, gradient: (gradient, [gradient])
    pipeline = Pipeline(comm, *passes, [np.zeros(4)], SGD(1), micro_batches=4, receives=receives)
    data = {"inputs": lambda number: np.ones(4), "loss_gradient": lambda number, y: y.copy()}
    return raised(pipeline.run, 4, **data)


def test_a_dead_stage_is_named(three):
    first, _, third = three.outcomes(killed_while)
    assert first.startswith("RankFailed")
    assert third.startswith("RankFailed")


def fail_after_a_death(comm, path):
    """Rank 2 dies. Rank 1 raises the error of another communicator in its second pass, then rank 0 looks."""

    def forward_of_a_library(weights, x):
        if comm.rank == 2:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 1 and x[0] == 1:
            library.barrier()
        return x, x

    def inputs(number):
        if number == 2:
            until_there(path)
        return np.full(4, float(number))

    library = comm.dup()
    receives = ((4,), "f8") if comm.rank else None
    passes = forward_of_a_library, lambda weights, x, gradient: (gradient, [gradient])
    pipeline = Pipeline(comm, *passes, [np.zeros(4)], SGD(1), micro_batches=3, receives=receives)
    try:
        return raised(pipeline.run, 1, inputs=inputs, loss_gradient=lambda number, y: y)
    finally:
        path.touch()


def test_a_pass_that_fails_after_a_death_leaves_the_death_as_the_reason(three, tmp_path):
    first, second, _ = three.outcomes(fail_after_a_death, tmp_path / "failed")
    assert first.startswith("RankFailed")
    assert second.startswith("RankFailed")


def wrong(comm, case):
    keywords = {"micro_batches": 2, "receives": ((2, 2), "f8") if comm.rank else None}
    weights = [np.zeros((2, 2))]
    if case == "few":
        keywords["micro_batches"] = 1
    if case == "other":
        keywords["micro_batches"] = 2 + comm.rank
    if comm.rank == 0 and case == "dtype":
        weights = [np.zeros(3, int)]
    if comm.rank == 0 and case == "receives":
        keywords["receives"] = (2, 2), "f8"
    rule = SGD if comm.rank == 0 and case == "rule" else SGD(1)
    make = lambda: Pipeline(comm, forward, backward, weights, rule, **keywords)  # noqa: E731
    if found := raised(make):
        return found
    return raised(make().run, 1, loss_gradient=loss_gradient_of) if case == "inputs" else None


@pytest.mark.parametrize(
    ("case", "first_says", "second_says"),
    [
        ("few", "ValueError: micro_batches is 1; 2 stages", "ValueError: micro_batches is 1; 2 stages"),
        ("other", "ValueError: micro_batches is 2, 3 by", "ValueError: micro_batches is 2, 3 by"),
        ("dtype", "TypeError: the arrays are of dtype int64", "Mismatch"),
        ("rule", "TypeError: rule is", "Mismatch"),
        ("receives", "ValueError: receives, the shape and dtype", "Mismatch"),
        ("inputs", "ValueError: rank 0 needs inputs", "Mismatch"),
    ],
)
def test_wrong_use_is_an_error_and_no_rank_hangs(world_of, case, first_says, second_says):
    first, second = world_of(2)(wrong, case)
    assert first.startswith(first_says)
    assert second.startswith(second_says)


def without_a_gradient(comm):
    """Keep rank 1 alive, so that rank 0 does not see its end."""
    receives = ((2, 2), "f8") if comm.rank else None
    give_none = lambda *of: (None, backward(*of)[1])  # noqa: E731
    pipeline = Pipeline(
        comm, forward, give_none, [np.zeros((2, 2))], SGD(1), micro_batches=2, receives=receives
    )
    return raised(pipeline.run, 1, inputs=lambda _: np.ones((2, 2)), loss_gradient=loss_gradient_of)


def receive_another_array(comm, shape, dtype):
    """Give rank 1, in the middle, a wrong `receives`."""
    receives = ((2, 2), "f8") if comm.rank else None
    if comm.rank == 1:
        receives = shape, dtype
    pipeline = Pipeline(
        comm, forward, backward, [np.zeros((2, 2))], SGD(1), micro_batches=3, receives=receives
    )
    return raised(pipeline.run, 1, inputs=lambda _: np.ones((2, 2)), loss_gradient=loss_gradient_of)


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [((2, 2), "f4", "Mismatch"), ((1, 2), "f8", "Truncated"), ((3, 2), "f8", "ValueError")],
)
def test_a_stage_that_receives_another_array_ends_the_run_for_all(three, shape, dtype, kind):
    first, second, third = three.outcomes(receive_another_array, shape, dtype)
    assert second.startswith(kind)
    for outcome in first, third:
        assert outcome.startswith("Aborted")
        assert f"stage 1: {kind}" in outcome


def end_in_a_pass(comm, case):
    def forward_or_fail(weights, x):
        if comm.rank == 1 and case == "error":
            raise shmring.Timeout("of another communicator")
        return x, x

    receives = ((2, 2), "f8") if comm.rank else None
    pipeline = Pipeline(
        comm, forward_or_fail, backward, [np.zeros((2, 2))], SGD(1), micro_batches=2, receives=receives
    )
    return raised(pipeline.run, 1, inputs=lambda _: np.ones((2, 2)), loss_gradient=lambda _, y: None)


@pytest.mark.parametrize(
    ("case", "expected"),
    [("error", "Timeout: of another communicator"), ("nothing", "ValueError: loss_gradient returned None")],
)
def test_a_pass_that_fails_ends_the_run_for_all(world_of, case, expected):
    first, second = world_of(2)(end_in_a_pass, case)
    assert second.startswith(expected)
    assert first.startswith("Aborted")
    assert f"stage 1: {expected}" in first


def skip(comm):
    """The first stage sends another array of the same shape, with the default tag, to the second one."""

    def forward_with_skip(weights, x):
        if comm.rank == 0:
            comm.send(2 * x, 1)
            return x, x
        other = np.empty(4)
        comm.recv(other, 0)
        return x - other, x

    def keep(number, y):
        seen.append(y.tolist())
        return y

    seen = []
    passes = forward_with_skip, lambda weights, x, gradient: (gradient, [gradient])
    receives = ((4,), "f8") if comm.rank else None
    pipeline = Pipeline(comm, *passes, [np.zeros(4)], SGD(1), micro_batches=2, receives=receives)
    pipeline.run(1, inputs=lambda number: np.full(4, number + 1.0), loss_gradient=keep)
    return seen


def test_messages_of_the_program_are_no_activations(world_of):
    assert world_of(2)(skip)[1] == [[-1.0] * 4, [-2.0] * 4]


def test_a_stage_that_gives_no_gradient_is_reported_of(world_of):
    first, second = world_of(2)(without_a_gradient)
    assert second.startswith("ValueError: backward returned no gradient of x")
    assert first.startswith("Aborted")
    assert "stage 1" in first
