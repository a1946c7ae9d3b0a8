"""DeepSpeed's ZeRO, stages 1 to 3, on CPUs."""

import logging

import deepspeed
import torch
from reporting import BACKEND, Stopwatch, report

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
deepspeed.init_distributed(dist_backend=BACKEND)
results, seconds = [], 0.0
for stage in (1, 2, 3):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    maker = torch.Generator().manual_seed(deepspeed.comm.get_rank())
    with Stopwatch() as watch:
        for _ in range(30):
            x = torch.randn(8, 64, generator=maker)
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
    seconds += watch.seconds
    results.append(loss.detach())
watch.seconds = seconds
report(results, watch)
deepspeed.comm.destroy_process_group()
