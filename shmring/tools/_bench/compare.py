"""Read figures of other runs for `shmring bench --compare`: its own JSON or that of bench/peers/peers.py."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .calls import Job

SCHEMA = 1  # of the JSON of `shmring bench`
PEERS_SCHEMA = 1  # of the JSON of bench/peers/peers.py
PEERS_DTYPE, PEERS_OP = "float32", "sum"  # the only ones in peers.py
_NAMES = {"mpich": "MPICH", "openmpi": "Open MPI", "intel": "Intel MPI", "gloo": "Gloo"}
_ORDINARY = ("blocking", "in place", "private")  # variants that a label omits


class Unusable(ValueError):
    """A file's figures cannot be compared with this run; the message says why."""


@dataclass(frozen=True)
class Curve:
    """The µs of a call by bytes."""

    label: str
    us: dict[int, float]


@dataclass(frozen=True)
class _Figure:
    """One point of a curve."""

    label: str
    ranks: int
    distance: str
    nbytes: int
    us: float


@dataclass(frozen=True)
class Others:
    """The figures of a file for the same call."""

    path: Path
    figures: tuple[_Figure, ...]

    @property
    def ranks(self) -> set[int]:
        """Return the numbers of ranks that have figures."""
        return {figure.ranks for figure in self.figures}

    def curves(self, ranks: int, distance: str) -> list[Curve]:
        """Return the curves for a number of ranks, of this distance if the file has it, else of another."""
        mine = [figure for figure in self.figures if figure.ranks == ranks]
        found: dict[str, dict[int, float]] = {}
        far = {figure.distance for figure in mine}
        taken = distance if distance in far else min(far, default="")
        for figure in mine:
            if figure.distance == taken:
                label = figure.label + (f", {taken}" if taken != distance else "")
                found.setdefault(label, {})[figure.nbytes] = figure.us
        return [Curve(label, us) for label, us in found.items()]


def curves_of(files: Sequence[Others], ranks: int, distance: str) -> list[Curve]:
    """Return the curves of all files. A label that occurs twice gets the file's name appended."""
    found = [(one.path, curve) for one in files for curve in one.curves(ranks, distance)]
    often = Counter(curve.label for _, curve in found)
    return [
        curve if often[curve.label] == 1 else Curve(f"{curve.label} ({path})", curve.us)
        for path, curve in found
    ]


def read(path: Path) -> Any:
    """Return a file's JSON. Raises Unusable if the file is unreadable or not JSON."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise Unusable(f"{path} is not JSON") from None


def load(path: Path, job: Job) -> Others:
    """Return a file's figures for this call. Raises Unusable if there are none."""
    found = read(path)
    try:
        figures = tuple(_figures(path, found, job))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, Unusable):
            raise
        raise Unusable(
            f"{path} is neither what `shmring bench --output` nor what bench/peers/peers.py --json writes"
        ) from None
    if not figures:
        raise Unusable(f"{path} has no figures of {job.call}, input {_input(job.written)}")
    return Others(path, figures)


def _figures(path: Path, found: Any, job: Job) -> Iterable[_Figure]:
    own = found.get("program") == "shmring bench"
    if found["schema"] != (SCHEMA if own else PEERS_SCHEMA):
        raise Unusable(f"{path} is of another version: schema {found['schema']}")
    options = found["options"]
    there = _facts(options) if own else {"call": options["call"], "dtype": PEERS_DTYPE, "op": PEERS_OP}
    here = _facts(asdict(job))
    for name, text in there.items():
        if text != here[name]:
            raise Unusable(f"{path} has another {name} than this run: {text}, not {here[name]}")
    return _own(path, found) if own else _peers(found, job)


def _facts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a Job that both runs must share."""
    return {name: options[name] for name in ("call", "dtype", "op", "root")} | {
        "input": _input(options["written"])
    }


def _own(path: Path, found: Any) -> list[_Figure]:
    algorithm = found["options"]["algorithm"]
    label = f"{path.stem}, {algorithm}" if algorithm else path.stem
    return [
        _Figure(label, found["ranks"], found["distance"], row["nbytes"], float(row["p50_us"]))
        for row in found["rows"]
    ]


def _peers(found: Any, job: Job) -> list[_Figure]:
    return [
        _Figure(_label(one), one["ranks"], one["distance"], one["nbytes"], float(one["us"]))
        for one in found["medians"]
        if one["contestant"] != "copy" and one["input"] == _input(job.written)
    ]


def _label(one: dict[str, Any]) -> str:
    name = _NAMES.get(one["contestant"], str(one["contestant"]))
    return name if one["variant"] in _ORDINARY else f"{name}, {one['variant']}"


def _input(written: bool) -> str:
    return "written" if written else "reused"
