"""send, recv and related calls between ranks of several hosts: everything that test_point_to_point.py,
test_transfers.py and test_message_failures.py check on one host; and failures that only a network can have.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from combinations import each_value
from ranks import Died, Ranks, free_port, turns, until_there, when_there

import shmring
from shmring import ANY_SOURCE
from tests.p2p import test_matching as matching
from tests.p2p import test_message_failures as failures
from tests.p2p import test_point_to_point as one_host
from tests.p2p import test_transfers as transfers
from tests.p2p.test_point_to_point import RECORD, TINY

SOON_S = 10
APART = [0, 1]
PAIRS = [0, 0, 1, 1]
MIXED = [0, 1, 0, 1, 1]
THREE = [0, 1, 2]
NODES = {"apart": APART, "pairs": PAIRS, "mixed": MIXED, "three": THREE}


@pytest.fixture(params=NODES.values(), ids=NODES.keys())
def nodes(request):
    return request.param


@pytest.fixture
def two_apart(world_over_hosts):
    """Ranks 0 and 1 of different nodes, with rings of some lines."""
    return world_over_hosts(APART, SHMRING_MESSAGE_RING=TINY)


def exchange_and_leave(comm, count):
    peer = (comm.rank + 1) % comm.size
    x, y = np.full(count, comm.rank, "f4"), np.empty(count, "f4")
    comm.sendrecv(x, peer, y, source=(comm.rank - 1) % comm.size)
    if comm.rank % 2:
        time.sleep(
            0.05
        )  # the messages of the other rank of its host have arrived by then, and that rank has left
    comm.close()
    return float(y[-1])


@each_value({"nodes": NODES.values(), "count": [10, 100_000]})
def test_what_was_sent_before_leaving_arrives_though_credit_comes_back(nodes, count):
    # A socket that is closed with unread credit is reset, and its undelivered data are lost.
    for _ in range(4):
        with Ranks(len(nodes), nodes=nodes) as ranks:
            sources = [(rank - 1) % len(nodes) for rank in range(len(nodes))]
            assert ranks.meet(timeout_s=40).outcomes(exchange_and_leave, count) == sources


# ---- as on one host ---------------------------------------------------------------------------------------


@each_value({"nodes": NODES.values(), "ring": [TINY, 4096]})
def test_random_programs(world_over_hosts, nodes, ring):
    ranks = world_over_hosts(nodes, SHMRING_MESSAGE_RING=ring)
    for seed in range(6):
        ranks(one_host.run_program, seed, 60 * ranks.size, np.dtype(["u1", "i4", RECORD][seed % 3]))


@pytest.mark.parametrize("first_seq", [(1 << 32) - 60, (1 << 64) - 60])
def test_random_programs_where_positions_wrap(world_over_hosts, first_seq):
    ranks = world_over_hosts(THREE, SHMRING_MESSAGE_RING=TINY, SHMRING_FIRST_SEQ=first_seq)
    for seed in range(3):
        ranks(one_host.run_program, seed, 150, np.dtype("u1"))


@pytest.mark.soak
@pytest.mark.limit(4000)
def test_random_programs_for_long(world_over_hosts):
    for seed in range(1000):
        ranks = world_over_hosts(list(NODES.values())[seed % 4], SHMRING_MESSAGE_RING=TINY << seed % 5)
        ranks(one_host.run_program, seed, 60 * ranks.size, np.dtype(["u1", "f8", RECORD][seed % 3]))


OF_TWO = {
    "every dtype and shape": (one_host.exchange_arrays,),
    "buffers of other makes": (one_host.exchange_buffers,),
    "to itself": (one_host.send_to_itself,),
    "a message makes way": (one_host.receive_the_second_first, 50_000),
    "sendrecv": (one_host.send_to_each_other, "sendrecv"),
    "irecv": (one_host.send_to_each_other, "irecv"),
    "isend": (one_host.send_to_each_other, "isend"),
    "probe": (one_host.look_before,),
    "past a collective": (one_host.overtake_a_collective,),
    "two threads": (one_host.use_two_threads,),
    "wrong arguments": (failures.wrong_arguments,),
    "an array for an object": (failures.receive_an_object_that_is_none,),
    "after close": (failures.use_after_close,),
    "what was sent before leaving": (failures.leave_a_message,),
    "polls after one has left": (failures.look_for_messages_of_one_that_left,),
    "Ctrl-C in recv": (failures.interrupt, "recv"),
    "Ctrl-C in a wait": (failures.interrupt_a_wait,),
    "a forked child": (failures.fork_and_send,),
    "forgotten transfers": (transfers.forget_transfers,),
    "asyncio": (transfers.await_transfers,),
    "isend and a collective": (transfers.meet_after_a_large_send, "isend"),
    "irecv and a collective": (transfers.meet_after_a_large_send, "irecv"),
    "the background alone": (transfers.leave_it_to_the_background,),
    "caller and background": (transfers.transfer_in_many_threads_worth, 200),
}


@each_value({"case": OF_TWO, "ring": [TINY, 1 << 18]})
def test_two_ranks_do_as_on_one_host(world_over_hosts, case, ring):
    function, *args = OF_TWO[case]
    on_one_host = {
        one_host.exchange_buffers: [None, ([5, 4], b"bytesmore\0")],
        failures.receive_an_object_that_is_none: [None, [0, 1, 2]],
        failures.leave_a_message: [None, 0],
        failures.look_for_messages_of_one_that_left: [[None, None], None],
        failures.interrupt_a_wait: [100_000, 100_000],
        failures.fork_and_send: [7, 7],
        transfers.forget_transfers: [True, True],
        transfers.await_transfers: [(10_000, 1), (10_000, 0)],
        transfers.leave_it_to_the_background: [True, True],
    }
    assert world_over_hosts(APART, SHMRING_MESSAGE_RING=ring)(function, *args) == on_one_host.get(
        function, [None, None]
    )


def test_order_is_kept_between_a_pair_and_tag(two_apart):
    assert all(two_apart(one_host.keep_order, 1000))


@pytest.mark.parametrize("count", [3, 10_000])
def test_a_message_that_does_not_fit_is_an_error_and_only_it_is_lost(two_apart, count):
    calls = two_apart(failures.receive_into_too_little, count)[1]
    assert calls == ("send(float64[4] in Fortran order)", "recv(float64[4])")


def test_a_wait_that_comes_too_early_harms_nothing(two_apart):
    assert all(two_apart(transfers.wait_too_briefly))


@pytest.mark.parametrize("count", matching.LENGTHS)
@pytest.mark.parametrize("case", [matching.match_late, matching.match_early, matching.drop_messages])
def test_matched_sends_and_probes(two_apart, case, count):
    two_apart(case, count)


def test_each_matched_send_is_complete_for_itself(two_apart):
    two_apart(matching.match_in_any_order, 100)


def test_too_many_matched_sends_are_refused(world_over_hosts):
    world_over_hosts(APART)(matching.send_too_many)


@pytest.mark.parametrize("count", matching.LENGTHS)
def test_a_matched_probe_takes_a_message(world_over_hosts, nodes, count):
    world_over_hosts(nodes, SHMRING_MESSAGE_RING=TINY)(matching.take_messages, count)


def test_receives_are_cancelled_until_they_match(two_apart):
    two_apart(matching.cancel_receives)


def test_a_receiver_may_close_after_the_match(world_over_hosts):
    for _ in range(10):
        world_over_hosts(APART)(matching.match_and_close)


@pytest.mark.parametrize("how", ["dies", "closes"])
def test_the_end_of_the_receiver_ends_a_matched_send(how):
    with Ranks(2, nodes=APART) as ranks:
        assert ranks.meet().outcomes(matching.end_without_a_match, how)[0] == 1


def test_contexts_are_apart(world_over_hosts, nodes):
    world_over_hosts(nodes, SHMRING_MESSAGE_RING=4096)(one_host.use_two_contexts)


def test_a_ring_of_ranks(world_over_hosts, nodes):
    world_over_hosts(nodes, SHMRING_MESSAGE_RING=TINY)(one_host.pass_around, 50)


def test_a_server_receives_from_any_source(world_over_hosts, nodes):
    ranks = world_over_hosts(nodes)
    assert ranks(one_host.answer_whoever_asks, 300)[0] == [0] + [300] * (ranks.size - 1)


def test_objects(world_over_hosts):
    assert world_over_hosts(THREE, SHMRING_MESSAGE_RING=TINY)(one_host.gather_objects, 1)[1] == [0, 2]


def test_messages_pass_while_another_thread_is_in_collectives(world_over_hosts, nodes):
    world_over_hosts(nodes, SHMRING_MESSAGE_RING=4096)(one_host.beside_collectives, 60)


def test_groups_have_messages_of_their_own(world_over_hosts):
    world_over_hosts(PAIRS, SHMRING_MESSAGE_RING=TINY)(one_host.pass_in_groups)


# ---- sizes ------------------------------------------------------------------------------------------------


def exchange_sizes(comm, sizes):
    other = comm.size - 1 - comm.rank
    for nbytes in sizes:
        x = (np.arange(nbytes) * 7 + comm.rank).astype("u1")
        for _ in range(3):
            out = np.zeros(nbytes, "u1")
            assert comm.sendrecv(x, other, out, other).count == nbytes
            assert (out == (np.arange(nbytes) * 7 + other).astype("u1")).all(), nbytes


@pytest.mark.parametrize("ring", [TINY, 4096, 1 << 20])
def test_sizes_around_lines_rings_and_pieces(world_over_hosts, ring):
    edges = [0, 32, 64, ring // 4, ring // 2 - 128, ring // 2, ring, 65536, 3 * 65536, 1 << 20]
    sizes = sorted({max(0, edge + step) for edge in edges for step in (-65, -1, 0, 1, 33)})
    world_over_hosts(APART, SHMRING_MESSAGE_RING=ring)(exchange_sizes, sizes)


def send_where_rings_differ(comm):
    exchange_sizes(comm, [0, 100, 5000, 100_000, 1 << 20])


def test_hosts_may_have_rings_of_other_lengths(world_over_hosts):
    ranks = world_over_hosts(APART)  # joins once more, each with its own
    of_rank = {rank: {"SHMRING_MESSAGE_RING": str(TINY << 5 * rank)} for rank in APART}
    outcomes = ranks.try_to_meet(address=f"127.0.0.1:{free_port()}", of_rank=of_rank)
    assert outcomes == [None, None]
    ranks(send_where_rings_differ)


def test_random_programs_over_a_network(world_over):
    ranks = world_over([0, 1, 1, 0], SHMRING_MESSAGE_RING=4096)
    for seed in range(3):
        ranks(one_host.run_program, seed, 240, RECORD)
    ranks(exchange_sizes, [0, 100, 5000, 100_000, 1 << 20])


# ---- the end of others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["send", "recv", "recv from any", "sendrecv", "probe"])
def test_a_rank_that_does_not_answer_is_a_timeout(two_apart, call, tmp_path):
    errors = two_apart.outcomes(failures.never_answer, call, tmp_path / "raised")
    for error in errors:
        assert isinstance(error, shmring.Timeout), error
        assert isinstance(error, TimeoutError)
        assert "0.3 s" in str(error)
    assert errors[0].op == call.split()[0].replace("sendrecv", "send")


@each_value({"how": ["one way", "other way", "both ways"], "victim": [0, 1]})
def test_a_rank_killed_in_the_middle_of_a_message_is_named(tmp_path, how, victim):
    with Ranks(2, nodes=APART) as ranks:
        ranks.meet(SHMRING_MESSAGE_RING=TINY)
        ranks.begin(failures.talk_for_ever, how, str(tmp_path / "runs"))
        when_there(tmp_path / "runs", ranks)
        ranks.kill(victim)
        outcomes = ranks.answers()
        assert isinstance(outcomes[victim], Died)
        assert isinstance(outcomes[1 - victim], shmring.RankFailed), outcomes
        assert outcomes[1 - victim].rank == victim
        assert outcomes[1 - victim].host == "127.0.0.1"


def talk_around(comm, path):
    x, out = np.zeros(20_000), np.zeros(20_000)
    for _ in turns(comm, path):
        comm.sendrecv(x, (comm.rank + 1) % comm.size, out, (comm.rank - 1) % comm.size)


def test_all_ranks_name_the_one_that_was_killed(tmp_path):
    with Ranks(4, nodes=PAIRS) as ranks:
        ranks.meet()
        ranks.begin(talk_around, str(tmp_path / "runs"))
        when_there(tmp_path / "runs", ranks)
        ranks.kill(2)
        outcomes = ranks.answers()
        for rank in (0, 1, 3):
            assert isinstance(outcomes[rank], shmring.RankFailed), outcomes
            assert outcomes[rank].rank == 2


@pytest.mark.parametrize(
    ("source", "way"), [(1, "recv"), (ANY_SOURCE, "recv"), (1, "done"), (ANY_SOURCE, "iprobe")]
)
def test_a_rank_that_dies_is_noticed_by_who_waits_for_it(source, way):
    with Ranks(2, nodes=APART) as ranks:
        rank, took_s = ranks.meet().outcomes(failures.wait_for_the_dead, source, way)[0]
        assert rank == 1
        assert took_s < SOON_S


def test_abort_ends_every_wait(world_over_hosts, nodes):
    for error in world_over_hosts(nodes).outcomes(failures.give_up_while_others_wait):
        assert isinstance(error, shmring.Aborted)
        assert error.reason == "enough"


def test_ctrl_c_in_the_middle_of_a_send_ends_the_communicator(two_apart):
    for error in two_apart.outcomes(failures.interrupt, "send"):
        assert isinstance(error, shmring.Aborted)
        assert "in the middle" in error.reason


def send_to_who_computes(comm):
    """Send to rank 1 while it is in no call and its socket is full: later messages still arrive when it
    polls."""
    if comm.rank == 0:
        for _ in range(3):
            comm.isend(np.zeros(1 << 20), 1)
        comm.abort("enough")
    time.sleep(0.5)
    comm.recv(np.zeros(1), 1 - comm.rank, tag=1)


def test_an_abort_is_heard_behind_what_was_sent(world_over_hosts):
    for error in world_over_hosts(APART).outcomes(send_to_who_computes):
        assert isinstance(error, shmring.Aborted)
        assert error.reason == "enough"


def abort_while_the_socket_is_full(comm, told):
    """Rank 0 makes no call after its abort, so nothing but shmring itself can send the rest of the piece and
    the reason."""
    comm.barrier()
    for line in sockets(socket.AF_INET):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    comm.barrier()
    if comm.rank == 0:
        comm.isend(np.zeros(1 << 22), 1)
        comm.abort("enough")
        until_there(told)
    else:
        time.sleep(0.5)
        try:
            with pytest.raises(shmring.Aborted, match="enough"):
                comm.barrier(timeout=SOON_S)
        finally:
            told.touch()


def test_an_abort_is_sent_though_no_call_follows(world_over_hosts, tmp_path):
    world_over_hosts(APART)(abort_while_the_socket_is_full, tmp_path / "told")


# ---- failures of the network ------------------------------------------------------------------------------


def sockets(family):
    """This process's sockets of a family, as duplicates, in the order of their descriptors."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                line = socket.socket(fileno=os.dup(int(path.name)))
                if line.family == family:
                    found[int(path.name)] = line
    return [found[fd] for fd in sorted(found)]


