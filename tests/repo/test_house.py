"""The rules for imports between folders, and other rules of this project that a machine can check.

It reads the checkout's files, and imports nothing of shmring.
"""

import ast
import io
import os
import re
import subprocess
import sys
import textwrap
import tokenize
from pathlib import Path

import pytest
from combinations import first

from tests.repo.faults import builds
from tests.support import nogil_modules

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "src").is_dir():
    pytest.skip("needs the checkout", allow_module_level=True)

# A file of src/, and which others it may include; standard headers are free. Enter a new file here first.
C_HOUSE = {
    "layout.h": set(),
    "fault.h": set(),
    "arena.h": {"layout.h"},
    "sync/clock.h": set(),
    "sync/cpu.h": {"layout.h"},
    "sync/event.h": {"layout.h"},
    "sync/flag.h": {"fault.h", "sync/cpu.h", "sync/event.h"},
    "sync/waitset.h": {"sync/clock.h", "sync/flag.h"},
    "sync/watcher.h": {"sync/event.h"},
    "sync/abort.h": {"layout.h"},
    "sync/seqlock.h": {"sync/flag.h"},
    "sync/lock.h": {"sync/cpu.h", "sync/event.h"},
    "sync/liveness.h": {"layout.h"},
    "sync/stack_request.h": {"layout.h"},
    "receipts.h": {"sync/flag.h"},
    "spsc_ring.h": {"sync/flag.h"},
    "offer.h": {"spsc_ring.h"},
    "broadcast.h": {"spsc_ring.h"},
    "schedule.h": set(),
    "single_copy.h": set(),
    "fold_frames.h": set(),
    "tcp_probe.h": {"sync/clock.h"},
    "channel.h": {"receipts.h", "spsc_ring.h", "tcp_probe.h"},
    "channel.c": {"channel.h"},
    "conn.h": {"tcp_probe.h"},
    "conn.c": {"conn.h"},
    "xla_ffi.h": {"sync/clock.h", "sync/flag.h"},
    "kernels/kernels.h": set(),
    "kernels/item.h": {"kernels/kernels.h"},
    "kernels/loop.h": {"kernels/cast.h", "kernels/copy.h"},
    "kernels/copy.h": set(),
    "kernels/cast.h": set(),
    "kernels/kernels.c": {"kernels/kernels.h", "kernels/item.h", "kernels/loop.h"},
}
# The folders of shmring/ and the modules at its top, from the ground up, each with its allowed imports.
FOLDERS = {
    "errors": set(),
    "_arguments": set(),  # the checks of integers and lists
    "model": {"_arguments"},  # of costs
    "_config": set(),
    "_core": set(),
    "_system": {"errors"},
    "_algorithms": {"_core"},
    "_transport": {"errors", "_core"},
    "_bootstrap": {"_arguments", "errors", "_config", "_system"} | {"__init__"},  # the version
    "_diagnostics": {"errors", "_core", "_system"},
    "_internode": {"_core", "_algorithms", "_transport"},
    "_engine": {"errors", "_core", "_system", "_algorithms", "_transport", "_diagnostics", "_internode"},
    "_arrays": {"_arguments", "errors", "_core", "_system", "_diagnostics", "_engine"},
    "_lifecycle": {
        "_arguments",
        "errors",
        "_config",
        "_core",
        "_system",
        "_transport",
        "_bootstrap",
        "_internode",
        "_engine",
    },
    "_p2p": {"errors", "_config", "_core", "_system", "_transport", "_diagnostics", "_internode", "_engine"}
    | {"_arguments", "_arrays"},
    "_comm": {
        "errors",
        "_arguments",
        "_config",
        "_core",
        "_system",
        "_algorithms",
        "_transport",
        "_bootstrap",
    }
    | {"_diagnostics", "_internode", "_engine", "_arrays", "_lifecycle", "_p2p"},
    "__init__": {
        "errors",
        "model",
        "_arrays",
        "_bootstrap",
        "_comm",
        "_launch",
        "_p2p",
        "mpi4py",
    },  # public names
    "_outcome": {"errors", "_config"},  # the result or failure of a rank, on its way to the launcher
    "_launch": {
        "_arguments",
        "_outcome",
        "errors",
        "_config",
        "_system",
        "_bootstrap",
        "__init__",
    },  # the last one in a rank, when started
    "run": {"_launch"},
    # Users of the public names, and of little else.
    "methods": {"_arguments", "__init__", "errors"}
    | {"_comm"},  # error feedback of the wire, which is the collectives' too
    # The calls go to `_comm` without a Python call between, and are as short as MPI's because of this. The
    # numbers of kinds, and the table of operations, are `_core`'s; `_arrays` has `FileDescriptor`.
    "mpi4py": {"__init__", "errors", "_arrays", "_comm", "_core", "_config", "_launch"},
    # Libraries that need not be there. Pools that share by themselves need the pickles of `_arrays`; adapters
    # that start ranks need `_outcome`.
    "adapters": {"_arguments", "_outcome", "errors", "__init__", "methods", "_config", "_arrays"},
    "tools": {"__init__", "model", "_config", "_core", "_system", "_bootstrap", "_diagnostics"},
    "selftest": {"tools"},
    "__main__": {"tools"},
}
# Packages with the names that mpi4py's packages of the same name have.
WITH_NAMES_OF_MPI4PY = {"mpi4py.__init__", "mpi4py.futures.__init__", "mpi4py._stand_in.mpi4py.__init__"}
# Things that only one place may do: pattern, allowed places, reason.
ONLY_IN = [
    (
        r"memory_order_|__atomic_(?!thread_fence)|__sync_|\batomic_(load|store|exchange|fetch|compare)|"
        r"futex|_mm_pause|sched_yield",
        {"src/sync/"},
        "memory orders, pauses and futexes are those of src/sync/",
    ),
    (
        r"_mm\w*_stream_|_mm_sfence|__atomic_thread_fence|__builtin_nontemporal",
        {"src/kernels"},
        "streaming stores and their fence are the kernels'",
    ),
]
# A word that this project had for something, as a pattern, and the field's word, the only one here for it.
HOUSE_WORDS = {
    r"\b(sr|SR)_(wire|WIRE)(?!_(name|format|NATIVE|BF16|FP16|INT8|FORMATS))\w*": "sr_conn_: wire is a format",
    r"\bsr_post\w*|\bSR_POST\w*|\bend_post\b": "channel",
    r"(?i)\b\w*office\b|\bsr_office\w*": "Channels",
    r"\b(\w+_)?([Mm]ail|MAIL)(_\w+)?\b": "control channel; p2p for messages between ranks",
    r"\b[Ll]eg\b|\bleg_of\b": "InterNode, g.inter",
    r"\b_alarms\b|\bAlarms\b|\balarms[.,)]": "notifications",
    r"\b(\w+_)?PARTED\b|\bparting\b": "remote mismatch",
    r"\bCrossing\b|_crossing\b": "InterNodeLinks, internode",
    r"\b_?[Dd]oorman\b": "Acceptor",
    r"(?i)\b_?guests?\b|\bvisit\(\)": "connector, connect",
    r"\b_?([Ss]trangers?|STRANGERS?)\b|_STRANGERS\b": "pending peer",
    r"\bReception\b": "Gathering",
    r"\bStar\b|\bSTAR\b|\bthe star\b": "Coordinator",
    r"\bLine\((socket|connection|ours)|import Line\b": "FramedSocket",
    r"\bJoinAttempt\b|\bAttempt\b|\battempt_of\b": "JoinRequest",
    r"\bsleep_among_neighbours\b|\bneighbours = ": "local ranks",
    r"\bclass Begun\b|\bBegun\(|import Begun\b": "CommParts, Transfer",
    r"\bElectorate\b": "Ballot",
    r"\bOver\(|import Over\b|: Over\b": "FailedComm",
    r"\bsr_nap\w*|\bSR_NAP_\w+|\bnap_\w+|\bNAP_NS\b": "wait set, sleep",
    r"\b(sr_)?bells?\b|\w+_bell\b|\bsr_bell\w*": "event",
    r"\b(sr_)?desk\b|\bsr_desk\w*": "stack request",
    r"\bsr_life\w*|\blife_of\b|\blook_for_lives\b|\bLIFE_\w+": "liveness",
    r"\bsr_views\w*": "seqlock",
    r"\bCarrier\b": "Endpoint",
    r"\bAsides?\b|\w+_aside\b": "UnexpectedMessage",
    r"\bwish(es)?\b|\w+_wish\b|\bwish_\w+": "pattern, color",
    r"\bneedy\b": "unmatched_source",
    r"\b\w*[Ee]rrands?\b": "Pollable",
    r"\b(\w+_)?choice\.call|\bCHOICE\b|\bprepare_choice\b": "election",
    r"\bStretch\b|\bstretch_(at|count|nbytes)\b|\bnstretches\b": "fragment, priority run",
    r"\bHead \*|\bstruct Head\b": "Cursor",
    r"\bMOVED(_DTYPE)?\b(?! =|\)|\[)": "OPAQUE",
    r"\bg\.crowded\b|\bbe_patient\b|crowded=g": "oversubscribed, set_wait_policy",
    r"\bsr_claim\b|\bunclaim\b|\bclaimant\b|\bclaim_\w+|\bCLAIM_\w+": "prefetch for write, enter_call",
    r"\bfate(_\w+)?\b": "peer_status",
    r"\.surface\(|int surface": "raise_for_status",
    r"\.sees\(": "attach_snapshot",
    r"\bglance\(|\bglanced_ns\b|\b_?look_around\b|\bsr_channels_look\b": "poll, poll_peers",
    r"\blast_words\b|\bFolding\b": "traceback_tail, Dedupe",
    r"\bsr_channels?_(say|hears?)\b|\bhear_(others|out|views)\b": "notify, poll",
    r"\btell_(others|view|all|of_wait)\b": "notify, publish",
    r"\bSR_TOLD\b|\bwhat_others_told\b|\btold_(call|of)\b": "remote, announced",
    r"\bsr_ring_tell\b|\btell_limit\b|\bheed_credit\b": "publish, credit",
    r"\bword_(from|due_ns)\b": "reason, report",
    r"(?i)\bstaging rings?\b": "staging buffer",
    r"\bUneven\b|\bFusion\(": "VectorCollectives, FusedCollectives",
    r"\bheed\(|\brouse\(": "warn_if_due, wake_thread",
    r"\bTOLD_NBYTES\b": "ANNOUNCED_NBYTES",
    r"\bchoose_way\b|\bopen_way\w*|\bformat_way\b": "choose_algorithm, open_ring",
    r"\bpost_and_carry\b|\blet_go_of_completed\b": "post_and_wait, release_completed",
}
# First words of a relative clause. A comment or docstring begins with none of them, unless it is a question.
RELATIVE = re.compile(r"(Who|Whom|Whose|Whether|What|Of|Where|How)\b(?![^.!?]*\?)")
MAX_LINES = 1000
MAX_EXTENSIONS = 30
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
    """Return the parts, below shmring, of the module from which a module of the package (its parts)
    imports."""
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


