"""spawn: results by rank, the first cause in its own type, no process left behind."""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from leftovers import descendants, is_alive, left_running, names_in_shm
from waiting import wait_until

import shmring
from shmring._launch import spawn
from shmring._outcome import Failure
from shmring._system import limits

METHODS = ("fork", "spawn", "forkserver")
FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


@pytest.fixture
def impatient(monkeypatch):
    """Short graces, for tests in which they run out."""
    monkeypatch.setattr(spawn, "_GRACE_S", 0.2)
    monkeypatch.setattr(spawn, "_TERMINATE_S", 0.2)
    monkeypatch.setattr(spawn, "_EXIT_S", 0.2)


@pytest.fixture(autouse=True)
def nothing_stays():
    """spawn leaves no child process, no thread and (fork server apart) no descriptor."""
    threads = threading.active_count()
    yield
    assert threading.active_count() == threads
    # A fork server takes a moment to notice that its launcher was killed.
    wait_until(lambda: not left_running(), "no process is left running")


# --- functions of ranks; at the top of the module, where other processes find them ------


def place(comm, *args, **kwargs):
    return comm.rank, comm.size, args, kwargs


def total(comm, value):
    x = np.full(1000, comm.rank + value, dtype="f8")
    comm.all_reduce(x)
    return x


def large(comm, x):
    return x + comm.rank


def own_view(comm):
    x = comm.zeros(1000, "i4")
    x += comm.rank
    return x  # in memory that is freed when the rank has ended


