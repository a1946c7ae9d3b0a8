"""shmring.adapters.jax as custom calls of XLA: `jit`, transformations, order, errors, caches, devices.

Ranks import jax, this process does not: it forks.
"""

import functools
import os
import re
import signal
import sys

import numpy as np
import pytest
from engines import needs, output_of, start, write_script
from ranks import interrupted, until_there

import shmring
from shmring.adapters import jax as adapter

pytestmark = [needs("jax"), pytest.mark.limit(240)]

SLOW_S = 60  # jax is imported and compiles within a call
N = 3


def bits(array):
    return np.asarray(array).tobytes()


def x_of(rank, *shape):
    return np.random.default_rng(rank).integers(0, 9, shape).astype("f4")


# --- jit ---


def call_everything(comm):
    """Make each kind of call in one program: eagerly, under jax.jit and under the adapter's jit."""
    import jax

    size, rank = comm.size, comm.rank
    every = np.stack([x_of(r, size, 4) for r in range(size)])

    def calls(x):
        found = {
            "all_reduce": adapter.all_reduce(x, comm),
            "max": adapter.all_reduce(2 * x, comm, "max"),
            "broadcast": adapter.broadcast(x, comm, 1),
            "all_gather": adapter.all_gather(x, comm),
            "reduce_scatter": adapter.reduce_scatter(x, comm),
            "all_to_all": adapter.all_to_all(x, comm),
        }
        adapter.barrier(comm)
        if rank == 0:
            adapter.send([x, x + 1], comm, dest=1, tag=3)
        if rank == 1:
            found["recv"] = adapter.recv([x, jax.ShapeDtypeStruct(x.shape, "f4")], comm, source=0, tag=3)
        return found

    expected = {
        "all_reduce": every.sum(0),
        "max": 2 * every.max(0),
        "broadcast": every[1],
        "all_gather": every,
        "reduce_scatter": every.sum(0)[rank],
        "all_to_all": every[:, rank],
    }
    for run in calls, jax.jit(calls), adapter.jit(calls):
        found = run(every[rank])
        for name, array in expected.items():
            assert found[name].shape == array.shape, name
            assert bits(found[name]) == bits(array), name
        if rank == 1:
            assert [bits(leaf) for leaf in found["recv"]] == [bits(every[0]), bits(every[0] + 1)]
        jax.block_until_ready(found)


def change_dtypes(comm):
    """Programs that differ in the dtype alone get arguments at the same address."""
    import jax

    total = adapter.jit(lambda x: adapter.all_reduce(x, comm))
    room = np.zeros(128, "u1")
    begin = -room.ctypes.data % 64
    for dtype in "float32", "int32", "uint32", "float32":
        x = room[begin : begin + 24].view(dtype)
        x[:] = comm.rank + 1
        given = jax.dlpack.from_dlpack(x)  # the same memory
        assert given.unsafe_buffer_pointer() == x.ctypes.data
        found = total(given)
        assert (found.dtype, found.tolist()) == (dtype, [3] * 6)
        del given, found


def test_the_dtype_is_that_of_the_call(world_of):
    world_of(2, timeout_s=SLOW_S)(change_dtypes)


def test_every_call_in_one_program(world_of):
    world_of(N, timeout_s=SLOW_S)(call_everything)


def call_in_turn(comm):
    """The communicator may be used as soon as a function of `jit` has returned."""
    import jax.numpy as jnp

    @adapter.jit
    def step(x):
        for _ in range(3):
            x = jnp.tanh(x @ x)
        return adapter.all_reduce(x, comm), adapter.all_gather(x[0], comm)

    x = np.full((300, 300), 1e-3, "f4")  # so much work that JAX runs it on another thread
    for turn in range(20):
        step(x)
        assert comm.all_reduce(turn + comm.rank) == 2 * turn + 1


def test_the_communicator_is_free_when_jit_returns(world_of):
    world_of(2, timeout_s=SLOW_S)(call_in_turn)


