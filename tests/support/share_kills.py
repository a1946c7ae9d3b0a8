"""Kill senders and receivers of shared arrays at random moments: `python share_kills.py KILLS [SEED]`.

A sender shares arrays and sends them to a receiver, which sends them on to this process. One of the two
is killed. Every array that comes must have its right contents, and in the end no process and no shared
memory may be left.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import random
import sys
import threading
import time

import numpy as np

import shmring

PR_SET_CHILD_SUBREAPER = 36
LIMIT_S = 20
BATCH = 50
SIZES = (10, 1000, 100_000)


def send(into, seed, *others):
    close(others)
    dice = random.Random(seed)
    shmring.keep_shared(dice.choice([0, 1 << 20]))
    with contextlib.suppress(BrokenPipeError):  # the receiver was killed
        for number in range(1 << 30):
            into.send((number, shmring.share(np.full(dice.choice(SIZES), number)), number))


def pass_on(source, into, *others):
    close(others)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            with contextlib.suppress(shmring.Error):  # of an array whose sender was killed
                number, array, again = source.recv()
                assert (array == number).all()
                into.send((number, array[::-1], again))


def close(connections):
    for connection in connections:  # inherited by fork, they would hide the end of a pipe
        connection.close()


def trial(dice):
    """Kill one of two processes; return the number of arrays that came, and of those that were lost."""
    context = multiprocessing.get_context("fork")
    first, into_second = context.Pipe(duplex=False)
    last, into_last = context.Pipe(duplex=False)
    pair = [
        context.Process(target=send, args=(into_second, dice.random(), first, last, into_last)),
        context.Process(target=pass_on, args=(first, into_last, into_second, last)),
    ]
    for process in pair:
        process.start()
    close([first, into_second, into_last])
    victim, came, lost = dice.choice(pair), 0, 0
    timer = threading.Timer(dice.random() * 0.05, victim.kill)
    timer.start()
    while last.poll(LIMIT_S):
        try:
            number, array, again = last.recv()
        except EOFError:  # the receiver has ended: it was killed, or its sender was
            break
        except shmring.Error:
            lost += 1
        else:
            came += 1
            assert number == again
            assert (array == number).all()
    else:
        sys.exit(f"nothing came for {LIMIT_S} s")
    timer.join()
    last.close()
    for process in pair:
        process.join(LIMIT_S)
        if process.exitcode is None:
            sys.exit("a process does not end")
        process.close()
    return came, lost


def main():
    kills, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    # Processes that others leave behind become children of this one.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    dice = random.Random(seed)
    came = lost = 0
    for first in range(0, kills, BATCH):
        found = in_another_process(min(BATCH, kills - first), dice.random())
        came, lost = came + found[0], lost + found[1]
        check_that_no_process_is_left()
    if not came:
        sys.exit("no array ever came")
    print(f"{kills} kills: {came} arrays came, {lost} were lost with their sender")


def in_another_process(count, seed):
    """Run trials in a process whose end is also that of the processes that keep what was not loaded."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=trials, args=(count, seed, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        sys.exit("a trial failed")
    finally:
        process.join()


def trials(count, seed, result):
    dice = random.Random(seed)
    shmring.share(seed)  # imported here, so that children have it at once
    found = [trial(dice) for _ in range(count)]
    gc.collect()
    shmring.shared_zeros(1)
    left = [name for name in map(target, os.listdir("/proc/self/fd")) if name.startswith("/memfd:shmring")]
    assert not left, left
    result.send(tuple(map(sum, zip(*found, strict=True))))


def target(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def check_that_no_process_is_left():
    deadline_s = time.monotonic() + LIMIT_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline_s:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
        sys.exit("a process is left")


if __name__ == "__main__":
    main()
