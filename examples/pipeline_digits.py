"""Pipeline parallelism with two versions of the weights (PipeDream-2BW), beside plain data parallel.

    shmrun -n 2 examples/pipeline_digits.py          two stages of two layers each
    shmrun -n 4 examples/pipeline_digits.py          four stages of one layer
    python examples/pipeline_digits.py               one stage, the same weights

A network of four layers learns handwritten digits. In a pipeline each rank has some of the layers.
Activations go forward and gradients back from rank to rank, one micro-batch at a time, and the weights learn
from each batch with a delay of one: w(t + 1) = w(t) - lr * gradient_t(w(t - 1)). In data parallel every rank
has all layers and a share of each batch. The batches are the same, and both reach the same accuracy within
some percent. The pipeline's weights are, to the last bit, those of one process that computes the same delayed
update.
"""

import os
import sys
from itertools import pairwise
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the ranks are the parallelism

import numpy as np
from digits import DIGITS, PIXELS
from terminal import Parser, at_least, positive
from train_digits import load_data

import shmring
from shmring.methods.pipeline import Pipeline
from shmring.methods.rules import SGD

LAYERS = 4
LEAST_ACCURACY = 0.9


def initialise(args):
    """Return each layer's matrix and vector."""
    random = np.random.default_rng(args.seed)
    widths = [PIXELS, *[args.width] * (LAYERS - 1), DIGITS]
    return [
        (random.standard_normal((before, after)) / np.sqrt(before), np.zeros(after))
        for before, after in pairwise(widths)
    ]


def stage_of(layers, rank, size):
    """Return the numbers of a stage's layers, and their arrays in one list."""
    mine = np.array_split(np.arange(LAYERS), size)[rank]
    return mine, [array for layer in mine for array in layers[layer]]


def forward(weights, x):
    """Apply tanh after every layer, the last one too. Return what backward needs: the layers' inputs and
    outputs."""
    saved = [x]
    for matrix, vector in zip(weights[::2], weights[1::2], strict=True):
        saved.append(np.tanh(saved[-1] @ matrix + vector))
    return saved[-1], saved


def backward(weights, saved, gradient):
    gradients = []
    for matrix, x, y in zip(weights[-2::-2], saved[-2::-1], saved[:0:-1], strict=True):
        gradient = gradient * (1.0 - y * y)
        gradients += [gradient.sum(axis=0), x.T @ gradient]
        gradient = gradient @ matrix.T
    return gradient, gradients[::-1]


def probabilities_of(y):
    scores = np.exp(4.0 * y)  # y is between -1 and 1
    return scores / scores.sum(axis=1, keepdims=True)


def loss_gradient(y, labels, count):
    """Return the gradient, by the last layer's y, of the mean cross-entropy of a batch of `count` images."""
    error = probabilities_of(y)
    error[np.arange(len(labels)), labels] -= 1.0
    return error * (4.0 / count)


class Batches:
    """The same images in the same order on every rank, in micro-batches of equal length."""

    def __init__(self, data, args):
        self.images, self.labels = data
        self.rows, self.batch = args.batch // args.micro_batches, args.batch
        random, count = np.random.default_rng(args.seed + 1), len(self.labels)
        epochs = [random.permutation(count)[: count - count % args.batch] for _ in range(args.epochs)]
        self.order = np.concatenate([np.zeros(0, int), *epochs])

    def micro_batch(self, number):
        rows = self.order[number * self.rows : (number + 1) * self.rows]
        return self.images[rows], self.labels[rows]

    def share(self, batch, rank, size):
        """Return a rank's images of a whole batch, and their labels."""
        rows = self.order[batch * self.batch : (batch + 1) * self.batch][rank::size]
        return self.images[rows], self.labels[rows]

    def __len__(self):
        return len(self.order) // self.batch


def train_pipeline(comm, layers, batches, args):
    """Return this rank's stage after all batches."""
    _, weights = stage_of(layers, comm.rank, comm.size)
    receives = None if comm.rank == 0 else ((batches.rows, weights[0].shape[0]), weights[0].dtype)
    pipeline = Pipeline(
        comm,
        forward,
        backward,
        weights,
        SGD(args.lr),
        micro_batches=args.micro_batches,
        receives=receives,
    )
    pipeline.run(
        len(batches),
        inputs=lambda number: batches.micro_batch(number)[0],
        loss_gradient=lambda number, y: loss_gradient(y, batches.micro_batch(number)[1], args.batch),
    )
    return pipeline.weights


