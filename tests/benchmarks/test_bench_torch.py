"""The benchmark of torch.distributed: its arithmetic on figures, and one tiny run. Never a test of speed."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.torch import bench_torch, torch_runs
from bench.torch.bench_torch import ASYNC, BARRIER, COMM, MIB, ONE_FLOAT, SYNC, Row

BENCH = Path(__file__).resolve().parents[2] / "bench"
WITHOUT_TORCH = importlib.util.find_spec("torch") is None
PRINTED = """shmring, 2 rank(s), 0.15 MiB of gradients
loss first 2.296316, last 0.026150
accuracy 0.978 on 360 held-out digits
step 2.870 ms (median of 440)
communication -0.3% of a step
checksum of the weights 1341.092860
"""


def row(gloo_us, shmring_us, *, call="all_reduce", nbytes=ONE_FLOAT, variant=SYNC, rounds=7):
    return Row(call, nbytes, variant, {"gloo": [gloo_us] * rounds, "shmring": [shmring_us] * rounds})


@pytest.mark.parametrize(
    ("found", "nprocs", "target", "verdict"),
    [
        (row(300, 7), 2, 40, "met"),
        (row(300, 7), 4, 50, "missed"),
        (row(300, 7, variant=ASYNC), 2, 10, "met"),
        (row(900, 120, nbytes=MIB), 2, 8, "missed"),
        (row(300, 7, rounds=3), 2, 40, "too few rounds"),
        (row(300, 7, call=BARRIER), 2, None, ""),
    ],
)
def test_ratios_are_held_against_the_targets(found, nprocs, target, verdict):
    ratio = found.ratio(nprocs)
    assert (ratio.target, ratio.verdict) == (target, verdict)
    assert ratio.value == pytest.approx(found.us["gloo"][0] / found.us["shmring"][0])


def test_the_table_has_every_call_and_leaves_open_what_is_not_there():
    alone = Row("broadcast", MIB, SYNC, {"shmring": [100.0]})
    lines = bench_torch.table([row(300, 7.5), alone, row(250, 10, call=BARRIER)], 2).splitlines()
    assert lines[1].split()[-5:] == ["40", "(≥", "40:", "met)", "7"]
    assert lines[2].split() == ["broadcast", "1", "MiB", "sync", "-", "100", "-", "1"]
    assert lines[3].split()[:3] == ["barrier", "-", "sync"]


def test_what_the_example_prints_is_read():
    assert torch_runs.figures(PRINTED) == (0.15, 2.87, -0.003, 1341.09286, 0.02615)
    with pytest.raises(SystemExit, match="checksum"):
        torch_runs.figures(PRINTED.replace("checksum", "sum"))


def test_trainings_are_compared_setting_by_setting():
    gloo = torch_runs.Training("gloo", 2, 16, 25.0, 0.15, 5.0, 0.30, 1341.0, 0.02)
    ours = replace(gloo, backend="shmring", step_ms=4.0, communication=0.05)
    wider = replace(gloo, width=64)
    off = replace(ours, width=64, step_ms=6.0, communication=0.20, checksum=1342.0)
    shared = replace(ours, backend=torch_runs.SHARED, step_ms=2.5, communication=0.01)
    _, _, first, second = torch_runs.training_table([gloo, ours, shared, wider, off]).splitlines()
    steps, shares = (
        r" 1\.25 \(≥ 1: met\) .* 2\.00 \(≥ 1: met\) ",
        r" 6\.00 \(≥ 5: met\) .* 30\.00 \(≥ 5: met\) ",
    )
    assert re.search(f"{steps}.*{shares} +yes$", first)
    assert re.search(r" 0\.83 \(≥ 1: missed\) +- +- .* 1\.50 \(≥ 5: missed\) +- +- +NO$", second)


def test_the_import_is_held_against_its_target():
    found = {"without": [1000.0], "with": [1000.4], "registration": [0.4, 0.5, 3.0]}
    assert "0.50 ms (< 1: met), at best 0.40 ms" in torch_runs.import_lines(found)


@pytest.mark.limit(200)
@pytest.mark.skipif(WITHOUT_TORCH, reason="torch is not installed")
def test_a_tiny_run(tmp_path):
    where = ["--dir", str(tmp_path), "--json", str(tmp_path / "result.json")]
    command = [sys.executable, str(BENCH / "torch" / "bench_torch.py"), "--quick", *where]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "2 ranks of torch.distributed, " in result.stdout
    assert "the entry point by itself: " in result.stdout
    (run,) = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert run["problems"] == []
    assert {(found["call"], found["nbytes"]) for found in run["rows"]} == {
        ("all_reduce", ONE_FLOAT),
        ("all_reduce", 1024),
        ("all_reduce", 65536),
        (BARRIER, ONE_FLOAT),
    }
    assert {found["variant"] for found in run["rows"]} == {SYNC, ASYNC, COMM}
    for found in run["rows"]:
        assert set(found["us"]) == ({"shmring"} if found["variant"] == COMM else {"gloo", "shmring"})
        assert all(us > 0 for figures in found["us"].values() for us in figures)


@pytest.mark.skipif(WITHOUT_TORCH, reason="torch is not installed")
@pytest.mark.parametrize(
    ("name", "arguments", "lines"),
    [
        (
            "bench_dispatch.py",
            ["--rounds", "1", "--count", "3"],
            r"\n +all_reduce( +[\d.,]+){2} .+\n +broadcast .+\n +all_gather .+\n *reduce_scatter .+",
        ),
        (
            "bench_shm.py",
            ["--sizes", "8,4K", "--rounds", "1"],
            r"float32, us a call.+\n.+\n +8 B( +[\d.,]+){3}\n *4 KiB .+\nbfloat16, .+\n.+\n +8 B .+",
        ),
        (
            "bench_reconfigure.py",
            ["--ranks", "2", "--rounds", "1", "--count", "2"],
            r"\n +tcp +2 +reconfigured +[\d.]+ ms .+\n +tcp +2 +all_reduce .+\n +file .+",
        ),
    ],
)
def test_a_tiny_run_of_a_small_benchmark(name, arguments, lines):
    command = [sys.executable, str(BENCH / "torch" / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90)
    if "has no reconfigure" in result.stderr:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr + result.stdout
    assert re.search(lines, result.stdout), result.stdout
