"""Builds the extensions; everything else about the package is in pyproject.toml.

SHMRING_SANITIZE=address|thread|undefined adds a sanitizer (build with --force, CONTRIBUTING.md shows how).
"""

import gc
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tomllib
from glob import glob
from pathlib import PurePath

from setuptools import Distribution, Extension, setup
from setuptools.command.build_clib import build_clib
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
# -O3 for modules that copy, fold and wait, and for those that are most of a call, but without the passes that
# take a sixth of the latter's time to compile and make no call faster; -Og for modules that run rarely, in a
# third of the time. The others have -O1, in half of it: they mostly call functions of Python.
HOT = [
    "shmring/_algorithms/*.pyx",
    "shmring/_engine/wait.pyx",
    "shmring/_internode/[dr]*.pyx",
    "shmring/_p2p/matching.pyx",
]
CALLED = [
    "shmring/_arrays/objects.pyx",
    "shmring/_comm/collectives.pyx",
    "shmring/_comm/endpoint.pyx",
    "shmring/_comm/object_collectives.pyx",
    "shmring/_comm/point_to_point.pyx",
    "shmring/_comm/work.pyx",
    "shmring/_p2p/ring_ends.pyx",
    "shmring/mpi4py/calls.pyx",
]
RARE = [
    "shmring/_arrays/locks.pyx",
    "shmring/_comm/allocation.pyx",
    "shmring/_comm/comm.pyx",
    "shmring/_diagnostics/*.pyx",
    "shmring/_engine/state.pyx",
    "shmring/_transport/channels.pyx",
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
    "auto_pickle": False,  # classes without __reduce__ refuse to be pickled anyway
    "emit_code_comments": False,
}
# Cython's own functions and types, which all modules import from this one instead of each having them.
SHARED = "shmring._core.cython_shared"
MACROS = [
    ("_GNU_SOURCE", None),  # futexes and robust mutexes under -std=c11
    ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
    ("NPY_TARGET_VERSION", "NPY_1_22_API_VERSION"),  # from here on, NumPy's allocator can be replaced
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
        "cflags": [*COMPILE_ARGS, "-w", *(sanitizer_args() or ["-g0"])],
    }


def check_compiler() -> None:
    """Say in one line what to install if there is no compiler, or no header of Python."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"shmring is compiled here, and there is no C compiler {compiler!r}: apt install gcc libc6-dev "
            "(Debian, Ubuntu), dnf install gcc (Fedora), apk add gcc musl-dev (Alpine), or set CC"
        )
    if not os.path.exists(header):
        raise SystemExit(
            f"shmring is compiled here, and the header {header} is missing: apt install python3-dev (Debian, "
            "Ubuntu), dnf install python3-devel (Fedora), apk add python3-dev (Alpine)"
        )


def long_description() -> str:
    """Return the README with links that work outside of the checkout.

    Relative links get the URL "Source" of pyproject.toml. Without that URL, their text stays.
    """
    with open("pyproject.toml", "rb") as file:
        source = tomllib.load(file)["project"].get("urls", {}).get("Source")
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    badge = r"!\[[^][]*\]\([^)]*\)"
    relative = rf"\[((?:{badge}|[^][])*)\]\((?![a-z]+:|#)([^)]*)\)"
    if source is None:
        return re.sub(relative, r"\1", re.sub("!" + relative, "", text))
    text = re.sub("!" + relative, rf"![\1]({source}/raw/HEAD/\2)", text)
    return re.sub("(?<!!)" + relative, rf"[\1]({source}/blob/HEAD/\2)", text)


def optimization(sources: tuple[str, ...]) -> list[str]:
    fewer = ["-O3", "-fno-gcse", "-fno-tree-vectorize", "-fno-tree-vrp"]
    for options, patterns in (["-O3"], HOT), (fewer, CALLED), (["-Og"], RARE):
        if any(PurePath(path).match(pattern) for path in sources for pattern in patterns):
            return options
    return ["-O1"]


def extension(name: str, *sources: str) -> Extension:
    return Extension(
        name,
        list(sources),
        include_dirs=["src"],
        define_macros=MACROS,
        depends=[*HEADERS, "src/kernels/kernels.c", "src/channel.c", "src/conn.c"],
        extra_compile_args=[
            *COMPILE_ARGS,
            "-include",
            "fold_frames.h",
            *optimization(sources),
            # A call begins with a cleared Call of 456 bytes. gcc clears it by `rep stos`, which takes 10 ns.
            "-fno-builtin-memset",
            "-w",  # .ci/find_warnings.py looks for warnings
            *(sanitizer_args() or ["-g0"]),
        ],
        extra_link_args=["-pthread", *sanitizer_args()],  # glibc before 2.34 has robust mutexes there
    )


def beside_packages() -> str:
    """Return the folder of site-packages below the prefix: Python reads .pth files in it when it starts."""
    return os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))


class WithDataFiles(Distribution):
    """A distribution whose data files an editable installation has, too: setuptools asks for `has_data`."""

    def has_data(self) -> bool:
        return bool(self.data_files)


class BuildKernels(build_clib):
    """Checks for a compiler first; a wheel's build begins here."""

    def run(self) -> None:
        check_compiler()
        super().run()


class BuildExtensions(build_ext):
    """Translates the Cython sources and builds the kernels first, only when extensions are really built."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or 2

    def run(self) -> None:
        if sys.platform != "linux":
            raise SystemExit(f"shmring runs on Linux only (memfd, futexes); this is {sys.platform}")
        self.run_command("build_clib")
        # Only here: pip runs this file three times, to build once.
        import numpy
        from Cython.Build import cythonize

        # Cython makes many objects and few cycles. To look for cycles takes a third of its time, most of it
        # when the interpreter ends, which does not look at frozen objects.
        gc.disable()
        # Into build/, so that no generated C is beside the sources or in the sdist.
        translated = cythonize(
            self.extensions,
            build_dir="build/cython",
            compiler_directives=DIRECTIVES,
            shared_utility_qualified_name=SHARED,
            shared_utility_features_disabled=["MemoryView"],  # no module has a typed memoryview
        )
        gc.freeze()
        gc.enable()
        sources = {extension.name: extension.sources for extension in translated}
        for ext in self.extensions:
            ext.sources = sources[ext.name]
            ext.include_dirs.append(numpy.get_include())
        super().run()


PYX = sorted(glob("shmring/**/*.pyx", recursive=True))

setup(
    libraries=[library("kernels/kernels"), library("channel"), library("conn")],
    ext_modules=[
        *([extension(SHARED)] if PYX else []),  # generated
        *(extension(path.removesuffix(".pyx").replace("/", "."), path) for path in PYX),
    ],
    # A file of a package would not be where Python looks for it.
    data_files=[(beside_packages(), ["shmring_mpi4py.pth"])],
    distclass=WithDataFiles,
    long_description=long_description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_clib": BuildKernels, "build_ext": BuildExtensions},
)
