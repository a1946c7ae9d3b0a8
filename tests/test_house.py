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
    "_arrays.buffers": set(),
    "_system.procfs": set(),
    "_comm.ops": set(),
    "_system.processes": set(),
    "_config.optional_deps": set(),
    "_system.cpulist": set(),
    "_system.cpu_topology": {"_system.cpulist"},
    "_launch.log_files": set(),
    "_launch.output_mux": {"_launch.log_files", "_system.cpulist"},
    "_launch.dedupe": {"_launch.output_mux"},
    "_launch.traceback_tail": set(),
    "_system.limits": {"errors"},
    "_config.settings": set(),
    "_config.tuning_table": set(),
    "_config.thresholds": {"_config.settings", "_config.tuning_table"},
    "_system.segments": {"_system.limits", "errors"},
    "_diagnostics.describe": {"_system.cpulist"},
    "_diagnostics.stacks": {"_system.procfs"},
    "_diagnostics.failures": {"_diagnostics.describe", "_system.procfs", "errors"},
    "_diagnostics.stall_warning": {"_diagnostics.describe", "_diagnostics.failures"}
    | {"_diagnostics.stacks", "_system.procfs"},
    # joining a world
    "_bootstrap.handshake": {"errors"},
    "_bootstrap.fd_passing": {"_bootstrap.handshake", "_system.limits", "errors"},
    "_bootstrap.environment": {"_config.settings"},
    "_bootstrap.framed_socket": {"_bootstrap.handshake"},
    "_bootstrap.world": {"_bootstrap.framed_socket", "_bootstrap.handshake", "_config.settings"} | {"errors"},
    "_bootstrap.acceptor": {"_bootstrap.framed_socket", "_bootstrap.handshake", "_bootstrap.world"}
    | {"_system.limits", "errors"},
    "_bootstrap.connector": {"_bootstrap.framed_socket", "_bootstrap.handshake", "_bootstrap.world"}
    | {"errors"},
    "_bootstrap.local": {"_bootstrap.acceptor", "_bootstrap.connector", "_bootstrap.fd_passing"}
    | {"_bootstrap.framed_socket", "_bootstrap.handshake", "_bootstrap.world", "_system.limits"}
    | {"errors"},
    "_bootstrap.node_map": {"_bootstrap.handshake"},
    "_bootstrap.coordinator": {"_bootstrap.framed_socket", "_bootstrap.handshake", "errors"},
    "_bootstrap.tcp": {"_bootstrap.acceptor", "_bootstrap.connector", "_bootstrap.coordinator"}
    | {"_bootstrap.framed_socket", "_bootstrap.handshake", "_bootstrap.node_map", "_bootstrap.world"}
    | {"_config.settings", "_system.limits", "errors"},
    "_bootstrap.mesh": {"_bootstrap.acceptor", "_bootstrap.connector", "_bootstrap.framed_socket"}
    | {"_bootstrap.handshake", "_bootstrap.tcp", "_bootstrap.world", "_system.limits", "errors"},
    "_bootstrap.join": {"_bootstrap.coordinator", "_bootstrap.environment", "_bootstrap.fd_passing"}
    | {"_bootstrap.framed_socket", "_bootstrap.local", "_bootstrap.mesh", "_bootstrap.node_map"}
    | {"_bootstrap.tcp", "_bootstrap.world", "_config.settings", "errors"},
    # the engine
    "_core.kernels": {"kernels.h"},
    "_core.segment": {"fault.h", "flag.h", "layout.h", "schedule.h", "single_copy.h", "_core.kernels"},
    "_core.group": {"_core.kernels", "_core.segment"},
    "_diagnostics.flight_recorder": {"flag.h", "layout.h", "_core.group", "_core.kernels"},
    "_engine.liveness_thread": {"flag.h", "_core.group", "_diagnostics.flight_recorder"}
    | {"_diagnostics.stacks", "_system.limits"},
    "_core.staging": {"_core.group"},
    "_core.schedule": {"schedule.h"},
    "_algorithms.ring": {"_core.group", "_core.schedule", "_core.staging"},
    "_algorithms.halving_doubling": {"_algorithms.ring", "_core.group", "_core.schedule"} | {"_core.staging"},
    "_algorithms.trees": {"_algorithms.ring", "_core.group", "_core.schedule", "_core.staging"},
    "_core.timeouts": {"_core.group"},
    "_core.spsc_ring": {"flag.h", "layout.h", "ring.h", "_core.group"},
    "_p2p.ring_ends": {"_core.group", "_core.kernels", "_core.spsc_ring", "_core.timeouts", "errors"},
    "_core.core_distance": {"_core.group"},
    "_core.single_copy": {"_core.group"},
    "_core.descriptor": {"_core.core_distance", "_core.group", "_core.single_copy"},
    "_algorithms.staged": {"_core.descriptor", "_core.group", "_core.single_copy", "_core.staging"},
    "_algorithms.fetch": {"_algorithms.staged", "_core.descriptor", "_core.group", "_core.staging"},
    "_algorithms.chain": {"_algorithms.staged", "_core.descriptor", "_core.group", "_core.staging"},
    "_algorithms.direct": {"_algorithms.chain", "_algorithms.fetch", "_algorithms.halving_doubling"}
    | {"_algorithms.ring", "_algorithms.staged", "_algorithms.trees", "_core.descriptor"}
    | {"_core.group", "_core.staging"},
    "_transport.channel": {"post.h", "_core.group", "_core.spsc_ring"},
    "_transport.channels": {"_core.group", "_core.spsc_ring", "_transport.channel"},
    "_transport.notifications": {"_transport.channels", "errors"},
    "_internode.context": {"wire.h", "_core.group", "_transport.channel", "_transport.channels"},
    "_core.trace": {"_core.group"},
    "_internode.local_step": {"_algorithms.direct", "_core.group", "_core.trace", "_internode.context"},
    "_internode.partials": {"_core.group", "_internode.context", "_internode.local_step"},
    "_internode.allreduce_small": {"_core.group", "_internode.context", "_internode.local_step"}
    | {"_internode.partials"},
    "_internode.allreduce": {"_core.group", "_internode.context", "_internode.local_step"}
    | {"_internode.partials"},
    "_internode.reduce_scatter": {"_core.group", "_internode.context", "_internode.local_step"}
    | {"_internode.partials"},
    "_internode.data_movement": {"_algorithms.direct", "_core.group", "_internode.allreduce"}
    | {"_internode.allreduce_small", "_internode.context", "_internode.local_step"}
    | {"_internode.reduce_scatter"},
    "_engine.wait": {"_core.group", "_core.schedule", "_core.trace", "_diagnostics.flight_recorder"}
    | {"_internode.context", "_transport.channel"},
    "_engine.queue": {"_core.group"},
    "_engine.priorities": {"_core.group", "_core.trace", "_diagnostics.flight_recorder"}
    | {"_engine.queue", "_internode.context", "_internode.data_movement"},
    "_engine.progress": {"_core.group", "_core.trace", "_diagnostics.flight_recorder"}
    | {"_engine.priorities", "_engine.queue", "_engine.wait", "_internode.context", "_system.limits"}
    | {"_transport.channel"},
    "_p2p.matching": {"_core.group", "_core.spsc_ring", "_engine.progress", "_internode.context"}
    | {"_transport.channel"},
    "_p2p.delivery": {"_core.group", "_core.spsc_ring", "_diagnostics.flight_recorder"}
    | {"_engine.progress", "_engine.wait", "_internode.context", "_p2p.matching", "_transport.channel"},
    "_core.segment_format": {"_core.group", "_core.schedule"},
    "_engine.parting": {"_core.group", "_engine.state", "_internode.context"},
    "_engine.state": {"_core.group", "_core.kernels", "_core.staging", "_diagnostics.flight_recorder"}
    | {"_internode.context"},
    "_engine.stalls": {"_core.group", "_diagnostics.flight_recorder", "_diagnostics.stall_warning"}
    | {"_engine.state"},
    "_engine.engine": {"Python.h", "_algorithms.direct", "_core.core_distance", "_core.group"}
    | {"_core.timeouts", "_core.trace", "_diagnostics.failures", "_diagnostics.flight_recorder"}
    | {"_engine.liveness_thread", "_engine.parting", "_engine.progress", "_engine.stalls"}
    | {"_engine.state", "_engine.wait", "_internode.context", "_internode.data_movement"}
    | {"_system.procfs", "errors"},
    "_comm.trace_file": {"_diagnostics.describe", "_engine.trace_buffer"},
    "_engine.trace_buffer": {"_core.group", "_core.trace", "_diagnostics.flight_recorder"}
    | {"_engine.engine", "_engine.progress", "_engine.state"},
    # the communicator and what makes one
    "_arrays.allocator": {"_arrays.buffers", "_system.segments", "errors"},
    "_arrays.shapes": set(),
    "_arrays.operands": {"_arrays.buffers", "_core.group", "_engine.state"},
    "_comm.awaitable": set(),
    "_comm.work": {"_arrays.operands", "_comm.awaitable", "_core.group", "_core.timeouts"}
    | {"_engine.engine", "_engine.progress", "_system.limits", "errors"},
    "_comm.error_feedback": set(),
    "_comm.collectives": {"_arrays.operands", "_arrays.shapes", "_comm.error_feedback", "_comm.work"}
    | {"_core.group", "_core.timeouts", "_engine.engine", "_engine.state", "_internode.allreduce"}
    | {"_internode.context", "_internode.data_movement", "errors"},
    "_comm.vector": {"_algorithms.direct", "_algorithms.staged", "_arrays.operands", "_arrays.shapes"}
    | {"_comm.collectives", "_comm.work", "_core.group", "_core.single_copy", "_core.timeouts"}
    | {"_engine.engine", "_engine.progress", "_engine.state", "_internode.context"}
    | {"_internode.data_movement"},
    "_comm.fused": {"_arrays.operands", "_comm.collectives", "_comm.vector", "_comm.work"}
    | {"_core.group", "_core.timeouts", "_engine.engine", "_engine.progress", "_engine.state"}
    | {"_internode.data_movement"},
    "_comm.objects": {"_comm.vector"},
    "_lifecycle.internode": {"_bootstrap.framed_socket", "_bootstrap.tcp", "_bootstrap.world"}
    | {"_config.settings", "_internode.context", "_system.limits", "_transport.channels"}
    | {"_transport.notifications"},
    "_lifecycle.startup": {"_bootstrap.fd_passing", "_bootstrap.join", "_bootstrap.node_map"}
    | {"_config.settings", "_config.thresholds", "_core.segment_format", "_engine.engine"}
    | {"_lifecycle.internode", "_system.limits", "_system.procfs", "_system.segments", "errors"},
    "_lifecycle.membership": {"errors"},
    "_lifecycle.shrink": {"_bootstrap.join", "_bootstrap.world", "_lifecycle.membership"}
    | {"_lifecycle.startup", "errors"},
    "_arrays.locks": {"flag.h", "_core.group", "_core.timeouts", "_diagnostics.failures"}
    | {"_diagnostics.flight_recorder", "_engine.engine", "_system.procfs", "errors"},
    "_arrays.striped_locks": {"_arrays.locks", "_core.group", "_core.timeouts", "_engine.engine"},
    "_arrays.onesided": {"_arrays.striped_locks", "_engine.state"},
    "_arrays.shared_array": {"_arrays.locks", "_arrays.onesided", "_arrays.striped_locks", "errors"},
    "_lifecycle.groups": {"_bootstrap.join", "_lifecycle.startup", "_system.limits", "errors"},
    "_p2p.ring": {"_config.settings", "_p2p.ring_ends", "_system.limits", "_system.procfs"}
    | {"_system.segments", "errors"},
    "_p2p.status": {"_arrays.operands", "_core.group", "_core.kernels", "_engine.state"}
    | {"_p2p.matching", "errors"},
    "_comm.endpoint": {"_arrays.operands", "_comm.fused", "_core.group", "_core.spsc_ring"}
    | {"_core.trace", "_diagnostics.failures", "_diagnostics.flight_recorder", "_engine.engine"}
    | {"_engine.progress", "_engine.state", "_internode.context", "_p2p.delivery", "_p2p.matching"}
    | {"_p2p.status", "_system.procfs", "_transport.channel", "errors"},
    "_comm.point_to_point": {"_arrays.operands", "_comm.endpoint", "_comm.objects", "_core.group"}
    | {"_core.timeouts", "_p2p.matching", "_p2p.status", "errors"},
    "_comm.comm": {"_arrays.allocator", "_arrays.operands", "_arrays.shared_array"}
    | {"_comm.collectives", "_comm.error_feedback", "_comm.objects", "_comm.point_to_point"}
    | {"_comm.trace_file", "_core.group", "_core.timeouts", "_diagnostics.failures", "_engine.engine"}
    | {"_lifecycle.groups", "_lifecycle.shrink", "_system.segments", "errors"},
    "_comm.init": {"_bootstrap.join", "_comm.comm", "_config.settings", "_lifecycle.startup"}
    | {"_system.limits", "errors"},
    # users of the public API like anybody else; what starts ranks
    "_comm.bucketer": set(),
    "model": set(),
    "methods.flat": {"__init__", "errors"},  # of shmring/methods, from here on
    "methods.rules": set(),
    "methods.sharded": {"methods.flat", "methods.rules"},
    "methods.pipeline": {"__init__", "methods.flat", "methods.rules"},
    "methods.compression": {"__init__", "_comm.error_feedback", "errors", "methods.flat"},
    "methods.server": {"__init__", "methods.rules"},
    "methods.sparse": {"errors", "methods.flat"},
    "methods.local": {"methods.flat"},
    "methods.precision": {"methods.flat"},
    "methods.reducers": {"__init__", "methods.flat"},
    "methods.stepwise": {"__init__", "methods.flat"},
    "tools._bench.trials": {"__init__"},
    "tools.tune": {"__init__", "_config.settings", "_config.thresholds", "_config.tuning_table"}
    | {"tools._bench.trials", "tools._cli"},
    "tools.selftest_checks": {
        "__init__",
        "_config.settings",
        "_system.segments",
    },  # the checks, and the command
    "tools.selftest": {"__init__", "tools._cli", "tools.selftest_checks"},
    "selftest": {"tools.selftest"},
    "tools._attach": {"_diagnostics.describe", "_diagnostics.flight_recorder", "_diagnostics.stacks"}
    | {"_system.procfs", "_system.segments"},
    "tools._cli": {"_config.optional_deps"},
    "tools._machine.sections": set(),
    "tools._machine.machine": {"_system.cpulist", "_system.limits"},
    "tools._machine.software": {"__init__", "_bootstrap.environment", "_config.settings"}
    | {"_config.thresholds", "_config.tuning_table", "_core.kernels"},
    "tools._machine.probes": {"__init__", "_config.settings", "_core.kernels", "_system.segments"},
    "tools.info": {"_system.cpulist", "tools._cli", "tools._machine.machine", "tools._machine.probes"}
    | {"tools._machine.sections", "tools._machine.software"},
    "tools.doctor": {"_system.cpulist", "tools._cli", "tools._machine.machine"}
    | {"tools._machine.sections", "tools.info"},
    "tools.ps": {"tools._attach", "tools._cli"},
    "tools.dump": {"_diagnostics.describe", "tools._attach", "tools._cli"},
    "tools.top": {"_diagnostics.flight_recorder", "tools._attach", "tools._cli"},
    "tools._bench.calls": {"__init__"},
    "tools._bench.rank": {"__init__", "tools._bench.calls", "tools._machine.machine"},
    "tools._bench.compare": {"tools._bench.calls"},
    "tools._bench.plot": {"tools._bench.compare", "tools._cli"},
    "tools._bench.table": {"tools._bench.calls", "tools._bench.compare"},
    "tools.bench": {"__init__", "_bootstrap.environment", "_config.settings", "_system.limits"}
    | {"tools._bench.calls", "tools._bench.compare", "tools._bench.plot", "tools._bench.rank"}
    | {"tools._bench.table", "tools._cli"},
    "tools.predict": {"__init__", "model", "tools._bench.calls", "tools._bench.compare"}
    | {"tools._bench.plot", "tools._bench.rank", "tools._cli"},
    "tools.command": {"tools._cli", "tools.bench", "tools.doctor", "tools.dump", "tools.info"}
    | {"tools.predict", "tools.ps", "tools.selftest", "tools.top", "tools.tune"},
    "__main__": {"tools.command"},
    "adapters._tasks": {"__init__"},
    "adapters.dask": {"__init__", "_config.optional_deps", "adapters._tasks"},
    "adapters.jax": {"__init__", "_config.optional_deps"},
    "adapters.joblib": {"__init__", "_config.optional_deps", "adapters._tasks"},
    "adapters.keras": {"__init__", "_config.optional_deps"},
    "adapters.pools": {"__init__", "adapters._tasks"},
    "adapters.ray": {"__init__", "_config.optional_deps", "adapters._ray_group", "adapters._tasks"},
    "adapters._ray_group": {"__init__", "adapters._tasks"},
    "adapters.sklearn": {"__init__", "_config.optional_deps"},
    "adapters.torch": {"__init__", "_config.optional_deps", "adapters._tasks"}
    | {"adapters._torch.buckets", "adapters._torch.compressed", "adapters._torch.group"},
    "adapters._torch.buckets": {"__init__", "adapters._torch.group"},
    "adapters._torch.compressed": {"adapters._torch.buckets", "adapters._torch.group"}
    | {"methods.compression"},
    "adapters._torch.entry": {"adapters.torch"},
    "adapters._torch.group": {"__init__", "adapters._torch.monitored", "adapters._torch.sparse"}
    | {"adapters._torch.tensors", "adapters._torch.work"},
    "adapters._torch.monitored": {"__init__"},
    "adapters._torch.sparse": {"__init__", "adapters._torch.tensors"},
    "adapters._torch.tensors": {"__init__"},
    "adapters._torch.work": set(),
    "_launch.spawn": {"__init__", "_bootstrap.join", "_system.limits", "_system.processes", "errors"},
    "_launch.options": {"_bootstrap.join", "_config.settings", "_system.cpu_topology"}
    | {"_system.cpulist", "_system.limits"},
    "_launch.cpu_binding": {"_launch.options", "_system.cpu_topology", "_system.cpulist"}
    | {"_system.limits"},
    "_launch.shmrun": {"_bootstrap.join", "_config.settings", "_launch.cpu_binding", "_launch.dedupe"}
    | {"_launch.log_files", "_launch.options", "_launch.output_mux", "_launch.traceback_tail"}
    | {"_system.limits", "_system.processes"},
    "run": {"_launch.shmrun"},
    "__init__": {"_arrays.allocator", "_arrays.operands", "_arrays.shared_array", "_bootstrap.join"}
    | {"_comm.bucketer", "_comm.comm", "_comm.init", "_comm.ops", "_comm.point_to_point", "_comm.work"}
    | {"_launch.spawn", "_p2p.ring", "errors"},
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


