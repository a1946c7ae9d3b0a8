"""Comm.trace and SHMRING_TRACE: the contents of the file, its ranks, and the file after failures."""

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time

import jsonschema
import numpy as np
import pytest
from combinations import first
from ranks import Died, Ranks, until_there
from snapshots import own_flight

import shmring
from shmring._comm import trace_file
from shmring.tools import _attach

LARGE, TINY = 1 << 18, 4
EVENT = {
    "type": "object",
    "required": ["name", "ph", "pid", "tid"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "ph": {"enum": ["M", "X", "i"]},
        "pid": {"type": "integer"},
        "tid": {"type": "integer", "minimum": 0},
        "args": {"type": "object"},
    },
    "if": {"properties": {"ph": {"const": "X"}}},
    "then": {
        "required": ["ts", "dur", "cat", "args"],
        "properties": {
            "ts": {"type": "number", "minimum": 0},
            "dur": {"type": "number", "minimum": 0},
            "cat": {"enum": ["call", "wait", "stage", "reduce", "copy", "stage and copy", "wire", "message"]},
        },
    },
}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {"traceEvents": {"type": "array", "items": EVENT}},
}


def read(path):
    trace = json.loads(path.read_text())
    jsonschema.validate(trace, SCHEMA)
    return trace["traceEvents"]


def tracks(events):
    """Return what a rank did, by the name of its track."""
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = {
        (e["pid"], e["tid"]): f"{ranks[e['pid']]}: {e['args']['name']}".removesuffix(": calls")
        for e in events
        if e["name"] == "thread_name"
    }
    found = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"], event["tid"]]].append(event)
    return found


def calls(slices):
    return [one["args"]["call"] for one in sorted(slices, key=lambda one: one["ts"]) if one["cat"] == "call"]


def phases(slices, call):
    """Return the phases of one of a rank's calls."""
    (whole,) = [one for one in slices if one["cat"] == "call" and one["args"]["call"] == call]
    parts = [s for s in slices if s["cat"] != "call" and s["args"]["number"] == whole["args"]["number"]]
    for part in parts:  # as JSON has them times are no more exact
        assert whole["ts"] - 0.01 <= part["ts"]
        assert part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 0.01
    return {part["cat"] for part in parts}


def named(kind, words=""):
    return f"{kind}(float32[{LARGE}]{words})"


def let_rank_0_wait(comm, seconds):
    """Wait until rank 0 is in its barrier, if that can be seen."""
    while comm.rank != 0 and comm.num_nodes == 1 and own_flight().last_of(0)["kind"] != "barrier":
        time.sleep(0.002)
    time.sleep(seconds)


def work(comm, path):
    comm.all_reduce(np.ones(2, "f4"))  # before it: not in it
    with comm.trace(path) as trace:
        comm.all_reduce(np.ones(TINY, "f4"))
        comm.all_reduce(np.ones(LARGE, "f4"))
        comm.broadcast(np.ones(LARGE, "f4"), root=comm.size - 1)
        comm.all_gather(np.ones(LARGE, "f4"), async_op=True).wait()
        if comm.num_nodes == 1:
            comm.all_reduce(np.ones(LARGE, "f4"), algorithm="ring")
        if comm.rank == comm.size - 1:
            let_rank_0_wait(comm, 0.05)
        comm.barrier()
    comm.all_reduce(np.ones(3, "f4"))  # after it
    assert not trace.is_running
    return trace.path


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_has_a_track_of_its_calls(world_of, tmp_path, size):
    path = tmp_path / "t.json"
    assert world_of(size)(work, path) == [str(path)] * size
    found = tracks(read(path))
    assert set(found) == {f"rank {rank} of {size}" for rank in range(size)}
    for slices in found.values():
        assert calls(slices) == [
            f"all_reduce(float32[{TINY}], sum)",
            named("all_reduce", ", sum"),
            named("broadcast", f", root={size - 1}"),
            named("all_gather"),
            named("all_reduce", ", sum, algorithm=ring"),
            "barrier()",
        ]
        assert all(one["args"]["outcome"] == "complete" for one in slices if one["cat"] == "call")


