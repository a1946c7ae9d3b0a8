"""The table of thresholds that `python -m shmring.tools.tune` measured: its path, format, and machine.

A table is never trusted: it is used only if it is a small JSON file with numbers within limits.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
DISTANCES = ("any", "near", "far")  # "any": thresholds needed before the distance is known
_MOST_NBYTES = 1 << 16  # largest file

Values = dict[str, int]
Table = dict[str, Values]  # by distance
Limits = Mapping[str, tuple[int, int]]  # name → least and most


class Unusable(ValueError):
    """A table that cannot be used; the message says why."""


class Absent(Unusable):
    """The file does not exist, or this user may not read it."""


def default_path() -> Path:
    """Return the path in the user's cache folder. A relative XDG_CACHE_HOME is ignored, as it specifies.

    The path is relative if the user has no home.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"), "shmring", "tuning.json")


def machine() -> dict[str, Any]:
    """Return the facts that identify a kind of machine."""
    return {"cpu": f"{platform.machine()} {cpu_model()}", "cpus": os.cpu_count()}


def load(path: Path, limits: Limits) -> dict[int, Table]:
    """Return the tables of a file by number of ranks. Raises Absent or Unusable if there are none."""
    text = _read(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise Unusable("it is not JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Unusable(f"it is not of format {FORMAT}")
    if content.get("machine") != machine():
        raise Unusable(f"it was measured on another machine, {content.get('machine')!r:.200}")
    return _checked(content.get("tables"), limits)


def save(path: Path, tables: Mapping[int, Table], limits: Limits) -> None:
    """Replace the file atomically, so that no process reads an incomplete file."""
    content = {"format": FORMAT, "machine": machine(), "tables": {str(n): t for n, t in tables.items()}}
    _checked(content["tables"], limits)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise Absent(f"it cannot be opened: {error.strerror}") from error
    except OSError as error:
        raise Unusable(f"it cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable("it is not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise Unusable("it belongs to another user")
        with open(fd, "rb", closefd=False) as file:
            text = file.read(_MOST_NBYTES + 1)
    except OSError as error:
        raise Unusable(f"it cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    if len(text) > _MOST_NBYTES:
        raise Unusable(f"it is longer than {_MOST_NBYTES} bytes")
    return text


def _checked(tables: Any, limits: Limits) -> dict[int, Table]:
    if not isinstance(tables, dict):
        raise Unusable("it has no tables")
    found = {}
    for ranks, table in tables.items():
        if not (isinstance(ranks, str) and ranks.isascii() and ranks.isdigit() and len(ranks) < 6):
            raise Unusable(f"{ranks!r:.40} is not a number of ranks")
        if not isinstance(table, dict):
            raise Unusable(f"the entry of {ranks} ranks is not a JSON object")
        if not set(table) <= set(DISTANCES):
            raise Unusable(f"the entry of {ranks} ranks has a key other than {', '.join(DISTANCES)}")
        for values in table.values():
            _check_values(values, limits)
        found[int(ranks)] = {distance: dict(values) for distance, values in table.items()}
    return found


def _check_values(values: Any, limits: Limits) -> None:
    if not isinstance(values, dict):
        raise Unusable("it has a table that is not a JSON object of names and numbers")
    for name, value in values.items():
        if name not in limits:
            raise Unusable(f"it names {name!r:.40}, which this version of shmring does not know")
        least, most = limits[name]
        if type(value) is not int or not least <= value <= most:
            raise Unusable(f"{name} is {value!r:.40}; allowed: {least} to {most}")


@functools.cache
def cpu_model() -> str:
    """Return the kernel's name of the CPU, or on other architectures than x86 its identifiers."""
    wanted = ("model name", "CPU implementer", "CPU part")
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file.read(4096).splitlines():
                name, _, value = line.partition(":")
                if name.strip() in wanted:
                    found.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    return " ".join(found[name] for name in wanted if name in found)
