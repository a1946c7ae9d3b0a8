"""`shmring predict`: its figures are the model's; JSON, plots, links fitted to runs of `shmring bench`."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import jsonschema
import pytest
from reports import exactly, maybe

import shmring
from shmring import model
from shmring.model import Link
from shmring.tools import command, predict
from shmring.tools._bench.calls import Job

GIVEN = ("--alpha", "50e-6", "--bandwidth", "125e6")
WIRE = Link(50e-6, 125e6)

POSITIVE, COUNT = {"type": "number", "exclusiveMinimum": 0}, {"type": "integer", "minimum": 1}


def list_of(schema):
    return {"type": "array", "items": schema}


LINK = exactly(alpha_s={"type": "number", "minimum": 0}, bandwidth=POSITIVE)
SCHEMA = exactly(
    program={"const": "shmring predict"}, schema={"const": 1}, version={"type": "string"},
    source={"type": "string"}, measured_over_predicted=maybe(list_of(POSITIVE)),
    link=LINK, hosts=COUNT, wire=maybe(LINK),
    rows=list_of(exactly(
        ranks=COUNT, nbytes=COUNT, seconds={"type": "object", "additionalProperties": POSITIVE}
    )),
    crossovers=maybe(list_of(exactly(ranks=COUNT, nbytes={"type": "number", "minimum": 0}))),
    training=maybe(exactly(
        gradient_nbytes=COUNT, compute_s=POSITIVE,
        rows=list_of(exactly(
            ranks=COUNT, transfer_s=POSITIVE, step_s=POSITIVE, efficiency=POSITIVE,
            bandwidth_for_90_percent=POSITIVE,
        )),
    )),
)  # fmt: skip


@pytest.fixture
def predicted(capfd):
    """predicted("--measure") → its JSON output."""

    def run(*arguments):
        assert command.main(["predict", *arguments, "--json"]) == 0
        report = json.loads(capfd.readouterr().out)
        jsonschema.validate(report, SCHEMA)
        return report

    return run


# ---- figures ----------------------------------------------------------------------------------------------


def test_times_are_the_models(predicted):
    report = predicted(*GIVEN, "--sizes", "1K,64M", "--ranks", "2,5")
    assert [(row["ranks"], row["nbytes"]) for row in report["rows"]] == [
        (2, 1 << 10), (2, 1 << 26), (5, 1 << 10), (5, 1 << 26)
    ]  # fmt: skip
    for row in report["rows"]:
        ranks, nbytes = row["ranks"], row["nbytes"]
        expected = {name: model.seconds(name, nbytes, ranks, WIRE) for name in model.ALGORITHMS}
        expected["parameter_server"] = model.parameter_server(nbytes, ranks).seconds(WIRE)
        assert row["seconds"] == pytest.approx(expected)
    assert [one["nbytes"] for one in report["crossovers"]] == [0, pytest.approx(model.crossover(5, WIRE))]
    assert (report["source"], report["training"], report["wire"]) == ("given", None, None)


def test_the_published_training_step(predicted):
    report = predicted(*GIVEN, "--ranks", "4", "--gradient-bytes", "553360000", "--step-seconds", "0.55")
    (row,) = report["training"]["rows"]
    assert row["transfer_s"] == pytest.approx(6.64, abs=0.005)
    assert row["step_s"] == pytest.approx(7.19, abs=0.005)
    assert row["efficiency"] == pytest.approx(0.0765, abs=0.00005)
    assert row["bandwidth_for_90_percent"] / 1e6 == pytest.approx(13_582, abs=0.5)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("553.36e6", 553_360_000), ("0.5e3", 500), ("1000.0", 1000), ("500M", 500 << 20)]
)
def test_a_gradient_has_as_many_bytes_as_papers_say(predicted, text, nbytes):
    report = predicted(*GIVEN, "--ranks", "4", "--gradient-bytes", text, "--step-seconds", "0.55")
    assert report["training"]["gradient_nbytes"] == nbytes


def test_over_hosts_the_ring_passes_the_wire_and_the_hierarchy_crosses_it_once(predicted):
    wire = ("--hosts", "2", "--wire-alpha", "50e-6", "--wire-bandwidth", "125e6")
    report = predicted("--alpha", "1e-6", "--bandwidth", "1e10", "--ranks", "4,8", "--sizes", "1M", *wire)
    for row in report["rows"]:
        inside, between = model.hierarchical(1 << 20, 2, row["ranks"] // 2)
        hierarchical_s = inside.seconds(Link(1e-6, 1e10)) + between.seconds(WIRE)
        ring_s = model.seconds("ring", 1 << 20, row["ranks"], WIRE)
        assert row["seconds"] == pytest.approx({"ring": ring_s, "hierarchical": hierarchical_s})
    assert (report["hosts"], report["crossovers"]) == (2, None)


def test_the_page_shows_what_the_command_prints(capsys):
    page = Path(__file__).resolve().parents[2] / "docs" / "methods" / "model.md"
    if not page.exists():
        pytest.skip("needs the checkout")
    shown = re.search(r"```sh\nshmring (predict .*?)```\n\n```text\n(.*?)```", page.read_text(), re.S)
    assert command.main(shown[1].replace("\\\n", "").split()) == 0
    assert capsys.readouterr().out == shown[2]


def test_people_read_tables(capsys):
    assert command.main(["predict", *GIVEN, "--ranks", "2,4", "--sizes", "1K,1M"]) == 0
    first, two, four = capsys.readouterr().out.split("\n\n")
    assert first == "alpha 50 us, bandwidth 125 MB/s (given)"
    assert [line.split()[0] for line in two.splitlines()] == ["2", "1", "1", "us"]
    assert four.splitlines()[-1] == "us; a ring is faster than a tree from 5000 bytes on"
    training = ("--gradient-bytes", "553360000", "--step-seconds", "0.55", "--ranks", "4")
    assert command.main(["predict", *GIVEN, *training, "--sizes", "1K"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["4", "6.64", "7.19", "7.649", "13582"]


# ---- fitted links -----------------------------------------------------------------------------------------


def bench_report(call="all_reduce", ranks=2, hosts=1, algorithm=None, us=None, **changed):
    """Return the report of `shmring bench` on calls that take the model's time, or us(nbytes)."""

    def from_model(nbytes):
        return 1e6 * model.seconds(algorithm or "direct", nbytes, ranks, WIRE)

    rows = [{"nbytes": nbytes, "p50_us": (us or from_model)(nbytes)} for nbytes in (8, 1000, 1 << 20)]
    options = asdict(Job(call, (), algorithm=algorithm))
    head = {"program": "shmring bench", "schema": 1, "call": call, "ranks": ranks, "hosts": hosts}
    return head | {"options": options, "rows": rows} | changed


