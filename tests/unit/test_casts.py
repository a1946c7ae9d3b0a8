"""Casts and wire formats against NumPy and ml_dtypes, bit for bit, with every instruction set of this
machine."""

import itertools

import numpy as np
import pytest

from shmring._core import kernels
from tests.unit.test_kernels import DTYPES, SMALL_FLOATS, Guarded, numbers

ISAS = kernels.isas()
FORMATS = kernels.wire_formats()
DTYPE_OF = {"native": "float32", "bf16": "bfloat16", "fp16": "float16"}
COUNTS = [*range(71), 128, 255, 256, 257, 511, 1000, 1024 + 3, 4097]
OFFSETS = [(0, 0), (4, 2), (1, 3), (63, 33)]
INT8_BLOCK = 256
LEAST_SCALE = np.float32(2.0**-126)
LARGEST = np.finfo(np.float32).max


# ---- expected results ----


def encoded_int8(y):
    """As bytes, block by block, with the arithmetic of float32."""
    pieces = []
    for begin in range(0, len(y), INT8_BLOCK):
        block = y[begin : begin + INT8_BLOCK]
        most = np.abs(block).max()
        if not np.isfinite(most) or most == 0:
            scale, items = np.float32(0 if most == 0 else np.nan), np.zeros(len(block), np.int8)
        else:
            scale = max(most / np.float32(127), LEAST_SCALE)
            if np.isinf(scale * np.float32(127)):
                scale = np.nextafter(scale, np.float32(0))
            items = np.rint(block * (np.float32(1) / scale)).astype(np.int8)
        pieces += [np.array([scale], np.float32).view(np.uint8), items.view(np.uint8)]
    return np.concatenate([np.empty(0, np.uint8), *pieces])


def decoded_int8(encoded, count):
    out = np.empty(count, np.float32)
    for begin in range(0, count, INT8_BLOCK):
        at = begin // INT8_BLOCK * (INT8_BLOCK + 4)
        scale = encoded[at : at + 4].view(np.float32)
        items = encoded[at + 4 : at + 4 + INT8_BLOCK].view(np.int8)
        out[begin : begin + INT8_BLOCK] = items.astype(np.float32) * scale
    return out


@np.errstate(all="ignore")
def as_it_travels(name, y):
    return encoded_int8(y) if name == "int8" else y.astype(DTYPES[DTYPE_OF[name]]).view(np.uint8)


@np.errstate(all="ignore")
def as_it_arrives(name, encoded, count):
    if name == "int8":
        return decoded_int8(encoded, count)
    return encoded.view(DTYPES[DTYPE_OF[name]]).astype(np.float32)


def assert_equal(got, want, context):
    """Equal bits, any NaN for any NaN."""
    bits = np.dtype(f"u{want.dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        both_nan = np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
    same = (got.view(bits) == want.view(bits)) | both_nan
    if not same.all():
        at = int(np.flatnonzero(~same)[0])
        pytest.fail(f"{context}: item {at} of {len(want)} is {got[at]!r}, should be {want[at]!r}")


def assert_same_encoding(name, got, want, context):
    dtype = np.uint8 if name == "int8" else DTYPES[DTYPE_OF[name]]
    assert_equal(got.view(dtype), want.view(dtype), context)


# ---- numbers, and calls in guarded memory ----


def every(name):
    dtype = DTYPES[name]
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)


def floats_around(name):
    """Return float32 at and beside every item and every middle between two; a million others over the whole
    range."""
    items = every(name).astype(np.float32)
    items = np.sort(items[np.isfinite(items)]).astype(np.float64)
    middles = (items[1:] + items[:-1]) / 2
    beyond = np.array([1, -1]) * (items[-1] + (items[-1] - items[-2]) / 2)
    exact = np.concatenate([items, middles, beyond])
    with np.errstate(over="ignore"):
        exact = exact.astype(np.float32)
    beside = [np.nextafter(exact, np.float32(to)) for to in (-np.inf, np.inf)]
    rest = np.arange(0, 1 << 32, 4099, dtype=np.uint32).view(np.float32)
    return np.concatenate([exact, *beside, rest])


def floats(count, rng):
    """Any bits, special values, and numbers of one size, so that a block of int8 is more than its largest."""
    wild = rng.integers(0, 40, count) == 0
    return np.where(wild, numbers("float32", count, rng), rng.normal(size=count).astype(np.float32))


def guarded(items, offset):
    room = Guarded("uint8", items.nbytes, offset)
    return room.fill(np.ascontiguousarray(items))


def widened(name, items, isa, offsets=(0, 0)):
    src, dst = guarded(items, offsets[0]), Guarded("float32", len(items), offsets[1])
    kernels.widen(name, dst.bytes, src.bytes, isa)
    dst.assert_guards(f"{isa} widen {name} {len(items)}")
    return dst.items


