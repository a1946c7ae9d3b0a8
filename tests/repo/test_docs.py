"""The documentation builds without a warning, is complete, and what it shows runs."""

import importlib
import itertools
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest

import shmring
from shmring import methods

ROOT = pages.ROOT
DOCS = ROOT / "docs"
if not DOCS.is_dir():
    pytest.skip("needs the checkout", allow_module_level=True)

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
WATCHDOG_S = 50
MOST_COLUMNS = 106  # as wide as the page in docs/page.css
BUILD_S = 200  # a build takes some 10 s of CPU time
COMMANDS = {"shmrun": "-m shmring.run", "shmring": "-m shmring.tools.command", "python": ""}


def ids(items):
    return {"argvalues": items, "ids": [str(item.relative_to(ROOT)) for item in items]}


# ---- it is built ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The HTML, made with warnings as errors."""
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", DOCS, folder]
    run(command, folder, watchdog_s=BUILD_S)
    return folder


def run(command, folder, watchdog_s=WATCHDOG_S, **environ):
    command = [str(part) for part in command]
    # Unbuffered ranks would print into each other's lines.
    environ = os.environ | {"PYTHONPATH": str(PACKAGE_PARENT), "PYTHONUNBUFFERED": ""} | environ
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=watchdog_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def names_of(module):
    """Return the names as they are below shmring; names from other modules are public there."""
    path = module.__name__
    own = [name for name in module.__all__ if getattr(vars(module)[name], "__module__", path) == path]
    return {f"{path.removeprefix('shmring.')}.{name}" for name in own}


def documented_names():
    """Return what the reference must have: every public name, and every member of a communicator."""
    kinds = ("Broadcast", "Bucketer", "Comm", "Op", "Plan", "Ring", "Transfer", "Work")
    members = {f"{kind}.{name}" for kind in kinds for name in public(getattr(shmring, kind)) - public(str)}
    for name in ("model", *(f"methods.{found.name}" for found in pkgutil.iter_modules(methods.__path__))):
        members |= names_of(importlib.import_module(f"shmring.{name}"))
    own = {"Ring.closed_because", "Broadcast.closed_because"}
    return set(shmring.__all__) | members - own


@pytest.mark.slow
@pytest.mark.limit(BUILD_S + 40)
def test_every_public_name_is_in_the_reference(built):
    pages = ("api", "errors", "methods")
    text = "".join((built / "reference" / f"{page}.html").read_text() for page in pages)
    anchors = set(re.findall(r'<dt class="sig[^"]*" id="shmring\.([\w.]+)"', text))
    missing = documented_names() - anchors
    assert not missing, f"say something of them in docs/reference/: {missing}"


@pytest.mark.slow
@pytest.mark.limit(BUILD_S + 40)
def test_shown_members_have_a_docstring_and_no_self(built):
    text = (built / "reference" / "api.html").read_text()
    assert "that led to this communicator" in text  # from a stub
    assert not re.search(r'<span class="n"><span class="pre">self</span>', text)
    empty = re.findall(r'id="shmring\.(\w+)\.\w+">(?:(?!</dt>).)*</dt>\s*<dd></dd>', text, re.S)
    assert set(empty) == {"Op"}  # its values are self-explanatory


@pytest.mark.slow
@pytest.mark.limit(BUILD_S + 40)
def test_the_commands_page_has_what_the_parsers_say(built):
    text = (built / "reference" / "commands.html").read_text()
    for output in ("--rdzv HOST:PORT", "usage: shmring ps", "--no-stacks"):
        assert output in text


def flags_shown():
    """(page, flag) of every line in a block that begins with a command of ours, whether it is run or not."""
    for page in pages.pages():
        for block in pages.blocks(page):
            for line in re.findall(r"^(?:\w+=\S+ )*(?:shmrun|shmring) (.*)$", block.code, re.M):
                own = re.split(r"\S+\.py|#", line)[0]
                yield from ((block.name, flag) for flag in re.findall(r"(?<!\S)--[a-z-]+", own))


@pytest.mark.slow
@pytest.mark.limit(BUILD_S + 40)
def test_the_flags_that_pages_show_are_those_of_the_parsers(built):
    text = set(re.findall(r"--[a-z-]+", (built / "reference" / "commands.html").read_text()))
    shown = set(flags_shown())
    assert shown
    assert not {(block, flag) for block, flag in shown if flag not in text}


# ---- it agrees with the code ----------------------------------------------------------------------------


def variables(text):
    return set(re.findall(r"SHMRING_[A-Z0-9_]*[A-Z0-9]", text))


def quoted(source):
    return set(re.findall(r'"(SHMRING_[A-Z0-9_]+)"', source.read_text()))


def test_the_environment_page_has_every_variable_that_is_read():
    package = PACKAGE_PARENT / "shmring"
    read = quoted(package / "_config/settings.py")
    known = set().union(*map(quoted, package.rglob("*.py")))  # including those that shmrun sets for its ranks
    assert read <= variables((DOCS / "reference" / "environment.md").read_text())
    for page in pages.pages():
        assert variables(page.read_text()) <= known, page


def test_the_figures_are_what_their_scripts_draw(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "figures"))
    for figure in importlib.import_module("draw").FIGURES:
        path = DOCS / "figures" / f"{figure.__name__}.svg"
        assert path.read_text() == str(figure()), "run docs/figures/draw.py"
        assert path.stat().st_size < 60_000


