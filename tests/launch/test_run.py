"""shmrun: the processes it starts, what it passes on, reports and returns, and that nothing is left."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from leftovers import is_alive, names_in_shm, state_of
from running import QUIET, command, on_a_terminal, run_code, started
from waiting import counted_s, wait_until

from shmring._launch import options as run_options
from shmring._launch import shmrun as run
from shmring._system.limits import usable_cpus


@pytest.fixture
def shmrun(tmp_path):
    return functools.partial(run_code, tmp_path)


@contextlib.contextmanager
def ready(tmp_path, code, *options, nprocs=2):
    """Run code under shmrun until each rank has called ready(); return the process and the pids."""
    with started(tmp_path, code, "--no-prefix", *options, nprocs=nprocs) as process:
        yield process, [int(process.stdout.readline().split()[1]) for _ in range(nprocs)]


# --- starting ---


def test_ranks_compute_together(shmrun):
    done = shmrun(
        """
        import numpy, shmring
        with shmring.init() as comm:
            x = numpy.full(10, comm.rank + 1.0)
            comm.all_reduce(x)
            print(comm.rank, comm.size, x[0])
        with shmring.init() as again:
            again.barrier()
        """,
        nprocs=3,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0| 0 3 6.0", "1| 1 3 6.0", "2| 2 3 6.0"]


def test_arguments_reach_the_script_untouched(shmrun):
    arguments = ("-n", "7", "--grace", "x", "--", "-m", "a b")
    done = shmrun("print(sys.argv[1:], __name__)", arguments=arguments)
    assert done.stdout.splitlines()[0].endswith(f"{list(arguments)} __main__")


def test_modules_run_too(tmp_path):
    (tmp_path / "a_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = subprocess.run(
        [sys.executable, "-m", "shmring.run", "-n", "1", "-m", "a_module", "-x"],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert done.stdout == "0| __main__ ['-x']\n", done.stderr


def test_the_key_is_in_no_command_line(shmrun):
    done = shmrun(
        """
        key = os.environ["SHMRING_KEY"]
        assert len(key) == 64
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                assert key.encode() not in open(f"/proc/{pid}/cmdline", "rb").read()
            except OSError:
                pass
        """
    )
    assert done.returncode == 0, done.stderr


def test_each_run_is_a_world_of_its_own(shmrun):
    code = "print(os.environ['SHMRING_ADDR'], os.environ['SHMRING_KEY'])"
    first, second = (set(shmrun(code, "--no-prefix").stdout.splitlines()) for _ in range(2))
    assert len(first) == len(second) == 1
    assert first != second


def test_a_key_file_of_the_caller_does_not_get_in_the_way(shmrun, tmp_path):
    path = tmp_path / "key"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    code = "import shmring\nshmring.init().close()"
    assert shmrun(code, SHMRING_KEY_FILE=str(path)).returncode == 0


def test_cpus_are_shared_out_unless_the_user_has(shmrun):
    code = "print(os.environ['OMP_NUM_THREADS'])"
    done = shmrun(code, OMP_NUM_THREADS="")
    threads = max(1, usable_cpus() // 2)
    assert set(done.stdout.splitlines()) == {f"0| {threads}", f"1| {threads}"}
    assert re.fullmatch(
        rf"shmrun: 2 ranks on \d+ usable CPU\(s\): OMP_NUM_THREADS={threads}.*\n", done.stderr
    )
    done = shmrun(code, OMP_NUM_THREADS="3")
    assert set(done.stdout.splitlines()) == {"0| 3", "1| 3"}
    assert done.stderr == ""


def test_auto_is_one_rank_for_each_usable_cpu():
    assert run_options.parse(["-n", "auto", os.devnull]).counts == [usable_cpus()]


@pytest.mark.parametrize(
    "names", [["-np", "3"], ["--np", "3"], ["--np=3"], ["--nproc-per-node=3"], ["--nproc_per_node", "3"]]
)
def test_the_names_of_other_launchers_mean_the_same(names):
    options = run_options.parse([*names, os.devnull, "--np", "7"])
    assert options.counts == [3]
    assert options.arguments == ["--np", "7"]


def test_rank_0_reads_standard_input(tmp_path):
    done = subprocess.run(
        command(tmp_path, "print(repr(sys.stdin.read()))"),
        input="text",
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert sorted(done.stdout.splitlines()) == ["0| 'text'", "1| ''"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: -n, SCRIPT"),
        (["-n", "2"], "SCRIPT"),
        (["script.py"], "required: -n"),
        (["-n", "0", "x.py"], "allowed: 1 to"),
        (["-n", "two", "x.py"], "'two'"),
        (["-n", "2", "no-such-script.py"], "there is no script 'no-such-script.py'"),
        (["-n", "2", "python", "x.py"], "leave out 'python', as in shmrun -n 2 x.py"),
        (["-n", "2", "python3", "-u", "x.py", "-v"], "leave out 'python3', as in shmrun -n 2 x.py -v"),
        (["-n", "2", "python", "-m", "x"], "leave out 'python', as in shmrun -n 2 -m x"),
        (["-n", "2"], "arguments are required: SCRIPT (usage"),
        (["-n", "two", "x.py"], "-n is 'two', which is not a number of ranks: give one, such as 4, or auto"),
        (["-n", "2", "/usr/bin/python3.11", "-m", "x"], "as in shmrun -n 2 -m x"),
        (["-n", "2", "--grace", "-1", "x.py"], "--grace"),
        (["-n", "2", "--no-such-option", "x.py"], "usage: shmrun -n 4 script.py"),
    ],
)
def test_bad_usage_is_one_helpful_line_and_2(arguments, expected):
    done = subprocess.run(
        [sys.executable, "-m", "shmring.run", *arguments], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("shmrun: ")
    assert expected in done.stderr


def test_a_wrong_setting_is_said_once(shmrun):
    done = shmrun("import shmring; shmring.init()", SHMRING_DEPTH="deep")
    assert done.returncode == 2
    assert done.stderr == "shmrun: SHMRING_DEPTH is 'deep'; allowed: a whole number from 2 to 4096\n"


# --- output ---


def test_lines_are_passed_on_with_their_rank(shmrun):
    done = shmrun("print('out', rank); print('err', rank, file=sys.stderr)")
    assert sorted(done.stdout.splitlines()) == ["0| out 0", "1| out 1"]
    assert sorted(done.stderr.splitlines()) == ["0| err 0", "1| err 1"]


def test_without_prefix(shmrun):
    done = shmrun("print('out', rank)", "--no-prefix")
    assert sorted(done.stdout.splitlines()) == ["out 0", "out 1"]


def test_much_output_arrives_whole(shmrun):
    done = shmrun("for line in range(20000): print('line', line)", PYTHONUNBUFFERED="")
    for rank in "01":
        lines = [line for line in done.stdout.splitlines() if line.startswith(rank)]
        assert lines == [f"{rank}| line {at}" for at in range(20000)]


def test_lines_come_at_once(tmp_path):
    with ready(tmp_path, "ready(); print('now'); time.sleep(100)", nprocs=1) as (process, _):
        assert process.stdout.readline() == "now\n"


def test_on_a_terminal_prefixes_have_colours_and_bars_their_width(tmp_path):
    code = """
        print(os.environ["COLUMNS"], os.environ.get("TQDM_DISABLE"))
        if rank == 0:
            sys.stderr.write("\\r50%")
            time.sleep(0.3)
            sys.stderr.write("\\r100%\\n")
        """
    environment = {"TERM": "xterm", "COLUMNS": "60", **QUIET}
    environment.pop("COLUMNS")
    status, shown = on_a_terminal(command(tmp_path, code), **environment)
    assert status == 0
    assert re.search(r"\d+ None\r\n", shown)  # bars are wanted
    assert "\x1b[36m0|\x1b[0m 50%" in shown
    assert re.search(r"\r\x1b\[K\x1b\[36m0\|\x1b\[0m 100%\r\n", shown)
    _, shown = on_a_terminal(command(tmp_path, code), NO_COLOR="1", **environment)
    assert "0| 50%" in shown


def test_a_closed_reader_ends_it_without_a_message(tmp_path):
    line = " ".join(command(tmp_path, "while True: print('line')"))
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -n 3; exit ${{PIPESTATUS[0]}}"], capture_output=True, timeout=50
    )
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stdout.count(b"\n") == 3
    assert b"Traceback" not in done.stderr.replace(b"| Traceback", b"")


def test_without_a_terminal_there_are_no_progress_bars_unless_the_user_wants_them(shmrun):
    code = "print(os.environ['TQDM_DISABLE'])"
    assert shmrun(code, nprocs=1).stdout == "0| 1\n"
    assert shmrun(code, nprocs=1, TQDM_DISABLE="").stdout == "0| \n"


# --- failures ---


def test_the_first_failure_is_named_last_and_its_traceback_is_shown_once(shmrun):
    done = shmrun(
        """
        if rank == 1:
            time.sleep(0.2)
            sys.exit(1 / 0)
        time.sleep(100)
        """,
        nprocs=3,
    )
    assert done.returncode == 1
    *shown, last = done.stderr.splitlines()
    assert last == "shmrun: rank 1 of 3 failed first: exit status 1: ZeroDivisionError: division by zero"
    assert shown[0] == "1| Traceback (most recent call last):"
    assert shown[-1] == "1| ZeroDivisionError: division by zero"
    assert done.stderr.count("Traceback") == 1


def test_the_lines_of_a_traceback_stay_together(shmrun):
    code = """
        for _ in range(30):
            for line in ("Traceback (most recent call last):", "  File", "    code", "Error: one", "two"):
                print(line, file=sys.stderr)
                time.sleep(0.001)
        sys.stderr.write("Traceback (most recent call last):\\n  File")
        """
    done = shmrun(code)
    lines = done.stderr.splitlines()
    for at, line in enumerate(lines):
        rank = line[:3]
        if line.endswith("last):"):
            whole = [f"{rank}  File", f"{rank}    code", f"{rank}Error: one"]
            assert lines[at + 1 : at + 4] == whole or lines[at + 1 : at + 2] == whole[:1]
    for rank in range(2):
        own = [line.removeprefix(f"{rank}| ") for line in lines if line.startswith(f"{rank}| ")]
        block = ["Traceback (most recent call last):", "  File", "    code", "Error: one", "two"]
        assert own == block * 30 + block[:2]


@pytest.mark.parametrize(
    ("how", "status", "expected"),
    [
        ("sys.exit(7)", 7, "exit status 7, with nothing on stderr"),
        ("os._exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL, with nothing on stderr"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "killed by SIGTERM"),
        ("sys.exit('last words')", 1, "exit status 1: last words\n"),
    ],
)
def test_the_exit_code_is_that_of_the_first_failing_rank(shmrun, how, status, expected):
    done = shmrun(f"if rank == 1: {how}\ntime.sleep(100)")
    assert done.returncode == status
    assert f"rank 1 of 2 failed first: {expected}" in done.stderr


@pytest.mark.parametrize(
    ("how", "status", "begins", "ends"),
    [
        ("import ctypes; ctypes.string_at(0)", 139, "Fatal Python error: Segmentation fault", "script.py"),
        ("raise ExceptionGroup('both', [ValueError('mine')])", 1, "  + Exception Group", "ValueError: mine"),
        ("exec('x = (')", 1, "Traceback", "SyntaxError: '(' was never closed"),
    ],
)
def test_a_failure_has_its_traceback_without_a_decorator(shmrun, how, status, begins, ends):
    done = shmrun(f"if rank == 1: {how}\ntime.sleep(100)", "--ranks", "0")
    assert done.returncode == status
    first, second, *rest = done.stderr.splitlines()
    assert first.startswith("shmrun: rank 1 of 2 failed first: ")
    assert second.startswith(begins)
    assert any(ends in line for line in rest)


def test_modules_that_fail_are_reported_too(tmp_path):
    (tmp_path / "a_module.py").write_text("1 / 0")
    for name, expected in (("a_module", "ZeroDivisionError: division by zero"), ("no_such", "named no_such")):
        done = subprocess.run(
            [sys.executable, "-m", "shmring.run", "-n", "1", "--no-prefix", "-m", name],
            capture_output=True,
            text=True,
            timeout=50,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        )
        assert done.returncode == 1
        report = done.stderr[done.stderr.index("shmrun: rank 0 of 1 failed first: exit status 1") :]
        assert expected in report


def test_a_rank_that_ends_early_in_peace_is_fine(shmrun):
    done = shmrun("if rank == 0: time.sleep(0.3); print('done')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0| done\n", "")


# shmrun that has no memory for rank 1, once rank 0 has written the file.
NO_MEMORY = """
import os, sys, time
from shmring._launch import shmrun
environment_of = shmrun._Run._environment_of

