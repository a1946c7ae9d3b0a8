"""Measured tables: when they are used and when not, that all ranks use rank 0's, and the tuner's conclusions
from times. Never a test of speed."""

import itertools
import json
import os
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from combinations import first
from engines import environment
from ranks import Ranks

import shmring
from shmring._config import thresholds, tuning_table
from shmring._config.settings import Settings
from shmring.tools import tune
from shmring.tools._bench.trials import Load, Timed, trial

TABLES = {
    2: {"any": {"small_nbytes": 4096}, "near": {"chunk_nbytes": 65536}, "far": {"exchange_nbytes": 8192}},
    3: {"any": {"depth": 2}},
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuning.json"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Return the place of the default table."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shmring" / "tuning.json"


def write(path, **changes):
    content = {
        "format": 1,
        "machine": tuning_table.machine(),
        "tables": {"2": {"any": {"depth": 3}}},
    } | changes
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


# ---- which table is used ----------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(path):
    tuning_table.save(path, TABLES, thresholds.LIMITS)
    assert tuning_table.load(path, thresholds.LIMITS) == TABLES
    assert [child.name for child in path.parent.iterdir()] == ["tuning.json"]


def test_nonsense_is_not_saved(path):
    with pytest.raises(tuning_table.Unusable):
        tuning_table.save(path, {2: {"any": {"depth": 1000}}}, thresholds.LIMITS)
    assert not path.exists()


def values(**numbers):
    return {"2": {"any": numbers}}


DAMAGES = {
    "format": ({"format": 2}, "not of format 1"),
    "machine": ({"machine": {"cpu": "another", "cpus": 3}}, "another machine"),
    "no tables": ({"tables": None}, "no tables"),
    "ranks": ({"tables": {"two": {}}}, "not a number of ranks"),
    "distance": ({"tables": {"2": {"middle": {}}}}, "a key other than any, near, far"),
    "values": ({"tables": {"2": {"any": [1]}}}, "names and numbers"),
    "name": ({"tables": values(speed=7)}, "does not know"),
    "too large": ({"tables": values(chunk_nbytes=1 << 40)}, "chunk_nbytes is 1099511627776; allowed"),
    "too small": ({"tables": values(chunk_nbytes=0)}, "allowed: 4096"),
    "negative": ({"tables": values(depth=-1)}, "depth is -1"),
    "text": ({"tables": values(depth="4")}, "depth is '4'"),
    "bool": ({"tables": values(depth=True)}, "depth is True"),
    "float": ({"tables": values(depth=3.0)}, "depth is 3.0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_table_is_not_used(cache, damage):
    changes, why = DAMAGES[damage]
    write(cache, **changes)
    with pytest.warns(RuntimeWarning, match=r"python -m shmring\.tools\.tune") as warned:
        found = thresholds.tables(Settings(), 2)
    assert why in str(warned[0].message)
    assert found == (thresholds.built_in(2), thresholds.built_in(2))
    with pytest.raises(ValueError, match="a table that cannot be used"):
        thresholds.tables(Settings(tuning=str(cache)), 2)
    assert thresholds.tables(Settings(tuning="none"), 2) == (thresholds.built_in(2), thresholds.built_in(2))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"7", b" " * 70_000])
def test_what_is_no_table_at_all_is_not_used(cache, text):
    cache.parent.mkdir()
    cache.write_bytes(text)
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert thresholds.tables(Settings(), 2) == (thresholds.built_in(2), thresholds.built_in(2))


def test_a_path_that_is_no_file_is_ignored_at_once(cache):
    cache.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        thresholds.tables(Settings(), 2)
    cache.rmdir()
    os.mkfifo(cache)
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        thresholds.tables(Settings(), 2)


def test_no_table_is_no_matter_unless_it_was_named(cache):
    assert thresholds.tables(Settings(), 2) == (thresholds.built_in(2), thresholds.built_in(2))
    with pytest.raises(ValueError, match="No such file"):
        thresholds.tables(Settings(tuning=str(cache)), 2)


@pytest.mark.parametrize("home", ["/dev/null", "/nonexistent", "relative", ""])
def test_a_user_without_a_home_has_no_table(monkeypatch, home):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", home)
    assert thresholds.tables(Settings(), 2) == (thresholds.built_in(2), thresholds.built_in(2))


def test_a_table_is_by_ranks_and_distance(cache):
    tuning_table.save(cache, TABLES, thresholds.LIMITS)
    near, far = thresholds.tables(Settings(), 2)
    assert near == thresholds.built_in(2) | {"small_nbytes": 4096, "chunk_nbytes": 65536}
    assert far == thresholds.built_in(2) | {"small_nbytes": 4096, "exchange_nbytes": 8192}
    assert thresholds.tables(Settings(), 4) == (thresholds.built_in(4), thresholds.built_in(4))


def test_settings_known_in_advance_are_equal_near_and_far(cache):
    write(cache, tables={"2": {"near": {"small_nbytes": 4096, "fuse_nbytes": 64, "depth": 8}}})
    assert thresholds.tables(Settings(), 2) == (thresholds.built_in(2), thresholds.built_in(2))


def test_the_environment_has_precedence(cache):
    tuning_table.save(cache, TABLES, thresholds.LIMITS)
    near, far = thresholds.tables(Settings(chunk_nbytes=1024, depth=5), 2)
    assert near == far
    assert near["chunk_nbytes"] == near["one_chunk_nbytes"] == 1024
    assert near["cached_most_nbytes"] == 0  # nothing keeps to a few slots of another length
    assert (near["depth"], near["small_nbytes"]) == (5, 1024)


# ---- the ranks --------------------------------------------------------------------------------------------


def some_calls(comm):
    """Return checksums of the results of calls of many sizes."""
    found = []
    for count in (1, 100, 3000, 10_000, 70_000, 300_000, 1_100_000):
        x = np.arange(count) * 7 + comm.rank * 1_000_003  # no two ranks or places alike
        left = [np.empty_like(x), x.copy(), x.copy(), x.copy()]
        comm.all_reduce(x, out=left[0])
        comm.all_reduce(left[1])
        comm.scan(left[2])
        comm.broadcast(left[3], root=1)
        shared = comm.copy_of(x)
        elsewhere = comm.zeros(count, "i8")
        in_place_on_one = shared if comm.rank == 0 else elsewhere
        comm.all_reduce(shared, out=in_place_on_one)
        parts = np.resize(x, (comm.size, max(1, count // 9)))
        left += [in_place_on_one, comm.all_gather(x), comm.all_to_all(parts), comm.reduce_scatter(parts)]
        left.append(comm.scatter(parts if comm.rank == 1 else None, root=1, like=parts[0]))
        left += comm.all_gather_v(x[: count * comm.rank // 2])
        small = [np.full(count % 700, comm.rank * 31 + i, "f4") for i in range(30)]
        comm.all_reduce_many(small)
        gathered = comm.gather(x, 1)
        comm.reduce(x, root=1)
        left += [x, *small, *([] if gathered is None else [gathered])]
        found.append([zlib.crc32(array.tobytes()) for array in left])
    return found


EXTREMES = {
    "least": {name: least for name, (least, _) in thresholds.LIMITS.items()},
    "most": {name: most for name, (_, most) in thresholds.LIMITS.items()},
    "large chunks": {"chunk_nbytes": 8 << 20, "one_chunk_nbytes": 4096, "exchange_nbytes": 4096, "depth": 2},
    "few slots": {
        "cached_chunk_nbytes": 4096,
        "cached_most_nbytes": thresholds.NEVER,
        "one_chunk_nbytes": 4096,
    },
    "large exchanges": {
        "exchange_nbytes": 8 << 20,
        "chunk_nbytes": 4096,
        "one_chunk_nbytes": 4096,
        "depth": 2,
    },
}


@pytest.fixture(scope="module")
def without_table():
    """The results of some_calls, by the number of ranks."""
    found = {}
    for size in (2, 3):
        with Ranks(size) as ranks:
            found[size] = ranks.meet(SHMRING_TUNING="none")(some_calls)
    return found


IN_A_PLAIN_RUN = [(2, "least"), (3, "most"), (3, "few slots")]
EACH = sorted(itertools.product([2, 3], EXTREMES), key=lambda each: each not in IN_A_PLAIN_RUN)


@pytest.mark.parametrize(("size", "extreme"), first(len(IN_A_PLAIN_RUN), EACH))
def test_any_table_within_the_limits_gives_the_same_results(world_of, without_table, path, size, extreme):
    tuning_table.save(
        path, {size: dict.fromkeys(tuning_table.DISTANCES, EXTREMES[extreme])}, thresholds.LIMITS
    )
    for way in ("near", "far", "auto"):
        assert world_of(size, SHMRING_TUNING=path, SHMRING_PATH=way)(some_calls) == without_table[size]


def test_rank_0_s_table_holds_for_all(path, tmp_path):
    tuning_table.save(path, {3: {"any": EXTREMES["least"]}}, thresholds.LIMITS)
    other = tmp_path / "other.json"
    tuning_table.save(other, {3: {"any": EXTREMES["most"]}}, thresholds.LIMITS)
    with Ranks(3) as ranks:
        ranks.meet()
        want = ranks(some_calls)
        of_rank = {0: {"SHMRING_TUNING": str(path)}, 1: {"SHMRING_TUNING": str(other)}}
        assert ranks.try_to_meet(of_rank=of_rank) == [None] * 3
        assert ranks(some_calls) == want


def test_a_bad_table_that_rank_0_was_told_to_use_is_an_error_for_all(path):
    write(path, format=7)
    with Ranks(2) as ranks:
        first, second = ranks.try_to_meet(of_rank={0: {"SHMRING_TUNING": str(path)}})
    assert isinstance(first, ValueError)
    assert isinstance(second, Exception)


# ---- the tuner's conclusions from times -------------------------------------------------------------------

QUESTION = tune.Question("chunk_nbytes", (1 << 19, 1 << 18, 1 << 17), lambda _: [])
OF_BOTH = tune.Question("small_nbytes", (1 << 12, 1 << 13), lambda _: [])


def timed(*rows, distances=None):
    return Timed(Load("all_reduce", 8), np.array(rows, float), list(distances or ["near"] * len(rows)))


def test_the_fastest_is_taken_for_the_distance_that_was_seen():
    found = tune.answers(
        QUESTION, QUESTION.candidates, [timed(*[[10, 8, 9]] * 6), timed(*[[10, 9, 8.5]] * 6)]
    )
    assert found["near"][0] == 1 << 18
    assert found["near"][1] == pytest.approx((0.8 * 0.9) ** 0.5)
    assert "far" not in found


def test_small_gains_and_losses_elsewhere_are_not_taken():
    hardly = [timed(*[[10, 9.9, 9.8]] * 6)]
    assert tune.answers(QUESTION, QUESTION.candidates, hardly)["near"] == (1 << 19, 1.0)
    slower_once = [timed(*[[10, 1, 9]] * 6), timed(*[[10, 11, 9]] * 6)]
    assert tune.answers(QUESTION, QUESTION.candidates, slower_once)["near"][0] == 1 << 17


def test_too_few_rounds_say_nothing():
    assert tune.answers(QUESTION, QUESTION.candidates, [timed(*[[10, 1, 9]] * 4)]) == {}
    unclear = timed(*[[10, 1, 9]] * 9, distances=["near"] * 4 + [None] * 5)
    assert tune.answers(QUESTION, QUESTION.candidates, [unclear]) == {}


def test_settings_equal_near_and_far_are_judged_by_both():
    both = timed(*[[10, 5]] * 6, distances=["near", "far"] * 3)
    assert tune.answers(OF_BOTH, OF_BOTH.candidates, [both]) == {"any": (1 << 13, 0.5)}


def test_the_environment_says_from_where_on_there_are_single_copies():
    names = ["single_copy_nbytes", "single_copy_scatter_nbytes"]

    def least(**asked):
        return {
            table[name] for table in thresholds.tables(Settings(tuning="none", **asked), 2) for name in names
        }

    assert least() == {thresholds.built_in(2)[name] for name in names}
    assert least(single_copy_nbytes=4096) == {4096}
    assert least(single_copy_nbytes=0) == {thresholds.NEVER}
    assert least(chunk_nbytes=4096) == {thresholds.NEVER}  # a given chunk requires slots
    assert least(chunk_nbytes=4096, single_copy_nbytes=64) == {64}


@pytest.mark.parametrize("depth", [2, 3, 4, 8])
def test_rings_are_as_deep_as_the_environment_says(depth):
    tables = thresholds.tables(Settings(tuning="none", chunk_nbytes=1 << 20, depth=depth), 2)
    slot_nbytes = thresholds.staging_nbytes(tables, 2) / depth
    assert 1 << 20 < slot_nbytes < (1 << 20) + 4096


def test_every_question_is_about_a_number_that_may_be_so():
    for question in tune.QUESTIONS:
        least, most = thresholds.LIMITS[question.name]
        for built_in in (thresholds.DEFAULTS, *thresholds.OF_PROCESSOR.values()):
            assert built_in.get(question.name, question.candidates[0]) in question.candidates
        assert all(least <= value <= most for value in question.candidates)
        assert question.loads(2)
    not_asked = {"single_copy_measured", "single_copy_nbytes", "single_copy_most_nbytes"}
    assert {question.name for question in tune.QUESTIONS} == set(thresholds.LIMITS) - not_asked


def test_a_threshold_without_an_effect_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(tune, "usable_cpus", lambda: 2)
    of = {ranks: {question.name for question in tune.QUESTIONS if question.is_for(ranks)} for ranks in (2, 3)}
    assert of[2] - of[3] == {"small_all_reduce_nbytes"}  # ranks that share CPUs use small_nbytes
    assert of[3] - of[2] == {"chain_nbytes", "small_nbytes"}  # two ranks slice no reduce of float32


def test_a_scatter_is_not_measured_while_its_threshold_is_asked_for(monkeypatch):
    """Otherwise all candidates would take the measured path in the same way."""
    tried = []

    def spawn(function, ranks, arguments):
        tried.extend(tuning_table.load(path, thresholds.LIMITS)[ranks] for path in arguments[1])
        return [[]]

    monkeypatch.setattr(tune.shmring, "spawn", spawn)
    monkeypatch.setattr(tune, "answers", lambda *_: {})
    for question in tune.QUESTIONS:
        tune._ask(2, question, question.candidates[:2], {"any": {}, "near": {}, "far": {}}, 0.0)
        moves = {load.call for load in question.loads(2)} & {"broadcast", "scatter", "all_gather"}
        for table in tried if moves else ():
            assert table["near"]["single_copy_measured"] == table["far"]["single_copy_measured"] == 0
        tried.clear()


class Clock:
    """Time that passes only in the questions."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class Lines:
    """A bar that keeps its lines."""

    def __init__(self):
        self.lines = []

    def write_line(self, text):
        self.lines.append(text)

    def advance(self):
        pass


def test_questions_share_the_seconds_and_the_last_are_not_asked_if_there_is_no_time_left(monkeypatch):
    clock, bar, shares = Clock(), Lines(), []

    def ask(ranks, question, candidates, table, until):
        shares.append(until - clock.now)
        clock.now += 10
        return {"any": (candidates[0], 1.0)}

    monkeypatch.setattr(tune, "time", clock)
    monkeypatch.setattr(tune, "_ask", ask)
    _, answered = tune.tune(2, tune.QUESTIONS[:5], 30.0, bar)
    assert shares == pytest.approx([6 * 2 / 3, 5 * 2 / 3, 4 * 2 / 3])  # a third is for the second trial
    assert [answer.name for answer in answered] == [question.name for question in tune.QUESTIONS[:3]]
    assert [line.endswith("stays, no time left; give more --seconds") for line in bar.lines] == [
        *[False] * 3,
        *[True] * 2,
    ]


def test_a_trial_ends_with_its_time():
    def calls(comm, worlds):
        loads = [Load("all_reduce", 8), Load("broadcast", 4096)]
        return [
            len(found.seconds) for found in trial(comm, worlds, ["none"] * 2, loads, time.monotonic() - 1)
        ]

    assert shmring.spawn(calls, 2, [[shmring.world(2), shmring.world(2)]], method="fork")[0] == [1, 1]


def test_the_summary_says_what_would_be_better_and_how_to_keep_it():
    same = tune.Answer(2, "any", "depth", 4, 4, 1.0)
    better = tune.Answer(2, "far", "chain_nbytes", thresholds.NEVER, 1 << 18, 0.7)
    assert tune.summary([same, better], 2, kept=False) == (
        "1 of 2 values would be better: chain_nbytes 256 KiB instead of never (2 ranks, far); "
        "keep it with: shmring tune --ranks 2 --only chain_nbytes"
    )
    assert tune.summary([same, better], 2, kept=True).startswith("1 of 2 values are better: chain_nbytes")
    assert tune.summary([same], 1, kept=False) == "0 of 1 values would be better: the built-in values stay"
    assert tune.summary([], 3, kept=False) == (
        "0 of 0 values would be better; 3 could not be measured, give more --seconds"
    )


def test_no_bar_is_drawn_where_there_is_no_terminal(path):
    done = run_tune("--ranks", "2", "--seconds", "0.01", "--only", "depth", "--dry-run")
    assert done.stderr == ""


def run_tune(*arguments):
    command = [sys.executable, "-m", "shmring.tools.tune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_a_tiny_run_writes_a_table_that_is_used(path):
    few = ["--ranks", "2,3", "--seconds", "0.05", "--only", "fuse_nbytes,far_stream_nbytes"]
    tuning_table.save(
        path, {2: {"any": {"depth": 3, "fuse_nbytes": 64}}, 5: {"any": {"depth": 2}}}, thresholds.LIMITS
    )
    result = run_tune(*few, "--output", str(path))
    assert result.returncode == 0, result.stderr + result.stdout
    assert "2 ranks" in result.stdout
    assert "3 ranks" in result.stdout
    found = tuning_table.load(path, thresholds.LIMITS)
    assert set(found) == {2, 3, 5}
    assert found[2]["any"]["depth"] == 3  # other values are kept
    assert found[2]["any"].get("fuse_nbytes") != 64
    assert found[5] == {"any": {"depth": 2}}


def test_a_dry_run_writes_nothing(path):
    result = run_tune(
        "--ranks", "2", "--seconds", "0.01", "--only", "depth", "--dry-run", "--output", str(path)
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert "depth" in result.stdout
    assert not path.exists()


@pytest.mark.parametrize("arguments", [["--ranks", "1"], ["--seconds", "nan"], ["--only", "speed"]])
def test_wrong_arguments_are_refused(arguments):
    result = run_tune(*arguments, "--dry-run")
    assert result.returncode == 2
    assert arguments[0] in result.stderr
    assert len(result.stderr.splitlines()) == 1


# ---- the command ------------------------------------------------------------------------------------------

ANSWER = {
    "ranks": {"type": "integer", "minimum": 2},
    "distance": {"enum": list(tuning_table.DISTANCES)},
    "name": {"enum": list(thresholds.LIMITS)},
    "built_in": {"type": "integer"},
    "taken": {"type": "integer"},
    "part_of_time": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}
TOLD = {
    "machine": {"type": "object"},
    "answers": {
        "type": "array",
        "items": {"properties": ANSWER, "required": list(ANSWER), "additionalProperties": False},
    },
    "tables": {"type": "object"},
    "written": {"type": ["string", "null"]},
}
TOLD_SCHEMA = {"properties": TOLD, "required": list(TOLD), "additionalProperties": False}


def shmring_tune(*arguments, **variables):
    command = [sys.executable, "-m", "shmring", "tune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(**variables))


def test_the_command_tells_programs_what_it_has_measured_and_taken(path):
    jsonschema = pytest.importorskip("jsonschema")
    tuning_table.save(path, {2: {"any": {"small_nbytes": 64}}}, thresholds.LIMITS)
    few = ["--ranks", "2", "--seconds", "0.05", "--only", "fuse_nbytes", "--json"]
    done = shmring_tune(*few, "--output", str(path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    jsonschema.validate(found, TOLD_SCHEMA)
    assert found["written"] == str(path)
    assert found["machine"] == tuning_table.machine()
    assert {int(ranks): table for ranks, table in found["tables"].items()} == tuning_table.load(
        path, thresholds.LIMITS
    )
    # On a busy machine, or one that moves, there may be too few rounds for an answer.
    assert len(found["answers"]) == 1 or "too few rounds" in done.stderr
    for answer in found["answers"]:
        assert (answer["ranks"], answer["name"], answer["distance"]) == (2, "fuse_nbytes", "any")
        taken = found["tables"]["2"]["any"].get("fuse_nbytes", answer["built_in"])
        assert taken == answer["taken"]
        assert "2 ranks, any: fuse_nbytes: " in done.stderr  # users may follow it nevertheless


@pytest.mark.parametrize("output", ["/dev/null/tuning.json", "/dev", "/proc/none/tuning.json"])
def test_an_unwritable_path_is_refused_before_measuring(output):
    done = shmring_tune("--seconds", "20", "--output", output)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("shmring tune: ")
    assert output in line


def test_a_setting_that_would_keep_ranks_from_meeting_is_one_line(path):
    done = shmring_tune("--ranks", "2", "--output", str(path), "--only", "depth", SHMRING_TIMEOUT="abc")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("shmring tune: SHMRING_TIMEOUT is 'abc'; allowed: ")
    assert not path.exists()


def test_a_user_without_a_home_is_reported_at_once(tmp_path):
    done = shmring_tune(HOME="relative", XDG_CACHE_HOME="")
    assert (done.returncode, "give --output" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("built_in", "taken", "text"),
    [(thresholds.NEVER, 65536, "64 KiB takes 0.80 of the time with never"), (4, 4, "4 stays")],
)
def test_answers_are_in_words(built_in, taken, text):
    assert str(tune.Answer(2, "near", "depth", built_in, taken, 0.8)) == f"2 ranks, near: depth: {text}"
