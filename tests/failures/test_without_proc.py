"""Ranks in a sandbox whose /proc is not mounted, or numbers processes as another PID namespace does."""

import os
import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, os, signal, time
import numpy as np, shmring

def work(comm, dies):
    total = np.full(60_000, comm.rank + 1.0)
    comm.all_reduce(total)
    assert (total == 3).all()
    if comm.rank == 1:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2)
    else:
        comm.barrier(timeout=0.5)

def send_array():
    multiprocessing.SimpleQueue().put(shmring.share(np.ones(9)))

def send_ring():
    multiprocessing.SimpleQueue().put(shmring.Ring(4096))

def ranks(dies):
    error = shmring.spawn(work, 2, [dies], method="fork", timeout=30, return_exceptions=True)[0]
    raise error

for call in (lambda: ranks(True), lambda: ranks(False), send_array, send_ring):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
"""
SANDBOXES = {
    "of another namespace": ["unshare", "--pid", "--fork"],
    "not mounted": ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /proc && exec "$0" "$@"'],
}


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_errors_are_right_without_a_proc_of_this_namespace(sandbox):
    around = SANDBOXES[sandbox]
    if not shutil.which("unshare") or subprocess.run([*around, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and the right to make a namespace")
    command = [*around, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    dead, late, *sent = done.stdout.splitlines()
    assert dead.startswith("RankFailed rank 1"), done
    assert " died;" in dead
    assert late.startswith("Timeout rank 1"), done
    assert "it is alive, and not shown by /proc" in late
    assert len(sent) == 2
    assert all(line.startswith("Error shared arrays and rings need /proc") for line in sent), sent
