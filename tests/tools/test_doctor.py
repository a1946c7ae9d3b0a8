"""The command doctor: made-up and provoked problems; and that no probe that fails in any way keeps it or info
from the rest."""

import copy
import ctypes
import errno
import itertools
import json
import os
import platform
import resource
import struct
import subprocess

import pytest
from reports import FACTS, FINDINGS, MIB, REPORT, WELL, run, validate

from shmring._config import thresholds, tuning_table
from shmring.tools import command, doctor, info
from shmring.tools._machine import machine

KEY = "0123456789abcdef0123456789abcdef"


def diagnosed(*arguments, **keywords):
    """Return doctor's findings by subject, and its exit status."""
    done = run("doctor", "--json", *arguments, **keywords)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    validate(found, FINDINGS)
    by_subject = {
        about: list(its) for about, its in itertools.groupby(found["findings"], key=lambda one: one["about"])
    }
    assert list(by_subject) == list(doctor.CHECKS)
    counts = [sum(one["level"] == level for one in found["findings"]) for level in ("problem", "note")]
    assert counts == [found["problems"], found["notes"]]
    assert done.returncode == (1 if found["problems"] else 0)
    return by_subject, done.returncode


# ---- probes that fail -------------------------------------------------------------------------------------


@pytest.fixture
def well(monkeypatch):
    """All probes find a machine on which all is well."""
    for name, fact in WELL.items():
        monkeypatch.setitem(info.FACTS, name, lambda _, fact=fact: copy.deepcopy(fact))
    return lambda name, find: monkeypatch.setitem(info.FACTS, name, find)


def raising(error):
    def find(_):
        raise error

    return find


def outcome(capsys, *arguments):
    status = command.main(arguments)
    text = capsys.readouterr()
    assert text.err == ""
    return status, text.out


def test_without_problems_doctor_says_so(well, capsys):
    assert set(WELL) == set(info.FACTS) == set(FACTS)
    status, text = outcome(capsys, "doctor")
    assert status == 0
    assert text.startswith("shmring doctor: no problems, no notes\n  ok       settings ")
    assert all(line.startswith("  ok ") for line in text.splitlines()[1:])
    validate(json.loads(outcome(capsys, "info", "--json")[1]), REPORT)


@pytest.mark.parametrize(
    "error", [OSError(5, "no\nluck"), machine.Unknown("nobody knows"), ZeroDivisionError()]
)
@pytest.mark.parametrize("name", WELL)
def test_each_probe_that_fails_leaves_all_others(well, capsys, name, error):
    well(name, raising(error))
    why = {"OSError": "OSError: [Errno 5] no luck", "Unknown": "nobody knows"}.get(
        type(error).__name__, "ZeroDivisionError"
    )
    status, text = outcome(capsys, "info", "--json")
    found = json.loads(text)
    validate(found, REPORT)
    assert (status, found[name]) == (0, {"unknown": why})
    assert {other: fact for other, fact in found.items() if other != name} == {
        other: fact for other, fact in WELL.items() if other != name
    }
    status, text = outcome(capsys, "info")
    assert status == 0
    shown = [row for rows in info._SECTIONS.values() for row in rows if row[1] == name]
    assert text.count(f"unknown: {why}\n") == len(shown) >= 1
    status, text = outcome(capsys, "doctor", "--json")
    found = json.loads(text)
    validate(found, FINDINGS)
    assert (status, found["problems"]) == (0, 0)
    assert {one["about"] for one in found["findings"]} == set(doctor.CHECKS)


@pytest.mark.parametrize("name", WELL)
def test_a_probe_that_finds_nonsense_is_no_matter(well, capsys, name):
    for nonsense in ({}, dict.fromkeys(WELL[name]), dict.fromkeys(WELL[name], 7), {"other": [None]}):
        well(name, lambda _, found=nonsense: found)
        assert outcome(capsys, "info")[0] == 0
        status, text = outcome(capsys, "doctor")
        assert status in (0, 1)
        assert len(text.splitlines()) > len(doctor.CHECKS)


# ---- troubles, made up ------------------------------------------------------------------------------------