def sockets_of_channels(to_port):
    """The connections of this process to a port of rank 0's: the second one is the control channel."""
    found = []
    for line in sockets(socket.AF_INET):
        with contextlib.suppress(OSError):
            if line.getpeername()[1] == to_port:
                found.append(line)
    return found


HEAD = struct.Struct("<IIIIIIQ")  # magic, kind, bytes, flags, tag, type, whole
MAGIC, PIECE, CREDIT, OVER, LEAVING = 0x31507273, 4, 3, 1, 2
GARBAGE = {
    "noise": b"\xff" * 32,
    "an unknown kind": HEAD.pack(MAGIC, 77, 0, 0, 0, 0, 0),
    "no end": HEAD.pack(MAGIC, PIECE, 0xFFFFFFFF, 1, 0, 0, 0xFFFFFFFFFFFF),
    "more than its message": HEAD.pack(MAGIC, PIECE, 100, 3, 0, 0, 50) + bytes(100),
    "no room": HEAD.pack(MAGIC, PIECE, 100, 1, 0, 0, 1 << 40)
    + bytes(100)
    + 9 * (HEAD.pack(MAGIC, PIECE, 100, 0, 0, 0, 1 << 40) + bytes(100)),
    "no first piece": HEAD.pack(MAGIC, PIECE, 10, 2, 0, 0, 20) + bytes(10),
    "a piece that is cut": HEAD.pack(MAGIC, PIECE, 0, 4, 0, 0, 20),
    "too much credit": HEAD.pack(MAGIC, CREDIT, 0, 0, 0, 0, 1 << 60),
    "less credit": HEAD.pack(MAGIC, CREDIT, 0, 0, 0, 0, 1),
    "credit with a body": HEAD.pack(MAGIC, CREDIT, 5, 0, 0, 0, 512) + bytes(5),
    "a long word": HEAD.pack(MAGIC, OVER, 1 << 20, 0, 0, 0, 0),
}


