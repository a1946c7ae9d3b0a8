"""The benchmarks of priorities and of the cost model: tiny runs. Never a test of speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines import environment

from shmring import model
from shmring.model import Link

BENCH = Path(__file__).resolve().parents[2] / "bench"
SMALL = ("--sizes", "8:32K", "--rounds", "1", "--sample-s", "1e-4")


@pytest.mark.slow
def test_priorities_are_measured(tmp_path):
    small = "--layers=4K,64K", "--compute-ms=0.2", "--behind=9M", "--iterations=2", "--rounds=2"
    program = BENCH / "engine" / "bench_priority.py", *small, f"--json={tmp_path / 'found'}"
    command = "-m", "shmring.run", "--no-prefix", "-n2", *program
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| an urgent call behind a large one |" in done.stdout
    found = json.loads((tmp_path / "found").read_text())
    assert all(took["by priority"] > 0 for took in found["seconds"].values())


def test_the_model_foretells_the_sizes_that_it_did_not_fit(tmp_path):
    path = tmp_path / "model.json"
    program = [str(BENCH / "engine" / "bench_model.py"), *SMALL, "--count", "100000", "--bandwidth", "1e9"]
    command = [sys.executable, "-m", "shmring.run", "--no-prefix", "-n", "2", *program, "--json", str(path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 13
    report = json.loads(path.read_text())
    assert [fit["algorithm"] for fit in report["algorithms"]] == ["auto", "ring", "tree"]
    for fit, name in zip(report["algorithms"], ("direct", "ring", "tree"), strict=True):
        link = Link(fit["alpha_s"], fit["beta"])
        assert [row["fitted"] for row in fit["rows"]] == [True, False] * 6 + [True]
        for row in fit["rows"]:
            assert row["measured_s"] > 0
            assert row["predicted_s"] == pytest.approx(model.seconds(name, row["nbytes"], 2, link))
    large = report["large"]
    assert (large["nbytes"], large["nominal_s"]) == (400_000, pytest.approx(400e-6))
    assert f"400000 bytes: measured {large['measured_s']:.3f} s" in done.stdout


def test_the_model_of_one_rank_says_how_to_start_more():
    command = [sys.executable, str(BENCH / "engine" / "bench_model.py"), *SMALL]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "bench_model.py measures between ranks: shmrun -n 2 bench/engine/bench_model.py\n"


@pytest.mark.slow
def test_over_hosts_the_model_is_of_the_wire(tmp_path):
    path = tmp_path / "model.json"
    program = [str(BENCH / "engine" / "bench_model.py"), *SMALL, "--algorithms", "auto", "--json", str(path)]
    command = [
        sys.executable,
        str(BENCH / "internode" / "on_hosts.py"),
        "--hosts",
        "2",
        "-n",
        "2",
        *program,
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=50)
    if "NoHosts" in done.stderr:
        pytest.skip(f"no stand-ins for hosts: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (fit,) = json.loads(path.read_text())["algorithms"]
    link = Link(fit["alpha_s"], fit["beta"])
    for row in fit["rows"]:
        _, between = model.hierarchical(row["nbytes"], 2, 2)
        assert row["predicted_s"] == pytest.approx(between.seconds(link))