def give_options(comm):
    import jax
    import jax.numpy as jnp

    @adapter.jit(static_argnums=1, static_argnames="how")
    def scaled(x, names, *, how, bias=0):
        """Scale."""
        assert names == ("a", "b")
        return {name: adapter.all_reduce(x * (2 if how == "twice" else 1) + bias, comm) for name in names}

    assert scaled.__doc__ == "Scale."
    found = scaled(jnp.ones(2), ("a", "b"), how="twice", bias=jnp.ones(2))
    assert (found["a"] == 6).all()
    assert (scaled(jnp.ones(2), ("a", "b"), how="once")["b"] == 2).all()

    assert adapter.jit(lambda: adapter.barrier(comm))() is None
    assert adapter.jit(lambda x: (adapter.barrier(comm), {}))(1.0) == (None, {})
    constants = adapter.jit(lambda: (adapter.all_reduce(jnp.arange(3), comm), 5))()
    assert constants[0].tolist() == [0, 2, 4]
    assert constants[1] == 5
    given = jnp.ones(3)
    assert adapter.jit(lambda x, y: (x, adapter.all_reduce(y, comm)))(given, given)[1].tolist() == [2, 2, 2]

    nested = adapter.jit(lambda x: scaled(x, ("a", "b"), how="once")["a"] + adapter.all_reduce(x, comm))
    assert nested(jnp.ones(2)).tolist() == [4, 4]
    assert jax.jit(nested)(jnp.ones(2)).tolist() == [4, 4]
    with jax.disable_jit():
        assert nested(jnp.ones(2)).tolist() == [4, 4]
        assert adapter.jit(lambda: adapter.barrier(comm))() is None
        assert adapter.jit(lambda x: 5)(1) == 5
    assert adapter.jit(lambda x: x + 1)(1) == 2

    class Model:
        @functools.partial(adapter.jit, static_argnums=0)
        def total(self, x):
            return adapter.all_reduce(x, comm)

    assert Model().total(jnp.ones(2)).tolist() == [2, 2]
    text = adapter.jit(lambda x: adapter.all_reduce(x, comm)).lower(jnp.ones(2)).as_text()
    assert "all_reduce sum" in text
    shown = []

    @adapter.jit
    def shows(x):
        for n in range(3):
            x = adapter.all_reduce(x, comm)
            jax.debug.callback(lambda x, n=n: shown.append((n, float(x[0]))), x, ordered=n % 2 == 0)
        return x

    assert shows(jnp.ones(2)).tolist() == [8, 8]
    jax.effects_barrier()
    assert sorted(shown) == [(0, 2), (1, 4), (2, 8)]
    with pytest.raises(ZeroDivisionError):
        adapter.jit(lambda x: adapter.all_reduce(x, comm) * (1 // 0))(1.0)


def test_jit_takes_what_jax_jit_takes(world_of):
    world_of(2, timeout_s=SLOW_S)(give_options)


def mix_programs(comm):
    """Plain programs, functions of `jit` and eager calls keep one order."""
    import jax
    import jax.numpy as jnp

    def late(x):
        square = jnp.full((200, 200), 1e-3)
        return jax.lax.fori_loop(0, 20 * (comm.rank + 1), lambda _, y: jnp.tanh(y @ y), square).sum() * 0 + x

    plain = jax.jit(lambda x: adapter.all_reduce(late(x), comm))
    region = adapter.jit(lambda x: adapter.all_reduce(x, comm, "max"))
    for turn in range(20):
        sums = plain(jnp.full(turn % 4 + 1, 1.0))
        largest = region(jnp.full(turn % 4 + 2, float(comm.rank)))
        every = adapter.all_gather(jnp.full(turn % 4 + 3, turn), comm)
        assert (sums == comm.size).all()
        assert (largest == comm.size - 1).all()
        assert (every == turn).all()


def test_programs_of_both_kinds_keep_one_order(world_of):
    world_of(N, timeout_s=SLOW_S)(mix_programs)


def fuse(comm):
    tree = {str(n): x_of(comm.rank + n, n) for n in range(1, 60)}
    run = adapter.jit(lambda tree: adapter.all_reduce(tree, comm))
    run(tree)
    before = comm.stats()["calls"]
    found = run(tree)
    assert comm.stats()["calls"] == before + 1
    for n in range(1, 60):
        assert bits(found[str(n)]) == bits(sum(x_of(rank + n, n) for rank in range(comm.size)))


def test_a_pytree_is_one_call(world_of):
    world_of(2, timeout_s=SLOW_S)(fuse)


def repeat_leaves(comm):
    """XLA gives equal leaves one buffer."""
    import jax
    import jax.numpy as jnp

    def program(x):
        y = 2 * x
        return adapter.all_reduce([x, x.reshape(-1), y, y, jnp.zeros(6), jnp.zeros(6), y + 1, x], comm)

    x = jnp.arange(6.0).reshape(2, 3)
    for run in adapter.jit(program), jax.jit(program), program:
        found = [np.ravel(leaf).tolist() for leaf in run(x)]
        first = [comm.size * item for item in range(6)]
        twice, more = [2 * item for item in first], [2 * item + comm.size for item in first]
        assert found == [first, first, twice, twice, [0] * 6, [0] * 6, more, first]
        assert x.ravel().tolist() == [0, 1, 2, 3, 4, 5]


def test_equal_leaves_are_reduced_apart(world_of):
    world_of(2, timeout_s=SLOW_S)(repeat_leaves)


def reduce_in_place(comm):
    """Donated arguments and intermediates are reduced where they are; other arguments keep their values."""
    import jax.numpy as jnp

    @adapter.jit(donate_argnums=0)
    def donated(x):
        return adapter.all_reduce(x, comm)

    x = jnp.full(50_000, 1.0)
    address = x.unsafe_buffer_pointer()
    found = donated(x)
    assert x.is_deleted()
    assert found.unsafe_buffer_pointer() == address
    assert (found == comm.size).all()

    kept = jnp.full(50_000, 3.0)
    plain = adapter.jit(lambda x: (adapter.all_reduce(x, comm), adapter.all_reduce(2 * x, comm), x + 1))
    for _ in range(3):
        once, twice, more = plain(kept)
        assert (once == 3 * comm.size).all()
        assert (twice == 6 * comm.size).all()
        assert (more == 4).all()
        assert (kept == 3).all()
    texts = plain._region.lower(kept).as_text().split("custom_call")
    assert ["output_operand_alias<" in text for text in texts if "all_reduce" in text] == [False, True]

    both = adapter.jit(lambda x: (lambda y: (adapter.all_reduce(y, comm), y))(2 * x))  # used after the call
    total, own = both(kept)
    assert (total == 6 * comm.size).all()
    assert (own == 6).all()


def test_donated_arrays_and_intermediates_are_reduced_in_place(world_of):
    world_of(2, timeout_s=SLOW_S)(reduce_in_place)


def use_other_layouts(comm):
    """XLA may keep a transposed array in the other order of memory, but not for a call."""
    x = x_of(comm.rank, 6, 4)
    every = np.stack([x_of(rank, 6, 4) for rank in range(comm.size)])
    run = adapter.jit(lambda x: (adapter.all_gather(x.T, comm), adapter.all_reduce((x * 2).T, comm).T))
    gathered, reduced = run(x)
    assert bits(gathered) == bits(every.transpose(0, 2, 1))
    assert bits(reduced) == bits(2 * every.sum(0))


def test_transposed_arrays_are_in_the_order_that_a_call_needs(world_of):
    world_of(2, timeout_s=SLOW_S)(use_other_layouts)


# --- transformations ---


def map_over_batches(comm):
    import jax
    import jax.numpy as jnp

    size, rank = comm.size, comm.rank
    calls = [
        lambda x: adapter.all_reduce(x, comm),
        lambda x: adapter.all_reduce({"x": x, "one": jnp.ones(2)}, comm)["x"],
        lambda x: adapter.broadcast(x, comm, 1),
        lambda x: adapter.all_gather(x, comm),
        lambda x: adapter.all_to_all(x, comm),
        lambda x: adapter.reduce_scatter(x, comm, "max"),
        lambda x: adapter.reduce_scatter(jnp.concatenate([x, x]), comm),
    ]
    batch = x_of(rank, 5, size, 4)
    for axis in 0, 1, 2:
        moved = np.moveaxis(batch, 0, axis)
        for number, call in enumerate(calls):
            expected = np.stack([np.asarray(call(x)) for x in batch])
            for outer in jax.vmap, lambda call, axis: adapter.jit(jax.vmap(call, axis)):
                assert bits(outer(call, axis)(moved)) == bits(expected), (number, axis)
            twice = jax.jit(jax.vmap(jax.vmap(call, axis), axis + 1))(np.stack([moved, moved], axis + 1))
            assert bits(twice) == bits(np.stack([expected, expected])), (number, axis)


def test_vmap_makes_one_call_for_the_batch(world_of):
    world_of(2, timeout_s=SLOW_S)(map_over_batches)


def transform(comm):
    import jax
    import jax.numpy as jnp

    size, rank = comm.size, comm.rank
    x = jnp.arange(1.0, 4.0)
    total = adapter.jit(lambda x: adapter.all_reduce(x * x, comm))

    value, change = jax.jvp(total, (x,), (jnp.full(3, rank + 1.0),))
    assert np.allclose(value, size * x * x)
    assert np.allclose(change, 2 * x * sum(range(1, size + 1)))
    assert np.allclose(jax.grad(lambda x: total(x).sum())(x), size * 2 * x)
    assert np.allclose(adapter.jit(jax.grad(lambda x: total(x).sum()))(x), size * 2 * x)
    both = adapter.jit(
        lambda x, y: adapter.all_reduce({"x": x, "y": y}, comm)
    )  # y is a constant of the gradient
    partly = jax.grad(lambda x: (both(x, 2 * jnp.ones(3))["x"] * both(x, jnp.ones(3))["y"]).sum())
    assert np.allclose(partly(x), size * size)
    assert np.allclose(jax.jit(partly)(x), size * size)
    assert np.allclose(jax.jacrev(total)(x), np.diag(size * 2 * x))
    assert np.allclose(jax.jacfwd(total)(x), np.diag(size * 2 * x))
    cubes = jax.jacrev(jax.jacrev(lambda x: (adapter.broadcast(x, comm, 1) ** 3).sum()))(x)
    assert np.allclose(cubes, np.diag(size * 6 * x) * (rank == 1))

    def loop(x):
        def step(carry, factor):
            carry = adapter.all_reduce(jnp.sin(carry) * factor, comm, "avg")
            return carry, carry.sum()

        last, sums = jax.lax.scan(step, x, jnp.arange(1.0, 4.0))
        return last.sum() + sums.sum()

    def alone(x):
        total = 0
        for factor in (1.0, 2.0, 3.0):
            x = jnp.sin(x) * factor
            total += x.sum()
        return x.sum() + total

    expected = jax.value_and_grad(alone)(x)  # all ranks have the same x
    for run in jax.jit, adapter.jit:
        for inner in loop, jax.checkpoint(loop):
            found = run(jax.value_and_grad(inner))(x)
            assert np.allclose(found[0], expected[0])
            assert np.allclose(found[1], expected[1], rtol=1e-5)

    branch = adapter.jit(lambda x, many: jax.lax.cond(many, lambda x: total(x) + total(x), lambda x: x, x))
    assert np.allclose(branch(x, True), 2 * size * x * x)
    assert np.allclose(branch(x, False), x)
    rounds = adapter.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, y: adapter.all_reduce(y, comm), x))
    assert np.allclose(rounds(x, 3), size**3 * x)
    assert np.allclose(rounds(x, 0), x)

    def scaled(x):
        return adapter.all_reduce(x, comm)

    own = jax.custom_vjp(scaled)
    own.defvjp(lambda x: (scaled(x), None), lambda _, ct: (10 * scaled(ct),))
    assert np.allclose(adapter.jit(jax.grad(lambda x: own(x).sum()))(x), 10 * size)
    if rank == 0:
        with pytest.raises(TypeError, match="send has no gradient"):
            jax.grad(lambda x: adapter.send(x, comm, 1) or x.sum())(x)


