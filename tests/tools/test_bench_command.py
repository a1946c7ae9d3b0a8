"""`shmring bench`: every collective and way, counting of wrong results, JSON, plots, comparison with other
runs, launchers, terminals, Ctrl-C. Never a test of speed."""

import functools
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import weakref

import jsonschema
import numpy as np
import pytest
from combinations import first
from engines import environment
from peers_report import peers_report
from reports import exactly

import shmring
from shmring._core import kernels
from shmring._diagnostics.flight_recorder import ALGORITHMS
from shmring.tools import command
from shmring.tools._bench import calls, compare, plot, table
from shmring.tools._bench import rank as bench_rank
from shmring.tools._bench.calls import FORMS, NUMPY_DTYPES, OPS, OTHER_DTYPES, Job, Turn

LIMIT_S = 50
SHORT = ("--seconds", "0.002")
COMMAND = (sys.executable, "-m", "shmring", "bench")

NUMBER, TEXT = {"type": "number", "minimum": 0}, {"type": "string"}
COUNT, POSITIVE = {"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 1}


ROW = exactly(
    nbytes=COUNT, count=COUNT, samples=POSITIVE, loops=POSITIVE, round_trip_ns=COUNT,
    min_us=NUMBER, avg_us=NUMBER, p50_us=NUMBER, p99_us=NUMBER, algbw_gb_s=NUMBER, busbw_gb_s=NUMBER,
    wrong={"type": ["integer", "null"]}, copy_us={"type": ["number", "null"]},
    path={"type": ["string", "null"]},
)  # fmt: skip
SCHEMA = exactly(
    program={"const": "shmring bench"}, schema={"const": 1}, version=TEXT, started=TEXT,
    machine=exactly(cpu_model=TEXT, kernel=TEXT, python=TEXT, numpy=TEXT),
    call={"enum": list(FORMS)}, what=TEXT, dtype=TEXT, op={"enum": list(OPS)},
    ranks=POSITIVE, hosts=POSITIVE,
    cpus={"type": "array", "items": {"type": "array", "items": COUNT}}, crowded={"type": "boolean"},
    distance={"enum": ["near", "far", "unknown"]}, round_trip_ns=COUNT, isa=TEXT,
    options={"type": "object"}, interrupted={"type": "boolean"}, rows={"type": "array", "items": ROW},
    compared={"type": "object", "additionalProperties": {"type": "object", "additionalProperties": NUMBER}},
)  # fmt: skip


@pytest.fixture
def bench(capfd):
    """bench("scan", "--sizes", "8") → its JSON output, from ranks of this process."""

    def run(*arguments, status=0):
        assert command.main(["bench", *arguments, "--json"]) == status
        report = json.loads(capfd.readouterr().out)
        jsonschema.validate(report, SCHEMA)
        return report

    return run


def wrong_of(report):
    return [row["wrong"] for row in report["rows"]]


# ---- every collective, every way -------------------------------------------------------------------------

UNLIKE = ("all_reduce", "all_reduce_many", "barrier", "ping_pong")  # all others are timed as all_reduce


@pytest.mark.parametrize("call", first(len(UNLIKE), sorted(FORMS, key=lambda call: call not in UNLIKE)))
def test_every_collective_is_timed_and_right(bench, call):
    sizes = () if call == "barrier" else ("--sizes", "8,100K")
    report = bench(call, *sizes, *SHORT)
    assert (report["call"], report["ranks"], report["interrupted"]) == (call, 2, False)
    assert [row["nbytes"] for row in report["rows"]] == ([0] if call == "barrier" else [8, 102400])
    assert wrong_of(report) == [0] * len(report["rows"])
    factor = {"all_reduce": 1, "all_reduce_many": 1, "ping_pong": 2, "broadcast": 1, "reduce": 1}
    factor |= {"scan": 1, "exscan": 1}
    for row in report["rows"]:
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"]
        assert row["min_us"] <= row["avg_us"]
        assert row["algbw_gb_s"] == pytest.approx(row["nbytes"] / row["p50_us"] / 1e3)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * factor.get(call, 1 / 2))
        assert (row["copy_us"] is not None) == (row["nbytes"] >= 65536)


@pytest.mark.parametrize(
    "way",
    first(
        4,
        [
            "--plan --async --inplace",
            "--written --op max --dtype int64",
            "-n auto --algorithm ring",
            "--iters 7 --no-check",
            "--plan",
            "--async --zero-copy",
            "-n 1",
        ],
    ),
)
def test_every_way_is_right(bench, way):
    report = bench("--sizes", "64:64K", "--factor", "32", *SHORT, *way.split())
    assert [row["nbytes"] for row in report["rows"]] == [64, 2048, 65536]
    if "--no-check" in way:
        assert [(row["samples"], row["wrong"]) for row in report["rows"]] == [(7, None)] * 3
    else:
        assert wrong_of(report) == [0, 0, 0]


