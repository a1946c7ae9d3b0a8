"""The hand-written stubs (.pyi) agree with the compiled modules."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shmring

PACKAGE = Path(shmring.__file__).parent
ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
ALLOWED = ROOT / ".ci" / "stubtest_allowlist"


@pytest.mark.slow
@pytest.mark.limit(300)
def test_stubs_agree_with_the_compiled_modules():
    pytest.importorskip("mypy.stubtest")
    stubs = sorted(PACKAGE.rglob("*.pyi"))
    modules = [".".join(stub.relative_to(PACKAGE.parent).with_suffix("").parts) for stub in stubs]
    assert len(modules) > 15
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "--ignore-disjoint-bases"]
    done = subprocess.run(
        [*command, "--allowlist", ALLOWED, *modules],
        env={**os.environ, "MYPYPATH": str(PACKAGE.parent), "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_type_of_stats_has_its_keys():
    keys = set()
    for folder, file, name in (("_engine", "state.pyi", "_Stats"), ("_comm", "comm.pyi", "_CommStats")):
        tree = ast.parse((PACKAGE / folder / file).read_text())
        stats = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        keys |= {line.target.id for line in stats.body}
    with shmring.init() as comm:
        assert keys == comm.stats().keys()
