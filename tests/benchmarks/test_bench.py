"""The benchmarks: their arithmetic on samples, and one tiny run. Never a test of speed."""

import argparse
import importlib.util
import json
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import numpy as np
import pytest
from peers_report import FIGURES, INPUTS, SIZES, peers_report

from bench import regress
from bench.common import calls, plot, tables
from bench.common.arguments import comma_separated, parse_size
from bench.peers import install_peers, matrix, peers, probe, targets
from bench.peers.interleave import Sample
from shmring._config import settings

BENCH = Path(__file__).resolve().parents[2] / "bench"
NEAR = targets.Group(2, "near", "reused")


def sample(contestant, variant, us, *, nbytes=8, given="reused", round_number=0, distance="near"):
    trip = {"near": 90.0, "far": 300.0, "mixed": 90.0}[distance]
    return Sample(
        ranks=2,
        round=round_number,
        nbytes=nbytes,
        input=given,
        contestant=contestant,
        variant=variant,
        us=us,
        repeats_us=(us,),
        write_us=0.0,
        loops=1,
        round_trip_ns=(trip, trip),
        distance=distance,
        facts={},
    )


def seven_rounds(contestant, variant, us, **where):
    return [sample(contestant, variant, us, round_number=number, **where) for number in range(7)]


def ratio_of(samples, variant, rival, nbytes=8):
    medians = targets.medians_by_group(samples)[NEAR]
    found = targets.ratios(NEAR, medians)
    return next(r for r in found if (r.nbytes, r.variant, r.rival) == (nbytes, variant, rival))


def test_sizes_are_written_as_people_write_them():
    assert comma_separated(parse_size)("8,4K,64k,1M") == [8, 4096, 65536, 1 << 20]
    for nonsense in ("", "0", "6", "-8", "4.5K", "K"):
        with pytest.raises(ArgumentTypeError):
            parse_size(nonsense)
    with pytest.raises(ArgumentTypeError, match="mpich, gloo"):
        comma_separated(str, ["mpich", "gloo"])("mvapich")


def test_distance_is_mixed_when_it_changes_during_a_sample():
    assert probe.distance(90, 100) == "near"
    assert probe.distance(300, 250) == "far"
    assert probe.distance(90, 300) == "mixed"
    assert probe.distance(50, 60) == "one core"
    assert probe.distance(probe.UNKNOWN_NS, probe.UNKNOWN_NS) == "unknown"


def test_medians_leave_out_samples_during_which_the_distance_changed():
    samples = [sample("intel", "blocking", us) for us in (1.0, 2.0, 9.0)]
    samples += [sample("intel", "blocking", 100.0, distance="mixed")]
    medians = targets.medians_by_group(samples)
    assert medians == {NEAR: {(8, "intel", "blocking"): targets.Median(2.0, 3)}}


def test_ratio_is_taken_against_the_fastest_mpi():
    samples = seven_rounds("intel", "blocking", 0.9) + seven_rounds("mpich", "blocking", 2.3)
    samples += seven_rounds("shmring", "private", 0.25)
    ratio = ratio_of(samples, "private", "mpi")
    assert (ratio.rival_name, ratio.rounds, ratio.target, ratio.verdict) == ("intel", 7, 3, "met")
    assert ratio.value == pytest.approx(3.6)


@pytest.mark.parametrize(("us", "verdict"), [(1.2, "met"), (2.0, "missed")])
def test_ratio_to_the_copy_has_an_upper_limit(us, verdict):
    samples = seven_rounds("copy", "plain", 1.0, nbytes=65536)
    samples += seven_rounds("copy", "streaming", 4.0, nbytes=65536)
    samples += seven_rounds("shmring", "zero-copy", us, nbytes=65536)
    ratio = ratio_of(samples, "zero-copy", "copy", 65536)
    assert (ratio.rival_name, ratio.verdict) == ("copy", verdict)
    assert ratio.value == pytest.approx(us)


def test_the_matrix_marks_the_cells_that_are_lost():
    of_call = [
        *seven_rounds("mpich", "blocking", 1.0),
        *seven_rounds("openmpi", "blocking", 3.0),
        *seven_rounds("shmring", "private", 2.0),
        *seven_rounds("shmring", "zero-copy", 0.5),
        *seven_rounds("shmring", "plan", 9.0),
        *seven_rounds("intel", "blocking", 7.0, nbytes=1 << 20),
        *seven_rounds("shmring", "private", 7.1, nbytes=1 << 20),
    ]
    found = matrix.matrix({"ping_pong": of_call})
    lines = [line.split() for line in matrix.table(found, 0.97).splitlines()]
    assert lines[1:] == [["ping_pong", "reused", "private", "0.50*", "0.99"],
                         ["ping_pong", "reused", "zero-copy", "2.00", "-"]]  # fmt: skip
    assert matrix.lost(found, 0.97) == [
        "0.50  ping_pong 8 B, private, reused: 2.00 us, mpich 1.00 (7 rounds)"
    ]
    assert len(matrix.lost(found, 1)) == 2


