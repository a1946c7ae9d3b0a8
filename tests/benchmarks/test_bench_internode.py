"""The benchmark over hosts: its arithmetic on samples, and one tiny run. Never a test of speed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.common import calls
from bench.internode import bench_internode, internode_libraries, internode_tables
from bench.internode.internode_libraries import BLOCKING, EXCHANGE, EXCHANGE_BUFFERED
from bench.peers.interleave import Sample
from bench.peers.peer_libraries import Job, Seat

BENCH = Path(__file__).resolve().parents[2] / "bench"
SCENES = {scene.name: scene for scene in bench_internode.SCENES}


def samples(**us_by_entry):
    """samples(gloo__in_place=[…]) → Samples, a round for each figure."""
    found = []
    for name, every_us in us_by_entry.items():
        contestant, variant = name.split("__")
        for number, us in enumerate(every_us):
            found.append(
                Sample(
                    ranks=4,
                    round=number,
                    nbytes=8,
                    input="reused",
                    contestant=contestant,
                    variant={"in_place": "in place", "buffered": EXCHANGE_BUFFERED}.get(variant, variant),
                    us=us,
                    repeats_us=(us,),
                    write_us=0.0,
                    loops=1,
                    round_trip_ns=(90.0, 90.0),
                    distance="near",
                    facts={},
                )
            )
    return found


def row_of(scene, taken, contestant, variant):
    found = internode_tables.rows(scene, taken)
    return next(row for row in found if (row.contestant, row.variant) == (contestant, variant))


def test_options_choose_scenes_rounds_and_contestants():
    options = bench_internode.parse_arguments(["--only", "limited,idle", "--who", "shmring,gloo"])
    assert [scene.name for scene in bench_internode.scenes_of(options)] == ["limited", "idle"]
    assert options.rounds == 5
    quick = bench_internode.parse_arguments(["--quick"])
    assert quick.rounds == 2
    assert {scene.nbytes for scene in bench_internode.scenes_of(quick)} == {
        0,
        8,
        bench_internode.QUICK_NBYTES,
    }
    assert bench_internode.parse_arguments(["--quick", "--rounds", "9"]).rounds == 9
    with pytest.raises(SystemExit):
        bench_internode.parse_arguments(["--only", "limitless"])


def test_scenes_measure_what_they_are_for():
    assert "wire=int8" in bench_internode.variants_of(SCENES["limited"])["shmring"]
    assert "wire=int8" not in bench_internode.variants_of(SCENES["unlimited"])["shmring"]
    assert "local" in bench_internode.variants_of(SCENES["unlimited"])
    assert bench_internode.variants_of(SCENES["small"])["sockets"] == ("blocking", "polling")
    assert not any(bench_internode.variants_of(SCENES["idle"]).values())


@pytest.mark.parametrize(("name", "bound_ms"), [("limited", 559.7), ("three", 746.3)])
def test_the_bound_is_what_has_to_cross_at_the_links_rate(name, bound_ms):
    assert SCENES[name].bound_us * 1e-3 == pytest.approx(bound_ms, abs=0.1)
    assert SCENES["unlimited"].bound_us is None
    assert SCENES["pair"].bound_us is None


def test_ratios_are_those_of_medians_to_the_faster_of_the_bare_sockets():
    taken = samples(
        sockets__exchange=[600e3, 580e3, 9e6],
        sockets__buffered=[560e3, 570e3, 565e3],
        shmring__private=[621.5e3, 1e6, 600e3],
    )
    row = row_of(SCENES["limited"], taken, "shmring", "private")
    assert (row.us, row.fastest_us, row.slowest_us, row.rounds) == (621.5e3, 600e3, 1e6, 3)
    assert row.base_ratio == pytest.approx(1.1)
    assert row.bound_ratio == pytest.approx(621.5 / 559.7, rel=1e-3)
    assert row.wire_mb_s == pytest.approx(64 * 1.048576 / 0.6215)
    assert row_of(SCENES["limited"], taken, "sockets", EXCHANGE).base_ratio is None


def test_without_a_limit_the_base_is_bare_sockets_and_what_hosts_do_inside():
    taken = samples(sockets__exchange=[40e3], local__private=[20e3], shmring__private=[66e3])
    assert row_of(SCENES["unlimited"], taken, "shmring", "private").base_ratio == pytest.approx(1.1)
    without_local = [sample for sample in taken if sample.contestant != "local"]
    assert row_of(SCENES["unlimited"], without_local, "shmring", "private").base_ratio is None


def test_narrow_formats_have_no_speed_in_bytes_that_they_did_not_send():
    taken = replace(samples(shmring__private=[300e3])[0], variant="wire=bf16")
    row = row_of(SCENES["limited"], [taken], "shmring", "wire=bf16")
    assert row.wire_mb_s is None
    assert row.bound_ratio == pytest.approx(300 / 559.7, rel=1e-3)


def test_tables_name_every_figure():
    taken = samples(
        sockets__blocking=[20.0], gloo__in_place=[800.0], shmring__private=[30.0], shmring__odd=[1.0]
    )
    lines = internode_tables.report(SCENES["small"], taken, {}).splitlines()
    assert lines[0] == "small: 2 hosts x 2 ranks, links unlimited, 8 B"
    assert lines[1].split() == ["µs", "fastest", "slowest", "/", "round", "trip", "rounds"]
    assert lines[2].split() == ["shmring", "30.0", "30.0", "30.0", "1.50", "1"]
    assert lines[3].split() == ["Gloo", "800", "800", "800", "40.00", "1"]
    assert lines[4].split()[-5:] == ["20.0", "20.0", "20.0", "-", "1"]
    assert lines[5].split() == ["shmring,", "odd", "1.00", "1.00", "1.00", "0.05", "1"]
    large = internode_tables.report(SCENES["three"], samples(gloo__in_place=[1e6]), {}).splitlines()
    assert large[0].endswith("3 hosts x 2 ranks, links 1 Gbit/s, 64 MiB, lower bound 746.3 ms")
    assert large[2].split() == ["Gloo", "1,000", "1,000", "1,000", "1.34", "89.5", "1"]
    idle = internode_tables.report(SCENES["idle"], [], {"shmring": 0.1234}).splitlines()
    assert idle[2].split() == ["shmring", "0.12"]


def test_an_older_shmring_without_narrow_wires_is_no_failure():
    trace = "Traceback (most recent call last):\n  File x\nTypeError: all_reduce() got an {}"
    unknown = "wire=int8, 8 bytes: shmring: " + trace.format("unexpected keyword argument 'wire'")
    assert not bench_internode.failed(unknown)
    assert bench_internode.failed("wire=int8, 8 bytes: shmring: 3 elements of the result are wrong")
    assert bench_internode.failed("left out: local: its ranks did not start")
    assert not bench_internode.failed("left out: gloo: Traceback (most recent call last):\n  File shmring: 1")
    assert bench_internode.in_short(unknown) == (
        "wire=int8, 8 bytes: shmring: TypeError: all_reduce() got an unexpected keyword argument 'wire'"
    )
    assert bench_internode.in_short("left out: one line") == "left out: one line"


def test_ranks_know_their_place_and_what_they_should_receive():
    seats = [Seat(rank, 6, None, None, ("a", "a", "b", "b", "c", "c")) for rank in range(6)]
    places = [internode_libraries.place_of(seat) for seat in seats]
    assert [2 * place.host + place.local_rank for place in places] == [0, 1, 2, 3, 4, 5]
    assert {(place.hosts, place.ranks_a_host) for place in places} == {(3, 2)}
    assert internode_libraries.wire_nbytes(300, 3) == 400

    def wrong(rank, sender, variant):
        sockets = internode_libraries.Sockets(seats[rank])
        sockets.place, sockets.before = places[rank], (rank - 2) % 6
        x = np.empty(3000, "f4")
        calls.fill_pattern(x, sender)
        return sockets.wrong(Job("all_reduce", variant, x.nbytes, x.dtype, False, {}), x, x)

    assert wrong(1, 5, EXCHANGE) == 0
    assert wrong(1, 3, EXCHANGE) == 3000
    assert wrong(0, 4, BLOCKING) == 0
    assert wrong(0, 0, BLOCKING) == 3000
    assert wrong(1, 1, BLOCKING) == 0  # it takes no part


def test_a_narrow_wire_may_be_off_by_less_than_a_step():
    shmring = internode_libraries.ShmringOverHosts(Seat(0, 4, None, None))
    sums = sum(calls.BLOCK + rank for rank in range(4)).astype("f4")

    def wrong(variant, off_by):
        job = Job("all_reduce", variant, sums.nbytes, sums.dtype, False, {})
        return shmring.wrong(job, np.empty_like(sums), sums + np.float32(off_by))

    assert wrong("wire=int8", 0.3) == 0
    assert wrong("wire=int8", 0.7) == len(sums)
    assert wrong("private", 0.001) == len(sums)


@pytest.mark.slow
def test_a_tiny_run_of_bare_sockets(hosts, tmp_path):
    hosts(1)  # or skip
    command = [sys.executable, str(BENCH / "internode" / "bench_internode.py"), "--quick", "--rounds", "1"]
    command += ["--who", "sockets", "--only", "three,pair,idle", "--json", str(tmp_path / "result.json")]
    result = subprocess.run(
        [*command, "--dir", str(tmp_path)], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert "3 hosts x 2 ranks, links 1 Gbit/s, 4 MiB" in result.stdout
    found = json.loads((tmp_path / "result.json").read_text())
    assert [run["problems"] for run in found["runs"]] == [[], [], []]
    assert [[figure["variant"] for figure in run["figures"]] for run in found["runs"]] == [
        ["exchange", "exchange, 1 MiB", "exchange, Reno"],
        ["blocking", "polling"],
        [],
    ]
    assert found["runs"][2]["idle_ms_a_second"]["sockets"] < 100
