"""Items for rings: arrays of every kind, bytes, and random ones of both; and what calls of rings end with."""

import numpy as np

import shmring

RECORD = np.dtype([("id", "<i4"), ("at", "<f8", (2,)), ("name", "S3")])
ALIGNED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
ARRAYS = {
    "floats": np.arange(10.0),
    "one number": np.array(7, "i2"),
    "nothing": np.zeros((3, 0, 2), "f4"),
    "no numbers at all": np.zeros(0),
    "two dimensions": np.arange(600, dtype="u2").reshape(30, 20),
    "Fortran order": np.asfortranarray(np.arange(12, dtype="c16").reshape(3, 4)),
    "strided": np.arange(100)[::3],
    "backwards": np.arange(10.0)[::-1],
    "bool": np.array([True, False]),
    "the other byte order": np.arange(5, dtype=">f4"),
    "text": np.array(["one", "zwölf"]),
    "times": np.array(["2020-02-02", "NaT"], "M8[us]"),
    "structures": np.array([(1, (2, 3), b"abc"), (4, (5, 6), b"")], RECORD),
    "aligned structures": np.ones(3, ALIGNED),
    "many dimensions": np.ones((1,) * 32, "i1"),
    "larger than the ring": np.arange(5000),
    "much larger than the ring": np.arange(200_000, dtype="f4"),
}
BYTES = (
    *(b"", b"a", b"x" * 32, b"y" * 33, bytes(range(256)) * 100),
    *(bytearray(b"mutable"), memoryview(b"view"), np.bytes_(b"of a subclass")),
)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def random_items(seed, count):
    rng = np.random.default_rng(seed)
    dtypes = ["u1", "f4", "i8", RECORD]
    for _ in range(count):
        shape = tuple(rng.integers(0, 9, rng.integers(0, 3)))
        if rng.random() < 0.05:
            shape = (int(rng.integers(0, 3000)),)
        dtype = np.dtype(dtypes[rng.integers(0, 4)])
        data = rng.bytes(dtype.itemsize * int(np.prod(shape)))
        yield data if rng.random() < 0.2 else np.frombuffer(data, dtype).reshape(shape)


def outcome(call, *args, **options):
    try:
        return call(*args, **options)
    except (shmring.Error, TimeoutError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
