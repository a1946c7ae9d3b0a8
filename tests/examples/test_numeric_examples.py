"""The examples that compute: on any number of ranks they print the results of NumPy and scikit-learn."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from combinations import first
from engines import needs

import shmring

pytestmark = needs("sklearn")

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WATCHDOG_S = 100

pytestmark = pytest.mark.limit(WATCHDOG_S + 20)  # four ranks that import scikit-learn, on a busy machine


def start(command, path=PACKAGE_PARENT):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )


def run(name, nranks, *options):
    """Return the example's output on this number of ranks."""
    launcher = ("-m", "shmring.run", "--no-prefix", "-n", nranks) if nranks > 1 else ()
    done = start((*launcher, EXAMPLES / f"{name}.py", *options))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{nranks} rank(s), " in done.stdout
    assert "%|" not in done.stderr  # no progress bar, as this is no terminal
    return done.stdout


def figures(pattern, text):
    found = re.search(pattern, text)
    assert found, text
    return [float(figure) for figure in found.groups()]


def on_any_number_of_ranks(name, *options, ranks=(1, 2, 4)):
    """Return the example's output without the line that names the number of ranks; all numbers give the
    same."""
    outputs = {run(name, nranks, *options).partition("\n")[2] for nranks in ranks}
    assert len(outputs) == 1, "\n".join(outputs)
    return outputs.pop()


# --- k-means ---


@pytest.mark.slow
def test_kmeans_is_as_good_as_scikit_learns_and_the_same_on_any_number_of_ranks():
    from sklearn.cluster import KMeans
    from sklearn.datasets import load_digits

    printed = on_any_number_of_ranks("kmeans", "--epochs", 10)
    assert "centres bit-identical on all ranks: yes" in printed
    (inertia,) = figures(r"^inertia (\d+) with 10 clusters", printed)
    best = KMeans(10, n_init=4, random_state=0).fit(load_digits().data).inertia_
    assert 0.999 * best < inertia < 1.08 * best
    (theirs,) = figures(r"scikit-learn's KMeans from there: (\d+)", printed)
    assert 0.999 * best < theirs < 1.08 * best


@pytest.mark.slow
def test_kmeans_with_more_ranks_than_images_in_a_batch():
    printed = run("kmeans", 4, "--epochs", 1, "--batch", 3, "--clusters", 2)
    assert "centres bit-identical on all ranks: yes" in printed


# --- pi ---


def hits(seed, blocks, points):
    """Counted here by numpy, one block after the other."""
    count = 0
    for block in range(blocks):
        x, y = np.random.Generator(np.random.Philox(seed).jumped(block)).random((2, points))
        count += np.count_nonzero(x * x + y * y < 1)
    return count


def test_pi_is_the_same_to_the_last_digit_on_any_number_of_ranks():
    options = ("--rounds", 5, "--blocks", 7, "--points", 2000, "--seed", 3)
    printed = on_any_number_of_ranks("monte_carlo_pi", *options)
    count, points = figures(r"(\d+) of (\d+) points hit", printed)
    assert (count, points) == (hits(3, 35, 2000), 70_000)
    value, error, distance = figures(r"about ([\d.]+) ± ([\d.]+), ([\d.]+) standard errors off", printed)
    assert value == pytest.approx(4 * count / points, abs=1e-6)
    assert error == pytest.approx(math.sqrt(math.pi * (4 - math.pi) / points), rel=0.05)
    assert distance == pytest.approx(abs(value - math.pi) / error, abs=0.06)


def test_streams_of_pi_differ():
    counts = {hits(1, 1, 10_000), hits(2, 1, 10_000), hits(1, 2, 10_000) - hits(1, 1, 10_000)}
    assert len(counts) == 3


def test_an_impossible_pi_is_a_failed_run():
    done = start((EXAMPLES / "monte_carlo_pi.py", "--rounds", 1, "--blocks", 1, "--points", 1))
    assert done.returncode == 1
    assert done.stderr.endswith("FAILED: this is not pi\n")


# --- the histogram ---


def counted(printed):
    """Edges and counts of the lines that are bins."""
    lines = re.findall(r"^ *(\S+) to +(\S+) +(\d+)(?: #+)?$", printed, re.MULTILINE)
    lows, highs, counts = np.array(lines, dtype=float).T
    return [*lows, highs[-1]], counts.tolist()


def assert_counts(printed, values, bins):
    edges, counts = counted(printed)
    expected, expected_edges = np.histogram(values, bins)
    assert counts == expected.tolist()
    assert edges == pytest.approx(expected_edges, rel=1e-4, abs=1e-4)
    assert "same counts as np.histogram of the whole: yes" in printed


@pytest.mark.parametrize("dtype", first(1, ["f4", "i2"]))
def test_histogram_of_a_file(tmp_path, dtype):
    values = (1000 * np.random.default_rng(5).standard_normal((300, 2001))).astype(dtype)
    np.save(tmp_path / "values.npy", values)
    options = ("--file", tmp_path / "values.npy", "--bins", 7)
    assert_counts(on_any_number_of_ranks("histogram", *options), values.astype(float), 7)


@pytest.mark.slow
def test_histogram_of_few_random_numbers_with_more_ranks_than_blocks():
    printed = on_any_number_of_ranks("histogram", "--elements", 1000, "--bins", 5, "--seed", 9, ranks=(1, 4))
    values = np.random.Generator(np.random.Philox(9)).standard_normal(1000)
    assert_counts(printed, values, 5)


