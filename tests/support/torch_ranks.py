"""Ranks in a process group of torch.distributed, with shmring or with gloo, and the results of both."""

import contextlib
import datetime
import functools
import os
import signal
import textwrap
import time

import numpy as np
import torch
import torch.distributed as dist
from engines import environment
from ranks import FORK, Died, free_port
from torch.utils import _pytree as pytree
from waiting import counted_s

from shmring.adapters.torch import register_backend

LIMIT_S = 20
NEWS_S = 10  # time in which the survivors learn of a death, on a machine that stalls at times


def of_backend(ranks, backend, function, *args):
    """Return by rank the result of function(rank, *args) in a process group, with tensors as arrays."""
    return ranks(_in_group, backend, function, args)


def of_both(ranks, function, *args, rtol=1e-6):
    """Return by rank the result on shmring, after comparing it with gloo's."""
    ours = of_backend(ranks, "shmring", function, *args)
    assert_same(ours, of_backend(ranks, "gloo", function, *args), rtol)
    return ours


def assert_same(found, expected, rtol=1e-6):
    """Structures of one shape with numbers that are close to each other."""
    (ours, shape), (theirs, expected_shape) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert shape == expected_shape, (found, expected)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, (np.ndarray, float)):
            np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)
        else:
            assert one == other, (found, expected)


def _in_group(comm, backend, function, args):
    with group_of(comm, backend):
        return pytree.tree_map_only(torch.Tensor, as_array, function(comm.rank, *args))


@contextlib.contextmanager
def group_of(comm, backend="shmring", *, seconds=LIMIT_S):
    """The ranks' default process group."""
    register_backend()  # if shmring is only on the path, not installed
    torch.set_num_threads(1)
    torch.manual_seed(0)
    limit = datetime.timedelta(seconds=seconds)
    there = f"tcp://127.0.0.1:{comm.broadcast_object(free_port())}"
    dist.init_process_group(backend, there, rank=comm.rank, world_size=comm.size, timeout=limit)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def as_array(tensor):
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy().copy()


ENTRY = """
    [torch.backends]
    shmring = shmring.adapters._torch.entry:register

    [torch.distributed.backends]
    shmring = shmring.adapters._torch.entry:register

    [vllm.platform_plugins]
    shmring = shmring.adapters.vllm:platform_plugin
"""


def as_if_installed(folder):
    """Return an environment for processes in which torch and vLLM find shmring by its entry points."""
    there = folder / "site" / "shmring-0.dist-info"
    there.mkdir(parents=True)
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: shmring\nVersion: 0\n")
    (there / "entry_points.txt").write_text(textwrap.dedent(ENTRY))
    return {"PYTHONPATH": f"{there.parent}:{environment()['PYTHONPATH']}"}


def in_child(function):
    """Decorate a function that trains without ranks: run it in a forked process, and return its arrays.

    A build of torch for CUDA refuses autograd in processes that are forked after this one has used it.
    """

    def run(pipe, *arguments):
        torch.set_num_threads(1)  # a forked process waits for ever for this one's threads, if it has some
        pipe.send(function(*arguments))

    @functools.wraps(function)
    def call(*arguments):
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=run, args=(theirs, *arguments))
        process.start()
        theirs.close()
        try:
            return ours.recv()
        finally:
            process.join()
            ours.close()

    return call


# ---- deaths -----------------------------------------------------------------------------------------------


def die(path):
    """End this process as the kernel does when memory runs out; the file has the time."""
    time.sleep(0.2)  # the others wait for this rank
    path.write_text(str(counted_s()))
    os.kill(os.getpid(), signal.SIGKILL)


def news_of_death(ranks, path, function, *args):
    """Return by surviving rank the error of function(rank, path, *args) after the last rank has called
    die(path)."""
    *survivors, dead = ranks.outcomes(_failure_in_group, function, (path, *args))
    assert isinstance(dead, Died), dead
    assert dead.exitcode == -signal.SIGKILL
    died_s = float(path.read_text())
    for error, at_s in survivors:
        assert at_s - died_s < NEWS_S, error
    return [error for error, _ in survivors]


def _failure_in_group(comm, function, args):
    """Return the error that the function raised, as text, and the time."""
    with group_of(comm):
        try:
            function(comm.rank, *args)
        except Exception as error:
            return f"{type(error).__name__}: {error}", counted_s()
    raise AssertionError("nobody died")
