"""For every test: a watchdog that shows all stacks, and a check at the end that nothing is left behind.

Contains the fixtures that lend ranks and hosts.
"""

import contextlib
import ctypes
import faulthandler
import gc
import math
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import hypothesis
import pytest
from leftovers import command_of, descendants, left_running, names_in_shm, our_descriptors, until_none
from waiting import set_left_s

DEFAULT_LIMIT_S = 150
PATIENCE = int(os.environ.get("TEST_PATIENCE", "1"))  # multiplies LIMIT_S, for slow builds: under a sanitizer
# The time, in seconds since 1970, after which no test begins.
UNTIL = float(os.environ.get("TEST_UNTIL", "inf"))
TICK_S = 0.5
PR_SET_CHILD_SUBREAPER = 36
ROOT = Path(__file__).resolve().parents[1]
OUR_NAMES = ("shmring", "psm_", "sem.mp-")  # others on this machine use it as well

# A spawned process imports a test's functions as tests.FOLDER.MODULE. At the end of the path: the checkout
# may be unbuilt, beside an installed package.
sys.path.append(str(ROOT))
# Hundreds of short programs would each compile shmring again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONFAULTHANDLER"] = "1"  # the watchdog asks children for their stacks by SIGABRT
# Whoever runs the tests may have tuned shmring for this machine: not for them.
# No example is late on a machine that stands still at times.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")
EMPTY_CACHE = tempfile.TemporaryDirectory(prefix="shmring-cache-")
os.environ["XDG_CACHE_HOME"] = EMPTY_CACHE.name
real_stderr = None


def pytest_configure(config):
    global real_stderr
    config.addinivalue_line("markers", f"limit(seconds): watchdog of this test (default {DEFAULT_LIMIT_S} s)")
    real_stderr = os.fdopen(os.dup(2), "w")  # pytest does not capture at this moment
    # Ranks whose launcher was killed become our children, so the check below finds them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_collection_finish():
    """Exempt all objects of the collection from garbage collection, here and in forked ranks.

    A full collection takes 0.1 s otherwise, and writes to pages that forked processes share.
    """
    gc.freeze()


def pytest_runtest_setup():
    if time.time() > UNTIL:
        pytest.skip("no time is left for it: see TEST_UNTIL")


def watch(done, name, limit_s):
    """Count small waits, not the clock: a machine that stood still for a minute is no hanging test."""
    for tick in range(int(limit_s / TICK_S)):
        set_left_s(limit_s - tick * TICK_S)
        if done.wait(TICK_S):
            return
    print(f"\n{name} took longer than {limit_s} s; the stacks of all its processes:", file=real_stderr)
    faulthandler.dump_traceback(real_stderr)
    for pid in sorted(descendants()):
        print(f"--- process {pid}: {command_of(pid)}", file=real_stderr, flush=True)
        os.kill(pid, signal.SIGABRT)
        time.sleep(0.2)
    for pid in descendants():
        os.kill(pid, signal.SIGKILL)
    os._exit(70)


@pytest.fixture(autouse=True)
def watchdog(request):
    """End the whole session when a test hangs: the next test would otherwise meet what a hanging rank
    holds."""
    marker = request.node.get_closest_marker("limit")
    limit_s = (marker.args[0] if marker else DEFAULT_LIMIT_S) * PATIENCE
    set_left_s(limit_s)  # of this test, before its ranks read it
    done = threading.Event()
    dog = threading.Thread(target=watch, args=(done, request.node.nodeid, limit_s), daemon=True)
    dog.start()
    # This works even if no thread yields the GIL; it counts wall time.
    faulthandler.dump_traceback_later(2 * limit_s + 60, exit=True, file=real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    done.set()
    dog.join()
    set_left_s(math.inf)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left():
    """No name in /dev/shm, no process (nor an orphan), no segment and no socket outlives the tests."""
    names, descriptors = names_in_shm(OUR_NAMES), our_descriptors()
    yield
    gc.collect()
    assert not until_none(left_running), "processes left running"
    left = until_none(lambda: names_in_shm(OUR_NAMES) - names)  # ignore the names of other workers
    assert not left, f"left in /dev/shm: {left}"
    leaked = {fd: target for fd, target in our_descriptors().items() if descriptors.get(fd) != target}
    assert not leaked, f"descriptors left open: {leaked}"


@pytest.fixture(scope="session", autouse=True)
def ctrl_c():
    """Make Ctrl-C raise KeyboardInterrupt, here and in the processes that tests start.

    pytest may have been started with SIGINT ignored (`&` in a script), which fork and exec pass on.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def crews():
    """Processes that are ranks, by how many they are: they serve all tests of a module."""
    found = {}
    yield found
    for ranks in found.values():
        ranks.__exit__()


@pytest.fixture
def world_of(crews):
    """world_of(3, SHMRING_CHUNK=256) → Ranks (see ranks.py) that have just met in a new world."""
    from ranks import Ranks

    def meet(size, **how):
        if size in crews and not crews[size].are_idle():
            crews.pop(size).__exit__()
        if size not in crews:
            crews[size] = Ranks(size).__enter__()
        return crews[size].meet(**how)

    return meet


@pytest.fixture
def three():
    """Three connected ranks for one test, which may change or kill them."""
    from ranks import Ranks

    with Ranks(3) as ranks:
        yield ranks.meet()


@pytest.fixture
def world_over_hosts(crews):
    """world_over_hosts([0, 0, 1, 1], SHMRING_CHUNK=256) → Ranks that are connected as if they were on two
    hosts.

    Like world_of, but ranks with different numbers use loopback.
    """
    from ranks import Ranks

    def meet(nodes, **how):
        crew = "loopback", *nodes
        if crew in crews and not crews[crew].are_idle():
            crews.pop(crew).__exit__()
        if crew not in crews:
            crews[crew] = Ranks(len(nodes), nodes=nodes).__enter__()
        return crews[crew].meet(**how)

    return meet


@pytest.fixture(scope="module")
def networks():
    """networks(2, 10**9) → Hosts (see hosts.py) with all links up; skips if none can be made.

    They serve all tests of a module; who: the owner of the ranks on them, so that no test ends another's
    ranks.
    """
    from hosts import Hosts, NoHosts

    with contextlib.ExitStack() as made:
        found = {}

        def lend(count, rate_bit_s=None, *, who=None):
            what = count, rate_bit_s, who
            if what not in found:
                try:
                    found[what] = made.enter_context(Hosts(count, rate_bit_s))
                except NoHosts as missing:
                    pytest.skip(f"no stand-ins for hosts: {missing}")
            found[what].mend()
            return found[what]

        yield lend


@pytest.fixture
def hosts(networks):
    """hosts(2), or hosts(2, 10**9) for 1 Gbit/s → Hosts; after the test no process is on them."""
    lent = []

    def lend(count, rate_bit_s=None):
        lent.append(networks(count, rate_bit_s))
        return lent[-1]

    yield lend
    for network in lent:
        network.clear()


@pytest.fixture
def world_over(networks, crews):
    """world_over([0, 0, 1, 1], SHMRING_CHUNK=256) → Ranks that have just met, each on its host.

    Like world_of, but over hosts, in any order; ranks.hosts has them by rank.
    """
    from ranks import Ranks

    def meet(places, **how):
        places = tuple(places)
        network = networks(max(places) + 1, who="world_over")
        if places in crews and not crews[places].are_idle():
            crews.pop(places).__exit__()
        if places not in crews:
            crews[places] = Ranks(len(places), on=[network[place] for place in places]).__enter__()
        return crews[places].meet(**how)

    return meet
