"""The command `shmring` on running jobs: its output for one and for several communicators, groups, dead ranks
and damaged memory, and that it leaves no trace."""

import importlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from engines import environment
from ranks import Died, Ranks, turns, until_there, when_there
from waiting import wait_until

import shmring
from shmring._config.settings import Settings
from shmring._config.thresholds import staging_nbytes, tables
from shmring._engine.state import control_nbytes, format_segment, segment_nbytes
from shmring._system import segments
from shmring.tools import _attach, command

LIMIT_S = 30


def shown(capsys, *arguments):
    assert command.main(arguments) == 0
    return capsys.readouterr().out


def shown_of(capsys, ranks, *arguments):
    """As JSON: the communicators that hold these ranks, of all that this user has."""
    pids = {ranks.pid(rank) for rank in range(ranks.size)}
    return [one for one in json.loads(shown(capsys, *arguments, "--json")) if pids & set(one["pids"])]


@pytest.fixture
def dreams(tmp_path):
    """A pipe that keeps rank 1 asleep until it is opened for writing."""
    os.mkfifo(tmp_path / "dreams")
    return tmp_path / "dreams"


def wake(dreams):
    dreams.open("w").close()


def dream_or_wait(comm, dreams):
    comm.all_reduce(np.ones(4, "f4"))
    if comm.rank == 1:
        dreams.open().close()
    comm.barrier()
    return comm.rank


def once(condition):
    """Return the result of condition as soon as it is true."""
    return wait_until(condition, "the command shows what is awaited")


# ---- ps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_ps_shows_every_rank_and_for_whom_it_waits(world_of, capsys, dreams, segment):
    ranks = world_of(3, SHMRING_SEGMENT=segment)
    ranks.begin(dream_or_wait, dreams)

    def waiting():
        (one,) = shown_of(capsys, ranks, "ps")
        wait = all("waiting" in one["ranks"][rank]["where"] for rank in (0, 2))
        return one if wait and one["ranks"][1]["state"] == "sleeping" else None

    one = once(waiting)
    text = shown(capsys, "ps")
    wake(dreams)
    assert ranks.answers() == [0, 1, 2]
    assert one["communicator"].startswith(f"{segment}:")
    assert one["over"] is None
    assert [rank["pid"] for rank in one["ranks"]] == [ranks.pid(rank) for rank in range(3)]
    assert [(rank["rank"], rank["size"], rank["presence"]) for rank in one["ranks"]] == [
        (rank, 3, "here") for rank in range(3)
    ]
    assert one["ranks"][1]["where"] == "after all_reduce(float32[4], sum) #1"
    assert one["ranks"][1]["state"] == "sleeping"
    assert one["ranks"][0]["last_call"]["kind"] == "barrier"
    (wait,) = one["ranks"][0]["waits"]
    assert (wait["awaited"], wait["where"]) == (1, "call")
    assert 0.04 < wait["waited_s"] < 60
    lines = [line for line in text.splitlines() if line.startswith(one["communicator"])]
    assert len(lines) == 3
    assert f"1/3   {ranks.pid(1)}" in lines[1]
    assert "in barrier() #2, waiting " in lines[0]
    assert lines[0].endswith(" s for rank 1")


def split_and_dream(comm, path, seen_path):
    half = comm.split(comm.rank % 2)
    half.all_reduce(np.ones(comm.rank % 2 + 1, "i8"))
    comm.barrier()
    if comm.rank == 0:
        with open(path, "w"):
            pass
    until_there(seen_path)
    comm.barrier()
    half.close()


def test_ps_shows_groups_beside_their_parents(world_of, capsys, tmp_path):
    ranks = world_of(4)
    ranks.begin(split_and_dream, str(tmp_path / "there"), tmp_path / "seen")
    when_there(tmp_path / "there", ranks)
    found = shown_of(capsys, ranks, "ps")
    (tmp_path / "seen").touch()
    assert ranks.answers() == [None] * 4
    sizes = sorted(len(one["ranks"]) for one in found)
    assert sizes == [2, 2, 4]
    places = {
        tuple(rank["pid"] for rank in one["ranks"]): one["ranks"][0]["where"]
        for one in found
        if len(one["ranks"]) == 2
    }
    assert places == {
        (ranks.pid(0), ranks.pid(2)): "after all_reduce(int64[1], sum) #1",
        (ranks.pid(1), ranks.pid(3)): "after all_reduce(int64[2], sum) #1",
    }


def call_for_ever(comm, path):
    for _ in turns(comm, path):
        comm.all_reduce(np.ones(9))