@pytest.mark.parametrize("path_taken", ["near", "far"])
def test_a_call_is_made_of_phases(world_of, tmp_path, path_taken):
    path = tmp_path / "t.json"
    environ = {"SHMRING_CHUNK": 1 << 16, "SHMRING_SINGLE_COPY": "off", "SHMRING_PATH": path_taken}
    world_of(3, **environ)(work, path)
    found = tracks(read(path))
    for slices in found.values():
        large = phases(slices, named("all_reduce", ", sum"))
        assert "reduce" in large
        assert "stage and copy" in large or {"stage", "copy"} <= large
        assert phases(slices, named("all_reduce", ", sum, algorithm=ring")) >= {"stage", "reduce"}
        assert phases(slices, f"all_reduce(float32[{TINY}], sum)") >= {"reduce"}
    of_broadcast = [phases(found[f"rank {rank} of 3"], named("broadcast", ", root=2")) for rank in range(3)]
    assert "stage" in of_broadcast[2]
    assert "copy" not in of_broadcast[2]
    assert "copy" in of_broadcast[0] & of_broadcast[1]
    assert "stage" not in of_broadcast[0] | of_broadcast[1]


def test_a_wait_says_for_whom(world_of, tmp_path):
    path = tmp_path / "t.json"
    world_of(2)(work, path)
    in_barrier = [one for one in tracks(read(path))["rank 0 of 2"] if one["args"]["number"] == 7]
    longest = max((one for one in in_barrier if one["cat"] == "wait"), key=lambda one: one["dur"])
    assert longest["args"]["for"] == "rank 1"
    assert longest["dur"] > 10_000  # us, of those that rank 1 sleeps


def test_between_hosts_the_wire_shows(tmp_path):
    path = tmp_path / "t.json"
    with Ranks(4, nodes=[0, 0, 1, 1]) as ranks:
        written = ranks.meet()(work, path)
    second = tmp_path / "t.node1.json"
    assert written == [str(path)] * 2 + [str(second)] * 2
    found = tracks(read(path)) | tracks(read(second))
    assert set(found) == {f"rank {rank} of 4" for rank in range(4)}
    for slices in found.values():
        assert phases(slices, named("all_reduce", ", sum")) >= {"wire", "reduce"}
    assert any(one["args"].get("nbytes", 0) > 0 for one in found["rank 0 of 4"] if one["cat"] == "wire")


def come_last(comm, path):
    with comm.trace(path):
        for _ in range(2):
            if comm.rank == 1:
                time.sleep(0.05)
            comm.reduce_scatter(np.ones((2, 100), "f4"))


def test_the_last_rank_reduces_too(world_of, tmp_path):
    """It finds the others' pieces there as it stages its own, and may do both in one step."""
    path = tmp_path / "t.json"
    world_of(2)(come_last, path)
    for slices in tracks(read(path)).values():
        for number in (1, 2):
            assert "reduce" in {one["cat"] for one in slices if one["args"].get("number") == number}


def reduce_late(comm, path):
    with comm.trace(path):
        if comm.rank == 0:
            time.sleep(0.05)  # until the slots of rank 1 are full
        comm.reduce(np.ones(100_000, "u1"), root=0)


def test_bytes_that_a_rank_stages_are_counted_once(world_of, tmp_path):
    path = tmp_path / "t.json"
    world_of(2, SHMRING_CHUNK=4096, SHMRING_DEPTH=3)(reduce_late, path)
    staged = [one for one in tracks(read(path))["rank 1 of 2"] if one["cat"] == "stage"]
    assert sum(one["args"]["nbytes"] for one in staged) == 100_000


def pass_on(comm, path):
    with comm.trace(path):
        x = np.full(1000, comm.rank, "f8")
        if comm.rank == 0:
            comm.send(x, 1, 7)
            # So that the transfer is waited for: a message that has already come makes no slice.
            while not _attach.rank_state(own_flight(), 1)["where"].startswith("in recv, waiting"):
                time.sleep(0.005)
            comm.sendrecv(x, 1, np.empty_like(x))
        else:
            time.sleep(0.05)
            comm.probe(0)
            comm.recv(x, 0)
            comm.irecv(x, 0).wait()
            comm.send(x, 0)
        comm.barrier()


def test_messages_have_a_track_of_their_own(world_of, tmp_path):
    path = tmp_path / "t.json"
    world_of(2)(pass_on, path)
    found = tracks(read(path))
    assert calls(found["rank 0 of 2"]) == calls(found["rank 1 of 2"]) == ["barrier()"]
    reported = [
        [(one["name"], one["args"]) for one in found[f"rank {rank} of 2: calls: messages"]]
        for rank in range(2)
    ]
    ended = {"nbytes": 8000, "outcome": "complete"}
    to_1, from_1 = ended | {"to": "rank 1"}, ended | {"from": "rank 1"}
    to_0, from_0 = ended | {"to": "rank 0"}, ended | {"from": "rank 0"}
    assert reported[0] == [("send", to_1), ("send", to_1), ("recv", from_1)]
    assert reported[1] == [("probe", from_0), ("recv", from_0), ("recv", from_0), ("send", to_0)]
    assert all(one["dur"] >= 0 for rank in range(2) for one in found[f"rank {rank} of 2: calls: messages"])


