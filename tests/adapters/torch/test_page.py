"""The code of docs/howto/torch.md runs as printed."""

import os

import pages
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from ranks import free_port
from torch.nn.parallel import DistributedDataParallel

from shmring.adapters.torch import register_backend

PAGE = pages.ROOT / "docs" / "howto" / "torch.md"


def run_blocks(comm, page):
    """Run each block with names of its own, in one process group; return the gradients of their models."""
    register_backend()  # if shmring is only on the path, not installed
    port = comm.broadcast_object(free_port())
    place = {"RANK": comm.rank, "WORLD_SIZE": comm.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    gradients = []
    try:
        for block in (block for block in pages.blocks(page) if block.how.get("in") == "torch"):
            torch.manual_seed(0)
            names = {"model": torch.nn.Linear(3, 1, bias=False)}
            names["DistributedDataParallel"] = DistributedDataParallel
            exec(block.code, names)
            for _ in range(3):  # the second step's buckets are sorted anew, the third's stay
                names["model"].zero_grad()
                names["model"](torch.full((1, 3), float(comm.rank))).sum().backward()
            gradients.append(names["model"].module.weight.grad.tolist())
    finally:
        dist.destroy_process_group()
    return gradients


@pytest.mark.skipif(not PAGE.is_file(), reason="needs the checkout")
def test_the_code_of_the_page_runs(three):
    assert three(run_blocks, PAGE) == [[[[1.0, 1.0, 1.0]]] * 2] * 3
