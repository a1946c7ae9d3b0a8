"""Segments: nameless, sealed, allocated before they are touched; refusals name a remedy."""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from leftovers import names_in_shm

from shmring._system import segments
from shmring._system.limits import Headroom
from shmring.errors import Error, OutOfMemory

MIB = 1 << 20
KINDS = ("memfd", "posix")
PAGE = mmap.PAGESIZE


@pytest.fixture(params=KINDS)
def segment(request):
    """A descriptor of 64 MiB, with nothing allocated."""
    before = names_in_shm()
    fd = segments.create(64 * MIB, kind=request.param)
    assert names_in_shm() == before
    yield fd
    os.close(fd)


def allocated_nbytes(fd):
    return os.fstat(fd).st_blocks * 512


def view(mapping, offset=0, nbytes=8):
    return (ctypes.c_char * nbytes).from_address(mapping.address + offset)


def in_process(code):
    """Runs code in a process of its own, for limits that cannot be taken back."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_segment_is_sized_nameless_and_empty(segment):
    assert os.fstat(segment).st_size == 64 * MIB
    assert os.fstat(segment).st_nlink == 0
    assert allocated_nbytes(segment) == 0
    assert not os.get_inheritable(segment)


def test_a_memfd_cannot_change_its_size():
    fd = segments.create(PAGE, kind="memfd")
    for nbytes in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_a_posix_segment_never_has_a_name():
    fd = segments.create(PAGE, kind="posix")
    with pytest.raises(OSError, match=r"No such file|Invalid|cross-device|not permitted"):
        os.link(f"/proc/self/fd/{fd}", f"/dev/shm/shmring-test-{os.getpid()}", follow_symlinks=True)
    os.close(fd)


def test_without_o_tmpfile_the_name_is_gone_at_once(monkeypatch):
    real_open, opened = os.open, []

    def refuse_tmpfile(path, flags, *rest):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "refused")
        opened.append(path)
        return real_open(path, flags, *rest)

    before = names_in_shm()
    monkeypatch.setattr(segments.os, "open", refuse_tmpfile)
    fd = segments.create(PAGE, kind="posix")
    assert opened[0].startswith("/dev/shm/shmring-")
    assert names_in_shm() == before
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def test_older_kernels_that_know_no_noexec_seal(monkeypatch):
    real, flags_seen = os.memfd_create, []

    def old(name, flags):
        flags_seen.append(flags)
        if flags & 0x8:
            raise OSError(errno.EINVAL, "unknown flag")
        return real(name, flags)

    monkeypatch.setattr(segments.os, "memfd_create", old)
    os.close(segments.create(PAGE, kind="memfd"))
    assert len(flags_seen) == 2


@pytest.mark.parametrize(("nbytes", "kind"), [(0, "memfd"), (-1, "posix"), (PAGE, "sysv")])
def test_nonsense_is_refused(nbytes, kind):
    with pytest.raises(ValueError, match="segment"):
        segments.create(nbytes, kind=kind)


def test_allocate_gives_pages_to_the_range_only(segment):
    segments.allocate(segment, 8 * MIB, 20 * MIB, purpose="a test")
    assert allocated_nbytes(segment) == 20 * MIB


def test_processes_share_what_they_map(segment):
    mapping = segments.Mapping(segment, 64 * MIB)
    segments.allocate(segment, 0, PAGE, purpose="a test")
    pid = os.fork()
    if pid == 0:
        other = segments.Mapping(segment, 64 * MIB)
        view(other).value = b"hello"
        os._exit(0)
    os.waitpid(pid, 0)
    assert view(mapping).value == b"hello"
    mapping.close()


def test_a_mapping_outlives_its_descriptor():
    fd = segments.create(PAGE, kind="memfd")
    mapping = segments.Mapping(fd, PAGE)
    os.close(fd)
    view(mapping).value = b"there"
    assert view(mapping).value == b"there"
    mapping.close()
    mapping.close()
    assert mapping.address == 0


def test_no_exception_keeps_a_dropped_mapping_mapped():
    """A signal handler may raise whenever Python code runs, so none may have to run."""
    fd = segments.create(PAGE, kind="memfd")
    mapping = segments.Mapping(fd, PAGE)
    line = f" {os.fstat(fd).st_ino} "
    assert line in Path("/proc/self/maps").read_text()

    def interrupt(frame, event, arg):
        raise KeyboardInterrupt

    tracer = sys.gettrace()
    sys.settrace(interrupt)
    del mapping
    sys.settrace(tracer)
    assert line not in Path("/proc/self/maps").read_text()
    os.close(fd)


def test_a_mapping_beyond_the_end_is_an_error_not_a_sigbus():
    fd = segments.create(PAGE, kind="memfd")
    with pytest.raises(Error, match=f"has {PAGE} bytes where {2 * PAGE}"):
        segments.Mapping(fd, 2 * PAGE)
    os.close(fd)


def test_discard_frees_the_whole_pages_inside(segment):
    segments.allocate(segment, 0, 4 * PAGE, purpose="a test")
    mapping = segments.Mapping(segment, 64 * MIB)
    for page in range(4):
        view(mapping, page * PAGE).value = b"full"
    mapping.discard(10, 3 * PAGE)  # of pages 0 to 3 only 1 and 2 are completely inside
    assert allocated_nbytes(segment) == 2 * PAGE
    mapping.discard(10, 20)
    assert allocated_nbytes(segment) == 2 * PAGE
    assert [view(mapping, page * PAGE).value for page in range(4)] == [b"full", b"", b"", b"full"]
    with pytest.raises(ValueError, match="not in a mapping"):
        mapping.discard(0, 65 * MIB)
    mapping.close()


def room_of(monkeypatch, *rooms):
    """Let the limits leave these numbers of bytes at successive checks, the last one for ever."""
    left = list(rooms)
    look = lambda self: Headroom(left.pop(0) if len(left) > 1 else left[0], "the test's limit")  # noqa: E731
    monkeypatch.setattr(segments.MemoryLimits, "headroom", look)


def test_too_little_room_is_refused_before_anything_is_taken(segment, monkeypatch):
    room_of(monkeypatch, 10 * MIB)
    with pytest.raises(OutOfMemory, match=r"staging needs 20 MiB .*the test's limit .*10 MiB") as caught:
        segments.allocate(segment, 0, 20 * MIB, purpose="staging")
    assert caught.value.wanted_nbytes == 20 * MIB
    assert caught.value.available_nbytes == 10 * MIB
    assert isinstance(caught.value, MemoryError)
    assert allocated_nbytes(segment) == 0


def test_room_that_others_take_meanwhile_is_noticed_and_all_is_given_back(segment, monkeypatch):
    room_of(monkeypatch, 64 * MIB, 64 * MIB, 50 * MIB, 1 * MIB)
    with pytest.raises(OutOfMemory, match="fewer ranks"):
        segments.allocate(segment, 0, 40 * MIB, purpose="staging")
    assert allocated_nbytes(segment) == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_the_kernels_refusal_is_out_of_memory_too(segment, monkeypatch, code):
    real, calls = os.posix_fallocate, []

    def fail_later(fd, offset, nbytes):
        calls.append(nbytes)
        if len(calls) == 3:
            raise OSError(code, os.strerror(code))
        real(fd, offset, nbytes)

    monkeypatch.setattr(segments.os, "posix_fallocate", fail_later)
    with pytest.raises(OutOfMemory):
        segments.allocate(segment, 0, 40 * MIB, purpose="staging")
    assert allocated_nbytes(segment) == 0


def test_ctrl_c_during_allocation_gives_all_back(segment, monkeypatch):
    def interrupted(fd, offset, nbytes):
        raise KeyboardInterrupt

    monkeypatch.setattr(segments.os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        segments.allocate(segment, 0, 40 * MIB, purpose="staging")
    assert allocated_nbytes(segment) == 0


def test_signals_do_not_keep_an_allocation_from_ending(segment):
    ticks = []
    old = signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        segments.allocate(segment, 0, 64 * MIB, purpose="a test")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert allocated_nbytes(segment) == 64 * MIB
    assert ticks


@pytest.mark.parametrize("kind", KINDS)
def test_no_descriptors_left_says_so(kind):
    out = in_process(f"""
        import os, resource
        from shmring._system import segments as memory
        from shmring.errors import Error
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        try:
            memory.create(4096, kind={kind!r})
        except Error as error:
            print(error)
        """)
    assert "ulimit -n" in out


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_size_limit_is_an_error_not_a_signal(kind):
    out = in_process(f"""
        import resource
        from shmring._system import segments as memory
        from shmring.errors import Error
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            memory.create(2 << 20, kind={kind!r})
        except Error as error:
            print(error)
        """)
    assert "ulimit -f" in out


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer itself maps terabytes"
)
def test_no_address_space_left_says_so():
    out = in_process("""
        import resource
        from shmring._system import segments as memory
        from shmring.errors import OutOfMemory
        fd = memory.create(1 << 40, kind="memfd")
        resource.setrlimit(resource.RLIMIT_AS, (1 << 32, resource.RLIM_INFINITY))
        try:
            memory.Mapping(fd, 1 << 40)
        except OutOfMemory as error:
            print(error)
        """)
    assert "ulimit -v" in out


SMALL_SHM = """
    mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$0" -c "$1"