def imports_in_cython(text, package):
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


def imports_of(path):
    package = path.parent.relative_to(ROOT / "shmring").parts
    if path.suffix == ".py":
        return set(modules_in_python(ast.parse(path.read_text()), package))
    return set(imports_in_cython(path.read_text(), package))


@pytest.mark.parametrize("path", C_FILES, ids=name_of)
def test_c_files_include_only_what_they_may_know(path):
    name = path.relative_to(ROOT / "src").as_posix()
    assert name in C_HOUSE, f"{name_of(path)} is not in the house: enter it in C_HOUSE"
    included = set(re.findall(r'#\s*include\s+"([^"]+)"', path.read_text()))
    beside = {other: f"{path.parent.name}/{other}" for other in included}
    found = {other if (ROOT / "src" / other).exists() else beside[other] for other in included}
    assert found <= C_HOUSE[name] | {name}


def imports_nothing(name):
    return name.endswith(".__init__") and name not in WITH_NAMES_OF_MPI4PY


def test_the_file_of_a_folder_imports_nothing():
    """Its docstring says what is in the folder."""
    found = [path for path in MODULES if path.suffix != ".pyi" and imports_nothing(module_of(path))]
    assert [name_of(path) for path in found if imports_of(path)] == []


def test_modules_import_only_folders_that_theirs_may():
    for path in MODULES:
        name = module_of(path)
        if path.suffix != ".pyi" and not imports_nothing(name):
            folder = name.partition(".")[0]
            others = [other for other in imports_of(path) if not other.endswith((".h", ".c"))]
            assert {other.partition(".")[0] for other in others} <= FOLDERS[folder] | {folder}, name