def train_data_parallel(comm, layers, batches, args):
    """Return all layers after all batches, of which every rank computes a share."""
    _, weights = stage_of(layers, 0, 1)
    weights = [weight.copy() for weight in weights]
    for batch in range(len(batches)):
        images, labels = batches.share(batch, comm.rank, comm.size)
        y, saved = forward(weights, images)
        gradients = backward(weights, saved, loss_gradient(y, labels, args.batch))[1]
        comm.all_reduce_many(gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= args.lr * gradient
    return weights


def simulate(layers, batches, args, size):
    """Compute the textbook's delayed update in one process: batch t's gradient is taken at w(t - 1)."""
    stages = [stage_of(layers, rank, size)[1] for rank in range(size)]
    before, newest = stages, stages
    for batch in range(len(batches)):
        sums = [[np.zeros_like(weight) for weight in stage] for stage in stages]
        for number in range(batch * args.micro_batches, (batch + 1) * args.micro_batches):
            x, labels = batches.micro_batch(number)
            kept = []
            for stage in before:
                x, saved = forward(stage, x)
                kept.append(saved)
            gradient = loss_gradient(x, labels, args.batch)
            for stage, saved, totals in zip(before[::-1], kept[::-1], sums[::-1], strict=True):
                gradient, gradients = backward(stage, saved, gradient)
                for total, part in zip(totals, gradients, strict=True):
                    total += part
        step = [
            [weight - args.lr * total for weight, total in zip(stage, totals, strict=True)]
            for stage, totals in zip(newest, sums, strict=True)
        ]
        before, newest = newest, step
    return [weight for stage in newest for weight in stage]


def accuracy_of(weights, held_out):
    images, labels = held_out
    return float(np.mean(forward(weights, images)[0].argmax(axis=1) == labels))


def parse_arguments():
    parser = Parser(description="A pipeline with two versions of the weights, on handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=at_least(0), default=30, help="through all images (%(default)s)")
    add("--batch", type=at_least(1), default=64, help="images (%(default)s)")
    add("--micro-batches", type=at_least(1), default=4, help="of a batch (%(default)s)")
    add("--width", type=at_least(1), default=64, help="of a layer (%(default)s)")
    add("--lr", type=positive, default=0.1, help="learning rate (%(default)s)")
    add("--seed", type=at_least(0), default=1, help="of weights and batches (%(default)s)")
    args = parser.parse_args()
    if args.batch % args.micro_batches:
        parser.error(f"--batch {args.batch}: {args.micro_batches} micro-batches have to be alike in length")
    return args


def main():
    args = parse_arguments()
    data, held_out = load_data()
    layers, batches = initialise(args), Batches(data, args)
    with shmring.init() as comm:
        if comm.size > min(LAYERS, args.micro_batches):
            sys.exit(f"{comm.size} ranks are too many: {LAYERS} layers, {args.micro_batches} micro-batches")
        began = perf_counter()
        mine = train_pipeline(comm, layers, batches, args)
        comm.barrier()
        pipelined_s = perf_counter() - began
        pipelined = comm.gather_object(mine)
        began = perf_counter()
        parallel = train_data_parallel(comm, layers, batches, args)
        parallel_s = perf_counter() - began
        rank, size = comm.rank, comm.size
    if rank > 0:
        return

    pipelined = [weight for stage in pipelined for weight in stage]
    expected = simulate(layers, batches, args, size)
    same = all(ours.tobytes() == theirs.tobytes() for ours, theirs in zip(pipelined, expected, strict=True))
    accuracies = accuracy_of(pipelined, held_out), accuracy_of(parallel, held_out)
    print(f"{size} stage(s), {len(batches)} batches of {args.micro_batches} micro-batches")
    print(f"accuracy {accuracies[0]:.3f} as a pipeline, {accuracies[1]:.3f} data-parallel")
    print(f"weights are the delayed update's of one process, to the last bit: {'yes' if same else 'NO'}")
    print(f"the pipeline took {pipelined_s / parallel_s:.2f} times as long as data parallel")
    if not same or min(accuracies) < LEAST_ACCURACY:
        sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
