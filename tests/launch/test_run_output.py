"""shmrun: where it shows the ranks' output, and what it writes to files."""

import contextlib
import functools
import json
import os
import pty
import re
import select
import signal
import subprocess
import time

import jsonschema
import pytest
from running import LIMIT_S, QUIET, command, on_a_terminal, restore_sighup, run_code, started

from shmring._launch import log_files
from shmring._launch import shmrun as run
from shmring._system import cpulist

SAY = "print('out', rank); print('err', rank, file=sys.stderr)"
REPORT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["exit_code", "restarts", "failed_first", "ranks"],
    "properties": {
        "exit_code": {"type": "integer", "minimum": 0},
        "restarts": {"type": "integer", "minimum": 0},
        "failed_first": {"type": ["integer", "null"]},
        "ranks": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["rank", "exit_code", "ended", "cpus"],
                "properties": {
                    "rank": {"type": "integer"},
                    "exit_code": {"type": "integer", "minimum": 0},
                    "ended": {"type": "string"},
                    "cpus": {"type": ["array", "null"], "items": {"type": "integer"}},
                },
            },
        },
    },
}


@pytest.fixture
def shmrun(tmp_path):
    return functools.partial(run_code, tmp_path)


def files(folder):
    """{name: bytes} of all that is in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_rank_that_the_kernel_killed_for_want_of_memory_is_reported(monkeypatch):
    monkeypatch.setattr(run, "oom_kills", lambda: 4)
    assert run._how_ended(-9, 3).startswith("killed by SIGKILL (out of memory: the kernel has killed")
    assert run._how_ended(-9, 4) == "killed by SIGKILL"
    assert run._how_ended(-15, 3) == "killed by SIGTERM"


# --- files ---


def test_logs_hold_what_each_rank_wrote_to_each_stream(shmrun, tmp_path):
    folder = tmp_path / "a" / "b"
    done = shmrun(SAY, "--log-dir", str(folder), nprocs=3)
    assert files(folder) == {
        f"rank-{rank}.{kind}": b"%b %d\n" % (kind.encode(), rank)
        for rank in range(3)
        for kind in ("out", "err")
    }
    assert (done.returncode, done.stdout, done.stderr) == (0, "0| out 0\n", "0| err 0\n")


def test_logs_are_unchanged_and_complete(shmrun, tmp_path):
    code = """
        os.write(1, b"\\x00\\r\\n\\r10%\\r20%\\n" + b"x" * 200_000 + b"\\n")
        for line in range(20000): print('line', line)
        os.write(1, b"end")
        """
    assert shmrun(code, "--log-dir", str(tmp_path / "logs"), "--collapse").returncode == 0
    lines = b"".join(b"line %d\n" % at for at in range(20000))
    whole = b"\x00\r\n\r10%\r20%\n" + b"x" * 200_000 + b"\n" + lines + b"end"
    found = files(tmp_path / "logs")
    assert found["rank-0.out"] == found["rank-1.out"] == whole


@pytest.mark.parametrize(
    ("options", "shown"), [(["--tee"], "01"), (["--ranks", "1"], "1"), (["--ranks", "0-1"], "01"), ([], "0")]
)
def test_with_logs_the_terminal_shows_what_is_asked_for(shmrun, tmp_path, options, shown):
    done = shmrun(SAY, "--log-dir", str(tmp_path / "logs"), *options)
    assert sorted(done.stdout.splitlines()) == [f"{rank}| out {rank}" for rank in shown]
    assert sorted(done.stderr.splitlines()) == [f"{rank}| err {rank}" for rank in shown]
    assert len(files(tmp_path / "logs")) == 4


def test_an_earlier_run_is_not_overwritten(shmrun, tmp_path):
    (tmp_path / "rank-1.err").write_text("precious")
    done = shmrun(SAY, "--log-dir", str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"shmrun: {tmp_path}/rank-1.err exists, ")
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "rank-1.err").read_text() == "precious"
    assert not (tmp_path / "rank-0.out").exists()


def test_other_files_in_the_directory_do_not_matter(shmrun, tmp_path):
    assert shmrun(SAY, "--log-dir", str(tmp_path)).returncode == 0
    assert shmrun(SAY, "--log-dir", str(tmp_path)).returncode == 2


def test_a_failing_rank_that_is_not_shown_is_reported(shmrun, tmp_path):
    code = "if rank == 2: sys.exit(1 / 0)\ntime.sleep(100)"
    done = shmrun(code, "--log-dir", str(tmp_path / "logs"), nprocs=3)
    assert done.returncode == 1
    first, *rest = done.stderr.splitlines()
    path = f"{tmp_path}/logs/rank-2.err"
    assert first == f"shmrun: rank 2 of 3 failed first: exit status 1; the end of {path}:"
    assert "\n".join(rest) + "\n" == (tmp_path / "logs" / "rank-2.err").read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_log_that_cannot_be_written_is_reported_and_ends_nobody(tmp_path):
    log = log_files.Log(str(tmp_path / "log"))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._fd)
    os.close(full)
    log.write(b"lost")
    log.write(b"lost, too")
    log.close()
    log.close()
    assert log.error.strerror == "No space left on device"


def test_a_log_that_cannot_be_closed_ends_nobody(tmp_path):
    log = log_files.Log(str(tmp_path / "log"))
    os.close(log._fd)
    log.close()
    log.close()
    assert log.error.strerror == "Bad file descriptor"


def test_files_that_cannot_all_be_made_leave_none(tmp_path):
    arguments = command(tmp_path, "pass", "--log-dir", str(tmp_path / "logs"), nprocs=16)
    shell = ["bash", "-c", 'ulimit -n 20; exec "$@"', "bash", *arguments]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert "where no files can be made: Too many open files" in done.stderr
    assert files(tmp_path / "logs") == {}


def test_files_of_an_earlier_runs_restarts_are_found_at_the_start(shmrun, tmp_path):
    earlier = tmp_path / "restart-2" / "rank-1.out"
    earlier.parent.mkdir()
    earlier.write_text("precious")
    done = shmrun("sys.exit(1)", "--log-dir", str(tmp_path), "--restart", "2")
    assert done.returncode == 2
    assert done.stderr.startswith(f"shmrun: {earlier} exists, ")
    assert not (tmp_path / "rank-0.out").exists()
    assert shmrun("pass", "--log-dir", str(tmp_path), "--restart", "1").returncode == 0


# --- no reader ---


def end_of(arguments, **streams):
    """Return the exit code, and stderr if it is a pipe, with the given stdout and stderr."""
    environment = {**os.environ, **QUIET}
    with subprocess.Popen(arguments, env=environment, start_new_session=True, **streams) as process:
        try:
            text = process.communicate(timeout=LIMIT_S)[1]
        finally:
            process.kill()
    return process.returncode, text


def test_a_terminal_that_is_closed_leaves_the_ranks_their_grace(tmp_path):
    code = f"""
        def save(*_):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            time.sleep(0.3)
            open(f"{tmp_path}/saved.{{rank}}", "w").close()
            sys.exit(3)
        signal.signal(signal.SIGHUP, save)
        open(f"{tmp_path}/ready.{{rank}}", "w").close()
        while not os.path.exists(f"{tmp_path}/ready.{{1 - rank}}"):
            time.sleep(0.01)
        while True:
            print("line")
            time.sleep(0.1)
        """
    report = tmp_path / "report.json"
    terminal, ours = pty.openpty()  # not the controlling terminal of a process, so closing it sends no SIGHUP
    arguments = command(tmp_path, code, "--report", str(report))
    how = {"env": {**os.environ, **QUIET}, "preexec_fn": restore_sighup}
    with subprocess.Popen(arguments, stdout=ours, stderr=ours, **how) as process:
        os.close(ours)
        try:
            assert b"line" in os.read(terminal, 100)
            os.close(terminal)
            assert process.wait(LIMIT_S) == 128 + signal.SIGHUP
        finally:
            process.kill()
    assert [one["ended"] for one in json.loads(report.read_text())["ranks"]] == ["exit status 3"] * 2
    assert {path.name for path in tmp_path.glob("saved.*")} == {"saved.0", "saved.1"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
@pytest.mark.parametrize(
    ("code", "statuses"), [("while True: print('line')", [141]), ("print('line')", [1, 141])]
)
def test_a_full_disk_behind_stdout_is_reported(tmp_path, code, statuses):
    with open("/dev/full", "w") as full:
        status, text = end_of(command(tmp_path, code), stdout=full, stderr=subprocess.PIPE)
    assert status in statuses  # the ranks may have ended well before it is noticed
    assert text == b"shmrun: the output of the ranks cannot be shown: No space left on device\n"


@pytest.mark.parametrize("end", [signal.SIGTERM, "failure"])
def test_a_reader_that_does_not_read_holds_up_no_end(tmp_path, end):
    full = tmp_path / "full"
    code = f"""
        while rank == 1:
            if os.path.exists({str(full)!r}):
                sys.exit(3)
            time.sleep(0.01)
        open("{tmp_path}/pid", "w").write(str(os.getpid()))
        while True:
            print("line" * 100)
        """
    reader, writer = os.pipe()
    how = {"stdout": writer, "stderr": writer, "start_new_session": True, "preexec_fn": restore_sighup}
    with subprocess.Popen(command(tmp_path, code), env={**os.environ, **QUIET}, **how) as process:
        try:
            while select.select([], [writer], [], 0)[1]:
                time.sleep(0.01)
            time.sleep(0.3)  # shmrun has come to wait for the reader
            if end == "failure":
                full.touch()
                while os.path.exists(f"/proc/{(tmp_path / 'pid').read_text()}"):
                    time.sleep(0.01)
                os.close(reader)
                assert process.wait(LIMIT_S) == 3
            else:
                process.send_signal(end)
                assert process.wait(LIMIT_S) == 128 + end
        finally:
            process.kill()
            os.close(writer)
            with contextlib.suppress(OSError):
                os.close(reader)


def test_a_failure_is_in_the_report_even_without_a_reader_of_stderr(tmp_path):
    report = tmp_path / "report.json"
    reader, writer = os.pipe()
    os.close(reader)
    arguments = command(tmp_path, "sys.exit(3)", "--report", str(report))
    status, _ = end_of(arguments, stdout=writer, stderr=writer)
    os.close(writer)
    assert (status, json.loads(report.read_text())["exit_code"]) == (3, 3)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_it_runs_with_its_standard_streams_closed(tmp_path, closed):
    code = f"""
        print("out"); print("err", file=sys.stderr)
        open(f"{tmp_path}/{{rank}}", "w").write(sys.stdin.read())
        sys.exit(4)
        """
    shell = ["bash", "-c", f'exec "$@" {closed}', "bash", *command(tmp_path, code, nprocs=1)]
    status, text = end_of(shell, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (status, (tmp_path / "0").read_text()) == (4, "")
    assert b"Traceback" not in text


# --- shown output ---


def test_only_some_ranks_are_shown(shmrun):
    done = shmrun(SAY, "--ranks", "0,2-3", nprocs=5)
    assert sorted(done.stdout.splitlines()) == ["0| out 0", "2| out 2", "3| out 3"]
    assert sorted(done.stderr.splitlines()) == ["0| err 0", "2| err 2", "3| err 3"]


def test_the_first_rank_that_is_shown_has_the_bar(tmp_path):
    code = "sys.stderr.write(f'\\r{rank}: 50%'); time.sleep(1); sys.stderr.write('\\n')"
    _, shown = on_a_terminal(command(tmp_path, code, "--ranks", "1"), NO_COLOR="1", TERM="xterm", **QUIET)
    assert shown == "1| 1: 50%\r\x1b[K1| 1: 50%\r\n"


def test_identical_lines_are_shown_once_and_all_in_order(shmrun, tmp_path):
    code = f"""
        from pathlib import Path
        for epoch in range(20):
            print('epoch', epoch)
            if epoch % 5 == rank: print('mine', epoch, rank)
            Path(f'{tmp_path}/{{rank}}.{{epoch}}').touch()
            while not all(os.path.exists(f'{tmp_path}/{{other}}.{{epoch}}') for other in range(3)):
                time.sleep(0.001)
        """
    done = shmrun(code, "--collapse", nprocs=3)
    assert (done.returncode, done.stderr) == (0, "")
    shown = [line.split("| ") for line in done.stdout.splitlines()]
    for rank in range(3):
        own = [text for whose, text in shown if rank in cpulist.parse(whose)]
        pairs = ((f"epoch {epoch}", f"mine {epoch} {rank}" * (epoch % 5 == rank)) for epoch in range(20))
        assert own == [line for pair in pairs for line in pair if line]
    # Not each: on a busy machine the distance of ranks may be longer than a line is held.
    assert any(whose == "0-2" for whose, _ in shown)


def test_a_lone_line_is_not_held_back_for_long(tmp_path):
    with started(tmp_path, "if rank: print('alone')\ntime.sleep(100)", "--collapse") as process:
        assert process.stdout.readline() == "  1| alone\n"


def test_on_a_terminal_a_bar_stays_below_collapsed_lines(tmp_path):
    code = f"""
        def meet(place):
            open(f"{tmp_path}/{{place}}.{{rank}}", "w").close()
            while not os.path.exists(f"{tmp_path}/{{place}}.{{1 - rank}}"):
                time.sleep(0.01)
        if rank == 0: sys.stderr.write("\\r50%")
        meet("begin")
        os.write(1, b"news\\n")
        meet("end")
        time.sleep(1)
        if rank == 0: sys.stderr.write("\\r100%\\n")
        """
    arguments = command(tmp_path, code, "--collapse")
    status, shown = on_a_terminal(arguments, NO_COLOR="1", TERM="xterm", **QUIET)
    assert status == 0
    assert "  0| 50%" in shown
    assert shown.endswith("\r\x1b[K  0| 100%\r\n")
    below = re.search(r"\r\x1b\[K(0-1\| news|  0\| news\r\n.*  1\| news)\r\n", shown, re.DOTALL)
    assert below, shown


@pytest.mark.parametrize("nprocs", [1, 2])
def test_without_a_prefix_long_lines_are_unchanged(shmrun, nprocs):
    """Those of several ranks up to 64 KiB, since a rank must not wait for the end of another one's line."""
    code = "os.write(1, b'x' * (3_000_000 if size == 1 else 60_000) + b'\\n')"
    done = shmrun(code.replace("size", str(nprocs)), "--no-prefix", nprocs=nprocs)
    assert done.stdout.splitlines() == ["x" * (3_000_000 if nprocs == 1 else 60_000)] * nprocs