def fail(run, rank):
    while rank == 1:
        if os.path.exists("pid"):
            raise MemoryError
        time.sleep(0.01)
    return environment_of(run, rank)

shmrun._Run._environment_of = fail
raise SystemExit(shmrun.main())
"""


def test_nothing_is_left_if_a_rank_cannot_be_started(tmp_path):
    code = """
        import subprocess
        with open("pid.begun", "w") as file:
            file.write(str(subprocess.Popen(["sleep", "600"]).pid))
        os.rename("pid.begun", "pid")
        time.sleep(100)
        """
    arguments = command(tmp_path, code)
    arguments[1:3] = ["-c", NO_MEMORY]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert done.stderr.endswith("MemoryError\n")
    pid = int((tmp_path / "pid").read_text())
    try:
        wait_until(lambda: not is_alive(pid), "the child of rank 0 has ended")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_end_of_a_rank_is_noticed_where_sigchld_is_blocked(tmp_path):
    code = """
        import subprocess
        subprocess.Popen(["sleep", "40"])  # holds the pipes of the rank
        sys.exit(3)
        """
    done = subprocess.run(
        command(tmp_path, code),
        capture_output=True,
        timeout=30,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD]),
    )
    assert done.returncode == 3


def test_reports_of_other_ranks_are_not_the_failure(shmrun):
    code = """
        import shmring
        comm = shmring.init()
        if rank == 1:
            try:
                raise ValueError("the cause")
            finally:
                sys.stderr.flush()
                comm.close()
                time.sleep(0.1)  # the others are faster
        comm.barrier()
        """
    done = shmrun(code, nprocs=3, patient=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(" failed first: exit status 1: ValueError: the cause")
    code = "import shmring\ncomm = shmring.init()\nif rank == 1: os._exit(9)\ncomm.barrier()"
    done = shmrun(code, nprocs=3, patient=True)
    assert done.returncode == 9
    assert "rank 1 of 3 failed first: exit status 9" in done.stderr


# Errors without a traceback: shmrun cannot tell by the text that the other ranks' errors are consequences.
OWN_TEXTS = """
        import shmring
        sys.excepthook = lambda kind, value, traceback: print("failed:", value, file=sys.stderr)
        comm = shmring.init()