def narrowed(name, x, isa, offsets=(0, 0)):
    src, dst = guarded(x, offsets[0]), Guarded(name, len(x), offsets[1])
    kernels.narrow(name, dst.bytes, src.bytes, isa)
    dst.assert_guards(f"{isa} narrow {name} {len(x)}")
    return dst.items


def encoded(name, x, isa, residual=None, offsets=(0, 0)):
    """Bytes; the residual is updated."""
    src, dst = guarded(x, offsets[0]), Guarded("uint8", kernels.encoded_nbytes(name, len(x)), offsets[1])
    left = None if residual is None else guarded(residual, offsets[0] ^ 5)
    kernels.encode(name, dst.bytes, src.bytes, None if left is None else left.bytes, isa)
    dst.assert_guards(f"{isa} encode {name} {len(x)}")
    assert (src.bytes == x.view(np.uint8)).all(), "source written"
    if left is not None:
        left.assert_guards(f"{isa} residual {name} {len(x)}")
        residual[:] = left.bytes.copy().view(np.float32)
    return dst.items


def decoded(name, travelled, count, isa, offsets=(0, 0)):
    src, dst = guarded(travelled, offsets[0]), Guarded("float32", count, offsets[1])
    kernels.decode(name, dst.bytes, src.bytes, isa)
    dst.assert_guards(f"{isa} decode {name} {count}")
    return dst.items


