"""Mini-batch k-means on real handwritten digits, one shard of every batch per rank.

    shmrun -n 2 examples/kmeans.py          two ranks
    python examples/kmeans.py               one rank, the same bits

Rank 0 chooses the first centres (greedy k-means++) and broadcasts them. A step is one all_reduce_many of two
arrays: the sum of the images that are nearest to each centre, and their number. Each centre then becomes the
mean of all images assigned to it so far (Sculley, Web-scale k-means clustering, 2010).

Any number of ranks gives the same centres, to the last bit: pixels are whole numbers, so their sums are exact
in any order. (Sums of other numbers would differ in the last of 16 digits.)
"""

import hashlib
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the ranks are the parallelism

import numpy as np
from digits import IMAGES, PIXELS, load_once
from terminal import Parser, at_least, with_progress

import shmring

CANDIDATES = 4  # for each centre but the first; the best one becomes the centre
MOST_CLUSTERS = 200  # all distances are held at once
ALLOWED = 0.05  # of inertia above scikit-learn's from the same first centres


def squared_distances(images, centres):
    """Return the squared distance of each image to each centre. It does not depend on the other images: no
    BLAS."""
    return ((images[:, np.newaxis] - centres) ** 2).sum(axis=2)


def inertia_of(centres, images):
    return squared_distances(images, centres).min(axis=1).sum()


def choose_centres(images, clusters, rng):
    """Choose by k-means++: an image is the likelier to become a centre, the farther it is from the present
    ones."""
    centres = images[[rng.integers(len(images))]]
    distances = squared_distances(images, centres)[:, 0]
    for _ in range(1, clusters):
        chance = distances / distances.sum()
        candidates = images[rng.choice(len(images), CANDIDATES, p=chance)]
        left = np.minimum(distances[:, np.newaxis], squared_distances(images, candidates))
        best = left.sum(axis=0).argmin()
        centres, distances = np.vstack([centres, candidates[best]]), left[:, best]
    return centres


def batches(images, args):
    """Yield batches for ever, in an order that is the same on every rank."""
    shuffle = np.random.default_rng(args.seed + 1)
    while True:
        order = shuffle.permutation(len(images))
        for start in range(0, len(order), args.batch):
            yield images[order[start : start + args.batch]]


def cluster(comm, centres, images, steps, args):
    """Move `centres` in place."""
    sums, counts = comm.zeros(centres.shape), comm.zeros(len(centres))  # in memory that every rank maps
    given = np.zeros(len(centres))
    for _, batch in zip(steps, batches(images, args), strict=False):
        shard = batch[comm.rank :: comm.size]
        nearest = squared_distances(shard, centres).argmin(axis=1)
        members = nearest == np.arange(len(centres))[:, np.newaxis]
        sums[:], counts[:] = members @ shard, members.sum(axis=1)
        comm.all_reduce_many([sums, counts])
        given += counts
        centres += (sums - counts[:, np.newaxis] * centres) / np.maximum(given, 1.0)[:, np.newaxis]


def passed(centres, first, identical, images, args):
    """Print the results; return whether all of them are as expected."""
    from sklearn.cluster import KMeans, MiniBatchKMeans

    inertia = inertia_of(centres, images)
    print(f"inertia {inertia:.0f} with {args.clusters} clusters, {inertia_of(first, images):.0f} at first")
    excess = []
    for method, more in (MiniBatchKMeans, {"batch_size": args.batch}), (KMeans, {}):
        found = method(args.clusters, init=first, n_init=1, max_iter=args.epochs, random_state=0, **more)
        theirs = inertia_of(found.fit(images).cluster_centers_, images)
        excess.append(inertia / theirs - 1.0)
        print(f"scikit-learn's {method.__name__} from there: {theirs:.0f}, ours {excess[-1]:+.1%}")
    print(f"centres bit-identical on all ranks: {'yes' if identical else 'NO'}")
    print(f"checksum of the centres {checksum(centres)}: the same for any number of ranks")
    return bool(identical and max(excess) <= ALLOWED)


def checksum(centres):
    return hashlib.sha256(centres).hexdigest()[:16]


def parse_arguments():
    parser = Parser(description="Mini-batch k-means on handwritten digits.")
    add = parser.add_argument
    add("--clusters", type=at_least(1), default=10, help="how many (%(default)s)")
    add("--epochs", type=at_least(1), default=30, help="how often every image is seen (%(default)s)")
    add("--batch", type=at_least(1), default=256, help="images in a step, over all ranks (%(default)s)")
    add("--seed", type=at_least(0), default=1, help="of first centres and batches (%(default)s)")
    args = parser.parse_args()
    if args.clusters > MOST_CLUSTERS:
        parser.error(f"--clusters {args.clusters}: at most {MOST_CLUSTERS} of {IMAGES} images, please")
    return args


def main():
    args = parse_arguments()
    nsteps = args.epochs * -(-IMAGES // args.batch)
    with shmring.init() as comm:
        images, _ = load_once(comm)
        first = np.empty((args.clusters, PIXELS))
        if comm.rank == 0:
            first[:] = choose_centres(images, args.clusters, np.random.default_rng(args.seed))
        comm.broadcast(first)
        centres = first.copy()
        cluster(comm, centres, images, with_progress(nsteps, comm.rank, "clustering", "step"), args)
        identical = len(set(comm.all_gather_object(checksum(centres)))) == 1
        rank, size = comm.rank, comm.size

    if rank == 0:
        print(f"{size} rank(s), {nsteps} steps of {args.batch} images")
        if not passed(centres, first, identical, images, args):
            sys.exit("FAILED: see the lines above")


if __name__ == "__main__":
    main()
