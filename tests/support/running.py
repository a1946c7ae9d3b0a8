"""Run the code of a test as a script under shmrun."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap

LIMIT_S = 50
QUIET = {"OMP_NUM_THREADS": "1"}
os.environ.pop("PYTHONUNBUFFERED", None)  # a developer may have it; shmrun sets it if it is unset
# shmrun that waits long for the cause of a failure; 1 s is short for a rank on a busy machine.
PATIENT = "from shmring._launch import shmrun; shmrun._CAUSE_S = 30; raise SystemExit(shmrun.main())"
HEAD = """
import os, signal, sys, time
rank = int(os.environ["SHMRING_RANK"])

def ready():
    os.write(1, b"pid %d\\n" % os.getpid())
"""
# For tests whose calls an alarm interrupts: `interrupted` returns whether it has.
ALARM = """
def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)

def interrupted(call, *arguments):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        call(*arguments)
    except KeyboardInterrupt:
        return True
"""


def command(tmp_path, code, *options, nprocs=2, arguments=(), patient=False):
    """The command that runs it."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(code))
    program = ["-c", PATIENT] if patient else ["-m", "shmring.run"]
    return [sys.executable, *program, "-n", str(nprocs), *options, str(script), *arguments]


def run_code(tmp_path, code, *options, nprocs=2, arguments=(), patient=False, **environment):
    """Run it to its end."""
    return subprocess.run(
        command(tmp_path, code, *options, nprocs=nprocs, arguments=arguments, patient=patient),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **QUIET, **environment},
    )


def restore_sighup():
    """Restore in a child the effect of SIGHUP, if it is ignored here (nohup)."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextlib.contextmanager
def started(tmp_path, code, *options, nprocs=2):
    """Its process, which is killed in the end."""
    process = subprocess.Popen(
        command(tmp_path, code, *options, nprocs=nprocs),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUIET},
        preexec_fn=restore_sighup,
    )
    with process:
        yield process
        process.kill()


def on_a_terminal(arguments, **environment):
    """Return the status and the output of shmrun with a terminal as stdout and stderr."""
    shown = b""
    pid, terminal = pty.fork()
    if pid == 0:
        restore_sighup()
        os.environ.update(environment)
        os.execv(arguments[0], arguments)
    with contextlib.suppress(OSError):  # EIO: its end
        while select.select([terminal], [], [], LIMIT_S)[0]:
            shown += os.read(terminal, 4096)
    os.close(terminal)  # should it run still, it is hung up
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()