class OddError(Exception):
    """Comes back only if its __init__ is not taken at its word."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


class DetailedError(Exception):
    def __init__(self, detail):
        super().__init__(detail)
        self.detail = detail


def fail(comm, what, who=1):
    """Make rank `who` fail in some way while the others wait for it in a collective."""
    if comm.rank == who:
        if what == "value":
            raise ValueError("bad value")
        if what == "detailed":
            raise DetailedError({"loss": 3})
        if what == "odd":
            raise OddError(5, "odd one")
        if what == "lock":
            raise DetailedError(threading.Lock())
        if what == "chained":
            try:
                raise KeyError("first")
            except KeyError as error:
                raise ValueError("second") from error
        if what == "result":
            return threading.Lock()
        if what == "sys.exit":
            sys.exit(7)
        if what == "interrupt":
            raise KeyboardInterrupt
        if what == "_exit":
            os._exit(3)
        if what == "_exit 0":
            os._exit(0)
        if what == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "SIGSEGV":
            faulthandler.disable()  # no stack in the tests' output
            ctypes.string_at(0)
        if what == "own error":
            raise shmring.Error("about rank 0", rank=0)
    comm.barrier()
    return None


def translate(comm):
    """Wrap the other ranks' errors about rank 1's failure."""
    if comm.rank == 1:
        time.sleep(0.1)
        os._exit(9)
    try:
        comm.barrier()
    except shmring.RankFailed as error:
        raise ValueError("my own words") from error


def hang(comm, who=1, *, stop=False, ignore=False):
    if comm.rank == who:
        if ignore:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if stop:
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            time.sleep(1)


def hang_when_another_fails(comm):
    if comm.rank == 1:
        raise ValueError("first")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def leave_a_child(comm):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return os.getpid()


def nest(comm):
    return shmring.spawn(place, 2, args=(comm.rank,), method="fork")


def start_thread_that_stays(comm):
    threading.Thread(target=time.sleep, args=(60,)).start()
    return comm.rank


# --- results ---


def test_results_come_by_rank(method):
    got = shmring.spawn(place, 3, ("a",), {"b": 1}, method=method)
    assert got == [(rank, 3, ("a",), {"b": 1}) for rank in range(3)]


SIGCHLD_IS_BLOCKED = """
import signal, shmring
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    print(shmring.spawn(repr, 2, method="forkserver")[0][:13], signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_a_forkserver_works_where_sigchld_is_blocked(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SIGCHLD_IS_BLOCKED)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"<shmring.Comm { {signal.SIGCHLD} }\n", done.stdout + done.stderr


def test_ranks_compute_together():
    for x in shmring.spawn(total, 2, args=(1.5,)):
        np.testing.assert_array_equal(x, np.full(1000, 4.0))


def test_forked_ranks_have_the_modules_that_the_launcher_has_imported():
    program = """
        import sys, numpy, shmring

        def imported(comm):
            comm.all_reduce(numpy.ones(1))
            return set(sys.modules)

        of_ranks = shmring.spawn(imported, 2, method="fork")
        print({name for names in of_ranks for name in names} - set(sys.modules))
        print("shmring._comm.comm" in sys.modules, "asyncio" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\nTrue False\n", "")


def test_one_rank_is_a_process_too():
    assert shmring.spawn(place, 1) == [(0, 1, (), {})]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_large_arguments_and_results_do_not_block(method):
    x = np.arange(4 << 20, dtype="f8")  # 32 MiB, far beyond any pipe
    for rank, y in enumerate(shmring.spawn(large, 3, args=(x,), method=method)):
        np.testing.assert_array_equal(y[:: 1 << 16], x[:: 1 << 16] + rank)


def test_results_may_lie_in_shared_memory():
    for rank, x in enumerate(shmring.spawn(own_view, 2)):
        np.testing.assert_array_equal(x, np.full(1000, rank, "i4"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_closures_and_lambdas_travel(method):
    pytest.importorskip("cloudpickle")
    y = 10
    assert shmring.spawn(lambda comm, x: x + y + comm.rank, 2, args=(1,), method=method) == [11, 12]


def test_without_cloudpickle_the_error_of_a_lambda_names_the_fix(monkeypatch):
    monkeypatch.setattr(spawn, "cloudpickle_if_installed", lambda: None)
    with pytest.raises(TypeError, match="pip install cloudpickle"):
        shmring.spawn(lambda comm: None, 2, method="spawn")
    assert shmring.spawn(lambda comm: comm.rank, 2, method="fork") == [0, 1]


@pytest.mark.parametrize("has_cloudpickle", [True, False])
@pytest.mark.parametrize("make", [FORK.Lock, FORK.Queue])
def test_the_error_of_what_can_only_be_inherited_names_the_method(monkeypatch, make, has_cloudpickle):
    if not has_cloudpickle:
        monkeypatch.setattr(spawn, "cloudpickle_if_installed", lambda: None)
    with pytest.raises(TypeError, match=r'inheritance.*: use method="fork"'):
        shmring.spawn(place, 2, args=(make(),), method="spawn")


class TooLarge:
    """An argument for whose pickle the memory does not suffice."""

    def __reduce__(self):
        raise MemoryError


@pytest.mark.parametrize("pickler", ["pickle", "cloudpickle"])
def test_a_lack_of_memory_is_no_error_of_the_arguments(pickler):
    pytest.importorskip(pickler)
    fn = place if pickler == "pickle" else lambda comm, x: None
    with pytest.raises(MemoryError):
        shmring.spawn(fn, 2, args=(TooLarge(),), method="spawn")


def test_spawn_works_from_a_thread(method):
    got = []
    thread = threading.Thread(target=lambda: got.append(shmring.spawn(place, 2, method=method)))
    thread.start()
    thread.join()
    assert [rank for rank, *_ in got[0]] == [0, 1]


def test_ranks_can_spawn():
    assert [[args for _, _, args, _ in inner] for inner in shmring.spawn(nest, 2)] == [[(0,)] * 2, [(1,)] * 2]


def test_no_descriptor_stays():
    shmring.spawn(place, 2, method="fork")
    before = os.listdir("/proc/self/fd")
    shmring.spawn(place, 2, method="fork")
    with pytest.raises(ValueError, match="bad"):
        shmring.spawn(fail, 2, ("value",), method="fork")
    assert os.listdir("/proc/self/fd") == before


def test_the_start_method_stays_unchosen():
    code = """
        import multiprocessing, shmring
        # multiprocessing itself chooses the default when it starts a process in another way than by fork.
        multiprocessing.get_all_start_methods = lambda: ["fork", "spawn", "forkserver"]
        def place(comm): return comm.rank
        assert shmring.spawn(place, 2) == [0, 1]
        multiprocessing.set_start_method("spawn")
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=50)


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({"nprocs": 0}, ValueError, "allowed: 1 to"),
        ({"nprocs": "2"}, TypeError, "nprocs is '2'"),
        ({"nprocs": 2.0}, TypeError, "nprocs is 2.0"),
        ({"nprocs": 2, "timeout": 0}, ValueError, "more than 0"),
        ({"nprocs": 2, "timeout": -1}, ValueError, "more than 0"),
        ({"nprocs": 2, "method": "thread"}, ValueError, "allowed: .*fork"),
        ({"nprocs": 2, "fn": 3}, TypeError, "callable"),
    ],
)
def test_wrong_arguments_are_errors_before_anything_starts(arguments, error, expected):
    with pytest.raises(error, match=expected):
        shmring.spawn(arguments.pop("fn", place), **arguments)


