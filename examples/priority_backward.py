"""A backward pass whose first layers are needed first: gradients reduced as they come, or by priority.

    shmrun -n 2 examples/priority_backward.py       two ranks
    python examples/priority_backward.py            one rank, the same weights but for rounding

A network learns handwritten digits. The backward pass produces the gradients of the last layers first; they
are summed over the ranks in the background. The next forward pass needs the weights of the first layer first,
and waits for one layer at a time. There are two ways, from the same start, step by step in turn:

    as they come   all_reduce(gradient, async_op=True): the first layer's gradient is behind all others
    by priority    all_reduce(gradient, async_op=True, priority=...): an earlier layer has a greater priority,
                   so the gradient that the forward pass needs next overtakes the ones it needs later
                   (ByteScheduler, Peng et al. 2019; P3, Jayarajan et al. 2019)

The order changes no bits: both ways come to the same weights, to the last bit. Like most networks this one
has more to send of its last layers than of its first: their width grows. The gain depends on the time to send
the gradients compared with the time to compute: none if sending is immediate, most over a slow link. So only
the ratio is printed.
"""

import hashlib
import os
import sys
from itertools import pairwise
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the ranks are the parallelism

import numpy as np
from digits import DIGITS, IMAGES, PIXELS, load_once
from terminal import Parser, at_least, positive, with_progress

import shmring

ALLOWED = 1e-5  # difference of weights from the run of one rank


def as_they_come(comm, gradient, layer):
    return comm.all_reduce(gradient, async_op=True)


def by_priority(comm, gradient, layer):
    return comm.all_reduce(gradient, async_op=True, priority=-layer)


def alone(comm, gradient, layer):
    return None


WAYS = {"as they come": as_they_come, "by priority": by_priority}


class Training:
    """The weights of one way after some steps. A layer's weights are updated when they are needed."""

    def __init__(self, way, data, args):
        self.way, self.data, self.args = way, data, args
        rng = np.random.default_rng(args.seed)
        widths = [PIXELS, *[args.width * (layer + 1) for layer in range(args.layers)], DIGITS]
        self.weights = [rng.standard_normal(shape) / np.sqrt(shape[0]) for shape in pairwise(widths)]
        self.gradients = [np.zeros_like(weight) for weight in self.weights]
        self.works = [None] * len(self.weights)  # the works of the last step's gradients
        self.is_behind = False  # True while the weights lack those gradients
        self.shuffle = np.random.default_rng(args.seed + 1)  # the same order on every rank
        self.seconds = []

    def updated(self, layer):
        """Return the weights of a layer, once its gradient of the previous step is there."""
        if self.works[layer] is not None:
            self.works[layer].wait()
            self.works[layer] = None
        if self.is_behind:
            self.weights[layer] -= self.args.lr / self.args.batch * self.gradients[layer]
        return self.weights[layer]

    def step(self, comm, rank, size):
        images, labels = self.data
        mine = self.shuffle.choice(len(images), self.args.batch, replace=False)[rank::size]
        inputs, error = self.forward(images[mine])
        error[np.arange(len(mine)), labels[mine]] -= 1.0
        for layer in reversed(range(len(self.weights))):
            np.matmul(inputs[layer].T, error, out=self.gradients[layer])
            self.works[layer] = self.way(comm, self.gradients[layer], layer)
            if layer:
                error = (error @ self.weights[layer].T) * (1.0 - inputs[layer] ** 2)
        self.is_behind = True

    def forward(self, images):
        """Return the input of each layer, and last the probability of each digit."""
        inputs = [images]
        for layer in range(len(self.weights) - 1):
            inputs.append(np.tanh(inputs[-1] @ self.updated(layer)))
        scores = inputs[-1] @ self.updated(len(self.weights) - 1)
        self.is_behind = False
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return inputs, scores / scores.sum(axis=1, keepdims=True)

    def loss(self):
        images, labels = self.data
        _, probabilities = self.forward(images)
        return -np.log(probabilities[np.arange(len(labels)), labels]).mean()

    def checksum(self):
        return hashlib.sha256(b"".join(weight.tobytes() for weight in self.weights)).hexdigest()[:16]


def measure(comm, trainings, steps):
    """Train both ways in turn, some steps each without a barrier; each records its own seconds."""
    for number in with_progress(steps, comm.rank, "training", "round"):
        for training in list(trainings.values())[:: -1 if number % 2 else 1]:
            comm.barrier()
            began = perf_counter()
            for _ in range(training.args.steps):
                training.step(comm, comm.rank, comm.size)
            training.seconds.append(perf_counter() - began)


def slowest_medians(comm, trainings):
    """Return the median over rounds of the slowest rank's seconds, by way."""
    seconds = np.array([training.seconds for training in trainings.values()])
    comm.all_reduce(seconds, op="max")
    return dict(zip(trainings, np.median(seconds, axis=1).tolist(), strict=True))


def passed(trainings, checksums, data, args):
    """Print the results; return whether all of them are as expected."""
    one = Training(alone, data, args)
    first = one.loss()
    for _ in range(args.rounds * args.steps):
        one.step(None, 0, 1)
    last = one.loss()
    weights = trainings["by priority"].weights
    difference = max(np.abs(ours - its).max() for ours, its in zip(weights, one.weights, strict=True))
    same = len(checksums) == 1
    print(f"loss first {first:.4f}, last {last:.4f}")
    print(f"weights bit-identical in both ways and on all ranks: {'yes' if same else 'NO'}")
    print(f"largest difference from the one-rank run: {difference:.1e}")
    return bool(same and last < first and difference <= ALLOWED)


def parse_arguments():
    parser = Parser(description="Gradients by priority, on handwritten digits.")
    add = parser.add_argument
    add("--rounds", type=at_least(1), default=10, help="of each way (%(default)s)")
    add("--steps", type=at_least(1), default=5, help="in a round (%(default)s)")
    add("--batch", type=at_least(1), default=256, help="images in a step, over all ranks (%(default)s)")
    add("--layers", type=at_least(1), default=8, help="but the last one (%(default)s)")
    add("--width", type=at_least(1), default=96, help="of layer 1; layer n has n times it (%(default)s)")
    add("--lr", type=positive, default=0.02, help="learning rate (%(default)s)")
    add("--seed", type=at_least(0), default=1, help="of weights and batches (%(default)s)")
    args = parser.parse_args()
    if args.batch > IMAGES:
        parser.error(f"--batch {args.batch}: there are {IMAGES} images")
    return args


def main():
    args = parse_arguments()
    with shmring.init() as comm:
        images, labels = load_once(comm)
        data = images / 16.0, labels
        trainings = {name: Training(way, data, args) for name, way in WAYS.items()}
        measure(comm, trainings, args.rounds)
        for training in trainings.values():
            training.loss()  # this also makes the last update
        checksums = [training.checksum() for training in trainings.values()]
        checksums = {checksum for rank in comm.all_gather_object(checksums) for checksum in rank}
        seconds = slowest_medians(comm, trainings)
        rank, size = comm.rank, comm.size

    if rank == 0:
        nbytes = sum(weight.nbytes for weight in trainings["by priority"].weights)
        print(f"{size} rank(s), {args.layers + 1} gradients of {nbytes / 2**20:.1f} MiB together")
        ratio = seconds["as they come"] / seconds["by priority"]
        print(f"by priority: {ratio:.2f} times as many steps/s as when they are reduced as they come")
        if not passed(trainings, checksums, data, args):
            sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
