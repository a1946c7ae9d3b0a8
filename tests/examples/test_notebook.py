"""The notebook runs from its first cell to its last in a kernel of Jupyter, and each cell shows what it
should."""

import base64
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engines import needs

import shmring

pytestmark = needs("nbclient", "ipykernel", "matplotlib", "cloudpickle")

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3").execute(cwd=sys.argv[2])
nbformat.write(notebook, sys.argv[3])
"""
WATCHDOG_S = 150

pytestmark = pytest.mark.limit(WATCHDOG_S + 10)


def outputs_of_a_run(folder):
    """Return the outputs of each cell, by its name, from a process of its own, which takes Jupyter's sockets
    along."""
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, NOTEBOOK, folder, folder / "done.ipynb"],
        env={
            **{name: text for name, text in os.environ.items() if name != "MPLBACKEND"},
            "PYTHONPATH": str(PACKAGE_PARENT),
            "HOME": str(folder),  # no user's settings, and no traces there
            "JUPYTER_RUNTIME_DIR": str(folder),
        },
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((folder / "done.ipynb").read_text())["cells"]
    return {cell["id"]: cell["outputs"] for cell in cells if cell["cell_type"] == "code"}


def shown(outputs, cell, kind="text/plain"):
    """Return all outputs of one kind of a cell: its last value, a picture, or its printed text."""
    parts = (part.get("text") or part["data"][kind] for part in outputs[cell])
    return "".join(text for part in parts for text in part)


def assert_mean(printed):
    found = re.match(r"([\d.]+) in (\d) way, np.mean says ([\d.]+)", printed)
    mean = np.random.default_rng(1).exponential(size=100_000).mean()
    assert [float(figure) for figure in found.groups()] == pytest.approx([mean, 1, mean], abs=2e-6)


def assert_mandelbrots(png):
    from matplotlib.image import imread

    pixels = imread(io.BytesIO(base64.b64decode(png)))[:, :, :3]
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    brightest = np.isclose(pixels, [0.988, 0.992, 0.749], atol=0.01).all(axis=2)  # of the palette: never left
    assert 0.1 < brightest.mean() < 0.3


@pytest.mark.slow
def test_each_cell_shows_what_it_should(tmp_path):
    outputs = outputs_of_a_run(tmp_path)
    assert shown(outputs, "sum-of-ranks").count("array([6., 6., 6.])") == 4
    assert shown(outputs, "another-method").count("array([1., 1., 1.])") == 2
    assert_mean(shown(outputs, "arguments-and-results"))
    assert_mandelbrots(shown(outputs, "picture", "image/png"))
    assert shown(outputs, "a-rank-fails") == "rank 2: division by zero\n"
    assert shown(outputs, "a-rank-is-killed") == "rank 1 ended: killed by SIGKILL\n"
    assert re.search(r"rank 1 called all_reduce\(float64\[4\], sum\)", shown(outputs, "a-mismatch"))


def test_the_notebook_is_kept_without_what_it_shows():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)
    assert {cell["execution_count"] for cell in cells} == {None}