"""


def test_reports_of_other_ranks_are_not_the_failure_in_words_of_the_programs_own(shmrun):
    code = """
        if rank == 1:
            comm.close()
            time.sleep(0.1)  # the others are faster
            raise ValueError("the cause")
        comm.barrier()
        """
    done = shmrun(OWN_TEXTS + code, nprocs=3)
    assert (
        done.stderr.splitlines()[-1] == "shmrun: rank 1 of 3 failed first: exit status 1: failed: the cause"
    )
    code = """
        if rank == 1:
            comm.close()
            time.sleep(0.1)
            sys.exit(7)
        try:
            comm.barrier()
        except shmring.RankFailed:
            sys.exit(8 if rank == 0 else 1 / 0)
        """
    done = shmrun(OWN_TEXTS + code, nprocs=3)
    assert done.returncode == 7
    assert "rank 1 of 3 failed first: exit status 7, with nothing on stderr" in done.stderr


def test_a_rank_that_has_gone_on_without_another_fails_by_itself(shmrun):
    code = """
        if rank == 2:
            sys.exit()
        try:
            comm.barrier()
        except shmring.RankFailed:
            comm = comm.shrink()
        if rank == 1:
            comm.close()
            time.sleep(0.1)  # the other one is faster
            raise ValueError("the cause")
        comm.barrier()
        """
    done = shmrun(OWN_TEXTS + code, nprocs=3)
    assert (
        done.stderr.splitlines()[-1] == "shmrun: rank 1 of 3 failed first: exit status 1: failed: the cause"
    )


def test_a_process_that_a_rank_forks_notes_nothing_for_it(shmrun):
    code = """
        import multiprocessing
        def fail(world, other):
            with shmring.init(world, other) as inner:
                try:
                    if other == 1:
                        inner.barrier()
                except shmring.Error as error:
                    print(type(error).__name__)
        if rank == 1:
            world = shmring.world(2)
            fork = multiprocessing.get_context("fork")
            forked = [fork.Process(target=fail, args=(world, other)) for other in range(2)]
            for process in forked:
                process.start()
            for process in forked:
                process.join()
            comm.close()
            time.sleep(0.1)  # the others are faster
            raise ValueError("the cause")
        comm.barrier()
        """
    done = shmrun(OWN_TEXTS + code, nprocs=3)
    assert "1| RankFailed" in done.stdout
    assert (
        done.stderr.splitlines()[-1] == "shmrun: rank 1 of 3 failed first: exit status 1: failed: the cause"
    )


def test_a_mismatch_on_one_rank_precedes_the_report_that_the_rank_has_left(shmrun):
    code = """
        import numpy, shmring
        comm = shmring.init()
        if rank == 0:
            comm.send(numpy.ones(3), 1)
            comm.barrier()
        try:
            comm.recv(numpy.ones(3, "f4"), 0)
        finally:
            comm.close()
            time.sleep(0.1)  # the other one is faster
        """
    done = shmrun(code, patient=True)
    assert done.stderr.splitlines()[-1].startswith(
        "shmrun: rank 1 of 2 failed first: exit status 1: shmring.Mismatch: "
    )


def test_ranks_that_do_not_end_are_killed_after_the_grace(shmrun):
    code = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            time.sleep(0.5)
            sys.exit(4)
        time.sleep(100)
        """
    done = shmrun(code, "--grace", "0.3")
    assert done.returncode == 4


