"""Estimate pi on Dask's workers: python examples/engines/dask_workers.py [scheduler's address]

It takes Dask: pip install '.[dask]'
"""

import sys

import numpy as np
from distributed import Client, LocalCluster

from shmring.adapters import dask


def estimate(comm, points):
    x, y = np.random.default_rng(comm.rank).random((2, points))
    hits = np.array([np.count_nonzero(x * x + y * y < 1)])
    comm.all_reduce(hits)
    return 4 * hits[0] / (points * comm.size)


def cluster():
    if len(sys.argv) > 1:
        return sys.argv[1]
    return LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None)


if __name__ == "__main__":
    with Client(cluster()) as client:
        pi = dask.run(client, estimate, 1_000_000)
        print(f"pi is about {pi[0]:.3f}, say {len(pi)} rank(s); all the same: {len(set(pi)) == 1}")
        client.shutdown()
