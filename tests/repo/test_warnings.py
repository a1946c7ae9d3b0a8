"""Cython gives no warning but those that .ci/find_warnings.py allows; CI also runs it with GCC and Clang."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
SCRIPT = ROOT / ".ci" / "find_warnings.py"
if not SCRIPT.is_file() or importlib.util.find_spec("Cython") is None:
    pytest.skip("needs the checkout and Cython", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.limit(300)
def test_cython_warns_of_nothing():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "files translated, 0 compiled, 0 findings" in done.stdout


def test_a_warning_is_found(tmp_path):
    """Find the warnings of Cython and of a C compiler in files that have one."""
    spec = importlib.util.spec_from_file_location("warnings_of_all", SCRIPT)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    (tmp_path / "a.pyx").write_text("def f():\n    stray = _kept = 1\n")
    found = tool.translate("a", [tmp_path / "a.pyx"], tmp_path / "made")
    assert len(found) == 1
    assert "'stray'" in found[0]
    (tmp_path / "b.c").write_text("int f(int unused) { return 1; }\n")
    assert "unused" in tool.compile_one("cc", tmp_path / "b.c")[0]
