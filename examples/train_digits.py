"""Data-parallel training in plain NumPy: real handwritten digits, one shard of every batch per rank.

    shmrun -n 2 examples/train_digits.py          two ranks
    python examples/train_digits.py               one rank, the same result

The parallel part is four calls: init, broadcast (equal starting weights), zeros (a gradient in memory that
every rank maps) and all_reduce (the gradient of the whole batch). Everything else is a small neural network.
"""

import os
import sys
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the ranks are the parallelism

import numpy as np
from digits import DIGITS, PIXELS, load, split
from terminal import Parser, at_least, positive, with_progress

import shmring

MOMENTUM = 0.9


def load_data():
    """Return training and held-out images (in 0…1) and labels, split the same way on every rank."""
    return split(*load())


def layers(flat, hidden):
    """Return views of one flat array as the two layers' matrices and biases: the reduction is of one
    array."""
    shapes = [(PIXELS, hidden), (hidden,), (hidden, DIGITS), (DIGITS,)]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


def count_weights(hidden):
    return (PIXELS + 1) * hidden + (hidden + 1) * DIGITS


def initialise(weights, hidden, seed):
    rng = np.random.default_rng(seed)
    w1, b1, w2, b2 = layers(weights, hidden)
    w1[:] = rng.standard_normal(w1.shape) / np.sqrt(PIXELS)
    w2[:] = rng.standard_normal(w2.shape) / np.sqrt(hidden)
    b1[:], b2[:] = 0.0, 0.0


def forward(weights, images, hidden):
    """Return the hidden layer's activations and the probability of each digit."""
    w1, b1, w2, b2 = layers(weights, hidden)
    activations = np.tanh(images @ w1 + b1)
    scores = activations @ w2 + b2
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return activations, scores / scores.sum(axis=1, keepdims=True)


def sum_gradient(gradient, weights, images, labels, hidden):
    """Write the gradient of the cross-entropy, summed over these images, into the flat array `gradient`."""
    activations, error = forward(weights, images, hidden)
    error[np.arange(len(labels)), labels] -= 1.0
    _, _, w2, _ = layers(weights, hidden)
    back = (error @ w2.T) * (1.0 - activations**2)
    g1, gb1, g2, gb2 = layers(gradient, hidden)
    g1[:], gb1[:] = images.T @ back, back.sum(axis=0)
    g2[:], gb2[:] = activations.T @ error, error.sum(axis=0)


def train(weights, gradient, data, args, epochs, *, rank=0, size=1, all_reduce=None):
    """Train `weights` in place; return the seconds spent in `all_reduce` (waiting for others included)."""
    images, labels = data
    velocity = np.zeros_like(weights)
    shuffle = np.random.default_rng(args.seed + 1)  # the same order on every rank
    communication_s = 0.0
    for _ in epochs:
        order = shuffle.permutation(len(images))
        for start in range(0, len(order), args.batch):
            batch = order[start : start + args.batch]
            shard = batch[rank::size]
            sum_gradient(gradient, weights, images[shard], labels[shard], args.hidden)
            if all_reduce is not None:
                began = perf_counter()
                all_reduce(gradient)
                communication_s += perf_counter() - began
            # Sums over shards add up to the sum over the batch, however many ranks there are.
            velocity *= MOMENTUM
            velocity -= args.lr / len(batch) * gradient
            weights += velocity
    return communication_s


def same_on_all_ranks(comm, weights):
    """Return whether all ranks have the same bits: the largest and the smallest of all ranks agree in every
    word."""
    smallest, largest = weights.view(np.uint64).copy(), weights.view(np.uint64).copy()
    comm.all_reduce(smallest, op="min")
    comm.all_reduce(largest, op="max")
    return np.array_equal(smallest, largest)


def train_alone(data, args):
    """Train the same without shmring: the ranks together must come to the same weights."""
    weights = np.empty(count_weights(args.hidden))
    initialise(weights, args.hidden, args.seed)
    train(weights, np.zeros_like(weights), data, args, range(args.epochs))
    return weights


def passed(weights, identical, held_out, data, args):
    """Print the results; return whether all of them are as expected."""
    images, labels = held_out
    accuracy = np.mean(forward(weights, images, args.hidden)[1].argmax(axis=1) == labels)
    difference = np.abs(weights - train_alone(data, args)).max()
    print(f"accuracy {accuracy:.3f} on {len(labels)} held-out digits")
    print(f"weights bit-identical on all ranks: {'yes' if identical else 'NO'}")
    print(f"largest difference from the one-rank run: {difference:.1e}")
    return bool(accuracy >= 0.95 and identical and difference <= 1e-5)


def parse_arguments():
    parser = Parser(description="Data-parallel training on handwritten digits.")
    parser.add_argument("--epochs", type=at_least(0), default=100)
    parser.add_argument("--batch", type=at_least(1), default=64, help="samples in a step, over all ranks")
    parser.add_argument("--lr", type=positive, default=0.1, help="learning rate")
    parser.add_argument("--hidden", type=at_least(1), default=128, help="width of the hidden layer")
    parser.add_argument("--seed", type=at_least(0), default=1)
    return parser.parse_args()


def main():
    args = parse_arguments()
    data, held_out = load_data()
    with shmring.init() as comm:
        weights = np.empty(count_weights(args.hidden))
        if comm.rank == 0:
            initialise(weights, args.hidden, args.seed)
        comm.broadcast(weights)
        gradient = comm.zeros(weights.shape, weights.dtype)

        epochs = with_progress(args.epochs, comm.rank, "training", "epoch")
        began = perf_counter()
        communication_s = train(
            weights, gradient, data, args, epochs, rank=comm.rank, size=comm.size, all_reduce=comm.all_reduce
        )
        elapsed_s = perf_counter() - began
        identical = same_on_all_ranks(comm, weights)
        rank, size = comm.rank, comm.size

    if rank == 0:
        samples = args.epochs * len(data[0])
        print(f"{size} rank(s), {samples / elapsed_s:,.0f} samples/s on rank 0's clock")
        print(f"{communication_s / elapsed_s:.1%} of the time in communication, waiting for others included")
        if not passed(weights, identical, held_out, data, args):
            sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