def test_ranks_may_use_the_grace(shmrun, tmp_path):
    code = """
        def save(*_):
            time.sleep(0.2)
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        if rank == 1:
            while not os.path.exists(there):
                time.sleep(0.01)
            sys.exit(4)
        open(there, "w").close()
        time.sleep(100)
        """
    done = shmrun(f"there = {str(tmp_path / 'there')!r}\n" + textwrap.dedent(code))
    assert done.returncode == 4
    assert "0| saved" in done.stdout


# --- signals and deaths ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_forwarded_and_end_it(tmp_path, number):
    with ready(tmp_path, "ready(); time.sleep(100)") as (process, pids):
        process.send_signal(number)
        _, err = process.communicate(timeout=50)
        assert process.returncode == 128 + number
        assert err.splitlines()[-1] == f"shmrun: stopped by {signal.Signals(number).name}"
        assert not any(map(is_alive, pids))


def test_ranks_that_handle_the_signal_end_it_well(tmp_path):
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nready()\ntime.sleep(100)"
    with ready(tmp_path, code) as (process, _):
        process.terminate()
        process.communicate(timeout=50)
        assert process.returncode == 0


def test_a_second_ctrl_c_kills(tmp_path):
    code = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\ntime.sleep(100)"
    with ready(tmp_path, code, "--grace", "60") as (process, pids):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert all(map(is_alive, pids))
        while process.poll() is None:  # repeat, since a signal that comes too early has no effect
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        assert process.returncode == 130


