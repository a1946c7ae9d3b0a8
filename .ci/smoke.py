"""Smoke test of an installed shmring; argument: the checkout, which must not be what is imported."""

import os
import subprocess
import sys

import numpy as np

import shmring

TIME = "from time import perf_counter as t; import numpy; a = t(); import shmring; {}; print(t() - a)"


def shared_memory_names() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm") if entry.stat().st_uid == os.getuid()}


def work(comm: shmring.Comm) -> list[float]:
    x = np.full(1000, comm.rank + 1.0)
    comm.all_reduce(x)
    shared = comm.zeros(1 << 20, "f4")
    shared += comm.rank + 1
    comm.all_reduce(shared)
    return [float(x.min()), float(x.max()), float(shared.min()), float(shared.max())]


def import_time_ms(use: str) -> float:
    command = [sys.executable, "-c", TIME.format(use)]
    return 1e3 * min(float(subprocess.check_output(command)) for _ in range(5))


def main() -> None:
    checkout = os.path.realpath(sys.argv[1])
    installed = os.path.realpath(shmring.__file__)
    assert not installed.startswith(checkout + os.sep), installed
    before = shared_memory_names()
    for result in shmring.spawn(work, nprocs=2, timeout=60):
        assert result[:4] == [3.0] * 4, result
    left = shared_memory_names() - before
    assert not left, left
    print(f"shmring {shmring.__version__}: 2 ranks agree, nothing left in /dev/shm")
    bare, ready = import_time_ms("None"), import_time_ms("shmring.init, shmring.spawn")
    print(f"import shmring: {bare:.1f} ms over numpy's own, {ready:.1f} ms with what init and spawn load")


if __name__ == "__main__":
    main()