def test_transformations(world_of):
    world_of(2, timeout_s=SLOW_S)(transform)


# --- errors ---


def differ(comm):
    import jax

    run = adapter.jit(lambda x: adapter.all_reduce(x, comm))
    run(np.zeros(7, "f4"))
    with pytest.raises(shmring.Mismatch, match="rank"):
        run(np.zeros(comm.rank + 1, "f4"))
    with pytest.raises(shmring.Mismatch):
        adapter.all_gather(np.zeros(3, "f4"), comm)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Mismatch"):
        jax.block_until_ready(jax.jit(lambda x: adapter.all_reduce(x, comm))(np.zeros(7, "f4")))


def test_errors_of_jit_and_of_eager_calls_have_their_class(world_of):
    world_of(2, timeout_s=SLOW_S)(differ)


def refuse(comm):
    import jax
    import jax.numpy as jnp

    reduce = adapter.jit(lambda x: adapter.all_reduce(x, comm, "avg"))
    with pytest.raises(TypeError, match="avg"):
        reduce(np.ones(3, "i4"))  # found by the communicator on every rank, which goes on
    assert reduce(np.full(3, comm.rank, "f4")).tolist() == [0.5] * 3
    with pytest.raises(TypeError, match="key"):
        adapter.broadcast(jax.random.key(1), comm)
    with pytest.raises(TypeError, match="int4"):
        adapter.recv(jnp.zeros(3, "int4"), comm, 0)
    with pytest.raises(ValueError, match="dest is 2; there are ranks 0 to 1"):
        adapter.send(1.0, comm, 2)
    with pytest.raises(TypeError, match=r"source is 0\.5; it must be an integer"):
        adapter.recv(jnp.zeros(3), comm, 0.5)
    with pytest.raises(ValueError, match=r"shape \(3,\) has no dimension 0"):
        adapter.all_to_all(np.ones(3, "f4"), comm)
    if comm.rank:
        adapter.send(np.ones(3, "f4"), comm, 0)
    else:
        with pytest.raises(ValueError, match="rank 1 sent 3 elements, and the program expects 4"):
            adapter.recv(np.ones(4, "f4"), comm, 1)
    return True


