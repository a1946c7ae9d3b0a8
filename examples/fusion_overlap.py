"""Many small gradients: one call for each, all fused into few calls, or fused during the backward pass.

    shmrun -n 2 examples/fusion_overlap.py          two ranks
    python examples/fusion_overlap.py               one rank, the same weights but for rounding

A deep and narrow network learns handwritten digits; each layer has a matrix and a vector, whose gradients are
summed over the ranks. Three ways to do that, from the same start, step by step in turn:

    one by one     all_reduce of each gradient as it comes; every rank waits for each
    fused          all_reduce_many of all of them after the backward pass
    overlapped     a Bucketer: it reduces each full bucket in the background, as by async_op=True, while the
                   gradients of earlier layers are still being computed

Fusing folds each element over the ranks in the same order, so all three ways come to the same weights, to the
last bit. Other numbers of ranks round in other places: some 12 digits agree.

The gain depends on the machine and its load, so only ratios are printed. Overlapping pays if cores have time
left: with fewer ranks than cores, on several hosts, or if ranks are late in turn. If every core is busy with
a rank's own computing, fused calls in the foreground are as fast or faster.
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


def initialise(args):
    """Return the matrix and vector of each layer: from the pixels to `width`, from there on, and to the
    digits."""
    rng = np.random.default_rng(args.seed)
    widths = [PIXELS, *[args.width] * args.layers, DIGITS]
    weights = []
    for before, after in pairwise(widths):
        weights += [rng.standard_normal((before, after)) / np.sqrt(before), np.zeros(after)]
    return weights


def forward(weights, images):
    """Return the input of each layer, and last the probability of each digit."""
    inputs = [images]
    for matrix, vector in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        inputs.append(np.tanh(inputs[-1] @ matrix + vector))
    scores = inputs[-1] @ weights[-2] + weights[-1]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return inputs, scores / scores.sum(axis=1, keepdims=True)


def backward(weights, gradients, images, labels):
    """Write the gradients of the summed cross-entropy one by one, last layers first, and yield each."""
    inputs, error = forward(weights, images)
    error[np.arange(len(labels)), labels] -= 1.0
    for layer in reversed(range(len(inputs))):
        np.sum(error, axis=0, out=gradients[2 * layer + 1])
        yield gradients[2 * layer + 1]
        np.matmul(inputs[layer].T, error, out=gradients[2 * layer])
        yield gradients[2 * layer]
        if layer:
            error = (error @ weights[2 * layer].T) * (1.0 - inputs[layer] ** 2)


def loss_of(weights, images, labels):
    _, probabilities = forward(weights, images)
    return -np.log(probabilities[np.arange(len(labels)), labels]).mean()


# --- three ways to sum what backward() yields ---


def one_by_one(comm, coming, args):
    for gradient in coming:
        comm.all_reduce(gradient)


def fused(comm, coming, args):
    comm.all_reduce_many(list(coming))


def overlapped(comm, coming, args):
    bucketer = shmring.Bucketer(comm, nbytes=args.bucket, op="sum")
    for gradient in coming:
        bucketer.add(gradient)
    bucketer.wait()


def alone(comm, coming, args):
    for _ in coming:
        pass


WAYS = {"one by one": one_by_one, "fused": fused, "overlapped": overlapped}


class Training:
    """The weights of one way after some number of steps."""

    def __init__(self, way, data, args):
        self.way, self.data, self.args = way, data, args
        self.weights = initialise(args)
        self.gradients = [np.zeros_like(weight) for weight in self.weights]
        self.shuffle = np.random.default_rng(args.seed + 1)  # the same order on every rank
        self.seconds = []

    def step(self, comm, rank, size):
        images, labels = self.data
        batch = self.shuffle.choice(len(images), self.args.batch, replace=False)
        shard = batch[rank::size]
        coming = backward(self.weights, self.gradients, images[shard], labels[shard])
        self.way(comm, coming, self.args)
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            weight -= self.args.lr / len(batch) * gradient

    def checksum(self):
        return hashlib.sha256(b"".join(weight.tobytes() for weight in self.weights)).hexdigest()[:16]


def measure(comm, trainings, steps):
    """Train all ways in turn; each records the seconds of its steps, from a common start."""
    for _ in steps:
        for training in trainings.values():
            comm.barrier()
            began = perf_counter()
            training.step(comm, comm.rank, comm.size)
            training.seconds.append(perf_counter() - began)


def slowest_medians(comm, trainings):
    """Return the median over steps of the slowest rank's seconds, by way."""
    seconds = np.array([training.seconds for training in trainings.values()])
    comm.all_reduce(seconds, op="max")
    return dict(zip(trainings, np.median(seconds, axis=1).tolist(), strict=True))


def passed(trainings, checksums, data, args):
    """Print the results; return whether all of them are as expected."""
    images, labels = data
    one = Training(alone, data, args)
    first = loss_of(one.weights, images, labels)
    for _ in range(args.steps):
        one.step(None, 0, 1)
    weights = trainings["fused"].weights
    last = loss_of(weights, images, labels)
    difference = max(np.abs(ours - its).max() for ours, its in zip(weights, one.weights, strict=True))
    same = len(checksums) == 1
    print(f"loss first {first:.4f}, last {last:.4f}")
    print(f"weights bit-identical in all ways and on all ranks: {'yes' if same else 'NO'}")
    print(f"largest difference from the one-rank run: {difference:.1e}")
    return bool(same and last < first and difference <= ALLOWED)


def parse_arguments():
    parser = Parser(description="Tensor fusion and overlap, on handwritten digits.")
    add = parser.add_argument
    add("--steps", type=at_least(1), default=200, help="of each way (%(default)s)")
    add("--batch", type=at_least(1), default=128, help="images in a step, over all ranks (%(default)s)")
    add("--layers", type=at_least(1), default=24, help="but the last one (%(default)s)")
    add("--width", type=at_least(1), default=32, help="of a layer (%(default)s)")
    add("--bucket", type=at_least(1), default=1 << 15, help="bytes that are reduced together (%(default)s)")
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
        measure(comm, trainings, with_progress(args.steps, comm.rank, "training", "step"))
        checksums = [training.checksum() for training in trainings.values()]
        checksums = {checksum for rank in comm.all_gather_object(checksums) for checksum in rank}
        seconds = slowest_medians(comm, trainings)
        rank, size = comm.rank, comm.size

    if rank == 0:
        nbytes = sum(weight.nbytes for weight in trainings["fused"].weights)
        count = len(trainings["fused"].weights)
        print(f"{size} rank(s), {count} gradients of {nbytes / 2**10:.0f} KiB together")
        one_by_one_s = seconds.pop("one by one")
        for name, way_s in seconds.items():
            print(f"{name}: {one_by_one_s / way_s:.2f} times as many steps/s as one by one")
        if not passed(trainings, checksums, data, args):
            sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
