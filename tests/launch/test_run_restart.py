"""shmrun: a failed world is started again, and ranks are bound to CPUs."""

import functools
import json
import os
import signal
import subprocess
import sys

import pytest
from running import LIMIT_S, QUIET, run_code, started

from shmring._launch import cpu_binding
from shmring._system import cpu_topology, cpulist
from shmring._system.limits import usable_cpus


@pytest.fixture
def shmrun(tmp_path):
    return functools.partial(run_code, tmp_path)


# --- restart ---

TWICE_WRONG = """
    import numpy, shmring
    attempt = int(os.environ["SHMRING_RESTART"])
    with shmring.init() as comm:
        x = numpy.ones(10)
        comm.all_reduce(x)
        print(attempt, x[0], os.environ["SHMRING_ADDR"], os.environ["SHMRING_KEY"])
        if rank == 1 and attempt < 2:
            raise ValueError(f"wrong for the {attempt}th time")
        comm.barrier()
    """


def test_a_world_that_fails_is_started_again_as_a_new_one(shmrun, tmp_path):
    report = tmp_path / "report.json"
    done = shmrun(TWICE_WRONG, "--restart", "3", "--no-prefix", "--report", str(report))
    assert done.returncode == 0, done.stderr
    messages = [line for line in done.stderr.splitlines() if line.startswith("shmrun: ")]
    assert messages == [
        "shmrun: rank 1 of 2 failed first: exit status 1: ValueError: wrong for the 0th time",
        "shmrun: restart 1 of 3: all 2 ranks start again",
        "shmrun: rank 1 of 2 failed first: exit status 1: ValueError: wrong for the 1th time",
        "shmrun: restart 2 of 3: all 2 ranks start again",
    ]
    worlds = sorted(set(done.stdout.splitlines()))
    assert [world.split()[:2] for world in worlds] == [["0", "2.0"], ["1", "2.0"], ["2", "2.0"]]
    assert len({world.split()[2] for world in worlds}) == len({world.split()[3] for world in worlds}) == 3
    outcome = json.loads(report.read_text())
    assert (outcome["restarts"], outcome["exit_code"], outcome["failed_first"]) == (2, 0, None)


def test_after_the_last_restart_the_failure_counts(shmrun):
    done = shmrun("sys.exit(4 + int(os.environ['SHMRING_RESTART']))", "--restart", "2", nprocs=1)
    assert done.returncode == 6
    assert done.stderr.count("restart") == 2
    assert done.stderr.endswith("failed first: exit status 6, with nothing on stderr\n")


def test_without_restarts_there_are_none(shmrun):
    done = shmrun("print(os.environ['SHMRING_RESTART']); sys.exit(1)", nprocs=1, SHMRING_RESTART="7")
    assert (done.returncode, done.stdout) == (1, "0| 0\n")
    assert "restart" not in done.stderr
    assert shmrun("pass", "--restart", "5").stderr == ""


def test_each_attempt_has_logs_of_its_own(shmrun, tmp_path):
    code = "print(os.environ['SHMRING_RESTART']); sys.exit(os.environ['SHMRING_RESTART'] == '0')"
    assert shmrun(code, "--restart", "2", "--log-dir", str(tmp_path / "logs"), nprocs=1).returncode == 0
    assert (tmp_path / "logs" / "rank-0.out").read_text() == "0\n"
    assert (tmp_path / "logs" / "restart-1" / "rank-0.out").read_text() == "1\n"
    assert not (tmp_path / "logs" / "restart-2").exists()


def test_a_user_signal_for_ranks_that_have_ended_does_not_reach_the_next(shmrun):
    # A child that rank 0 leaves sends it when it is swept: between the attempts.
    code = """
        if os.environ["SHMRING_RESTART"] == "1":
            time.sleep(0.3)
            sys.exit(0)
        shmrun = os.getppid()
        read, write = os.pipe()
        if os.fork() == 0:
            def swept(*_):
                os.kill(shmrun, signal.SIGUSR1)
                os._exit(0)
            signal.signal(signal.SIGTERM, swept)
            os.write(write, b"x")
            time.sleep(100)
        os.read(read, 1)
        sys.exit(1)
        """
    done = shmrun(code, "--restart", "1", nprocs=1)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_restart_after_a_signal_to_end(tmp_path, number):
    # Rank 1 has already failed by itself when the signal comes, and rank 0 is slow.
    code = f"""
        if rank == 1:
            while not os.path.exists("{tmp_path}/caught"):
                time.sleep(0.01)
            sys.exit(1)
        def end(*_):
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
            signal.signal(signal.SIGINT, lambda *_: sys.exit(3))
            print("asked to end")
        signal.signal(signal.SIGTERM, end)
        open("{tmp_path}/caught", "w").close()
        time.sleep(100)
        """
    with started(tmp_path, code, "--restart", "5", "--no-prefix", "--grace", "40") as process:
        assert process.stdout.readline() == "asked to end\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
        assert "rank 1 of 2 failed first: exit status 1" in err
        assert "start again" not in err