def test_wrong_arguments(world_of):
    world_of(2, timeout_s=SLOW_S)(refuse)


def close_first(comm):
    import gc
    import weakref

    from shmring.adapters._jax import xla

    other = comm.dup()
    run = adapter.jit(lambda x: adapter.all_reduce(x, other))
    assert run(1.0) == comm.size
    other.close()
    with pytest.raises(shmring.Closed, match="closed"):
        run(1.0)
    third = comm.dup()
    gone = weakref.ref(third)
    ref = weakref.ref(third)
    run = adapter.jit(lambda x: adapter.all_reduce(x, ref() or other))
    run(1.0)
    before = len(xla._eager)
    adapter.all_reduce(1.0, third)
    third.close()
    del third
    gc.collect()
    assert gone() is None  # no program keeps it
    assert len(xla._eager) == before  # and it keeps no program
    with pytest.raises(shmring.Closed, match="does not exist any more"):
        run(1.0)
    assert comm.all_reduce(1) == comm.size


def test_programs_of_a_communicator_that_is_closed_or_gone(world_of):
    world_of(2, timeout_s=SLOW_S)(close_first)


def work_large(comm, large):
    """Return a function of `jit`: a small program runs in the calling thread, a large one in another."""
    import jax.numpy as jnp

    if not large:
        return adapter.jit(lambda x: adapter.all_reduce(x, comm)), np.zeros(5, "f4")
    square = np.full((300, 300), 1e-3, "f4")
    return adapter.jit(lambda x: adapter.all_reduce(jnp.tanh(x @ x), comm)), square


