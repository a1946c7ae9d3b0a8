"""The C programs under tests/repo/c: flags, call lines, schedules, liveness, locks, sequence locks, rings of
one and of several readers, connections, channels; ranks are threads (or a forked process) over plain memory.
Each runs plain, under ThreadSanitizer, and under AddressSanitizer and UBSan.
"""

import functools
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from combinations import first

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
if COMPILER is None or not (ROOT / "src").is_dir():
    pytest.skip("needs a C compiler and the checkout", allow_module_level=True)

PROGRAMS = (
    "channel",
    "liveness",
    "call_line",
    "flag",
    "schedule",
    "lock",
    "seqlock",
    "conn",
    "spsc_ring",
    "offer",
    "broadcast",
)
SANITIZERS = {
    "plain": [],
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
COMPILE = [COMPILER, "-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fno-omit-frame-pointer", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# Threads are joined before the end, so nothing is gained by ThreadSanitizer's last second of looking.
OPTIONS = {"TSAN_OPTIONS": "atexit_sleep_ms=0", "ASAN_OPTIONS": "detect_leaks=0"}
LIMIT_S = 300  # the programs' own watchdogs are quicker: 200 s a test


def compile_c(source, program, *flags):
    command = [*COMPILE, *flags, f"-I{ROOT / 'src'}", str(source), "-o", str(program)]
    return subprocess.run(command, capture_output=True, text=True)


def run_c(*command):
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **OPTIONS}, timeout=LIMIT_S
    )


@functools.cache
def how_to_run(sanitizer, folder):
    """Return the prefix of a sanitized program's command here, as a tuple; a string gives the reason why none
    can run."""
    source, program = folder / "nothing.c", folder / f"nothing_{sanitizer}"
    source.write_text("int main(void) { return 0; }\n")
    built = compile_c(source, program, *SANITIZERS[sanitizer])
    if built.returncode != 0:
        return f"no library of this sanitizer: {built.stderr.strip().splitlines()[-1]}"
    # ThreadSanitizer before GCC 14 finds no space for its memory if addresses are too random.
    ran = None
    for prefix in ((), ("setarch", "-R")):
        if prefix and not shutil.which(prefix[0]):
            continue
        ran = run_c(*prefix, program)
        if ran.returncode == 0:
            return prefix
    return f"its library does not start here: {ran.stderr.strip().splitlines()[-1:]}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("c")


def build(name, sanitizer, folder, *flags):
    """The command that runs a program of tests/repo/c."""
    prefix = how_to_run(sanitizer, folder)
    if isinstance(prefix, str):
        pytest.skip(prefix)
    program = folder / "_".join([name, sanitizer, *(flag.strip("-") for flag in flags)])
    source = ROOT / f"tests/repo/c/test_{name}.c"
    built = compile_c(source, program, *WARNINGS, *SANITIZERS[sanitizer], *flags)
    assert built.returncode == 0, built.stderr
    return *prefix, program


@pytest.mark.limit(LIMIT_S + 60)
@pytest.mark.parametrize("sanitizer", first(1, SANITIZERS))
@pytest.mark.parametrize("name", first(2, PROGRAMS))
def test_c_program_ends_well(name, sanitizer, folder):
    ran = run_c(*build(name, sanitizer, folder))
    reached = ran.stdout.splitlines()[-1:]
    assert ran.returncode == 0, f"ended with {ran.returncode} in {reached}:\n{ran.stderr}"


@pytest.mark.limit(LIMIT_S + 60)
def test_one_call_line_alone_is_reported_as_a_race(folder):
    ran = run_c(*build("call_line", "thread", folder, "-DONE_LINE"))
    assert ran.returncode != 0
    assert "data race" in ran.stderr


TELL = """
#include "sync/stack_request.h"
void tell(struct sr_stack_request *stack_request, char *text) { sr_stack_request_begin(stack_request); *text =
1; }
"""


def test_a_text_stays_behind_its_word_on_aarch64_without_atomic_instructions(folder):
    """An exclusive store does not order later accesses; a load with acquire after it does."""
    compiler = shutil.which("aarch64-linux-gnu-gcc") or (
        COMPILER if platform.machine() == "aarch64" else None
    )
    if compiler is None:
        pytest.skip("needs a compiler for aarch64: apt install gcc-aarch64-linux-gnu")
    source = folder / "tell.c"
    source.write_text(TELL)
    how = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-march=armv8-a", "-mno-outline-atomics", f"-I{ROOT / 'src'}"]
    text = subprocess.run([compiler, *how, "-S", "-o", "-", str(source)], capture_output=True, text=True)
    assert text.returncode == 0, text.stderr
    order = re.findall(r"^\s+(stlxr|ldar|strb)\s", text.stdout, re.MULTILINE)
    assert order == ["stlxr", "ldar", "strb"]
