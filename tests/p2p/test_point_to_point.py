"""send, recv and related calls: random programs against a model, order, wildcards, sizes larger than the
ring, probes, and messages beside collectives and in groups."""

import contextlib
import copy
import pickle
import random
import threading
import time

import numpy as np
import pytest

from shmring import ANY_SOURCE, ANY_TAG, Mismatch

RECORD = np.dtype([("id", "<i4"), ("at", "<f8", (2,)), ("name", "S3")])
TINY = 512
LAST_TAG = 2**31 - 1
SOON_S = 10


# ---- random programs --------------------------------------------------------------------------------------


def plan_of(seed, size, count):
    """[(when it is sent, when it is received, source, dest, tag, elements)]; the same on every rank."""
    dice = random.Random(seed)
    messages = []
    for _ in range(count):
        sent, received = sorted(dice.sample(range(100 * count), 2))
        elements = dice.choice([0, 1, 3, dice.randrange(40), dice.randrange(700)])
        source, dest, tag = dice.randrange(size), dice.randrange(size), dice.randrange(3)
        messages.append((sent, received, source, dest, tag, elements))
    return sorted(messages)


def contents(dtype, elements, number):
    return (np.arange(elements * dtype.itemsize) * 7 + number * 31).astype("u1").view(dtype)


class Model:
    """The messages that this rank has still to receive, in the order of each source, without those that an
    irecv will get."""

    def __init__(self, plan, rank):
        self.coming = [(number, message) for number, message in enumerate(plan) if message[3] == rank]

    def sent_before(self, position):
        return [message for _, message in self.coming if message[0] < position]

    def take(self, source, tag):
        """The message that such a pattern gets from its source."""
        for entry in self.coming:
            if entry[1][2] == source and tag in (ANY_TAG, entry[1][4]):
                self.coming.remove(entry)
                return entry
        raise AssertionError(f"nothing comes from {source} with tag {tag}")


def run_program(comm, seed, count, dtype):
    plan, model = plan_of(seed, comm.size, count), None
    model = Model(plan, comm.rank)
    dice = random.Random(f"{seed} {comm.rank}")
    sends, receives = [], []
    events = [(sent, number, True) for number, (sent, *_) in enumerate(plan)]
    events += [(message[1], number, False) for number, message in enumerate(plan)]
    for position, number, is_send in sorted(events):
        _, _, source, dest, tag, elements = plan[number]
        if is_send and source == comm.rank:
            matched = dice.random() < 0.3
            sends.append(comm.isend(contents(dtype, elements, number), dest, tag, matched=matched))
        elif not is_send and dest == comm.rank:
            receive_something(comm, model, position, dice, dtype, receives)
        if receives and dice.random() < 0.1:
            check_transfer(receives.pop(dice.randrange(len(receives))), dtype)
    for receive in receives:
        check_transfer(receive, dtype)
    for send in sends:
        assert send.wait() is None
    assert not model.coming
    assert comm.iprobe() is None


def receive_something(comm, model, position, dice, dtype, receives):
    """One message, by a pattern that some message which has been sent matches."""
    _, _, source, _, tag, _ = dice.choice(model.sent_before(position))
    x = np.empty(700, dtype)
    how = dice.choice(["irecv", "exact", "any tag", "any", "probe", "mprobe"])
    if how == "irecv":
        receives.append((comm.irecv(x, source, tag), x, *model.take(source, tag)))
        return
    if how == "probe":
        found = comm.probe(source, ANY_TAG)
        number, message = model.take(source, ANY_TAG)
        assert (found.tag, found.count) == (message[4], message[5])
        check(comm.recv(x, source, found.tag), x, number, message, dtype)
        return
    if how == "mprobe":
        taken = comm.mprobe(source, tag)
        number, message = model.take(source, tag)
        if dice.random() < 0.5:
            receives.append((taken.irecv(x), x, number, message))
        else:
            check(taken.recv(x), x, number, message, dtype)
        return
    pattern = {"exact": (source, tag), "any tag": (source, ANY_TAG), "any": (ANY_SOURCE, ANY_TAG)}[how]
    status = comm.recv(x, *pattern)
    check(status, x, *model.take(status.source, pattern[1]), dtype)