def survive(comm, path, seen_path):
    """Keep the communicator open after its end, for inspection by others."""
    try:
        call_for_ever(comm, path)
    except Exception as error:
        until_there(seen_path)
        return error.where


def test_ps_after_a_kill_says_who_is_dead_and_why_it_is_over(capsys, tmp_path):
    with Ranks(2) as ranks:
        ranks.meet().begin(survive, str(tmp_path / "runs"), tmp_path / "seen")
        when_there(tmp_path / "runs", ranks)
        ranks.kill(1)
        # The kernel ends the threads of a killed process one after another, the main thread often first.
        once(lambda: shown_of(capsys, ranks, "ps")[0]["ranks"][1]["state"] == "dead")
        one = once(lambda: next((one for one in shown_of(capsys, ranks, "ps") if one["over"]), None))
        text = shown(capsys, "ps")
        (tmp_path / "seen").touch()
        where, died = ranks.answers()
    assert isinstance(died, Died)
    assert (one["over"]["cause"], one["over"]["rank"]) == ("failed", 1)
    assert one["ranks"][1]["presence"] == one["ranks"][1]["state"] == "dead"
    assert one["ranks"][1]["where"].startswith("dead ")
    assert where[1].startswith("dead ")
    assert one["ranks"][0]["last_call"]["outcome"] == "raised"
    assert f"rank 1 failed: process {ranks.pid(1)} died" in text


def test_ps_with_nothing_to_show_says_so(capsys, monkeypatch):
    monkeypatch.setattr(_attach, "own_processes", list)
    assert shown(capsys, "ps") == "no communicators of this user on this host\n"
    assert json.loads(shown(capsys, "ps", "--json")) == []


def test_ps_shows_no_shared_arrays_and_no_rings(world_of, capsys, tmp_path):
    ranks = world_of(2)
    ranks.begin(keep_arrays, tmp_path / "seen")
    once(lambda: shown_of(capsys, ranks, "ps")[0]["ranks"][0]["where"].startswith("after barrier"))
    found = shown_of(capsys, ranks, "ps")
    (tmp_path / "seen").touch()
    assert ranks.answers() == [None, None]
    assert len(found) == 1


def keep_arrays(comm, seen_path):
    import shmring

    kept = comm.empty(10_000), comm.shared(100, locks=2), shmring.Ring()
    comm.barrier()
    until_there(seen_path)
    comm.barrier()
    del kept


def test_ranks_of_several_hosts_have_the_numbers_of_all(world_over_hosts, capsys, dreams):
    ranks = world_over_hosts([0, 0, 1])
    ranks.begin(dream_or_wait, dreams)
    found = once(lambda: [one for one in shown_of(capsys, ranks, "ps") if waits_for(one, 1)] or None)
    everybody = shown_of(capsys, ranks, "ps")
    wake(dreams)
    assert ranks.answers() == [0, 1, 2]
    assert found
    numbers = sorted([(rank["rank"], rank["size"]) for rank in one["ranks"]] for one in everybody)
    assert numbers == [[(0, 3), (1, 3)], [(2, 3)]]


def waits_for(one, rank):
    return any(wait["awaited"] == rank for seen in one["ranks"] for wait in seen["waits"])


# ---- dump -------------------------------------------------------------------------------------------------


def test_dump_describes_all_of_every_rank(world_of, capsys, dreams):
    ranks = world_of(2)
    ranks.begin(dream_or_wait, dreams)
    once(lambda: "waiting" in shown_of(capsys, ranks, "ps")[0]["ranks"][0]["where"])
    text = shown(capsys, "dump", str(ranks.pid(0)))
    (one,) = json.loads(shown(capsys, "dump", str(ranks.pid(1)), "--json"))
    (quiet,) = json.loads(shown(capsys, "dump", str(ranks.pid(1)), "--no-stacks", "--json"))
    wake(dreams)
    assert ranks.answers() == [0, 1]
    assert f"rank 1 of 2, process {ranks.pid(1)}, sleeping: after all_reduce(float32[4], sum) #1" in text
    assert "    #2 barrier() (under way)\n" in text
    assert "  waits in a call for rank 1: " in text
    assert ", in dream_or_wait\n" in text
    assert [call["number"] for call in one["ranks"][1]["calls"]][-1] == 1
    assert "in dream_or_wait" in one["ranks"][1]["stacks"]
    assert "stacks" not in quiet["ranks"][0]