def test_links_of_the_readme_exist():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


# ---- its blocks run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", **ids(pages.pages()))
def test_every_block_is_run_or_says_why_not(page):
    shown = pages.blocks(page)
    assert 2 * len(shown) == len(re.findall(r"^```", page.read_text(), re.M)), (
        "a block that is not understood"
    )
    for block in shown:
        assert block.language, f"{block.name} has no language"
        assert set(block.how) <= pages.WAYS, f"{block.name}: {set(block.how) - pages.WAYS}"
        assert block.how.get("in", "rank") in ("rank", "main", "torch"), f"{block.name}: in what?"
        assert block.how.get("not run", "why"), f"{block.name} does not say why it is not run"
    for above, block in itertools.pairwise(shown):
        if "output" in block.how:
            assert is_run(above), f"{block.name}: the block above is not run"
            assert above.how.get("in") != "rank", f"{block.name}: the output of several ranks is mixed"
    for block in shown:
        if name := block.how.get("file"):
            runs = [other.code for other in shown if other.language == "sh" and is_run(other)]
            assert any(name in code for code in runs), f"{block.name}: nobody runs {name}"


@pytest.mark.parametrize("page", **ids(pages.pages()))
def test_code_fits_the_page(page):
    code = [block for block in pages.blocks(page) if not block.language.startswith("{")]
    wide = {block.name for block in code if max(map(len, block.code.splitlines())) > MOST_COLUMNS}
    assert not wide, f"lines longer than {MOST_COLUMNS} columns"


def is_run(block):
    return not {"not run", "command"} & set(block.how) and block.how.get("in") != "torch"


def has_any(page):
    return any(block.language in ("python", "sh") and is_run(block) for block in pages.blocks(page))


PAGES_THAT_RUN = [page for page in pages.pages() if has_any(page)]
# They start many programs, or measure.
LONG = [ROOT / "docs" / name for name in ("howto/engines.md", "howto/measuring.md", "howto/mpi4py.md")]
LONG += [ROOT / "docs" / name for name in ("howto/shmrun.md", "howto/tracing.md", "methods/frameworks.md")]


@pytest.mark.limit(240)
@pytest.mark.parametrize("page", **ids([page for page in PAGES_THAT_RUN if page not in LONG]))
def test_the_blocks_of_a_page_run(page, tmp_path):
    run_all_blocks(page, tmp_path)


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.parametrize("page", **ids(LONG))
def test_the_blocks_of_a_long_page_run(page, tmp_path):
    run_all_blocks(page, tmp_path)


def run_all_blocks(page, tmp_path):
    missing = run_page(page, tmp_path)
    if missing:
        pytest.skip(f"all but these ran: {missing}")


def run_page(page, folder):
    """Run the blocks, compare what they print, and return the packages that blocks lack."""
    path = f"{shims(folder)}{os.pathsep}{os.environ['PATH']}"
    missing, printed = {}, None
    for block in filter(is_run, pages.blocks(page)):
        if "output" in block.how:
            shown = None if printed is None else sorted(pages.without_marks(printed).splitlines())
            assert shown in (None, sorted(block.code.splitlines())), block.name
        elif need := pages.lacks(block):
            missing[block.name], printed = need, None
        elif block.how.get("in") != "rank":
            printed = run_block(block, folder, path)
            assert not block.broken_promises(printed), block.name
    if ranked := pages.in_ranks(page):
        printed = run([sys.executable, pages.__file__, page], folder, PATH=path)
        for block in ranked:
            assert not block.broken_promises(printed), block.name
    return missing


PAGE = """
```python
print(1 < 2)  # True
print("a",
      "b")
print(1 < 2)  # {first}: an explanation
```

<!-- output -->
```text
a b
{third}
True
```

<!-- in: rank -->
```python
print(comm.size == 2)  # True
if comm.rank == 1:
    print(comm.rank if "é" else "")  # {second}
```
"""


@pytest.mark.parametrize("wrong", [{}, {"first": "False"}, {"second": "2"}, {"third": "b a"}])
def test_a_block_is_compared_with_its_own_promises(wrong, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format_map({"first": "True", "second": "1", "third": "True"} | wrong))
    if wrong:
        with pytest.raises(AssertionError, match=r"page\.md:"):
            run_page(page, tmp_path)
    else:
        run_page(page, tmp_path)


def shims(folder):
    """The commands, of this interpreter and of this checkout."""
    (folder / "bin").mkdir()
    for name, module in COMMANDS.items():
        shim = folder / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        shim.chmod(0o755)
    return folder / "bin"


def run_block(block, folder, path):
    if block.language == "sh":
        return run(["bash", "-euo", "pipefail", "-c", block.code], folder, PATH=path)
    if block.language != "python":
        return ""
    if name := block.how.get("file"):
        (folder / name).write_text(block.code)  # other blocks run it
        return ""
    (folder / "block.py").write_text(program(block))
    return run([sys.executable, "block.py"], folder, PATH=path)


def program(block):
    if block.how.get("in") != "main":
        return f"{block.hidden}\n{block.marked}"
    body = "".join(f"    {line}\n" for line in block.marked.splitlines())
    return f'{block.hidden}\n\nif __name__ == "__main__":\n{body}'