def go_on_without_one(comm, large):
    reduce, x = work_large(comm, large)
    reduce(x)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(shmring.RankFailed, match="rank 1") as caught:
        reduce(x)
    assert caught.value.rank == 1
    with pytest.raises(shmring.RankFailed):
        comm.barrier()


@pytest.mark.parametrize("large", [False, True])
def test_a_killed_rank_is_named_in_its_own_error(three, large):
    outcomes = three.meet(timeout_s=SLOW_S).outcomes(go_on_without_one, large)
    assert [outcomes[0], outcomes[2]] == [None, None], outcomes


def interrupt(comm, large, interrupted_path):
    import threading

    reduce, x = work_large(comm, large)
    reduce(x)
    comm.barrier()
    if comm.rank:
        until_there(interrupted_path)
        with pytest.raises(shmring.Aborted, match="KeyboardInterrupt in rank 0"):
            comm.barrier()
        return
    assert threading.current_thread() is threading.main_thread()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: reduce(x), 0.8)
    interrupted_path.touch()
    with pytest.raises(shmring.Aborted, match="KeyboardInterrupt in rank 0"):
        comm.barrier()


@pytest.mark.parametrize("large", [False, True])
def test_ctrl_c_ends_the_wait_on_all_ranks(three, tmp_path, large):
    outcomes = three.meet(timeout_s=SLOW_S).outcomes(interrupt, large, tmp_path / "interrupted")
    assert outcomes == [None] * 3