@pytest.mark.parametrize("us", [(-1.0, 2.0), (2.0, -1.0)])
def test_the_matrix_has_no_cell_of_negative_times(us):
    of_call = [
        *seven_rounds("shmring", "private", us[0], given="written"),
        *seven_rounds("intel", "blocking", us[1], given="written"),
    ]
    assert matrix.matrix({"scatter": of_call}) == {}


def test_few_rounds_decide_nothing():
    samples = [sample("intel", "blocking", 1.0), sample("shmring", "plan", 0.01)]
    assert ratio_of(samples, "plan", "mpi").verdict == "too few rounds"


def test_tables_name_every_figure_and_every_verdict():
    samples = seven_rounds("intel", "blocking", 0.9) + seven_rounds("shmring", "private", 0.45)
    samples += seven_rounds("gloo", "in place", 1234.0)
    text = tables.report(targets.medians_by_group(samples), samples, [0, 1])
    lines = text.splitlines()
    assert lines[0] == "2 ranks on CPUs 0,1, near (round trip 90 ns), input reused, µs"
    assert lines[1].split("  ")[-1] == "rounds"
    assert lines[2].split() == ["8", "B", "0.90", "1,234", "0.45", "7"]
    assert "2.00 (≥ 3: missed)" in text
    assert "2742 (≥ 500: met)" in text
    assert "targets: 1 met, 1 missed, 0 undecided (too few rounds)" in text
    assert lines[-1].startswith("0 of 21 samples dropped")


def test_plot_draws_every_group(tmp_path):
    pytest.importorskip("matplotlib")
    samples = [s for nbytes in (8, 65536) for s in seven_rounds("shmring", "plan", nbytes / 9, nbytes=nbytes)]
    samples += seven_rounds("copy", "plain", 1.0, nbytes=65536)
    plot.draw(targets.medians_by_group(samples), tmp_path / "plot.png", "a test")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_regress_pairs_what_was_measured_in_the_same_round():
    samples = []
    for number, (base, work) in enumerate([(1.0, 1.3), (2.0, 2.6), (1.0, 1.0)]):
        samples.append(sample("base", "plan", base, round_number=number))
        samples.append(sample("work", "plan", work, round_number=number))
    samples.append(sample("work", "plan", 50.0, round_number=3))
    samples.append(sample("base", "plan", 1.0, round_number=3, distance="mixed"))
    ratios = regress.paired_ratios(samples)
    key = ("all_reduce", 8, "plan", "near")
    assert ratios == {key: [1.3, 1.3, 1.0]}
    assert regress.too_slow(ratios, 1.15) == [key]
    assert regress.too_slow(ratios, 1.4) == []
    assert regress.table(samples, ratios, 1.15).splitlines()[1].endswith("TOO SLOW")


def test_torch_version_is_exact_by_default():
    assert install_peers.DEFAULT_TORCH == "2.13.0"
    assert "torch=={torch}" in install_peers.PACKAGES["gloo"]


def test_installed_peers_are_those_whose_installation_ended(tmp_path):
    assert install_peers.installed(tmp_path) == []
    (tmp_path / "intel").mkdir()
    assert install_peers.installed(tmp_path) == []
    (tmp_path / "intel" / "installed").touch()
    assert install_peers.installed(tmp_path) == ["intel"]


@pytest.mark.parametrize("count", [0, 1, 12, 1009, 5000])
def test_a_single_wrong_or_shifted_element_is_noticed(count):
    x = np.empty(count, "f4")
    calls.fill_pattern(x, calls.ROOT)
    assert calls.wrong_elements("broadcast", x, count, 1, 3, written=False) == 0
    if count > 1:
        assert calls.wrong_elements("broadcast", np.roll(x, 1), count, 1, 3, written=False) > 0
        x[-1] += 1
        assert calls.wrong_elements("broadcast", x, count, 1, 3, written=False) == 1


def run_peers(*arguments, folder):
    few = "--only", "shmring", "--ranks", "2", "--rounds", "1"
    command = [sys.executable, str(BENCH / "peers" / "peers.py"), *few]
    return subprocess.run(
        [*command, "--dir", str(folder), *arguments], capture_output=True, text=True, timeout=100
    )


@pytest.mark.slow
def test_a_tiny_run_of_shmring_alone(tmp_path):
    result = run_peers("--sizes", "8,64K", "--json", str(tmp_path / "result.json"), folder=tmp_path)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "2 ranks on CPUs" in result.stdout
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["schema"] == 1
    assert {"cpu_model", "kernel", "cpus"} <= set(found["machine"])
    (run,) = found["runs"]
    assert run["problems"] == []
    assert {sample["contestant"] for sample in run["samples"]} == {"copy", "shmring"}
    assert {sample["variant"] for sample in run["samples"] if sample["contestant"] == "shmring"} == {
        "private",
        "plan",
        "zero-copy",
    }
    for taken in run["samples"]:
        assert len(taken["round_trip_ns"]) == 2
        assert taken["loops"] >= 1
        assert all(us > 0 for us in taken["repeats_us"])
        assert (taken["write_us"] > 0) == (taken["input"] == "written")
    assert {"ranks", "distance", "input", "nbytes", "contestant", "variant", "us", "rounds"} == set(
        found["medians"][0]
    )


