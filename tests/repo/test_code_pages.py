"""Everything that docs/explanation/code.md, glossary.md and CONTRIBUTING.md's lists of changes name exists.

The walks of code.md are complete, and do not grow longer.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmring

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
DOCS = ROOT / "docs"
PAGE = DOCS / "explanation" / "code.md"
GLOSSARY = DOCS / "explanation" / "glossary.md"
if not PAGE.is_file():
    pytest.skip("needs the checkout", allow_module_level=True)

FILE = r"(?:[\w/]+\.(?:pyx|pxd|py|c|h))"
MENTION = re.compile(rf"`({FILE}|\w+\(\))`")
WALKS = {
    "From all_reduce to a kernel": 6,
    "From spawn to the first collective": 15,
    "From send to recv": 7,
    "broadcast_object": 3,
    "From SIGKILL to RankFailed": 10,
}  # the most files of each list; fewer are welcome
MOST_OF_ANY_ALGORITHM = 8


def sections():
    parts = re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def path_of(name):
    return ROOT / name if name.startswith("src/") else ROOT / "shmring" / name


def mentions(text):
    """(file, function) of all that a text names; a function is in the file that stands before it."""
    current = None
    for name in MENTION.findall(text):
        if name.endswith("()"):
            assert current, f"{name} stands before any file"
            yield current, name[:-2]
        else:
            current = name
            yield current, None


def steps(section):
    return re.findall(rf"^\d+\. `({FILE})`", sections()[section], re.M)


def defines(path, name):
    text = path.read_text()
    python = rf"^\s*(?:async )?(?:def|class|cdef class|cdef struct) {name}\b"
    cython = rf"^\s*c(?:p)?def\b[^=\n]*\b{name}\("
    c = rf"^[a-z][\w ]*[ *]{name}\("
    return re.search("|".join([python, cython, c]), text, re.M) is not None


def test_every_file_and_function_exists():
    named = list(mentions(PAGE.read_text().partition("## From all_reduce")[2]))
    assert len(named) > 100
    for file, function in named:
        assert path_of(file).is_file(), file
        assert function is None or defines(path_of(file), function), f"{function}() is not in {file}"


def test_the_table_has_every_folder_from_the_ground_up():
    table = re.findall(r"^\| (`.*?) \|", sections()["The folders"], re.M)
    named = [name for row in table for name in re.findall(r"`([\w.]+)/?`", row)]
    folders = {path.name for path in (ROOT / "shmring").iterdir() if (path / "__init__.py").exists()}
    assert {name for name in named if not name.endswith(".py")} == folders


def test_the_picture_of_each_private_folder_has_all_its_files():
    for init in (ROOT / "shmring").rglob("_*/__init__.py"):
        files = {path.stem for path in init.parent.iterdir() if path.suffix in (".py", ".pyx", ".pxd")}
        assert not files - set(re.findall(r"\w+", init.read_text())) - {"__init__"}, init.parent


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_has_as_many_files_as_it_says(walk):
    files = steps(walk)
    assert len(files) == len(set(files)) <= WALKS[walk]
    if text := re.search(r"The list has (\d+) files", sections()[walk]):
        assert int(text[1]) == len(files)


@pytest.mark.parametrize("walk", WALKS)
def test_each_step_calls_another_one_or_is_called_by_it(walk):
    texts = {file: path_of(file).read_text() for file in steps(walk)}
    functions = {
        file: {name for other, name in mentions(sections()[walk]) if other == file} for file in texts
    }
    for file in steps(walk):
        others = [other for other in texts if other != file]
        calls = {
            name for other in others for name in functions[other] - {None} if is_named(name, texts[file])
        }
        called = {
            name for other in others for name in functions[file] - {None} if is_named(name, texts[other])
        }
        assert calls | called or file == "src/kernels/kernels.c", file  # it is called through a table


def is_named(name, text):
    return re.search(rf"\b{name}\b", text) is not None


def test_the_table_of_algorithms_adds_up():
    section = sections()["From all_reduce to a kernel"]
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \| +(\d+) \|$", section, re.M)
    assert len(rows) > 5
    for adds, text in rows:
        added = {file for file, _ in mentions(adds)}
        assert len(steps("From all_reduce to a kernel")) + len(added) == int(text) <= MOST_OF_ANY_ALGORITHM


# Prints the Python files of shmring that ran. A process of its own has no objects left of other tests.
WATCHED = """
import os, signal, sys, time
import numpy as np
import shmring

