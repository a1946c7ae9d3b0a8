"""The C probe: compiled once into the cache folder, then loaded with ctypes.

Compiles and loads probe.c, and defines near and far. Independent of shmring.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("probe.c")

# Measured: 42-60 ns where two virtual CPUs are one physical core, 78-125 where they share an L3, from 200 on
# where they do not, and nothing between.
ONE_CORE_BELOW_NS = 70.0
NEAR_BELOW_NS = 180.0
UNKNOWN_NS = -1.0


def label(round_trip_ns: float) -> str:
    """Return one core, near, far or unknown."""
    if round_trip_ns < 0:
        return "unknown"
    if round_trip_ns < ONE_CORE_BELOW_NS:
        return "one core"
    return "near" if round_trip_ns < NEAR_BELOW_NS else "far"


def distance(before_ns: float, after_ns: float) -> str:
    """Return the label of a sample; mixed if it changed while the sample was taken."""
    before, after = label(before_ns), label(after_ns)
    return before if before == after else "mixed"


def compile_probe(folder: Path) -> Path | None:
    """Return the shared library, compiled if this source has not been compiled yet; None without a C
    compiler."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = folder / f"probe-{digest}.so"
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    flags = ["-O2", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(unfinished)], check=True)
    unfinished.rename(library)
    return library


class Probe:
    """The functions of probe.c. Without a library every round trip is unknown."""

    def __init__(self, library: Path | None) -> None:
        self.c = None
        if library is not None:
            self.c = ctypes.CDLL(str(library))
            address, size, count = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long
            self.c.probe_round_trip_ns.restype = ctypes.c_double
            self.c.probe_round_trip_ns.argtypes = [ctypes.c_int, ctypes.c_int]
            self.c.probe_copy.argtypes = [address, address, size, count, ctypes.c_int]
            self.c.probe_write_and_copy.argtypes = self.c.probe_copy.argtypes
            self.c.probe_write.argtypes = [address, size, count]

    def round_trip_ns(self, cpus: list[int]) -> float:
        """Return the time from the first CPU to the one farthest from it and back; UNKNOWN_NS if there is no
        other."""
        others = [cpu for cpu in cpus if cpu != cpus[0]]
        if self.c is None or not others:
            return UNKNOWN_NS
        return max(float(self.c.probe_round_trip_ns(cpus[0], cpu)) for cpu in others)