def ping_pong_us(nbytes):
    return 2e6 * model.message(nbytes).seconds(WIRE)


@pytest.mark.parametrize(
    "report",
    [
        bench_report(),
        bench_report(ranks=3, hosts=3),
        bench_report(ranks=5, algorithm="ring"),
        bench_report(ranks=5, algorithm="tree"),
        bench_report("ping_pong", us=ping_pong_us),
    ],
    ids=["direct", "hosts", "ring", "tree", "ping_pong"],
)
def test_a_run_of_bench_tells_its_link(predicted, tmp_path, report):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report))
    found = predicted("--from", str(path))
    assert found["link"] == pytest.approx({"alpha_s": WIRE.alpha_s, "bandwidth": WIRE.beta})
    assert found["measured_over_predicted"] == pytest.approx([1, 1])
    assert str(path) in found["source"]


@pytest.mark.slow
def test_bench_output_and_new_measurements_can_be_fitted(predicted, capfd, tmp_path):
    path = tmp_path / "run.json"
    run = ("bench", "--sizes", "64,64K,16M", "--seconds", "0.02", "--output", str(path))
    assert command.main([*run]) == 0
    capfd.readouterr()
    for how in (("--from", str(path)), ("--measure",)):
        found = predicted(*how, "--sizes", "1M", "--ranks", "2")
        least, most = found["measured_over_predicted"]
        assert least <= most
        assert found["link"]["bandwidth"] > 1e6


UNUSABLE = {
    "no JSON": ("no json", "is not JSON"),
    "a list": ("[1]", "is not what this version's"),
    "another program": ('{"program": "x"}', "is not what this version's"),
    "version": (json.dumps(bench_report(schema=9)), "is not what this version's"),
    "no rows": (json.dumps(bench_report(rows=[3])), "is not what this version's"),
    "one size": (json.dumps(bench_report(rows=[{"nbytes": 8, "p50_us": 1.0}])), "two sizes or more"),
    "call": (json.dumps(bench_report("scan")), "has figures of scan"),
    "pipeline": (json.dumps(bench_report(algorithm="double_tree")), "no line can be fitted"),
    "one rank": (json.dumps(bench_report(ranks=1, us=lambda nbytes: nbytes)), "not of one kind of link"),
    "two links": (json.dumps(bench_report(ranks=4, hosts=2)), "4 ranks on 2 hosts"),
    "shrinks": (json.dumps(bench_report(us=lambda nbytes: 1e3 / nbytes)), "no bandwidth in them"),
}


