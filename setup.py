"""Builds the extensions; everything else about the package is in pyproject.toml.

SHMRING_SANITIZE=address|thread|undefined adds a sanitizer (build with --force, CONTRIBUTING.md shows how).
"""

import os
import sys
import sysconfig
from glob import glob

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# No FMA contraction and no option that changes values: the same bits on every instruction set. The reduction
# loops vectorise only without errno and trap handling; -fno-strict-aliasing because they load users' buffers.
COMPILE_ARGS = [
    "-O3",
    "-std=c11",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined"],
    "thread": ["-fsanitize=thread"],
    "undefined": ["-fsanitize=undefined"],
}
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "embedsignature": True,
    "binding": True,
}
MACROS = [
    ("_GNU_SOURCE", None),  # futexes and robust mutexes under -std=c11
    ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
]
HEADERS = sorted(glob("src/**/*.h", recursive=True))


def sanitizer_args() -> list[str]:
    name = os.environ.get("SHMRING_SANITIZE", "")
    if not name:
        return []
    if name not in SANITIZERS:
        raise SystemExit(f"SHMRING_SANITIZE={name}: choose one of {', '.join(SANITIZERS)}")
    return [*SANITIZERS[name], "-O1", "-g", "-fno-omit-frame-pointer"]


def library(name: str) -> tuple[str, dict[str, object]]:
    """A C room as a static library: several extensions link it, it is compiled once."""
    source = f"src/{name}.c"
    return f"sr_{os.path.basename(name)}", {
        "sources": [source],
        "obj_deps": {source: HEADERS},
        "include_dirs": ["src"],
        "macros": MACROS,
        "cflags": [*COMPILE_ARGS, *(sanitizer_args() or ["-g0"])],
    }


def extension(path: str) -> Extension:
    return Extension(
        path.removesuffix(".pyx").replace("/", "."),
        [path],
        include_dirs=["src", numpy.get_include()],
        define_macros=MACROS,
        depends=[*HEADERS, "src/kernels/kernels.c", "src/channel.c", "src/conn.c"],
        extra_compile_args=[*COMPILE_ARGS, *(sanitizer_args() or ["-g0"])],
        extra_link_args=["-pthread", *sanitizer_args()],  # glibc before 2.34 has robust mutexes there
    )


def beside_packages() -> str:
    """Return the folder of site-packages below the prefix: Python reads .pth files in it when it starts."""
    return os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))


class BuildExtensions(build_ext):
    """Translates the Cython sources and builds the kernels first, only when extensions are really built."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or 2

    def run(self) -> None:
        if sys.platform != "linux":
            raise SystemExit(f"shmring runs on Linux only (memfd, futexes); this is {sys.platform}")
        self.run_command("build_clib")
        # Into build/, so that no generated C is beside the sources or in the sdist.
        translated = cythonize(self.extensions, build_dir="build/cython", compiler_directives=DIRECTIVES)
        sources = {extension.name: extension.sources for extension in translated}
        for ext in self.extensions:
            ext.sources = sources[ext.name]
        super().run()


setup(
    libraries=[library("kernels/kernels"), library("channel"), library("conn")],
    ext_modules=[extension(path) for path in sorted(glob("shmring/**/*.pyx", recursive=True))],
    # An editable installation gets this file as well, which it would not from a package.
    data_files=[(beside_packages(), ["shmring_mpi4py.pth"])],
    cmdclass={"build_ext": BuildExtensions},
)