def test_two_signals_at_once_are_one(tmp_path):
    code = """
        def save(*_):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(0.5)
            print("saved")
            sys.exit(3)
        signal.signal(signal.SIGINT, save)
        signal.signal(signal.SIGTERM, save)
        ready()
        time.sleep(100)
        """
    with ready(tmp_path, code, nprocs=1) as (process, _):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=50)[0] == "saved\n"
        assert process.returncode == 128 + signal.SIGINT


def test_user_signals_only_pass_through(tmp_path):
    code = """
        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
        ready()
        while not seen:
            time.sleep(0.01)
        print("seen")
        """
    with ready(tmp_path, code) as (process, _):
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=50)
        assert (out, process.returncode) == ("seen\nseen\n", 0)


def test_ctrl_z_stops_the_ranks_too(tmp_path):
    with ready(tmp_path, "ready(); time.sleep(100)") as (process, pids):
        everybody = (process.pid, *pids)
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: all(state_of(pid) == "T" for pid in everybody), "all have stopped")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not any(state_of(pid) == "T" for pid in everybody), "all go on")


def test_ranks_die_with_a_killed_shmrun(tmp_path):
    with ready(tmp_path, "ready(); time.sleep(100)", nprocs=3) as (process, pids):
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_alive, pids)), "the ranks have ended")


