"""Data-parallel training in PyTorch: a small CNN on real handwritten digits, under DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/torch_ddp.py --backend shmring     two ranks
    torchrun --nproc-per-node 2 examples/torch_ddp.py --backend gloo        the same through gloo
    torchrun --nproc-per-node 2 examples/torch_ddp.py --share-buckets       reduced where they lie
    python examples/torch_ddp.py                                            one rank, the same losses

Only the name of the backend differs. Without --share-buckets the program imports nothing of shmring: torch
finds an installed shmring by itself (pip install '.[torch,examples]').

The cost of communication is measured after the training. Steps of the trained network alternate with steps of
a copy whose communication hook sends nothing, so each rank keeps its own gradients. Each step is timed from a
common start to the end of the slowest rank. The share of communication is the difference of the two medians
over the time of the whole step. It does not include communication that is hidden behind the backward pass.
"""

import copy
import os
import statistics
import sys
from time import perf_counter

import torch
import torch.distributed as dist
from digits import DIGITS, load
from terminal import Parser, at_least, positive, with_progress
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

HELD_OUT = 360
MOMENTUM = 0.9
WARM_UP = 5  # steps: DDP sorts its buckets anew after the first


def load_data():
    """Return training and held-out images (in 0…1) and labels, split the same way on every rank."""
    images, labels = map(torch.from_numpy, load())
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(2026))
    images, labels = images[order].float().div(16).reshape(-1, 1, 8, 8), labels[order]
    return (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])


def make_network(width, seed):
    """Return two convolutions of `width` and twice as many channels, and two linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(2 * width * 16, 4 * width), nn.ReLU(), nn.Linear(4 * width, DIGITS)),
    )


def parallel(network, args, hook=None):
    """Return the network as DDP trains it, with gradients to a hook if there is one, and its optimizer."""
    model = DistributedDataParallel(network, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True)
    if hook is not None:
        model.register_comm_hook(None, hook)
    elif args.share_buckets:
        from shmring.adapters.torch import share_buckets

        share_buckets(model)
    return model, torch.optim.SGD(model.parameters(), args.lr, MOMENTUM)


def shards(data, args):
    """Yield for ever this rank's part of each batch, in an order that is the same on every rank."""
    images, labels = data
    shuffle = torch.Generator().manual_seed(args.seed + 1)
    rank, size = dist.get_rank(), dist.get_world_size()
    while True:
        order = torch.randperm(len(images), generator=shuffle)
        for batch in order.split(args.batch)[: steps_per_epoch(data, args)]:
            yield images[batch[rank::size]], labels[batch[rank::size]]


def steps_per_epoch(data, args):
    return len(data[0]) // args.batch  # the rest is left out, so that every rank has the same number


def step(model, optimizer, images, labels):
    """Make one step of training; return its loss over this rank's shard."""
    optimizer.zero_grad(set_to_none=False)  # the gradients stay where DDP has put them: in its buckets
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model, optimizer, data, steps, args):
    """Return loss and seconds of each step; the losses are those of the whole batches."""
    losses, seconds = [], []
    for _, (images, labels) in zip(steps, shards(data, args), strict=False):
        began = perf_counter()
        losses.append(step(model, optimizer, images, labels))
        seconds.append(perf_counter() - began)
    of_batches = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(of_batches)
    return (of_batches / dist.get_world_size()).tolist(), seconds


def keep_local(_, bucket):
    """Send nothing, and divide as DDP does without a hook: a communication hook."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


def communication_share(network, data, args):
    """Return the part of a step's time that it does not need if nothing is sent."""
    talking, silent = (parallel(copy.deepcopy(network), args, hook) for hook in (None, keep_local))
    images, labels = next(shards(data, args))
    seconds = {talking: [], silent: []}
    for _ in range(WARM_UP + args.repeats):
        for model, optimizer in seconds:
            dist.barrier()  # so that no rank's time includes the others' previous step
            began = perf_counter()
            step(model, optimizer, images, labels)
            seconds[model, optimizer].append(perf_counter() - began)
    with_it_s, without_s = (slowest_median(found[WARM_UP:]) for found in seconds.values())
    return 1.0 - without_s / with_it_s


def slowest_median(seconds):
    """Return the median over steps of the slowest rank's time."""
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.median().item()


@torch.no_grad()
def accuracy(network, held_out):
    images, labels = held_out
    return (network(images).argmax(dim=1) == labels).double().mean().item()


def checksum(network):
    """Return one number that tells whether two runs came to the same weights, but for rounding."""
    return sum(weights.double().abs().sum().item() for weights in network.parameters())


def join(backend):
    """Join the ranks that torchrun started, or a world of one without it; return this rank's place."""
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def parse_arguments():
    parser = Parser(description="DistributedDataParallel on handwritten digits.")
    add = parser.add_argument
    add("--backend", choices=("gloo", "shmring"), default="shmring")
    add("--epochs", type=at_least(1), default=20)
    add("--steps", type=at_least(1), help="of training; takes the place of --epochs")
    add("--batch", type=at_least(1), default=64, help="samples in a step, over all ranks (%(default)s)")
    add("--width", type=at_least(1), default=16, help="channels of the first layer (%(default)s)")
    add("--bucket-mb", type=positive, default=25, help="of gradients that are sent together (%(default)s)")
    add("--share-buckets", action="store_true", help="in memory that all ranks of the host map; with shmring")
    add("--repeats", type=at_least(0), default=100, help="steps behind communication's share (%(default)s)")
    add("--lr", type=positive, default=0.02, help="learning rate (%(default)s)")
    add("--seed", type=at_least(0), default=1)
    return parser.parse_args()


def run(data, held_out, args):
    """Train, measure, and print the results on rank 0."""
    if args.batch % dist.get_world_size() or not 0 < args.batch <= len(data[0]):
        sys.exit(f"--batch {args.batch}: a multiple of the ranks and at most {len(data[0])}, please")
    network = make_network(args.width, args.seed)
    model, optimizer = parallel(network, args)
    nsteps = args.steps or args.epochs * steps_per_epoch(data, args)
    steps = with_progress(nsteps, dist.get_rank(), "training", "step")
    losses, seconds = train(model, optimizer, data, steps, args)
    reached, weights = accuracy(network, held_out), checksum(network)
    share = communication_share(network, data, args) if args.repeats else 0.0
    if dist.get_rank() == 0:
        nbytes = sum(4 * parameter.numel() for parameter in network.parameters())
        print(f"{args.backend}, {dist.get_world_size()} rank(s), {nbytes / 2**20:.2f} MiB of gradients")
        print(f"loss first {losses[0]:.6f}, last {losses[-1]:.6f}")
        print(f"accuracy {reached:.3f} on {len(held_out[1])} held-out digits")
        print(f"step {1e3 * statistics.median(seconds):.3f} ms (median of {nsteps})")
        print(f"communication {share:.1%} of a step")
        print(f"checksum of the weights {weights:.6f}")


def main():
    args = parse_arguments()
    torch.set_num_threads(1)  # the ranks are the parallelism
    data, held_out = load_data()
    join(args.backend)
    try:
        run(data, held_out, args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