# ---- from the environment, groups -------------------------------------------------------------------------


def work_in_groups(comm):
    comm.barrier()
    with comm.split(comm.rank % 2) as half:
        half.all_reduce(np.ones(TINY, "f4"))


def test_all_communicators_of_a_job_are_traced_on_request(world_of, tmp_path):
    path = tmp_path / "t.json"
    path.write_text("of an earlier run")
    with Ranks(3) as ranks:
        ranks.meet(SHMRING_TRACE=path)(work_in_groups)
    found = tracks(read(path))
    assert {"rank 0 of 3: group of ranks 0, 2", "rank 1 of 3: group of rank 1"} < set(found)
    assert calls(found["rank 2 of 3: group of ranks 0, 2"]) == [f"all_reduce(float32[{TINY}], sum)"]
    assert calls(found["rank 2 of 3"])[:2] == ["barrier()", "split()"]


def grow_and_reduce(comm, folder):
    comm.barrier()
    with comm.grow(1, lambda *to_join: _pass_on(folder, to_join)) as larger:
        larger.all_reduce(np.ones(TINY, "f4"))


def _pass_on(folder, to_join):
    (folder / "world.new").write_bytes(pickle.dumps(to_join))
    (folder / "world.new").rename(folder / "world")


def come_and_reduce(_, folder):
    os.environ["SHMRING_TRACE"] = str(folder / "t.json")
    until_there(folder / "world")
    with shmring.init(*pickle.loads((folder / "world").read_bytes())) as larger:
        larger.all_reduce(np.ones(TINY, "f4"))


def test_a_communicator_made_by_grow_has_a_file_of_its_own(tmp_path):
    with Ranks(2) as ranks, Ranks(1) as new:
        ranks.meet(SHMRING_TRACE=tmp_path / "t.json")
        new.begin(come_and_reduce, tmp_path)
        ranks(grow_and_reduce, tmp_path)
        new.answers()
    for rank, found in tracks(read(tmp_path / "t.json")).items():
        assert rank in ("rank 0 of 2", "rank 1 of 2")
        assert calls(found)[0] == "barrier()"
    found = tracks(read(tmp_path / "t.epoch1.json"))
    assert set(found) == {f"rank {rank} of 3" for rank in range(3)}
    for rank in found.values():
        assert f"all_reduce(float32[{TINY}], sum)" in calls(rank)


def grow_without_a_folder(comm, folder, traces):
    traces.rename(f"{traces}.away")
    with comm.grow(1, lambda *to_join: _pass_on(folder, to_join)) as larger:
        larger.all_reduce(np.ones(TINY, "f4"))  # untraced on this rank, but usable
    traces.with_name(f"{traces.name}.away").rename(traces)


def test_grow_does_not_fail_for_want_of_a_trace(tmp_path):
    (tmp_path / "traces").mkdir()
    with Ranks(1) as ranks, Ranks(1) as new:
        ranks.meet(SHMRING_TRACE=tmp_path / "traces" / "t.json")
        new.begin(come_and_reduce, tmp_path)
        ranks(grow_without_a_folder, tmp_path, tmp_path / "traces")
        new.answers()
    assert set(tracks(read(tmp_path / "t.epoch1.json"))) == {"rank 1 of 2"}


def test_a_file_that_cannot_be_written_is_an_error_at_once(world_of, tmp_path):
    with Ranks(2) as ranks:
        for outcome in ranks.try_to_meet(of_rank={0: {"SHMRING_TRACE": f"{tmp_path}/none/t.json"}}):
            if outcome is not None:
                assert isinstance(outcome, shmring.Error)
                assert "SHMRING_TRACE is" in str(outcome)
                assert "No such file or directory" in str(outcome)