def test_dump_of_who_has_none_says_so(capsys):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert command.main(["dump", str(child.pid)]) == 1
        assert f"process {child.pid} has no communicator" in capsys.readouterr().err
        child.communicate(b"\n")
    assert command.main(["dump", str(child.pid)]) == 1
    assert f"there is no process {child.pid}" in capsys.readouterr().err


def test_the_package_installs_the_command():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    module, _, function = tomllib.loads(text)["project"]["scripts"]["shmring"].partition(":")
    assert getattr(importlib.import_module(module), function) is command.main


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "shmring", "ps", "--json"], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), list)
    wrong = subprocess.run(
        [sys.executable, "-m", "shmring", "pss"], capture_output=True, text=True, env=environment()
    )
    assert wrong.returncode == 2
    assert "invalid choice: 'pss'" in wrong.stderr


# ---- damage -----------------------------------------------------------------------------------------------


MESSAGE_RING_NBYTES = 1 << 16


class Damaged:
    """A segment of this process as rank 0 begins it, with other bytes in it."""

    def __init__(self, nranks=3, *, kind="memfd"):
        tuned = tables(Settings(tuning="none"), nranks)
        nbytes = staging_nbytes(tuned, nranks)
        self.control_nbytes = control_nbytes(nranks)
        self.fd = segments.create(segment_nbytes(nranks, nbytes, MESSAGE_RING_NBYTES), kind=kind)
        mapping = segments.Mapping(self.fd, self.control_nbytes)
        format_segment(mapping.address, nranks, nbytes, MESSAGE_RING_NBYTES, tuning=tuned)
        mapping.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.fd)

    def write(self, offset, data):
        os.pwrite(self.fd, data, offset)

    def seen(self):
        inode = os.fstat(self.fd).st_ino
        return next((one for one in _attach.of_processes([os.getpid()]) if one.number == inode), None)

    def shown(self, capsys):
        """Return the command's outputs as texts."""
        return shown(capsys, "dump", str(os.getpid()), "--no-stacks"), shown(capsys, "ps")


def test_an_untouched_segment_has_ranks_that_are_not_here_yet(capsys):
    with Damaged() as segment:
        assert [_attach.rank_state(segment.seen().flight, rank)["where"] for rank in range(3)] == [
            "not here yet"
        ] * 3
        assert "3 ranks on this host" in segment.shown(capsys)[0]


@pytest.mark.parametrize(
    ("offset", "data", "reported"),
    [
        (0, b"1", "another version"),
        (8, b"\0\0\0\0", "0 ranks"),
        (8, b"\xff\xff\xff\xff", "4294967295 ranks"),
        (8, b"\0\x10\0\0", "more than the"),
        (16, b"\0" * 8, "staging buffers of 0"),
        (16, b"\xff" * 8, "staging buffers of 18446744073709551615"),
        (24, b"\xff" * 8, "18446744073709551615 bytes"),
    ],
)
def test_a_damaged_header_is_a_line_that_says_what_is_wrong(capsys, offset, data, reported):
    with Damaged() as segment:
        segment.write(offset, data)
        assert reported in segment.seen().damage
        for text in segment.shown(capsys):
            assert "cannot be read: " in text
            assert reported in text


def test_a_truncated_table_is_damaged(capsys):
    with Damaged(kind="posix") as segment:
        os.ftruncate(segment.fd, 3 * mmap.PAGESIZE)
        assert "more than the 12288 bytes" in segment.seen().damage
        os.ftruncate(segment.fd, 100)
        assert segment.seen().damage == "less than a page of it can be read"
        os.ftruncate(segment.fd, 0)
        assert segment.seen() is None


def test_no_bytes_whatever_make_it_fail(capsys):
    rng = random.Random(5)
    with Damaged() as segment:
        for turn in range(300):
            whole = turn % 3 == 0  # all of it at random but for the first words; else some bytes
            for _ in range(1 if whole else 40):
                offset = rng.randrange(64, segment.control_nbytes - 8)
                nbytes = segment.control_nbytes - offset if whole and turn % 2 else 8
                value = rng.choice([b"\0", b"\xff", b"\x7f", b"\x01", None])
                segment.write(offset, value * nbytes if value else rng.randbytes(nbytes))
            seen = segment.seen()
            assert seen.damage or json.dumps(_attach.state_of(seen))
            if turn % 10 == 0:
                for text in segment.shown(capsys):
                    assert all(letter.isprintable() or letter == "\n" for letter in text)


# ---- no trace ---------------------------------------------------------------------------------------------


