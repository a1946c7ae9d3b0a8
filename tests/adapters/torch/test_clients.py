"""Libraries that train over gloo, unchanged: with gloo, in its place, and by the name shmring where they take
a name. Each program runs under torchrun on 2 ranks, and its results must not depend on the backend.

The libraries are not in '.[torch]': pip install accelerate transformers lightning pytorch-ignite deepspeed.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from engines import needs, output_of, start, write_script
from torch_ranks import as_if_installed

CLIENTS = Path(__file__).parent / "clients"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
# A program, the package that it needs, and whether it takes any backend's name.
PROGRAMS = [
    ("train_ddp", "torch", True),
    ("train_fsdp", "torch", True),
    ("train_pipeline", "torch", True),
    ("train_lightning", "lightning", True),  # averages integers by AVG, except on gloo
    ("train_deepspeed", "deepspeed", True),
    ("train_transformers", "transformers", False),
    ("train_ignite", "ignite", False),
]


def train(program, folder, **environ):
    """Return what the program reports."""
    process = start(*TORCHRUN, CLIENTS / f"{program}.py", folder, **as_if_installed(folder), **environ)
    text = process.communicate(timeout=100)[0]
    lines = [line for line in text.splitlines() if line.startswith('{"kind"')]
    assert len(lines) == 1, text
    # gloo aborts a rank whose peer ends first, if the program does not destroy the group.
    assert process.returncode == 0 or "SHMRING_REPLACES" not in environ, text
    return json.loads(lines[0])


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize(("program", "package", "takes_names"), PROGRAMS, ids=[one[0] for one in PROGRAMS])
def test_a_client_gets_the_results_of_gloo(tmp_path, program, package, takes_names):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"not installed: {package}")
    expected = train(program, tmp_path / "gloo")
    assert expected["kind"] == "ProcessGroup"
    found = {"Replacement": train(program, tmp_path / "replaced", SHMRING_REPLACES="gloo")}
    assert found["Replacement"]["backend"] == expected["backend"]
    if takes_names:
        found["Group"] = train(program, tmp_path / "shmring", CLIENT_BACKEND="shmring")
    for kind, report in found.items():
        assert report["kind"] == kind
        assert report["result"] == pytest.approx(expected["result"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@needs("accelerate")
@pytest.mark.limit(200)
def test_accelerate_passes_its_own_tests(tmp_path):
    script = importlib.util.find_spec("accelerate.test_utils.scripts.test_script").origin
    how = {"ACCELERATE_USE_CPU": "true", "SHMRING_REPLACES": "gloo"}
    text = output_of(start(*TORCHRUN, script, **as_if_installed(tmp_path), **how))
    assert "Test reinstantiated state" in text  # its last one


DIES_ONCE = """
    import os, signal
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(3)
    dist.all_reduce(x)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if life == 0 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    kind = type(dist.group.WORLD).__name__
    print(f"{kind}: rank {dist.get_rank()} in life {life}: {x.tolist()}", flush=True)
    dist.destroy_process_group()
"""


def test_torchrun_restarts_ranks_in_the_place_of_gloo(tmp_path):
    how = {**as_if_installed(tmp_path), "SHMRING_REPLACES": "gloo"}
    text = output_of(start(*TORCHRUN, "--max-restarts", 1, write_script(tmp_path, DIES_ONCE), **how))
    for rank in range(2):
        assert f"Replacement: rank {rank} in life 1: [4.0, 4.0, 4.0]" in text
        assert f"rank {rank} in life 0" not in text