# --- failures ---


def failure(what, nprocs=3, *, method="fork", **arguments):
    with pytest.raises((Exception, SystemExit)) as caught:
        shmring.spawn(fail, nprocs, (what,), method=method, **arguments)
    return caught.value


def test_an_exception_comes_back_in_its_own_type_with_rank_and_traceback(method):
    error = failure("value", method=method)
    assert type(error) is ValueError
    assert str(error) == "bad value"
    assert error.rank == 1
    assert "Raised in rank 1:" in error.__notes__[0]
    assert 'raise ValueError("bad value")' in error.__notes__[0]


def differ(comm):
    comm.all_reduce(np.ones(3 + comm.rank))


def test_a_traceback_ends_at_the_users_line():
    with pytest.raises(shmring.Mismatch) as caught:
        shmring.spawn(differ, 2, method="fork")
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["spawn"]
    (note,) = [note for note in caught.value.__notes__ if "Raised in rank" in note]
    lines = note.strip().splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].endswith("in differ")
    assert lines[3].strip() == "comm.all_reduce(np.ones(3 + comm.rank))"
    assert set("".join(lines[4:])) <= set(" ~^")  # neither shmring's own functions nor the error again


def test_in_developers_mode_a_traceback_shows_shmrings_functions():
    code = "import shmring; shmring.init().all_reduce('text')"
    plain = [sys.executable, "-c", code], [sys.executable, "-X", "dev", "-c", code]
    shown = [subprocess.run(one, capture_output=True, text=True, timeout=50).stderr for one in plain]
    assert ["collectives.pyx" in text for text in shown] == [False, True]
    assert all("TypeError" in text for text in shown)


def test_the_note_holds_what_led_to_it():
    assert "KeyError: 'first'" in failure("chained").__notes__[0]


def test_an_exceptions_own_attributes_come_along():
    error = failure("detailed")
    assert type(error) is DetailedError
    assert error.detail == {"loss": 3}


@pytest.mark.parametrize(
    ("what", "words"), [("odd", "OddError: odd one"), ("lock", "DetailedError: <unlocked")]
)
def test_exceptions_that_cannot_travel_become_words(what, words):
    error = failure(what)
    assert type(error) is RuntimeError
    assert words in str(error)
    assert error.rank == 1
    assert "Raised in rank 1:" in error.__notes__[0]


def test_results_that_cannot_travel_are_named():
    error = failure("result")
    assert type(error) is RuntimeError
    assert "rank 1 returned a lock that cannot be pickled" in str(error)
    assert error.rank == 1


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("SIGKILL", "killed by SIGKILL"),
        ("SIGSEGV", "killed by SIGSEGV"),
        ("_exit", "exit status 3"),
        ("_exit 0", "exit status 0 before it returned a result"),
        ("sys.exit", "SystemExit: 7 before it returned a result"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_a_rank_that_ends_without_an_answer_is_a_failed_rank(what, cause):
    error = failure(what)
    assert type(error) is shmring.RankFailed
    assert error.rank == 1
    assert error.cause == cause
    assert f"rank 1 ended: {cause}" in str(error)


def test_how_a_rank_died_is_known_under_every_method(method):
    assert failure("SIGKILL", 2, method=method).cause == "killed by SIGKILL"


def spawn_and_say(connection):
    try:
        connection.send(shmring.spawn(place, 2, method="fork"))
    except RuntimeError as error:
        connection.send(str(error))


def test_a_daemonic_process_cannot_spawn_and_is_told_what_can():
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=spawn_and_say, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert "Process(daemon=False)" in ours.recv()
    process.join()
    ours.close()


def test_a_closed_pipe_of_stdout_is_no_failure_of_a_rank():
    code = """
        import os, sys, shmring
        sys.stdout.write("to be flushed")
        try:
            shmring.spawn(repr, 2, method="fork")
        except BrokenPipeError:
            os._exit(7)
        """
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=50)
    os.close(writer)
    assert done.returncode == 7, done.stderr


