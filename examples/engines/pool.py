"""Estimate pi in the processes of an existing pool: python examples/engines/pool.py"""

import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from shmring.adapters import pools


def estimate(comm, points):
    x, y = np.random.default_rng(comm.rank).random((2, points))
    hits = np.array([np.count_nonzero(x * x + y * y < 1)])
    comm.all_reduce(hits)
    return 4 * hits[0] / (points * comm.size)


if __name__ == "__main__":
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with ProcessPoolExecutor(4) as pool:  # or loky.get_reusable_executor(4)
        pi = pools.run(pool, estimate, 4, points)
    print(f"pi is about {pi[0]:.3f}, say {len(pi)} rank(s); all the same: {len(set(pi)) == 1}")