"""


def with_small_shm(code):
    """Run code with 4 MiB of /dev/shm."""
    command = ["unshare", "--mount", "sh", "-c", SMALL_SHM, sys.executable, textwrap.dedent(code)]
    probe = subprocess.run([*command[:5], "/bin/true"], capture_output=True, timeout=30)
    if os.getuid() != 0 or b"unshare" in probe.stderr or b"mount" in probe.stderr:
        pytest.skip("needs the right to mount a small /dev/shm")
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_small_dev_shm_names_both_ways_out():
    out = with_small_shm("""
        from shmring._system import segments as memory
        from shmring.errors import OutOfMemory
        fd = memory.create(64 << 20, kind="posix")
        try:
            memory.allocate(fd, 0, 8 << 20, purpose="staging")
        except OutOfMemory as error:
            print(error)
        fd = memory.create(64 << 20, kind="memfd")
        memory.allocate(fd, 0, 8 << 20, purpose="staging")
        print("memfd is not limited by it")
        """)
    assert "/dev/shm (4 MiB)" in out
    assert "--shm-size" in out
    assert "SHMRING_SEGMENT=memfd" in out
    assert "memfd is not limited by it" in out


MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_cgroup():
    """A version 1 memory cgroup of 64 MiB, if we may make one."""
    own = MEMORY_CGROUP / f"shmring-test-{os.getpid()}"
    try:
        own.mkdir()
        (own / "memory.limit_in_bytes").write_text(str(64 * MIB))
    except OSError as error:
        pytest.skip(f"needs the right to make a memory cgroup: {error}")
    yield own
    own.rmdir()


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_memory_cgroup_is_an_error_not_the_oom_killer(small_cgroup, kind):
    out = in_process(f"""
        import os
        open("{small_cgroup}/cgroup.procs", "w").write(str(os.getpid()))
        from shmring._system import segments as memory
        from shmring.errors import OutOfMemory
        fd = memory.create(1 << 30, kind={kind!r})
        memory.allocate(fd, 0, 16 << 20, purpose="what fits")
        try:
            memory.allocate(fd, 16 << 20, 128 << 20, purpose="staging")
        except OutOfMemory as error:
            print(error)
        """)
    assert "limit 64 MiB" in out


def test_the_limit_of_this_process_is_named_in_the_advice():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    error = segments.explain(OSError(errno.EMFILE, "x"), "opening")
    assert str(soft) in str(error)
    assert str(hard) in str(error)