def test_a_fork_server_that_has_been_killed_is_named(monkeypatch):
    def start(process):
        raise EOFError

    monkeypatch.setattr(FORK.Process, "start", start)
    with pytest.raises(shmring.Error, match=r"starting rank 0 of 2 failed: .*fork server has ended"):
        shmring.spawn(place, 2, method="fork")


class ExitingError(Exception):
    """Ends the process that loads it."""

    def __reduce__(self):
        return sys.exit, (5,)


def exit_there(comm, *, raises):
    if raises:
        raise ExitingError("odd")
    return ExitingError("odd")


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_an_outcome_that_exits_where_it_is_loaded_is_an_error(raises, keeps):
    def outcome():
        arguments = {"kwargs": {"raises": raises}, "method": "fork", "return_exceptions": keeps}
        return shmring.spawn(exit_there, 1, **arguments)[0]

    if keeps:
        error = outcome()
    else:
        with pytest.raises(RuntimeError) as caught:
            outcome()
        error = caught.value
    assert ("ExitingError: odd" if raises else "SystemExit: 5") in str(error)
    assert error.rank == 0


class FailsToArrive:
    """An argument that makes some ranks fail before they join."""

    def __init__(self, how, ranks):
        self.how = how
        self.ranks = ranks

    def __reduce__(self):
        return fail_in_rank, (self.how, self.ranks)


def fail_in_rank(how, ranks):
    if multiprocessing.current_process().name in [f"shmring-rank-{rank}" for rank in ranks]:
        if how == "_exit":
            os._exit(5)
        raise ValueError("does not arrive")


@pytest.mark.parametrize("how", ["_exit", "value"])
@pytest.mark.parametrize("ranks", [[0], [1, 2]])
def test_ranks_do_not_wait_for_one_that_failed_before_it_joined(monkeypatch, method, how, ranks):
    monkeypatch.setenv("SHMRING_TIMEOUT", "40")
    if method == "fork":  # whose ranks have their arguments without a pickle
        receive = spawn._receive_call
        monkeypatch.setattr(spawn, "_receive_call", lambda fd: fail_in_rank(how, ranks) or receive(fd))
    args = (FailsToArrive(how, ranks),)
    outcomes = shmring.spawn(place, 4, args, method=method, return_exceptions=True)
    for rank, error in enumerate(outcomes):
        raised_itself = rank in ranks and how == "value"
        assert isinstance(error, ValueError if raised_itself else shmring.RankFailed), error
        # Rank 0 raises first then. A rank that has just connected may know no more than that.
        assert error.rank in ([rank] if rank in ranks else [*ranks, 0]), error


def test_errors_of_survivors_do_not_hide_the_cause():
    for _ in range(5):
        with pytest.raises(shmring.RankFailed) as caught:
            shmring.spawn(translate, 3)
        assert (caught.value.rank, caught.value.cause) == (1, "exit status 9")


def test_a_collectives_error_keeps_the_rank_that_it_is_about():
    error = failure("own error")
    assert type(error) is shmring.Error
    assert error.rank == 0
    assert "Raised in rank 1:" in error.__notes__[0]


def test_survivors_that_do_not_end_are_killed(impatient):
    with pytest.raises(ValueError, match="first"):
        shmring.spawn(hang_when_another_fails, 2)


