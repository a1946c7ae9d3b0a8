"""The models of the lock-free core under tests/repo/models. Spin visits every state within the bounds that
each model names; herd7 (herdtools7) visits every execution that a weak memory allows. Each model is checked
unchanged, and with an order or a rule removed, which the check has to find: a model that cannot fail would
prove nothing.

Debian: apt install spin (herdtools7 from Debian 14 on).
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parent / "models"
SPIN, HERD, COMPILER = shutil.which("spin"), shutil.which("herd7"), shutil.which("cc") or shutil.which("gcc")
LIMIT_S = 200
# No search for cycles; states are stored compressed.
PAN = ["-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=4000"]
DEPTH = 100_000

# Within bounds that take seconds.
HOLDS = [
    ("flag", ""),
    ("flag", "WRITERS=2 SLEEPERS=1"),
    ("call_line", "LINES=2 CALLS=6"),
    ("call_line", "LINES=4 CALLS=7"),
    ("call_line", "RANKS=3 LINES=2 CALLS=4"),
    ("abort", ""),
    ("abort", "REPORTERS=3 SLEEPERS=1"),
    ("lock", ""),
    ("lock", "TURNS=3"),
    ("blame", "CALLS=12"),
    ("broadcast", ""),
    ("broadcast", "SLOTS=2 ITEMS=4"),
]
HOLDS_AT_LENGTH = [
    ("flag", "WRITERS=2 VALUES=2"),
    ("flag", "SLEEPERS=3"),
    ("call_line", "RANKS=3 LINES=2 CALLS=5"),
    ("call_line", "LINES=8 CALLS=12"),
    ("broadcast", "READERS=3"),
]
# The findings: a lost wake-up is a state without end, everything else an assertion.
LOST, WRONG = "invalid end state", "assertion violated"
BREAKS = [
    ("flag", "STORE_FLAG", LOST),
    ("flag", "STORE_EVENT", LOST),
    ("flag", "NO_SECOND_LOOK", LOST),
    ("flag", "NO_GENERATION", LOST),
    ("flag", "WAKE_ONE", LOST),
    ("flag", "STORE_FLAG WRITERS=2 SLEEPERS=1", LOST),
    ("call_line", "AHEAD_BY_ONE", WRONG),
    ("call_line", "AHEAD_BY_ONE LINES=2", WRONG),
    ("call_line", "SEQ_FIRST", WRONG),
    ("call_line", "NO_VERIFY", WRONG),
    ("call_line", "NO_ABORT", LOST),
    ("abort", "STORE_WORD", WRONG),
    ("abort", "REPORT_LAST", WRONG),
    ("abort", "NO_SECOND_LOOK", LOST),
    ("abort", "NO_RING", LOST),
    ("lock", "FORGETS", LOST),
    ("lock", "LOOKS_FIRST", LOST),
    ("lock", "LOOKS_AND_TAKES", WRONG),
    ("lock", "NO_VALUE", LOST),
    ("lock", "TRIES_AGAIN", LOST),
    ("lock", "KEEPS_WAKE_UP", LOST),
    ("broadcast", "IGNORES_RESERVED", WRONG),
    ("broadcast", "JOINS_ALONE", WRONG),
    ("broadcast", "STATE_FIRST", WRONG),
    ("broadcast", "NO_SECOND_LOOK", LOST),
    ("broadcast", "OLD_SLOWEST", LOST),
    ("broadcast", "LEAVES_QUIETLY", LOST),
    ("broadcast", "ANNOUNCES_QUIETLY", LOST),
    ("blame", "FLAG_FIRST", WRONG),
    ("blame", "CLOSES_FIRST", WRONG),
]


def named(cases):
    return [pytest.param(*case, id=" ".join(case[:2]).strip()) for case in cases]


def run(*command, cwd):
    ran = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)
    return ran.stdout + ran.stderr


def checked(name, definitions, folder):
    """Return the output of Spin's search of a model."""
    if SPIN is None or COMPILER is None:
        pytest.skip("needs spin and a C compiler: apt install spin gcc")
    flags = [f"-D{definition}" for definition in definitions.split()]
    text = run(SPIN, "-a", *flags, MODELS / f"{name}.pml", cwd=folder)
    assert (folder / "pan.c").exists(), text
    text = run(COMPILER, *PAN, "pan.c", "-o", "pan", cwd=folder)
    assert (folder / "pan").exists(), text
    return run(folder / "pan", f"-m{DEPTH}", cwd=folder)


