"""torch.distributed.pipelining: two stages, with two schedules."""

import torch
import torch.distributed as dist
from reporting import BACKEND, Stopwatch, report
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dist.init_process_group(BACKEND)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
losses = []
with Stopwatch() as watch:
    for schedule in (ScheduleGPipe, Schedule1F1B):
        stage = PipelineStage(net, rank, size, torch.device("cpu"))
        steps = schedule(stage, n_microbatches=8, loss_fn=torch.nn.functional.mse_loss)
        for _ in range(40):
            optimizer.zero_grad()
            if rank == 0:
                steps.step(x)
            elif rank == size - 1:
                steps.step(target=x, losses=losses)
            else:
                steps.step()
            optimizer.step()
last = torch.stack(losses[-8:]).mean() if losses else torch.zeros(())
dist.broadcast(last.detach_(), size - 1)
report([last, *(one.detach().mean() for one in net.parameters())], watch)
dist.destroy_process_group()
