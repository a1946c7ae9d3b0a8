"""`python -m shmring.selftest`: it passes here, and names the fault on a broken installation."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from combinations import first
from engines import environment

from shmring.tools import selftest as command
from shmring.tools import selftest_checks

jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.limit(200)
LIMIT_S = 180
SCHEMA = {
    "type": "object",
    "required": ["shmring", "Python", "NumPy", "Linux", "seconds", "failed", "skipped", "checks"],
    "properties": {
        "seconds": {"type": "number", "exclusiveMinimum": 0},
        "failed": {"type": "integer", "minimum": 0},
        "skipped": {"type": "integer", "minimum": 0},
        "checks": {
            "type": "array",
            "minItems": 4,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "results", "seconds", "problem", "skipped"],
                "properties": {
                    "name": {"type": "string"},
                    "results": {"type": "integer", "minimum": 0},
                    "seconds": {"type": "number", "minimum": 0},
                    "problem": {"type": ["string", "null"]},
                    "skipped": {"type": ["string", "null"]},
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
    for count, why in (("failed", "problem"), ("skipped", "skipped")):
        assert found[count] == sum(check[why] is not None for check in found["checks"])
    return {check["name"]: check for check in found["checks"]}


@pytest.mark.slow
def test_passes_here_as_a_command():
    done = run("-m", "shmring", "selftest", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = checks_of(done)
    assert [name for name, check in found.items() if not check["results"]] == []
    for segment in ("memfd", "posix"):
        for ranks in ("1 rank", "2 ranks", "5 ranks"):
            assert found[f"{segment}, {ranks}: reductions"]["results"] > 400


# With one rank and two only; the argument breaks one part.
BROKEN = """
    import os, sys
    import numpy as np
    from shmring.tools import selftest_checks as selftest
    from shmring.tools import command

    def die(comm, tally):
        os.abort()

    def leave_open():
        return os.memfd_create("shmring")

    selftest.SEGMENTS, selftest.MANY_RANKS = ("memfd",), 2
    what = sys.argv.pop(1)
    if what == "sums":
        selftest.FOLDS["sum"] = np.subtract
    if what == "ranks":
        selftest.FAMILIES["moves"] = die
    if what == "descriptors":
        selftest._an_exception = leave_open
    raise SystemExit(command.main(["selftest"]))
"""


@pytest.mark.parametrize(
    ("what", "reported"),
    first(
        1,
        [
            ("sums", "FAILED  memfd, 2 ranks: reductions: rank 0: all_reduce(u1[40], sum): array("),
            ("ranks", "FAILED  memfd, 2 ranks: RankFailed: rank "),
            ("descriptors", "FAILED  nothing is left behind: AssertionError: {'/memfd:shmring (deleted)'}"),
        ],
    ),
)
def test_says_what_is_wrong(what, reported):
    done = run("-c", textwrap.dedent(BROKEN), what)
    assert done.returncode == 1, done.stdout + done.stderr
    assert reported in done.stdout
    lines = done.stdout.splitlines()
    failed = sum(line.startswith("FAILED") for line in lines)
    passed = sum(line.startswith("ok ") for line in lines)
    assert lines[-1].startswith(f"{passed} passed, {failed} failed, 0 skipped in ")
    assert passed >= 4


def with_dev_shm(mount, **more):
    """Run the self-test, with one rank for each kind of segment, after this change to /dev/shm."""
    around = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" "$@"']
    if not shutil.which("unshare") or subprocess.run([*around, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount another /dev/shm")
    quick = "from shmring.tools import command, selftest_checks\n"
    quick += "selftest_checks.MANY_RANKS = 2; raise SystemExit(command.main(['selftest', '--json']))"
    return subprocess.run(
        [*around, sys.executable, "-c", quick],
        env=environment(**more), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("mount", first(1, ["-o size=16m", "-o ro", "-o size=0,nr_inodes=1"]))
def test_a_dev_shm_that_is_no_use_matters_only_where_it_is_asked_for(mount):
    done = with_dev_shm(f"mount -t tmpfs {mount} tmpfs /dev/shm")
    assert (done.returncode, done.stderr) == (0, "")
    found = checks_of(done)
    assert [name for name in found if name.startswith("posix")] == ["posix"]
    assert "/dev/shm" in found["posix"]["skipped"] or "posix segment" in found["posix"]["skipped"]
    assert found["memfd, 2 ranks: messages"]["results"] > 0


@pytest.mark.slow
def test_a_dev_shm_that_is_asked_for_has_to_be_there():
    done = with_dev_shm("mount -t tmpfs -o ro tmpfs /dev/shm", SHMRING_SEGMENT="posix")
    assert done.returncode == 1
    found = checks_of(done)
    assert "posix segment" in found["posix, 1 rank"]["problem"]
    assert found["memfd, 1 rank: moves"]["problem"] is None


def test_no_check_outlives_the_watchdog_nor_that_the_five_minutes_of_ci():
    worlds = 3 * len(selftest_checks.SEGMENTS) + 3
    assert worlds * selftest_checks.LIMIT_S < command.WATCHDOG_S < 5 * 60


def quick_checks(monkeypatch):
    """All of them but the worlds that compare results."""
    monkeypatch.setattr(selftest_checks, "SEGMENTS", ())
    return {check.name: check for check in selftest_checks.checks()}


def test_a_check_without_proc_is_skipped(monkeypatch):
    def hidden():
        raise FileNotFoundError(2, "No such file", "/proc/self/fd")

    monkeypatch.setattr(selftest_checks, "_held", hidden)
    check = quick_checks(monkeypatch)["nothing is left behind"]
    assert (check.problem, "/proc/self/fd" in check.skipped) == (None, True)


def test_cpus_that_a_sandbox_does_not_let_choose_are_no_matter(monkeypatch):
    def refused(_pid, _cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    monkeypatch.setattr(selftest_checks, "FAMILIES", {"messages": selftest_checks._messages})
    assert [check.problem for check in selftest_checks._calls("memfd", 2)] == [None]


def test_names_of_other_users_and_those_that_go_again_are_not_left_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(selftest_checks, "SHM", tmp_path)
    before = selftest_checks._held()
    name = tmp_path / "shmring-1"
    name.touch()
    with pytest.raises(AssertionError, match="shmring-1"):
        selftest_checks._nothing_since(before)
    monkeypatch.setattr(selftest_checks.time, "sleep", lambda _: name.unlink())
    assert selftest_checks._nothing_since(before) == 1
    name.touch()
    monkeypatch.setattr(os, "geteuid", lambda: name.stat().st_uid + 1)
    assert selftest_checks._held() == before


def test_a_wrong_flag_is_one_line_and_status_2():
    done = run("-m", "shmring.selftest", "--quick")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "shmring selftest: unrecognized arguments: --quick (more with shmring selftest --help)\n"
    )