def module_of(path):
    """ "_core.group", as HOUSE names it."""
    return ".".join(path.relative_to(ROOT / "shmring").with_suffix("").parts)


MODULE_NAMES = {module_of(path) for path in MODULES}
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


def modules_in_python(tree, package):
    for node in imports_at_run_time(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "shmring":
                    yield from modules_named(alias.name.split(".")[1:], [])
        elif node.level or (node.module or "").partition(".")[0] == "shmring":
            module = "." * node.level + (node.module or "")
            yield from modules_named(resolved(package, module), [alias.name for alias in node.names])


def resolved(package, module):
    """The parts, below shmring, of what a module of the package (its parts) imports from."""
    names = [name for name in module.split(".") if name]
    level = len(module) - len(module.lstrip("."))
    return [*package[: len(package) - level + 1], *names] if level else names[1:]


def modules_named(base, names):
    """`from base import a`: the module a if there is one, else base, or the public names of the package."""
    found = [".".join([*base, name]) for name in names]
    own = ".".join(base)
    return {
        name if name in MODULE_NAMES else own if own in MODULE_NAMES else "__init__"
        for name in found or [own]
    }


def neighbours_in_cython(text, package):
    for name in re.findall(r'cdef extern from "([^"<]+)"', text):
        yield name
    imports = r"^\s*from\s+(\.[\w.]*|shmring[\w.]*)\s+c?import\s+(\([^)]*\)|[^\n]+)"
    for module, names in re.findall(imports, text, re.MULTILINE):
        listed = re.sub(r"#[^\n]*|\bas\s+\w+", "", names)
        yield from modules_named(resolved(package, module), re.findall(r"\w+|\*", listed))
    for name in re.findall(r"^\s*c?import\s+shmring((?:\.\w+)*)", text, re.MULTILINE):
        yield from modules_named(name.split(".")[1:], [])
    for name in re.findall(r'^\s*include\s+"([^"]+)"', text, re.MULTILINE):
        yield Path(name).stem


def neighbours(path):
    package = path.parent.relative_to(ROOT / "shmring").parts
    if path.suffix == ".py":
        return set(modules_in_python(ast.parse(path.read_text()), package))
    return set(neighbours_in_cython(path.read_text(), package))


@pytest.mark.parametrize("path", C_FILES, ids=name_of)
def test_c_files_include_only_what_they_may_know(path):
    assert path.name in C_HOUSE, f"{name_of(path)} is not in the house: enter it in C_HOUSE"
    included = set(re.findall(r'#\s*include\s+"([^"]+)"', path.read_text()))
    assert included <= C_HOUSE[path.name] | {path.name}


@pytest.mark.parametrize("path", [path for path in MODULES if path.suffix != ".pyi"], ids=name_of)
def test_modules_know_only_whom_they_may(path):
    name = module_of(path)
    if name.endswith(".__init__"):
        assert not neighbours(path)
        return
    assert name in HOUSE, f"{name_of(path)} is not in the house: enter it in HOUSE"
    assert neighbours(path) <= HOUSE[name] | {name}


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
    for path in sorted(ROOT.glob("shmring/**/*.pxd")):
        for block in re.findall(r"enum[^\n]*:[^\n]*\n((?:[ ]{4,}[^\n]*\n)+)", path.read_text()):
            for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", re.sub("#.*|=[^,\n]*", "", block)):
                found.setdefault(name, set()).add(name_of(path))
    ours = {name: paths for name, paths in found.items() if not name.startswith("SR_")}
    assert [(name, paths) for name, paths in ours.items() if len(paths) > 1] == []


def test_only_settings_reads_shmring_variables():
    for path in files("shmring", suffixes={".py"}):
        if module_of(path) != "_config.settings":
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