files = set()


def note(frame, event, _):
    # CO_NEWLOCALS: the body of a module or class has not got it; a comprehension may be of such a body.
    is_function = frame.f_code.co_flags & 2 and not frame.f_code.co_name.startswith("<")
    _, found, file = frame.f_code.co_filename.rpartition("/shmring/")
    if event == "call" and is_function and found and not file.endswith("__init__.py"):
        files.add(file)


def start(comm):
    comm.all_reduce(np.ones(COUNT, "f4"))
    sys.setprofile(None)
    return files


def die(comm):
    x = np.ones(COUNT, "f4")
    comm.all_reduce(x)
    if comm.rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(note)
    try:
        comm.all_reduce(x)
    except shmring.RankFailed:
        sys.setprofile(None)
        return files


if sys.argv[1] == "start":
    sys.setprofile(note)
    ran = shmring.spawn(start, 2, method="fork")
    sys.setprofile(None)
    files.update(*ran)
else:
    files.update(shmring.spawn(die, 2, method="fork", return_exceptions=True)[0])
print(*files)
""".replace("COUNT", str(1 << 18))
# Files that report a late rank, on a machine that stalls.
SAID_OF_LATE_RANKS = {"_diagnostics/stall_warning.py", "_diagnostics/describe.py", "_diagnostics/stacks.py"}


@pytest.mark.parametrize(
    ("event", "walk", "known"),
    [
        ("start", "From spawn to the first collective", "_lifecycle/startup.py"),
        ("die", "From SIGKILL to RankFailed", "_diagnostics/failures.py"),
    ],
)
def test_no_python_file_that_runs_is_left_out(event, walk, known):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHMRING_")}
    environ["PYTHONPATH"] = str(Path(shmring.__file__).parent.parent)
    ran = subprocess.run(
        [sys.executable, "-c", WATCHED, event], env=environ, capture_output=True, text=True, check=True
    )
    files = set(ran.stdout.split())
    assert known in files
    assert files - SAID_OF_LATE_RANKS <= {file for file, _ in mentions(sections()[walk])}


# ---- the glossary -----------------------------------------------------------------------------------------


def entries():
    """(term, meaning, place) of each."""
    return re.findall(r"^([^\n:]+)\n: ([^\n]+)\n  ([^\n]+)\n(?:\n|\Z)", GLOSSARY.read_text(), re.M)


def test_the_glossary_is_found_and_has_its_terms_in_order():
    assert re.search(r"^explanation/glossary$", (DOCS / "index.md").read_text(), re.M)
    terms = [term for term, _, _ in entries()]
    assert len(terms) >= 40
    assert len(terms) == len(re.findall(r"^: ", GLOSSARY.read_text(), re.M)), "each entry has two lines"
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry[0])
def test_the_place_of_a_term_exists(entry):
    file, *functions = mentions(entry[2])
    assert path_of(file[0]).is_file()
    assert functions
    for _, function in functions:
        assert defines(path_of(file[0]), function), function


# ---- how to add an algorithm, a dtype, an adapter ----------------------------------------------------------


def how_to_add():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(r"^(## How to add [^\n]+\n.+?)(?=^## )", text, re.M | re.S)


def test_the_files_of_how_to_add_something_exist():
    assert len(how_to_add()) == 3
    tops = (ROOT, ROOT / "shmring")
    known = {path.name for folder in ("tests", "bench", "docs") for path in (ROOT / folder).rglob("*")}
    for file in re.findall(r"`([\w./]+(?:\.(?:pyx?|pxd|c|h|md|toml|yml)|/))`", "".join(how_to_add())):
        if "NAME" not in file:
            assert any((top / file).exists() for top in tops) or file in known, file


def test_the_functions_and_tables_of_how_to_add_something_exist():
    """Each is in a file that the same step names."""
    for step in re.split(r"^\d+\. ", "".join(how_to_add()), flags=re.M)[1:]:
        files = [path_of(file) for file in re.findall(rf"`({FILE})`", step)]
        texts = "".join(path.read_text() for path in files if path.is_file())
        for name in re.findall(r"`([a-z]+(?:_[a-z]+)+|[A-Z]+(?:_[A-Z]+)+|PATHS|ALGORITHMS)`", step):
            if texts and not name.startswith("SHMRING_"):
                assert name in texts, f"{name}, of: {step}"
