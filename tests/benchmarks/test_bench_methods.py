"""The benchmarks of methods and adapters: tiny runs, and their output. Never a test of speed."""

import json
import sys
from pathlib import Path

import pytest
from engines import KEY, output_of, rows_of, run_ranks, start
from rendezvous import free_port

import shmring
from shmring.methods.stepwise import ALGORITHMS

BENCH = Path(__file__).resolve().parents[2] / "bench"
PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
WATCHDOG_S = 100

pytestmark = pytest.mark.limit(WATCHDOG_S + 20)


def test_compression_is_measured_beside_all_reduce(tmp_path):
    few = ["--nbytes", "64K", "--rounds", 1, "--sample-s", 0.001, "--json", tmp_path / "found.json"]
    done = run_ranks(2, BENCH / "methods" / "bench_compression.py", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    reported = json.loads((tmp_path / "found.json").read_text())
    assert set(rows_of(done.stdout)) == set(reported["ways"])
    assert reported["ways"]["PowerSGD rank 2"]["s"] > 0


@pytest.mark.slow
def test_sparse_is_measured_by_density(tmp_path):
    few = ["--sizes", "4K,64K", "--densities", "0,0.5,1", "--rounds", 1, "--sample-s", 0.001]
    done = run_ranks(2, BENCH / "methods" / "bench_sparse.py", *few, "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    reported = json.loads((tmp_path / "found.json").read_text())["found"]
    assert set(reported) == {"4096", "65536"}
    assert set(rows_of(done.stdout)) == set(reported["4096"]["s"])
    for of_size in reported.values():
        assert all(0 <= density <= 1 for density in of_size["break_even"].values())


def test_the_break_even_is_between_the_densities_beside_it():
    from bench.methods.bench_sparse import break_even

    densities = [0.0, 0.5, 1.0]
    assert break_even(densities, [1.0, 2.0, 4.0], [3.0] * 3) == 0.75
    assert break_even(densities, [5.0, 5.0, 5.0], [3.0] * 3) == 0.0
    assert break_even(densities, [1.0, 1.0, 1.0], [3.0] * 3) == 1.0


@pytest.mark.slow
def test_an_exchange_is_measured_beside_all_reduce(tmp_path):
    few = ("--sizes", "4K,40", "--rounds", 1, "--sample-s", 0.001, "--json", tmp_path / "found.json")
    done = run_ranks(2, BENCH / "methods" / "bench_server.py", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    ways = ["all_reduce, auto", "all_reduce, ring", "one server", "2 servers", "one-sided"]
    ways.append("rank 0 only serves")
    assert [(row["nbytes"], row["way"]) for row in rows] == [(n, way) for n in (4096, 40) for way in ways]
    assert [row["textbook_nbytes"] / 4096 for row in rows[:6]] == [1, 1, 4, 2, 4, 2]
    assert rows[5]["counted_nbytes"] == rows[5]["textbook_nbytes"]
    assert done.stdout.count("| 2 servers |") == 2


@pytest.mark.slow
def test_reducers_of_two_hosts_are_measured(tmp_path):
    """On two hosts by name, of one worker or reducer each."""
    few = ("--sizes", "4K,64K", "--rounds", 2, "--sample-s", 0.01, "--json", tmp_path / "found.json")
    meet = ("--nnodes", 2, "--rdzv", f"127.0.0.1:{free_port()}", "-n", 1)
    hosts = [
        start(
            *(
                sys.executable,
                "-m",
                "shmring.run",
                "--no-prefix",
                *meet,
                "--node-rank",
                host,
                BENCH / "methods" / "bench_reducers.py",
                *few,
            ),
            SHMRING_NODE=str(host),
            SHMRING_KEY=KEY,
        )
        for host in range(2)
    ]
    assert "| 0.0625 MiB |" in "".join(output_of(*hosts))
    assert [row["nbytes"] for row in json.loads((tmp_path / "found.json").read_text())["rows"]] == [
        4096,
        65536,
    ]


@pytest.mark.slow
def test_over_hosts_the_benchmark_has_them_beside_auto(tmp_path):
    few = ("--sizes", "4K", "--rounds", 1, "--sample-s", 0.001, "--json", tmp_path / "found.json")
    meet = ("--nnodes", 2, "--rdzv", f"127.0.0.1:{free_port()}", "-n", 1, "--no-prefix")
    shmrun = (sys.executable, "-m", "shmring.run", *meet)
    hosts = [
        start(
            *shmrun,
            "--node-rank",
            host,
            BENCH / "engine" / "bench_algorithms.py",
            *few,
            SHMRING_NODE=str(host),
            SHMRING_KEY=KEY,
        )
        for host in range(2)
    ]
    assert "| 2 | 4 KiB |" in "".join(output_of(*hosts))
    (row,) = json.loads((tmp_path / "found.json").read_text())
    assert set(row["us"]) == {"auto", *ALGORITHMS}


@pytest.mark.slow
def test_the_benchmark_of_frameworks_runs_with_those_that_are_there(tmp_path):
    few = ("--sizes", "4,4K", "--rounds", 1, "--json", tmp_path / "found.json")
    ranks = (sys.executable, "-m", "shmring.run", "--no-prefix", "-n", 2)
    printed = output_of(start(*ranks, BENCH / "torch" / "bench_frameworks.py", *few))
    assert "| 4096 |" in printed
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["nbytes"] for row in rows] == [4, 4096]
    assert all(row["out="] > 0 for row in rows)
