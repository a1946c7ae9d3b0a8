"""The variables that launchers put into the environment, and what shmring reads from them."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shmring._bootstrap import environment, join
from shmring._bootstrap.join import world_from_environment
from shmring._config.settings import parse_address
from shmring._system import procfs
from shmring.errors import Error

KEY = "0123456789abcdef0123456789abcdef"

# Rank 1 of 2 on one host, recorded under each launcher, without irrelevant variables; Slurm's is from
# srun(1).
SHMRUN = {"SHMRING_RANK": "1", "SHMRING_SIZE": "2", "SHMRING_ADDR": "4f6c", "SHMRING_KEY": KEY}
TORCHRUN = {  # torch 2.13, torchrun --standalone --nproc-per-node 2
    "LOCAL_RANK": "1",
    "RANK": "1",
    "GROUP_RANK": "0",
    "ROLE_RANK": "1",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "40659",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "6953794f-e940-4e5d-8d4f-5ed59ed15e97",
    "OMP_NUM_THREADS": "1",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-5304@1",
    "PMIX_RANK": "1",
    "PRTE_LAUNCHED": "1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1894383617",
}
MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
INTEL_MPI = {
    "HYDRA_BSTRAP_LAUNCHER": "ssh",
    "I_MPI_HYDRA_UUID": "8e140000-8c7e-c1cd-b360-0600894e9a68",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SLURM = {  # srun -n 2, plain
    "SLURM_CLUSTER_NAME": "linux",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
}
SLURM_PMI2 = {**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "PMI_JOBID": "4711.0"}
SLURM_BATCH = {name: text for name, text in SLURM.items() if "STEP" not in name}

ALL = {
    "shmrun": SHMRUN,
    "torchrun": TORCHRUN,
    "open mpi 5": OPEN_MPI_5,
    "open mpi 4": OPEN_MPI_4,
    "mpich": MPICH,
    "intel mpi": INTEL_MPI,
    "slurm": SLURM,
    "slurm with pmi2": SLURM_PMI2,
}


@pytest.fixture(autouse=True)
def first_call(monkeypatch):
    monkeypatch.setattr(join, "_calls", type(join._calls)())


def as_rank(environ, rank):
    names = ("SHMRING_RANK", "RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return {**environ, **{name: str(rank) for name in names if name in environ}}


@pytest.mark.parametrize("environ", ALL.values(), ids=ALL)
def test_every_launcher_is_recognised(environ):
    world, rank = world_from_environment(environ)
    assert (world.nprocs, rank) == (2, 1)


@pytest.mark.parametrize("environ", ALL.values(), ids=ALL)
def test_all_ranks_of_a_job_find_the_same_world(environ, monkeypatch):
    worlds = []
    for rank in (0, 1):
        monkeypatch.setattr(join, "_calls", type(join._calls)())
        worlds.append(world_from_environment(as_rank(environ, rank)))
    assert worlds[0][0] == worlds[1][0]
    assert [rank for _, rank in worlds] == [0, 1]


@pytest.mark.parametrize("environ", ALL.values(), ids=ALL)
def test_each_call_is_one_more_world(environ):
    first, second = (world_from_environment(environ)[0] for _ in range(2))
    assert first.id != second.id


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        (TORCHRUN, "MASTER_PORT"),
        (TORCHRUN, "TORCHELASTIC_RUN_ID"),
        (TORCHRUN, "TORCHELASTIC_RESTART_COUNT"),
        (OPEN_MPI_5, "PMIX_NAMESPACE"),
        (OPEN_MPI_4, "OMPI_MCA_ess_base_jobid"),
        (SLURM, "SLURM_JOB_ID"),
        (SLURM, "SLURM_STEP_ID"),
        (SHMRUN, "SHMRING_ADDR"),
    ],
)
def test_two_jobs_do_not_meet(environ, variable):
    one, other = (world_from_environment({**environ, variable: text})[0] for text in ("1", "2"))
    assert one.id != other.id
    assert variable == "SHMRING_ADDR" or one.key != other.key


def test_no_launcher():
    assert world_from_environment({}) is None
    assert world_from_environment({"RANK": "0", "WORLD_SIZE": "2"}) is None  # names that any program may use
    assert world_from_environment(SLURM_BATCH) is None  # the batch script itself is no task


def test_shmrun_comes_first_then_torchrun_then_mpi_then_slurm():
    everything = {**SLURM, **MPICH, **OPEN_MPI_5, **TORCHRUN, **SHMRUN}
    for environ, launcher in (
        (SHMRUN, "SHMRING_RANK"),
        (TORCHRUN, "torchrun"),
        (OPEN_MPI_5, "Open MPI"),
        (MPICH, "mpiexec"),
        (SLURM, "Slurm"),
    ):
        settings = join.Settings.from_environment(everything)
        assert environment.find_job(settings, everything).launcher == launcher
        everything = {name: text for name, text in everything.items() if name not in environ}


def test_a_key_that_was_given_is_used():
    world, _ = world_from_environment({**TORCHRUN, "SHMRING_KEY": KEY})
    assert world.key == KEY.encode()


def test_by_hand_rank_and_size_are_enough():
    world, rank = world_from_environment({"SHMRING_RANK": "0", "SHMRING_SIZE": "3"})
    assert (world.nprocs, rank) == (3, 0)


SEVERAL_HOSTS = {
    "torchrun": {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"},
    "torchrun, no local size": {k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}
    | {"LOCAL_RANK": "0"},
    "open mpi": {**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    "mpich": {**MPICH, "MPI_LOCALNRANKS": "1"},
    "slurm": {**SLURM, "SLURM_STEP_NUM_NODES": "2"},
    "slurm job": {k: v for k, v in SLURM.items() if "STEP_NUM" not in k} | {"SLURM_JOB_NUM_NODES": "2"},
}


@pytest.mark.parametrize("environ", SEVERAL_HOSTS.values(), ids=SEVERAL_HOSTS)
def test_several_hosts_need_a_key(environ):
    with pytest.raises(Error, match=r"SHMRING_KEY_FILE \(a file with mode 0600\)"):
        world_from_environment({**environ, "SHMRING_ADDR": "node1"})


@pytest.mark.parametrize("environ", SEVERAL_HOSTS.values(), ids=SEVERAL_HOSTS)
def test_all_ranks_on_several_hosts_find_the_same_world(environ, monkeypatch):
    worlds = []
    for rank in (0, 1):
        monkeypatch.setattr(join, "_calls", type(join._calls)())
        # On every host other processes are the ranks' ancestors.
        monkeypatch.setattr(environment, "_hydra_proxy", lambda rank=rank: f"process {rank}")
        as_one = {**as_rank(environ, rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **KEY_AND_ADDR}
        worlds.append(world_from_environment(as_one)[0])
    assert worlds[0] == worlds[1]
    host, port = parse_address("address", worlds[0].address)
    assert host == "node1"
    assert 20000 <= port < 30000


def test_torchruns_hosts_count_restarts_differently():
    environ = {**SEVERAL_HOSTS["torchrun"], **KEY_AND_ADDR}
    counted = world_from_environment({**environ, "TORCHELASTIC_RESTART_COUNT": "1"})[0]
    join._calls.clear()
    assert world_from_environment({**environ, "TORCHELASTIC_RESTART_COUNT": "0"})[0] == counted


KEY_AND_ADDR = {"SHMRING_KEY": KEY, "SHMRING_ADDR": "node1"}


@pytest.mark.parametrize(
    ("launcher", "host"),
    [
        ("torchrun", "10.0.0.7"),
        ("slurm", "node01"),
        ("slurm job", "node01"),
        ("open mpi", None),
        ("mpich", None),
    ],
)
def test_rank_0s_host_is_known_from_some_launchers(launcher, host):
    nodes = {"SLURM_JOB_NODELIST": "node[01-03,7]", "MASTER_ADDR": "10.0.0.7"}
    environ = {**SEVERAL_HOSTS[launcher], **nodes, "SHMRING_KEY": KEY}
    if host is None:
        with pytest.raises(Error, match="set SHMRING_ADDR to the name or address of"):
            world_from_environment(environ)
    else:
        world, _ = world_from_environment(environ)
        assert parse_address("address", world.address)[0] == host


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("node[01-03,7]", "node01"),
        ("node[7,01-03],login", "node7"),
        ("login,node[1-2]", "login"),
        ("rack[3-4]n[08-09]-ib,x", "rack3n08-ib"),
        ("a.b-c[0-1].d", "a.b-c0.d"),
        ("", ""),
    ],
)
def test_slurms_lists_of_hosts_are_read(hosts, first):
    assert environment.first_of(hosts) == first


def test_each_call_has_a_port_of_its_own_unless_it_is_set():
    environ = {**SEVERAL_HOSTS["slurm"], **KEY_AND_ADDR}
    first, second = (world_from_environment(environ)[0] for _ in range(2))
    assert first.address != second.address
    fixed, again = (world_from_environment({**environ, "SHMRING_PORT": "5000"})[0] for _ in range(2))
    assert fixed.address == again.address == "node1:5000"
    assert fixed.id != again.id


def test_each_host_may_call_the_meeting_place_by_another_name():
    by_hand = {"SHMRING_RANK": "1", "SHMRING_SIZE": "2", "SHMRING_PORT": "5000", "SHMRING_KEY": KEY}
    worlds = []
    for addr in ("node1", "node1.cluster", "fe80::1%eth0", "fe80::1%eth1"):
        join._calls.clear()
        worlds.append(world_from_environment({**by_hand, "SHMRING_ADDR": addr})[0])
    assert len({world.id for world in worlds}) == 1


def test_torchruns_own_port_is_left_alone():
    environ = {**SEVERAL_HOSTS["torchrun"], "SHMRING_KEY": KEY, "MASTER_PORT": "25000"}
    assert ":25000" not in world_from_environment(environ)[0].address


def test_address_and_port_by_hand_are_for_several_hosts():
    by_hand = {"SHMRING_RANK": "1", "SHMRING_SIZE": "2", "SHMRING_ADDR": "::1", "SHMRING_PORT": "5000"}
    with pytest.raises(Error, match="hosts trust each other only by a key"):
        world_from_environment(by_hand)
    world, rank = world_from_environment({**by_hand, "SHMRING_KEY": KEY})
    assert (world.address, world.key, rank) == ("[::1]:5000", KEY.encode(), 1)


@pytest.mark.parametrize("addr", ["job 7", "node1:5000", "0.0.0.0"])
def test_an_address_for_several_hosts_has_to_be_one(addr):
    with pytest.raises(ValueError, match="SHMRING_ADDR is"):
        world_from_environment({**SEVERAL_HOSTS["slurm"], "SHMRING_KEY": KEY, "SHMRING_ADDR": addr})


def test_one_host_has_no_address():
    for environ in ALL.values():
        assert world_from_environment({**environ, "SHMRING_KEY": KEY})[0].address is None


def test_a_step_on_one_node_of_a_larger_slurm_job_is_one_host():
    world, _ = world_from_environment({**SLURM, "SLURM_JOB_NUM_NODES": "4"})
    assert world.nprocs == 2


# Composed from what srun 24.11 (one node) and 2.2 (two nodes) set, and from srun(1).
SLURM_CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "slurm.json").read_text())


@pytest.mark.parametrize("case", SLURM_CASES.values(), ids=SLURM_CASES)
def test_slurms_environments(case, monkeypatch):
    size, worlds = case["size"], []
    for rank, task in enumerate(case["tasks"]):
        monkeypatch.setattr(join, "_calls", type(join._calls)())
        environ = {**case["shared"], **task}
        job = environment.find_job(join.Settings.from_environment(environ), environ)
        if size is None:  # no launcher has started tasks: each process is alone
            assert job is None
            assert world_from_environment({**environ, "SHMRING_KEY": KEY}) is None
            continue
        assert (job.launcher, job.rank, job.size) == ("Slurm", rank, size)
        world, own = world_from_environment({**environ, "SHMRING_KEY": KEY})
        assert (own, world.nprocs) == (rank, size)
        worlds.append(world)
        if case["first_host"] is None:
            assert world.address is None
            assert job.local_size == size
        else:
            assert parse_address("address", world.address)[0] == case["first_host"]
            with pytest.raises(Error, match=f"runs this job's {size} ranks on several hosts"):
                world_from_environment(environ)
    assert len(set(worlds)) <= 1
    assert len(worlds) == (size or 0)


@pytest.mark.parametrize(
    ("environ", "variable", "text"),
    [
        (TORCHRUN, "RANK", "one"),
        (TORCHRUN, "WORLD_SIZE", "-2"),
        (TORCHRUN, "WORLD_SIZE", "9" * 5000),
        (OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE", ""),
        (MPICH, "PMI_RANK", "0x1"),
        (SLURM, "SLURM_PROCID", "1.5"),
        (SHMRUN, "SHMRING_RANK", "x"),
    ],
)
def test_a_broken_variable_is_named(environ, variable, text):
    with pytest.raises(ValueError, match=f"{variable} is" if text else variable):
        world_from_environment({**environ, variable: text})


def test_a_rank_beyond_the_size_cannot_be():
    with pytest.raises(ValueError, match="rank 2 of 2; allowed: 0 to 1"):
        world_from_environment({**TORCHRUN, "RANK": "2"})
    with pytest.raises(ValueError, match="says 5000 ranks; allowed: 1 to 4096"):
        world_from_environment({**TORCHRUN, "WORLD_SIZE": "5000"})


PROXY = """
    import os, subprocess, sys
    ancestor = "from shmring._bootstrap.environment import _hydra_proxy; print(_hydra_proxy())"
    rank = [sys.argv[1], "-c", ancestor]
    subprocess.run(rank, check=True)
    subprocess.run(["sh", "-c", '"$@"; true', "sh", *rank], check=True)
    print(os.getpid())
    """


def test_hydra_jobs_are_named_after_their_proxy(tmp_path):
    # The launcher's ranks have nothing else in common, even with a shell between.
    proxy = tmp_path / "hydra_pmi_proxy"
    proxy.symlink_to(sys.executable)
    done = subprocess.run(
        [str(proxy), "-c", textwrap.dedent(PROXY), sys.executable],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    direct, through_shell, pid = done.stdout.split("\n")[:3]
    assert direct == through_shell, done.stderr
    assert direct.split()[0] == pid


def test_no_process_is_looked_up_in_the_proc_of_another_namespace(monkeypatch):
    monkeypatch.setattr(procfs, "shows_this_process", lambda: False)
    assert environment._hydra_proxy() == f"{os.getppid()} 0"
