"""Real handwritten digits, which come with scikit-learn."""

import sys

import numpy as np

IMAGES, PIXELS, DIGITS = 1797, 64, 10
HELD_OUT = 360


def load():
    """Return 1,797 images of 8 x 8 pixels, whole numbers in 0…16, one per row, and their labels, 0…9."""
    try:
        from sklearn.datasets import load_digits  # takes a second: not for --help
    except ImportError:
        sys.exit("the digits come with scikit-learn: pip install scikit-learn")
    return load_digits(return_X_y=True)


def load_once(comm):
    """Return the same on every rank: rank 0 reads the images for all."""
    return comm.broadcast_object(load() if comm.rank == 0 else None)


def split(images, labels, dtype="f8"):
    """Return training and held-out images (in 0…1) and labels, split the same way on every rank."""
    order = np.random.default_rng(2026).permutation(len(images))
    images, labels = (images[order] / 16.0).astype(dtype), labels[order]
    return (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])
