"""Groups of `ray.util.collective` on shmring: their start, and the tensors that calls take and refuse."""

import sys

import pytest
from engines import assert_well, needs, start, write_script

GROUPS = """
    import contextlib, itertools, os, time, warnings
    import numpy as np, ray, shmring
    from ray.experimental import internal_kv
    from ray.util import collective
    from shmring.adapters import ray as adapter

    try:
        import torch
    except ImportError:
        torch = None

    @ray.remote(num_cpus=0)
    class Actor:
        def run(self, function, *arguments):
            try:
                return function(*arguments)
            except Exception as error:
                return f"{type(error).__name__}: {error}"

    def on_both(function, *arguments):
        calls = [actor.run.remote(function, rank, *arguments) for rank, actor in enumerate(actors)]
        return ray.get(calls, timeout=60)

    def start(rank):
        collective.init_collective_group(2, rank, "SHMRING", "group")

    def end(rank):
        collective.destroy_collective_group("group")

    def in_group(function, *arguments):
        assert on_both(start) == [None, None]
        results = on_both(function, *arguments)
        assert on_both(end) == [None, None]
        return results

    # --- the start ---

    @contextlib.contextmanager
    def replaced(module, name, function):
        before = getattr(module, name)
        setattr(module, name, function)
        try:
            yield before
        finally:
            setattr(module, name, before)

    def start_twice(rank):
        def delete_late(name):
            time.sleep(0.5)  # the other rank would find the name again meanwhile
            delete(name)

        with replaced(internal_kv, "_internal_kv_del", delete_late) as delete:
            for _ in range(2):
                start(rank)
                end(rank)

    def start_without_deletion(rank):
        def fail(name):
            raise OSError("no store")

        with replaced(internal_kv, "_internal_kv_del", fail):
            collective.init_collective_group(2, rank, "SHMRING", "not deleted")

    def check_start():
        assert on_both(start_twice) == [None, None]
        first, other = on_both(start_without_deletion)
        assert first == "OSError: no store" and other.startswith("RankFailed: rank 0"), (first, other)

    def die_at_start(rank):
        with replaced(shmring, "init", lambda *world_and_rank: os._exit(3)):
            start(rank)

    def check_start_after_a_death():
        lost = Actor.remote()
        ray.get(lost.__ray_call__.remote(adapter._register))
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(lost.run.remote(die_at_start, 0))
        early = actors[1].run.remote(start, 1)
        time.sleep(1)  # rank 1 begins to join the world of the dead rank 0
        assert ray.get([actors[0].run.remote(start, 0), early]) == [None, None]
        on_both(end)

    # --- arguments of actors, which are read-only ---

    def write_to_argument(rank, call, x):
        x = x.copy() if rank == 0 else x
        if call == "allgather":
            collective.allgather([np.empty(3), x], np.ones(3), "group")
        elif call == "reducescatter":
            collective.reducescatter(x, [np.ones(3)] * 2, "group")
        elif call == "reduce":
            collective.reduce(x, 1, "group")
        else:
            getattr(collective, call)(x, group_name="group")

    def read_argument(rank, x):
        out = np.zeros(3), np.zeros(3)
        collective.allgather(list(out), x, "group")
        collective.reducescatter(out[0], [x, x], "group")
        collective.broadcast(out[1] if rank else x, 0, "group")
        collective.reduce(x if rank else out[0], 0, "group")
        if torch:
            with warnings.catch_warnings(action="error"):
                collective.reducescatter(torch.zeros(3, dtype=torch.float64), [x, x], "group")
        return float(out[0][0]), float(out[1][0])

    def check_arguments():
        for call in "allreduce", "broadcast", "reduce", "allgather", "reducescatter":
            other, refused = in_group(write_to_argument, call, np.ones(3))
            assert other.startswith("Mismatch: ") and "refused" in other, (call, other)
            assert refused.startswith("ValueError: ") and "in Ray" in refused, (call, refused)
            assert "x = x.copy()" in refused, (call, refused)
        assert in_group(read_argument, np.ones(3)) == [(3, 1), (2, 1)]

    # --- tensors of a list that differ from the other tensor ---

    def refuse_unlike(rank):
        x, zeros = np.ones(3), [np.zeros(shape) for shape in [(2, 3), (3, 1)]]
        zeros += [np.zeros(3, dtype) for dtype in ["i8", "f4"]] + ([torch.zeros(3)] if torch else [])
        for other in zeros:
            for out, parts in [(other, [x, x]), (x.copy(), [x, other]), (None, [x.copy(), other])]:
                try:
                    if out is None:
                        collective.allgather(parts, x, "group")
                    else:
                        collective.reducescatter(out, parts, "group")
                    raise AssertionError("nothing was raised")
                except RuntimeError as error:
                    assert type(error) is RuntimeError, repr(error)
        assert not any(other.any() for other in zeros)
        collective.allreduce(x, "group")  # the communicator goes on
        return float(x[0])

    def refuse_on_rank_1(rank, gathers):
        x, other = np.ones(3), np.ones(3 + rank)
        if gathers:
            collective.allgather([x.copy(), other], x, "group")
        else:
            collective.reducescatter(x, [x, other], "group")

    def check_unlike():
        assert in_group(refuse_unlike) == [2, 2]
        for gathers in False, True:
            other, refused = in_group(refuse_on_rank_1, gathers)
            assert other.startswith("Mismatch: ") and "refused" in other, other
            assert refused.startswith("RuntimeError: ") and "float64[4]" in refused, refused

    # --- order in memory, NumPy and PyTorch in one call ---

    LAYOUTS = [np.array, np.asfortranarray, lambda values: np.repeat(values, 2, axis=-1)[..., ::2]]
    if torch:
        LAYOUTS += [torch.tensor, lambda values: torch.tensor(values.T).T]

    def gather_and_scatter(rank, values):
        for of_x, of_first, of_second in itertools.product(LAYOUTS, repeat=3):
            parts = [of_first(values * 0), of_second(values * 0)]
            collective.allgather(parts, of_x(values + rank), "group")
            for other, part in enumerate(parts):
                assert np.array_equal(part, values + other), (of_x, of_first, of_second)
            out = of_x(values * 0)
            parts = [of_first(values + rank), of_second(values * 10)]
            collective.reducescatter(out, parts, "group")
            assert np.array_equal(out, values * 20 if rank else values * 2 + 1), (of_x, of_first, of_second)
            assert np.array_equal(parts[0], values + rank) and np.array_equal(parts[1], values * 10)

    def take_numbers(rank):
        for make in [np.array] + ([torch.tensor] if torch else []):
            out, parts = make(0.0), [make(0.0), make(0.0)]
            collective.allgather(parts, make(rank + 1.0), "group")
            collective.reducescatter(out, parts, "group")
            assert [float(x) for x in [out, *parts]] == [2 * rank + 2, 1, 2]

    def check_layouts():
        assert in_group(gather_and_scatter, np.arange(6.0).reshape(2, 3)) == [None, None]
        assert in_group(take_numbers) == [None, None]

    if __name__ == "__main__":
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        actors = [Actor.remote() for _ in range(2)]
        adapter.register_backend(actors)
        for check in check_start, check_start_after_a_death, check_arguments, check_unlike, check_layouts:
            check()
        ray.shutdown()
        print("well")
    """


@needs("ray")
@pytest.mark.limit(240)
def test_ray_group(tmp_path):
    assert_well(start(sys.executable, write_script(tmp_path, GROUPS), SHMRING_TIMEOUT="30"))
