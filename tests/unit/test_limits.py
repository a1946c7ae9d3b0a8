"""CPUs and memory as limited by cgroups of both versions, containers and the host."""

import errno
import os
import threading

import pytest

from shmring._system import limits
from shmring.errors import Error, OutOfMemory

MIB = 1 << 20
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\nSwapFree: 0 kB\n"
V2_MOUNT = "30 23 0:26 {root} /cg rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "31 23 0:27 {root} /cg/{name} rw - cgroup cgroup rw,{name}\n"
UNLIMITED_V1 = "9223372036854771712\n"


@pytest.fixture
def machine(monkeypatch):
    """Puts the given files in the place of /proc and the cgroup file systems; directories are those named."""

    def put(files, cpus=8):
        files = {"/proc/meminfo": MEMINFO, **files}
        directories = {os.path.dirname(path) for path in files}
        read = lambda directory, name: files.get(os.path.join(directory, name), "")  # noqa: E731
        monkeypatch.setattr(limits, "_read", read)
        monkeypatch.setattr(limits.os.path, "isdir", lambda path: path in directories)
        monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: set(range(cpus)))

    return put


def v2(path, files, root="/"):
    return {
        "/proc/self/cgroup": f"0::{path}\n",
        "/proc/self/mountinfo": V2_MOUNT.format(root=root),
        "/cg/cgroup.procs": "",
        **files,
    }


def v1(name, path, files, root="/"):
    return {
        "/proc/self/cgroup": f"5:{name}:{path}\n0::/\n",
        "/proc/self/mountinfo": V1_MOUNT.format(root=root, name=name) + V2_MOUNT.format(root="/"),
        f"/cg/{name}/cgroup.procs": "",
        **files,
    }


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        (v2("/a/b", {"/cg/a/b/cpu.max": "max 100000\n"}), 8),
        (v2("/a/b", {"/cg/a/b/cpu.max": "250000 100000\n"}), 2),
        (v2("/a/b", {"/cg/a/b/cpu.max": "max 100000\n", "/cg/a/cpu.max": "300000 100000\n"}), 3),
        (v2("/a", {"/cg/a/cpu.max": "50000 100000\n"}), 1),  # half a CPU is still one to run on
        (v2("/a", {"/cg/a/cpu.max": "1600000 100000\n"}), 8),
        (
            v1(
                "cpu", "/a", {"/cg/cpu/a/cpu.cfs_quota_us": "-1\n", "/cg/cpu/a/cpu.cfs_period_us": "100000\n"}
            ),
            8,
        ),
        (
            v1(
                "cpu",
                "/a",
                {"/cg/cpu/a/cpu.cfs_quota_us": "400000\n", "/cg/cpu/a/cpu.cfs_period_us": "100000\n"},
            ),
            4,
        ),
    ],
)
def test_usable_cpus_are_the_affinity_cut_by_quotas(machine, files, cpus):
    machine(files)
    assert limits.usable_cpus() == cpus


@pytest.mark.parametrize("source", ["", "a\\040name"])
def test_a_mount_may_be_of_anything(machine, source):
    files = v2("/a", {"/cg/a/cpu.max": "250000 100000\n"})
    odd = f"29 23 0:25 / /odd rw - tmpfs {source} rw\n"
    mount = V2_MOUNT.format(root="/").replace("cgroup2 cgroup2", f"cgroup2 {source}")
    machine({**files, "/proc/self/mountinfo": "\n" + odd + mount})
    assert limits.usable_cpus() == 2


def test_names_that_are_no_text_can_be_read(tmp_path):
    (tmp_path / "mountinfo").write_bytes(b"/mnt/\xff rw\n")
    assert limits._read(str(tmp_path), "mountinfo") == "/mnt/\udcff rw\n"


def test_usable_cpus_follow_the_affinity(machine):
    machine({}, cpus=3)
    assert limits.usable_cpus() == 3


def test_without_cgroup_limits_the_host_is_the_limit(machine):
    machine(v2("/a", {"/cg/a/memory.max": "max\n", "/cg/a/memory.current": "5\n"}))
    room = limits.MemoryLimits().headroom()
    assert room.nbytes == 8192 * MIB - 128 * MIB
    assert "host" in room.limit


def test_swap_counts_for_the_host(machine):
    machine({"/proc/meminfo": MEMINFO.replace("SwapFree: 0", "SwapFree: 1048576")})
    assert limits.MemoryLimits().headroom().nbytes == (8192 + 1024 - 128) * MIB


def test_a_limit_of_a_parent_binds(machine):
    files = {
        "/cg/a/b/memory.max": "max\n",
        "/cg/a/memory.max": f"{512 * MIB}\n",
        "/cg/a/memory.current": f"{300 * MIB}\n",
    }
    machine(v2("/a/b", files))
    room = limits.MemoryLimits().headroom()
    assert room.nbytes == (512 - 300 - 32) * MIB
    assert "/cg/a (limit 512 MiB)" in room.limit