def trace_groups(comm, path):
    before = comm.split(comm.rank % 2)
    reversed_ranks = comm.group([2, 0])
    with comm.trace(path):
        with before.trace(path):
            before.barrier()
        meanwhile = comm.dup()
        if reversed_ranks is not None:
            with reversed_ranks.trace(path):
                reversed_ranks.barrier()
    meanwhile.barrier()  # its trace has ended with that of the others
    with meanwhile.trace(path):
        meanwhile.all_reduce(np.ones(TINY, "f4"))


def test_all_communicators_of_a_world_come_into_one_file(world_of, tmp_path):
    path = tmp_path / "t.json"
    world_of(3)(trace_groups, path)
    found = tracks(read(path))
    assert calls(found["rank 0 of 3: group of ranks 0, 2"]) == ["barrier()"]
    assert calls(found["rank 1 of 3: group of rank 1"]) == ["barrier()"]
    assert calls(found["rank 2 of 3: group of ranks 2, 0"]) == ["barrier()"]
    assert calls(found["rank 2 of 3: group of ranks 0, 1, 2"]) == [f"all_reduce(float32[{TINY}], sum)"]


def group_without_a_folder(comm, folder):
    comm.trace(folder / "t.json")
    comm.barrier()
    if comm.rank == 0:
        (folder / "t.json").unlink()
        folder.rmdir()
    comm.barrier()
    half = comm.split(0)
    half.barrier()  # untraced, but there
    assert half.size == comm.size