LITTLE = {"limit": "the memory cgroup /a (limit 300 MiB)", "room_nbytes": 90 * MIB}
FAR = [{"cpus": [0, 2], "share": "one node", "round_trip_ns": 300, "distance": "far"}]
TROUBLES = [
    ("cpus", {"usable": 2}, "CPUs", "note", "quota gives 2 of the 4", "--cpus"),
    ("cpus", {"usable": 1}, "CPUs", "problem", "quota gives 1 of the 4", "cpu.max"),
    ("cpus", {"allowed": [1, 2], "usable": 2}, "CPUs", "note", "may use 2 of 4 CPUs (1-2)", "taskset"),
    ("cpus", {"allowed": [1], "usable": 1}, "CPUs", "note", "may use 1 of 4 CPUs (1)", "not intended"),
    ("cpus", {"online": 1, "allowed": [0], "usable": 1}, "CPUs", "note", "one CPU", "use a machine"),
    ("between_ranks", {"round_trips": FAR}, "round trip", "note", "300 ns, far", "taskset -c 0-1"),
    ("between_ranks", {"round_trips": []}, "round trip", "note", "unknown: there is one CPU", None),
    (
        "instruction_set",
        {"there": ["sse2"], "chosen": "sse2"},
        "instructions",
        "note",
        "use sse2",
        "-cpu host",
    ),
    ("instruction_set", {"chosen": "sse2"}, "instructions", "note", "where avx2 is faster", "unset it"),
    ("instruction_set", {"chosen": None}, "instructions", "problem", "the best", "one of avx2, sse2"),
    ("memory", LITTLE, "memory", "problem", "cgroup /a (limit 300 MiB) has 90 MiB left", "SHMRING_CHUNK"),
    ("memory", {"room_nbytes": 500 * MIB}, "memory", "note", "500 MiB left", "raise it"),
    ("memory", {"limit": None}, "memory", "note", "unknown: the kernel reports neither", None),
    ("shared_memory", {"nbytes": 64 * MIB}, "/dev/shm", "note", "only 64 MiB", "--shm-size"),
    ("shared_memory", {"room_nbytes": 3 * MIB}, "/dev/shm", "note", "of which 3 MiB are left", "--shm-size"),
    ("descriptors", {"soft": 256}, "descriptors", "note", "only 256", "ulimit -n 4096"),
    ("descriptors", {"soft": 64, "hard": 64}, "descriptors", "problem", "only 64", "ulimit -Hn"),
    ("memfd", {"works": False, "how": "refused"}, "segments", "problem", "memfd", "SHMRING_SEGMENT=posix"),
    ("posix", {"works": False, "how": "refused"}, "segments", "note", "posix does not work", "nothing to do"),
    ("tuning", {"state": "unusable", "why": "it is not JSON"}, "tuning table", "problem", "not JSON", "tune"),
    ("threads", {"given": {}}, "threads", "note", "start 4 threads", "OMP_NUM_THREADS=1"),
    ("job", {"wrong": "RANK is 'x'"}, "launcher", "problem", "RANK is 'x'", "unset"),
    (
        "job",
        {"launcher": "torchrun", "local_size": 9},
        "launcher",
        "note",
        "9 ranks share 4",
        "start 4",
    ),
    ("job", {"slurm_allocation": True}, "launcher", "note", "batch script", "srun"),
    ("settings", {"wrong": ["SHMRING_X is bad"]}, "settings", "problem", "SHMRING_X is bad", "unset it"),
]


def altered(name, **changes):
    report = copy.deepcopy(WELL)
    report[name] |= changes
    return report


def found_of(report, about):
    return [one for one in doctor.findings(report) if one.about == about and one.level != "ok"]


@pytest.mark.parametrize(("name", "changes", "about", "level", "what", "fix"), TROUBLES)
def test_each_trouble_is_one_finding_with_its_way_out(name, changes, about, level, what, fix):
    (one,) = found_of(altered(name, **changes), about)
    assert one.level == level
    assert what in one.what
    assert one.fix is None if fix is None else fix in one.fix


def test_cpus_that_a_container_hides_are_no_trouble():
    (one,) = (one for one in doctor.findings(altered("cpus", online=2)) if one.about == "CPUs")
    assert (one.level, one.what) == ("ok", "all 4 are usable")


def test_a_dev_shm_as_large_as_memory_is_no_trouble():
    report = altered("shared_memory", nbytes=None, room_nbytes=None)
    report["settings"]["given"] = {"SHMRING_SEGMENT": "posix"}
    assert found_of(report, "/dev/shm") == []
    assert info._shared_memory(report["shared_memory"]) == "as large as memory"