def test_folders_and_modules_import_each_other_in_no_circle():
    """The package's __init__ may import everything; a rank's start, the handshake and users import it."""
    modules = {}
    for path in MODULES:
        if path.suffix != ".pyi" and not module_of(path).endswith("__init__"):
            modules.setdefault(module_of(path), set()).update(imports_of(path))
    for known in (FOLDERS, modules):
        known = {
            name: {n for n in may if n in known and n not in {name, "__init__"}}
            for name, may in known.items()
        }
        while known:
            ready = {name for name, may in known.items() if not may}
            assert ready, f"these import each other in a circle: {sorted(known)}"
            known = {name: may - ready for name, may in known.items() if name not in ready}


def test_the_launchers_load_no_extension():
    """They start ranks by the hundred, and only a rank needs the engine."""
    program = "import sys, shmring._launch.shmrun, shmring._launch.spawn\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    extensions = {module_of(path) for path in MODULES if path.suffix == ".pyx"}
    assert not {f"shmring.{name}" for name in extensions} & set(loaded.split())


@pytest.mark.parametrize(("pattern", "places", "reason"), ONLY_IN, ids=[why for _, _, why in ONLY_IN])
def test_restricted_constructs_are_only_in_their_place(pattern, places, reason):
    for path in [*C_FILES, *files("shmring", suffixes={".py", ".pyx", ".pxd"})]:
        if not name_of(path).startswith(tuple(places)):
            found = re.search(pattern, without_comments(path))
            assert not found, f"{name_of(path)}: {found[0]}: {reason}"