def send_garbage(comm, garbage, source):
    if comm.rank == 1:
        lines = sockets_of_channels(rendezvous_port())
        lines[-1].sendall(garbage)
        for line in lines:
            line.close()
        time.sleep(0.1)
    comm.recv(np.zeros(20, "u1"), source if comm.rank == 0 else 0)


def rendezvous_port():
    """Return the port of rank 0's listener, to which most sockets of this rank go."""
    ports = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as line:
                    if line.family == socket.AF_INET:
                        ports.append(line.getpeername()[1])
        except OSError:
            continue
    return max(set(ports), key=ports.count)


@each_value({"what": GARBAGE, "source": [1, ANY_SOURCE]})
def test_garbage_is_an_error_that_names_its_sender(two_apart, what, source):
    outcomes = two_apart.outcomes(send_garbage, GARBAGE[what], source)
    assert isinstance(outcomes[0], shmring.Error), outcomes
    assert "rank 1" in str(outcomes[0])
    assert isinstance(outcomes[1], shmring.Error), outcomes


def say_it_is_over(comm, body):
    if comm.rank == 1:
        sockets_of_channels(rendezvous_port())[-1].sendall(
            HEAD.pack(MAGIC, OVER, len(body), 0, 0, 0, 0) + body
        )
    comm.recv(np.zeros(1), 1 - comm.rank)