def test_the_request_decides_whether_it_is_a_problem():
    report = altered("settings", given={"SHMRING_SEGMENT": "posix"})
    report["shared_memory"]["nbytes"] = 64 * MIB
    (small,) = found_of(report, "/dev/shm")
    assert (small.level, "unset SHMRING_SEGMENT" in small.fix) == ("problem", True)
    report["shared_memory"] = {"unknown": "/dev/shm: No such file or directory"}
    (absent,) = found_of(report, "/dev/shm")
    assert (absent.level, "No such file" in absent.what) == ("problem", True)
    report["posix"] = {"works": False, "how": "refused"}
    (refused,) = found_of(report, "segments")
    assert (refused.level, refused.fix) == ("problem", "set SHMRING_SEGMENT=memfd")


@pytest.mark.parametrize(
    ("scope", "way_out"), [(1, "ptrace_scope=0"), (0, "SYS_PTRACE"), (None, "SYS_PTRACE")]
)
def test_single_copies_that_are_refused_are_a_note_unless_asked_for(scope, way_out):
    report = altered("between_ranks", single_copy={"works": False, "why": "Operation not permitted"})
    report["yama"]["ptrace_scope"] = scope
    (one,) = found_of(report, "single copies")
    assert (one.level, way_out in one.fix) == ("note", True)
    assert ("ptrace_scope is 1" in one.what) == (scope == 1)
    report["settings"]["given"] = {"SHMRING_SINGLE_COPY": "64K"}
    assert found_of(report, "single copies")[0].level == "problem"


# ---- troubles, provoked -----------------------------------------------------------------------------------


def test_wrong_settings_are_all_reported_and_the_rest_is_measured():
    wrong = {"SHMRING_TIMEOUT": "abc", "SHMRING_DEPTH": "0", "SHMRING_TIMOUT": "3", "SHMRING_ISA": "avx9"}
    found, status = diagnosed(**wrong, SHMRING_KEY=KEY)
    assert status == 1
    problems = [one["what"] for one in found["settings"] if one["level"] == "problem"]
    assert [text.partition(" ")[0] for text in problems] == [
        "SHMRING_TIMEOUT",
        "SHMRING_DEPTH",
        "SHMRING_ISA",
    ]
    (note,) = [one for one in found["settings"] if one["level"] == "note"]
    assert ("SHMRING_TIMOUT" in note["what"], note["fix"]) == (True, "is SHMRING_TIMEOUT meant?")
    assert found["copying"][0]["level"] == "ok"
    assert found["instructions"][0]["level"] == "problem"


def test_keys_are_not_shown_and_their_files_are_looked_at(tmp_path):
    done = run("info", "--no-measure", SHMRING_KEY=KEY)
    assert "SHMRING_KEY=(hidden)" in done.stdout
    assert KEY not in done.stdout + run("info", "--json", "--no-measure", SHMRING_KEY=KEY).stdout
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o644)
    found, status = diagnosed("--no-measure", SHMRING_KEY_FILE=str(path))
    assert status == 1
    assert "0644" in found["settings"][0]["what"]
    assert f"chmod 600 {path}" in found["settings"][0]["what"]


def test_one_cpu_of_several():
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    found, status = diagnosed(preparation=lambda: os.sched_setaffinity(0, allowed[:1]))
    assert (status, found["CPUs"][0]["level"]) == (0, "note")
    assert f"may use 1 of {os.cpu_count()} CPUs ({allowed[0]})" in found["CPUs"][0]["what"]
    assert found["round trip"][0]["what"].startswith("unknown: there is one CPU")
    assert found["copying"][0]["what"].endswith("by 1 rank at once")


def test_few_descriptors():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found, status = diagnosed(
        preparation=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, min(hard, 1000)))
    )
    assert status == 1
    assert found["descriptors"][0]["fix"] == f"ulimit -n {min(hard, 1000)}"


def test_so_few_descriptors_that_nothing_can_be_measured():
    def prepare():
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))

    found, status = diagnosed(preparation=prepare)
    assert status == 1
    assert found["round trip"][0]["what"].startswith("unknown: ")
    assert found["descriptors"][0]["level"] == "problem"