@pytest.fixture(scope="module")
def texts_by_name():
    paths = files(
        "shmring", "src", "tests", "docs", suffixes={".py", ".pyx", ".pxd", ".pyi", ".c", ".h", ".md"}
    )
    paths += files("tests", suffixes={".pml", ".litmus"})
    return {name_of(path): path.read_text() for path in paths if path != Path(__file__).resolve()}


@pytest.mark.parametrize("pattern", HOUSE_WORDS)
def test_one_concept_has_one_word(texts_by_name, pattern):
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in texts_by_name.items()
        for match in re.finditer(pattern, text)
    ]
    assert not found, f"say instead: {HOUSE_WORDS[pattern]}"


def docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def comments(text, suffix):
    """Yield each comment of a file as one string. Lines that have nothing but a comment are joined."""
    if suffix in {".c", ".h"}:
        for found in re.findall(r"/\*.*?\*/|(?:^[ \t]*//[^\n]*\n)+|//[^\n]*", text, re.DOTALL | re.MULTILINE):
            yield re.sub(r"^[ \t]*(//|/?\*+)", "", found, flags=re.MULTILINE).removesuffix("*/").strip()
        return
    if suffix in {".pyx", ".pxd"}:
        hashes = [(m.start(), m[0]) for m in re.finditer(r"(?m)^[ \t]*#.*|[ \t]#[ \t].*", text)]
        starts = [(text.count("\n", 0, at), found) for at, found in hashes]
    else:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        starts = [(token.start[0] - 1, token.string) for token in tokens if token.type == tokenize.COMMENT]
    lines, block, last = text.splitlines(), [], -2
    for number, found in starts:
        alone = lines[number].lstrip().startswith("#")
        if block and not (alone and number == last + 1):
            yield " ".join(block)
            block = []
        block.append(found.strip().lstrip("#: "))
        last = number if alone else -2
    if block:
        yield " ".join(block)