@pytest.mark.parametrize("how", [{}, {"stop": True}, {"ignore": True}])
def test_the_timeout_bounds_the_run(impatient, how):
    with pytest.raises(shmring.Timeout, match=r"1 of 2 did not finish within 1 s") as caught:
        shmring.spawn(hang, 2, kwargs=how, timeout=1)
    assert caught.value.rank in (0, 1)  # 0 if even that one was too slow


PRINTING = """
import shmring
from shmring._launch import spawn

spawn._GRACE_S = 30  # for rank 0 to report

def work(comm):
    print("first of rank", comm.rank)  # stays in the buffer until the rank exits
    if comm.rank == 1:
        raise ValueError("the cause")
    comm.barrier()

if __name__ == "__main__":
    try:
        shmring.spawn(work, 2, method={method!r})
    except ValueError as error:
        print("raised", error)
"""


def test_what_ranks_have_printed_before_a_failure_is_not_lost(tmp_path, method):
    script = tmp_path / "printing.py"
    script.write_text(PRINTING.format(method=method))
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["first of rank 0", "first of rank 1", "raised the cause"]


def test_a_rank_that_stays_after_its_result_is_stopped(impatient, caplog):
    assert shmring.spawn(start_thread_that_stays, 2) == [0, 1]
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "shmring"]
    what = "ranks 0, 1 returned or raised, but did not exit within 0.2 s and will be stopped: "
    assert warning.startswith(what)


def test_ranks_that_had_no_time_to_exit_are_stopped_without_a_warning(monkeypatch, caplog):
    collect = spawn._Launch.collect

    def collect_and_raise(launch):
        collect(launch)
        raise ValueError("of a signal handler")

    monkeypatch.setattr(spawn._Launch, "collect", collect_and_raise)
    with pytest.raises(ValueError, match="of a signal handler"):
        shmring.spawn(start_thread_that_stays, 2)
    assert not [record.getMessage() for record in caplog.records if record.name == "shmring"]


def test_a_ranks_own_child_does_not_hold_up_the_launcher():
    try:
        ranks = shmring.spawn(leave_a_child, 2, method="fork")
        assert not any(map(is_alive, ranks))
    finally:
        for pid in left_running():  # those that we adopted
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_rank_killed_from_outside_is_named(tmp_path):
    def pid_then_hang(comm):
        (tmp_path / str(comm.rank)).write_text(str(os.getpid()))
        comm.barrier()
        hang(comm)

    def kill():
        pid_path = tmp_path / "1"
        wait_until(lambda: pid_path.exists() and pid_path.read_text(), "rank 1 has written its pid")
        os.kill(int(pid_path.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(shmring.RankFailed) as caught:
        shmring.spawn(pid_then_hang, 2, method="fork")
    killer.join()
    assert (caught.value.rank, caught.value.cause) == (1, "killed by SIGKILL")


# --- the launcher's end ---

LAUNCHER = r"""
import os, sys, time
import shmring

def wait(comm):
    os.write(1, b"%d\n" % os.getpid())
    comm.barrier()
    time.sleep(100)

if __name__ == "__main__":
    try:
        shmring.spawn(wait, 3, method=sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def launcher(tmp_path, method):
    """A launcher of three sleeping ranks, and their pids."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    process = subprocess.Popen(
        [sys.executable, str(script), method], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    return process, [int(process.stdout.readline()) for _ in range(3)]


def test_ranks_die_with_a_killed_launcher(tmp_path, method):
    process, ranks = launcher(tmp_path, method)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, ranks)), "the ranks have ended")
    process.stdout.close()


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["launcher", "terminal"])
def test_ctrl_c_stops_the_ranks_and_raises(tmp_path, send):
    process, ranks = launcher(tmp_path, "fork")
    send(process.pid, signal.SIGINT)
    assert "interrupted" in process.stdout.read()
    assert process.wait(50) == 0
    assert not any(map(is_alive, ranks))
    process.stdout.close()


def descriptors():
    """Return what this process has open, by number; not the directory that is listed here."""
    return {fd: str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}