def interrupt_after_dispatch(comm):
    """A signal handler raises when JAX has begun the program, and before the adapter waits for it."""
    from shmring.adapters._jax import xla

    def await_end(self, results):
        if interrupts:
            raise interrupts.pop()
        plain_await_end(self, results)

    plain_await_end, interrupts = xla._Region.await_end, []
    reduce, x = work_large(comm, True)
    xla._Region.await_end = await_end
    try:
        reduce(x)
        if comm.rank == 0:
            interrupts.append(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                reduce(x)
    finally:
        xla._Region.await_end = plain_await_end
    with pytest.raises(shmring.Error, match=r"KeyboardInterrupt in rank 0|rank 0 called all_reduce"):
        comm.barrier()  # the program may have made its call before the interrupt


def test_an_interrupt_while_a_program_begins_ends_the_communicator(three):
    assert three.meet(timeout_s=SLOW_S).outcomes(interrupt_after_dispatch) == [None] * 3


def call_in_two_threads(comm):
    """Two threads with a communicator each run their programs at the same time."""
    import threading

    import jax.numpy as jnp

    failures = []

    def run(own, rounds):
        try:
            step = adapter.jit(lambda x: adapter.all_reduce(jnp.tanh(x @ x) * 0 + 1, own))
            for _ in range(rounds):
                assert (step(np.ones((100, 100), "f4")) == comm.size).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(comm.dup(), 100)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_two_threads_with_a_communicator_each(world_of):
    world_of(2, timeout_s=SLOW_S)(call_in_two_threads)


# --- order, caches, devices: in processes of their own ---

ORDER = """
    import sys, threading, time
    import jax, jax.numpy as jnp, numpy as np
    import shmring
    from shmring.adapters import jax as adapter
    from shmring.adapters._jax.call import Call

    RUNS, CALLS = int(sys.argv[1]), 64
    seen, inside, overlapped = [], [], []
    plain_run = Call.run

    def run(self, comm, arrays, outs):
        inside.append(1)
        overlapped.append(len(inside) > 1)
        seen.append(outs[0].count)
        plain_run(self, comm, arrays, outs)
        inside.pop()

    Call.run = run
    with shmring.init(shmring.world(1), rank=0) as comm:
        def program(x):
            results = []
            for n in range(1, CALLS + 1):  # independent of each other, with different work before each
                y = jnp.tanh(x[:n] * n) if n % 3 else x[:n] @ jnp.ones((n, n)) + x[:n]
                results.append(adapter.all_gather(y, comm)[0])
            return results

        for compiled in adapter.jit(program), jax.jit(program):
            for turn in range(RUNS):
                seen.clear()
                found = jax.block_until_ready(compiled(jnp.full(CALLS, float(turn))))
                assert seen == list(range(1, CALLS + 1)), (turn, seen)
        assert not any(overlapped)
    assert len(jax.devices()) == 8
    print("well")
"""


def test_independent_calls_run_in_the_programs_order_and_never_overlap(tmp_path):
    """On the threads of 8 devices: without tokens, no run of 64 calls is in order."""
    threads = "--xla_force_host_platform_device_count=8"
    text = output_of(start(sys.executable, write_script(tmp_path, ORDER), 1000, XLA_FLAGS=threads))
    assert "well" in text.splitlines(), text


EVERY_DTYPE = """
    import jax, jax.numpy as jnp, ml_dtypes, numpy as np
    import shmring
    from shmring.adapters import jax as adapter

    dtypes = [*"bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split(),
              *"complex64 complex128 bfloat16 float8_e4m3fn float8_e5m2".split()]
    with shmring.init() as comm:
        for dtype in map(np.dtype, dtypes):
            x = (np.arange(6) % 3 + comm.rank).astype(dtype)
            for op in "sum", "prod", "max", "min", "avg", "band", "bor", "bxor", "land", "lor", "lxor":
                expected = x.copy()
                try:
                    comm.all_reduce(expected, op)
                except TypeError as error:
                    expected = error
                try:
                    found = adapter.jit(lambda x: adapter.all_reduce(x, comm, op))(x)
                except TypeError as error:
                    assert str(error) == str(expected), (dtype, op, error)
                else:
                    assert found.dtype == dtype, (dtype, found.dtype)
                    assert np.asarray(found).tobytes() == expected.tobytes(), (dtype, op)
            assert np.asarray(adapter.all_gather(x, comm)).tobytes() == comm.all_gather(x).tobytes(), dtype
    print("well")
"""


def test_every_dtype_and_op_gives_the_bits_and_errors_of_the_communicator(tmp_path):
    launcher = [sys.executable, "-m", "shmring.run", "--no-prefix", "-n", 2]
    text = output_of(start(*launcher, write_script(tmp_path, EVERY_DTYPE), JAX_ENABLE_X64="1"))
    assert text.split().count("well") == 2, text


CACHED = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    import shmring
    from shmring.adapters import jax as adapter

    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with shmring.init() as world:
        # The first communicator of JAX in this process: with "reversed", its ranks are the other way round.
        comm = world.split(0, key=-world.rank if sys.argv[2] == "reversed" else world.rank)
        step = adapter.jit(lambda x: adapter.all_gather(x, comm))
        found = step(jnp.full(3, float(world.rank)))[:, 0].tolist()
        assert found == ([1, 0] if sys.argv[2] == "reversed" else [0, 1]), found
        assert (step(jnp.full(3, 7.0)) == 7).all()
        world.barrier()
    print("well")
"""


def test_the_cache_of_another_process_reaches_this_ones_communicator(tmp_path):
    script, cache = write_script(tmp_path, CACHED), tmp_path / "cache"
    sizes = []
    for order in "plain", "plain", "reversed":
        launcher = [sys.executable, "-m", "shmring.run", "--no-prefix", "-n", 2]
        text = output_of(start(*launcher, script, cache, order))
        assert text.split().count("well") == 2, text
        sizes.append(len([path for path in cache.iterdir() if path.name.endswith("-cache")]))
    assert sizes[0] > 0
    assert sizes == [sizes[0]] * 3  # the later jobs found all their programs there


SAVED = """
    import pickle, sys
    import jax, jax.numpy as jnp
    from jax.experimental import serialize_executable
    import shmring
    from shmring.adapters import jax as adapter

    with shmring.init(shmring.world(1), rank=0) as comm:
        if sys.argv[2] == "save":
            compiled = jax.jit(lambda x: adapter.all_gather(x, comm)).lower(jnp.ones(3)).compile()
            compiled(jnp.ones(3))
            with open(sys.argv[1], "wb") as file:
                pickle.dump(serialize_executable.serialize(compiled), file)
        else:
            adapter.all_reduce(jnp.ones(3), comm)
            with open(sys.argv[1], "rb") as file:
                compiled = serialize_executable.deserialize_and_load(*pickle.load(file))
            try:
                jax.block_until_ready(compiled(jnp.ones(3)))
            except jax.errors.JaxRuntimeError as error:
                assert "cannot be taken to another process" in str(error), error
            else:
                raise AssertionError("no error")
    print("well")
"""


def test_a_program_that_was_taken_to_another_process_raises(tmp_path):
    script = write_script(tmp_path, SAVED)
    for action in "save", "load":
        text = output_of(start(sys.executable, script, tmp_path / "program", action))
        assert "well" in text.splitlines(), text


DEVICES = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import shmring
    from shmring.adapters import jax as adapter
    try:
        from jax import shard_map
    except ImportError:
        from jax.experimental.shard_map import shard_map

    def refused(call, *arrays):
        try:
            jax.block_until_ready(call(*arrays))
        except ValueError as error:
            assert "devices" in str(error) or "more than 1 device" in str(error), error
        else:
            raise AssertionError("not refused")

    with shmring.init(shmring.world(1), rank=0) as comm:
        reduce = lambda x: adapter.all_reduce(x, comm)
        two, one = Mesh(np.array(jax.devices()[:2]), "d"), Mesh(np.array(jax.devices()[:1]), "d")
        x = jnp.arange(4.0)
        for jit in adapter.jit, jax.jit:
            refused(jit(shard_map(reduce, mesh=two, in_specs=P("d"), out_specs=P("d"))), x)
            refused(jit(reduce), jax.device_put(x, NamedSharding(two, P("d"))))
            refused(jit(reduce), jax.device_put(x, NamedSharding(two, P())))
            single = shard_map(reduce, mesh=one, in_specs=P("d"), out_specs=P("d"))
            assert (jit(single)(x) == x).all()
        second = jax.device_put(x, jax.devices()[1])
        assert (adapter.jit(reduce)(second) == x).all()
    print("well")
"""


def test_programs_for_several_devices_are_refused(tmp_path):
    flags = "--xla_force_host_platform_device_count=2"
    text = output_of(start(sys.executable, write_script(tmp_path, DEVICES), XLA_FLAGS=flags))
    assert "well" in text.splitlines(), text


WITHOUT = """
    import sys, warnings
    import jax, jax.numpy as jnp
    import jax.ffi

    del jax.ffi.register_ffi_target  # as in a version without it
    import shmring
    from shmring.adapters import jax as adapter

    with shmring.init(shmring.world(1), rank=0) as comm:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert adapter.calls_through() == "callbacks"
            assert adapter.calls_through() == "callbacks"
        assert [warning.category for warning in caught] == [RuntimeWarning], caught
        step = adapter.jit(lambda x: adapter.all_reduce(2 * x, comm))
        assert (step(jnp.ones(3)) == 2).all()
        assert (jax.jit(jax.grad(lambda x: step(x).sum()))(jnp.ones(3)) == 2).all()
    print("well")
"""


def test_callbacks_are_used_where_the_interface_is_missing(tmp_path):
    text = output_of(start(sys.executable, write_script(tmp_path, WITHOUT)))
    assert "well" in text.splitlines(), text


def test_info_says_how_programs_call(tmp_path):
    text = output_of(start(sys.executable, "-m", "shmring", "info", "--no-measure"))
    assert re.search(r"JAX +\S+: programs call shmring as custom calls of XLA", text), text
