"""The whole engine under ThreadSanitizer: race_ranks.py with an instrumented build of the extensions, made in
a temporary copy of the checkout. It takes minutes, hence soak.

CPython is not instrumented, but ThreadSanitizer sees its locks, including the GIL. Each change of the GIL's
owner orders everything before it and everything after it, and may hide a missing order of ours. So everything
runs a second time with the interpreter's locks hidden. Accesses that the GIL protects are then reported too,
wrongly; only reports about modules that run without the GIL count.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from race_ranks import WORK

from tests.support import nogil_modules

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("gcc")
if COMPILER is None or not (ROOT / "src").is_dir():
    pytest.skip("needs gcc and the checkout", allow_module_level=True)

BUILD_LIMIT_S, LIMIT_S = 900, 300
BUILT_FROM = ("src", "shmring", "setup.py", "pyproject.toml", "README.md", "LICENSE")
UNSEEN = "called_from_lib:libpython3"  # the interpreter's locks
WITHOUT_GIL = nogil_modules.without_gil()
# An order dropped from sr_flag_publish, for the module in which all collectives stage and take.
ORDER = "atomic_exchange_explicit(flag, value, memory_order_seq_cst);\n    SR_FAULT"
SEEDED = ("_algorithms/choice",)

pytestmark = [pytest.mark.soak, pytest.mark.limit(BUILD_LIMIT_S + 60)]


def library():
    """ThreadSanitizer's, which has to be there before the interpreter is."""
    asked = subprocess.run([COMPILER, "-print-file-name=libtsan.so"], capture_output=True, text=True)
    if not Path(asked.stdout.strip()).is_absolute():
        pytest.skip("gcc has no ThreadSanitizer here")
    return asked.stdout.strip()


def build(folder):
    environ = {**os.environ, "SHMRING_SANITIZE": "thread"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    built = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=BUILD_LIMIT_S
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory):
    library()
    folder = tmp_path_factory.mktemp("tsan")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    return build(folder)


def seed(folder):
    """Builds SEEDED again without the order, and nothing else: the header stays as old as it was."""
    header = folder / "src/sync/flag.h"
    when = header.stat().st_mtime
    text = header.read_text()
    assert text.count(ORDER) == 1
    header.write_text(text.replace(ORDER, ORDER.replace("seq_cst", "relaxed")))
    os.utime(header, (when, when))
    for name in SEEDED:
        for path in [*folder.rglob(f"{name}.*.so"), *folder.rglob(f"{name}.o")]:
            path.unlink()
    return build(folder)


def run(folder, *names, suppressions=""):
    """Return the reports of ThreadSanitizer on race_ranks.py."""
    options = "atexit_sleep_ms=0 exitcode=66 history_size=4 suppress_equal_stacks=1"
    if suppressions:
        (folder / "unseen").write_text(suppressions + "\n")
        options += f" suppressions={folder / 'unseen'}"
    environ = {**os.environ, "LD_PRELOAD": library(), "TSAN_OPTIONS": options, "PYTHONPATH": str(folder)}
    prefix = ("setarch", "-R") if shutil.which("setarch") else ()  # before GCC 14 it needs these addresses
    command = [*prefix, sys.executable, ROOT / "tests/support/race_ranks.py", *names]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    if "FATAL: ThreadSanitizer" in ran.stderr:
        pytest.skip(f"ThreadSanitizer does not start here: {ran.stderr[:300]}")
    assert ran.returncode in (0, 66), f"after {ran.stdout!r}:\n{ran.stderr[-3000:]}"
    return [part for part in ran.stderr.split("=" * 18) if "WARNING: ThreadSanitizer" in part]


def run_unseen(folder, *names):
    """The same without the orders that the interpreter's locks make: of modules that do without them."""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        pytest.skip("the interpreter's locks cannot be told from others: it is no shared library")
    return [report for report in run(folder, *names, suppressions=UNSEEN) if is_without_gil(report)]


def is_without_gil(report):
    """Return whether both accesses are made by modules that run without the GIL, or by functions that they
    call."""
    accesses = re.findall(r"(?:thread T\d+|main thread)[^\n]*:\n((?:    #\d[^\n]*\n)+)", report)[:2]
    ours = [re.search(r"build/cython/shmring/([\w/]+)\.c:", access) for access in accesses]
    named = [found[1] for found in ours if found]
    return len(named) == 2 and all(name in WITHOUT_GIL for name in named)


@pytest.mark.parametrize("name", WORK)
def test_no_race_is_reported(instrumented, name):
    reports = run(instrumented, name)
    assert not reports, reports[0]


@pytest.mark.parametrize("name", WORK)
def test_no_race_is_hidden_by_the_gil(instrumented, name):
    reports = run_unseen(instrumented, name)
    assert not reports, reports[0]


def test_a_seeded_race_is_reported(instrumented, tmp_path):
    seeded = seed(shutil.copytree(instrumented, tmp_path / "seeded"))
    assert run(seeded, "near")
    assert run_unseen(seeded, "near")