# Jobs of three ranks: sizes that do not divide among them, roots, and every way.
JOBS = [
    Job("reduce", (), "float64", "avg", root=2, plan=True),
    Job("reduce", (), "int32", "prod", root=1, in_place=True),
    Job("scatter", (), root=1, async_op=True),
    Job("gather", (), "complex64", root=2, zero_copy=True),
    Job("broadcast", (), root=1),
    Job("broadcast", (), "uint16", root=2, in_place=True, plan=True, async_op=True),
    Job("all_gather", (), "bool", plan=True),
    Job("all_to_all", (), zero_copy=True, async_op=True),
    Job("reduce_scatter", (), "float16", zero_copy=True),
    Job("reduce_scatter", (), "int8", "bxor", plan=True),
    Job("scan", (), "float32", "max", in_place=True),
    Job("exscan", (), "complex128", "prod", in_place=True, written=True),
    Job("ping_pong", (), async_op=True),
    Job("all_reduce_many", (), "int64", "min", async_op=True, in_place=True),
    Job("all_reduce_many", (), "uint8", "land", zero_copy=True),
    Job("barrier", (), plan=True, async_op=True),
]


def wrong_items(comm, jobs):
    """By job and size, called twice over."""
    found = []
    for job in jobs:
        for nbytes in (0,) if job.call == "barrier" else (16, 64, 10_000):
            turn = Turn(comm, job, calls.count_of(job, nbytes, comm.size))
            found.append((job.what, nbytes, len(turn.y) % comm.size, turn.wrong() + turn.wrong()))
    return found


def test_three_ranks_whose_parts_are_not_even(world_of):
    for found in world_of(3)(wrong_items, JOBS):
        assert len(found) == 3 * len(JOBS) - 2
        assert [one for one in found if one[-1]] == []
        parted = [uneven for what, _, uneven, _ in found if what.startswith(("all_gather", "all_to_all"))]
        assert parted == [0] * 6


def folds(comm, dtypes, count):
    """Return by dtype and op the number of errors that the check finds in right results."""
    return {
        (dtype, op, way): Turn(comm, Job("all_reduce", (), dtype, op, algorithm=way), count).wrong()
        for dtype in dtypes
        for op in OPS
        for way in ALGORITHMS
        if op in kernels.ops(dtype)
    }


def test_numpy_agrees_in_every_dtype_and_op(world_of):
    pytest.importorskip("ml_dtypes")
    for found in world_of(5)(folds, NUMPY_DTYPES + OTHER_DTYPES, 1500):
        assert len(found) > 200
        assert {case: wrong for case, wrong in found.items() if wrong} == {}


def over_hosts(comm, call):
    job = Job(call, (8, 40000), seconds=0.002)
    facts = bench_rank.facts(comm, job)
    return facts["hosts"], facts["cpus"], [row["wrong"] for row in bench_rank.rows(comm, job, crowded=True)]


@pytest.mark.parametrize("call", first(1, ["all_gather", "all_reduce"]))
def test_ranks_of_several_hosts(world_over_hosts, call):
    for hosts, cpus, wrong in world_over_hosts([0, 0, 1])(over_hosts, call):
        assert (hosts, len(cpus), wrong) == (2, 3, [0, 0])


@pytest.mark.parametrize("written", [False, True])
def test_the_copy_limit_is_measured_when_the_arrays_have_gone(monkeypatch, written):
    arrays = []

    def fill(turn):
        arrays.extend(map(weakref.ref, (turn.x, turn.y)))
        refill(turn)

    def copy_limit(*_):
        assert [array() for array in arrays] == [None] * len(arrays)

    refill = Turn.refill
    monkeypatch.setattr(Turn, "refill", fill)
    monkeypatch.setattr(bench_rank, "_copy_limit", copy_limit)
    job = Job("all_reduce", (65536,), seconds=0.002, written=written)
    with shmring.init(shmring.world(1), 0) as comm:
        assert len(list(bench_rank.rows(comm, job, crowded=False))) == 1
    assert arrays


# ---- wrong results are counted ---------------------------------------------------------------------------