@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_a_small_dev_shm(segment):
    mount = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$0" "$@"'
    around = ["unshare", "--mount", "sh", "-c", mount]
    if os.geteuid() != 0 or subprocess.run([*around, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small /dev/shm")
    found, status = diagnosed("--no-measure", around=around, SHMRING_SEGMENT=segment)
    assert status == (segment == "posix")
    assert "only 4 MiB" in found["/dev/shm"][0]["what"]
    assert "--shm-size" in found["/dev/shm"][0]["fix"]


def test_a_dev_shm_without_a_size():
    mount = 'mount -t tmpfs -o size=0 tmpfs /dev/shm && exec "$0" "$@"'
    around = ["unshare", "--mount", "sh", "-c", mount]
    if os.geteuid() != 0 or subprocess.run([*around, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount another /dev/shm")
    found, status = diagnosed("--no-measure", around=around, SHMRING_SEGMENT="posix")
    assert (status, found["/dev/shm"][0]["what"]) == (0, "it is as large as memory")


def test_a_dev_shm_that_is_not_there():
    mount = 'mount -t tmpfs -o size=4m,mode=000 tmpfs /dev && exec "$0" "$@"'
    around = ["unshare", "--mount", "sh", "-c", mount]
    if os.geteuid() != 0 or subprocess.run([*around, "/bin/true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount an empty /dev")
    found, status = diagnosed("--no-measure", around=around)
    assert status == 0
    assert "No such file" in found["/dev/shm"][0]["what"]
    assert [one["level"] for one in found["segments"]] == ["ok", "note"]


def test_a_machine_without_proc_and_sys():
    mount = 'mount -t tmpfs tmpfs /sys && mount -t tmpfs tmpfs /proc && exec "$0" "$@"'
    around = ["unshare", "--mount", "sh", "-c", mount]
    if os.geteuid() != 0 or subprocess.run([*around, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount an empty /proc")
    found, _ = diagnosed(around=around)
    assert found["memory"][0]["what"].startswith("unknown: ")
    assert [one["level"] for one in found["segments"]] == ["ok", "ok"]


REFUSED = {"process_vm_readv": 310, "memfd_create": 319}  # their numbers on x86-64


def refusing(number):
    """To be run in a process: from then on the kernel refuses it this system call, as a container's does."""
    load, equal, leave, refuse, allow = 0x20, 0x15, 0x06, 0x50000 | errno.EPERM, 0x7FFF0000
    steps = [(load, 0, 0, 0), (equal, 0, 1, number), (leave, 0, 0, refuse), (leave, 0, 0, allow)]
    libc = ctypes.CDLL(None)

    def prepare():
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        whole = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program)))
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, whole, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

    return prepare


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")
def test_a_sandbox_without_process_vm_readv():
    found, status = diagnosed(preparation=refusing(REFUSED["process_vm_readv"]))
    assert status == 0
    (one,) = found["single copies"]
    assert (one["level"], "Operation not permitted" in one["what"]) == ("note", True)
    wanted = diagnosed(preparation=refusing(REFUSED["process_vm_readv"]), SHMRING_SINGLE_COPY="64K")
    assert (wanted[1], wanted[0]["single copies"][0]["level"]) == (1, "problem")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")
def test_a_sandbox_without_memfd():
    found, status = diagnosed("--no-measure", preparation=refusing(REFUSED["memfd_create"]))
    assert status == 1
    assert [one["level"] for one in found["segments"]] == ["problem", "ok"]
    assert found["segments"][0]["fix"] == "set SHMRING_SEGMENT=posix"
    posix = diagnosed(preparation=refusing(REFUSED["memfd_create"]), SHMRING_SEGMENT="posix")
    assert [one["level"] for one in posix[0]["segments"]] == ["ok", "note"]
    assert posix[0]["copying"][0]["level"] == "ok"


@pytest.mark.parametrize("way", ["found", "named"])
def test_a_damaged_tuning_table(tmp_path, way):
    path = tmp_path / "shmring" / "tuning.json"
    path.parent.mkdir()
    path.write_text("{")
    where = {"XDG_CACHE_HOME": str(tmp_path)} if way == "found" else {"SHMRING_TUNING": str(path)}
    found, status = diagnosed("--no-measure", **where)
    assert status == 1
    assert found["tuning table"][0]["what"] == f"the table {path} cannot be used: it is not JSON"
    tuning_table.save(path, {2: {"any": {"depth": 3}}}, thresholds.LIMITS)
    found, status = diagnosed("--no-measure", **where)
    assert (status, found["tuning table"][0]["what"]) == (0, f"{path} is used")
    assert f"{path}, for 2 ranks" in run("info", "--no-measure", **where).stdout


def test_a_launcher_is_seen_and_so_is_what_it_says_wrong():
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    assert "torchrun, as rank 1 of 2" in run("info", "--no-measure", **torchrun).stdout
    found, status = diagnosed("--no-measure", **torchrun | {"WORLD_SIZE": "two"})
    assert status == 1
    assert "WORLD_SIZE is 'two'" in found["launcher"][0]["what"]
