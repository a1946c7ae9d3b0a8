"""Translate and compile everything with all warnings as errors: python .ci/find_warnings.py [COMPILER ...]

Without a compiler it only translates. The flags are those of setup.py.
"""

import ast
import contextlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "shmring").rglob("*.pyx"))
ROOM = [ROOT / "src", *(path for path in (ROOT / "src").iterdir() if path.is_dir())]
# A name that begins with an underscore keeps an object alive, or counts a loop. Cython takes the scope of a
# generator expression for unused, always.
ALLOWED = re.compile(r"Unused entry '(_\w*|genexpr)'")
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def constants():
    """The literals of setup.py, which cannot be imported without building."""
    assigned = (
        node for node in ast.parse((ROOT / "setup.py").read_text()).body if isinstance(node, ast.Assign)
    )
    literals = {}
    for node in assigned:
        with contextlib.suppress(ValueError):
            literals[node.targets[0].id] = ast.literal_eval(node.value)
    return literals


def translate(folder, sources, into):
    """Return the warnings of Cython about `sources`; write their C files to the new folder `into`."""
    into.mkdir()
    directives = [
        f"-X{name}={value}" for name, value in constants()["DIRECTIVES"].items() if name != "language_level"
    ]
    command = [sys.executable, "-m", "cython", "-3", "-Wextra", *directives, "-o", into, *sources]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        return [f"{folder} was not translated:\n{done.stderr}"]
    return [line for line in done.stderr.splitlines() if "warning:" in line and not ALLOWED.search(line)]


def compile_one(compiler, source):
    known = constants()
    macros = [f"-D{name}" + ("" if value is None else f"={value}") for name, value in known["MACROS"]]
    includes = [f"-I{path}" for path in (*ROOM, numpy.get_include(), sysconfig.get_paths()["include"])]
    flags = [*known["COMPILE_ARGS"], "-pthread", "-fPIC", *WARNINGS, *macros, *includes]
    command = [compiler, *flags, "-c", source, "-o", "/dev/null"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    return [f"{compiler} {source.name}:\n{done.stderr}"] if done.returncode else []


def main():
    compilers = sys.argv[1:]
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(cpu_count()) as pool:
        folders = {}
        for source in SOURCES:
            folders.setdefault(source.parent, []).append(source)
        tasks = [
            pool.submit(translate, folder.name, sources, Path(made) / folder.name)
            for folder, sources in folders.items()
        ]
        found = [line for task in tasks for line in task.result()]
        to_compile = [*sorted((ROOT / "src").rglob("*.c")), *sorted(Path(made).rglob("*.c"))]
        tasks = [
            pool.submit(compile_one, compiler, source) for compiler in compilers for source in to_compile
        ]
        found += [line for task in tasks for line in task.result()]
    print(*found, sep="\n")
    print(
        f"{len(SOURCES)} files translated, {len(tasks) if compilers else 0} compiled, {len(found)} findings"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