@pytest.mark.parametrize("call", [call for call in FORMS if call not in ("barrier", "exscan", "ping_pong")])
def test_items_that_are_wrong_are_counted(monkeypatch, call):
    right = Turn.call

    def broken(turn):
        right(turn)
        turn.y[[3, 1200]] += 1

    with shmring.init(shmring.world(1), 0) as comm:
        turn = Turn(comm, Job(call, ()), 2000)
        assert turn.wrong() == 0
        monkeypatch.setattr(Turn, "call", broken)
        assert turn.wrong() == 2
        monkeypatch.setattr(Turn, "call", lambda turn: None)  # nothing at all
        if turn.y is not turn.x:
            assert turn.wrong() > 1000


def test_problems_are_reported_with_status_1(monkeypatch, capfd, tmp_path):
    right = Turn.call

    def broken(turn):
        right(turn)
        turn.y[-1:] += turn._comm.rank

    monkeypatch.setattr(shmring, "spawn", functools.partial(shmring.spawn, method="fork"))
    monkeypatch.setattr(Turn, "call", broken)
    path = tmp_path / "out.json"
    assert command.main(["bench", "--sizes", "8,4K", "--output", str(path), *SHORT]) == 1
    reported = capfd.readouterr()
    assert reported.err == "shmring bench: 4 items are wrong\n"
    assert [line.split()[-1] for line in reported.out.splitlines()[-2:]] == ["2", "2"]
    assert wrong_of(json.loads(path.read_text())) == [2, 2]  # one rank, in the calls before and after


@pytest.mark.parametrize("count", [1, 12, 1009, 5000])
def test_a_shifted_item_is_noticed(count):
    block = calls.block_of(1, np.dtype("f4"), "sum")
    x = np.empty(count, "f4")
    calls.fill(x, block)
    assert calls.differing(x, block) == 0
    if count > 1:
        assert calls.differing(np.roll(x, 1), block) > 0
    x[-1] = np.nan
    assert calls.differing(x, block) == 1
    assert calls.differing(x, block, rounding=0.1) == 1


def test_one_nan_is_as_good_as_another():
    assert calls.differing(np.array([1, np.nan]), np.array([1, -np.nan])) == 0


# ---- the table -------------------------------------------------------------------------------------------


def test_the_table_tells_what_it_depends_on():
    done = subprocess.run(
        [*COMMAND, "scan", "--sizes", "8,64K", "--op", "max", "-n", "3", "--iters", "2"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
    )
    assert (done.returncode, done.stderr) == (0, "")  # no terminal, so no bar
    lines = done.stdout.splitlines()
    assert lines[0] == f"# shmring {shmring.__version__}: scan(float32, max)"
    assert lines[1].startswith("# 3 ranks, on CPUs ")
    assert lines[1].endswith("MORE RANKS THAN CPUS") == (len(os.sched_getaffinity(0)) < 3)
    assert "cores are " in lines[3]
    assert "instruction set " in lines[3]
    heads, units, *rows = lines[5:]
    names = ["size", "count", "min", "avg", "p50", "p99", "algbw", "busbw", "copy", "#wrong"]
    assert heads.split() == ["#", *names]
    assert len(units) == len(heads)
    assert [row.split()[:2] for row in rows] == [["8", "2"], ["65536", "16384"]]
    assert [row.split()[-1] for row in rows] == ["0", "0"]
    assert {len(row) for row in rows} == {len(heads)}


def test_figures_have_three_digits_that_count():
    assert [table.figure(us) for us in (0.1234, 1.234, 12.34, 123.4, 12345.6)] == [
        "0.123", "1.23", "12.34", "123.4", "12346",
    ]  # fmt: skip


def on_a_terminal(*arguments):
    """Return (status, all output) of a child whose terminal is ours."""
    pid, terminal = pty.fork()
    if pid == 0:
        termios.tcsetwinsize(0, (40, 120))
        os.execvpe(arguments[0], arguments, environment())
    text = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux reports the end this way
            break
        if not part:
            break
        text += part
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.decode()


def test_on_a_terminal_there_is_a_bar_and_the_table_stays_whole():
    pytest.importorskip("tqdm")
    status, text = on_a_terminal(*COMMAND, "--sizes", "8,64,4K", *SHORT)
    assert status == 0
    assert "all_reduce:" in text
    assert "0/3" in text
    rows = [line.rpartition("\r")[2].split() for line in text.replace("\x1b[A", "").split("\r\n")]
    assert [row[0] for row in rows if len(row) == 10 and row[0].isdigit()] == ["8", "64", "4096"]


# ---- JSON, pictures ---------------------------------------------------------------------------------------


def test_json_goes_beside_the_table(tmp_path, capfd):
    path = tmp_path / "out.json"
    assert command.main(["bench", "--sizes", "8", "--output", str(path), *SHORT]) == 0
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)
    assert "#wrong" in capfd.readouterr().out


