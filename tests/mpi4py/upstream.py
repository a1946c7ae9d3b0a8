"""mpi4py's own tests, from its source distribution, with shmring in the place of mpi4py.

    python tests/mpi4py/upstream.py --size 2 [--json table.json] [-i test_cco_nb ...] [--sdist DIR]
    python tests/mpi4py/upstream.py --size 2 --launcher "mpiexec -n {size} python"    # the same on an MPI

A test passes only if it passes on every rank and its job ends well. Each file of tests is a job of its own.
A job that makes no progress is ended, and its remaining tests run in another one. `excluded.txt` names the
tests that do not run, each with its reason.
"""

import argparse
import fnmatch
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path

VERSION = "4.1.2"
HERE = Path(__file__).resolve().parent
EXCLUDED = HERE / "excluded.txt"
RANK_PROGRAM = HERE / "upstream_rank.py"
LAUNCHER = f"{shlex.quote(sys.executable)} -m shmring.run --mpi4py --no-prefix -n {{size}}"
PASSED, SKIPPED, FAILED, HUNG, NOT_RUN = "passed", "skipped", "failed", "hung", "not run"
# The tests of what fewer programs need. All others are of tier 1: communicators, groups, grids, collectives,
# messages, requests, operations, errors, threads, pkl5.
_FILES_OF_TIER_2 = (
    "attributes cco_ngh_buf cco_ngh_obj cco_pr_buf cco_pr_ngh_buf cco_pr_vec datatype errhandler grequest "
    "handle info pack rma rma_nb subclass ulfm util_dtlib util_sync win"
)
TIER_2 = [f"test_{file}.*" for file in _FILES_OF_TIER_2.split()] + ["test_comm_topo.*raph*"]
_WORST = [PASSED, SKIPPED, NOT_RUN, HUNG, FAILED]
_STALL_S = 30.0  # without a finished test; the slowest takes 4 s on a busy machine
_MOST_JOBS = 40  # for one file


def exclusions():
    """Return (pattern, reason) of every test that is left out."""
    lines = [line.strip() for line in EXCLUDED.read_text().splitlines()]
    return [
        tuple(part.strip() for part in line.split(maxsplit=1))
        for line in lines
        if line and not line.startswith("#")
    ]


def unpack(archive, folder):
    """Unpack the tests of the source distribution, and return their folder."""
    tests = folder / f"mpi4py-{VERSION}" / "test"
    if tests.exists():
        return tests
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if "/test/" in member.name]
        tar.extractall(folder, members, filter="data")
    return tests


