"""Who may know whom, and the other rules of the house that a machine can check.

May know: the checkout's files; it reads them and imports nothing of shmring.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "src").is_dir():
    pytest.skip("needs the checkout", allow_module_level=True)

# THE table: a file or module, and which neighbours it may know; standard headers and libraries are free.
# A new file is entered here first.
C_HOUSE = {
    "layout.h": set(),
    "fault.h": set(),
    "flag.h": {"fault.h", "layout.h"},
    "ring.h": {"flag.h"},
    "schedule.h": set(),
    "single_copy.h": set(),
    "link.h": {"flag.h"},
    "post.h": {"link.h", "ring.h"},
    "post.c": {"post.h"},
    "wire.h": {"link.h"},
    "wire.c": {"wire.h"},
    "kernels.h": set(),
    "kernels_item.h": {"kernels.h"},
    "kernels_loop.h": {"kernels_cast.h", "kernels_copy.h"},
    "kernels_copy.h": set(),
    "kernels_cast.h": set(),
    "kernels.c": {"kernels.h", "kernels_item.h", "kernels_loop.h"},
}
HOUSE = {
    # the cold path, from the ground up
    "errors": set(),
    "buffers": set(),
    "liveness": set(),
    "ops": set(),
    "processes": set(),
    "extras": set(),
    "ranges": set(),
    "placement": {"ranges"},
    "logs": set(),
    "relay": {"logs", "ranges"},
    "folding": {"relay"},
    "last_words": set(),
    "limits": {"errors"},
    "settings": set(),
    "measured": set(),
    "tuning": {"measured", "settings"},
    "memory": {"errors", "limits"},
    "flight": {"ranges"},
    "stacks": {"liveness"},
    "failures": {"errors", "flight", "liveness"},
    "stalls": {"failures", "flight", "liveness", "stacks"},
    # joining a world
    "handshake": {"errors"},
    "links": {"errors", "handshake", "limits"},
    "launchers": {"settings"},
    "lines": {"handshake"},
    "worlds": {"errors", "handshake", "lines", "settings"},
    "doorman": {"errors", "handshake", "limits", "lines", "worlds"},
    "guest": {"errors", "handshake", "lines", "worlds"},
    "neighbours": {"doorman", "errors", "guest", "handshake", "limits", "lines", "links", "worlds"},
    "nodes": {"handshake"},
    "star": {"errors", "handshake", "lines"},
    "rendezvous": {"doorman", "errors", "guest", "handshake", "limits", "lines", "nodes", "settings", "star"}
    | {"worlds"},
    "mesh": {"doorman", "errors", "guest", "handshake", "limits", "lines", "rendezvous", "worlds"},
    "bootstrap": {"errors", "launchers", "lines", "links", "mesh", "neighbours", "nodes", "rendezvous"}
    | {"settings", "star", "worlds"},
    # the engine
    "_kernels": {"kernels.h"},
    "_segment": {"_kernels", "fault.h", "flag.h", "layout.h", "schedule.h", "single_copy.h"},
    "_group": {"_kernels", "_segment"},
    "_flight": {"flag.h", "layout.h", "_group", "_kernels"},
    "_life": {"flag.h", "_flight", "_group", "limits", "stacks"},
    "_slots": {"_group"},
    "_steps": {"schedule.h"},
    "_schedules": {"_group", "_slots", "_steps"},
    "_halving": {"_group", "_schedules", "_slots", "_steps"},
    "_trees": {"_group", "_schedules", "_slots", "_steps"},
    "_timeouts": {"_group"},
    "_ring": {"flag.h", "layout.h", "ring.h", "_group", "_kernels", "_timeouts", "errors"},
    "_distance": {"_group"},
    "_private": {"_group"},
    "_lines": {"_group", "_distance", "_private"},
    "_exchange": {"_group", "_lines", "_private", "_slots"},
    "_fetch": {"_exchange", "_group", "_lines", "_slots"},
    "_chain": {"_group", "_lines", "_slots", "_exchange"},
    "_pipelines": {"_group", "_lines", "_slots", "_chain", "_exchange", "_fetch", "_halving", "_schedules"}
    | {"_trees"},
    "_post": {"post.h", "_group", "_ring"},
    "_office": {"_group", "_post", "_ring"},
    "alarms": {"_office", "errors"},
    "_leg": {"wire.h", "_group", "_office", "_post"},
    "_trace": {"_group"},
    "_local": {"_group", "_leg", "_pipelines", "_trace"},
    "_partials": {"_group", "_leg", "_local"},
    "_leaders": {"_group", "_leg", "_local", "_partials"},
    "_hierarchy": {"_group", "_leg", "_local", "_partials"},
    "_reduce_scatter": {"_group", "_leg", "_local", "_partials"},
    "_across": {"_group", "_hierarchy", "_leaders", "_leg", "_local", "_pipelines", "_reduce_scatter"},
    "_waiting": {"_flight", "_group", "_leg", "_post", "_steps", "_trace"},
    "_queue": {"_group"},
    "_priorities": {"_across", "_flight", "_group", "_leg", "_queue", "_trace"},
    "_progress": {"_flight", "_group", "_leg", "_post", "_priorities", "_queue", "_trace", "_waiting"}
    | {"limits"},
    "_messages": {"_group", "_leg", "_post", "_progress", "_ring"},
    "_delivery": {"_flight", "_group", "_leg", "_messages", "_post", "_progress", "_ring", "_waiting"},
    "_layout": {"_group", "_steps"},
    "_parting": {"_group", "_leg", "_state"},
    "_state": {"_flight", "_group", "_kernels", "_leg", "_slots"},
    "_stalls": {"_flight", "_group", "_state", "stalls"},
    "_engine": {"_across", "_flight", "_group", "_distance", "_leg", "_life", "_parting", "_pipelines"}
    | {"_progress", "_stalls", "_state", "_timeouts", "_trace", "_waiting"}
    | {"Python.h", "errors", "failures", "liveness"},
    "tracing": {"_recorder", "flight"},
    "_recorder": {"_engine", "_flight", "_group", "_progress", "_state", "_trace"},
    # the communicator and what makes one
    "arrays": {"buffers", "errors", "memory"},
    "shapes": set(),
    "_operands": {"_group", "_state", "buffers"},
    "awaiting": set(),
    "work": {"_engine", "_group", "_operands", "_progress", "_timeouts", "awaiting", "errors", "limits"},
    "feedback": set(),
    "collectives": {"_across", "_engine", "_group", "_hierarchy", "_leg", "_operands", "_state", "_timeouts"}
    | {"errors", "feedback", "shapes", "work"},
    "uneven": {"_across", "_engine", "_exchange", "_group", "_leg", "_operands", "_pipelines", "_private"}
    | {"_progress", "_state", "_timeouts", "collectives", "shapes", "work"},
    "fusion": {"_across", "_engine", "_group", "_operands", "_progress", "_state", "_timeouts"}
    | {"collectives", "uneven", "work"},
    "objects": {"uneven"},
    "crossing": {"_leg", "_office", "alarms", "limits", "lines", "rendezvous", "settings", "worlds"},
    "beginning": {"_engine", "_layout", "bootstrap", "crossing", "errors", "limits", "links", "liveness"}
    | {"memory", "nodes", "settings", "tuning"},
    "views": {"errors"},
    "shrinking": {"beginning", "bootstrap", "errors", "views", "worlds"},
    "_locks": {"flag.h", "_engine", "_flight", "_group", "_timeouts", "errors", "failures", "liveness"},
    "_stripes": {"_engine", "_group", "_locks", "_timeouts"},
    "onesided": {"_state", "_stripes"},
    "shared": {"_locks", "_stripes", "errors", "onesided"},
    "groups": {"beginning", "bootstrap", "errors", "limits"},
    "ring": {"_ring", "errors", "limits", "liveness", "memory", "settings"},
    "_status": {"_group", "_kernels", "_messages", "_operands", "_state", "errors"},
    "carrier": {"_delivery", "_engine", "_flight", "_group", "_leg", "_messages", "_operands", "_post"}
    | {"_progress", "_ring", "_state", "_status", "_trace", "errors", "failures", "fusion", "liveness"},
    "messages": {"_group", "_messages", "_operands", "_status", "_timeouts", "carrier", "errors", "objects"},
    "comm": {"_engine", "_group", "_operands", "_timeouts", "arrays", "collectives", "errors", "failures"}
    | {"feedback", "groups", "memory", "messages", "objects", "shared", "shrinking", "tracing"},
    "joining": {"beginning", "bootstrap", "comm", "errors", "limits", "settings"},
    # users of the public API like anybody else; what starts ranks
    "bucketer": set(),
    "model": set(),
    "flat": {"__init__", "errors"},  # of shmring/methods, from here on
    "rules": set(),
    "sharded": {"flat", "rules"},
    "pipeline": {"flat", "rules", "__init__"},
    "compression": {"errors", "feedback", "flat", "__init__"},
    "server": {"rules", "__init__"},
    "sparse": {"errors", "flat"},
    "local": {"flat"},
    "precision": {"flat"},
    "reducers": {"flat", "__init__"},
    "stepwise": {"flat", "__init__"},
    "trials": {"__init__"},
    "tune": {"__init__", "measured", "screen", "settings", "trials", "tuning"},
    "selftest": {"memory", "screen", "settings", "tools", "__init__"},  # the checks, and the command
    "segments": {"_flight", "flight", "liveness", "memory", "stacks"},
    "screen": {"extras"},
    "sections": set(),
    "machine": {"limits", "ranges"},
    "software": {"__init__", "_kernels", "launchers", "measured", "settings", "tuning"},
    "probes": {"__init__", "_kernels", "memory", "settings"},
    "info": {"machine", "probes", "ranges", "screen", "sections", "software"},
    "doctor": {"info", "machine", "ranges", "screen", "sections"},
    "ps": {"screen", "segments"},
    "dump": {"flight", "screen", "segments"},
    "top": {"_flight", "screen", "segments"},
    "bench_calls": {"__init__"},
    "bench_rank": {"__init__", "bench_calls", "machine"},
    "compare": {"bench_calls"},
    "plot": {"compare", "screen"},
    "bench_table": {"bench_calls", "compare"},
    "bench": {"__init__", "bench_calls", "bench_rank", "bench_table", "compare", "launchers", "limits"}
    | {"plot", "screen", "settings"},
    "predict": {"__init__", "bench_calls", "bench_rank", "compare", "model", "plot", "screen"},
    "command": {"bench", "doctor", "dump", "info", "predict", "ps", "screen", "selftest", "top", "tune"},
    "__main__": {"tools"},
    "_tasks": {"__init__"},
    "dask": {"_tasks", "extras", "__init__"},
    "jax": {"extras", "__init__"},
    "joblib": {"_tasks", "extras", "__init__"},
    "keras": {"extras", "__init__"},
    "pools": {"_tasks", "__init__"},
    "ray": {"_tasks", "extras", "ray_group", "__init__"},
    "ray_group": {"_tasks", "__init__"},
    "sklearn": {"extras", "__init__"},
    "torch": {"_tasks", "extras", "_torch_buckets", "_torch_compressed", "_torch_group", "__init__"},
    "_torch_buckets": {"_torch_group", "__init__"},
    "_torch_compressed": {"_torch_buckets", "_torch_group", "methods"},
    "_torch_entry": {"adapters", "torch"},
    "_torch_group": {"_torch_monitored", "_torch_sparse", "_torch_tensors", "_torch_work", "__init__"},
    "_torch_monitored": {"__init__"},
    "_torch_sparse": {"_torch_tensors", "__init__"},
    "_torch_tensors": {"__init__"},
    "_torch_work": set(),
    "launch": {"bootstrap", "errors", "limits", "processes", "__init__"},
    "run_options": {"bootstrap", "limits", "placement", "ranges", "settings"},
    "run_cpus": {"limits", "placement", "ranges", "run_options"},
    "run": {"bootstrap", "folding", "last_words", "limits", "logs", "processes", "relay", "run_cpus"}
    | {"run_options", "settings"},
    "__init__": {"_operands", "arrays", "bootstrap", "bucketer", "comm", "errors", "joining", "launch"}
    | {"messages", "ops", "ring", "shared", "work"},
}
# What only one place may do: pattern, where it is allowed, why.
ONLY_IN = [
    (
        r"memory_order_|__atomic_(?!thread_fence)|__sync_|\batomic_(load|store|exchange|fetch|compare)|"
        r"futex|_mm_pause|sched_yield",
        {"src/flag.h"},
        "memory orders, pauses and futexes are flag.h's",
    ),
    (
        r"_mm\w*_stream_|_mm_sfence|__atomic_thread_fence|__builtin_nontemporal",
        {"src/kernels"},
        "streaming stores and their fence are the kernels'",
    ),
]
MAX_LINES = 1000
MAX_LINE_LENGTH, MAX_C_LINE_LENGTH = 110, 120  # Python's as in ruff's settings
# Put together here, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:" + "|".join(["work", "home", "root", "Users"]) + r")\b")


def files(*folders, suffixes):
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if "__pycache__" not in path.parts)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def without_comments(path):
    text = path.read_text()
    if path.suffix in {".c", ".h"}:
        return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    return re.sub(r"#[^\n]*", "", text)


C_FILES = files("src", suffixes={".c", ".h"})
MODULES = files("shmring", suffixes={".py", ".pyx", ".pxd", ".pyi"})
MODULE_NAMES = {path.stem for path in MODULES}
SOURCES = [
    *C_FILES,
    *MODULES,
    *files("tests", "bench", "examples", ".ci", suffixes={".py", ".c", ".h", ".pyx", ".sh"}),
    ROOT / "setup.py",
]


def imports_at_run_time(tree):
    """Every import, wherever it stands, but those for types alone: they are not knowledge at run time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from imports_at_run_time(node)


