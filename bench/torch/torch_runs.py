"""Programs under torch that bench_torch.py runs as a whole: the example's training, and `import torch`.

Starts them and reads their output. Depends on what examples/torch_ddp.py prints.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.tables import aligned

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_ddp.py"
TRAINING_LIMIT_S = 600
IMPORT_TARGET_MS = 1.0
STEP_TARGET, SHARE_TARGET = 1.0, 5.0  # times gloo's: the step, and the communication's share of it
LAST_LINE = "checksum of the weights"
SHARED = "shared"  # shmring, with DDP's buckets in memory that all ranks map
# The registration by itself, as torch does it last when it is imported.
REGISTER = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
from time import perf_counter
began = perf_counter()
from shmring.adapters._torch.entry import register
register()
print(1e3 * (perf_counter() - began))
"""
IMPORT = """
from time import perf_counter
began = perf_counter()
import torch
{register}
print(1e3 * (perf_counter() - began))
"""


# ---- import torch ----


def import_ms(python: Path, environment: dict[str, str], times: int) -> dict[str, list[float]]:
    """Return milliseconds, each in a fresh interpreter, in turn."""
    register = "from shmring.adapters._torch.entry import register; register()"
    programs = {"without": IMPORT.format(register=""), "with": IMPORT.format(register=register),
                "registration": REGISTER}
    environment = {**os.environ, **environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(times):
        for name, program in programs.items():
            done = subprocess.run([str(python), "-c", program], env=environment, check=True, text=True,
                                  stdout=subprocess.PIPE)
            found[name].append(float(done.stdout))
    return found


def import_lines(found: dict[str, list[float]]) -> str:
    without, with_it, alone = (statistics.median(found[name]) for name in ("without", "with", "registration"))
    verdict = "met" if alone < IMPORT_TARGET_MS else "missed"
    return (f"import torch: {without:.0f} ms, with the entry point {with_it:.0f} ms\nthe entry point by "
            f"itself: {alone:.2f} ms (< {IMPORT_TARGET_MS:g}: {verdict}), at best "
            f"{min(found['registration']):.2f} ms")


# ---- training ----


@dataclass(frozen=True)
class Training:
    """The figures that one run of the example printed."""

    backend: str  # or SHARED
    ranks: int
    width: int
    bucket_mb: float
    gradients_mib: float
    step_ms: float
    communication: float
    checksum: float
    last_loss: float


def train_in_turn(python: Path, environment: dict[str, str], options: argparse.Namespace) -> list[Training]:
    """Train with every setting in every round, each backend in turn, and shmring with shared buckets."""
    found = []
    ways = [*options.only, *([SHARED] if "shmring" in options.only else [])]
    for width, bucket_mb in itertools.product(options.widths, options.buckets_mb):
        for round_number in range(min(options.rounds, 3)):
            for backend in ways[:: -1 if round_number % 2 else 1]:
                few = 4 if options.quick else 60
                training = train(python, environment, backend, options.ranks[0], width, bucket_mb, few)
                found.append(training)
    return found


def train(python: Path, environment: dict[str, str], backend: str, ranks: int, width: int, bucket_mb: float,
          steps: int) -> Training:
    launch = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    named, flags = ("shmring", ["--share-buckets"]) if backend == SHARED else (backend, [])
    settings = {"backend": named, "width": width, "bucket-mb": bucket_mb, "steps": steps, "repeats": steps}
    arguments = flags + [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    done = subprocess.run([*launch, str(EXAMPLE), *arguments], env={**os.environ, **environment}, text=True,
                          capture_output=True, timeout=TRAINING_LIMIT_S)
    is_whole = backend == "gloo" and LAST_LINE in done.stdout  # its threads abort a rank at times
    if done.returncode and not is_whole:
        raise SystemExit(f"{EXAMPLE.name} failed:\n{done.stderr[-4000:]}")
    return Training(backend, ranks, width, bucket_mb, *figures(done.stdout))


def figures(text: str) -> tuple[float, float, float, float, float]:
    """Return MiB of gradients, ms per step, the communication's share of it, checksum and last loss."""

    def after(pattern: str) -> float:
        match = re.search(pattern, text)
        if match is None:
            raise SystemExit(f"{EXAMPLE.name} printed no {pattern}:\n{text}")
        return float(match[1])

    return (after(r"([\d.]+) MiB of gradients"), after(r"step ([\d.]+) ms"),
            after(r"communication (-?[\d.]+)%") / 100, after(LAST_LINE + r" ([\d.]+)"),
            after(r"last ([\d.]+)"))


def training_table(trainings: Sequence[Training]) -> str:
    """Format medians over the rounds; the checksums show whether all reached the same weights."""
    ours = ["shmring", "gloo / shmring", SHARED, f"gloo / {SHARED}"]
    lines = [["width", "gradients", "buckets", "step, ms: gloo", *ours,
              "communication: gloo", *ours, "same weights"]]
    for setting, runs in itertools.groupby(trainings, key=lambda run: (run.width, run.bucket_mb)):
        lines.append(_training_row(setting, list(runs)))
    return f"{trainings[0].ranks} ranks, DistributedDataParallel, examples/torch_ddp.py\n" + aligned(lines)


def _training_row(setting: tuple[int, float], runs: Sequence[Training]) -> list[str]:
    steps, shares = ({backend: statistics.median(getattr(run, name) for run in runs if run.backend == backend)
                      for backend in dict.fromkeys(run.backend for run in runs)}
                     for name in ("step_ms", "communication"))
    checksums = [run.checksum for run in runs]
    same = max(checksums) - min(checksums) <= 1e-4 * max(checksums)
    what = [str(setting[0]), f"{runs[0].gradients_mib:.2f} MiB", f"{setting[1]:g} MB"]
    return [*what, *_beside_gloo(steps, "{:.2f}", STEP_TARGET), *_beside_gloo(shares, "{:.1%}", SHARE_TARGET),
            "yes" if same else "NO"]


def _beside_gloo(figures_of: dict[str, float], form: str, target: float) -> list[str]:
    """Return gloo's figure, and each of ours with gloo's over it, as far as they exist."""
    gloo = figures_of.get("gloo")
    texts = ["-" if gloo is None else form.format(gloo)]
    for name in ("shmring", SHARED):
        ours = figures_of.get(name)
        texts += ["-" if ours is None else form.format(ours), _ratio(gloo, ours, target)]
    return texts


def _ratio(gloo: float | None, ours: float | None, target: float) -> str:
    if gloo is None or ours is None:
        return "-"
    ratio = gloo / ours if ours > 0 else float("inf")
    return f"{ratio:.2f} (≥ {target:g}: {'met' if ratio >= target else 'missed'})"

