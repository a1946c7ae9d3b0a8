"""Training that synchronises less often, side by side: gradient accumulation, local SGD; and mixed precision.

    shmrun -n 2 examples/fewer_synchronisations.py          two ranks
    python examples/fewer_synchronisations.py               one rank

A small network learns handwritten digits from the same micro-batches in six ways. Either the gradient is
reduced after each micro-batch, or the gradients of 4, 8 or 16 micro-batches are summed first, or each rank
learns by itself and all take the mean of their weights every 2 or 4 micro-batches. A further run uses mixed
precision, float16 with weights in float32: one rank meets an overflow, and all ranks skip that step. The
example checks the accuracies, that 4 micro-batches give the weights of batches four times as large, and that
all ranks have the same weights.
"""

import os
import sys
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the ranks are the parallelism

import numpy as np
from terminal import Parser, at_least, positive
from train_digits import count_weights, forward, initialise, layers, load_data, sum_gradient

import shmring
from shmring.methods.local import GradientAccumulation, LocalSGD
from shmring.methods.precision import LossScaler, MasterWeights

ACCUMULATE, LOCAL = (4, 8, 16), (2, 4)
LEAST_ACCURACY = 0.9
ALLOWED = 1e-9  # difference of weights from batches four times as large
OVERFLOW_STEP = 5  # of mixed precision, on the last rank


class Training:
    """The weights of one way, the micro-batches that it learns from, and its synchronisations."""

    def __init__(self, comm, data, args):
        self.comm, self.args = comm, args
        self.images, self.labels = data
        self.weights = np.empty(count_weights(args.hidden))
        initialise(self.weights, args.hidden, args.seed)
        self.gradient = np.empty_like(self.weights)
        self.synchronisations = self.reduced_nbytes = 0
        self.seconds = 0.0
        self.skipped = []  # steps of mixed precision

    def micro_batches(self, length):
        """Yield this rank's share of each micro-batch; the same images in the same order, whatever their
        length."""
        shuffle = np.random.default_rng(self.args.seed + 1)
        count = len(self.labels) - len(self.labels) % (max(ACCUMULATE) * self.args.micro_batch)
        for _ in range(self.args.epochs):
            order = shuffle.permutation(len(self.labels))
            for begin in range(0, count, length):
                shard = order[begin : begin + length][self.comm.rank :: self.comm.size]
                yield self.images[shard], self.labels[shard]

    def accumulate(self, every, length):
        """Make a step after `every` micro-batches of `length` images; the step is longer with more images."""
        accumulation = GradientAccumulation(self.comm, [self.gradient], every, op="sum")
        images_in_step = every * length
        lr = self.args.lr * np.sqrt(images_in_step / self.args.micro_batch)
        for images, labels in self.micro_batches(length):
            sum_gradient(self.gradient, self.weights, images, labels, self.args.hidden)
            if accumulation.add([self.gradient]):
                self.weights -= lr / images_in_step * accumulation.gradients[0]
        self.note(accumulation.synchronisations, accumulation.nbytes)

    def learn_locally(self, every):
        """Make a local step after each micro-batch, and take the mean of all ranks' weights after `every` of
        them."""
        local = LocalSGD(self.comm, [self.weights], every)
        (self.weights,) = local.params
        for images, labels in self.micro_batches(self.args.micro_batch):
            sum_gradient(self.gradient, self.weights, images, labels, self.args.hidden)
            self.weights -= self.args.lr / max(len(labels), 1) * self.gradient
            local.step()
        local.average()
        self.note(local.synchronisations, local.nbytes)

    def mix_precision(self):
        """Compute in float16, with weights and sums in float32; the last rank meets an overflow once."""
        half, gradient = self.weights.astype("f2"), np.empty(self.weights.shape, "f2")
        master, scaler = MasterWeights([half]), LossScaler(self.comm, scale=256.0, growth_interval=100)
        (self.weights,), unscaled = master.weights, self.comm.empty(half.shape, "f4")
        length = ACCUMULATE[0] * self.args.micro_batch
        for step, (images, labels) in enumerate(self.micro_batches(length)):
            scale_gradient(gradient, half, images.astype("f2"), labels, self.args.hidden, scaler.scale)
            if step == OVERFLOW_STEP and self.comm.rank == self.comm.size - 1:
                gradient[0] = np.inf
            if scaler.unscale([gradient], [unscaled]):
                self.comm.all_reduce(unscaled)
                self.weights -= self.args.lr * 2 / length * unscaled
                master.store()
                self.note(self.synchronisations + 1, unscaled.nbytes)
            else:
                self.skipped.append(step)

    def note(self, synchronisations, nbytes):
        self.synchronisations, self.reduced_nbytes = synchronisations, synchronisations * nbytes

    def timed(self, way, *arguments):
        self.comm.barrier()
        began = perf_counter()
        way(self, *arguments)
        self.comm.barrier()
        self.seconds = perf_counter() - began
        return self