def sum_up(comm, times):
    for turn in range(times):
        x = np.full(20_000, comm.rank + turn, "i8")
        comm.all_reduce(x)
        assert (x == comm.size * turn + sum(range(comm.size))).all()
        if turn % 10 == 0:
            time.sleep(0.005)
    return times


def test_results_are_right_while_somebody_looks(world_of, capsys):
    ranks = world_of(2)
    ranks.begin(sum_up, 400)
    for _ in range(15):
        shown(capsys, "dump", str(ranks.pid(0)))
        shown(capsys, "ps")
    assert ranks.answers() == [400, 400]


def idle(comm, path, seen_path):
    comm.all_reduce(np.ones(5))
    comm.barrier()
    if comm.rank == 0:
        with open(path, "w"):
            pass
    until_there(seen_path)


def test_looking_changes_not_a_byte_and_takes_no_page(world_of, capsys, tmp_path):
    ranks = world_of(2)
    ranks.begin(idle, str(tmp_path / "there"), tmp_path / "seen")
    when_there(tmp_path / "there", ranks)
    (segment,) = _attach.of_processes([ranks.pid(0)])

    def state():
        fd = os.open(segment.path, os.O_RDONLY)
        try:
            return os.fstat(fd).st_blocks, os.pread(fd, control_nbytes(2), 0)
        finally:
            os.close(fd)

    before = state()
    shown(capsys, "dump", str(ranks.pid(0)), "--no-stacks")
    shown(capsys, "ps", "--json")
    after = state()
    _attach.stacks_of(segment)
    with_stacks = state()
    (tmp_path / "seen").touch()
    assert ranks.answers() == [None, None]
    assert after == before
    assert with_stacks[0] == before[0]
    assert with_stacks[1] != before[1]  # which the ranks have written themselves


def test_a_stopped_job_can_be_looked_at(world_of, capsys, dreams):
    ranks = world_of(2)
    ranks.begin(dream_or_wait, dreams)
    for rank in range(2):
        ranks.kill(rank, signal.SIGSTOP)
    once(lambda: {rank["state"] for rank in shown_of(capsys, ranks, "ps")[0]["ranks"]} == {"stopped"})
    text = shown(capsys, "dump", str(ranks.pid(0)))
    for rank in range(2):
        ranks.kill(rank, signal.SIGCONT)
    wake(dreams)
    assert text.count("(it is stopped)") == 2
    assert ranks.answers() == [0, 1]


@pytest.mark.parametrize("arguments", [[], ["ps"], ["tune"], ["bench"], ["selftest"]])
def test_every_command_says_its_version(capsys, arguments):
    with pytest.raises(SystemExit) as done:
        command.main([*arguments, "--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"shmring {shmring.__version__}\n"


@pytest.mark.parametrize(
    "name", ["info", "doctor", "selftest", "bench", "predict", "tune", "ps", "top", "dump"]
)
def test_every_command_puts_its_name_before_an_error(capsys, name):
    with pytest.raises(SystemExit) as done:
        command.main([name, *(["1"] if name == "dump" else []), "--nosuch"])
    assert done.value.code == 2
    error = f"shmring {name}: unrecognized arguments: --nosuch (more with shmring {name} --help)\n"
    assert capsys.readouterr().err == error


def test_dump_shows_the_calls_of_the_start_only_if_asked(world_of, capsys):
    ranks = world_of(2)
    ranks(shmring.Comm.barrier)
    text = shown(capsys, "dump", str(ranks.pid(0)), "--no-stacks")
    whole = shown(capsys, "dump", str(ranks.pid(0)), "--no-stacks", "--all")
    assert "start " not in text
    assert "start " in whole
    for both in (text, whole):
        assert "#1 barrier()" in both


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_output_that_cannot_be_written_is_an_error_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shmring", "ps"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "shmring ps: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "reader", "status"),
    [
        ("shmring ps", "<&- >&-", 0),
        ("shmring ps", ">&- 2>&-", 0),
        ("shmring.selftest", "> >(head -n 0)", 128 + signal.SIGPIPE),
        ("shmring tune --dry-run --ranks 2 --seconds 0.1", "> >(head -n 0)", 128 + signal.SIGPIPE),
    ],
)
def test_commands_end_well_without_a_reader(arguments, reader, status):
    # The wait is for `head`: what it does not read has to find the pipe closed.
    line = f'exec {reader}; wait $!; "$0" -m {arguments}'
    done = subprocess.run(["bash", "-c", line, sys.executable], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (status, "")