def check_transfer(receive, dtype):
    transfer, x, number, message = receive
    check(transfer.wait(), x, number, message, dtype)
    assert transfer.done()


def check(status, x, number, message, dtype):
    _, _, source, _, tag, elements = message
    assert (status.source, status.tag, status.count) == (source, tag, elements)
    assert status.nbytes == elements * dtype.itemsize
    assert x[:elements].tobytes() == contents(dtype, elements, number).tobytes()


@pytest.mark.parametrize("ring", [TINY, 4096])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_random_programs(world_of, size, ring):
    ranks = world_of(size, SHMRING_MESSAGE_RING=ring)
    for seed in range(6):
        ranks(run_program, seed, 60 * size if size < 8 else 200, np.dtype(["u1", "i4", RECORD][seed % 3]))


@pytest.mark.parametrize("first_seq", [(1 << 32) - 60, (1 << 64) - 60])
def test_random_programs_where_positions_wrap(world_of, first_seq):
    ranks = world_of(3, SHMRING_MESSAGE_RING=TINY, SHMRING_FIRST_SEQ=first_seq)
    for seed in range(3):
        ranks(run_program, seed, 150, np.dtype("u1"))


@pytest.mark.soak
@pytest.mark.limit(4000)
def test_random_programs_for_long(world_of):
    for seed in range(2000):
        size = 1 + seed % 8
        ranks = world_of(size, SHMRING_MESSAGE_RING=TINY << seed % 5)
        ranks(run_program, seed, 60 * size, np.dtype(["u1", "f8", RECORD][seed % 3]))


# ---- messages that arrive ---------------------------------------------------------------------------------

ARRAYS = {
    "floats": np.arange(10.0),
    "one number": np.array(7, "i2"),
    "nothing": np.zeros((3, 0, 2), "f4"),
    "two dimensions": np.arange(600, dtype="u2").reshape(30, 20),
    "Fortran order": np.asfortranarray(np.arange(12, dtype="c16").reshape(3, 4)),
    "bool": np.array([True, False]),
    "text": np.array(["one", "zwölf"]),
    "times": np.array(["2020-02-02", "NaT"], "M8[us]"),
    "structures": np.array([(1, (2, 3), b"abc"), (4, (5, 6), b"")], RECORD),
    "larger than the ring": np.arange(200_000),
}


def exchange_arrays(comm):
    for name, x in ARRAYS.items():
        out = np.empty_like(x)
        status = comm.sendrecv(x, 1 - comm.rank, out)
        assert out.tobytes() == x.tobytes(), name
        assert (status.source, status.tag) == (1 - comm.rank, 0)
        assert (status.count, status.nbytes) == (x.size, x.nbytes), name
        for same in (pickle.loads(pickle.dumps(status)), copy.deepcopy(status)):
            assert repr(same) == repr(status)


@pytest.mark.parametrize("ring", [TINY, 1 << 18])
def test_every_dtype_and_shape(world_of, ring):
    world_of(2, SHMRING_MESSAGE_RING=ring)(exchange_arrays)


def exchange_extension_dtypes(comm):
    import ml_dtypes

    x = np.arange(5).astype(ml_dtypes.bfloat16)
    out = np.zeros_like(x)
    status = comm.sendrecv(x, 1 - comm.rank, out)
    assert (status.count, status.nbytes) == (5, 10)
    assert (out == x).all()


def test_extension_dtypes(world_of):
    pytest.importorskip("ml_dtypes")
    world_of(2)(exchange_extension_dtypes)


def exchange_buffers(comm):
    if comm.rank == 0:
        comm.send(b"bytes", 1)
        comm.send(memoryview(bytearray(b"more")), 1)
        return None
    x = bytearray(10)
    counts = [comm.recv(x).count, comm.recv(memoryview(x)[5:]).count]
    return counts, bytes(x)


