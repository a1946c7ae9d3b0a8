"""`python -m shmring.selftest`: passes here, and says what is wrong where something is.

May know: selftest's own names, to break what it compares with.
"""

import json
import subprocess
import sys
import textwrap

import pytest
from engines import environment

jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.limit(200)
LIMIT_S = 180
SCHEMA = {
    "type": "object",
    "required": ["shmring", "Python", "NumPy", "Linux", "seconds", "failed", "checks"],
    "properties": {
        "seconds": {"type": "number", "exclusiveMinimum": 0},
        "failed": {"type": "integer", "minimum": 0},
        "checks": {
            "type": "array",
            "minItems": 4,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "results", "seconds", "problem"],
                "properties": {
                    "name": {"type": "string"},
                    "results": {"type": "integer", "minimum": 0},
                    "seconds": {"type": "number", "minimum": 0},
                    "problem": {"type": ["string", "null"]},
                },
            },
        },
    },
}


def run(*arguments, **more):
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def checks_of(done):
    found = json.loads(done.stdout)
    jsonschema.validate(found, SCHEMA)
    assert found["failed"] == sum(check["problem"] is not None for check in found["checks"])
    return {check["name"]: check for check in found["checks"]}


def test_passes_here_as_a_command():
    done = run("-m", "shmring", "selftest", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = checks_of(done)
    assert [name for name, check in found.items() if not check["results"]] == []
    for segment in ("memfd", "posix"):
        for ranks in ("1 rank", "2 ranks", "5 ranks"):
            assert found[f"{segment}, {ranks}: reductions"]["results"] > 400


# With one rank and two only; argument: what is broken of it.
BROKEN = """
    import os, sys
    import numpy as np
    from shmring import selftest
    from shmring.tools import selftest as command

    def die(comm, tally):
        os.abort()

    def leave_open():
        return os.memfd_create("shmring")

    selftest.SEGMENTS, selftest.CROWD = ("memfd",), 2
    what = sys.argv.pop(1)
    if what == "sums":
        selftest.FOLDS["sum"] = np.subtract
    if what == "ranks":
        selftest.FAMILIES["moves"] = die
    if what == "descriptors":
        selftest._an_exception = leave_open
    raise SystemExit(command.main())
"""


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("sums", "FAILED  memfd, 2 ranks: reductions: rank 0: all_reduce(u1[40], sum): array("),
        ("ranks", "FAILED  memfd, 2 ranks: RankFailed: rank "),
        ("descriptors", "FAILED  nothing is left behind: AssertionError: {'/memfd:shmring (deleted)'}"),
    ],
)
def test_says_what_is_wrong(what, told):
    done = run("-c", textwrap.dedent(BROKEN), what)
    assert done.returncode == 1, done.stdout + done.stderr
    assert told in done.stdout
    lines = done.stdout.splitlines()
    failed = sum(line.startswith("FAILED") for line in lines)
    passed = sum(line.startswith("ok ") for line in lines)
    assert lines[-1].startswith(f"{passed} passed, {failed} failed in ")
    assert passed >= 4


def test_a_wrong_flag_is_one_line_and_status_2():
    done = run("-m", "shmring.selftest", "--quick")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "python -m shmring.selftest: unrecognized arguments: --quick "
        "(more with python -m shmring.selftest --help)\n"
    )
