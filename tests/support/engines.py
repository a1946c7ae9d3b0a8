"""For tests under engines of other projects: each runs in processes of its own."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shmring

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KEY = "0123456789abcdef0123456789abcdef"
WATCHDOG_S = 100
LAUNCHERS = ("SHMRING_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")  # of the launcher of the tests themselves


def needs(*packages):
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def environment(**more):
    ours = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
    path = os.pathsep.join([str(PACKAGE_PARENT), *filter(None, [ours.get("PYTHONPATH")])])
    return {**ours, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def start(*command, **more):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([str(part) for part in command], env=environment(**more), **pipes)


def run_ranks(nranks, program, *options):
    """Run a program under shmrun to its end."""
    command = [sys.executable, "-m", "shmring.run", "--no-prefix", "-n", nranks, program, *options]
    return subprocess.run(
        [str(part) for part in command], env=environment(), capture_output=True, text=True, timeout=WATCHDOG_S
    )


def rows_of(table):
    """By its first cell, the other cells of each row of a Markdown table."""
    lines = re.findall(r"^\|.*", table, re.M)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: cells for name, *cells in rows[2:]}


def output_of(*processes):
    """Return the output of each process, after all have ended with 0."""
    try:
        texts = [process.communicate(timeout=WATCHDOG_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(texts)
    return texts if len(texts) > 1 else texts[0]


def write_script(folder, code):
    """The path of a new file in the folder that holds the code."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(code))
    return path


def assert_well(process):
    """Check that the script has printed this word at its end: engines may print more after it."""
    text = output_of(process)
    assert "well" in text.splitlines(), text


def assert_pi(text, ranks, hosts=None):
    found = re.search(r"pi is about ([\d.]+), say (\d+) rank\(s\)(?: on (\d+) host)?", text)
    assert found, text
    assert abs(float(found[1]) - 3.14159) < 0.02
    assert int(found[2]) == ranks
    assert hosts is None or int(found[3]) == hosts