@pytest.mark.parametrize("damage", UNUSABLE)
def test_unfittable_measurements_are_refused(capsys, tmp_path, damage):
    text, why = UNUSABLE[damage]
    path = tmp_path / "run.json"
    path.write_text(text)
    refused(capsys, ["--from", str(path)], why)


def refused(capsys, arguments, why):
    with pytest.raises(SystemExit) as ended:
        command.main(["predict", *arguments])
    reported = capsys.readouterr()
    assert (ended.value.code, reported.out) == (2, "")
    assert why in reported.err
    assert reported.err.count("\n") == 1


# ---- the picture ------------------------------------------------------------------------------------------


def test_the_picture_has_every_algorithm_and_the_crossover(capsys, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "times.png"
    assert command.main(["predict", *GIVEN, "--ranks", "4,8", "--plot", str(path)]) == 0
    assert image.imread(path).shape[2] == 4
    assert capsys.readouterr().out


def test_the_curves_are_the_figures(predicted):
    pytest.importorskip("matplotlib")
    report = predicted(*GIVEN, "--ranks", "2,4", "--sizes", "1K:1M")
    panels = predict.figure_of(report).axes
    assert [panel.get_title() for panel in panels] == ["2 ranks", "4 ranks"]
    for panel, ranks in zip(panels, (2, 4), strict=True):
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
        assert "1 KiB" in [tick.get_text() for tick in panel.get_xticklabels()]
        curves = {line.get_label(): line for line in panel.get_lines()}
        rows = [row for row in report["rows"] if row["ranks"] == ranks]
        for name in model.ALGORITHMS:
            curve = curves.pop(name.replace("_", " "))
            assert list(curve.get_xdata()) == [row["nbytes"] for row in rows]
            assert list(curve.get_ydata()) == [1e6 * row["seconds"][name] for row in rows]
        del curves["parameter server"]
        crossing = {label: line.get_xdata()[0] for label, line in curves.items()}
        assert crossing == ({} if ranks == 2 else {"ring = tree: 5000 B": pytest.approx(5000)})


# ---- wrong flags ------------------------------------------------------------------------------------------

NO_SOURCE = "give --alpha and --bandwidth, --from FILE, or --measure"
ALL_OF_WIRE = "give all of them, or none"
WRONG = {
    "": NO_SOURCE,
    "--alpha 1e-6": NO_SOURCE,
    "--bandwidth 1e9 --measure": NO_SOURCE,
    "--from x.json --measure": NO_SOURCE,
    "--alpha 0 --bandwidth 1": "not a number of seconds",
    "--alpha 1e-6 --bandwidth fast": "'fast' is not a bandwidth",
    "--alpha 1e-6 --bandwidth nan": "'nan' is not a bandwidth",
    "--from /nonexistent": "cannot be read: No such file",
    "GIVEN --sizes 64:8": "ends before it begins",
    "GIVEN --gradient-bytes 0.5 --step-seconds 1": "'0.5' is not a number of bytes",
    "GIVEN --gradient-bytes nan --step-seconds 1": "'nan' is not a number of bytes",
    "GIVEN --gradient-bytes 5x --step-seconds 1": "'5x' is not a number of bytes",
    "GIVEN --sizes 8,x": "'x' is not a number of bytes",
    "GIVEN --ranks 1": "'1' is not a whole number of 2 or more",
    "GIVEN --ranks 2,": "'' is not a whole number of 2 or more",
    "GIVEN --gradient-bytes 8": "give both",
    "GIVEN --step-seconds 8": "give both",
    "GIVEN --hosts 2": ALL_OF_WIRE,
    "GIVEN --wire-alpha 1e-6": ALL_OF_WIRE,
    "GIVEN --hosts 2 --wire-alpha 1e-6": ALL_OF_WIRE,
    "GIVEN --hosts 2 --wire-alpha 1e-6 --wire-bandwidth 1e6 --ranks 2,3": "3 ranks cannot be spread",
    "GIVEN --hosts 2 --wire-alpha 1 --wire-bandwidth 1 --gradient-bytes 8 --step-seconds 1": "with --hosts",
    "GIVEN --plot .": "cannot be written",
    "GIVEN --plot x.gnu": "is not a picture: it must end in .",
    "GIVEN 8": "unrecognized arguments",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_flags_are_one_line_and_2_and_start_nobody(monkeypatch, capsys, arguments):
    monkeypatch.setattr(shmring, "spawn", None)
    if "--plot x" in arguments:
        pytest.importorskip("matplotlib")
    refused(capsys, arguments.replace("GIVEN", " ".join(GIVEN)).split(), WRONG[arguments])
