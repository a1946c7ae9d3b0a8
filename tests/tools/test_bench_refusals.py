"""`shmring bench`: wrong options, unusable files, missing packages."""

import json
import sys
from dataclasses import asdict
from importlib import metadata

import pytest

import shmring
from shmring.tools import command
from shmring.tools._bench.calls import Job

# ---- wrong flags ------------------------------------------------------------------------------------------

WRONG = {
    "all_reducee": "invalid choice: 'all_reducee'",
    "--sizes 6": "6 bytes are no multiple of the 4 bytes of a float32 item",
    "--sizes 8,12 --dtype float64": "12 bytes are no multiple of the 8",
    "--sizes 64:8": "ends before it begins",
    "--sizes 8:x": "'x' is not a number of bytes",
    "--sizes 8:16:32": "is not a number of bytes",
    "--sizes 0": "is not a number of bytes",
    "--sizes 8,,16": "'' is not a number of bytes",
    "--sizes 9999999G": "is not a number of bytes",
    "--sizes 8,16 --factor 2": "--factor has no meaning for a list of sizes",
    "--factor 1": "'1' is not a whole number of 2 or more",
    "--dtype float31": "invalid choice: 'float31'",
    "--op mean": "invalid choice: 'mean'",
    "--op band": "op band has no meaning for float32",
    "--op avg --dtype int32": "op avg has no meaning for int32",
    "scan --op avg": "op avg has no meaning for a scan",
    "reduce --op min --dtype complex64": "op min has no meaning for complex64",
    "broadcast --op max": "--op has no meaning for broadcast",
    "all_gather --root 1": "--root has no meaning for all_gather",
    "all_gather --inplace": "--inplace has no meaning for all_gather",
    "scan --algorithm ring": "--algorithm has no meaning for scan",
    "--algorithm rong": "rong",
    "ping_pong --plan": "--plan has no meaning for ping_pong",
    "barrier --sizes 8": "--sizes has no meaning for barrier",
    "barrier --dtype int8": "--dtype has no meaning for barrier",
    "barrier --plot x.png": "--plot has no meaning for barrier",
    "reduce --root 2": "--root 2 of 2 ranks: give one of 0 to 1",
    "ping_pong -n 1": "needs 2 ranks or more",
    "-n 0": "'0' is not a number of ranks",
    "-n many": "'many' is not a number of ranks",
    "--seconds 0": "not a number of seconds",
    "--iters 0": "not a whole number of 1 or more",
    "--output /nonexistent/x.json": "cannot be written",
    "--plot .": "cannot be written",
    "--plot x.gnu": "is not a picture: it must end in .",
    "--compare /nonexistent": "cannot be read: No such file",
    "--size=8": "unrecognized arguments",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_flags_are_one_line_and_2_and_start_nobody(monkeypatch, capsys, arguments):
    monkeypatch.setattr(shmring, "spawn", None)
    if "--plot x" in arguments:
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as ended:
        command.main(["bench", *arguments.split()])
    reported = capsys.readouterr()
    assert (ended.value.code, reported.out) == (2, "")
    assert WRONG[arguments] in reported.err
    assert reported.err.startswith("shmring")
    assert reported.err.count("\n") == 1


OWN = {"program": "shmring bench", "schema": 1, "options": asdict(Job("all_reduce", ()))}
OTHER = {name: json.dumps(OWN | {"options": OWN["options"] | changed}) for name, changed in (
    ("call", {"call": "scan"}), ("dtype", {"dtype": "int8"}), ("op", {"op": "max"}), ("root", {"root": 1}),
    ("input", {"written": True}),
)}  # fmt: skip
UNUSABLE = {
    "no JSON": ("no json", "is not JSON"),
    "another program's": ('{"schema": 1}', "is neither what"),
    "a list": ("[1]", "is neither what"),
    "text": ('"schema"', "is neither what"),
    "version": (json.dumps(OWN | {"schema": 9}), "is of another version: schema 9"),
    "call": (OTHER["call"], "another call than this run: scan, not all_reduce"),
    "dtype": (OTHER["dtype"], "another dtype"),
    "op": (OTHER["op"], "another op"),
    "root": (OTHER["root"], "another root than this run: 1, not 0"),
    "input": (OTHER["input"], "another input than this run: written, not reused"),
    "options": ('{"program": "shmring bench", "schema": 1}', "is neither what"),
    "rows": (json.dumps(OWN | {"rows": [3]}), "is neither what"),
    "empty": (json.dumps(OWN | {"rows": []}), "has no figures of all_reduce"),
}


@pytest.mark.parametrize("damage", UNUSABLE)
def test_what_cannot_stand_beside_it_is_refused(monkeypatch, capsys, tmp_path, damage):
    text, why = UNUSABLE[damage]
    path = tmp_path / "other.json"
    path.write_text(text)
    monkeypatch.setattr(shmring, "spawn", None)
    with pytest.raises(SystemExit, match="2"):
        command.main(["bench", "--compare", str(path)])
    reported = capsys.readouterr().err
    assert why in reported
    assert reported.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [("matplotlib.figure", "--plot x.png", "plot"), ("ml_dtypes", "--dtype bfloat16 --sizes 8", "dtypes")],
)
@pytest.mark.parametrize("installed", [True, False])
def test_a_package_that_is_missing_is_named(monkeypatch, capsys, module, arguments, extra, installed):
    def distribution(name):
        if not installed:
            raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.setattr(shmring, "spawn", None)
    monkeypatch.setitem(sys.modules, module, None)
    assert command.main(["bench", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shmring bench: --")
    remedy = f"pip install 'shmring[{extra}]'" if installed else f"pip install '.[{extra}]' in the checkout"
    assert error.endswith(f"which is not installed here: {remedy}\n")