def scale_gradient(gradient, weights, images, labels, hidden, scale):
    """Compute as sum_gradient does, for `scale` times the loss, in the dtype of the weights."""
    activations, error = forward(weights, images, hidden)
    error[np.arange(len(labels)), labels] -= 1.0
    error *= scale
    _, _, w2, _ = layers(weights, hidden)
    back = (error @ w2.T) * (1.0 - activations**2)
    g1, gb1, g2, gb2 = layers(gradient, hidden)
    g1[:], gb1[:] = images.T @ back, back.sum(axis=0)
    g2[:], gb2[:] = activations.T @ error, error.sum(axis=0)


def train_all(comm, data, args):
    """Return every way's training, by name."""
    length, found = args.micro_batch, {}
    for every in (1, *ACCUMULATE):
        name = "every micro-batch" if every == 1 else f"accumulate {every}"
        found[name] = Training(comm, data, args).timed(Training.accumulate, every, length)
    for every in LOCAL:
        found[f"local SGD {every}"] = Training(comm, data, args).timed(Training.learn_locally, every)
    found["mixed precision"] = Training(comm, data, args).timed(Training.mix_precision)
    return found


def accuracy_of(weights, held_out, hidden):
    images, labels = held_out
    return float(np.mean(forward(weights, images, hidden)[1].argmax(axis=1) == labels))


def same_everywhere(comm, weights):
    return bool((comm.all_gather(weights) == weights).all())


def report(found, accuracies, difference):
    plain = found["every micro-batch"]
    print(f"{'':18}  accuracy  synchronisations  reduced KiB  speed")
    for name, training in found.items():
        print(
            f"{name:18}  {accuracies[name]:8.3f}  {training.synchronisations:16,}"
            f"  {training.reduced_nbytes / 1024:11,.0f}  {plain.seconds / training.seconds:.2f}"
        )
    print(f"largest difference from batches four times as large: {difference:.1e}")


def parse_arguments():
    parser = Parser(description="Fewer synchronisations, and mixed precision, on handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=40, help="of each way (%(default)s)")
    add("--micro-batch", type=at_least(1), default=16, help="images, over all ranks (%(default)s)")
    add("--lr", type=positive, default=0.1, help="learning rate of one micro-batch (%(default)s)")
    add("--hidden", type=at_least(1), default=32, help="width of the hidden layer (%(default)s)")
    add("--seed", type=at_least(0), default=1, help="of weights and batches (%(default)s)")
    return parser.parse_args()


def main():
    args = parse_arguments()
    data, held_out = load_data()
    with shmring.init() as comm:
        found = train_all(comm, data, args)
        large = Training(comm, data, args).timed(Training.accumulate, 1, ACCUMULATE[0] * args.micro_batch)
        skipped = found["mixed precision"].skipped
        weights = {name: training.weights for name, training in found.items()}
        same = {name: same_everywhere(comm, each) for name, each in weights.items()}
        agreed = all(each == skipped for each in comm.all_gather_object(skipped))
        rank, size = comm.rank, comm.size
    if rank > 0:
        return

    accuracies = {name: accuracy_of(each, held_out, args.hidden) for name, each in weights.items()}
    difference = np.abs(weights["accumulate 4"] - large.weights).max()
    print(f"{size} rank(s), the same images for every way")
    report(found, accuracies, difference)
    print(f"mixed precision skipped steps {skipped}, the same on all ranks: {'yes' if agreed else 'NO'}")
    print(f"weights bit-identical on all ranks: {'yes' if all(same.values()) else 'NO'}")
    learnt = min(accuracies.values()) >= LEAST_ACCURACY
    if not (learnt and all(same.values()) and agreed and OVERFLOW_STEP in skipped and difference <= ALLOWED):
        sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