def modules_in_python(tree):
    for node in imports_at_run_time(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package, _, module = alias.name.partition(".")
                if package == "shmring":
                    yield module.partition(".")[0] or "__init__"
        elif node.level or (node.module or "").partition(".")[0] == "shmring":
            module = (node.module or "") if node.level else node.module.partition(".")[2]
            yield from [module.partition(".")[0]] if module else modules_named([a.name for a in node.names])


def modules_named(names):
    """`from . import a`: the module a if there is one, else a public name of the package."""
    return [name if name in MODULE_NAMES else "__init__" for name in names]


def neighbours_in_cython(text):
    for name in re.findall(r'cdef extern from "([^"<]+)"', text):
        yield name
    for name in re.findall(r"^\s*from\s+(?:shmring)?\.(\w+)\s+c?import\b", text, re.MULTILINE):
        yield name
    for names in re.findall(r"^\s*from\s+(?:\.|shmring)\s+c?import\s+([\w, ]+)", text, re.MULTILINE):
        yield from modules_named(re.findall(r"\w+", names))
    for name in re.findall(r"^\s*c?import\s+shmring(?:\.(\w+))?", text, re.MULTILINE):
        yield name or "__init__"
    for name in re.findall(r'^\s*include\s+"([^"]+)"', text, re.MULTILINE):
        yield Path(name).stem


def neighbours(path):
    if path.suffix == ".py":
        return set(modules_in_python(ast.parse(path.read_text())))
    return set(neighbours_in_cython(path.read_text()))


@pytest.mark.parametrize("path", C_FILES, ids=name_of)
def test_c_files_include_only_what_they_may_know(path):
    assert path.name in C_HOUSE, f"{name_of(path)} is not in the house: enter it in C_HOUSE"
    included = set(re.findall(r'#\s*include\s+"([^"]+)"', path.read_text()))
    assert included <= C_HOUSE[path.name] | {path.name}


@pytest.mark.parametrize("path", [path for path in MODULES if path.suffix != ".pyi"], ids=name_of)
def test_modules_know_only_whom_they_may(path):
    assert path.stem in HOUSE, f"{name_of(path)} is not in the house: enter it in HOUSE"
    assert neighbours(path) <= HOUSE[path.stem] | {path.stem}


def test_house_has_no_circles():
    # The package's face may know everyone; launch and run use it as any user does.
    known = {name: {n for n in may if n in HOUSE and n != "__init__"} for name, may in HOUSE.items()}
    while known:
        ready = {name for name, may in known.items() if not may}
        assert ready, f"these know each other in a circle: {sorted(known)}"
        known = {name: may - ready for name, may in known.items() if name not in ready}


@pytest.mark.parametrize(("pattern", "places", "reason"), ONLY_IN, ids=[why for _, _, why in ONLY_IN])
def test_what_only_one_place_may_do(pattern, places, reason):
    for path in [*C_FILES, *files("shmring", suffixes={".py", ".pyx", ".pxd"})]:
        if not name_of(path).startswith(tuple(places)):
            found = re.search(pattern, without_comments(path))
            assert not found, f"{name_of(path)}: {found[0]}: {reason}"


def reads_of_environment(tree):
    """Names of SHMRING_ variables that are read (not set) in a Python file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            owner, key = node.value, node.slice
        elif isinstance(node, ast.Call) and node.args and isinstance(node.func, (ast.Attribute, ast.Name)):
            owner, key = node.func, node.args[0]
        else:
            continue
        reads = re.search(r"environ(\.get|\.pop)?$|getenv$", ast.unparse(owner))
        if reads and isinstance(key, ast.Constant) and str(key.value).startswith("SHMRING_"):
            yield key.value


def test_a_constant_has_one_meaning():
    """Of two enumerators of one name the later import hides the other, and nobody hears of it."""
    found = {}
    for path in sorted(ROOT.glob("shmring/*.pxd")):
        for block in re.findall(r"enum[^\n]*:[^\n]*\n((?:[ ]{4,}[^\n]*\n)+)", path.read_text()):
            for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", re.sub("#.*|=[^,\n]*", "", block)):
                found.setdefault(name, set()).add(path.name)
    ours = {name: paths for name, paths in found.items() if not name.startswith("SR_")}
    assert [(name, paths) for name, paths in ours.items() if len(paths) > 1] == []


def test_only_settings_reads_shmring_variables():
    for path in files("shmring", suffixes={".py"}):
        if path.stem != "settings":
            assert not list(reads_of_environment(ast.parse(path.read_text()))), name_of(path)
    for path in [*C_FILES, *files("shmring", suffixes={".pyx", ".pxd"})]:
        assert not re.search(r"getenv|environ\b", without_comments(path)), name_of(path)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_stay_readable(path):
    assert "utils" not in path.stem, "a name that says nothing"
    lines = path.read_text().splitlines()
    assert len(lines) < MAX_LINES
    most = MAX_LINE_LENGTH if path.suffix in {".py", ".pyi"} else MAX_C_LINE_LENGTH
    long = [number for number, line in enumerate(lines, 1) if len(line) > most]
    assert not long, f"lines longer than {most}: {long}"


def test_nothing_names_the_machine_it_was_written_on():
    texts = [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml", ".in", ".py", ".yaml"}]
    for path in [*SOURCES, *texts, *(ROOT / ".ci").glob("[rw]*"), *(ROOT / ".github").rglob("*.yml")]:
        found = MACHINE_PATH.search(path.read_text())
        assert not found, f"{name_of(path)}: {found[0]}"


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "command", ["ruff check .", "mypy", "cython_lint.cython_lint shmring", "codespell_lib"]
)
def test_lint_and_types(command):
    tool, *arguments = command.split()
    pytest.importorskip(tool)
    beside = Path(sys.executable).parent  # where cython-lint looks for pycodestyle
    done = subprocess.run(
        [sys.executable, "-m", tool, *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
