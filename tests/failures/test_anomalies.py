"""After an exception within a call, either the call has not begun or all ranks raise the same error.

A plain run has a few steps, `pytest -m slow` a bounded part, `pytest -m soak` the rest.
"""

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import anomalies
import pytest
from anomalies import (
    AS_IF,
    COMPLETE,
    ENDED,
    FAILED,
    LOST,
    WORLDS,
    Campaign,
    Seen,
    inject_all,
    inject_twice,
    judge,
)
from anomaly_case import CASES
from combinations import first
from injections import KINDS, Broken, Interrupt, Terminate, injection_of

# ---- the injections themselves -----------------------------------------------------------------------------


def injected(kind, function, n, m=None):
    """Run a function with the injection; return the injection and the outcome."""
    injection = injection_of(kind, n, m)
    gc.disable()  # hypothesis has a callback for collections, and an exception in it would reach nobody
    try:
        return injection, injection.run(function)
    except BaseException as error:
        return injection, type(error)
    finally:
        gc.enable()


def test_every_point_is_met_once_and_then_none():
    counted, _ = injected("point", tempfile.gettempprefix, 0)
    found = []
    while True:
        injection, outcome = injected("point", tempfile.gettempprefix, len(found) + 1)
        if not injection.places:
            break
        assert outcome is Interrupt
        found += injection.places
    assert outcome == tempfile.gettempprefix()
    assert len(found) == counted.count > 1
    assert found[0].endswith(" gettempprefix")  # at its entry, before it calls anything


def test_a_second_injection_is_in_what_handles_the_first():
    def stack():
        with contextlib.ExitStack() as closing:
            closing.callback(os.path.join, "a", "b")
            os.path.join("c", "d")

    places, seconds = set(), 0
    for m in itertools.count(1):
        both, outcome = injected("point", stack, 8, m)
        if len(both.places) < 2:
            break
        assert outcome is Terminate
        places.add(both.places[1])
        seconds += 1
    assert outcome is Interrupt
    assert seconds > 3
    assert any("__exit__" in place for place in places)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_injection_a_call_is_itself(kind):
    injection, outcome = injected(kind, lambda: 42, 0)
    assert outcome == 42
    assert injection.places == []


def test_a_call_of_the_system_fails():
    injection, outcome = injected("system", lambda: os.stat("/"), 1)
    assert outcome is Broken
    assert injection.places[0].endswith("in stat")
    os.stat("/")


def test_memory_ends():
    injection, outcome = injected("memory", lambda: [0] * 1000, 1)
    assert outcome is MemoryError
    assert injection.places


# ---- trials are judged -------------------------------------------------------------------------------------

ABORTED = "call", "Aborted", "rank 0 gave up"
LATE = "call", "Timeout", "rank 1 did not come"
INTERRUPTED = "call", "Interrupt", "somewhere"
JUDGED = {
    "nothing": (Seen(), Seen(), COMPLETE),
    "repeated": (Seen(raised=[INTERRUPTED]), Seen(), AS_IF),
    "the same error": (Seen(ended=ABORTED, shrunk=2), Seen(ended=ABORTED, shrunk=2), ENDED),
    "one goes on": (Seen(ended=ABORTED, shrunk=2), Seen(), FAILED),
    "other words": (Seen(ended=ABORTED, shrunk=2), Seen(ended=(*ABORTED[:2], "x"), shrunk=2), FAILED),
    "a timeout": (Seen(ended=LATE, shrunk=2), Seen(ended=LATE, shrunk=2), FAILED),
    "too few": (Seen(ended=ABORTED, shrunk=1), Seen(ended=ABORTED, shrunk=1), FAILED),
    "a wrong sum": (Seen(raised=[INTERRUPTED]), Seen(trouble="a following sum is 3, not 4"), FAILED),
    "a descriptor": (Seen(raised=[INTERRUPTED], left="+1 socket"), Seen(), LOST),
    "two descriptors": (Seen(raised=[INTERRUPTED], left="+2 socket"), Seen(), FAILED),
    "another's": (Seen(raised=[INTERRUPTED]), Seen(left="+1 socket"), FAILED),
    "a thread": (Seen(raised=[INTERRUPTED], left="+1 shmring-life"), Seen(), FAILED),
    "a spinning thread": (Seen(raised=[INTERRUPTED], cpu=(0.9, 1.0)), Seen(), FAILED),
}


@pytest.mark.parametrize("name", JUDGED)
def test_trials_are_judged(name):
    *seen, outcome = JUDGED[name]
    assert judge(seen, WORLDS[0], "point", False).outcome == outcome


def test_a_descriptor_that_is_left_by_a_failing_system_call_is_a_failure():
    seen = Seen(raised=[INTERRUPTED], left="+1 socket"), Seen()
    assert judge(seen, WORLDS[0], "system", False).outcome == FAILED


# ---- the bounded part --------------------------------------------------------------------------------------

