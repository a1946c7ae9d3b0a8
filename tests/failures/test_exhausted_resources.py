"""Descriptors, threads, processes, file sizes and memory that run out, at each step of making a communicator
and its parts: the rank concerned names the limit and the remedy, the others get an error as well."""

import dataclasses
import errno
import os
import resource
import selectors
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from combinations import each_value
from ranks import Died, Ranks, free_port
from waiting import counted_s

import shmring
from shmring._lifecycle import internode

SOON_S = 20
STEPS = {
    "empty": lambda c: c.empty(5),
    "shared": lambda c: c.shared(5, locks=1),
    "split": lambda c: c.split(0),
    "fileno": lambda c: c.all_reduce(np.ones(60_000), async_op=True).fileno(),
    "nothing": lambda c: c.all_reduce(np.ones(60_000)),
}


class Few:
    """Only so many descriptors more for this process."""

    def __init__(self, more):
        self._more = more

    def __enter__(self):
        self._old = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The limit is on numbers, and some below the greatest are free: ask for those that are assigned next.
        numbers = [os.dup(0) for _ in range(self._more + 1)]
        for number in numbers:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (numbers[-1], self._old[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_NOFILE, self._old)


def outcome_of(comm, concerned, more, call):
    """Return the outcome of a call where one rank has few descriptors: None, or the error."""
    begin = counted_s()
    try:
        if comm.rank == concerned:
            with Few(more):
                call()
        else:
            call()
    except shmring.Error as error:
        assert counted_s() - begin < SOON_S
        return error
    return None


def take_step(comm, step, concerned, more):
    outcome = outcome_of(comm, concerned, more, lambda: STEPS[step](comm))
    still_here = np.array(1)
    comm.all_reduce(still_here)
    assert still_here == comm.size, "the communicator did not go on"
    return outcome


def join_another(comm, world, places, concerned, more):
    os.environ.update(places[comm.rank])
    try:
        return outcome_of(
            comm, concerned, more, lambda: shmring.init(world, rank=comm.rank, timeout=1.5).close()
        )
    finally:
        for name in places[comm.rank]:
            del os.environ[name]


def assert_limit_named(outcomes, concerned):
    """Check the outcomes, and return whether the resource sufficed. If not, the rank concerned names the
    limit, and no rank goes on."""
    assert not any(isinstance(outcome, Died) for outcome in outcomes), outcomes
    assert all(outcome is None or isinstance(outcome, shmring.Error) for outcome in outcomes), outcomes
    own = outcomes[concerned]
    if own is not None:
        assert "ulimit -n" in str(own), outcomes
    return own is None


@pytest.mark.parametrize("concerned", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_descriptors_that_run_out_at_each_step(step, concerned):
    for more in range(12):
        with Ranks(2) as ranks:
            outcomes = ranks.meet().outcomes(take_step, step, concerned, more)
        if assert_limit_named(outcomes, concerned):
            return
    raise AssertionError("still not enough")


@pytest.mark.parametrize("concerned", [0, 1])
def test_descriptors_that_run_out_while_a_group_over_hosts_begins(concerned):
    for more in range(0, 15, 2):
        with Ranks(2, nodes=[0, 1]) as ranks:
            outcomes = ranks.meet().outcomes(take_step, "split", concerned, more)
        if assert_limit_named(outcomes, concerned):
            return
    raise AssertionError("still not enough")


@each_value({"across": [False, True], "concerned": [0, 1]})
def test_descriptors_that_run_out_while_ranks_meet(concerned, across):
    with Ranks(2) as ranks:
        ranks.meet()
        for more in range(0, 24, 3 if across else 1):
            world, places = shmring.world(2), ({}, {})
            if across:
                world = dataclasses.replace(world, address=f"127.0.0.1:{free_port()}")
                places = {"SHMRING_NODE": "a"}, {"SHMRING_NODE": "b"}
            if assert_limit_named(ranks.outcomes(join_another, world, places, concerned, more), concerned):
                return
    raise AssertionError("still not enough")


class NoWatches(selectors.DefaultSelector):
    """As when the user has reached the limit of the kernel, fs.epoll.max_user_watches."""

    def register(self, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def grow_in_vain(comm):
    if comm.rank == 0:
        selectors.DefaultSelector = NoWatches
    try:
        with pytest.raises(shmring.Error) as caught:
            comm.grow(1, lambda world, rank: None, timeout=1.5)
    finally:
        selectors.DefaultSelector = NoWatches.__base__
    comm.barrier()
    return str(caught.value)


def test_an_error_of_the_kernel_is_an_error_of_grow():
    with Ranks(2) as ranks:
        assert "ENOSPC" in ranks.meet()(grow_in_vain)[0]


def no_room(*_):
    raise MemoryError


def split_without_room(comm):
    channels = internode.Channels
    if comm.rank == 1:
        internode.Channels = no_room
    try:
        with pytest.raises(shmring.OutOfMemory, match="ulimit -v"):
            comm.split(0)
    finally:
        internode.Channels = channels
    comm.barrier()


def test_no_memory_for_the_messages_of_a_group_is_an_error_of_all_its_ranks():
    with Ranks(2, nodes=[0, 1]) as ranks:
        ranks.meet()(split_without_room)


# ---- limits of whole programs ------------------------------------------------------------------------------

PROGRAM = """
import multiprocessing.popen_fork, os, resource, sys
import numpy as np, shmring, shmring._launch.spawn, shmring._comm.init

def work(comm):
    array = comm.full(1000, 1.0)
    comm.all_reduce(np.ones(60_000))
    comm.all_reduce(array, async_op=True).wait()
    return float(array[0])

def limit(name, value):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))

name, value = sys.argv[1], int(sys.argv[2])
if name == "NPROC":  # which binds no superuser
    os.setgid(54321)
    os.setuid(54321)
limit(name, value)
try:
    print(shmring.spawn(work, 2, method="fork", timeout=30))
except (shmring.Error, MemoryError) as error:
    print(type(error).__name__, error)
"""


def under(name, value, *around, **environ):
    command = [*around, sys.executable, "-c", PROGRAM, name, str(value)]
    environ = {**os.environ, **{key: str(text) for key, text in environ.items()}}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FSIZE", 0, "ulimit -f"),
        ("FSIZE", 1 << 20, "ulimit -f"),
        ("NOFILE", 6, "ulimit -n"),
        ("MEMLOCK", 0, "[2.0, 2.0]"),  # nothing of it is locked
        ("STACK", 1 << 20, "[2.0, 2.0]"),
    ],
)
def test_limits_of_a_process(name, value, expected):
    assert expected in under(name, value)


def shmrun_under(tmp_path, nprocs, program, limit, value):
    """Return what shmrun writes to stderr under a limit of the process."""
    script = tmp_path / "script.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, "-m", "shmring.run", "-n", str(nprocs), str(script)],
        capture_output=True,
        text=True,
        timeout=50,
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    ).stderr


