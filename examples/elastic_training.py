"""Training that survives its ranks: when a rank is killed, the others go on from the last step.

    shmrun --keep-going -n 4 examples/elastic_training.py --kill 2@150 --kill 0@400 --replace

Kill ranks by hand, too: `kill -9 PID`. Every batch is shared out among the ranks that are left, so the
weights are the same as without a death. `Training.survive` does all that is needed: it shrinks the
communicator, agrees on the last step, and takes the weights from a rank that has completed it. With --replace
it first starts a new rank for each one that is gone, and takes it in.
"""

import os
import pickle
import signal
import subprocess
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
        """Return the communicator of the ranks that are left, and of new ones if they are to be replaced,
        with the same weights after the same step on all of them."""
        wanted = comm.size
        while True:
            comm = comm.shrink()
            try:
                if self.args.replace and comm.size < wanted:
                    comm = comm.grow(wanted - comm.size, start_rank)
                self.agree(comm)
            except shmring.RankFailed:  # another rank was killed meanwhile
                continue
            return comm

    def agree(self, comm):
        """Take the weights of a rank that is ahead. A new rank has made no step, and others may differ by
        one."""
        steps = comm.all_gather(np.array([self.step]))
        ahead = int(steps.argmax())
        state = comm.broadcast_object(self.state, root=ahead)
        comm.barrier()
        self.state, self.step = state, int(steps[ahead, 0])

    def loss(self):
        _, probabilities = forward(self.state[0], self.images, self.args.hidden)
        return -np.log(probabilities[np.arange(len(self.labels)), self.labels]).mean()


def start_rank(world, rank):
    """Start a process for a new rank, with the world that it joins. Rank 0 calls this."""
    started = subprocess.Popen([sys.executable, *sys.argv, "--join"], stdin=subprocess.PIPE)
    children.append(started)
    with started.stdin as pipe:
        pickle.dump((world, rank), pipe)


children = []


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
    parser.add_argument("--replace", action="store_true", help="start a new rank for each one that is gone")
    parser.add_argument("--join", action="store_true", help="be such a new rank; the world comes from stdin")
    return parser.parse_args()


def join(training):
    """Join as a new rank; return the communicator."""
    comm = shmring.init(*pickle.load(sys.stdin.buffer))
    training.step, training.args.kill = -1, []  # the ranks to kill are those of the first communicator
    try:
        training.agree(comm)
    except shmring.RankFailed:
        comm = training.survive(comm)
    return comm


def main():
    args = parse_arguments()
    data, _ = load_data()
    training = Training(data, args)
    with train(training, join(training) if args.join else shmring.init()) as comm:
        is_first = comm.rank == 0
    if is_first and not passed(training, Training(data, args)):
        sys.exit("FAILED: see the lines above")
    for child in children:
        child.wait()


if __name__ == "__main__":
    main()
