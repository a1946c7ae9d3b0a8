"""New ranks for `Comm.grow`, forked by a process that has imported shmring already."""

import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np

import shmring

RIGHT, ENDED, WRONG, WAITING = "right", "ended by an error", "wrong", "waiting"
_EXIT = {0: RIGHT, 2: ENDED, 3: WRONG, -signal.SIGKILL: WAITING}


def values_of(rank):
    """Return the input of each rank in the larger communicator."""
    return np.full(5, rank + 1.0)


class NewRanks:
    """The process that forks new ranks, one at a time. It ends with the process that has this object."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def invite(self, world, rank):
        """Fork a new rank, and kill the one before if it still waits."""
        os.write(self._process.stdin.fileno(), pickle.dumps((world, rank)).hex().encode() + b"\n")

    def end(self, wait_s=0.0):
        """Return how the last new rank has ended. It is killed if it has not ended after wait_s."""
        os.write(self._process.stdin.fileno(), f"end {wait_s}\n".encode())
        return self._process.stdout.readline().decode().strip()


def _join(world, rank):
    """Be a new rank; return its exit status."""
    try:
        with shmring.init(world, rank, timeout=60) as comm:
            x = values_of(rank)
            comm.all_reduce(x)
            wanted = sum(values_of(other) for other in range(comm.size))
            return 0 if (x == wanted).all() else 3
    except shmring.Error:
        return 2


def _end(child, wait_s):
    until = time.monotonic() + wait_s
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return _EXIT.get(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "crashed")


def _serve():
    child, ended = None, "never began"
    for line in sys.stdin.buffer:
        word, *wait_s = line.split()
        if child is not None:
            ended = _end(child, float(wait_s[0]) if wait_s else 0.0)
            child = None
        if wait_s:
            print(ended, flush=True)
        else:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    status = _join(*pickle.loads(bytes.fromhex(word.decode())))
                finally:
                    os._exit(status)
    if child is not None:
        _end(child, 0.0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve()
