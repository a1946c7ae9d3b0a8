"""Training that survives its ranks: when a rank is killed, the others go on from the last step.

    shmrun --keep-going -n 4 examples/elastic_training.py --kill 2@150 --kill 0@400

Kill ranks by hand, too: `kill -9 PID`. Every batch is shared out among the ranks that are left, so the
weights are the same as without a death. `Training.survive` does all that is needed: it shrinks the
communicator, agrees on the last step, and takes the weights from a rank that has completed it.
"""

import os
import signal
import sys
from argparse import ArgumentTypeError

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the ranks are the parallelism

import numpy as np
from terminal import Parser, at_least, positive
from train_digits import MOMENTUM, count_weights, forward, initialise, load_data, sum_gradient

import shmring

REPORT_STEPS = 100


class Training:
    """The weights after some number of steps. A step depends on them and on nothing else."""

    def __init__(self, data, args):
        self.images, self.labels = data
        self.args = args
        self.step = 0
        # The values that a step changes, in one array that can be broadcast: the weights and their velocity.
        self.state = np.zeros((2, count_weights(args.hidden)))
        initialise(self.state[0], args.hidden, args.seed)

    def batch(self):
        """Return the images of this step, in an order that is the same on every rank."""
        batches = -(-len(self.images) // self.args.batch)
        epoch, number = divmod(self.step, batches)
        order = np.random.default_rng([self.args.seed, epoch]).permutation(len(self.images))
        return order[number * self.args.batch : (number + 1) * self.args.batch]

    def advance(self, gradient, rank, size, all_reduce):
        """Make one step; change nothing if `all_reduce` raises."""
        weights, velocity = self.state
        batch = self.batch()
        shard = batch[rank::size]
        sum_gradient(gradient, weights, self.images[shard], self.labels[shard], self.args.hidden)
        all_reduce(gradient)
        velocity *= MOMENTUM
        velocity -= self.args.lr / len(batch) * gradient
        weights += velocity
        self.step += 1

    def survive(self, comm):
        """Return the communicator of the ranks that are left, with the same weights after the same step on
        all of them."""
        while True:
            comm = comm.shrink()
            try:
                # Some ranks may have completed a step that others have not. A rank that is ahead has the
                # weights that they need.
                steps = comm.all_gather(np.array([self.step]))
                ahead = int(steps.argmax())
                state = comm.broadcast_object(self.state, root=ahead)
                comm.barrier()
            except shmring.RankFailed:  # another rank was killed meanwhile
                continue
            self.state, self.step = state, int(steps[ahead, 0])
            return comm

    def loss(self):
        _, probabilities = forward(self.state[0], self.images, self.args.hidden)
        return -np.log(probabilities[np.arange(len(self.labels)), self.labels]).mean()


def train(training, comm):
    """Train to the last step, with as many ranks as are left; return their communicator."""
    first_rank = comm.rank
    gradient = np.zeros(training.state.shape[1])
    while training.step < training.args.steps:
        if comm.rank == 0 and training.step % REPORT_STEPS == 0:
            print(f"step {training.step}: {comm.size} rank(s), loss {training.loss():.4f}", flush=True)
        if (first_rank, training.step) in training.args.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            training.advance(gradient, comm.rank, comm.size, comm.all_reduce)
        except shmring.RankFailed as error:
            comm = training.survive(comm)
            if comm.rank == 0:
                print(f"step {training.step}: rank {error.rank} is gone, {comm.size} go on", flush=True)
    return comm


def passed(training, alone):
    """Print the results; return whether one undisturbed rank comes to the same."""
    while alone.step < training.args.steps:
        alone.advance(np.zeros(training.state.shape[1]), 0, 1, lambda gradient: None)
    difference = np.abs(training.state[0] - alone.state[0]).max()
    print(f"step {training.step}: loss {training.loss():.4f}")
    print(f"largest difference from the run of one rank: {difference:.1e}")
    return bool(difference <= 1e-5)


def parse_kill(text):
    rank, _, step = text.partition("@")
    if not rank.isdecimal() or not step.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not RANK@STEP, as in 2@150")
    return int(rank), int(step)


def parse_arguments():
    parser = Parser(description="Training on handwritten digits that outlives its ranks.")
    parser.add_argument("--steps", type=at_least(0), default=600)
    parser.add_argument("--batch", type=at_least(1), default=64, help="samples in a step, over all ranks")
    parser.add_argument("--lr", type=positive, default=0.1, help="learning rate")
    parser.add_argument("--hidden", type=at_least(1), default=64, help="width of the hidden layer")
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument(
        "--kill",
        type=parse_kill,
        action="append",
        default=[],
        metavar="RANK@STEP",
        help="rank RANK kills itself before step STEP; may be given more than once",
    )
    return parser.parse_args()


def main():
    args = parse_arguments()
    data, _ = load_data()
    training = Training(data, args)
    with train(training, shmring.init()) as comm:
        is_first = comm.rank == 0
    if is_first and not passed(training, Training(data, args)):
        sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