def test_histogram_of_equal_numbers(tmp_path):
    np.save(tmp_path / "values.npy", np.full(10, 3))
    printed = run("histogram", 1, "--file", tmp_path / "values.npy", "--bins", 3)
    assert_counts(printed, np.full(10, 3), 3)


@pytest.mark.parametrize("nranks", [1, 2])
def test_histogram_says_that_a_number_is_none(tmp_path, nranks):
    values = np.zeros(1 << 19)
    values[-1] = np.nan
    np.save(tmp_path / "values.npy", values)
    histogram = (EXAMPLES / "histogram.py", "--file", tmp_path / "values.npy")
    done = start(("-m", "shmring.run", "-n", nranks, *histogram))
    assert done.returncode == 1
    assert "there is a NaN or an infinity among the numbers" in done.stderr
    assert "Traceback" not in done.stderr


# --- fusion ---


@pytest.mark.parametrize("nranks", first(1, [2, 1, 4]))
def test_fused_and_overlapped_training_comes_to_the_same_bits(nranks):
    printed = run("fusion_overlap", nranks, "--steps", 6, "--layers", 5, "--width", 16, "--bucket", 2000)
    assert "weights bit-identical in all ways and on all ranks: yes" in printed
    (difference,) = figures(r"one-rank run: ([\d.e+-]+)", printed)
    assert difference <= 1e-12
    first, last = figures(r"loss first ([\d.]+), last ([\d.]+)", printed)
    assert last < first
    for way in ("fused", "overlapped"):
        (ratio,) = figures(rf"{way}: ([\d.]+) times as many steps/s", printed)
        assert ratio > 0


# --- priorities ---


@pytest.mark.slow
@pytest.mark.parametrize("nranks", first(1, [2, 1, 4]))
def test_gradients_by_priority_come_to_the_same_bits(nranks):
    small = "--rounds", 2, "--steps", 3, "--layers", 4, "--width", 20, "--batch", 64
    printed = run("priority_backward", nranks, *small)
    assert "weights bit-identical in both ways and on all ranks: yes" in printed
    (difference,) = figures(r"one-rank run: ([\d.e+-]+)", printed)
    assert difference <= 1e-12
    first, last = figures(r"loss first ([\d.]+), last ([\d.]+)", printed)
    assert last < first
    (ratio,) = figures(r"by priority: ([\d.]+) times as many steps/s", printed)
    assert ratio > 0


# --- all examples ---


@pytest.mark.parametrize(
    "name", first(1, ["kmeans", "fusion_overlap", "histogram", "monte_carlo_pi", "priority_backward"])
)
def test_plain_lines_without_tqdm(tmp_path, name):
    (tmp_path / "tqdm.py").write_text("raise ImportError")
    small = {
        "fusion_overlap": ("--steps", 2, "--layers", 2),
        "histogram": ("--elements", 9),
        "kmeans": ("--epochs", 1, "--batch", 900),
        "monte_carlo_pi": ("--rounds", 2, "--points", 999),
        "priority_backward": ("--rounds", 2, "--steps", 1, "--layers", 2),
    }
    done = start((EXAMPLES / f"{name}.py", *small[name]), path=f"{tmp_path}{os.pathsep}{PACKAGE_PARENT}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\w+: \w+ (?:2/2|1/1)", done.stderr, re.MULTILINE), done.stderr


WRONG = [
    ("elastic_training", ("--kill", "3"), "--kill: '3' is not RANK@STEP, as in 2@150"),
    ("elastic_training", ("--batch", "0"), "--batch: '0' is not a whole number from 1 on"),
    ("fusion_overlap", ("--lr", "nan"), "--lr: 'nan' is not a number above 0"),
    ("fusion_overlap", ("--batch", "1798"), "--batch 1798: there are 1797 images"),
    ("histogram", ("--bins", "2.5"), "--bins: '2.5' is not a whole number from 1 on"),
    ("histogram", ("--file", "missing.npy"), "--file missing.npy: No such file or directory"),
    ("histogram", ("--file", __file__), "no array as np.save writes it"),
    ("kmeans", ("--clusters", "201"), "--clusters 201: at most 200 of 1797 images, please"),
    ("kmeans", ("--cluster", "3"), "unrecognized arguments: --cluster"),
    ("monte_carlo_pi", ("--points", "-5"), "--points: '-5' is not a whole number from 1 on"),
    ("train_digits", ("--lr", "fast"), "--lr: 'fast' is not a number above 0"),
]


@pytest.mark.parametrize(("name", "options", "words"), WRONG, ids=[f"{w[0]} {w[1][0]}" for w in WRONG])
def test_a_wrong_argument_is_one_line_and_status_2(name, options, words):
    done = start((EXAMPLES / f"{name}.py", *options))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{name}.py: ")
    assert words in line


@pytest.mark.parametrize(("array", "kind"), [(np.array([]), "empty"), (np.array(["a"]), "words")])
def test_histogram_refuses_files_without_numbers(tmp_path, array, kind):
    np.save(tmp_path / f"{kind}.npy", array)
    done = start((EXAMPLES / "histogram.py", "--file", tmp_path / f"{kind}.npy"))
    assert done.returncode == 2
    assert "has to be an .npy file with numbers in it" in done.stderr
