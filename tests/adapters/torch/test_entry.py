"""The entry point by which torch finds the backend, and its cost."""

import importlib.metadata
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

GROUPS = ("torch.backends", "torch.distributed.backends")


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_torch_finds_it_by_itself():
    if not importlib.metadata.entry_points(group=GROUPS[0], name="shmring"):
        pytest.skip("shmring is on the path here, and not installed")
    for group in GROUPS:
        (entry,) = importlib.metadata.entry_points(group=group, name="shmring")
        assert entry.value == "shmring.adapters._torch.entry:register"
    done = run("""if True:
        import torch.distributed as dist
        store = dist.HashStore()
        dist.init_process_group("shmring", store=store, rank=0, world_size=1)
        assert dist.get_backend() == "shmring"
        dist.all_reduce(__import__("torch").ones(1))
        dist.destroy_process_group()
    """)
    assert done.returncode == 0, done.stderr


def test_being_found_loads_nothing_else():
    done = run("""if True:
        import sys
        import shmring.adapters._torch.entry
        loaded = {name for name in sys.modules if name.partition(".")[0] in ("numpy", "shmring", "torch")}
        packages = {"shmring", "shmring.adapters", "shmring.adapters._torch"}
        assert loaded == {*packages, "shmring.adapters._torch.entry"}, loaded
    """)
    assert done.returncode == 0, done.stderr


def test_errors_there_are_only_logged():
    done = run("""if True:
        import sys, types
        sys.modules["torch"] = types.ModuleType("torch")
        sys.modules["torch.distributed"] = None
        from shmring.adapters._torch import entry
        entry.register()
    """)
    assert done.returncode == 0, done.stderr
    assert "the backend shmring was not registered" in done.stderr