def test_shmrun_says_which_limit_keeps_ranks_from_starting(tmp_path):
    text = shmrun_under(tmp_path, 4, "", resource.RLIMIT_NOFILE, 10)
    assert "of 4 could not be started: " in text
    assert "ulimit -n" in text
    assert "Traceback" not in text


def test_no_file_at_all_is_the_ranks_error_under_shmrun(tmp_path):
    text = shmrun_under(tmp_path, 1, "import shmring; shmring.init()", resource.RLIMIT_FSIZE, 0)
    assert "rank 0 of 1 failed first: exit status 1: " in text.splitlines()[-1]
    assert "ulimit -f" in text.splitlines()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
def test_no_process_more_says_so():
    text = under("NPROC", 0)
    assert "ulimit -u" in text
    assert "rank 0 of 2" in text


def no_thread_more(comm):
    """As another user, in a process that may have none more."""
    os.setgid(54321)
    os.setuid(54321)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    messages = []
    for call in (shmring.init, lambda: comm.all_reduce(np.ones(60_000), async_op=True)):
        with pytest.raises(shmring.Error) as caught:
            call()
        messages.append(str(caught.value))
    return messages


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
def test_no_thread_more_says_so():
    with Ranks(2) as ranks:
        for messages in ranks.meet()(no_thread_more):
            assert all("ulimit -u" in text for text in messages), messages


def test_a_small_dev_shm_is_an_error_of_all_ranks():
    mount = textwrap.dedent('mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$0" "$@"')
    around = ["unshare", "--mount", "sh", "-c", mount]
    if os.geteuid() != 0 or subprocess.run([*around, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small /dev/shm")
    text = under("CORE", 0, *around, SHMRING_SEGMENT="posix")
    for words in ("OutOfMemory", "MiB", "has only", "--shm-size", "SHMRING_SEGMENT=memfd"):
        assert words in text
    assert "[2.0, 2.0]" in under("CORE", 0, *around, SHMRING_SEGMENT="memfd")


def test_channels_that_cannot_be_made_close_no_descriptor_of_others():
    """A descriptor that is not set yet must not be 0, which is standard input or anything else."""
    code = """
        import os
        from shmring._transport.channels import Channels
        try:
            Channels(None, 1, 1)
        except AttributeError:
            print(os.fstat(0) is not None)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "True\n", done.stderr