def after(function):
    """The same function, followed by Ctrl-C in the launcher."""
    launcher = os.getpid()

    def interrupted(*arguments):
        result = function(*arguments)
        if os.getpid() == launcher:
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (os, "fork"),
        (FORK.Process, "start"),
        (FORK.Process, "close"),
        (spawn._Launch, "collect"),
        (spawn._Launch, "_wait_for_exits"),
    ],
)
def test_ctrl_c_at_any_moment_leaves_no_rank(monkeypatch, owner, name):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(owner, name, after(getattr(owner, name)))
    before, earlier = descriptors(), set(descendants())
    with pytest.raises(KeyboardInterrupt):
        shmring.spawn(place, 2, method="fork")
    gc.collect()
    opened = [path for fd, path in descriptors().items() if fd not in before]
    # multiprocessing keeps its pipes if its fork is interrupted.
    assert not [path for path in opened if name != "fork" or not path.startswith("pipe:")]
    assert "OMP_NUM_THREADS" not in os.environ
    wait_until(lambda: not any(map(is_alive, set(descendants()) - earlier)), "the ranks have ended")


def reap(number, frame):
    """Wait for all children, as programs do that start processes by themselves."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, reap])
def test_others_may_wait_for_the_ranks(handler):
    before, opened = signal.signal(signal.SIGCHLD, handler), descriptors()
    try:
        assert shmring.spawn(total, 2, args=[1], method="fork")[1][0] == 3
        # The rank may take the exit status first: that of the handler comes with the next bytecode.
        how = (
            "unknown exit status" if handler is signal.SIG_IGN else "(unknown exit status|killed by SIGKILL)"
        )
        with pytest.raises(shmring.RankFailed, match=f"rank 1 ended: {how}") as caught:
            shmring.spawn(fail, 2, args=["SIGKILL"], method="fork")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert caught.value.rank == 1
    del caught
    gc.collect()
    assert descriptors() == opened


def test_everybody_killed_at_once_leaves_nothing(tmp_path):
    before = names_in_shm()
    process, ranks = launcher(tmp_path, "fork")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(map(is_alive, ranks)), "the ranks have ended")
    assert not names_in_shm() - before
    process.stdout.close()


# --- scripts, sessions, notebooks ---

SESSION = """
import shmring
offset = 5
def work(comm):
    return comm.rank + offset
print(shmring.spawn(work, 2, method={method!r}))
"""


@pytest.mark.parametrize("method", [None, "spawn", "forkserver"])
def test_functions_of_a_session_without_a_file(method):
    done = subprocess.run(
        [sys.executable, "-c", SESSION.format(method=method)], capture_output=True, text=True, timeout=50
    )
    assert done.stdout.strip() == "[5, 6]", done.stderr


PROGRAM = """
import functools
import shmring

class Offset:
    value = 5

def work(comm, offset):
    return comm.rank + offset.value

if __name__ == "__main__":
    print(shmring.spawn(functools.partial(work, offset=Offset()), 2, method="spawn"))
"""


@pytest.mark.parametrize("how", [["-c", PROGRAM], ["program"], ["-m", "program"]])
def test_objects_of_a_main_module_that_no_rank_can_import(tmp_path, how):
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, *how], capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert done.stdout == "[5, 6]\n", done.stderr


@pytest.mark.parametrize("default", ["fork", "spawn"])
def test_functions_of_a_script_from_standard_input(default):
    script = f"import multiprocessing\nmultiprocessing.set_start_method({default!r})\n"
    script += SESSION.format(method=None)
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "[5, 6]", done.stderr


def test_sessions_without_cloudpickle_fork():
    code = "import sys\nsys.modules['cloudpickle'] = None\n" + SESSION.format(method=None)
    code = "import multiprocessing\nmultiprocessing.set_start_method('spawn')\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "[5, 6]", done.stderr


def test_a_script_without_a_main_guard_is_reported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SESSION.format(method="spawn"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert 'if __name__ == "__main__":' in done.stderr.splitlines()[-1]


def fail_without_reading(fd):
    body = pickle.dumps(Failure("MemoryError: no room for the call"))
    os.write(fd, spawn._head(spawn._RAISED, body) + body)


def return_and_stay(fd):
    """Report a result, as a rank whose threads still run then."""
    body = pickle.dumps("the result")
    os.write(fd, spawn._head(spawn._RETURNED, body) + body)
    os.close(fd)
    time.sleep(60)


def collected_from(target):
    """The launch of a rank that closes its connection before the launcher writes to it."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=target, args=(theirs.fileno(),))
    process.start()
    theirs.close()
    poller = select.poll()
    poller.register(ours.fileno(), 0)
    assert poller.poll(30_000)  # closed, so that the first write fails
    os.set_blocking(ours.fileno(), False)
    ranks = spawn._Launch(20.0)
    ranks._ranks.append(spawn._Rank(0, process, ours, [memoryview(bytes(1 << 24))]))
    ranks._register(ranks._ranks[0])
    ranks.collect()
    ranks.stop(0.0)
    return ranks


