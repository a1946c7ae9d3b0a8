"""`shmring top`: rates, ages and the rank that all others wait for, as text, JSON and a live view in a
terminal."""

import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import jsonschema
import numpy as np
import pytest
from ranks import turns, until_there, when_there
from waiting import wait_until

from shmring.tools import command, top

COUNT = 1 << 12
RANK = {
    "type": "object",
    "required": ["rank", "size", "pid", "state", "where", "calls_per_s", "bytes_per_s", "since_s"],
    "properties": {
        "calls_per_s": {"type": "number", "minimum": 0},
        "bytes_per_s": {"type": "number", "minimum": 0},
        "since_s": {"type": ["number", "null"]},
    },
}
AWAITED = {
    "type": ["object", "null"],
    "required": ["rank", "by", "where"],
    "properties": {"by": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
}
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["communicator", "pids", "ranks", "awaited"],
        "properties": {"ranks": {"type": "array", "items": RANK}, "awaited": AWAITED},
    },
}


def pids_of(ranks):
    return [str(ranks.pid(rank)) for rank in range(ranks.size)]


def looks(capsys, ranks, *arguments):
    """Return each snapshot of these ranks' communicator."""
    assert command.main(["top", *pids_of(ranks), "--json", *arguments]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for one in found:
        jsonschema.validate(one, SCHEMA)
    return [one for (one,) in found]


def reduce_until(comm, path, stop):
    x = np.zeros(COUNT, "f4")
    for _ in turns(comm, path):
        comm.all_reduce(x)
        if stop.exists():  # one rank reads it for all, so that all come to the same end
            comm.abort("enough")


def test_rates_are_those_of_the_calls(world_of, capsys, tmp_path):
    ranks = world_of(2)
    ranks.begin(reduce_until, tmp_path / "begun", tmp_path / "stop")
    when_there(tmp_path / "begun", ranks)

    def shows_the_same_rates():
        """Return whether no look came upon a machine that stood still."""
        found = looks(capsys, ranks, "--count", "2", "--interval", "0.3")
        assert len(found) == 2
        for rank in (rank for one in found for rank in one["ranks"]):
            assert rank["bytes_per_s"] == pytest.approx(rank["calls_per_s"] * COUNT * 4, rel=1e-6)
        rates = [[rank["calls_per_s"] for rank in one["ranks"]] for one in found]
        return all(min(of_ranks) > 10 and max(of_ranks) < 2 * min(of_ranks) for of_ranks in rates)

    wait_until(shows_the_same_rates, "the rates of ranks that make the same calls are about the same")
    (tmp_path / "stop").touch()
    ranks.answers()


def come_late(comm, path):
    comm.barrier()
    if comm.rank == 2:
        until_there(path)
    comm.barrier()


def test_it_says_for_whom_all_wait(world_of, capsys, tmp_path):
    ranks = world_of(3)
    ranks.begin(come_late, tmp_path / "seen")
    awaited = {"rank": 2, "by": [0, 1], "where": "after barrier() #1"}

    def shows_the_wait():
        one, *_ = looks(capsys, ranks, "--count", "1", "--interval", "0.1")
        return one if one["awaited"] == awaited and one["ranks"][0]["since_s"] > 0.05 else None

    one = wait_until(shows_the_wait, "it says for whom ranks have waited for some time", ranks)
    assert command.main(["top", *pids_of(ranks), "--count", "1", "--interval", "0.1"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "seen").touch()
    assert ranks.answers() == [None] * 3
    assert one["ranks"][2]["since_s"] is None
    assert "2 ranks waiting for rank 2: after barrier() #1" in text
    assert re.search(r"0/3 .* +0 +0 B +\d\.\d s  in barrier\(\) #2, waiting .* for rank 2", text)


@pytest.mark.parametrize(
    ("waits", "states", "rank", "by"),
    [
        ({0: 1, 1: 2}, {}, 2, [0, 1]),  # in the end
        ({0: 3, 1: 3, 2: 4}, {}, 3, [0, 1]),  # the one for which most do
        ({0: 1, 1: 0}, {}, None, None),  # possible for a reader that reads one rank after the other
        ({0: 1, 1: 2, 2: 1, 3: 1}, {1: "stopped"}, 1, [0, 2, 3]),  # it was stopped in a wait that is over
    ],
)
def test_the_awaited_rank_is_the_one_that_does_not_wait(waits, states, rank, by):
    def seen(number):
        wait = {"waited_s": 1.0, "until_ns": 0, "awaited": waits.get(number)}
        held = [wait] if number in waits else []
        return {"rank": number, "where": "somewhere", "state": states.get(number, "sleeping"), "waits": held}

    found = top._awaited([seen(number) for number in range(5)])
    if rank is None:
        assert found["rank"] in waits
    else:
        assert (found["rank"], found["by"]) == (rank, by)


def test_a_process_that_is_not_there_is_an_error(capsys):
    assert command.main(["top", str((1 << 22) + 1)]) == 1
    assert "there is no process" in capsys.readouterr().err


def test_no_rank_is_no_error(capsys, monkeypatch):
    monkeypatch.setattr("shmring.tools._attach.own_processes", list)
    assert command.main(["top", "--count", "1", "--interval", "0.01"]) == 0
    assert "no communicators" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--interval", "soon"], "'soon' is not a number of seconds"),
        (["--interval", "0"], "'0' is not a number of seconds"),
        (["--count", "0"], "'0' is not a whole number of 1 or more"),
        (["me"], "invalid int value: 'me'"),
        (["--colour"], "--colour"),
    ],
)
def test_wrong_flags_are_one_line(capsys, arguments, expected):
    with pytest.raises(SystemExit) as caught:
        command.main(["top", *arguments])
    reported = capsys.readouterr()
    assert caught.value.code == 2
    assert reported.out == ""
    assert expected in reported.err
    assert reported.err.count("\n") == 1


def read_until(fd, process, wanted, seconds=30):
    """Return the output of a pseudo-terminal as soon as it contains everything wanted."""
    text, until = b"", time.monotonic() + seconds
    while not all(word in text for word in wanted):
        assert time.monotonic() < until, text
        assert process.poll() is None, text
        if select.select([fd], [], [], 0.1)[0]:
            text += os.read(fd, 4096)
    return text


@pytest.mark.parametrize("has_rich", [True, False])
def test_in_a_terminal_it_is_drawn_until_ctrl_c(world_of, has_rich):
    if has_rich:
        pytest.importorskip("rich")
    ranks = world_of(2)
    hide = "import sys; sys.modules['rich'] = sys.modules['rich.live'] = None; " if not has_rich else ""
    program = f"{hide}from shmring.tools.command import main; raise SystemExit(main())"
    ours, theirs = pty.openpty()
    command_line = [sys.executable, "-c", program, "top", *pids_of(ranks), "--interval", "0.05"]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    process = subprocess.Popen(command_line, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    try:
        text = read_until(ours, process, [b"COMMUNICATOR", b"0/2", b"1/2"])
        for _ in itertools.repeat(None, 2):  # it goes on
            text += read_until(ours, process, [b"0/2"])
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert (b"\x1b[?1049h" in text) == has_rich  # a screen of its own