def assert_holds(text):
    assert "errors: 0" in text, text
    for incomplete in ("Search not completed", "max search depth too small", "out of memory"):
        assert incomplete not in text, text
    assert int(re.search(r"(\d+) states, stored", text)[1]) > 1000, text


@pytest.mark.limit(LIMIT_S + 60)
@pytest.mark.parametrize(("name", "definitions"), named(HOLDS))
def test_model_holds(name, definitions, tmp_path):
    assert_holds(checked(name, definitions, tmp_path))


@pytest.mark.soak
@pytest.mark.limit(LIMIT_S + 60)
@pytest.mark.parametrize(("name", "definitions"), named(HOLDS_AT_LENGTH))
def test_model_holds_within_wider_bounds(name, definitions, tmp_path):
    assert_holds(checked(name, definitions, tmp_path))


@pytest.mark.limit(LIMIT_S + 60)
@pytest.mark.parametrize(("name", "definitions", "found"), named(BREAKS))
def test_model_without_a_rule_is_found_out(name, definitions, found, tmp_path):
    text = checked(name, definitions, tmp_path)
    assert found in text, text


def test_each_rule_that_a_model_names_is_taken_away():
    for path in MODELS.glob("*.pml"):
        named_in_it = set(re.findall(r"^     ([A-Z_]+)  +\w", path.read_text(), re.MULTILINE))
        taken_away = {definitions.split()[0] for name, definitions, _ in BREAKS if name == path.stem}
        assert named_in_it == taken_away, path.stem


# ---- weak memory: orders as in src/sync/, each in a litmus test ----------------------------------------

ORDERS = {
    "publish_and_sleep": {"P1": "seq_cst", "R1": "seq_cst", "S1": "seq_cst", "S2": "seq_cst"},
    "publish_and_read": {"P1": "seq_cst", "A1": "acquire"},
    "lock": {"U1": "release", "L1": "acquire"},
}
WEAKER = [
    ("publish_and_sleep", {"P1": "release"}),
    ("publish_and_sleep", {"R1": "acquire"}),
    ("publish_and_sleep", {"S1": "acq_rel"}),
    ("publish_and_sleep", {"S2": "acquire"}),
    ("publish_and_read", {"P1": "relaxed"}),
    ("publish_and_read", {"A1": "relaxed"}),
    ("lock", {"U1": "relaxed"}),
    ("lock", {"L1": "relaxed"}),
]


def is_possible(text, folder, *how):
    """Return whether some execution reaches the state in the test's last line."""
    if HERD is None:
        pytest.skip("needs herd7: apt install herdtools7")
    (folder / "test.litmus").write_text(text)
    output = run(HERD, *how, "test.litmus", cwd=folder)
    found = re.search(r"^Observation \w+ (Never|Sometimes|Always) ", output, re.MULTILINE)
    assert found, output
    return found[1] != "Never"


def with_orders(name, orders):
    text = (MODELS / f"{name}.litmus").read_text()
    for label, order in orders.items():
        assert f", {label})" in text
        text = text.replace(f", {label})", f", memory_order_{order})")
    return text


@pytest.mark.parametrize("name", ORDERS)
def test_orders_suffice(name, tmp_path):
    assert not is_possible(with_orders(name, ORDERS[name]), tmp_path, "-model", "rc11.cat")


@pytest.mark.parametrize(("name", "weaker"), WEAKER, ids=str)
def test_orders_are_needed(name, weaker, tmp_path):
    assert is_possible(with_orders(name, ORDERS[name] | weaker), tmp_path, "-model", "rc11.cat")


def test_writes_after_an_abort_are_seen_after_the_word(tmp_path):
    text = (MODELS / "give_up.litmus").read_text()
    look = re.search(r"^ LDAR .*\n", text, re.MULTILINE)[0]
    assert not is_possible(text, tmp_path)
    assert is_possible(text.replace(look, ""), tmp_path)