def relative_openings(text, suffix):
    """Return the comments and docstrings of a file that begin with a relative clause."""
    found = list(comments(text, suffix))
    if suffix in {".py", ".pyi"}:
        found += docstrings(ast.parse(text))
    elif suffix in {".pyx", ".pxd"}:
        found += re.findall(r'(?:\A|:\n)\s*"""\s*(.*?)"""', text, re.DOTALL)
    return [opening for opening in found if RELATIVE.match(opening)]


EXAMPLES_OF_OPENINGS = {
    ".py": """
        def wait():
            '''Who waits, waits.'''
            x = 1  # Whether it is one.
            # Return whether it is one.
            # Where
            # is it?
            return "# What"
        """,
    ".pyx": """
        cdef int wait() nogil:
            \"\"\"Who waits, waits.\"\"\"
            # Return whether it is one.
            x = 1  # Whether it is one.
        """,
    ".h": """
        /* Who waits, waits. */
        int x; // Whether it is one.
        // Return whether it is one.
        // Where it is.
        """,
}


@pytest.mark.parametrize("suffix", EXAMPLES_OF_OPENINGS)
def test_relative_clauses_are_found(suffix):
    found = relative_openings(textwrap.dedent(EXAMPLES_OF_OPENINGS[suffix]), suffix)
    assert sorted(found) == ["Whether it is one.", "Who waits, waits."]


WITH_COMMENTS = [path for path in SOURCES if path.suffix != ".sh"] + files("docs", suffixes={".py"})


def test_comments_begin_with_no_relative_clause():
    found = {name_of(path): relative_openings(path.read_text(), path.suffix) for path in WITH_COMMENTS}
    assert {name: openings for name, openings in found.items() if openings} == {}


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


def test_cimports_name_what_they_import():
    found = [
        f"{name_of(path)}: {line}"
        for path in files("shmring", suffixes={".pyx", ".pxd"})
        for line in path.read_text().splitlines()
        if re.search(r"\bcimport \*", line)
    ]
    assert not found


def list_comprehensions(text):
    """Yield the lines of comprehensions in functions that Cython translates as lists."""
    brackets, before = [], ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.OP, tokenize.NAME):  # such as text of an f-string, from Python 3.12 on
            pass
        elif token.string in ("(", "[", "{"):
            brackets.append((token.string, before))
        elif token.string in (")", "]", "}"):
            brackets.pop()
        elif token.string == "for" and brackets and token.line.startswith(" "):
            bracket, name = brackets[-1]
            if bracket == "[" or (bracket == "(" and name in ("list", "tuple", "sorted")):
                yield token.line.strip()
        before = token.string


@pytest.mark.parametrize("path", files("shmring", suffixes={".pyx"}), ids=name_of)
def test_no_list_comprehension_is_translated(path):
    """Cython 3.3.1 frees an item twice if the list cannot grow: out of memory would corrupt memory."""
    if path.stem != "kernels":  # its comprehensions run for tests
        assert list(list_comprehensions(path.read_text())) == []


def unsafe_without_memory(text):
    """Yield the lines that leave an except clause early, and with statements other than those for the GIL."""
    clauses = []  # indentations of the except clauses around a line
    for line in filter(str.strip, text.splitlines()):
        indent = len(line) - len(line.lstrip())
        while clauses and indent <= clauses[-1]:
            clauses.pop()
        word = line.split(maxsplit=1)[0].rstrip(":")
        if (clauses and word in ("return", "break", "continue")) or re.match(r"\s*with (?!nogil|gil)", line):
            yield line.strip()
        if word == "except":
            clauses.append(indent)


def test_the_lines_that_are_unsafe_without_memory_are_found():
    text = (
        "try:\n    x\nexcept A:\n    if b:\n        return 0\nwith nogil:\n    return 1\nwith c:\n    pass\n"
    )
    assert list(unsafe_without_memory(text)) == ["return 0", "with c:"]


@pytest.mark.parametrize("path", files("shmring", suffixes={".pyx"}), ids=name_of)
def test_no_line_is_unsafe_without_memory(path):
    """Cython 3.3.1 then relies on a traceback. fold_frames.h and lack of memory leave none."""
    assert list(unsafe_without_memory(path.read_text())) == []