def test_buffers_of_other_makes(world_of):
    assert world_of(2)(exchange_buffers)[1] == ([5, 4], b"bytesmore\0")


def send_to_itself(comm):
    for count in (0, 1, 100_000):
        x, out = np.arange(count, dtype="f8"), np.zeros(count)
        comm.send(x, comm.rank, tag=5)
        comm.send(x + 1, comm.rank, tag=5)
        assert comm.recv(out).tag == 5
        assert (out == x).all()
        comm.recv(out, comm.rank, 5)
        assert (out == x + 1).all()
        receive = comm.irecv(out, comm.rank)
        comm.send(x, comm.rank)
        assert receive.wait().count == count
        assert (out == x).all()
        assert comm.sendrecv(x, comm.rank, out, comm.rank).count == count
        assert comm.sendrecv(out[1:][:0], comm.rank, out, comm.rank).count == 0  # no memory in common


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_sends_to_itself(world_of, size):
    world_of(size, SHMRING_MESSAGE_RING=TINY)(send_to_itself)


def keep_order(comm, count):
    if comm.rank == 0:
        for i in range(count):
            comm.send(np.array([i]), 1, tag=i % 3)
        return True
    x, found = np.zeros(1, "i8"), []
    for tag in (2, 0, 1):  # the last sent first: earlier ones are unexpected messages
        for _ in range(len(range(tag, count, 3))):
            comm.recv(x, 0, tag)
            found.append(int(x[0]))
    return found == [i for tag in (2, 0, 1) for i in range(tag, count, 3)]


@pytest.mark.parametrize("ring", [TINY, 1 << 16])
def test_order_is_kept_between_a_pair_and_tag(world_of, ring):
    assert all(world_of(2, SHMRING_MESSAGE_RING=ring)(keep_order, 1000))


def receive_the_second_first(comm, count):
    big, small = np.arange(count), np.array([7])
    if comm.rank == 0:
        comm.send(big, 1, tag=1)
        comm.send(small, 1, tag=2)
        return
    x, y = np.zeros(count, "i8"), np.zeros(1, "i8")
    comm.recv(y, 0, tag=2)
    assert y[0] == 7
    comm.recv(x, 0, tag=1)
    assert (x == big).all()


def test_a_message_that_no_rank_waits_for_makes_way(world_of):
    world_of(2, SHMRING_MESSAGE_RING=TINY)(receive_the_second_first, 50_000)


def send_to_each_other(comm, how):
    other, x, out = 1 - comm.rank, np.full(100_000, comm.rank), np.zeros(100_000, "i8")
    if how == "sendrecv":
        comm.sendrecv(x, other, out)
    elif how == "irecv":
        receive = comm.irecv(out)
        comm.send(x, other)
        receive.wait()
    else:
        send = comm.isend(x, other)
        comm.recv(out)
        send.wait()
    assert (out == other).all()


@pytest.mark.parametrize("how", ["sendrecv", "irecv", "isend"])
def test_two_large_messages_that_cross(world_of, how):
    world_of(2, SHMRING_MESSAGE_RING=TINY)(send_to_each_other, how)


def pass_around(comm, rounds):
    x, out = np.full(3000, comm.rank), np.zeros(3000, "i8")
    for _ in range(rounds):
        comm.sendrecv(x, (comm.rank + 1) % comm.size, out, (comm.rank - 1) % comm.size)
        x, out = out, x
    assert (x == (comm.rank - rounds) % comm.size).all()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_ring_of_ranks(world_of, size):
    world_of(size, SHMRING_MESSAGE_RING=TINY)(pass_around, 50)


def answer_whoever_asks(comm, count):
    if comm.rank > 0:
        x = np.zeros(1, "i8")
        for i in range(count):
            comm.send(np.array([i]), 0, tag=comm.rank)
            comm.recv(x, 0)
            assert x[0] == i * comm.rank
        return None
    x, asked = np.zeros(1, "i8"), [0] * comm.size
    for _ in range(count * (comm.size - 1)):
        status = comm.recv(x)
        assert status.source == status.tag
        asked[status.source] += 1
        comm.send(x * status.source, status.source)
    return asked


