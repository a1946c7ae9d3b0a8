"""Data-parallel training in JAX: a step, all_reduce of the gradients included, is one compiled function.

    shmrun -n 2 examples/jax_digits.py      two ranks
    python examples/jax_digits.py           one rank, the same losses

pip install '.[jax,examples]'. Every rank has a part of each batch. One fused call in the compiled step
averages loss and gradients, a pytree. At the end rank 0 trains alone, on whole batches and in NumPy, and
compares losses and weights.
"""

import functools
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported

import jax
import jax.numpy as jnp
import numpy as np
from digits import DIGITS, PIXELS, load_once, split
from terminal import Parser, at_least, positive, with_progress

import shmring
from shmring.adapters import jax as adapter

MOMENTUM = 0.9


def initial(hidden, seed):
    """Return the weights and biases of two layers."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(first, (PIXELS, hidden)) / PIXELS**0.5,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, DIGITS)) / hidden**0.5,
        "b2": jnp.zeros(DIGITS),
    }


def scores(weights, images):
    return jnp.tanh(images @ weights["w1"] + weights["b1"]) @ weights["w2"] + weights["b2"]


def cross_entropy(weights, images, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(weights, images)), labels[:, None], axis=1).mean()


def make_step(comm, lr):
    """Return a step of gradient descent with momentum, over all ranks, each of which has a part of the batch.

    It updates weights and velocity in place: the caller gives its arrays away.
    """

    @functools.partial(adapter.jit, donate_argnums=(0, 1))
    def step(weights, velocity, images, labels):
        found = jax.value_and_grad(cross_entropy)(weights, images, labels)
        loss, gradients = adapter.all_reduce(found, comm, "avg")
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v - lr * g, velocity, gradients)
        return jax.tree.map(jnp.add, weights, velocity), velocity, loss

    return step


def make_numpy_step(lr):
    """Return the same step on whole batches, in NumPy alone."""

    def step(weights, velocity, images, labels):
        hidden = np.tanh(images @ weights["w1"] + weights["b1"])
        found = hidden @ weights["w2"] + weights["b2"]
        found = np.exp(found - found.max(axis=1, keepdims=True))
        found /= found.sum(axis=1, keepdims=True)
        mine = np.arange(len(labels)), labels
        loss = -np.log(found[mine]).mean()
        found[mine] -= 1
        found /= len(labels)
        below = found @ weights["w2"].T * (1 - hidden**2)
        gradients = {"w1": images.T @ below, "b1": below.sum(0), "w2": hidden.T @ found, "b2": found.sum(0)}
        velocity = {name: MOMENTUM * velocity[name] - lr * gradients[name] for name in gradients}
        return {name: weights[name] + velocity[name] for name in gradients}, velocity, loss

    return step


def train(weights, step, data, args, epochs, rank=0, size=1):
    """Return the final weights, and each epoch's mean loss over whole batches."""
    images, labels = data
    velocity = jax.tree.map(lambda leaf: 0 * leaf, weights)
    shuffle, losses = np.random.default_rng(args.seed), []
    for _ in epochs:
        batches = shuffle.permutation(len(images))[: len(images) // args.batch * args.batch]
        for batch in batches.reshape(-1, args.batch):
            mine = batch[rank::size]
            weights, velocity, loss = step(weights, velocity, images[mine], labels[mine])
            losses.append(loss)
    return weights, np.array(losses).reshape(args.epochs, -1).mean(axis=1)


def same_on_all_ranks(comm, weights):
    return all(
        np.ptp(comm.all_gather(np.asarray(leaf).view("i4")), axis=0).max() == 0
        for leaf in jax.tree.leaves(weights)
    )


def passed(weights, losses, identical, data, held_out, args):
    """Print the results; return whether all of them are as expected."""
    for epoch, loss in enumerate(losses, 1):
        print(f"epoch {epoch}: loss {loss:.6f}")
    images, labels = held_out
    accuracy = float((scores(weights, images).argmax(axis=1) == labels).mean())
    first = jax.tree.map(np.array, initial(args.hidden, args.seed))
    alone, its_losses = train(first, make_numpy_step(args.lr), data, args, range(args.epochs))
    difference = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(abs(a - b).max()), weights, alone)))
    loss_difference = float(abs(losses - its_losses).max())
    print(f"accuracy {accuracy:.3f} on {len(labels)} held-out digits")
    print(f"the same weights on all ranks: {'yes' if identical else 'NO'}")
    print(f"largest difference from NumPy: {loss_difference:.1e} of a loss, {difference:.1e} of a weight")
    return identical and difference <= 1e-3 and loss_difference <= 1e-4 and losses[-1] < losses[0]


def parse_arguments():
    parser = Parser(description="Data-parallel training in JAX on handwritten digits.")
    parser.add_argument("--epochs", type=at_least(2), default=20)
    parser.add_argument("--batch", type=at_least(1), default=64, help="samples in a step, over all ranks")
    parser.add_argument("--lr", type=positive, default=0.1, help="learning rate (%(default)s)")
    parser.add_argument("--hidden", type=at_least(1), default=128, help="width of the hidden layer")
    parser.add_argument("--seed", type=at_least(0), default=1)
    return parser.parse_args()


def main():
    args = parse_arguments()
    with shmring.init() as comm:
        rank, size = comm.rank, comm.size
        data, held_out = split(*load_once(comm), "f4")
        if args.batch % size or args.batch > len(data[0]):
            sys.exit(f"--batch {args.batch}: a multiple of the ranks and at most {len(data[0])}, please")
        weights = adapter.broadcast(initial(args.hidden, args.seed), comm)
        epochs = with_progress(args.epochs, rank, "training", "epoch")
        weights, losses = train(weights, make_step(comm, args.lr), data, args, epochs, rank, size)
        identical = same_on_all_ranks(comm, weights)
    if rank == 0:
        print(f"{size} rank(s)")
        if not passed(weights, losses, identical, data, held_out, args):
            sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
