"""Data-parallel training in Keras on TensorFlow, written as for MirroredStrategy: compile and fit.

    shmrun -n 2 examples/keras_digits.py      two ranks
    python examples/keras_digits.py           one rank, the same losses

pip install '.[keras,examples]'. Compared with training in one process there are three additions: a
shard of the data, a DistributedOptimizer, and two callbacks. At the end rank 0 trains alone, on whole
batches, and compares.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from digits import DIGITS, PIXELS, load_once, split
from terminal import Parser, at_least, positive

import shmring
from shmring.adapters import keras as adapter

MOMENTUM = 0.9


def batches(data, args, rank=0, size=1):
    """Return this rank's part of each batch, in an order that is the same on every rank."""
    shuffled = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0]), seed=args.seed)
    return shuffled.shard(size, rank).batch(args.batch // size, drop_remainder=True)


def network(args, optimizer):
    keras.utils.set_random_seed(args.seed)  # of the shuffling too
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((PIXELS,)), layers.Dense(args.hidden, activation="tanh"), layers.Dense(DIGITS)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def train_together(comm, data, args):
    optimizer = adapter.DistributedOptimizer(keras.optimizers.SGD(args.lr, MOMENTUM), comm)
    model = network(args, optimizer)
    callbacks = [adapter.broadcast_at_start(comm), adapter.average_metrics(comm)]
    dataset = batches(data, args, comm.rank, comm.size)
    history = model.fit(dataset, epochs=args.epochs, callbacks=callbacks, shuffle=False, verbose=0)
    return model, history.history["loss"]


def train_alone(data, args):
    model = network(args, keras.optimizers.SGD(args.lr, MOMENTUM))
    model.fit(batches(data, args), epochs=args.epochs, shuffle=False, verbose=0)
    return model.get_weights()


def same_on_all_ranks(comm, weights):
    return all(np.ptp(comm.all_gather(leaf.view("i4")), axis=0).max() == 0 for leaf in weights)


def passed(model, losses, identical, data, held_out, args):
    """Print the results; return whether all of them are as expected."""
    for epoch, loss in enumerate(losses, 1):
        print(f"epoch {epoch}: loss {loss:.6f}")
    accuracy = model.evaluate(*held_out, verbose=0, return_dict=True)["accuracy"]
    pairs = zip(model.get_weights(), train_alone(data, args), strict=True)
    difference = max(np.abs(ours - alone).max() for ours, alone in pairs)
    print(f"accuracy {accuracy:.3f} on {len(held_out[1])} held-out digits")
    print(f"the same weights on all ranks: {'yes' if identical else 'NO'}")
    print(f"largest difference from the one-rank run: {difference:.1e}")
    return identical and difference <= 1e-3 and losses[-1] < losses[0]


def parse_arguments():
    parser = Parser(description="Data-parallel training in Keras on handwritten digits.")
    parser.add_argument("--epochs", type=at_least(2), default=20)
    parser.add_argument("--batch", type=at_least(1), default=64, help="samples in a step, over all ranks")
    parser.add_argument("--lr", type=positive, default=0.1, help="learning rate (%(default)s)")
    parser.add_argument("--hidden", type=at_least(1), default=128, help="width of the hidden layer")
    parser.add_argument("--seed", type=at_least(0), default=1)
    return parser.parse_args()


def main():
    args = parse_arguments()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks are the parallelism
    with shmring.init() as comm:
        rank, size = comm.rank, comm.size
        data, held_out = split(*load_once(comm), "f4")
        if args.batch % size or args.batch > len(data[0]):
            sys.exit(f"--batch {args.batch}: a multiple of the ranks and at most {len(data[0])}, please")
        model, losses = train_together(comm, data, args)
        identical = same_on_all_ranks(comm, model.get_weights())
    if rank == 0:
        print(f"{size} rank(s)")
        if not passed(model, losses, identical, data, held_out, args):
            sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
