"""The benchmarks of methods that save memory or synchronisations: tiny runs. Never a test of speed."""

import json
from pathlib import Path

import pytest
from engines import run_ranks

BENCH = Path(__file__).resolve().parents[2] / "bench"


def shmrun(nprocs, *command):
    done = run_ranks(nprocs, *command)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_sharded_step_is_measured_beside_a_plain_one(tmp_path):
    path = str(tmp_path / "rows.json")
    command = ["--sizes", "64K", "--bucket", "4K", "--rounds", "1", "--json", path]
    printed = shmrun(2, str(BENCH / "methods" / "bench_sharded.py"), *command)
    assert "| 0.0625 MiB | stage 2 |" in printed
    rows = {row["way"]: row for row in json.loads(Path(path).read_text())["rows"]}
    assert [row["state_nbytes"] for row in rows.values()] == [2 << 16, 1 << 16, 1 << 16]
    assert [row["gradient_nbytes"] for row in rows.values()] == [1 << 16, 1 << 16, (1 << 15) + (2 << 12)]
    assert rows["plain"]["to_plain"] == 1


@pytest.mark.slow
def test_a_sample_is_timed_by_how_often_ranks_synchronise(tmp_path):
    path = str(tmp_path / "rows.json")
    command = ["--sizes", "4K", "--rows", "2", "--rounds", "1", "--json", path]
    printed = shmrun(2, str(BENCH / "methods" / "bench_local.py"), *command)
    assert "| 4 KiB | local SGD 4 | 4 |" in printed
    rows = json.loads(Path(path).read_text())["rows"]
    assert [row["synchronisations"] for row in rows] == [16, 4, 2, 1, 8, 4]
    assert all(row["us_a_sample"] > 0 for row in rows)
