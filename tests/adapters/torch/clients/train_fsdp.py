"""FSDP2 with checkpoints of torch.distributed.checkpoint, saved also in the background."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from reporting import BACKEND, Stopwatch, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group(f"cpu:{BACKEND}")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def new_net():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 128) for _ in range(4)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    net = torch.nn.Sequential(*layers)
    fully_shard(net, mesh=mesh)
    return net


net = new_net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
maker = torch.Generator().manual_seed(dist.get_rank())
with Stopwatch() as watch:
    for step in range(60):
        optimizer.zero_grad()
        loss = net(torch.randn(16, 128, generator=maker)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step in (20, 40):
            saving = dcp.async_save({"net": net.state_dict()}, checkpoint_id=f"{sys.argv[1]}/{step}")
            saving.result()
    dcp.save({"net": net.state_dict()}, checkpoint_id=f"{sys.argv[1]}/last")
other = new_net()
state = {"net": other.state_dict()}
dcp.load(state, checkpoint_id=f"{sys.argv[1]}/last")
other.load_state_dict(state["net"])
for one, loaded in zip(net.parameters(), other.parameters(), strict=True):
    assert torch.equal(one.full_tensor(), loaded.full_tensor())
report([loss.detach(), *(one.detach().full_tensor().mean() for one in net.parameters())], watch)
dist.destroy_process_group()
