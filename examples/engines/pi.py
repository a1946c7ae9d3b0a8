"""Estimate pi by random points, under any launcher; without one it is a single rank.

    shmrun -n 4 examples/engines/pi.py
    torchrun --nproc-per-node 4 examples/engines/pi.py
    mpiexec -n 4 python examples/engines/pi.py
    srun -n 4 python examples/engines/pi.py

Over several hosts all ranks need the same SHMRING_KEY, and under mpiexec also SHMRING_ADDR, rank 0's host.
"""

import sys

import numpy as np

import shmring

points = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000  # of each rank

with shmring.init() as comm:
    x, y = np.random.default_rng(comm.rank).random((2, points))
    hits = np.array([np.count_nonzero(x * x + y * y < 1)])
    comm.all_reduce(hits)
    if comm.rank == 0:
        pi = 4 * hits[0] / (points * comm.size)
        print(f"pi is about {pi:.3f}, say {comm.size} rank(s) on {comm.num_nodes} host(s)")