def test_everybody_killed_at_once_leaves_nothing(tmp_path):
    before = names_in_shm()
    code = "import shmring\ncomm = shmring.init()\ncomm.barrier()\nready()\ntime.sleep(100)"
    with ready(tmp_path, code) as (process, pids):
        for pid in (process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)), "the ranks have ended")
    assert not names_in_shm() - before


def test_a_ranks_child_that_writes_without_end_does_not_hold_it_up(tmp_path):
    arguments = command(tmp_path, "import subprocess; subprocess.Popen(['yes'])", nprocs=1)
    done = subprocess.run(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=50, env={**os.environ, **QUIET}
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_rank_that_leaves_its_group_is_ended_too(shmrun):
    code = """
        os.setpgid(0, os.getpgid(os.getppid()))
        if rank == 0:
            time.sleep(100)
        sys.exit(3)
        """
    assert shmrun(code).returncode == 3


def test_a_group_that_is_another_users_counts_as_gone(monkeypatch):
    def killpg(group, number):
        raise PermissionError

    monkeypatch.setattr(run.os, "killpg", killpg)
    assert not run._signal_group(1, 0)


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_ranks_own_children_are_swept(tmp_path, end):
    code = f"""
        child = os.fork()
        if child == 0:
            time.sleep(100)
        os.write(1, b"pid %d\\n" % child)
        os.mkdir(f"{tmp_path}/{{rank}}")
        while not os.path.exists(f"{tmp_path}/{{1 - rank}}"):
            time.sleep(0.01)
        {end}
        """
    with ready(tmp_path, code, "--grace", "0.3") as (process, children):
        process.communicate(timeout=50)
        wait_until(lambda: not any(map(is_alive, children)), "the children have ended")


@pytest.mark.parametrize("kind", [BlockingIOError, subprocess.SubprocessError])
def test_a_rank_that_cannot_be_started_is_named(tmp_path, monkeypatch, capfd, kind):
    real, count = subprocess.Popen, []

    def popen(*arguments, **options):
        count.append(1)
        if len(count) == 2:
            raise kind(11, "Resource temporarily unavailable")
        return real(*arguments, **options)

    monkeypatch.setattr(run.subprocess, "Popen", popen)
    monkeypatch.setattr(run._Signals, "catch", lambda self: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run.main(command(tmp_path, "time.sleep(100)")[3:]) == 1
    assert "rank 1 of 2 could not be started: " in capfd.readouterr().err


def test_a_rank_that_was_started_is_swept_when_it_cannot_be_listened_to(tmp_path, monkeypatch, capfd):
    started, real = [], subprocess.Popen

    def popen(*arguments, **options):
        started.append(real(*arguments, **options))
        return started[-1]

    class Selector(run.selectors.DefaultSelector):
        def register(self, fd, events, data=None):
            if len(started) == 2:
                raise OSError(28, "No space left on device")  # fs.epoll.max_user_watches
            return super().register(fd, events, data)

    monkeypatch.setattr(run.subprocess, "Popen", popen)
    monkeypatch.setattr(run.selectors, "DefaultSelector", Selector)
    monkeypatch.setattr(run._Signals, "catch", lambda self: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run.main(command(tmp_path, "time.sleep(100)")[3:]) == 1
    assert "rank 1 of 2 could not be started: " in capfd.readouterr().err
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_a_rank_that_never_joins_is_named_at_once(shmrun):
    code = """
        import shmring
        if os.environ["SHMRING_RANK"] != "1":
            shmring.init()
        """
    begin = counted_s()
    done = shmrun(textwrap.dedent(code))
    assert done.returncode == 1
    assert "rank 1 ended without joining" in done.stderr
    assert counted_s() - begin < 30  # the timeout is half an hour


def test_a_rank_that_joins_less_often_is_named_too(shmrun):
    code = """
        import shmring
        shmring.init().close()
        if os.environ["SHMRING_RANK"] != "0":
            shmring.init()
        """
    done = shmrun(textwrap.dedent(code))
    assert done.returncode == 1
    assert "rank 0 ended without joining" in done.stderr
