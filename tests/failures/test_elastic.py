"""Launchers that let the other ranks go on when one fails, and the example that uses this."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import shmring

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "elastic_training.py"
WATCHDOG_S = 120


def lose_some(comm, losses):
    """End ranks as `losses` says, {rank: how}; the others print how many they are at the end."""
    how = losses.get(comm.rank)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise KeyError("lost")
    while True:
        try:
            comm.all_reduce(np.ones(3))
            if comm.size + len(losses) == 4:
                return comm.size
        except shmring.Error:
            comm = comm.shrink()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_spawn_gives_exceptions_in_place_of_results(method):
    losses = {1: "killed", 3: "raises"}
    results = shmring.spawn(lose_some, 4, (losses,), method=method, return_exceptions=True)
    assert results[0] == results[2] == 2
    assert isinstance(results[1], shmring.RankFailed)
    assert results[1].rank == 1
    assert "SIGKILL" in results[1].cause
    assert isinstance(results[3], KeyError)
    assert results[3].rank == 3


def stay(comm):
    if comm.rank:
        time.sleep(60)
    return comm.rank


def test_a_run_that_takes_too_long_gives_what_there_is():
    results = shmring.spawn(stay, 3, timeout=5, return_exceptions=True)
    assert results[0] == 0
    assert [type(result) for result in results[1:]] == [shmring.Timeout] * 2


def keep_going(*arguments, nprocs=4):
    done = subprocess.run(
        [sys.executable, "-m", "shmring.run", "--keep-going", "-n", str(nprocs), *arguments],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )
    return done.returncode, done.stdout, done.stderr


def test_all_ranks_failing_is_a_failure_with_the_first_ones_code(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, time; r = int(os.environ['SHMRING_RANK']); time.sleep(2 * r); os._exit(7 + r)"
    )
    code, _, text = keep_going(str(script), nprocs=2)
    assert code == 7
    assert "rank 0 of 2 ended: exit status 7" in text
    assert "rank 1 of 2 ended: exit status 8" in text
    assert "rank 0 of 2 failed first" in text


@pytest.mark.slow
@pytest.mark.parametrize("replace", [False, True])
def test_training_goes_on_as_if_nothing_had_happened(replace):
    pytest.importorskip("sklearn")
    options = ["--kill", "2@60", "--kill", "0@150", "--kill", "3@150", *["--replace"] * replace]
    code, out, text = keep_going(str(EXAMPLE), "--steps", "220", "--hidden", "16", *options)
    assert code == 0, out + text
    assert re.search(r"1\| step 220: loss", out), out
    assert float(re.search(r"run of one rank: ([\d.e+-]+)", out)[1]) <= 1e-5
    assert re.search(rf"step \d+: rank 2 is gone, {4 if replace else 3} go on", out), out
    assert re.search(r"step 200: 4 rank", out) if replace else re.search(r"step 200: 1 rank", out), out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] / 4
    assert text.count("killed by SIGKILL") == 3