@pytest.mark.parametrize("body", [b"", b"{", b'{"type": "open"}', b"[1]", b"\xff" * 65536])
def test_a_notification_in_unknown_words_ends_the_communicator_all_the_same(two_apart, body):
    outcomes = two_apart.outcomes(say_it_is_over, body)
    assert isinstance(outcomes[0], shmring.Error)
    assert outcomes[0].rank == 1
    assert isinstance(outcomes[1], shmring.Error)


# ---- the cost of waiting ----------------------------------------------------------------------------------


def wait_idly(comm, how):
    """Wait on rank 0 for a second, as `how` says; return its CPU time."""
    if comm.rank == comm.size - 1:
        time.sleep(1)
        comm.send(b"x", 0)
    x, begin = bytearray(1), time.process_time()
    if comm.rank == 0 and how == "irecv":
        transfer = comm.irecv(x)
        time.sleep(0.9)
        transfer.wait()
    elif comm.rank == 0:
        comm.recv(x, *([comm.size - 1] if how == "recv" else []))
    took_s = time.process_time() - begin
    comm.barrier()
    return took_s


@each_value({"nodes": NODES.values(), "how": ["recv", "recv from any", "irecv"]})
def test_a_rank_that_waits_costs_no_cpu(world_over_hosts, nodes, how):
    assert world_over_hosts(nodes)(wait_idly, how)[0] < 0.3