@pytest.mark.parametrize("version", [1, 2])
def test_file_pages_count_as_free_for_the_most_part(machine, version):
    prefix = "total_" if version == 1 else ""
    statistics = f"{prefix}inactive_file {100 * MIB}\n{prefix}active_file {40 * MIB}\nshmem 7\n"
    if version == 1:
        files = {"limit_in_bytes": 512 * MIB, "usage_in_bytes": 400 * MIB, "stat": statistics}
        machine(
            v1("memory", "/a", {f"/cg/memory/a/memory.{name}": str(text) for name, text in files.items()})
        )
    else:
        files = {"max": 512 * MIB, "current": 400 * MIB, "stat": statistics}
        machine(v2("/a", {f"/cg/a/memory.{name}": str(text) for name, text in files.items()}))
    assert limits.MemoryLimits().headroom().nbytes == (512 - 400 + 100 + 20 - 32) * MIB


def test_version_1_says_unlimited_with_a_number(machine):
    machine(v1("memory", "/a", {"/cg/memory/a/memory.limit_in_bytes": UNLIMITED_V1}))
    assert "host" in limits.MemoryLimits().headroom().limit


def test_a_full_cgroup_leaves_nothing_not_less(machine):
    machine(v2("/a", {"/cg/a/memory.max": f"{64 * MIB}", "/cg/a/memory.current": f"{64 * MIB}"}))
    assert limits.MemoryLimits().headroom().nbytes == 0


@pytest.mark.parametrize(
    ("path", "root"),
    [
        (
            "/docker/abc",
            "/docker/abc",
        ),  # a container without a cgroup namespace: its cgroup is mounted as root
        ("/", "/"),  # with one
        ("/../../elsewhere", "/"),  # a process outside of the namespace's root
        ("/../cgroups", "/"),  # ... in a directory whose name begins like the mount point
        ("/not/mounted", "/docker/abc"),
    ],
)
def test_in_a_container_the_mount_point_is_its_own_cgroup(machine, path, root):
    files = {"/cg/memory.max": f"{256 * MIB}", "/cg/memory.current": "0", "/cgroups/memory.max": "max"}
    machine(v2(path, files, root=root))
    assert limits.MemoryLimits().headroom().nbytes == (256 - 16) * MIB


def test_kills_for_want_of_memory_are_counted(machine):
    machine({"/proc/vmstat": "pgfault 7\noom_kill 3\n"})
    assert limits.oom_kills() == 3
    machine({})
    assert limits.oom_kills() is None


def test_a_session_counts_as_a_group_where_the_scheduler_makes_it_one(machine):
    session = {"/proc/self/autogroup": "/autogroup-7 nice 0\n", "/proc/self/cgroup": "0::/job\n"}
    machine({**session, "/proc/sys/kernel/sched_autogroup_enabled": "1\n"})
    assert limits.scheduling_group() == "0::/job\n/autogroup-7 nice 0\n"
    machine({**session, "/proc/sys/kernel/sched_autogroup_enabled": "0\n"})
    assert limits.scheduling_group() == "0::/job\n"
    machine({})
    assert limits.scheduling_group() == ""


def test_this_machine_can_be_read():
    assert 1 <= limits.usable_cpus() <= len(os.sched_getaffinity(0))
    assert limits.MemoryLimits().headroom().nbytes > 0


@pytest.mark.parametrize(
    ("code", "kind", "expected"),
    [
        (errno.EMFILE, Error, "ulimit -n"),
        (errno.ENFILE, Error, "fs.file-max"),
        (errno.EFBIG, Error, "ulimit -f"),
        (errno.ENOMEM, OutOfMemory, "max_map_count"),
        (errno.EACCES, Error, "EACCES"),
    ],
)
def test_a_limit_that_was_met_is_explained(code, kind, expected):
    error = limits.explain(OSError(code, os.strerror(code)), "making a segment")
    assert type(error) is kind
    assert str(error).startswith("making a segment failed")
    assert expected in str(error)


def test_errors_of_python_itself_keep_their_text():
    """An OSError without a number, and the refusal of threads in exit handlers, which is no limit."""
    path = limits.explain(OSError("AF_UNIX path too long"), "starting rank 0")
    assert str(path) == "starting rank 0 failed: AF_UNIX path too long"
    thread = limits.explain_thread(RuntimeError("can't create new thread at interpreter shutdown"), "worker")
    assert str(thread).endswith("worker failed: can't create new thread at interpreter shutdown")


START = """
def start(self):
    try:
        raise ValueError("of a signal handler")
    except ValueError:
        raise second
"""


def thread_whose_start_raises(second, module):
    """Return a thread that raises as Thread.start() does if the new thread has already begun."""
    names = {"__name__": module, "second": second}
    exec(START, names)
    return type("Interrupted", (threading.Thread,), {"start": names["start"]})()


SECOND = [KeyError, RuntimeError]


@pytest.mark.parametrize("second", SECOND)
def test_an_exception_of_a_signal_handler_while_a_thread_starts_stays_what_it_is(second):
    with pytest.raises(ValueError, match="of a signal handler") as caught:
        limits.start_thread(thread_whose_start_raises(second(), "threading"))
    assert caught.value.__context__ is None


@pytest.mark.parametrize("second", SECOND)
def test_an_exception_that_a_signal_handler_raises_for_another_is_raised(second):
    with pytest.raises(second):
        limits.start_thread(thread_whose_start_raises(second(), "program"))
