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
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    counts = found.stdout.splitlines()[-1]
    assert ast.literal_eval(counts)["passed"] > 90  # gloo passes 94 to 97
