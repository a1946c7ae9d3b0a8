"""Ranks whose kernel or seccomp profile lacks a system call. Without set_robust_list the kernel watches no
rank: init() warns, and the other ranks still see deaths. Without futex_waitv an idle rank sleeps as well."""

import ctypes
import logging
import multiprocessing
import os
import platform
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest

import shmring

FORK = multiprocessing.get_context("fork")
SET_ROBUST_LIST = {"x86_64": 273, "aarch64": 99}.get(platform.machine())
FUTEX_WAITV = 449  # on every machine
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # of classic BPF
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # and the errno
TIMEOUT_S = 100  # far beyond any watchdog: a death that is not seen hangs the test

if SET_ROBUST_LIST is None:
    pytest.skip("does not know this machine's system calls", allow_module_level=True)


class Filter(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("count", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def refuse(call):
    """From here on the kernel refuses this system call to this process."""
    steps = [
        (LOAD, 0, 0, 0),
        (JUMP_IF_EQUAL, 0, 1, call),
        (RETURN, 0, 0, REFUSE | 38),  # ENOSYS
        (RETURN, 0, 0, ALLOW),
    ]
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    kept = ctypes.create_string_buffer(program)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    asked = Filter(len(steps), ctypes.addressof(kept))
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(asked), 0, 0) == 0


class Kept(logging.Handler):
    """A handler that keeps the messages."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def in_a_call(comm, first):
    comm.all_reduce(np.ones(4))


def in_the_background(comm, first):
    comm.all_reduce(np.ones(4), async_op=True).wait()


def in_a_message(comm, first):
    comm.recv(np.ones(4), source=1)


def in_a_lock(comm, array):
    with array.lock(0):
        pass


def in_shrink(comm, first):
    with pytest.raises(shmring.Aborted):
        comm.abort("enough") or comm.barrier()
    assert comm.shrink().size == 1
    raise shmring.RankFailed("as expected", rank=1)


def live(world, rank, refused, where, pipe):
    if rank in refused:
        refuse(SET_ROBUST_LIST)
    log = Kept()
    logging.getLogger("shmring").addHandler(log)
    comm = shmring.init(world, rank=rank, timeout=TIMEOUT_S)
    array = comm.shared(8, locks=1)
    if rank == 1 and where is in_a_lock:
        array.lock(0).__enter__()
    comm.barrier()
    if rank == 1:
        pipe.send(log.messages)
        signal.pause()
    try:
        pipe.send(log.messages)
        where(comm, array)
    except shmring.Error as error:
        pipe.send((type(error), error.rank))


@pytest.mark.parametrize("where", [in_a_call, in_the_background, in_a_message, in_a_lock, in_shrink])
@pytest.mark.parametrize("refused", [(0, 1), (1,), (0,)], ids=str)
def test_a_death_is_seen_and_that_it_is_looked_for_is_reported(refused, where):
    world = shmring.world(2)
    ends, processes = [], []
    for rank in range(2):
        ours, theirs = FORK.Pipe()
        ends.append(ours)
        arguments = world, rank, refused, where, theirs
        processes.append(FORK.Process(target=live, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
    for rank, end in enumerate(ends):
        messages = end.recv()
        assert len(messages) == (rank in refused)
        assert all("refuses set_robust_list" in line for line in messages)
    os.kill(processes[1].pid, signal.SIGKILL)  # it is a zombie when rank 0 is to see its death
    assert ends[0].recv() == (shmring.RankFailed, 1)
    for process in processes:
        process.join()


def sleeps_begun():
    """Return how often the threads of this process have gone to sleep so far."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
        count += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return count


def rest_without_futex_waitv(pipe):
    refuse(FUTEX_WAITV)
    with shmring.init(shmring.world(1), rank=0) as comm:
        comm.all_reduce(np.ones(100_000), async_op=True).wait()  # starts the thread in the background
        before = sleeps_begun()
        time.sleep(1)
        pipe.send(sleeps_begun() - before)


def test_the_thread_in_the_background_rests_without_futex_waitv():
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=rest_without_futex_waitv, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() < 100
    process.join()
