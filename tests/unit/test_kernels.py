"""The kernels against NumPy and ml_dtypes, bit for bit: every dtype, op and instruction set of this
machine."""

import functools
import itertools
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from combinations import each_value, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st

from shmring._core import kernels

ROOT = Path(__file__).parents[2]
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name) if name.startswith(("bfloat", "float8")) else name)
    for name in kernels.dtypes()
}
SMALL_FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = {"band", "bor", "bxor"}
LOGICAL = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}
UFUNCS = {
    "sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip
BOOL_UFUNCS = {
    "sum": np.logical_or, "max": np.logical_or, "bor": np.logical_or, "prod": np.logical_and,
    "min": np.logical_and, "band": np.logical_and, "bxor": np.logical_xor,
}  # fmt: skip
COUNTS = [*range(71), 128, 1000, 4097]
GUARD_NBYTES = 128
GUARD = 0xA5


def is_complex(name):
    return DTYPES[name].kind == "c"


def is_float(name):
    return name in SMALL_FLOATS or DTYPES[name].kind == "f"


# ---- expected results ----


def multiply_complex(a, b):
    """Multiply by the formula: NumPy's own loop fuses products and sums on some CPUs, so its bits vary."""
    c = np.empty_like(a)
    c.real = a.real * b.real - a.imag * b.imag
    c.imag = a.real * b.imag + a.imag * b.real
    return c


def divide(total, divisor):
    by = total.real.dtype.type(divisor)
    if total.dtype.kind != "c":
        return total / by
    parts = total.view(total.real.dtype) / by
    return parts.view(total.dtype)


def expected(name, op, arrays, divisor=1):
    """A fold in order; small floats in float32 and rounded once."""
    dtype = DTYPES[name]
    with np.errstate(all="ignore"):
        if op in LOGICAL:
            return functools.reduce(LOGICAL[op], [a.astype(bool) for a in arrays]).astype(dtype)
        if name == "bool":
            return functools.reduce(BOOL_UFUNCS[op], arrays)
        if name in SMALL_FLOATS:
            arrays = [a.astype(np.float32) for a in arrays]
        ufunc = multiply_complex if op == "prod" and is_complex(name) else UFUNCS[op]
        total = functools.reduce(ufunc, arrays)
        if op == "avg":
            total = divide(total, divisor)
        return total.astype(dtype)


def assert_same(got, want, op, context):
    """Equal bits, any NaN for any NaN; zeros of min and max may have any sign."""
    dtype = want.dtype
    if dtype.kind == "c":
        dtype = want.real.dtype
        got, want = got.view(dtype), want.view(dtype)
    bits = np.dtype(f"u{dtype.itemsize}")
    same = got.view(bits) == want.view(bits)
    if dtype.kind not in "biu":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            wide_got, wide_want = got.astype(np.float64), want.astype(np.float64)
        same |= np.isnan(wide_got) & np.isnan(wide_want)
        if op in ("min", "max"):
            same |= wide_got == wide_want
    if not same.all():
        at = int(np.flatnonzero(~same)[0])
        pytest.fail(f"{context}: item {at} of {len(want)} is {got[at]!r}, should be {want[at]!r}")


# ---- numbers to fold, and memory to fold them in ----


def special_values(name):
    dtype = DTYPES[name]
    if name == "bool":
        return np.array([False, True])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.array([info.min, info.max, 0, 1, info.max - 1, info.max // 2 + 1], dtype)
    if is_complex(name):
        parts = special_values(dtype.type(0).real.dtype.name)
        return np.array([complex(a, b) for a, b in itertools.product(parts, parts)], dtype)
    info = ml_dtypes.finfo(dtype)
    numbers = [0, 1, 3, info.tiny, info.smallest_subnormal, info.max, np.inf, np.nan, 1 + info.eps]
    with np.errstate(all="ignore"):
        positive = np.array([np.float64(x) for x in numbers]).astype(dtype)
        return np.concatenate([positive, -positive])


def numbers(name, count, rng):
    """A third each: any bits, special values, small numbers that make sums round."""
    dtype = DTYPES[name]
    if name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    out = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
    kind = rng.integers(0, 3, count)
    special = special_values(name)
    out[kind == 1] = special[rng.integers(0, len(special), (kind == 1).sum())]
    small = rng.normal(size=(kind == 2).sum()) * 4
    out[kind == 2] = small.astype(np.int64).astype(dtype) if dtype.kind in "iu" else small.astype(dtype)
    return out


class Guarded:
    """count items at any address, with bytes around them that must stay as they are."""

    def __init__(self, name, count, offset):
        nbytes = count * DTYPES[name].itemsize
        room = np.full(nbytes + 2 * GUARD_NBYTES + 64, GUARD, np.uint8)
        begin = GUARD_NBYTES + (offset - room.ctypes.data - GUARD_NBYTES) % 64
        self.around = room[:begin], room[begin + nbytes :]
        self.bytes = room[begin : begin + nbytes]
        self.dtype = DTYPES[name]

    @property
    def items(self):
        return self.bytes.copy().view(self.dtype)

    def fill(self, items):
        self.bytes[:] = items.view(np.uint8)
        return self

    def assert_guards(self, context):
        for guard in self.around:
            assert (guard == GUARD).all(), f"{context}: written outside of the destination"


def check(isa, name, op, arrays, *, offsets=(0,), ndst=1, stream=0, aliases=(), divisor=1):
    """Folds arrays and compares. aliases: (d, s) for each destination that is a source as well."""
    count = len(arrays[0])
    context = f"{isa} {name} {op} count={count} nsrc={len(arrays)} {ndst=} {stream=:b} {offsets=} {aliases=}"
    offset = itertools.cycle(offsets)
    srcs = [Guarded(name, count, next(offset)).fill(a) for a in arrays]
    dsts = [Guarded(name, count, next(offset)) for _ in range(ndst)]
    for d, s in aliases:
        dsts[d] = srcs[s]
    want = expected(name, op, arrays, divisor)
    kernels.fold(name, op, [s.bytes for s in srcs], [d.bytes for d in dsts], isa, divisor, stream)
    for dst in dsts:
        assert_same(dst.items, want, op, context)
    for guarded in {id(g): g for g in srcs + dsts}.values():
        guarded.assert_guards(context)
    for s, source in enumerate(srcs):
        if source not in dsts:
            assert (source.bytes == arrays[s].view(np.uint8)).all(), f"{context}: source written"


# ---- the tests ----


def test_the_table_has_every_op_where_it_has_a_meaning():
    for name in DTYPES:
        ops = {*UFUNCS, *LOGICAL}
        if is_complex(name):
            ops -= {"min", "max"}
        if is_complex(name) or is_float(name):
            ops -= INTEGERS
        else:
            ops -= {"avg"}
        assert set(kernels.ops(name)) == ops, name
        assert kernels.dtypes()[name] == DTYPES[name].itemsize


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="sse9"):
        kernels.fold("int8", "sum", [b"1"], [bytearray(1)], "sse9")


@each_value({"isa": kernels.isas(), "name": DTYPES})
def test_every_count_from_none_to_many(isa, name):
    rng = np.random.default_rng(1)
    for op, count in itertools.product(kernels.ops(name), COUNTS):
        nsrc = 2 + count % 2
        check(isa, name, op, [numbers(name, count, rng) for _ in range(nsrc)], divisor=nsrc)


@each_value({"isa": kernels.isas(), "name": DTYPES})
def test_any_number_of_sources(isa, name):
    rng = np.random.default_rng(2)
    for op, nsrc in itertools.product(kernels.ops(name), [*range(1, 18), 33, 70]):
        count = 77 if nsrc % 4 else 2100
        check(isa, name, op, [numbers(name, count, rng) for _ in range(nsrc)], divisor=nsrc)


@each_value({"isa": kernels.isas(), "name": DTYPES})
def test_streamed_and_ordinary_destinations(isa, name):
    rng = np.random.default_rng(3)
    factors = {
        "op": kernels.ops(name),
        "shape": [(1, 0b1), (2, 0b01), (2, 0b10), (2, 0b11), (3, 0b101)],
        "nsrc": (2, 9),
        "place": [(1500, (0,)), (1301, (16, 0, 48)), (333, (1, 7, 30)), (5, (8, 0))],
    }
    for row in pairwise(factors):
        (ndst, stream), (count, offsets) = row["shape"], row["place"]
        arrays = [numbers(name, count, rng) for _ in range(row["nsrc"])]
        check(isa, name, row["op"], arrays, offsets=offsets, ndst=ndst, stream=stream, divisor=3)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("stream", [0, 1 << 31, 0xFFFFFFFF, 0x80000001])
def test_more_destinations_than_bits_follow_the_last_bit(isa, stream):
    rng = np.random.default_rng(8)
    arrays = [numbers("float32", 700, rng) for _ in range(40)]
    check(isa, "float32", "sum", arrays, ndst=40, stream=stream, aliases=[(i, i) for i in range(0, 40, 3)])


@each_value({"isa": kernels.isas(), "name": DTYPES})
def test_in_place(isa, name):
    rng = np.random.default_rng(4)
    targets = [([(0, 0)], 0), ([(0, 1)], 0b10), ([(0, 1), (1, 0)], 0b11), ([(1, 1)], 0b01)]
    for op, (aliases, stream) in itertools.product(kernels.ops(name), targets):
        for count, nsrc in [(1203, 2), (70, 3), (4100, 11)]:
            arrays = [numbers(name, count, rng) for _ in range(nsrc)]
            check(isa, name, op, arrays, offsets=(0, 24), ndst=2, stream=stream, aliases=aliases, divisor=7)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_16_bit_floats(isa, name):
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name])
    others = np.random.default_rng(5).permutation(every)
    zero, one = np.zeros_like(every), np.ones_like(every)
    for op, other, divisor in [("sum", zero, 1), ("sum", others, 1), ("prod", one, 1), ("prod", others, 1),
                               ("avg", others, 3), ("min", others, 1), ("max", others, 1)]:  # fmt: skip
        check(isa, name, op, [every, other], divisor=divisor)
    check(isa, name, "sum", [every])


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_all_pairs_of_8_bit_floats(isa, name):
    every = np.arange(256, dtype=np.uint8)
    pairs = [np.repeat(every, 256).view(DTYPES[name]), np.tile(every, 256).view(DTYPES[name])]
    for op in kernels.ops(name):
        check(isa, name, op, pairs, divisor=3)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("name", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("divisor", [1, 2, 3, 64, 1000, 1 << 20])
def test_averages_are_divisions(isa, name, divisor):
    rng = np.random.default_rng(6)
    check(isa, name, "avg", [numbers(name, 3000, rng) for _ in range(2)], divisor=divisor)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("nsrc", [3, 5, 11, 41])
def test_a_small_float_is_rounded_once(isa, nsrc):
    """Rounded after each addition, 2048 + 1 + 1 would stay 2048."""
    big, ones = Guarded("float16", 40, 0), Guarded("float16", 40, 0)
    big.fill(np.full(40, 2048, np.float16))
    ones.fill(np.ones(40, np.float16))
    total = Guarded("float16", 40, 0)
    kernels.fold("float16", "sum", [big.bytes] + [ones.bytes] * (nsrc - 1), [total.bytes], isa)
    assert (total.items == 2048 + nsrc - 1).all()


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("way", [0, 1, 2])  # ordinary, streaming, in turn
def test_copies(isa, way):
    rng = np.random.default_rng(7)
    for count in (*range(140), 2047, 2048, 2049, 4095, 4096, 4097, 32767, 32768, 32769, 32831, 100_000):
        for offset in (0, 1, 40):
            src = Guarded("uint8", count, 3).fill(np.frombuffer(rng.bytes(count), np.uint8))
            dst = Guarded("uint8", count, offset)
            kernels.copy([dst.bytes], [src.bytes], isa, way)
            assert (dst.bytes == src.bytes).all()
            dst.assert_guards(f"{isa} {way=} {count=} {offset=}")


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("streams", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_two_copies_at_once(isa, streams):
    rng = np.random.default_rng(7)
    for count, offsets in itertools.product([*range(140), 5000], [(0, 0), (1, 40), (40, 0)]):
        srcs = [Guarded("uint8", count, 3).fill(np.frombuffer(rng.bytes(count), np.uint8)) for _ in offsets]
        dsts = [Guarded("uint8", count, offset) for offset in offsets]
        kernels.copy_two([d.bytes for d in dsts], [s.bytes for s in srcs], isa, streams)
        for src, dst in zip(srcs, dsts, strict=True):
            assert (dst.bytes == src.bytes).all()
            dst.assert_guards(f"{isa} {streams=} {count=} {offsets=}")


@given(data=st.data())
@settings(max_examples=200)
def test_any_call_at_all(data):
    isa, name = data.draw(st.sampled_from(kernels.isas())), data.draw(st.sampled_from(sorted(DTYPES)))
    op = data.draw(st.sampled_from(kernels.ops(name)))
    nsrc, ndst = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 3))
    count = data.draw(st.one_of(st.integers(0, 70), st.integers(0, 6000)))
    stream = data.draw(st.integers(0, (1 << ndst) - 1))
    offsets = data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=4))
    targets = data.draw(st.lists(st.integers(0, ndst - 1), unique=True))
    places = data.draw(st.permutations(range(nsrc)))
    divisor = data.draw(st.integers(1, 1 << 16))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    arrays = [numbers(name, count, rng) for _ in range(nsrc)]
    aliases = tuple(zip(targets, places, strict=False))
    check(isa, name, op, arrays, offsets=offsets, ndst=ndst, stream=stream, aliases=aliases, divisor=divisor)


KERNEL_SOURCES = [str(ROOT / "tests/repo/c/test_kernels.c"), str(ROOT / "src/kernels/kernels.c")]
KERNEL_FLAGS = ["-ffp-contract=off", "-fno-strict-aliasing", f"-I{ROOT / 'src'}"]


@pytest.mark.slow
@pytest.mark.limit(300)
def test_kernels_under_sanitizers(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = str(tmp_path / "test_kernels")
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [compiler, "-O0", "-g", *KERNEL_FLAGS, *sanitize]
    built = subprocess.run([*command, *KERNEL_SOURCES, "-o", program], capture_output=True, text=True)
    if built.returncode != 0 and ("asan" in built.stderr or "ubsan" in built.stderr):
        pytest.skip(f"no sanitizer library: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.limit(300)
def test_arm_comes_to_the_same_bits(tmp_path):
    """NEON, under emulation; Debian: qemu-user, gcc-aarch64-linux-gnu."""
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs a compiler and an emulator for aarch64")
    program = str(tmp_path / "test_kernels")
    command = [compiler, "-O2", "-static", *KERNEL_FLAGS, *KERNEL_SOURCES, "-o", program]
    subprocess.run(command, check=True)
    ran = subprocess.run([emulator, program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "neon" in ran.stdout