def download(folder):
    """Download the source distribution; a CalledProcessError if there is no way to it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "mpi4py"]
    command += ["--no-build-isolation", "--dest", str(folder), f"mpi4py=={VERSION}"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return folder / f"mpi4py-{VERSION}.tar.gz"


class Job:
    """One run of some tests of a file at several ranks."""

    def __init__(self, launcher, size, tests, module, skip, only=()):
        self.size, self.module = size, module
        self.folder = Path(tempfile.mkdtemp(prefix="upstream-"))
        command = [*shlex.split(launcher.format(size=size)), str(RANK_PROGRAM)]
        command += [str(tests), module, str(self.folder), json.dumps({"skip": skip, "only": list(only)})]
        self._output = open(self.folder / "output", "w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            start_new_session=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        )

    def wait(self):
        """Wait for the end, or end the job if it makes no progress; return whether it ended well."""
        seen, since = None, time.monotonic()
        while self._process.poll() is None:
            sizes = [path.stat().st_size for path in self._records()]
            if sizes != seen:
                seen, since = sizes, time.monotonic()
            if time.monotonic() - since > _STALL_S:
                os.killpg(self._process.pid, signal.SIGTERM)
                try:
                    self._process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait()
                return False
            time.sleep(0.05)
        return self._process.returncode == 0

    def _records(self):
        return [path for rank in range(self.size) if (path := self.folder / f"{rank}.jsonl").exists()]

    def outcomes(self):
        """Return (by test, the outcome of each rank and its text; the test that was never finished)."""
        found, unfinished = {}, set()
        for path in self._records():
            started = None
            for line in path.read_text().splitlines():
                test, outcome, text = json.loads(line)
                if outcome == "started":
                    started = test
                else:
                    found.setdefault(test, []).append((outcome, text))
                    started = None
            if started is not None:
                unfinished.add(started)
        return found, unfinished

    def output(self):
        """Return the end of what the ranks printed."""
        self._output.seek(0)
        return self._output.read()[-3000:]


def run_file(launcher, size, tests, module, patterns):
    """Run the tests of a file, in as many jobs as it takes; return (outcome, text) by test."""
    table, skip = {}, list(patterns)
    for _ in range(_MOST_JOBS):
        job = Job(launcher, size, tests, module, skip)
        ended_well = job.wait()
        found, unfinished = job.outcomes()
        for test, ranks in found.items():
            whole = len(ranks) == size or any(outcome == FAILED for outcome, _ in ranks)
            worst = max(ranks, key=lambda one: _WORST.index(one[0])) if whole else (NOT_RUN, "")
            if whole:
                table[test] = worst
        if ended_well and not unfinished:
            return table
        guilty = unfinished or {f"{module}: the job ended badly"}
        for test in guilty:
            table[test] = (HUNG if test in unfinished else FAILED, job.output())
        if not unfinished:
            return table
        skip += [test for test in table if test not in skip]
    return table


def alone(launcher, size, tests, module, table):
    """Run each test that failed once more in a job of its own: one that failed may have misled the next."""
    for test in [
        test for test, (outcome, _) in table.items() if outcome in (FAILED, HUNG) and "(" not in test
    ]:
        if test.startswith(f"{module}:") or len(test.split(".")) < 3:
            continue
        job = Job(launcher, size, tests, module, [], [test])
        ended_well = job.wait()
        ranks = job.outcomes()[0].get(test, [])
        if ended_well and len(ranks) == size and all(outcome in (PASSED, SKIPPED) for outcome, _ in ranks):
            table[test] = max(ranks, key=lambda one: _WORST.index(one[0]))
        elif not ended_well:
            table[test] = (table[test][0], table[test][1] or job.output())
    return table


def files(tests, include):
    """Return the modules whose name matches one of the patterns, or all."""
    names = sorted(path.stem for path in tests.glob("test_*.py"))
    return [name for name in names if not include or any(re.search(one, name) for one in include)]


def run(tests, size, include=(), launcher=LAUNCHER, excluded=None, progress=lambda text: None):
    """Return {test: (outcome, text)} of all files at one number of ranks."""
    patterns = [pattern for pattern, _ in exclusions()] if excluded is None else excluded
    table = {}
    for module in files(tests, include):
        if f"{module}.*" in patterns:
            continue
        begin_s = time.monotonic()
        part = alone(launcher, size, tests, module, run_file(launcher, size, tests, module, patterns))
        table |= part
        counts = Counter(outcome for outcome, _ in part.values())
        progress(f"{size} ranks  {module:24} {time.monotonic() - begin_s:6.1f} s  {dict(counts)}")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--size", default="2", help="ranks, as 1,2,3 (%(default)s)")
    add("-i", dest="include", action="append", default=[], help="files to run, as a regular expression")
    add("--sdist", type=Path, help="the source distribution; it is downloaded otherwise")
    add("--launcher", default=LAUNCHER, help="what comes before the program of a rank (%(default)s)")
    add("--all", action="store_true", help="run what excluded.txt names as well")
    add("--json", type=Path, help="where to write what came of each test")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = options.sdist or download(Path(folder))
        tests = unpack(archive, Path(folder))
        tables = {}
        for size in (int(text) for text in options.size.split(",")):
            begin_s = time.monotonic()
            excluded = [] if options.all else None
            tables[size] = run(tests, size, options.include, options.launcher, excluded, report)
            report(f"{size} ranks: {time.monotonic() - begin_s:.0f} s")
            for tier in (1, 2):
                part = {test: found for test, found in tables[size].items() if tier_of(test) == tier}
                report(f"  tier {tier}: {summary(part)}")
            for test, (outcome, text) in tables[size].items():
                if outcome not in (PASSED, SKIPPED):
                    last = text.strip().splitlines()[-1:] or [""]
                    report(f"  {outcome}: {test}: {last[0][:150]}")
    if options.json is not None:
        options.json.write_text(json.dumps(tables, indent=1))
    sys.exit(any(bad(table) for table in tables.values()))


def tier_of(test):
    """Return 1, or 2 for a test of what fewer programs need."""
    return 2 if any(fnmatch.fnmatchcase(test, pattern) for pattern in TIER_2) else 1


def report(text):
    print(text, flush=True)


def bad(table):
    """Return the tests that neither passed nor were skipped."""
    return {test: text for test, (outcome, text) in table.items() if outcome not in (PASSED, SKIPPED)}


def summary(table):
    """Return the number of tests with each outcome."""
    return dict(Counter(outcome for outcome, _ in table.values()))


if __name__ == "__main__":
    main()