def answer_while_local_ranks_idle(comm, count):
    """Wait for messages from both sides at once: neither is starved, and none is lost."""
    if comm.rank > 0:
        for i in range(count):
            comm.send(np.array([i]), 0, tag=comm.rank)
            if i % 50 == comm.rank:
                time.sleep(0.002)
        return None
    x, found = np.zeros(1, "i8"), [[] for _ in range(comm.size)]
    for _ in range(count * (comm.size - 1)):
        found[comm.recv(x).source].append(int(x[0]))
    return found[1:]


def test_any_source_mixes_local_ranks_and_other_hosts(world_over_hosts, nodes):
    ranks = world_over_hosts(nodes, SHMRING_MESSAGE_RING=TINY)
    assert ranks(answer_while_local_ranks_idle, 500)[0] == [list(range(500))] * (ranks.size - 1)


def receive_in_two_threads_worth(comm, count):
    """Large messages for one thread while another's collectives read the same channels."""
    errors = []

    def reduce_all():
        try:
            for _ in range(count):
                comm.all_reduce(np.ones(100))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=reduce_all)
    thread.start()
    x, out = np.arange(60_000) + comm.rank, np.zeros(60_000, "i8")
    other = (comm.rank + comm.size // 2) % comm.size
    for _ in range(count):
        out[:] = 0
        comm.sendrecv(x, other, out, other)
        assert (out == np.arange(60_000) + other).all()
    thread.join()
    assert not errors, errors


@pytest.mark.parametrize("ring", [4096, 1 << 18])
def test_large_messages_beside_collectives(world_over_hosts, ring):
    world_over_hosts(PAIRS, SHMRING_MESSAGE_RING=ring)(receive_in_two_threads_worth, 60)