@pytest.mark.parametrize("size", [2, 4])
def test_a_server_receives_from_any_source(world_of, size):
    assert world_of(size)(answer_whoever_asks, 300)[0] == [0] + [300] * (size - 1)


def gather_objects(comm, root):
    items = {"rank": comm.rank, "array": np.arange(comm.rank * 10_000), "text": "ä" * comm.rank}
    if comm.rank != root:
        comm.send_object(items, root, tag=comm.rank)
        return None
    found = []
    for _ in range(comm.size - 1):
        item, status = comm.recv_object(with_status=True)
        assert item["rank"] == status.source == status.tag
        assert (item["array"] == np.arange(status.source * 10_000)).all()
        found.append(status.source)
    comm.send_object([1, None], root)
    assert comm.recv_object(root) == [1, None]
    return sorted(found)


def objects_of_all_lengths(comm):
    """Pickles around the length up to which an object comes at once: those of odd numbers are there before
    the receive, the others after it."""
    lengths = [0, 1, *range(980, 1040), 5000, 300_000]
    for nbytes in lengths:
        item = nbytes, bytes(range(256)) * (nbytes // 256) + b"x" * (nbytes % 256)
        if comm.rank == 0:
            if nbytes % 2:
                comm.send_object(item, 1, tag=7)
                comm.send(b"", 1, tag=9)
            else:
                time.sleep(0.001)
                comm.send_object(item, 1, tag=7)
        else:
            if nbytes % 2:
                comm.recv(bytearray(), 0, tag=9)  # the object before it is now in private memory
            found, status = comm.recv_object(0, 7, with_status=True)
            assert found == item
            assert (status.source, status.tag) == (0, 7)
            assert status.nbytes > nbytes
    if comm.rank == 0:
        comm.send(np.arange(3), 1, tag=7)
        comm.send_object("behind it", 1, tag=8)
    else:
        assert comm.recv_object(0, 8) == "behind it"
        with pytest.raises(Mismatch, match="stays for recv"):
            comm.recv_object(0, 7)
        assert comm.recv(np.zeros(3, int), 0, 7).count == 3
    comm.send_object((1, 2), comm.rank)
    assert comm.recv_object(comm.rank) == (1, 2)


@pytest.mark.parametrize("ring", [TINY, 1 << 20])
def test_objects_of_all_lengths(world_of, ring):
    world_of(2, SHMRING_MESSAGE_RING=ring)(objects_of_all_lengths)


def test_objects(world_of):
    assert world_of(3, SHMRING_MESSAGE_RING=TINY)(gather_objects, 1)[1] == [0, 2]


# ---- contexts --------------------------------------------------------------------------------------------


def use_two_contexts(comm):
    """Wildcards of one context never see a message of the other one, also among unexpected messages."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for count in (1, 1000):  # the second does not fit into the ring
        of_program, of_library = np.full(count, 1), np.full(count, 2)
        x, y, end = np.zeros(count, "i8"), np.zeros(count, "i8"), np.zeros(1, "i8")
        waiting = comm.irecv(x)
        sends = [comm.isend(of_library, after, 3, context=1), comm.isend(of_program, after, 3)]
        comm.sendrecv(np.array([3]), after, end, before, 4, 4, context=1)  # what came before it is set aside
        assert waiting.wait().tag == 3
        assert (x == 1).all()
        assert comm.iprobe() is None
        assert comm.iprobe(before, 3) is None
        found = comm.probe(context=1)
        assert (found.source, found.tag, found.count) == (before, 3, count)
        assert comm.recv(y, context=1).tag == 3
        assert (y == 2).all()
        assert comm.iprobe(context=1) is None
        for send in sends:
            send.wait()
        comm.barrier()
    comm.send_object("library", comm.rank, LAST_TAG, context=1)
    comm.send_object("program", comm.rank, LAST_TAG)
    item, status = comm.recv_object(context=1, with_status=True)
    return item, status.tag, comm.recv_object(tag=LAST_TAG)


@pytest.mark.parametrize("size", [1, 3])
def test_contexts_are_apart(world_of, size):
    found = world_of(size, SHMRING_MESSAGE_RING=4096)(use_two_contexts)
    assert found == [("library", LAST_TAG, "program")] * size


# ---- probe ------------------------------------------------------------------------------------------------


def look_before(comm):
    if comm.rank == 0:
        comm.send(np.arange(5.0), 1, tag=3)
        comm.send(np.arange(2, dtype="i4"), 1, tag=4)
        comm.barrier()
        return
    comm.barrier()
    assert comm.iprobe(tag=9) is None
    assert comm.iprobe(0, 4).count == 2
    status = comm.probe()
    assert (status.source, status.tag, status.count, status.nbytes, status.dtype) == (0, 3, 5, 40, "float64")
    assert "source=0" in repr(status)
    x = np.empty(status.count, status.dtype)
    comm.recv(x, status.source, status.tag)
    assert (x == np.arange(5.0)).all()
    assert comm.probe().tag == 4
    comm.recv(np.empty(2, "i4"))
    assert comm.iprobe() is None


def test_probe_tells_and_leaves_the_message(world_of):
    world_of(2)(look_before)


# ---- with collectives and threads -------------------------------------------------------------------------


def beside_collectives(comm, rounds):
    errors = []

    def pass_messages():
        try:
            pass_around(comm, rounds)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=pass_messages)
    thread.start()
    x = np.ones(5000)
    for _ in range(rounds):
        x[:] = 1
        comm.all_reduce(x)
        assert (x == comm.size).all()
    thread.join()
    assert not errors, errors


def test_messages_pass_while_another_thread_is_in_collectives(world_of):
    world_of(3, SHMRING_MESSAGE_RING=4096, SHMRING_CHUNK=256)(beside_collectives, 60)


def pass_in_groups(comm):
    halves = comm.split(comm.rank % 2)
    twin = comm.dup()
    x = np.zeros(1000, "i8")
    receives = [each.irecv(np.zeros(1000, "i8"), tag=1) for each in (twin, halves)]
    for each in (comm, halves, twin):  # the same tags everywhere, and each in its own order
        each.sendrecv(np.full(1000, each.rank), (each.rank + 1) % each.size, x)
        assert (x == (each.rank - 1) % each.size).all()
    for each in (halves, twin):
        each.send(x, (each.rank + 1) % each.size, tag=1)
    assert [receive.wait(SOON_S).tag for receive in receives] == [1, 1]
    halves.close()
    twin.close()
    pass_around(comm, 3)


def test_groups_have_messages_of_their_own(world_of):
    world_of(4, SHMRING_MESSAGE_RING=TINY)(pass_in_groups)


def overtake_a_collective(comm):
    """Rank 1 enters the barrier only after a message of rank 0, which is inside it in another thread."""
    if comm.rank == 0:
        thread = threading.Thread(target=comm.barrier)
        thread.start()
        time.sleep(0.05)
        comm.send(b"go on", 1)
        thread.join()
    else:
        comm.recv(bytearray(5))
        comm.barrier()


def test_messages_do_not_queue_behind_collectives(world_of):
    world_of(2)(overtake_a_collective)


def receive(comm, x):
    with contextlib.suppress(RuntimeError):  # the other thread was in iprobe
        return comm.recv(x)
    return receive(comm, x)


def another_thread_receives(comm):
    try:
        comm.iprobe()
    except RuntimeError:
        return True
    return False


def use_two_threads(comm):
    if comm.rank == 0:
        thread = threading.Thread(target=receive, args=(comm, bytearray(2)))
        thread.start()
        while not another_thread_receives(comm):
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="another thread"):
            comm.send(b"no", 1)
        with pytest.raises(RuntimeError, match="another thread"):
            comm.close()
        comm.barrier()
        thread.join()
    else:
        comm.barrier()
        comm.send(b"ok", 0)


def test_two_threads_at_once_are_refused(world_of):
    world_of(2)(use_two_threads)
