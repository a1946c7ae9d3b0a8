"""torch's own tests of reconfigure, which its wheel lacks: on shmring, gloo, and shmring in gloo's place.

    python tests/adapters/torch/upstream_reconfigure.py [--file test_c10d_fault_tolerance.py] [-k pattern ...]

The file is the one of torch's repository, of the installed version; it is downloaded if it is not given.
"""

import argparse
import contextlib
import fnmatch
import importlib.util
import logging
import sys
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path

import torch

from shmring.adapters.torch import register_backend, replace_gloo

NAME = "test_c10d_fault_tolerance.py"
SOURCE = f"https://raw.githubusercontent.com/pytorch/pytorch/v{{version}}/test/distributed/{NAME}"
IN_PLACE = "gloo, replaced"
BACKENDS = ("shmring", "gloo", IN_PLACE)  # those of the file for the CPU, with ours
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


def download(folder):
    """Download the file of the installed version of torch; an OSError if there is no way to it."""
    url = SOURCE.format(version=torch.__version__.partition("+")[0])
    with urllib.request.urlopen(url, timeout=30) as answer:
        (folder / NAME).write_bytes(answer.read())
    return folder / NAME


def load(path):
    """Return the module of torch's tests."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.WARNING)
    return module


def cases_for(module, backend):
    """Return the class of tests for one backend. Ranks are forked: spawned ones would not know this class."""
    theirs = module._make_fault_tolerance_test_class("gloo" if backend == IN_PLACE else backend, "cpu")

    class Forked(theirs):
        def _spawn_processes(self):
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Forked


@contextlib.contextmanager
def ready_for(backend):
    register_backend()
    replace_gloo(backend == IN_PLACE)
    try:
        yield
    finally:
        replace_gloo(False)


def run(module, backend, patterns=("*",), progress=lambda text: None):
    """Return {test: (outcome, text)} of one backend."""
    table = {}
    with ready_for(backend):
        cases = cases_for(module, backend)
        names = unittest.defaultTestLoader.getTestCaseNames(cases)
        for name in names:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                continue
            begin_s, result = time.monotonic(), unittest.TestResult()
            cases(name).run(result)
            bad = [text for _, text in result.failures + result.errors]
            outcome = FAILED if bad else SKIPPED if result.skipped else PASSED
            table[name] = outcome, "\n".join(bad)
            progress(f"{outcome:8}{time.monotonic() - begin_s:6.1f} s  {backend:16} {name}")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--file", type=Path, help="torch's file of tests; it is downloaded otherwise")
    add("--backend", dest="backends", action="append", choices=BACKENDS, help="default: each of them")
    add("-k", dest="patterns", action="append", help="tests to run, as test_shrink_*")
    options = parser.parse_args()
    has_failed = False
    with tempfile.TemporaryDirectory() as folder:
        module = load(options.file or download(Path(folder)))
        for backend in options.backends or BACKENDS:
            table = run(module, backend, options.patterns or ["*"], report)
            outcomes = [outcome for outcome, _ in table.values()]
            for name, (outcome, text) in table.items():
                if outcome == FAILED:
                    report(f"{name}\n{text[-3000:]}")
            report(f"{backend}: { {kind: outcomes.count(kind) for kind in (PASSED, SKIPPED, FAILED)} }")
            has_failed |= FAILED in outcomes
    return has_failed


def report(text):
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
