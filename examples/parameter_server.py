"""A parameter server trains train_digits.py's network: synchronous, sharded, and asynchronous.

    shmrun -n 4 examples/parameter_server.py                 every rank works
    shmrun -n 4 examples/parameter_server.py --dedicated 1   rank 0 only serves

At some steps a worker is slow, on purpose. A synchronous server makes all the others wait for it. With
bounded staleness (SSP) the others go on, but no further ahead of the slowest than --staleness steps. The same
training by all_reduce runs for comparison.
"""

import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the ranks are the parallelism

import numpy as np
from terminal import Parser, at_least, positive, with_progress
from train_digits import count_weights, forward, initialise, load_data, sum_gradient

import shmring
from shmring.methods.rules import SGD, apply, scratch_for
from shmring.methods.server import ParameterServer

ACCURATE, STALE = 0.95, 0.90  # of held-out digits: synchronous, and with stale weights
SLOW = 0.25  # of all steps


class AllReduce:
    """The same interface without a server: the bits that `step` of a synchronous server has to reach."""

    most_ahead = 0

    def __init__(self, workers, weights, rule, serves):
        self.comm, self.rule, self.serves, self.steps = workers, rule, serves, 0
        self.state = [np.zeros_like(weights) for _ in range(rule.num_states)]
        self.scratch = scratch_for(weights.dtype)

    def serve(self):
        """Do nothing: there is no server."""

    def step(self, gradient, weights):
        self.comm.all_reduce(gradient)
        self.steps += 1
        apply(self.rule, weights, gradient, self.state, self.scratch, self.steps)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def batches(images, args, worker, workers):
    """Yield each worker's own shard of every batch of the shuffled images, epoch after epoch."""
    shuffle = np.random.default_rng(args.seed + 1)
    while True:
        order = shuffle.permutation(len(images))
        for start in range(0, len(order) - args.batch + 1, args.batch):
            yield order[start : start + args.batch][worker::workers]


def train(server, weights, data, args, worker, workers, steps):
    """Return the seconds of the steps; `weights` are the last ones pulled."""
    images, labels = data
    gradient = np.empty_like(weights)
    shards = batches(images, args, worker, workers)
    slow = np.random.default_rng((args.seed, worker))
    began = time.perf_counter()
    for _ in steps:
        shard = next(shards)
        sum_gradient(gradient, weights, images[shard], labels[shard], args.hidden)
        gradient /= args.batch
        if slow.random() < SLOW:
            time.sleep(args.slow_ms / 1000)  # on top of its computing time
        server.step(gradient, weights)
    return time.perf_counter() - began


def run(comm, workers, way, make, data, held_out, args):
    """Train one way; return, on every rank, its line of the table and the weights' bytes."""
    weights = np.empty(count_weights(args.hidden))
    initialise(weights, args.hidden, args.seed)
    took_s = 0.0
    with make(weights) as server:
        if server.serves:
            server.serve()
        else:
            steps = with_progress(args.steps, workers.rank, way, "step")
            took_s = train(server, weights, data, args, workers.rank, workers.size, steps)
            workers.barrier()  # every gradient has arrived
            if isinstance(server, ParameterServer):
                server.pull(weights)
    rates = [args.steps / seconds for seconds in comm.all_gather_object(took_s) if seconds]
    ahead = max(comm.all_gather_object(server.most_ahead))
    weights = comm.broadcast_object(weights, comm.size - 1)  # from a rank that works in every way
    images, labels = held_out
    accuracy = np.mean(forward(weights, images, args.hidden)[1].argmax(axis=1) == labels)
    return {"accuracy": accuracy, "ahead": ahead, "fastest": max(rates), "bytes": weights.tobytes()}


def ways_of(comm, workers, args):
    """Return, by name, a function that makes a server of the weights it is given."""
    momentum = SGD(args.lr, 0.9)
    plain = SGD(args.lr)  # where weights are stale: staleness acts as a momentum itself
    servers = list(range(args.dedicated)) or 1

    def make(rule=momentum, **how):
        return lambda weights: ParameterServer(comm, weights, rule, **how)

    ways = {
        "all_reduce": lambda weights: AllReduce(workers, weights, momentum, comm.rank < args.dedicated),
        "synchronous": make(servers=servers),
    }
    if not args.dedicated:
        ways["synchronous, sharded"] = make(servers=comm.size)
    if args.dedicated or comm.num_nodes == 1:
        ways["asynchronous"] = make(plain, servers=servers, staleness=args.staleness)
    return ways


def passed(found, args, in_rank_order):
    """Print the table; return whether all of it is as expected.

    in_rank_order: True if all_reduce folds in rank order, as servers do. Over several hosts it folds each
    host first.
    """
    print(
        "| way | accuracy | most steps ahead | steps/s of the fastest | / all_reduce |\n|---|---|---|---|---|"
    )
    right = True
    for way, line in found.items():
        ratio = line["fastest"] / found["all_reduce"]["fastest"]
        print(f"| {way} | {line['accuracy']:.3f} | {line['ahead']} | {line['fastest']:,.0f} | {ratio:.2f} |")
        right &= line["accuracy"] >= (STALE if way == "asynchronous" else ACCURATE)
        right &= line["ahead"] <= (args.staleness if way == "asynchronous" else 0)
    if in_rank_order:
        same = len({line["bytes"] for way, line in found.items() if way != "asynchronous"}) == 1
        print(f"synchronous weights bit-identical to those by all_reduce: {'yes' if same else 'NO'}")
        right &= same
    return bool(right)


def parse_arguments():
    parser = Parser(description="A parameter server trains on handwritten digits.")
    parser.add_argument("--steps", type=at_least(1), default=2000, help="of every worker")
    parser.add_argument("--batch", type=at_least(1), default=64, help="samples in a step, over all workers")
    parser.add_argument("--lr", type=positive, default=0.1, help="learning rate")
    parser.add_argument("--hidden", type=at_least(1), default=128, help="width of the hidden layer")
    parser.add_argument(
        "--staleness", type=at_least(1), default=4, help="steps ahead of the slowest, at most"
    )
    parser.add_argument("--slow-ms", type=float, default=2.0, help="by which some steps are longer")
    parser.add_argument("--dedicated", type=at_least(0), default=0, help="ranks that do nothing but serve")
    parser.add_argument("--seed", type=at_least(0), default=1)
    return parser.parse_args()


def main():
    args = parse_arguments()
    with shmring.init() as comm:
        if args.dedicated >= comm.size:
            sys.exit(f"--dedicated {args.dedicated} of {comm.size} rank(s) leaves nobody to work")
        data, held_out = comm.broadcast_object(load_data() if comm.rank == 0 else None)
        workers = comm.split(int(comm.rank < args.dedicated))
        found = {}
        for way, make in ways_of(comm, workers, args).items():
            found[way] = run(comm, workers, way, make, data, held_out, args)
        rank, size = comm.rank, comm.size
        in_rank_order = comm.broadcast_object(workers.num_nodes in (1, workers.size), size - 1)
    if rank == 0:
        print(f"{size} rank(s), {args.dedicated} of which only serve(s)")
        if not passed(found, args, in_rank_order):
            sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