def report_of(sizes, **more):
    rows = [
        {"nbytes": size, "p50_us": 1 + size / 1e4, "copy_us": size / 2e4 if size >= 65536 else None}
        for size in sizes
    ]
    machine = {"cpu_model": "a processor"}
    facts = {"ranks": 2, "distance": "near", "what": "all_reduce(float32, sum)", "started": "today"}
    return {"rows": rows, "machine": machine} | facts | more


def test_the_figure_has_both_panels_and_all_curves(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = [8 << at for at in range(24)]
    figure = plot.figure_of(report_of(sizes), [compare.Curve("MPICH", {8: 2.0, 65536: 40.0})])
    latency, bandwidth = figure.axes
    for axes in (latency, bandwidth):
        assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()) == ("log", "log", "size")
        labels = [line.get_label() for line in axes.get_lines()]
        assert labels == ["shmring", "MPICH", "copy limit"]
        ticks = [tick.get_text() for tick in axes.get_xticklabels()]
        assert ticks[:2] == ["8 B", "64 B"]
        assert len(ticks) <= 9
    assert latency.get_ylabel() == "µs a call (median)"
    assert bandwidth.get_ylabel() == "GB/s (size / time)"
    own, mpich, limit = bandwidth.get_lines()
    assert list(own.get_xdata()) == sizes
    assert list(mpich.get_ydata()) == pytest.approx([8 / 2e3, 65536 / 4e4])
    assert list(limit.get_xdata()) == [size for size in sizes if size >= 65536]
    assert latency.get_legend() is not None


@pytest.mark.parametrize("sizes", [[8], [1000, 3 << 30]])
def test_few_sizes_make_a_figure_too(sizes):
    pytest.importorskip("matplotlib")
    latency, _ = plot.figure_of(report_of(sizes), []).axes
    assert len(latency.get_xticklabels()) == len(sizes)