# --- how it went ---


@pytest.mark.parametrize(
    ("code", "options", "exit_code", "first", "ended"),
    [
        ("print('well')", [], 0, None, ["exit status 0", "exit status 0"]),
        ("sys.exit(3 * rank)", ["--keep-going"], 0, 1, ["exit status 0", "exit status 3"]),
        (
            "if rank: os.kill(os.getpid(), 9)\ntime.sleep(100)",
            [],
            137,
            1,
            ["killed by SIGTERM", "killed by SIGKILL"],
        ),
    ],
)
def test_a_report_says_how_each_rank_has_ended(shmrun, tmp_path, code, options, exit_code, first, ended):
    path = tmp_path / "report.json"
    path.write_text("an older one, and longer than what will be written here " * 100)
    assert shmrun(code, "--report", str(path), *options).returncode == exit_code
    report = json.loads(path.read_text())
    jsonschema.validate(report, REPORT)
    assert (report["exit_code"], report["failed_first"], report["restarts"]) == (exit_code, first, 0)
    assert [one["ended"] for one in report["ranks"]] == ended
    assert [one["rank"] for one in report["ranks"]] == [0, 1]


# --- bad usage ---


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tee"], "give --log-dir DIR"),
        (["--tee", "--log-dir", "x", "--ranks", "0"], "give one of them"),
        (["--ranks", "2"], "--ranks is '2'; allowed: 0 to 1, as there are 2"),
        (["--ranks", "0-"], "--ranks is '0-': '0-' is neither a number nor a range"),
        (["--ranks", ""], "neither a number nor a range"),
        (["--collapse", "--no-prefix"], "give one of them"),
        (["--log-dir", os.devnull], "--log-dir is '/dev/null', where no files can be made: "),
        (["--report", "no/such/directory"], "--report is 'no/such/directory', which cannot be written: "),
        (["--restart", "-1"], "'-1' is not a whole number, such as 3"),
        (["--nnodes", "x"], "'x' is not a whole number, such as 3"),
        (["--grace", "soon"], "'soon' is not a number of seconds, such as 0.5"),
        (["--report", ""], "--report is '', which cannot be written: "),
        (["--restart", "2", "--keep-going"], "give one of them"),
        (
            ["--restart", "2", "--nnodes", "2", "--node-rank", "0", "--rdzv", "x:1"],
            "--restart is for one host",
        ),
        (["--bind", "socket"], "invalid choice: 'socket'"),
    ],
)
def test_bad_usage_is_one_helpful_line_and_2(tmp_path, options, expected):
    done = subprocess.run(
        command(tmp_path, "pass", *options), capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
