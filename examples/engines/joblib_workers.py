"""Estimate pi in joblib's workers: python examples/engines/joblib_workers.py"""

import sys

import numpy as np

from shmring.adapters import joblib


def estimate(comm, points):
    x, y = np.random.default_rng(comm.rank).random((2, points))
    hits = np.array([np.count_nonzero(x * x + y * y < 1)])
    comm.all_reduce(hits)
    return 4 * hits[0] / (points * comm.size)


if __name__ == "__main__":
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    pi = joblib.run(estimate, 3, points)
    print(f"pi is about {pi[0]:.3f}, say {len(pi)} rank(s); all the same: {len(set(pi)) == 1}")