def test_a_constant_has_one_meaning():
    """Check enumerators: of two with one name the later import would hide the other, without any error."""
    found = {}
    for path in sorted(ROOT.glob("shmring/**/*.pxd")):
        for block in re.findall(r"enum[^\n]*:[^\n]*\n((?:[ ]{4,}[^\n]*\n)+)", path.read_text()):
            for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", re.sub("#.*|=[^,\n]*", "", block)):
                found.setdefault(name, set()).add(name_of(path))
    ours = {name: paths for name, paths in found.items() if not name.startswith("SR_")}
    assert [(name, paths) for name, paths in ours.items() if len(paths) > 1] == []


def test_no_module_without_the_gil_escapes_the_fault_builds_and_thread_sanitizer():
    """Finds them in another way than nogil_modules: no class, and as many functions as lines end in nogil."""
    names = {
        path.relative_to(ROOT / "shmring").with_suffix("").as_posix()
        for path in files("shmring", suffixes={".pyx"})
        if not re.search(r"^ *(def|cpdef|cdef class)\b", path.read_text(), re.MULTILINE)
        and len(re.findall(r"^cdef\b(?! enum| extern| struct)[^=\n]*\(", path.read_text(), re.MULTILINE))
        == len(re.findall(r"\bnogil:$", path.read_text(), re.MULTILINE))
    }
    assert "_algorithms/choice" in names
    assert names <= set(nogil_modules.without_gil())
    assert set(nogil_modules.without_gil()) <= set(builds.MODULES)
    tsan = Path(__file__).with_name("test_tsan.py").read_text()
    assert "WITHOUT_GIL = nogil_modules.without_gil()" in tsan


def test_only_settings_reads_shmring_variables():
    for path in files("shmring", suffixes={".py"}):
        if module_of(path) != "_config.settings":
            assert not list(reads_of_environment(ast.parse(path.read_text()))), name_of(path)
    for path in [*C_FILES, *files("shmring", suffixes={".pyx", ".pxd"})]:
        assert not re.search(r"getenv|environ\b", without_comments(path)), name_of(path)


def test_files_stay_readable():
    for path in SOURCES:
        assert "utils" not in path.stem, f"{name_of(path)}: a name that says nothing"
        lines = path.read_text().splitlines()
        code = re.sub(r'""".*?"""', '""', path.read_text(), flags=re.DOTALL)  # without docstrings
        assert len(code.splitlines()) < MAX_LINES, name_of(path)
        most = MAX_LINE_LENGTH if path.suffix in {".py", ".pyi"} else MAX_C_LINE_LENGTH
        long = [number for number, line in enumerate(lines, 1) if len(line) > most]
        assert not long, f"{name_of(path)}: lines longer than {most}: {long}"


def test_the_extensions_are_few():
    """Each takes a second of every installation for Cython's own code. One is generated, see SHARED in
    setup.py."""
    assert len(files("shmring", suffixes={".pyx"})) + 1 <= MAX_EXTENSIONS


def test_only_the_tests_of_the_benchmarks_need_bench():
    needs = re.compile(r"""/ "bench"|["']bench/|^\s*(from|import) bench\b""", re.MULTILINE)
    for path in files("tests", suffixes={".py"}):
        if "benchmarks" not in path.parts and path != Path(__file__).resolve():
            found = needs.search(path.read_text())
            assert not found, f"{name_of(path)} needs bench/: {found[0]!r}"


def test_no_file_names_a_path_of_a_developers_machine():
    texts = [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml", ".in", ".py", ".yaml"}]
    for path in [*SOURCES, *texts, *(ROOT / ".ci").glob("[rw]*"), *(ROOT / ".github").rglob("*.yml")]:
        found = MACHINE_PATH.search(path.read_text())
        assert not found, f"{name_of(path)}: {found[0]}"


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "command", first(3, ["ruff check .", "mypy", "codespell_lib", "cython_lint.cython_lint shmring"])
)
def test_lint_and_types(command):
    tool, *arguments = command.split()
    pytest.importorskip(tool)
    beside = Path(sys.executable).parent  # cython-lint looks for pycodestyle there
    done = subprocess.run(
        [sys.executable, "-m", tool, *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
