"""The common part of the programs of this folder. At their end, rank 0 prints one line of JSON."""

import json
import os
import time

import torch
import torch.distributed as dist

BACKEND = os.environ.get("CLIENT_BACKEND", "gloo")

torch.set_num_threads(1)
torch.manual_seed(0)


class Stopwatch:
    """The seconds of a block, of which all ranks see the beginning."""

    def __enter__(self):
        dist.barrier()
        self._began_s = time.perf_counter()
        return self

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self._began_s


def report(result, watch):
    """result: numbers, or tensors, that have to be the same with every backend."""
    numbers = [
        value for one in result for value in torch.as_tensor(one, dtype=torch.float64).reshape(-1).tolist()
    ]
    if int(os.environ["RANK"]) == 0:
        group = dist.group.WORLD
        line = {"kind": type(group).__name__, "backend": dist.get_backend(group)}
        print("\n" + json.dumps(line | {"result": numbers, "seconds": watch.seconds}), flush=True)
    dist.barrier()  # gloo aborts a rank whose peer ends first, so the line comes before