# --- bind ---

CPUS = "print(os.environ['OMP_NUM_THREADS'], *sorted(os.sched_getaffinity(0)))"
CORES = len(cpu_topology.cores_of(cpu_topology.read(os.sched_getaffinity(0))))
needs_cores = pytest.mark.skipif(CORES < 2, reason="needs two cores")


def cpus_by_rank(done):
    """{rank: (OMP_NUM_THREADS, CPUs)}"""
    lines = [line.split("| ") for line in done.stdout.splitlines()]
    return {int(rank): [int(word) for word in text.split()] for rank, text in lines}


@needs_cores
def test_ranks_are_bound_to_cores_of_their_own(shmrun, tmp_path):
    report = tmp_path / "report.json"
    done = shmrun(CPUS, "--bind", "core", "--report", str(report), OMP_NUM_THREADS="")
    (threads_0, *first), (threads_1, *second) = (cpus for _, cpus in sorted(cpus_by_rank(done).items()))
    assert sorted(first + second) == sorted(os.sched_getaffinity(0))
    shares = cpu_topology.by_core(cpu_topology.read(os.sched_getaffinity(0)), 2)
    assert [first, second] == shares
    assert done.stderr.startswith(
        f"shmrun: 2 ranks on {usable_cpus()} usable CPU(s), bound by core: OMP_NUM_"
    )
    assert done.stderr.count("\n") == 1
    if usable_cpus() == len(os.sched_getaffinity(0)):
        assert [threads_0, threads_1] == [len(first), len(second)]
    assert [one["cpus"] for one in json.loads(report.read_text())["ranks"]] == shares


def test_by_node_ranks_have_all_cpus_of_one(shmrun):
    done = shmrun(CPUS, "--bind", "numa", nprocs=3)
    shares = cpu_topology.by_node(cpu_topology.read(os.sched_getaffinity(0)), 3)
    assert {rank: cpus[1:] for rank, cpus in cpus_by_rank(done).items()} == dict(enumerate(shares))


@pytest.mark.parametrize("options", [[], ["--bind", "none"]])
def test_by_default_no_rank_is_bound(shmrun, options):
    assert all(
        set(cpus[1:]) == os.sched_getaffinity(0) for cpus in cpus_by_rank(shmrun(CPUS, *options)).values()
    )


def test_with_more_ranks_than_cores_a_line_says_that_no_rank_is_bound(shmrun):
    done = shmrun(CPUS, "--bind", "core", nprocs=CORES + 1)
    assert all(set(cpus[1:]) == os.sched_getaffinity(0) for cpus in cpus_by_rank(done).values())
    assert done.stderr == (
        f"shmrun: --bind core: {CORES + 1} ranks are more than the {CORES} usable core(s), so none is bound\n"
    )


def test_the_callers_affinity_is_respected(tmp_path):
    only = min(os.sched_getaffinity(0))
    script = tmp_path / "script.py"
    script.write_text("import os; print(*os.sched_getaffinity(0))")
    command = [sys.executable, "-m", "shmring.run", "-n", "auto", "--bind", "core", str(script)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **QUIET},
        preexec_fn=lambda: os.sched_setaffinity(0, [only]),
    )
    assert (done.stdout, done.stderr) == (f"0| {only}\n", "")


@needs_cores
def test_bound_ranks_do_not_count_as_too_many_for_the_machine(shmrun):
    code = """
        from shmring._lifecycle import startup
        from shmring import init
        is_crowded = startup._is_oversubscribed
        def told(engine):
            print(found := is_crowded(engine))
            return found
        startup._is_oversubscribed = told
        init().close()
        """
    done = shmrun(code, "--bind", "core")  # each of them sees one CPU only
    assert sorted(done.stdout.splitlines()) == [f"{rank}| {usable_cpus() < 2}" for rank in range(2)]


def test_threads_are_given_as_ranges_where_they_differ(monkeypatch, capfd):
    topology = [cpu_topology.Cpu(0, 0, number, number) for number in range(5)]
    monkeypatch.setattr(cpu_binding.cpu_topology, "read", lambda usable: topology)
    monkeypatch.setattr(cpu_binding.os, "sched_getaffinity", lambda pid: set(range(5)))
    monkeypatch.setattr(cpu_binding, "usable_cpus", lambda: 5)
    shares = cpu_binding.share_cpus({}, "core", range(4, 6))
    assert {rank: (cpulist.spell(cpus.numbers), cpus.threads) for rank, cpus in shares.items()} == {
        4: ("0-1", 2),
        5: ("2-4", 3),
    }
    assert "bound by core: OMP_NUM_THREADS=2-3 in each rank; set it" in capfd.readouterr().err
    monkeypatch.setattr(cpu_binding, "usable_cpus", lambda: 2)  # a cgroup's quota
    assert [cpus.threads for cpus in cpu_binding.share_cpus({}, "core", range(2)).values()] == [1, 1]
