"""Programs that train over gloo, on it and with shmring in its place: python bench/torch/bench_clients.py

Runs the programs of tests/adapters/torch/clients whose package is installed, each under torchrun on 2 ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests" / "support")]  # for bench, and for torch_ranks

from engines import environment  # noqa: E402  (found by the line above)
from torch_ranks import as_if_installed  # noqa: E402

from bench.common.tables import aligned  # noqa: E402

CLIENTS = CHECKOUT / "tests" / "adapters" / "torch" / "clients"
PACKAGES = {"train_transformers": "transformers", "train_lightning": "lightning", "train_ignite": "ignite",
            "train_deepspeed": "deepspeed", "train_pipeline": "torch", "train_fsdp": "torch",
            "train_ddp": "torch"}
TARGET = 0.6  # of gloo's time
LIMIT_S = 300


def seconds(program: str, replaces: str) -> float:
    """Return the seconds of training that the program reports."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                   str(CLIENTS / f"{program}.py"), folder]
        environ = environment(**as_if_installed(Path(folder)), SHMRING_REPLACES=replaces)
        # gloo may abort a rank whose peer ends first: the exit status says nothing about the training.
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S,
                              check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"kind"')]
    if not lines:
        raise SystemExit(f"{program} reported nothing:\n{done.stdout}{done.stderr}")
    report = json.loads(lines[0])
    assert (report["kind"] == "Replacement") == bool(replaces), report
    return float(report["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds behind every median (%(default)s)")
    parser.add_argument("--only", nargs="*", choices=list(PACKAGES), default=list(PACKAGES))
    parser.add_argument("--json", type=Path, help="also write all seconds to this file")
    options = parser.parse_args()
    programs = [name for name in options.only if importlib.util.find_spec(PACKAGES[name])]
    found: dict[str, dict[str, list[float]]] = {name: {"": [], "gloo": []} for name in programs}
    for _ in range(options.rounds):
        for name in programs:
            for replaces in ("", "gloo"):
                found[name][replaces].append(seconds(name, replaces))
    rows = [["program", "gloo, s", "in its place, s", "share", "target"]]
    for name, by_backend in found.items():
        gloo, ours = (statistics.median(by_backend[replaces]) for replaces in ("", "gloo"))
        reached = "reached" if ours <= TARGET * gloo else "missed"
        rows.append([name, f"{gloo:.3f}", f"{ours:.3f}", f"{ours / gloo:.2f}", reached])
    print(aligned(rows))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
