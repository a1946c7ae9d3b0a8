"""The cost of an all_reduce inside a framework's compiled function, beside the communicator's own, in turn.

    shmrun -n 2 bench/torch/bench_frameworks.py --sizes 4,64K,1M,16M
    mpiexec -n 2 python bench/torch/bench_frameworks.py          with mpi4jax, in the same run

A program of ranks; it runs the ways of JAX and TensorFlow if they are installed, and JAX's own `psum` over
gloo. No way but "in place" changes its input. A time ends when the result is there. JAX takes the memory of
each result from malloc, which is told to keep freed memory: else it may give that of a large result back to
the system after each call, and the next call of any way of JAX waits for fresh pages.

| column | |
|---|---|
| out=, in place | `comm.all_reduce(x, out=out)`, `comm.all_reduce(x)` |
| jit | an empty program: `jax.jit(lambda x: 1.5 * x)`, without a collective |
| jit, in place | that, then `comm.all_reduce(x)` on an array of NumPy |
| jax | `adapter.jit` of an all-reduce |
| jax 1.5x | `adapter.jit` of an all-reduce of 1.5 * x, which is reduced in place |
| jax.jit | the all-reduce under plain `jax.jit` |
| psum | JAX's own collective between processes, over gloo |
| mpi4jax | `mpi4jax.allreduce` under `jax.jit`, with the MPI that has started the ranks |
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import shmring

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.turns import in_turn, pin, state_of

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

Way = Callable[[], object]
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt, see malloc.h
KEPT_NBYTES = 32 << 20  # the most that M_MMAP_THRESHOLD allows


def numpy_ways(comm: shmring.Comm, x: np.ndarray) -> dict[str, Way]:
    out, changed = np.empty_like(x), np.zeros_like(x)
    return {"out=": lambda: comm.all_reduce(x, out=out), "in place": lambda: comm.all_reduce(changed)}


def jax_ways(comm: shmring.Comm, x: np.ndarray) -> dict[str, Way]:
    import jax

    from shmring.adapters import jax as adapter
    given, changed = jax.device_put(x, jax.local_devices()[0]), np.zeros_like(x)
    functions = {
        "jit": jax.jit(lambda x: 1.5 * x),
        "jax": adapter.jit(lambda x: adapter.all_reduce(x, comm)),
        "jax 1.5x": adapter.jit(lambda x: adapter.all_reduce(1.5 * x, comm)),
        "jax.jit": jax.jit(lambda x: adapter.all_reduce(x, comm)),
    }
    if importlib.util.find_spec("mpi4jax") and "PMI_RANK" in os.environ:
        import mpi4jax
        from mpi4py import MPI
        total = functools.partial(mpi4jax.allreduce, op=MPI.SUM, comm=MPI.COMM_WORLD)
        functions["mpi4jax"] = jax.jit(lambda x: first_of(total(x)))

    def then_in_place(x: jax.Array) -> jax.Array:
        found = functions["jit"](x).block_until_ready()
        comm.all_reduce(changed)
        return found

    functions["jit, in place"] = then_in_place
    ways = {name: lambda run=run: run(given).block_until_ready() for name, run in functions.items()}
    return ways | {"psum": psum_way(comm, x)}


def first_of(result: object) -> object:
    """Return the array: older versions of mpi4jax return a token beside it."""
    return result[0] if isinstance(result, (tuple, list)) else result


def psum_way(comm: shmring.Comm, x: np.ndarray) -> Way:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    try:
        from jax import shard_map
    except ImportError:  # jax up to 0.7
        from jax.experimental.shard_map import shard_map
    mesh, along = Mesh(np.array(jax.devices()), "rank"), PartitionSpec("rank")
    placed, part = NamedSharding(mesh, along), jax.device_put(x, jax.local_devices()[0])
    given = jax.make_array_from_single_device_arrays((comm.size * len(x),), placed, [part])
    psum = functools.partial(jax.lax.psum, axis_name="rank")
    reduce = jax.jit(shard_map(psum, mesh=mesh, in_specs=along, out_specs=PartitionSpec()))
    return lambda: reduce(given).block_until_ready()


def begin_jax(comm: shmring.Comm) -> None:
    """Let JAX's processes meet, for psum."""
    import jax

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = comm.broadcast_object(f"127.0.0.1:{free.getsockname()[1]}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, comm.size, comm.rank, local_device_ids=[0])


def tensorflow_ways(comm: shmring.Comm, x: np.ndarray) -> dict[str, Way]:
    import tensorflow as tf

    from shmring.adapters import keras as adapter
    given, reduce = tf.constant(x), tf.function(lambda x: adapter.all_reduce_grads([x], comm, "sum"))
    return {"tensorflow": lambda: reduce(given)[0].numpy()}


FRAMEWORKS = {"jax": jax_ways, "tensorflow": tensorflow_ways}


def table(rows: list[dict[str, float]]) -> str:
    names = list(rows[0])[1:]
    lines = [f"| bytes | {' | '.join(f'{name} us' for name in names)} |", "|---" * (1 + len(names)) + "|"]
    for row in rows:
        lines.append(f"| {row['nbytes']} | {' | '.join(f'{row[name] * 1e6:.1f}' for name in names)} |")
    return "\n".join(lines)


def keep_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(M_TRIM_THRESHOLD, 4 * KEPT_NBYTES)
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_NBYTES)


def parse_arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--sizes", type=comma_separated(parse_size), default="4,64K,1M,16M", help="bytes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    installed = [ways_of for name, ways_of in FRAMEWORKS.items() if importlib.util.find_spec(name)]
    keep_freed_memory()
    with shmring.init() as comm:
        pin(comm)
        if jax_ways in installed:
            begin_jax(comm)
        rows = []
        for nbytes in options.sizes:
            x = np.ones(nbytes // 4, "f4")
            ways = numpy_ways(comm, x)
            for ways_of in installed:
                ways |= ways_of(comm, x)
            rows.append({"nbytes": nbytes, **in_turn(comm, ways, options.rounds)})
        if comm.rank == 0:
            print(f"{table(rows)}\n\n{state_of(comm)}", flush=True)
            if options.json:
                options.json.write_text(json.dumps({"where": state_of(comm), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
