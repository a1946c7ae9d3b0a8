"""DistributedDataParallel with uneven inputs, the sharded optimizer, and PowerSGD."""

import torch
import torch.distributed as dist
from reporting import BACKEND, Stopwatch, report
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(BACKEND)
rank = dist.get_rank()


def train(*, sharded=False, compressed=False, uneven=False):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.05, find_unused_parameters=uneven)
    if compressed:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=5)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-3)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    maker = torch.Generator().manual_seed(rank)
    with Join([ddp, optimizer] if sharded else [ddp], enable=uneven):
        for _ in range(30 + (10 * rank if uneven else 0)):
            optimizer.zero_grad()
            ddp(torch.randn(8, 64, generator=maker)).square().mean().backward()
            optimizer.step()
    return [one.detach().mean() for one in net.parameters()]


with Stopwatch() as watch:
    results = [
        *train(),
        *train(uneven=True),
        *train(sharded=True),
        *train(sharded=True, uneven=True),
        *train(compressed=True),
    ]
report(results, watch)
dist.destroy_process_group()