def test_the_picture_is_a_picture(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "out.png"
    assert command.main(["bench", "--sizes", "8,64K", "--plot", str(path), *SHORT]) == 0
    height, width, _ = image.imread(path).shape
    assert width > 2 * height > 600


# ---- comparison with other runs ---------------------------------------------------------------------------


def written_by_peers(path, **how):
    path.write_text(json.dumps(peers_report(**how)))
    return path


def test_peers_stand_beside_it(bench, tmp_path, capfd):
    path = written_by_peers(tmp_path / "peers.json")
    arguments = ("--sizes", "8,64", *SHORT, "--compare", str(path))
    report = bench(*arguments)
    curves = set(report["compared"])
    assert {label.partition(", near")[0] for label in curves} == {"MPICH", "MPICH, persistent"}
    assert all(set(us) == {"8", "4096"} for us in report["compared"].values())
    assert command.main(["bench", *arguments]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any("ANOTHER RUN" in line for line in lines)
    (eight, other) = (line for line in lines if not line.startswith("#"))
    p50 = float(eight.split()[4])
    ratio = float(eight.split()[11].strip("(x)"))
    assert eight.split()[10] == "1000000"
    assert ratio == pytest.approx(1e6 / p50, rel=0.05)
    assert other.split()[-2:] == ["-", "-"]


def test_an_earlier_run_stands_beside_it(bench, tmp_path):
    path = tmp_path / "before.json"
    before = bench("scan", "--sizes", "8,64", "--output", str(path), *SHORT)
    report = bench("scan", "--sizes", "8,4K", "--compare", str(path), *SHORT)
    (curve,) = report["compared"].items()
    assert curve[0].partition(",")[0] == "before"
    assert curve[1] == {str(row["nbytes"]): row["p50_us"] for row in before["rows"]}


def test_files_of_one_name_stand_beside_each_other(bench, tmp_path):
    paths = [tmp_path / folder / "out.json" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        written_by_peers(path)
    files = [compare.load(path, Job("all_reduce", ())) for path in paths]
    names = ("MPICH", "MPICH, persistent")
    labels = [curve.label for curve in compare.curves_of(files, 2, "near")]
    assert labels == [f"{name} ({path})" for path in paths for name in names]
    assert tuple(curve.label for curve in compare.curves_of(files[:1], 2, "near")) == names
    for path in paths:
        bench("--sizes", "8", "--output", str(path), *SHORT)
    twice = [word for path in [*paths, paths[0]] for word in ("--compare", str(path))]
    assert len(bench("--sizes", "8", *twice, *SHORT)["compared"]) == 2


def test_of_two_distances_that_of_this_run_is_taken(tmp_path):
    near = compare.load(written_by_peers(tmp_path / "near.json"), Job("all_reduce", ()))
    far = compare.load(written_by_peers(tmp_path / "far.json", distance="far"), Job("all_reduce", ()))
    both = compare.Others(tmp_path, near.figures + far.figures)
    assert [curve.label for curve in both.curves(2, "far")] == ["MPICH", "MPICH, persistent"]
    assert [curve.label for curve in near.curves(2, "far")] == ["MPICH, near", "MPICH, persistent, near"]
    assert near.ranks == {2}


def test_other_numbers_of_ranks_are_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(shmring, "spawn", None)
    path = written_by_peers(tmp_path / "peers.json", ranks=4)
    with pytest.raises(SystemExit, match="2"):
        command.main(["bench", "--compare", str(path)])
    assert "has figures of 4 ranks, not of 2" in capsys.readouterr().err


# ---- launchers --------------------------------------------------------------------------------------------


def shmrun(*arguments, nprocs=2):
    launcher = [sys.executable, "-m", "shmring.run", "--no-prefix", "-n", str(nprocs), "-m"]
    done = [*launcher, "shmring", "bench", *arguments]
    return subprocess.run(done, capture_output=True, text=True, timeout=LIMIT_S, env=environment())


def test_ranks_of_a_launcher_are_measured_and_one_of_them_prints():
    done = shmrun("all_gather", "--sizes", "8", "--json", *SHORT, nprocs=3)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    assert (report["ranks"], wrong_of(report)) == (3, [0])


def test_a_launcher_has_said_how_many_ranks_there_are():
    done = shmrun("-n", "5")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "shmring bench: -n 5, but the launcher has started 2 ranks: leave -n out" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_rank_of_a_launcher_is_all_there_is():
    done = shmrun("-n", "3", nprocs=1)
    assert (done.returncode, done.stdout) == (2, "")
    assert "-n 3, but the launcher has started 1 rank: leave -n out" in done.stderr
    done = shmrun("--sizes", "8", "--json", *SHORT, nprocs=1)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 1


def by_hand(folders, *arguments):
    """(status, stdout, stderr) by rank, of ranks each in its folder, as on hosts with disks of their own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = {"SHMRING_SIZE": str(len(folders)), "SHMRING_ADDR": str(folders[0]), "SHMRING_TIMEOUT": "20"}
    ranks = [
        subprocess.Popen(
            [*COMMAND, *arguments], cwd=folder, env=environment(SHMRING_RANK=str(rank), **job), **pipes
        )
        for rank, folder in enumerate(folders)
    ]
    messages = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, messages, strict=True)]


@pytest.mark.parametrize("wherever", [0, 1], ids=["rank 0 has it", "rank 0 lacks it"])
def test_files_are_those_of_rank_0(tmp_path, wherever):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    (folders[wherever] / "out").mkdir()
    ranks = by_hand(folders, "--sizes", "8", "--output", "out/x.json", *SHORT)
    if wherever == 0:
        assert [(status, reported) for status, _, reported in ranks] == [(0, "")] * 2
        jsonschema.validate(json.loads((folders[0] / "out/x.json").read_text()), SCHEMA)
    else:
        assert [(status, text) for status, text, _ in ranks] == [(2, "")] * 2
        reported = [reported for _, _, reported in ranks]
        assert "--output out/x.json cannot be written" in reported[0]
        assert (reported[0].count("\n"), reported[1]) == (1, "")


# ---- Ctrl-C -----------------------------------------------------------------------------------------------


def interrupted(kill, *arguments):
    """(status, stdout, stderr) of a run of minutes that is broken off when its first row is there."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    more = [*COMMAND, "--sizes", "8:64M", "--seconds", "0.2", *arguments]
    with subprocess.Popen(more, **pipes, env=environment(), start_new_session=True) as process:
        text = ""
        while " 8 " not in text:
            text = process.stdout.readline()
        kill(process.pid, signal.SIGINT)
        rest, reported = process.communicate(timeout=LIMIT_S)
    return process.returncode, rest, reported


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(os.kill, id="the command alone"),
        pytest.param(os.killpg, id="as a terminal does", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_it_with_what_there_is(tmp_path, kill):
    path = tmp_path / "out.json"
    status, rest, reported = interrupted(kill, "--output", str(path))
    assert (status, reported) == (130, "")
    assert "Traceback" not in rest
    report = json.loads(path.read_text())
    jsonschema.validate(report, SCHEMA)
    assert report["interrupted"]
    assert report["rows"][0]["nbytes"] == 8
    assert len(report["rows"]) < 24
