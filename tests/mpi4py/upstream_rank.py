"""A rank that runs the tests of one file of mpi4py's, and writes a line of JSON for each that begins or ends.

upstream_rank.py TESTS MODULE FOLDER {"skip": [patterns], "only": [names]}
"""

import fnmatch
import json
import os
import sys
import unittest
from importlib import import_module


class Result(unittest.TestResult):
    """Writes what came of each test, as it comes: a job may be ended."""

    def __init__(self, file):
        super().__init__()
        self._file = file
        self._said = False

    def _say(self, test, outcome, text=""):
        self._said = outcome != "started"
        self._file.write(json.dumps([test.id(), outcome, text]) + "\n")
        self._file.flush()

    def startTest(self, test):
        super().startTest(test)
        self._say(test, "started")

    def stopTest(self, test):
        super().stopTest(test)
        if not self._said:
            self._say(test, "passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._say(test, "skipped", reason)

    def addError(self, test, error):
        super().addError(test, error)
        self._say(test, "failed", self.errors[-1][1])

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._say(test, "failed", self.failures[-1][1])

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self._say(test, "failed", self._exc_info_to_string(error, test))

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self._say(test, "failed", "it was expected to fail")


def chosen(suite, skip, only):
    """Return the tests of a suite, without those that a pattern names."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from chosen(test, skip, only)
        elif only:
            if test.id() in only:
                yield test
        elif not any(fnmatch.fnmatchcase(test.id(), pattern) for pattern in skip):
            yield test


def main():
    tests, module, folder, choice = sys.argv[1:]
    choice = json.loads(choice)
    sys.dont_write_bytecode = True
    sys.path.insert(0, tests)
    sys.modules["cupy"] = sys.modules["numba"] = None  # as mpi4py's own runner does
    MPI = import_module("mpi4py.MPI")
    path = os.path.join(folder, f"{MPI.COMM_WORLD.Get_rank()}.jsonl")
    try:
        suite = unittest.defaultTestLoader.loadTestsFromModule(import_module(module))
    except unittest.SkipTest as reason:
        with open(path, "w") as file:
            file.write(json.dumps([module, "skipped", str(reason)]) + "\n")
        return
    with open(path, "w") as file:
        picked = chosen(suite, choice["skip"], choice["only"])
        unittest.TestSuite(picked).run(Result(file))


if __name__ == "__main__":
    main()