def test_the_failure_of_a_rank_that_did_not_read_its_call_is_raised():
    failure = collected_from(fail_without_reading).first_failure()
    assert isinstance(failure, RuntimeError)
    assert "MemoryError: no room for the call" in str(failure)


def test_a_result_is_read_though_nothing_more_can_be_sent_to_its_rank():
    ranks = collected_from(return_and_stay)
    assert (ranks.results(), ranks.failures) == (["the result"], {})


def leave_before_a_collective(comm):
    try:
        if comm.rank == 2:
            raise ValueError("the cause")
        comm.all_reduce(np.ones(3))
    finally:
        try:
            comm.gather_object(comm.rank)
        finally:
            time.sleep(0.2 * comm.rank)  # the others report first


def test_the_rank_whose_finally_led_to_a_mismatch_is_raised(monkeypatch):
    monkeypatch.setattr(spawn, "_GRACE_S", 30)  # for all to report
    with pytest.raises(shmring.Mismatch) as caught:
        shmring.spawn(leave_before_a_collective, 3, method="fork")
    (note,) = [note for note in caught.value.__notes__ if "Raised in rank" in note]
    assert "Raised in rank 2:" in note
    assert "ValueError: the cause" in note


def threads_of(comm):
    return os.environ.get("OMP_NUM_THREADS")


def test_ranks_share_the_threads_of_numerical_libraries(monkeypatch, method):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = str(max(1, limits.usable_cpus() // 2))
    assert shmring.spawn(threads_of, 2, method=method) == [share] * 2
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert shmring.spawn(threads_of, 2, method=method) == ["7"] * 2


def test_two_threads_that_spawn_at_once_do_not_change_each_others_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(spawn, "cpus_for_each", lambda nprocs: 10 * nprocs)
    of_other = []
    other = threading.Thread(
        target=lambda: of_other.extend(shmring.spawn(threads_of, 3, method="fork")), daemon=True
    )

    def world_while_another_thread_spawns(nprocs):
        if not other.is_alive():
            other.start()
            other.join(0.5)  # it either ends, or waits until the first ranks have been started
        return shmring.world(nprocs)

    monkeypatch.setattr(spawn, "world", world_while_another_thread_spawns)
    assert shmring.spawn(threads_of, 2, method="fork") == ["20"] * 2
    other.join()
    assert of_other == ["30"] * 3
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize("args", [5, "ab", b"ab", memoryview(b"ab"), {"rate": 0.1}, {7}, np.arange(2)])
def test_args_that_are_no_list_are_refused(args):
    with pytest.raises(TypeError, match=re.escape(f"args is {args!r}; give a list")):
        shmring.spawn(print, 1, args=args)


def test_advice_is_whole_or_left_out():
    with pytest.raises(TypeError, match=re.escape("args=['ab']")):
        shmring.spawn(print, 1, args="ab")
    with pytest.raises(TypeError, match=re.escape("args=[...]")):
        shmring.spawn(print, 1, args="ab" * 30)


def test_the_keys_of_a_dict_are_arguments():
    assert shmring.spawn(lambda comm, *args: args, 1, args={"a": 1, "b": 2}.keys(), method="fork") == [
        ("a", "b")
    ]