ONE_HOST, OTHER_RANK, THREE, ACROSS, ACROSS_THREE = WORLDS[0], WORLDS[1], WORLDS[2], WORLDS[4], WORLDS[5]
# (world, kind, cases, every so manieth n)
FEW = (  # of each kind, and over hosts: for a plain run
    (ONE_HOST, "point", ("all_gather_object",), 3),
    (ONE_HOST, "point", ("split", "all_reduce_first"), 701),
    (ONE_HOST, "signal", ("all_reduce_late",), 1),
    (ONE_HOST, "memory", ("message_object",), 307),
    (OTHER_RANK, "system", ("empty", "dup"), 5),
    (OTHER_RANK, "point", ("close", "shrink"), 701),
    (ACROSS, "point", ("broadcast_object", "split"), 701),
)
BOUNDED = (
    (OTHER_RANK, "memory", ("mpi_broadcast_long", "mpi_all_gather_long"), 5),
    (ONE_HOST, "point", ("all_gather_object", "fence"), 1),
    (ONE_HOST, "point", ("empty", "split", "all_reduce_first", "message_first", "adopt", "shared"), 41),
    (ONE_HOST, "signal", ("all_reduce_late", "all_reduce_behind", "work_wait", "message_large"), 1),
    (ONE_HOST, "memory", ("broadcast_object", "all_gather_object"), 7),
    (ONE_HOST, "memory", ("message_object", "empty", "all_reduce_many", "group"), 37),
    (OTHER_RANK, "memory", ("mpi_broadcast", "mpi_message", "mpi_message_object"), 3),
    (OTHER_RANK, "point", ("mpi_gather", "mpi_all_to_all", "mpi_fold", "mpi_exchange", "mpi_neighbors"), 1),
    (OTHER_RANK, "point", ("mpi_exchange_objects", "mpi_window_lock"), 1),
    (ACROSS, "point", ("mpi_create_group",), 401),
    (ONE_HOST, "system", ("empty", "dup"), 2),
    (OTHER_RANK, "point", ("broadcast_object", "scatter_object", "message_object"), 1),
    (OTHER_RANK, "point", ("full", "group", "release", "close"), 41),
    (OTHER_RANK, "point", ("shrink",), 97),
    (OTHER_RANK, "point", ("sharded_optimizer", "local_sgd", "parameter_server"), 151),
    (OTHER_RANK, "point", ("reduction_servers", "pipeline_run"), 151),
    (THREE, "point", ("broadcast_object", "copy_of", "dup", "compressed_int8", "sparse_pairs"), 37),
    (ACROSS, "point", ("broadcast_object", "all_gather_v", "split"), 43),
    (ACROSS_THREE, "signal", ("all_reduce_late", "all_reduce_large_late"), 1),
)


def assert_no_failures(found, where):
    failures = {at: verdict for at, verdict in found.items() if verdict.outcome == FAILED}
    assert not failures, (where, failures)


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("world", "kind", "names", "stride"),
    first(len(FEW), FEW + BOUNDED),
    ids=lambda value: str(value).replace(" ", "_")[:40],
)
def test_a_call_that_raises_has_not_begun_or_ends_the_communicator(world, kind, names, stride):
    if kind == "memory":
        pytest.importorskip("_testcapi", reason="needs _testcapi, whose set_nomemory fails allocations")
    with Campaign(world) as campaign:
        for name in names:
            found = inject_all(campaign, name, kind, numbers=itertools.count(1, stride))
            assert_no_failures(found, f"{name}, {kind}, {world}")
        assert campaign.is_idle()


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("name", "kind", "n"),
    first(1, [("all_gather_object", "point", 5), ("empty", "point", 30), ("all_reduce_late", "signal", 2)]),
)
def test_a_second_exception_changes_nothing(name, kind, n):
    with Campaign(ONE_HOST) as campaign:
        campaign.check_without(name)
        assert_no_failures(inject_twice(campaign, name, kind, n), f"{name}, {kind}")
        assert campaign.is_idle()


def npoints(campaign, name):
    """Return the number of points in its call, plus at most 100: the number differs from run to run."""
    n = 1
    while campaign.verdict(name, ("point", n, None)).has_raised:
        n += 100
    return n


@pytest.mark.slow
def test_an_interrupt_at_the_end_of_shrink_is_reported():
    """The others already have the new communicator; they learn at once that this rank has left it."""
    with Campaign(OTHER_RANK) as campaign:
        campaign.check_without("shrink")
        end = npoints(campaign, "shrink")
        found = inject_all(campaign, "shrink", "point", numbers=range(max(end - 500, 1), end + 1, 3))
        assert_no_failures(found, "the end of shrink")


@pytest.mark.slow
def test_every_case_passes_without_an_injection():
    with Campaign(ONE_HOST) as campaign:
        for name in CASES:
            campaign.check_without(name)


# ---- the long part -----------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.limit(12 * 3600)
def test_every_step_of_every_call(tmp_path):
    command = [sys.executable, anomalies.__file__, "--twice", "10", "--json", str(tmp_path / "rows")]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
