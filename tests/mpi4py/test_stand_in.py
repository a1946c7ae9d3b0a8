"""The ways in which `import mpi4py` comes to mean shmring's stand-in, and that nothing else changes it."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from running import LIMIT_S, run_code

import shmring
from shmring import mpi4py
from shmring._launch.stand_in import with_stand_in
from shmring.mpi4py import process
from shmring.mpi4py.rc import Rc

HOME = Path(shmring.__file__).parents[1]
WHICH = "import mpi4py; print(mpi4py.rc.__class__.__module__)"
OURS = "shmring.mpi4py.rc"
needs_mpi4py = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed: nothing to win over"
)


def python(*arguments, folder=None, **environment):
    """Run Python with the tested shmring, whichever way it is found here."""
    path = os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def printed(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_shmrun_puts_it_in_the_place_of_mpi4py(tmp_path):
    done = run_code(tmp_path, WHICH, "--no-prefix", "--mpi4py")
    assert printed(done) == [OURS] * 2


def test_shmrun_does_so_for_modules(tmp_path):
    (tmp_path / "a_module.py").write_text(WHICH)
    done = python(
        "-m", "shmring.run", "-n", "1", "--no-prefix", "--mpi4py", "-m", "a_module", folder=tmp_path
    )
    assert printed(done) == [OURS]


def test_it_is_there_in_processes_that_a_rank_starts(tmp_path):
    code = f"import subprocess; subprocess.run([sys.executable, '-c', {WHICH!r}], check=True)"
    assert printed(run_code(tmp_path, code, "--no-prefix", "--mpi4py", nprocs=1)) == [OURS]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("way", ["shmrun", "-m"])
def test_it_is_there_in_multiprocessing_children(tmp_path, method, way):
    code = textwrap.dedent(f"""
        import multiprocessing, mpi4py

        def which(_):
            import mpi4py.run
            return mpi4py.run.__name__

        if __name__ == "__main__":
            with multiprocessing.get_context({method!r}).Pool(1) as pool:
                print(pool.map(which, [1]))
    """)
    if way == "shmrun":
        done = run_code(tmp_path, code, "--no-prefix", "--mpi4py", nprocs=1)
    else:
        (tmp_path / "script.py").write_text(code)
        done = python("-m", "shmring.mpi4py", str(tmp_path / "script.py"))
    assert printed(done) == ["['shmring.mpi4py.run']"]


@needs_mpi4py
def test_without_the_switch_the_installed_one_is_untouched(tmp_path):
    code = (
        "import sys, shmring.mpi4py, mpi4py.run; print(mpi4py.__name__, mpi4py.run.__name__, mpi4py.__file__)"
    )
    name, run, file = printed(python("-c", code))[0].split()
    assert (name, run) == ("mpi4py", "mpi4py.run")
    assert Path(file).parent != Path(shmring.__file__).parent / "mpi4py"


def test_the_variable_switches_it_on_when_python_starts(tmp_path):
    """An installed shmring has this .pth file in site-packages; here another folder serves as that."""
    (tmp_path / "shmring_mpi4py.pth").write_bytes((HOME / "shmring_mpi4py.pth").read_bytes())
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print('shmring' in sys.modules)"
    code += f"\ntry:\n {WHICH}\nexcept ImportError: print('none')"
    assert printed(python("-c", code, SHMRING_MPI4PY="1")) == ["True", OURS]
    for off in ("0", ""):
        loaded, which = printed(python("-c", code, SHMRING_MPI4PY=off))
        assert loaded == "False"
        assert which != OURS


def test_every_module_is_one_module_under_both_names():
    code = """
        from shmring.mpi4py import finder
        finder.install()
        import importlib
        modules = "run typing util util.dtlib util.pool"
        for name in ["", *("." + module for module in modules.split())]:
            ours = importlib.import_module("shmring.mpi4py" + name)
            assert importlib.import_module("mpi4py" + name) is ours, name
            assert ours.__spec__.name == "shmring.mpi4py" + name
        import mpi4py
        assert mpi4py.run is importlib.import_module("mpi4py.run") and mpi4py.__path__
        try:
            import mpi4py.errors
        except ModuleNotFoundError as error:
            print(error)
    """
    done = python("-c", textwrap.dedent(code))
    assert printed(done) == ["shmring's stand-in for mpi4py has no module 'mpi4py.errors'"]


@needs_mpi4py
@pytest.mark.parametrize("then", ["finder.install()", "process.join()"])
def test_after_another_mpi_it_is_refused(then):
    code = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI\n"
    code += f"from shmring.mpi4py import finder, process; {then}"
    done = python("-c", code)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: mpi4py's MPI was imported before shmring's, from /")


def test_the_command_sets_the_program_up_as_python_does(tmp_path):
    (tmp_path / "beside.py").write_text("name = 'beside'")
    (tmp_path / "script.py").write_text(
        "import beside, pickle, sys\ndef f(): pass\nprint(__name__, sys.argv, sys.path[0], beside.name)\n"
        "assert pickle.loads(pickle.dumps(f)) is f\n" + WHICH
    )
    script = str(tmp_path / "script.py")
    first, second = printed(python("-m", "shmring.mpi4py", script, "-x", "1"))
    assert first == f"__main__ {[script, '-x', '1']} {tmp_path.resolve()} beside"
    assert second == OURS
    assert printed(python("-m", "shmring.mpi4py", "-m", "script", "y", folder=tmp_path))[1] == OURS
    text = "import sys; print(sys.argv); " + WHICH
    assert printed(python("-m", "shmring.mpi4py", "-c", text, "z")) == ["['-c', 'z']", OURS]


def test_the_commands_leave_a_safe_path_as_it_is(tmp_path):
    """The first folder of PYTHONPATH stays, and the program's is not searched."""
    for name in ("library", "program"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in_{name}.py").touch()
    script = tmp_path / "program" / "script.py"
    script.write_text("import importlib.util, in_library\nprint(importlib.util.find_spec('in_program'))")
    path = os.pathsep.join([str(tmp_path / "library"), str(HOME)])
    command = "-m", "shmring.run", "-n", "2", "--no-prefix", "-m", "shmring.mpi4py.futures", str(script)
    assert printed(python(*command, PYTHONPATH=path, PYTHONSAFEPATH="1")) == ["None"] * 2


def test_mpi_is_there_in_a_working_directory_that_is_gone(tmp_path):
    text = "import os; os.rmdir(os.getcwd()); from shmring import MPI; print([*MPI.INFO_ENV])"
    (tmp_path / "gone").mkdir()
    # Without -P, import numpy raises SystemError there in Python 3.13.0.
    assert printed(python("-P", "-c", text, folder=tmp_path / "gone")) == ["['command']"]


def test_the_command_runs_through_the_name_mpi4py(tmp_path):
    path = with_stand_in(str(HOME))
    for module in ("mpi4py", "mpi4py.run"):
        assert printed(python("-m", module, "-c", WHICH, PYTHONPATH=path)) == [OURS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no program to run"),
        (("-m",), "-m needs an argument"),
        (("--nothing",), "there is no option --nothing"),
        (("-rc", "x", "script"), "-rc takes KEY=VALUE, not 'x'"),
        (("-rc", "threading=0", "script"), "mpi4py.rc has no setting 'threading'"),
    ],
)
def test_the_command_names_what_is_wrong(arguments, message):
    done = python("-m", "shmring.mpi4py", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert "usage: python -m shmring.mpi4py [options] FILE" in done.stderr


def test_the_command_shows_help_and_version():
    assert "usage: python -m shmring.mpi4py" in python("-m", "shmring.mpi4py", "--help").stdout
    assert printed(python("-m", "shmring.mpi4py", "--version")) == ["mpi4py 4.1.2"]


def test_settings_come_from_the_command_and_the_environment():
    # The variables are read when MPI is imported, and override what the program has set before.
    text = """
import mpi4py, os
rc = mpi4py.rc
os.environ["MPI4PY_RC_INITIALIZE"] = "no"
print(rc.threads, rc.irecv_bufsz, rc.errors, rc.initialize)
from mpi4py import MPI
print(rc.threads, rc.irecv_bufsz, rc.errors, rc.initialize, MPI.Is_initialized())
"""
    done = python(
        *("-m", "shmring.mpi4py", "-rc", "threads=False,irecv_bufsz=10", "-c", text),
        MPI4PY_RC_ERRORS="fatal",
        MPI4PY_RC_THREADS="1",
    )
    assert printed(done) == ["False 10 exception True", "True 10 fatal False False"]


def test_settings_have_no_other_names():
    rc = Rc(threads=False)
    rc(errors="abort", initialize=False)
    assert (rc.threads, rc.errors, rc.initialize, rc.finalize) == (False, "abort", False, None)
    assert vars(rc) == {"threads": False, "errors": "abort", "initialize": False}
    for wrong in (lambda: rc(thread=1), lambda: Rc(x=1), lambda: setattr(rc, "x", 1)):
        with pytest.raises(TypeError, match="has no setting"):
            wrong()
    with pytest.raises(AttributeError):
        _ = rc.x


def test_what_needs_a_library_of_mpi_is_refused():
    assert mpi4py.get_config() == {}
    for call in (mpi4py.get_include, lambda: mpi4py.profile("mpe")):
        with pytest.raises(NotImplementedError, match="shmring's MPI has no"):
            call()


def test_a_process_that_a_rank_starts_is_a_world_of_one(tmp_path):
    """It inherits the rank's environment, and would otherwise wait for the others as the same rank."""
    code = f"""
        import subprocess
        sys.path.insert(0, {str(HOME)!r})
        program = "from shmring.mpi4py import process; print('child', process.join().size)"
        from shmring.mpi4py import process
        world = process.join()
        subprocess.run([sys.executable, "-c", program], check=True)
        world.barrier()
        print("rank", world.size)
        nested = os.path.join({str(tmp_path)!r}, f"nested{{rank}}.py")
        open(nested, "w").write(program)
        subprocess.run([sys.executable, "-m", "shmring.run", "-n", "3", "--no-prefix", nested], check=True)
    """
    lines = printed(run_code(tmp_path, code, "--no-prefix"))
    assert sorted(lines) == ["child 1"] * 2 + ["child 3"] * 6 + ["rank 2"] * 2


@pytest.mark.parametrize(("given", "timeout_s"), [("", 1e9), ("7", 7.0)])
def test_calls_wait_for_years_unless_the_user_says_otherwise(monkeypatch, given, timeout_s):
    class Joined(Exception):
        pass

    def init(*arguments, timeout):
        raise Joined(timeout)

    monkeypatch.setenv("SHMRING_TIMEOUT", given)
    monkeypatch.setattr(shmring, "init", init)
    monkeypatch.setattr(process, "check_alone", lambda: None)
    with pytest.raises(Joined, match=str(timeout_s)):
        process.join()


def test_an_uncaught_exception_ends_the_others(tmp_path):
    """The other rank waits in a call that needs nothing of the rank that fails."""
    code = """
        from shmring import MPI
        world = MPI.COMM_WORLD
        if rank == 1:
            raise ValueError("the cause")
        try:
            world.recv(source=rank)
        except Exception as error:
            print(error)
            raise
    """
    done = run_code(tmp_path, code, "--no-prefix", "--keep-going")
    assert "rank 1 has ended: uncaught ValueError" in done.stdout
    assert done.returncode == 1
    # Both ranks end within milliseconds, so either may be the first in shmrun's last line.
    assert done.stderr.splitlines().count("ValueError: the cause") == 1
    assert "failed first: exit status 1: " in done.stderr.splitlines()[-1]


def test_a_hook_of_the_program_does_not_hide_which_rank_failed_first(tmp_path):
    code = """
        import atexit
        atexit.register(time.sleep, 0.2 * (rank == 1))  # after the world is left: the others are faster
        from shmring import MPI
        sys.excepthook = lambda kind, value, traceback: print("failed:", value, file=sys.stderr)
        if rank == 1:
            raise ValueError("the cause")
        MPI.COMM_WORLD.Barrier()
    """
    done = run_code(tmp_path, code, nprocs=3)
    last = done.stderr.splitlines()[-1]
    assert last == "shmrun: rank 1 of 3 failed first: exit status 1: failed: the cause"


def test_a_status_to_abort_with_takes_effect_at_the_end(tmp_path):
    code = """
        from shmring import MPI
        from shmring.mpi4py import run
        world = MPI.COMM_WORLD
        if rank == 1:
            run.set_abort_status(SystemExit(3))
            sys.exit(3)
        world.recv(source=0)
    """
    done = run_code(tmp_path, code, "--no-prefix")
    assert done.returncode == 3
