"""The cost of an all_reduce inside a framework's compiled function, beside the communicator's own, in turn.

    shmrun -n 2 bench/torch/bench_frameworks.py --sizes 4,64K,16M

A program of ranks; it runs the ways of JAX and TensorFlow if they are installed. No way changes its input. A
time ends when the result is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
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


def plain_way(comm: shmring.Comm, x: np.ndarray) -> Way:
    out = np.empty_like(x)
    return lambda: comm.all_reduce(x, out=out)


def jax_way(comm: shmring.Comm, x: np.ndarray) -> Way:
    import jax

    from shmring.adapters import jax as adapter
    given, reduce = jax.numpy.asarray(x), jax.jit(lambda x: adapter.all_reduce(x, comm))
    return lambda: jax.block_until_ready(reduce(given))


def tensorflow_way(comm: shmring.Comm, x: np.ndarray) -> Way:
    import tensorflow as tf

    from shmring.adapters import keras as adapter
    given, reduce = tf.constant(x), tf.function(lambda x: adapter.all_reduce_grads([x], comm, "sum"))
    return lambda: reduce(given)[0].numpy()


FRAMEWORKS = {"jax": jax_way, "tensorflow": tensorflow_way}


def table(rows: list[dict[str, float]]) -> str:
    names = list(rows[0])[1:]
    lines = [f"| bytes | {' | '.join(f'{name} us' for name in names)} |", "|---" * (1 + len(names)) + "|"]
    for row in rows:
        lines.append(f"| {row['nbytes']} | {' | '.join(f'{row[name] * 1e6:.1f}' for name in names)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--sizes", type=comma_separated(parse_size), default="4,64K,16M", help="bytes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    installed = {name: way for name, way in FRAMEWORKS.items() if importlib.util.find_spec(name)}
    with shmring.init() as comm:
        pin(comm)
        rows = []
        for nbytes in options.sizes:
            x = np.ones(nbytes // 4, "f4")
            ways = {name: way(comm, x) for name, way in {"NumPy": plain_way, **installed}.items()}
            rows.append({"nbytes": nbytes, **in_turn(comm, ways, options.rounds)})
        if comm.rank == 0:
            print(f"{table(rows)}\n\n{state_of(comm)}", flush=True)
            if options.json:
                options.json.write_text(json.dumps({"where": state_of(comm), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