# ---- casts ----


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in SMALL_FLOATS])
def test_other_dtypes_are_not_widened(name):
    for cast in (kernels.widen, kernels.narrow):
        with pytest.raises(ValueError, match=name):
            cast(name, bytearray(16), bytes(16))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_every_narrow_item_widens_exactly_and_comes_back(isa, name):
    items = every(name)
    wide = widened(name, items, isa)
    with np.errstate(invalid="ignore"):
        assert_equal(wide, items.astype(np.float32), f"{isa} {name}")
    assert_equal(narrowed(name, wide, isa), items, f"{isa} {name}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_narrowing_rounds_to_nearest_even(isa, name):
    x = floats_around(name)
    with np.errstate(all="ignore"):
        want = x.astype(DTYPES[name])
    assert_equal(narrowed(name, x, isa), want, f"{isa} {name}")


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_casts_come_to_the_same_bits_with_every_instruction_set(name):
    """NaNs too."""
    x = floats_around(name)
    for cast, items in ((narrowed, x), (widened, every(name))):
        first, *others = [cast(name, items, isa).view(np.uint8) for isa in ISAS]
        assert all((first == other).all() for other in others)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_casts_of_any_count_anywhere(isa, name):
    rng = np.random.default_rng(11)
    for count, offsets in itertools.product(COUNTS, OFFSETS):
        x, items = numbers("float32", count, rng), numbers(name, count, rng)
        with np.errstate(all="ignore"):
            narrow, wide = x.astype(DTYPES[name]), items.astype(np.float32)
        context = f"{isa} {name} {count=} {offsets=}"
        assert_equal(narrowed(name, x, isa, offsets), narrow, context)
        assert_equal(widened(name, items, isa, offsets), wide, context)


# ---- wire formats ----


def test_messages_have_the_documented_size():
    for count in COUNTS:
        blocks = -(-count // INT8_BLOCK)
        want = {"native": 4 * count, "bf16": 2 * count, "fp16": 2 * count, "int8": count + 4 * blocks}
        assert {name: kernels.encoded_nbytes(name, count) for name in FORMATS} == want


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("feedback", [False, True], ids=["alone", "feedback"])
def test_encoding_of_any_count_anywhere(isa, name, feedback):
    rng = np.random.default_rng(12)
    for count, offsets in itertools.product(COUNTS, OFFSETS):
        x = floats(count, rng)
        residual = rng.normal(size=count).astype(np.float32) / 100 if feedback else None
        with np.errstate(all="ignore"):
            y = x + residual if feedback else x
        want = as_it_travels(name, y)
        got = encoded(name, x, isa, residual, offsets)
        context = f"{isa} {name} {count=} {offsets=}"
        assert_same_encoding(name, got, want, context)
        arrived = decoded(name, got, count, isa, offsets)
        assert_equal(arrived, as_it_arrives(name, want, count), context)
        if feedback:
            with np.errstate(all="ignore"):
                left = y - arrived
            assert_equal(residual, np.where(np.isfinite(left), left, np.float32(0)), context)


@pytest.mark.parametrize("name", FORMATS)
def test_encodings_are_the_same_bits_with_every_instruction_set(name):
    """NaNs too."""
    x = np.concatenate([floats(10000, np.random.default_rng(13)), floats_around("float16")])
    results = []
    for isa in ISAS:
        residual = np.linspace(-1, 1, len(x), dtype=np.float32)
        travelled = encoded(name, x, isa, residual)
        arrived = decoded(name, travelled, len(x), isa)
        results.append((travelled.tobytes(), arrived.tobytes(), residual.tobytes()))
    assert len(set(results)) == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_infinities_and_nans_travel_and_leave_nothing_over(isa, name):
    x = np.ones(3 * INT8_BLOCK, np.float32)
    x[[3, 7, 11, 13]] = np.nan, np.inf, -np.inf, LARGEST
    residual = np.full_like(x, 0.25)
    arrived = decoded(name, encoded(name, x, isa, residual), len(x), isa)
    assert np.isfinite(residual).all()
    if name == "int8":
        assert np.isnan(arrived[:INT8_BLOCK]).all()
        assert (residual[:INT8_BLOCK] == 0).all()
    else:
        finite = LARGEST if name == "native" else np.inf  # bfloat16 rounds it to infinity as well
        assert np.array_equal(arrived[[3, 7, 11, 13]], [np.nan, np.inf, -np.inf, finite], equal_nan=True)
        assert (residual[[3, 7, 11, 13]] == 0).all()
    assert np.isfinite(arrived[INT8_BLOCK:]).all(), "another block was spoiled"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("at", [0, 100, INT8_BLOCK - 1, INT8_BLOCK, INT8_BLOCK + 2])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_number_that_is_none_makes_its_int8_block_nan(isa, at, value):
    x = np.ones(INT8_BLOCK + 3, np.float32)  # the last block is short
    x[at] = value
    arrived = decoded("int8", encoded("int8", x, isa), len(x), isa)
    spoiled = np.arange(len(x)) // INT8_BLOCK == at // INT8_BLOCK
    assert (np.isnan(arrived) == spoiled).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "size", [1e-45, 63e-45, 1e-42, 1e-40, 2.0**-126, 127 * 2.0**-126, 1e-36, 1, 1e30, LARGEST]
)
def test_int8_is_off_by_half_a_scale_at_most(isa, size):
    rng = np.random.default_rng(14)
    x = (rng.uniform(-1, 1, 20 * INT8_BLOCK + 77) * size).astype(np.float32)
    x[:3] = size, -size, size / 2
    travelled = encoded("int8", x, isa)
    arrived = decoded("int8", travelled, len(x), isa)
    starts = np.arange(0, len(travelled), INT8_BLOCK + 4)
    scales = travelled[starts[:, None] + np.arange(4)].view(np.float32)[:, 0]
    half = np.repeat(scales.astype(np.float64), INT8_BLOCK)[: len(x)] / 2
    assert (np.abs(x.astype(np.float64) - arrived) <= half * (1 + 2.0**-15)).all()
    assert (np.abs(travelled[4 : 4 + INT8_BLOCK].view(np.int8).astype(int)) <= 127).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_piece_of_whole_int8_blocks_is_decoded_alone(isa):
    x = floats(5 * INT8_BLOCK + 9, np.random.default_rng(15))
    travelled = encoded("int8", x, isa)
    whole = decoded("int8", travelled, len(x), isa)
    cut = 2 * INT8_BLOCK
    cut_nbytes = kernels.encoded_nbytes("int8", cut)
    first = decoded("int8", travelled[:cut_nbytes], cut, isa)
    rest = decoded("int8", travelled[cut_nbytes:], len(x) - cut, isa)
    assert_equal(np.concatenate([first, rest]), whole, isa)
    assert (encoded("int8", x[cut:], isa) == travelled[cut_nbytes:]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_stay_zeros_in_int8(isa):
    zeros = np.array([0.0, -0.0] * INT8_BLOCK, np.float32)
    residual = -zeros
    travelled = encoded("int8", zeros, isa, residual)
    assert not travelled.any()
    assert not decoded("int8", travelled, len(zeros), isa).any()
    assert not residual.any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bf16", "fp16", "int8"])
def test_with_feedback_the_mean_of_what_arrives_converges(isa, name):
    """All but the last residual has arrived: after T calls the mean is off by that residual / T."""
    x = np.random.default_rng(16).normal(size=1000).astype(np.float32)
    residual, total = np.zeros_like(x), np.zeros(len(x))
    alone = np.abs(decoded(name, encoded(name, x, isa), len(x), isa) - x).max()
    for calls in range(1, 257):
        total += decoded(name, encoded(name, x, isa, residual), len(x), isa)
        if calls in (16, 64, 256):
            assert np.abs(total / calls - x).max() <= 1.5 * alone / calls + 1e-6
