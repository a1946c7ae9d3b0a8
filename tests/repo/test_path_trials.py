"""The choice between two paths by trials, on invented times."""

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("gcc")
if COMPILER is None or not (ROOT / "src").is_dir():
    pytest.skip("needs gcc and the checkout", allow_module_level=True)
Compiler = pytest.importorskip("Cython.Compiler.Main")

WINDOW, TRIAL, LONGEST_INTERVAL = 16, 12 + 2, 2048
LONG, SHORT = 4 << 20, 64 << 10
NEAR, FAR = False, True
RING_WINS, RING_LOSES = (200_000, 300_000), (2_000_000, 300_000)


@pytest.fixture(scope="module")
def paths_taken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trials")
    source = shutil.copy(Path(__file__).with_name("trials.pyx"), folder)
    options = Compiler.CompilationOptions(include_path=[str(ROOT)], language_level=3)
    translated = Compiler.compile(source, options)
    assert translated.num_errors == 0
    built = folder / "trials.so"
    include = ["-I", str(ROOT / "src"), "-I", sysconfig.get_path("include")]
    command = [COMPILER, "-O1", "-w", "-shared", "-fPIC", *include, translated.c_file, "-o", str(built)]
    subprocess.run(command, check=True)
    spec = importlib.util.spec_from_file_location("trials", built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.paths_taken


@pytest.mark.parametrize("nbytes", [LONG, SHORT])
def test_the_faster_path_is_found_and_kept(paths_taken, nbytes):
    taken = paths_taken([(4000, NEAR, RING_WINS)], nbytes)
    assert 0 < sum(taken) < 100  # of all trials
    assert taken[: WINDOW + 1] == [0] * WINDOW + [1]  # the first one comes soon
    taken = paths_taken([(4000, NEAR, RING_LOSES)], nbytes)
    assert sum(taken) > 3900


def test_trials_of_long_calls_begin_again_when_the_cores_move(paths_taken):
    settled = (3000, FAR, RING_LOSES)
    after = paths_taken([settled, (200, NEAR, RING_WINS)], LONG)[3000:]
    assert sum(after[WINDOW + TRIAL :]) <= TRIAL  # later trials, which end early
    stayed = paths_taken([settled, (200, FAR, RING_WINS)], LONG)[3000:]
    assert sum(stayed) > 150  # no time has changed that is measured


def test_a_move_during_a_trial_ends_it(paths_taken):
    for calls in range(WINDOW, WINDOW + TRIAL):
        after = paths_taken([(calls, FAR, RING_LOSES), (200, NEAR, RING_WINS)], LONG)[calls:]
        if calls < WINDOW + 12:  # the trial has not ended
            assert after[0] == 0
        assert after[2 * WINDOW + TRIAL :].count(1) <= TRIAL  # a later trial


def test_moves_all_the_time_do_not_put_off_the_first_trial(paths_taken):
    taken = paths_taken([(5, far, RING_LOSES) for _ in range(20) for far in (NEAR, FAR)], LONG)
    assert 1 in taken


def test_trials_of_short_calls_come_soon_in_any_case(paths_taken):
    taken = paths_taken([(3000, FAR, RING_LOSES), (3 * LONGEST_INTERVAL, NEAR, RING_WINS)], SHORT)
    assert taken[3000:][2 * LONGEST_INTERVAL :].count(1) < 50
