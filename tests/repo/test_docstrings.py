"""Docstrings of public names are complete, their examples run, and the stubs carry their first paragraphs."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import docstrings
import pytest
import stub_docstrings

import shmring

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
WATCHDOG_S = 100

# Public only in that other modules of shmring call them.
INTERNAL = {"attach_snapshot", "stop_quietly", "closed_because"}
# Their C slots have no signature in Python.
WITHOUT_SIGNATURE = {"Memory", "Plan.__call__"}

PUBLIC = [each for each in docstrings.public() if each.name.rpartition(".")[2] not in INTERNAL]
CALLS = [each for each in PUBLIC if docstrings.is_call(each.item)]


def of(found):
    return {"argvalues": found, "ids": [each.name for each in found]}


def test_the_public_names_are_found():
    names = {each.name for each in PUBLIC}
    assert {"Comm.all_reduce", "Comm.isend", "Work.wait", "Ring.put", "SharedArray.lock"} <= names
    assert {"model.ring", "errors.agreed", "methods.server.ParameterServer", "adapters.pools.run"} <= names
    assert len(CALLS) > 150


@pytest.mark.parametrize("call", **of(CALLS))
def test_every_call_describes_its_parameters_and_result(call):
    if call.name not in WITHOUT_SIGNATURE:
        assert call.described == call.parameters
        result = inspect.signature(call.item).return_annotation
        assert "Returns" in call.sections or result in ("None", inspect.Signature.empty)
    assert call.summary.endswith("."), "the first paragraph is a sentence"


def constructed():
    """Return the classes that users make: their docstrings have parameters."""
    return [each for each in PUBLIC if inspect.isclass(each.item) and "Parameters" in each.sections]


@pytest.mark.parametrize("kind", **of(constructed()))
def test_every_class_describes_its_parameters(kind):
    assert kind.name in WITHOUT_SIGNATURE or kind.described == kind.parameters


def to_show():
    """Return what needs an example: functions, methods of Comm, and classes that users make."""
    functions = [each for each in CALLS if "." not in each.item.__qualname__]
    methods = [each for each in CALLS if each.name.startswith(("Comm.", "SharedArray."))]
    return functions + methods + constructed()


@pytest.mark.parametrize("each", **of(to_show()))
def test_every_call_has_an_example(each):
    example = each.sections.get("Examples", "")
    assert each.examples or each.shown or example.startswith("See `"), "add a section Examples"
    compile(each.shown, each.name, "exec")


@pytest.mark.parametrize("each", **of([each for each in PUBLIC if inspect.isdatadescriptor(each.item)]))
def test_every_property_has_a_docstring(each):
    assert each.text or each.name.rpartition(".")[2] in stub_docstrings.own_docstrings()


@pytest.mark.limit(2 * WATCHDOG_S)
@pytest.mark.parametrize("where", ["alone", "ranks"])
def test_the_examples_run(where):
    done = subprocess.run(
        [sys.executable, docstrings.__file__, where],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 30  # programs


@pytest.mark.parametrize("stub", argvalues=stub_docstrings.stubs(), ids=lambda stub: stub.name)
def test_stubs_carry_the_first_paragraph(stub):
    assert not stub_docstrings.wrong(stub), "run python tests/support/stub_docstrings.py"
