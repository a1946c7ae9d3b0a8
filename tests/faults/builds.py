"""Builds of the engine for tests alone: with points at which ranks die, and without checks (src/fault.h).

Owns the folder build/faults, in which each lies under a hash of what went into it. May know: the checkout's
sources, and where shmring is installed. It takes 10 to 30 s of two cores, once for each state of the sources.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "faults"
TRANSLATED = ROOT / "build" / "cython"  # setup.py's, when it has built in place
# Whatever publishes, gives credit or waits; the kernels, which take a minute, have no such points.
MODULES = (
    "_chain",
    "_delivery",
    "_distance",
    "_engine",
    "_exchange",
    "_halving",
    "_messages",
    "_pipelines",
    "_progress",
    "_schedules",
    "_state",
    "_trees",
    "_waiting",
    "carrier",
)
FAULTS = ("-DSR_FAULTS", "-O1")
CHECKED = ("-O3",)
UNCHECKED = ("-DSR_NO_CHECKS", "-O3")
FLAGS = (
    "-std=c11",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-g0",
    "-w",
    "-D_GNU_SOURCE",
    "-DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION",
)
FAULTS_LIBRARY = "faults.so"
# faults.c of the build that this process uses: there, for all to see, before the extensions that call it.
faults: ctypes.CDLL | None = None


class NoBuild(Exception):
    """Why there can be no such build here: no compiler, no Cython, no sources."""


def build(flags: tuple[str, ...] = FAULTS) -> Path:
    """The folder that has a package shmring built so; made unless it is there already."""
    if not (ROOT / "src").is_dir():
        raise NoBuild("the checkout's sources are not there")
    folder = CACHE / _digest(flags)
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="making-") as made:
            _make(Path(made), flags)
            Path(made).chmod(0o755)
            # Two sessions may come to this at once: either's is as good.
            if not folder.exists():
                shutil.copytree(made, folder, symlinks=True)
    return folder


def installed() -> Path:
    """The folder of the package that is built: the checkout may come first, and have sources alone."""
    for path in [*sys.path, ROOT]:
        folder = Path(path or ".").resolve() / "shmring"
        if any(folder.glob("_kernels*.so")) and CACHE not in folder.parents:
            return folder
    raise NoBuild("shmring is not built")


def _sources() -> list[Path]:
    here = Path(__file__).parent
    names = sorted(path for path in (ROOT / "src").iterdir() if path.suffix in (".c", ".h"))
    return [*names, *sorted((ROOT / "shmring").glob("*.p[yx]*")), here / "faults.c", Path(__file__)]


def _digest(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((flags, sys.version, str(installed()))).encode())
    for path in _sources():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _make(folder: Path, flags: tuple[str, ...]) -> None:
    package = folder / "shmring"
    package.mkdir()
    for path in installed().iterdir():
        if path.name.partition(".")[0] not in MODULES or path.suffix != ".so":
            (package / path.name).symlink_to(path)
    jobs = [
        [
            *_compiler(flags),
            *_translated(folder, name),
            *_libraries(),
            "-o",
            str(package / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"),
        ]
        for name in MODULES
    ]
    if flags is FAULTS:
        jobs.append(
            [*_compiler(flags), str(Path(__file__).parent / "faults.c"), "-o", str(folder / FAULTS_LIBRARY)]
        )
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_run, jobs))


def _compiler(flags: tuple[str, ...]) -> list[str]:
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        raise NoBuild(f"there is no C compiler {compiler!r}")
    return [compiler, "-shared", "-pthread", *FLAGS, *flags, *_includes()]


def _includes() -> list[str]:
    return [f"-I{folder}" for folder in (sysconfig.get_paths()["include"], numpy.get_include(), ROOT / "src")]


def _libraries() -> list[str]:
    return [str(ROOT / "src" / name) for name in ("post.c", "wire.c")]


def _translated(folder: Path, name: str) -> list[str]:
    """The C that Cython makes of a module: setup.py's if it is as new as the sources, or made here."""
    source, ready = ROOT / "shmring" / f"{name}.pyx", TRANSLATED / "shmring" / f"{name}.c"
    newest = max(path.stat().st_mtime for path in (ROOT / "shmring").glob("*.p[yx]*"))
    if ready.is_file() and ready.stat().st_mtime >= newest:
        return [str(ready)]
    target = folder / f"{name}.c"
    directives = [
        "language_level=3",
        "boundscheck=False",
        "wraparound=False",
        "initializedcheck=False",
        "cdivision=True",
        "embedsignature=True",
        "binding=True",
    ]
    _run(
        [
            sys.executable,
            "-m",
            "cython",
            *(f"-X{directive}" for directive in directives),
            str(source),
            "-o",
            str(target),
        ]
    )
    return [str(target)]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoBuild(f"{' '.join(command[:3])} ...: {done.stderr[-2000:]}")