def test_a_group_does_not_fail_for_want_of_a_trace(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    with Ranks(2) as ranks:
        ranks.meet(SHMRING_TRACE=tmp_path / "own.json")
        ranks(group_without_a_folder, folder)


def raise_inside(comm, folder):
    folder.mkdir(exist_ok=True)
    comm.barrier()
    trace = comm.trace(folder / "t.json")
    comm.barrier()
    if comm.rank == 0:
        (folder / "t.json").unlink()
        folder.rmdir()
    comm.barrier()
    with pytest.raises(LookupError), trace:
        raise LookupError("says more")
    comm.barrier()
    if comm.rank == 0:
        folder.mkdir()
    comm.barrier()
    trace.stop()  # the unwritten slices are still there


def test_an_exception_inside_precedes_a_trace_that_cannot_be_written(tmp_path):
    folder = tmp_path / "gone"
    with Ranks(2) as ranks:
        ranks.meet()(raise_inside, folder)
    assert set(tracks(read(folder / "t.json"))) == {"rank 0 of 2", "rank 1 of 2"}


def stop_beside(comm, path):
    trace = comm.trace(path)
    reported = []

    def stop():
        for _ in range(100):
            try:
                trace.stop()
                return
            except RuntimeError as error:
                reported.append(str(error))
                time.sleep(0.001)

    other = threading.Thread(target=stop)
    x = np.ones(1 << 20, "f4")
    with contextlib.suppress(RuntimeError):  # of the second thread
        for turn in range(100):
            if turn == 5:
                other.start()
            comm.all_reduce(x, "max")
    other.join()
    assert all("another thread is inside a call" in text for text in reported)


def test_another_thread_stops_it_only_between_calls(tmp_path):
    path = tmp_path / "t.json"
    with Ranks(1) as ranks:
        ranks.meet()(stop_beside, path)
    assert set(tracks(read(path))) == {"rank 0 of 1"}


def receive_in_vain(comm, path):
    with comm.trace(path), pytest.raises(shmring.Timeout):
        comm.recv(np.empty(4), 1 - comm.rank, timeout=0.1)


def test_a_message_that_never_came_is_reported(world_of, tmp_path):
    path = tmp_path / "t.json"
    with Ranks(2) as ranks:
        ranks.meet()(receive_in_vain, path)
    found = tracks(read(path))
    assert found["rank 0 of 2: calls: messages"][0]["args"]["outcome"] == "raised"


def test_paths_that_are_no_files_are_refused(world_of):
    with Ranks(1) as ranks:
        (error,) = ranks.meet().outcomes(trace_to, "/dev/null")
    assert isinstance(error, OSError)
    assert "not a regular file" in str(error)


@pytest.mark.parametrize("of", ["t.json", "t.json.part"])
def test_no_link_is_followed(tmp_path, of):
    """Refuse links, as another user can put one into /tmp to make this user overwrite a file."""
    other, path = tmp_path / "other", tmp_path / "t.json"
    other.write_text("as it was")
    (tmp_path / of).symlink_to(other)
    with Ranks(1) as ranks:
        (error,) = ranks.meet().outcomes(work_alone, path)
    assert other.read_text() == "as it was"
    if of == "t.json":
        assert isinstance(error, OSError)
        assert "symbolic link" in str(error)
    else:
        assert tracks(read(path))


def test_a_link_that_leads_nowhere_makes_no_file(tmp_path):
    (tmp_path / "t.json").symlink_to(tmp_path / "nowhere")
    with Ranks(1) as ranks:
        (error,) = ranks.meet().outcomes(work_alone, tmp_path / "t.json")
    assert isinstance(error, OSError)
    assert not (tmp_path / "nowhere").exists()


def work_alone(comm, path):
    with comm.trace(path):
        comm.barrier()


def trace_to(comm, path):
    comm.trace(path)


def end_without_closing(world, rank, path):
    comm = shmring.init(world, rank)
    comm.trace(path)
    comm.barrier()


def test_children_of_multiprocessing_that_do_not_close_are_there(tmp_path):
    path, world = tmp_path / "t.json", shmring.world(2)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=end_without_closing, args=(world, rank, path)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert set(tracks(read(path))) == {"rank 0 of 2", "rank 1 of 2"}


@pytest.mark.limit(180)  # thousands of steps, each of which may wait for a CPU
@pytest.mark.parametrize("after_ms", first(2, [2, 6, 0, 4, 8, 10]))
def test_who_is_killed_while_it_writes_leaves_a_whole_file(tmp_path, after_ms):
    path = tmp_path / "t.json"
    with Ranks(2) as ranks:
        ranks.meet(SHMRING_TRACE=path)
        ranks(call_and_note)
        pid = ranks.pid(1)
        ranks.begin(close_both)
        time.sleep(0.001 * after_ms)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        ranks.answers()
    read(path)


def call_and_note(comm):
    for _ in range(5000):
        comm.barrier()


def close_both(comm):
    comm.close()


def trace_wrongly(comm, path):
    with pytest.raises(OSError, match="No such file"):
        comm.trace(path / "none" / "t.json")
    with pytest.raises(TypeError):
        comm.trace(7.5)
    trace = comm.trace(path / "t.json")
    with pytest.raises(RuntimeError, match="traced already"):
        comm.trace(path / "t.json")
    comm.barrier()
    trace.stop()
    trace.stop()
    comm.close()
    with pytest.raises(shmring.Closed):
        comm.trace(path / "t.json")


def test_wrong_uses(tmp_path):
    with Ranks(2) as ranks:
        ranks.meet()(trace_wrongly, tmp_path)


# ---- failures ---------------------------------------------------------------------------------------------


def be_killed(comm, path):
    comm.trace(path)
    comm.all_reduce(np.ones(TINY, "f4"))
    if comm.rank == 1:
        time.sleep(0.1)  # until the others are in the next call
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(shmring.RankFailed):
        comm.all_reduce(np.ones(LARGE, "f4"))
    comm.close()


def test_what_survivors_did_is_there_after_a_death(tmp_path):
    path = tmp_path / "t.json"
    with Ranks(3) as ranks:
        outcomes = ranks.meet().outcomes(be_killed, path)
    assert isinstance(outcomes[1], Died)
    found = tracks(read(path))
    assert set(found) == {"rank 0 of 3", "rank 2 of 3"}
    for slices in found.values():
        assert [one["args"]["outcome"] for one in slices if one["cat"] == "call"] == ["complete", "raised"]


def fork_while_traced(comm, path):
    comm.trace(path)
    comm.barrier()
    pid = os.fork()
    if pid == 0:
        try:
            comm.close()
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not json.loads(path.read_text())["traceEvents"]
    comm.barrier()


def test_a_forked_child_writes_nothing(tmp_path):
    path = tmp_path / "t.json"
    with Ranks(1) as ranks:
        ranks.meet()(fork_while_traced, path)
    (slices,) = tracks(read(path)).values()
    assert calls(slices) == ["barrier()"] * 2


def call_often(comm, path):
    trace_file.CAPACITY = 8
    with comm.trace(path):
        for _ in range(50):
            comm.barrier()


def test_only_the_last_slices_are_kept(tmp_path):
    path = tmp_path / "t.json"
    with Ranks(2) as ranks:
        ranks.meet()(call_often, path)
    events = read(path)
    for slices in tracks(events).values():
        assert len(slices) == 8
        assert slices[-1]["args"]["number"] == 50
    lost = [event for event in events if event["ph"] == "i"]
    assert len(lost) == 2
    assert all("are lost" in event["name"] for event in lost)
