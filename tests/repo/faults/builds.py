"""Builds of the engine for tests only: with points at which ranks die, and without checks (src/fault.h).

They are in the folder build/faults, each under a hash of its inputs. A build takes 10 to 30 s of two cores,
once for each state of the sources.
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

from tests.support import nogil_modules

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / "build" / "faults"
TRANSLATED = ROOT / "build" / "cython"  # setup.py's, when it has built in place
# Whatever publishes, gives credit or waits; the kernels, which take a minute, have no such points.
HOLDING_THE_GIL = ("_engine/engine", "_engine/progress", "_engine/state", "_comm/endpoint")
MODULES = (*nogil_modules.without_gil(), *HOLDING_THE_GIL)
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
# faults.c of the build that this process uses: loaded, with global symbols, before the extensions that call
# it.
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
            # Two sessions may build at once: both results are equally good.
            if not folder.exists():
                shutil.copytree(made, folder, symlinks=True)
    return folder


def installed() -> Path:
    """Return the folder of the built package: the checkout may be first on the path, and contain only
    sources."""
    for path in [*sys.path, ROOT]:
        folder = Path(path or ".").resolve() / "shmring"
        if any(folder.glob("_core/kernels*.so")) and CACHE not in folder.parents:
            return folder
    raise NoBuild("shmring is not built")


def _sources() -> list[Path]:
    here = Path(__file__).parent
    names = sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in (".c", ".h"))
    return [*names, *_package(), here / "faults.c", Path(__file__)]


def _package() -> list[Path]:
    found = (ROOT / "shmring").rglob("*.p[yx]*")
    return sorted(path for path in found if path.suffix != ".pyc")


def _digest(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((flags, MODULES, sys.version, str(installed()))).encode())
    for path in _sources():
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _make(folder: Path, flags: tuple[str, ...]) -> None:
    package = folder / "shmring"
    _link(installed(), package)
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


def _link(there: Path, here: Path, inside: str = "") -> None:
    """Links to all that is installed, but to the extensions that are built here."""
    here.mkdir()
    for path in there.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            _link(path, here / path.name, f"{inside}{path.name}/")
        elif inside + path.name.partition(".")[0] not in MODULES or path.suffix != ".so":
            (here / path.name).symlink_to(path)


def _compiler(flags: tuple[str, ...]) -> list[str]:
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        raise NoBuild(f"there is no C compiler {compiler!r}")
    return [compiler, "-shared", "-pthread", *FLAGS, *flags, *_includes()]


def _includes() -> list[str]:
    return [f"-I{folder}" for folder in (sysconfig.get_paths()["include"], numpy.get_include(), ROOT / "src")]


def _libraries() -> list[str]:
    return [str(ROOT / "src" / name) for name in ("channel.c", "conn.c")]


def _translated(folder: Path, name: str) -> list[str]:
    """The C that Cython makes of a module: setup.py's if it is as new as the sources, or made here."""
    source, ready = ROOT / "shmring" / f"{name}.pyx", TRANSLATED / "shmring" / f"{name}.c"
    newest = max(path.stat().st_mtime for path in _package())
    if ready.is_file() and ready.stat().st_mtime >= newest:
        return [str(ready)]
    target = folder / f"{name.replace('/', '.')}.c"
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
