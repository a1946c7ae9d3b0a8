"""shmrun on several hosts: here two of them on one, told apart by SHMRING_NODE."""

import os
import subprocess
import sys
import textwrap

import pytest
from rendezvous import free_port

KEY = "0123456789abcdef0123456789abcdef"
HEAD = """
import os, sys, time
from shmring._bootstrap import join as bootstrap
from shmring._system.deadline import Deadline

def join():
    meeting = bootstrap.join(*bootstrap.world_from_environment(), deadline=Deadline(30))
    return meeting.place
"""


@pytest.fixture
def hosts(tmp_path):
    """Runs code under a shmrun on each of several hosts, each with options of its own, to their ends."""
    script, address, running = tmp_path / "script.py", f"127.0.0.1:{free_port()}", []

    def start(code, *options, **environment):
        script.write_text(HEAD + textwrap.dedent(code))
        for index, own in enumerate(options):
            command = [sys.executable, "-m", "shmring.run", "--rdzv", address, *own, str(script)]
            here = {"SHMRING_KEY": KEY, "OMP_NUM_THREADS": "1", "SHMRING_NODE": str(index), **environment}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            running.append(subprocess.Popen(command, env={**os.environ, **here}, **pipes))
        return [(*process.communicate(timeout=50), process.returncode) for process in running]

    yield start
    for process in running:
        process.kill()
        process.wait()


def on(index, *options):
    return ["--nnodes", "2", "--node-rank", str(index), *options]


def test_ranks_follow_each_other_from_host_to_host(hosts):
    done = hosts("print(join())", on(0, "-n", "2"), on(1, "-n", "2"))
    assert [code for _, _, code in done] == [0, 0], done
    for node, (out, _, _) in enumerate(done):
        lines = sorted(out.splitlines())
        assert len(lines) == 2
        for local_rank, line in enumerate(lines):
            rank = 2 * node + local_rank
            place = f"{rank}| Place(rank={rank}, size=4, local_rank={local_rank}, local_size=2, host={node}, "
            assert line.startswith(place)


def test_hosts_may_have_different_numbers_of_ranks(hosts):
    own = (["--node-rank", str(index), "-n", "1,3,2"] for index in range(3))
    done = hosts("print(join().ranks_of_host)", *own)
    for (out, err, code), count in zip(done, (1, 3, 2), strict=True):
        assert code == 0, err
        assert [line[3:] for line in out.splitlines()] == ["((0,), (1, 2, 3), (4, 5))"] * count


def test_a_rank_of_another_host_that_ends_shows_here(hosts, tmp_path):
    code = f"""
        from pathlib import Path
        folder = Path({str(tmp_path)!r})
        rank = int(os.environ["SHMRING_RANK"])
        if rank == 3:
            time.sleep(100)  # it never comes
        if rank == 2:
            import threading
            def end():  # some time after the others have come
                while not all((folder / f"{{other}} comes").exists() for other in range(2)):
                    time.sleep(0.01)
                time.sleep(1.5)
                os._exit(9)
            threading.Thread(target=end).start()
        (folder / f"{{rank}} comes").touch()
        join()
        """
    (_, err, code), (_, other_err, other_code) = hosts(code, on(0, "-n", "2"), on(1, "-n", "2"))
    assert code == 1
    assert "RankFailed: rank 2 ended while the ranks were meeting: see its output on 127.0.0.1" in err
    assert other_code == 9
    assert "rank 2 of 4 failed first: exit status 9" in other_err


def test_hosts_may_write_to_one_directory_and_each_shows_its_first_rank(hosts, tmp_path):
    logs = ["-n", "2", "--log-dir", str(tmp_path / "logs")]
    done = hosts(
        "print(os.environ['SHMRING_RANK'], os.environ['SHMRING_RESTART'])", on(0, *logs), on(1, *logs)
    )
    assert [out for out, _, _ in done] == ["0| 0 0\n", "2| 2 0\n"], done
    written = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir() if path.stat().st_size}
    assert written == {f"rank-{rank}.out": f"{rank} 0\n" for rank in range(4)}


def test_the_key_is_in_no_command_line_and_reaches_the_ranks(hosts, tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    code = "join(); print(os.environ.get('SHMRING_KEY'), os.environ['SHMRING_KEY_FILE'])"
    where = {"SHMRING_KEY": "", "SHMRING_KEY_FILE": str(path)}
    for out, err, _ in hosts(code, on(0, "-n", "1"), on(1, "-n", "1"), **where):
        assert out.endswith(f"|  {path}\n"), err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--nnodes", "2", "-n", "2"], "several hosts need --rdzv HOST:PORT"),
        (["--nnodes", "2", "-n", "2", "--rdzv", "x:1"], "its own --node-rank"),
        (["--nnodes", "2", "-n", "2", "--rdzv", "x:1", "--node-rank", "2"], "0 to 1, as --nnodes is 2"),
        (["-n", "2", "--rdzv", "x:1", "--node-rank", "0"], "give --nnodes, the same"),
        (["--nnodes", "2", "-n", "2", "--rdzv", "x:y", "--node-rank", "1"], "the port in --rdzv is 'y'"),
        (["--nnodes", "3", "-n", "2,1", "--rdzv", "x:1", "--node-rank", "1"], "or one for each host"),
        (["--nnodes", "0", "-n", "2"], "--nnodes is 0"),
        (["--nnodes", "2", "-n", "auto", "--rdzv", "x:1", "--node-rank", "1"], "the same numbers on all"),
        (["-n", "2,x", "--rdzv", "x:1", "--node-rank", "1"], "'x'"),
        (["-n", "4000,4000", "--rdzv", "x:1", "--node-rank", "1"], "allowed: 1 to 4096"),
        (["-n", "2,2", "--rdzv", "x:1", "--node-rank", "1"], "make one with: python -c"),  # no key
    ],
)
def test_bad_usage_is_one_helpful_line_and_2(options, expected):
    command = [sys.executable, "-m", "shmring.run", *options, os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr


def test_one_host_alone_needs_no_key_and_has_no_port(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ.get('SHMRING_PORT'))")
    done = subprocess.run(
        [sys.executable, "-m", "shmring.run", "--nnodes", "1", "--node-rank", "0", "-n", "1", str(script)],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "SHMRING_PORT": "5000"},
    )
    assert done.stdout == "0| None\n", done.stderr
