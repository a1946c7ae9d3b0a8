"""Compressed gradients: the bytes that each format saves and the accuracy that it costs, on real digits.

    shmrun -n 2 examples/compressed_training.py     two ranks
    python examples/compressed_training.py          one rank, which compresses as well

The same network is trained from the same start with each format of its gradients: unchanged, as 16-bit
floats, as 8-bit integers, as the largest hundredth of the elements, and as matrices of rank 2. The last three
run with and without error feedback, which sends what was lost with the next step. Top-k of 1 % and PowerSGD
of rank 2 lose most of a gradient: without feedback, their results are shown, but not checked. The training
loss shows the difference best.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the ranks are the parallelism

import numpy as np
from terminal import Parser, at_least, positive, with_progress
from train_digits import count_weights, forward, initialise, layers, load_data, sum_gradient

import shmring
from shmring.methods.compression import BF16, FP16, ErrorFeedback, Int8, PowerSGD, TopK

MOMENTUM = 0.9
WAYS = {
    "none": None,
    "fp16": FP16,
    "bf16": BF16,
    "int8": Int8,
    "int8 + feedback": lambda: ErrorFeedback(Int8()),
    "top-k 1 %": lambda: TopK(0.01),
    "top-k 1 % + feedback": lambda: ErrorFeedback(TopK(0.01)),
    "PowerSGD rank 2": lambda: PowerSGD(2),
    "PowerSGD rank 2 + feedback": lambda: ErrorFeedback(PowerSGD(2)),
}
UNCHECKED = {"top-k 1 %", "PowerSGD rank 2"}


class Training:
    """The weights of one way after some number of steps."""

    def __init__(self, way, data, args):
        self.compressor = None if way is None else way()
        self.data, self.args = data, args
        self.weights = np.empty(count_weights(args.hidden), "f4")
        initialise(self.weights, args.hidden, args.seed)
        self.gradient, self.velocity = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self.shuffle = np.random.default_rng(args.seed + 1)  # the same order on every rank
        self.steps = 0

    def epoch(self, comm):
        images, labels = self.data
        order = self.shuffle.permutation(len(images))
        for start in range(0, len(order), self.args.batch):
            batch = order[start : start + self.args.batch]
            shard = batch[comm.rank :: comm.size]
            sum_gradient(self.gradient, self.weights, images[shard], labels[shard], self.args.hidden)
            self.reduce(comm)
            self.velocity *= MOMENTUM
            self.velocity -= self.args.lr / len(batch) * self.gradient
            self.weights += self.velocity
            self.steps += 1

    def reduce(self, comm):
        if self.compressor is None:
            comm.all_reduce(self.gradient)
        else:  # by layer: PowerSGD wants matrices
            self.compressor.all_reduce_many(comm, layers(self.gradient, self.args.hidden), "sum")

    def step_nbytes(self):
        """Return the bytes of a rank's gradient as it travels."""
        sent = None if self.compressor is None else self.compressor.bytes_sent
        return self.gradient.nbytes if sent is None else sent / max(1, self.steps)

    def loss_and_accuracy(self, images, labels):
        probabilities = forward(self.weights, images, self.args.hidden)[1]
        loss = -np.log(probabilities[np.arange(len(labels)), labels]).mean()
        return loss, np.mean(probabilities.argmax(axis=1) == labels)


def same_on_all_ranks(comm, trainings):
    """Return whether all ranks have the same bits."""
    words = np.concatenate([training.weights for training in trainings.values()]).view(np.uint32)
    smallest, largest = words.copy(), words.copy()
    comm.all_reduce(smallest, op="min")
    comm.all_reduce(largest, op="max")
    return np.array_equal(smallest, largest)


def passed(trainings, identical, held_out, least):
    """Print the results; return whether all of them are as expected."""
    good = identical
    print("| gradients travel as | training loss | accuracy | KiB a step | times shorter |")
    print("|---|---|---|---|---|")
    for name, training in trainings.items():
        (loss, _), (_, accuracy) = map(training.loss_and_accuracy, *zip(training.data, held_out, strict=True))
        nbytes = training.step_nbytes()
        shorter = training.gradient.nbytes / max(1, nbytes)
        print(f"| {name} | {loss:.4f} | {accuracy:.3f} | {nbytes / 1024:.1f} | {shorter:.1f} |")
        good &= bool(name in UNCHECKED or accuracy >= least)
    print(f"weights bit-identical on all ranks: {'yes' if identical else 'NO'}")
    print(f"accuracy on {len(held_out[1])} held-out digits at least {least}: {'yes' if good else 'NO'}")
    return good


def parse_arguments():
    parser = Parser(description="Compressed gradients, on handwritten digits.")
    parser.add_argument("--epochs", type=at_least(0), default=40, help="of each way (%(default)s)")
    parser.add_argument("--batch", type=at_least(1), default=64, help="samples in a step, over all ranks")
    parser.add_argument("--lr", type=positive, default=0.05, help="learning rate (%(default)s)")
    parser.add_argument("--hidden", type=at_least(1), default=128, help="width of the hidden layer")
    parser.add_argument("--seed", type=at_least(0), default=1, help="of weights and batches (%(default)s)")
    parser.add_argument(
        "--least", type=positive, default=0.94, help="accuracy of all but plain top-k, PowerSGD"
    )
    return parser.parse_args()


def main():
    args = parse_arguments()
    data, held_out = load_data()
    with shmring.init() as comm:
        trainings = {name: Training(way, data, args) for name, way in WAYS.items()}
        for _ in with_progress(args.epochs, comm.rank, "training", "epoch"):
            for training in trainings.values():
                training.epoch(comm)
        identical = same_on_all_ranks(comm, trainings)
        rank, size = comm.rank, comm.size

    if rank == 0:
        print(f"{size} rank(s), {args.epochs} epochs of {len(data[0])} images")
        if not passed(trainings, identical, held_out, args.least):
            sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
