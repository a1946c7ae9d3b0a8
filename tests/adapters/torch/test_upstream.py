"""torch's own tests of torch.distributed, on shmring in the place of gloo. See upstream.py."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")  # torch's tests import it

UPSTREAM = Path(__file__).with_name("upstream.py")


@pytest.mark.slow
@pytest.mark.limit(600)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_test_of_torch_passes(size):
    command = [sys.executable, str(UPSTREAM), "--size", str(size)]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    *lines, counts = found.stdout.splitlines()
    failed = [line for line in lines if line.startswith("failed ")]
    assert not failed, found.stdout[-8000:]
    assert found.returncode == 0, found.stdout[-8000:]
    assert ast.literal_eval(counts)["passed"] > 90  # gloo passes 94 to 97