@pytest.mark.slow
def test_a_contestant_that_cannot_start_is_left_out_and_reported(tmp_path):
    (tmp_path / "intel" / "bin").mkdir(parents=True)
    (tmp_path / "intel" / "installed").touch()
    mpiexec = tmp_path / "intel" / "bin" / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho no such fabric; exit 1\n")
    mpiexec.chmod(0o755)
    result = run_peers("--sizes", "8", "--only", "intel,shmring", "--input", "reused", folder=tmp_path)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "left out: intel: its ranks did not start" in result.stdout
    assert "no such fabric" in result.stdout


@pytest.mark.slow
def test_pyperf_keeps_what_a_figure_depends_on(tmp_path):
    pytest.importorskip("pyperf")
    few = ["--processes", "1", "--values", "1", "--warmups", "1", "--min-time", "0.0001", "--quiet"]
    case = ["--sizes", "8", "--dtypes", "int32", "--variants", "plan"]
    command = [sys.executable, str(BENCH / "engine" / "bench_all_reduce.py"), *case, *few]
    command += ["-o", str(tmp_path / "result.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr + result.stdout
    import pyperf

    (benchmark,) = pyperf.BenchmarkSuite.load(str(tmp_path / "result.json")).get_benchmarks()
    assert benchmark.get_name() == "all_reduce plan int32 8 B 2 ranks"
    metadata = benchmark.get_metadata()
    wanted = {"n": 2, "bytes": 8, "dtype": "int32", "algorithm": "auto", "path": "tiny"}
    assert {name: metadata[name] for name in wanted} == wanted
    assert "isa" in metadata
    assert all("core_round_trip_ns" in run.get_metadata() for run in benchmark.get_runs())


def test_fusion_is_measured_beside_separate_calls():
    few = ["--ranks", "2", "--count", "3", "--sizes", "8", "--rounds", "1"]
    command = [sys.executable, str(BENCH / "engine" / "bench_fusion.py"), *few]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout.count("3 arrays of 8 B") == 2  # packed, and views of one array


@pytest.mark.slow
def test_every_algorithm_is_measured_and_the_fastest_is_charted(tmp_path):
    few = ["--ranks", "2", "--sizes", "8,64K", "--rounds", "1", "--sample-s", "0.001"]
    command = [sys.executable, str(BENCH / "engine" / "bench_algorithms.py"), *few]
    command += ["--json", str(tmp_path / "rows.json")]
    if importlib.util.find_spec("matplotlib"):
        command += ["--plot", str(tmp_path / "chart.png")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr + result.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["ranks"], row["nbytes"]) for row in rows] == [(2, 8), (2, 64 << 10)]
    for row in rows:
        assert sorted(row["us"]) == sorted(settings.ALGORITHMS)
        assert min(row["us"].values()) > 0
    assert f"| 2 | 64 KiB | {tables.format_us(rows[1]['us']['auto'])} |" in result.stdout
    assert "--plot" not in command or (tmp_path / "chart.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_ways_are_timed_in_turn_by_the_slowest_rank(tmp_path):
    program = tmp_path / "ways.py"
    program.write_text(
        f"""import sys, time
sys.path.append({str(BENCH.parent)!r})
import shmring
from bench.common.turns import in_turn, state_of
comm = shmring.init()
ways = {{"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.2 * comm.rank)}}
times = in_turn(comm, ways, rounds=2, sample_s=0.002)
assert list(times) == ["short", "long"] and times["long"] > 2 * times["short"]
assert comm.all_gather_object(times) == [times, times]
print(state_of(comm))
"""
    )
    command = [sys.executable, "-m", "shmring.run", "-n", "2", "--no-prefix", str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout.count("2 ranks, ") == 2


@pytest.mark.parametrize("distance", ["near", "far"])
def test_peers_write_what_the_command_compares_with(distance):
    samples = [
        sample(who, variant, us, nbytes=nbytes, given=given, distance=distance)
        for who, variant, us in FIGURES
        for nbytes in SIZES
        for given in INPUTS
    ]
    options, runs = argparse.Namespace(call="all_reduce"), [{"ranks": 2, "samples": samples}]
    found = peers.as_json(options, "today", [], runs, targets.medians_by_group(samples))
    found = json.loads(json.dumps(found))
    expected = peers_report(distance=distance)
    assert {name: found[name] for name in expected} == expected


def test_the_stand_in_for_mpi4py_is_measured_beside_shmring(tmp_path):
    few = ["--rounds", "1", "--sample-s", "1e-4", "--skip-large", "--dir", str(tmp_path)]
    command = [sys.executable, str(BENCH / "peers" / "bench_mpi4py.py"), *few]
    command += ["--json", str(tmp_path / "calls.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr + result.stdout
    us = json.loads((tmp_path / "calls.json").read_text())["us"]
    (facade,), (direct,) = us["shmring as mpi4py"], us["shmring"]
    assert list(facade) == list(direct)
    assert min(*facade.values(), *direct.values()) > 0
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == ["call", *facade]
