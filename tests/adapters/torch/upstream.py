"""torch's own tests of torch.distributed, which are in its wheel, on shmring in the place of gloo.

    python tests/adapters/torch/upstream.py --size 2 [-k pattern ...] [--backend gloo] [--list failed.json]

Ranks are forked, which takes a tenth of the time of spawned ones.
"""

import argparse
import fnmatch
import json
import os
import sys
import time
import unittest
from pathlib import Path

# Tests that gloo passes and shmring cannot pass, with the reason.
OTHERWISE = {
    "test_ddp_logging_data_cpu": "asks for the name gloo, of which torch's C++ thinks that it is gloo itself"
}

# Tests for two GPUs that ask nothing of them: they run on tensors of the CPU here.
ON_CPU = {
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_join_model_equivalence",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--backend", choices=("shmring", "gloo"), default="shmring")
    add("--size", type=int, default=2, help="ranks (%(default)s)")
    add("-k", dest="patterns", action="append", help="tests to run, as test_all_reduce_*")
    add("--only", type=Path, help="tests to run: those that passed, of a file that --list has written")
    add("--list", type=Path, help="where to write what came of each test, as JSON")
    return parser.parse_args()


def put_cpu_in_place_of_gpus():
    """For the tests that ON_CPU names."""
    import torch
    from torch.testing._internal import common_distributed

    def unless_on_cpu(skip):
        def decorate(count, *arguments, **keywords):
            skipping = skip(count, *arguments, **keywords)
            return lambda test: test if test.__name__ in ON_CPU else skipping(test)

        return decorate

    def on_cpu(make):
        def made(*arguments, device=None, **keywords):
            return make(*arguments, device="cpu" if isinstance(device, int) else device, **keywords)

        return made

    def wrap(net, module, device_ids=None, **keywords):
        make(net, module, **keywords)

    make = torch.nn.parallel.DistributedDataParallel.__init__
    torch.nn.parallel.DistributedDataParallel.__init__ = wrap
    common_distributed.skip_if_lt_x_gpu = unless_on_cpu(common_distributed.skip_if_lt_x_gpu)
    for name in ("ones", "rand"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.nn.Module.cuda = lambda module, device=None: module
    torch.cuda.synchronize = lambda device=None: None


def tests_class(size):
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), TEMP_DIR="/dev/shm", GLOO_SOCKET_IFNAME="lo")
    import torch
    from torch.testing._internal.distributed import distributed_test as upstream

    torch.set_num_threads(1)
    # These ask for events that end in another thread than they begin in.
    upstream.PROFILING_SUPPORTED_BACKENDS = upstream.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []

    class TestDistBackendForked(upstream.TestDistBackend, upstream.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    upstream.default_pg_timeout = 60
    return TestDistBackendForked


def main():
    options = arguments()
    put_cpu_in_place_of_gpus()
    cases = tests_class(options.size)
    if options.backend == "shmring":
        from shmring.adapters.torch import replace_gloo

        replace_gloo()  # tests that gloo runs are chosen by its name
    names = unittest.defaultTestLoader.getTestCaseNames(cases)
    if options.backend == "shmring":
        names = [name for name in names if name not in OTHERWISE]
    if options.only:
        passed = json.loads(options.only.read_text())
        names = [name for name in names if passed.get(name) == "passed"]
    if options.patterns:
        names = [name for name in names if any(fnmatch.fnmatch(name, p) for p in options.patterns)]
    outcomes = {}
    for name in names:
        begin = time.monotonic()
        result = unittest.TestResult()
        cases(name).run(result)
        bad = result.failures + result.errors
        outcomes[name] = "failed" if bad else "skipped" if result.skipped else "passed"
        print(f"{outcomes[name]:8}{time.monotonic() - begin:6.1f} s  {name}", flush=True)
        if bad:
            print("\n".join(text[-3000:] for _, text in bad), flush=True)
        if options.list:
            options.list.write_text(json.dumps(outcomes, indent=1))
    print({kind: list(outcomes.values()).count(kind) for kind in ("passed", "skipped", "failed")})
    return "failed" in outcomes.values()


if __name__ == "__main__":
    sys.exit(main())
