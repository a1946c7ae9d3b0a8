"""traceback_tail: the end of a rank's stderr that shows its failure, and which rank caused it."""

import subprocess
import sys
import textwrap

import pytest

from shmring._launch.traceback_tail import exception_line, tier_of, traceback_tail
from shmring._outcome import Tier

# A class that Python prints like RankFailed, without ranks.
RANK_FAILED = "class RankFailed(Exception): __module__ = 'shmring.errors'\n"


def words(text):
    last = traceback_tail(text.strip("\n").splitlines())
    return last, tier_of(last) is Tier.CONSEQUENCE


def words_of(tmp_path, code):
    """Return the tail of a failing Python script's stderr, as Python itself writes it."""
    (tmp_path / "script.py").write_text(RANK_FAILED + textwrap.dedent(code))
    command = [sys.executable, "-X", "faulthandler", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    return words(done.stderr)


def test_the_last_traceback_is_it():
    own = """
        log line
        Traceback (most recent call last):
          File "x"
        OldError: an old one, that was only printed
        log line
        Traceback (most recent call last):
          File "y"
        ValueError: mine
        """
    mine = ["Traceback (most recent call last):", '  File "y"', "ValueError: mine"]
    assert words(textwrap.dedent(own)) == (mine, False)
    assert exception_line([*mine, "its second line"]) == "ValueError: mine"


def test_what_led_to_it_belongs_to_it():
    chained = """
        Traceback (most recent call last):
          File "x"
        shmring.errors.RankFailed: rank 2 is gone

        The above exception was the direct cause of the following exception:

        Traceback (most recent call last):
          File "y"
        ValueError: mine
        """
    lines, consequence = words(textwrap.dedent(chained))
    assert len(lines) == 9
    assert consequence
    assert exception_line(lines) == "ValueError: mine"
    assert words("Traceback (most recent call last):\n  x\nshmring.errors.Timeout: rank 1")[1] is False


OWN, MISMATCH, GONE = "ValueError: mine", "shmring.Mismatch: not the same", "shmring.RankFailed: rank 1"


@pytest.mark.parametrize(
    ("chain", "tier"),
    [
        ([OWN], Tier.OWN),
        ([OWN, OWN], Tier.OWN),
        ([OWN, MISMATCH], Tier.CHAINED),
        ([MISMATCH], Tier.COMMON),
        ([MISMATCH, OWN], Tier.COMMON),
        ([GONE], Tier.CONSEQUENCE),
        ([OWN, GONE], Tier.CONSEQUENCE),
        ([GONE, MISMATCH, OWN], Tier.CONSEQUENCE),
    ],
)
def test_all_exceptions_of_a_chain_count(chain, tier):
    during = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    text = during.join(f"Traceback (most recent call last):\n  x\n{line}" for line in chain)
    assert tier_of(traceback_tail(text.splitlines())) is tier
    after_an_error = Tier.CHAINED if tier is Tier.OWN else tier
    assert tier_of(traceback_tail(text.splitlines()), follows_another=True) is after_an_error


@pytest.mark.parametrize("text", ["", "failed: rank 1 has ended", "one line\nand another"])
def test_a_text_without_a_traceback_is_a_consequence_if_the_rank_has_noted_one(text):
    assert tier_of(text.splitlines()) is Tier.OWN
    assert tier_of(text.splitlines(), follows_another=True) is Tier.CONSEQUENCE


@pytest.mark.parametrize("error", ["the communicator was aborted: rank 1", "a process has failed: rank 1"])
def test_an_error_of_mpi_about_another_rank_is_a_consequence(error):
    text = f"Traceback (most recent call last):\n  x\nshmring.mpi4py.MPI.Exception: {error}"
    assert words(text)[1]
    assert not words(text.replace(error, "invalid rank: rank 1"))[1]


def test_colours_do_not_matter():
    own = [
        "Traceback (most recent call last):",
        "  File \x1b[35m'x'\x1b[0m",
        "\x1b[1;35mshmring.errors.RankFailed\x1b[0m: 1",
    ]
    assert words("\n".join(["before", *own])) == (own, True)


def test_without_a_traceback_it_is_the_last_lines():
    assert words("only a line") == (["only a line"], False)
    assert words("\n".join(map(str, range(30))))[0] == [str(number) for number in range(20, 30)]
    assert words("") == ([], False)
    assert exception_line(["some", "words"]) == "words"


IN_A_THREAD = "import threading\nt = threading.Thread(target=lambda: {}['thread'])\nt.start(); t.join()\n"


@pytest.mark.parametrize(
    ("code", "first", "last"),
    [
        ("def f(:\n", "  File ", "SyntaxError: "),
        ("import nosuch", "Traceback", "ModuleNotFoundError: "),
        ("import atexit\natexit.register(lambda: 1 / 0)\n{}['mine']", "Traceback", "KeyError: 'mine'"),
        (IN_A_THREAD + "1 / 0", "Traceback", "ZeroDivisionError: "),
        (IN_A_THREAD + "exit(3)", "Exception in thread ", "KeyError: 'thread'"),
        ("import ctypes\nctypes.string_at(0)", "Fatal Python error: Segmentation fault", "  File "),
        ("import os\nos.abort()", "Fatal Python error: Aborted", "  File "),
    ],
)
def test_of_each_way_to_fail_it_is_what_ended_it(tmp_path, code, first, last):
    lines, consequence = words_of(tmp_path, code)
    assert lines[0].startswith(first), lines
    assert any(line.startswith(last) for line in lines), lines
    assert not consequence


GROUP = "raise ExceptionGroup('unhandled', [{}])"


@pytest.mark.parametrize(
    ("members", "consequence"),
    [
        ("ValueError('mine')", False),
        ("RankFailed('rank 1 has gone')", True),
        ("RankFailed('rank 1 has gone'), RankFailed('rank 1 has gone')", True),
        ("RankFailed('rank 1 has gone'), ValueError('mine')", False),
        ("ExceptionGroup('inner', [RankFailed('rank 1 has gone')])", True),
        ("ExceptionGroup('inner', [RankFailed('rank 1 has gone'), ValueError('mine')])", False),
    ],
)
def test_a_group_is_reported_whole_and_is_a_consequence_if_all_of_it_is(tmp_path, members, consequence):
    lines, is_one = words_of(tmp_path, GROUP.format(members))
    assert lines[0] == "  + Exception Group Traceback (most recent call last):"
    assert any("unhandled" in line for line in lines)
    assert is_one is consequence
    assert exception_line(lines).endswith((": mine", "rank 1 has gone"))


def test_a_group_with_a_cause_begins_with_that(tmp_path):
    code = "try:\n    1 / 0\nexcept Exception as error:\n    " + GROUP.format("ValueError()") + " from error"
    lines, _ = words_of(tmp_path, code)
    assert lines[0] == "Traceback (most recent call last):"
    assert "ZeroDivisionError: division by zero" in lines
