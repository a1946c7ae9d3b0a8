"""The command info: its report about this machine, and about made-up ones given as trees of files; the text
output of info and doctor."""

import itertools
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import environment
from reports import LIMIT_S, MIB, REPORT, run, validate

from shmring._system import cpulist
from shmring.tools import doctor, info
from shmring.tools._machine import machine, probes, sections, software

KEY = "0123456789abcdef0123456789abcdef"
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/shmem_enabled"

# ---- this machine -----------------------------------------------------------------------------------------


def test_info_describes_all_of_this_machine():
    done = run("info", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    validate(found, REPORT)
    allowed = sorted(os.sched_getaffinity(0))
    assert found["cpus"]["allowed"] == allowed
    assert found["copy_limit"]["together_gb_per_s"] > 0
    assert found["memfd"] == {"works": True, "how": "sealed"}
    assert found["posix"]["works"]
    assert found["tuning"]["state"] == "absent"
    assert found["libraries"]["torch"] is None or found["libraries"]["torch"][0].isdigit()
    trips = found["between_ranks"]["round_trips"]
    assert bool(trips) == (len(allowed) > 1)
    assert all(trip["cpus"][0] == allowed[0] for trip in trips)


def test_info_for_people_has_every_row_once_and_on_one_line():
    done = run("info", "--no-measure")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [label for rows in info._SECTIONS.values() for label, _, _ in rows]
    labels = [line[2:].partition("  ")[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert labels == rows
    assert "unknown: not measured, because of --no-measure" in done.stdout
    assert done.stdout.startswith("Processors\n  CPUs ")


def test_commands_import_no_library_that_they_look_for():
    code = (
        "import sys; from shmring.tools import command; command.main(['info', '--no-measure'])\n"
        "print(sorted({'torch', 'dask', 'joblib', 'mpi4py', 'ml_dtypes', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, env=environment()
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_a_rank_may_read_another_s_memory_or_the_reason_is_reported():
    found = probes.between([])["single_copy"]
    scope = machine.ptrace_scope()
    assert found["works"] == (found["why"] is None)
    if os.geteuid() == 0 and scope in (None, 0, 1):
        assert found["works"]


def test_measuring_leaves_settings_as_they_are(monkeypatch):
    monkeypatch.setenv("SHMRING_TIMEOUT", "abc")
    monkeypatch.setenv("SHMRING_TUNING", "/nowhere")
    assert probes.copy_limit(2, 64 * MIB)["nbytes"] == 4 * MIB
    assert os.environ["SHMRING_TIMEOUT"] == "abc"
    assert os.environ["SHMRING_TUNING"] == "/nowhere"
    with pytest.raises(MemoryError):
        probes.copy_limit(2, 8 * MIB)


def test_the_instruction_set_is_the_best_or_the_one_asked_for(monkeypatch):
    best, *others = software.instruction_set()["there"]
    assert software.instruction_set()["chosen"] == best
    for one in others:
        monkeypatch.setenv("SHMRING_ISA", one.upper())
        assert software.instruction_set() | {"there": []} == {
            "chosen": one, "why": "SHMRING_ISA asks for it", "there": [],
        }  # fmt: skip
    monkeypatch.setenv("SHMRING_ISA", "neon" if best != "neon" else "avx2")
    assert software.instruction_set()["chosen"] is None


def test_what_is_around_a_process_is_seen(monkeypatch):
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "SLURM_STEP_ID", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    plain = software.job()
    assert (plain["launcher"], plain["slurm_allocation"], plain["kubernetes"]) == (None, False, False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert (software.job()["slurm_allocation"], software.job()["kubernetes"]) == (True, True)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert software.job()["slurm_allocation"] is False
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert software.threads()["given"]["OMP_NUM_THREADS"] == "3"


GLOO = [
    ({}, "does not ask for it"),
    ({"SHMRING_REPLACES": "glo"}, "SHMRING_REPLACES is 'glo'; allowed: gloo"),
    ({"SHMRING_REPLACES": "gloo", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    ({"SHMRING_REPLACES": "gloo", "torch": None}, "torch is not installed"),
    ({"SHMRING_REPLACES": "gloo", "entries": []}, "not installed, so torch does not find it"),
    ({"SHMRING_REPLACES": "Gloo "}, None),
]


@pytest.mark.parametrize(("given", "why_not"), GLOO, ids=[why or "on" for _, why in GLOO])
def test_gloo_is_replaced_or_the_reason_is_reported(monkeypatch, given, why_not):
    monkeypatch.delenv("SHMRING_REPLACES", raising=False)
    monkeypatch.setattr(software, "libraries", lambda: {"torch": given.get("torch", "2.13.0")})
    monkeypatch.setattr(software.metadata, "entry_points", lambda **_: given.get("entries", ["shmring"]))
    for name, text in given.items():
        if name.isupper():
            monkeypatch.setenv(name, text)
    found = software.gloo()
    assert found["replaced"] is (why_not is None)
    assert (why_not or "SHMRING_REPLACES asks for it") in found["why"]


JAX = [
    (None, (0, "", ""), {"version": None, "calls_through": None}, "not installed"),
    ("0.10.2", (0, "XLA\n", ""), {"version": "0.10.2", "calls_through": "XLA"}, "as custom calls of XLA"),
    ("0.4", (0, "callbacks\n", ""), {"version": "0.4", "calls_through": "callbacks"}, "through callbacks"),
    ("9", (1, "", "Traceback\nImportError: no jaxlib\n"), "ImportError: no jaxlib", None),
]


@pytest.mark.parametrize(("version", "result", "expected", "text"), JAX)
def test_how_programs_of_jax_call(monkeypatch, version, result, expected, text):
    monkeypatch.setattr(software, "libraries", lambda: {"jax": version})
    monkeypatch.setattr(
        software.subprocess, "run", lambda *given, **_: subprocess.CompletedProcess(given, *result)
    )
    if text is None:
        with pytest.raises(OSError, match=expected):
            software.jax()
    else:
        fact = software.jax()
        assert fact == expected
        assert text in info._jax(fact)


# ---- other machines ---------------------------------------------------------------------------------------


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def write_topology(root, online, **groups):
    """groups: for a file of each CPU's folder, "__" for "/", the lists of CPUs that share it."""
    write(root, "sys/devices/system/cpu/online", cpulist.spell(online))
    for name, its in groups.items():
        for group in its:
            for cpu in group:
                path = f"sys/devices/system/cpu/cpu{cpu}/{name.replace('__', '/')}"
                write(root, path, cpulist.spell(group))


def write_cache(root, index, level, kind, size, groups):
    for cpu in itertools.chain(*groups):
        for name, text in (("level", level), ("type", kind), ("size", size)):
            write(root, f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}/{name}", text)
    for group in groups:
        for cpu in group:
            path = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}/shared_cpu_list"
            write(root, path, cpulist.spell(group))


def two_sockets(root):
    """16 CPUs: 2 packages of 4 cores with 2 threads, numbered as Linux does it; an L3 for 2 cores each."""
    cores = [[core, core + 8] for core in range(8)]
    packages = [[cpu for core in cores[at : at + 4] for cpu in core] for at in (0, 4)]
    chiplets = [sorted(cores[at] + cores[at + 1]) for at in (0, 2, 4, 6)]
    write_topology(root, range(16), topology__core_cpus_list=cores, topology__package_cpus_list=packages)
    write_cache(root, 0, 1, "Data", "32K", cores)
    write_cache(root, 1, 1, "Instruction", "32K", cores)
    write_cache(root, 2, 2, "Unified", "1024K", cores)
    write_cache(root, 3, 3, "Unified", "32M", chiplets)
    for node, its in enumerate(packages):
        write(root, f"sys/devices/system/node/node{node}/cpulist", cpulist.spell(its))
    write(root, "sys/devices/system/node/node2/cpulist", "")  # of memory alone
    return cores, packages, chiplets


def text_of(root, monkeypatch, *, allowed=None):
    """Return info's text output about a machine: the label of each row with its text."""
    if allowed is not None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    found = info.report(root, measures=False)
    validate(found, REPORT)
    rows = [row for its in info._SECTIONS.values() for row in its]
    return {label: info._row(found, label, name, tell).text for label, name, tell in rows}


def test_two_sockets_with_threads(tmp_path, monkeypatch):
    cores, packages, chiplets = two_sockets(tmp_path)
    found = machine.topology(tmp_path)
    assert (found["cores"], found["packages"]) == (cores, [sorted(its) for its in packages])
    assert [(cache["level"], cache["nbytes"], cache["shared_by"]) for cache in found["caches"]] == [
        (1, 32 << 10, cores), (2, MIB, cores), (3, 32 * MIB, chiplets),
    ]  # fmt: skip
    assert [node["node"] for node in found["nodes"]] == [0, 1]
    reported = text_of(tmp_path, monkeypatch, allowed=range(12))
    assert reported["cores"].startswith(
        "8 in 2 packages, 2 threads each (CPUs 0,8 | 1,9 | 2,10 | 3,11 | ...)"
    )
    assert "4 L3 of 32 MiB (CPUs 0-1,8-9 | 2-3,10-11 | " in reported["caches"]
    assert reported["NUMA"] == "2 nodes (CPUs 0-3,8-11 | 4-7,12-15)"
    assert reported["CPUs"].endswith("(0-11) of 16")


def test_the_pairs_that_are_measured_are_one_of_each_nearness(tmp_path):
    two_sockets(tmp_path)
    known = machine.topology(tmp_path)
    assert [(pair["share"], pair["cpus"]) for pair in machine.pairs(known, range(16))] == [
        ("one core", [0, 8]), ("one L3", [0, 1]), ("one node", [0, 2]), ("nothing", [0, 4]),
    ]  # fmt: skip
    assert machine.pairs(known, [4, 12]) == [{"share": "one core", "cpus": [4, 12]}]
    assert machine.pairs(known, [3]) == []
    assert machine.pairs({}, [0, 1, 2]) == [{"share": "nothing known", "cpus": [0, 1]}]


def test_two_kinds_of_cores_and_files_of_older_kernels(tmp_path, monkeypatch):
    write_topology(
        tmp_path, range(6), topology__thread_siblings_list=[[0, 1], [2], [3], [4], [5]],
        topology__core_siblings_list=[range(6)],
    )  # fmt: skip
    write_cache(tmp_path, 2, 2, "Unified", "2048K", [[0, 1]])
    write_cache(tmp_path, 2, 2, "Unified", "4096K", [[2, 3, 4, 5]])
    reported = text_of(tmp_path, monkeypatch, allowed=range(6))
    assert reported["cores"].startswith("5, 1 or 2 threads each")
    assert reported["caches"] == "1 L2 of 2 MiB (CPUs 0-1); 1 L2 of 4 MiB (CPUs 2-5)"
    assert reported["NUMA"] == "one node"


def test_an_arm_without_cache_folders(tmp_path, monkeypatch):
    write_topology(tmp_path, range(4), topology__core_cpus_list=[[0], [1], [2], [3]])
    cpuinfo = (
        "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nprocessor\t: 1\nCPU part\t: 0xd40"
    )
    write(tmp_path, "proc/cpuinfo", cpuinfo)
    found = machine.model(tmp_path)
    assert (found["name"], found["virtual"]) == ("CPU implementer 0x41, CPU part 0xd0c", None)
    reported = text_of(tmp_path, monkeypatch, allowed=range(4))
    assert reported["caches"] == "unknown: the kernel does not report which CPUs share a cache"
    assert reported["cores"] == "4, one thread each"


def test_a_hypervisor_shows(tmp_path):
    write(tmp_path, "proc/cpuinfo", "model name : Some CPU @ 2 GHz\nflags : fpu hypervisor sse2")
    assert machine.model(tmp_path)["virtual"] is True
    assert machine.model(tmp_path)["name"] == "Some CPU @ 2 GHz"
    write(tmp_path, "proc/cpuinfo", "model name :\ncpu : POWER9, altivec")
    assert machine.model(tmp_path)["name"] == "POWER9, altivec"


def test_a_machine_of_which_there_is_nothing_to_read(tmp_path, monkeypatch):
    reported = text_of(tmp_path, monkeypatch)
    for label in ("model", "cores", "caches", "NUMA", "/dev/shm"):
        assert reported[label].startswith("unknown: "), label
    assert "an unknown number" in reported["CPUs"]
    found = doctor.findings(info.report(tmp_path, measures=False))
    assert {one.about for one in found} == set(doctor.CHECKS)


def test_offline_cpus_without_a_list_are_counted_by_their_folders(tmp_path):
    for cpu in (0, 2):
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", str(cpu))
    write(tmp_path, "sys/devices/system/cpu/cpufreq/boost", "1")
    assert machine.topology(tmp_path)["cores"] == [[0], [2]]


@pytest.mark.parametrize(
    "text", ["", "-", "3-", "a", "0-99999999999999", "1,,2", "\0\xff", "9-3", "\u0663", "0x1"]
)
def test_files_that_say_something_else_are_as_good_as_none(tmp_path, monkeypatch, text):
    two_sockets(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_text(text)
    write(tmp_path, "proc/cpuinfo", text)
    write(tmp_path, "proc/meminfo", text)
    write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", text)
    write(tmp_path, HUGE_PAGES, text)
    reported = text_of(tmp_path, monkeypatch)
    assert reported["caches"].startswith("unknown")


@pytest.mark.parametrize(
    ("given", "shared"),
    [("always", True), ("within_size", True), ("advise", False), ("never", False), ("deny", False)],
)
def test_huge_pages_of_shared_memory_are_reported(tmp_path, monkeypatch, given, shared):
    words = "always within_size advise never deny force"
    write(tmp_path, HUGE_PAGES, words.replace(given, f"[{given}]") + "\n")
    assert machine.huge_pages(tmp_path) == {"given": given, "shared": shared}
    reported = text_of(tmp_path, monkeypatch)["huge pages"]
    assert reported == f"{'' if shared else 'not '}used for shared memory: shmem_enabled is {given}"


def test_lists_of_cpus_are_written_as_the_kernel_writes_them():
    for text in ("0", "0-3", "0-3,8", "1,3,5-7", ""):
        assert cpulist.spell(numbers_of(text)) == text


def numbers_of(text):
    runs = [[int(word) for word in run.split("-")] for run in text.split(",") if run]
    return [number for run in runs for number in range(run[0], run[-1] + 1)]


# ---- people -----------------------------------------------------------------------------------------------


def on_a_terminal(code, columns, **variables):
    """Return the output of a program on a terminal of that width, and its exit status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.pop("NO_COLOR", None)
        terminal = {"COLUMNS": str(columns), "TERM": "xterm-256color"}
        os.execve(sys.executable, [sys.executable, "-c", code], environment(**terminal, **variables))
    text, until = b"", time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < until:
            if select.select([terminal], [], [], 1)[0]:
                text += os.read(terminal, 1 << 16)
    except OSError:  # Linux: no process has the other end open any more
        pass
    os.close(terminal)
    return text.decode().replace("\r\n", "\n"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


DOCTOR = "import sys; from shmring.tools import command; sys.exit(command.main(['doctor', '--no-measure']))"
COLOUR = re.compile("\x1b\\[[0-9;]*m")


@pytest.mark.parametrize("rich", [True, False])
def test_on_a_terminal_lines_are_broken_below_their_column(rich):
    if rich:
        pytest.importorskip("rich")
    without = "import importlib.util as i; i.find_spec = lambda name: None;"
    text, status = on_a_terminal(DOCTOR if rich else without + DOCTOR, 80, SHMRING_TIMEOUT="abc")
    assert status == 1
    assert bool(COLOUR.search(text)) == rich
    lines = COLOUR.sub("", text).splitlines()
    assert lines[0].startswith("shmring doctor: 1 problem, ")
    assert all(len(line) <= 80 for line in lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("  problem  settings "))
    column = lines[at].index("SHMRING_TIMEOUT")
    assert lines[at + 1][:column].isspace()
    assert "-> set it so, or unset it" in " ".join(line.strip() for line in lines[at : at + 3])
    if rich:
        assert re.search("\x1b\\[1;31m  problem  settings", text)


def test_output_of_others_does_not_move_the_cursor(capsys):
    sections.show({"": [sections.Row("a", "red \x1b[31m\nline \x07 \udcff [bold]x[/bold]")]})
    assert (
        capsys.readouterr().out.splitlines()[-1] == "  a  red \\x1b[31m\\nline \\x07 \\udcff [bold]x[/bold]"
    )


def test_output_in_another_encoding():
    done = run("info", "--no-measure", PYTHONIOENCODING="ascii", PYTHONUTF8="0", SHMRING_NODE="node-\u00fc")
    assert (done.returncode, done.stderr) == (0, "")
    assert "SHMRING_NODE=node-\\xfc" in done.stdout


@pytest.mark.parametrize("arguments", [["info", "--jsn"], ["doctor", "now"], ["info", "--json=1"]])
def test_wrong_flags_are_one_line_and_status_2(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "--help" in done.stderr


@pytest.mark.parametrize("name", ["info", "doctor", "tune"])
def test_help_names_the_flags(name):
    done = run(name, "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout
    assert str(Path.cwd()) not in done.stdout
