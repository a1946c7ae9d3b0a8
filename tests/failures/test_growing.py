"""grow: new ranks join, or do not come, and ranks die meanwhile."""

import ctypes
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import leftovers
import numpy as np
import pytest
from ranks import FORK, Died, Ranks, free_port, interrupted, raised, until_there
from waiting import counted_s, wait_until

import shmring
from shmring._lifecycle import grow as growing
from shmring._lifecycle import startup

SHORT_S, LONG_S = 1.0, 15.0
SOON_S = 10  # far below LONG_S, on a machine that stalls at times
WITHIN = f" within {SHORT_S:g} s;"  # the timeout that the caller gave, and no rest of it


def check_works(comm, ranks):
    """Check calls of several kinds; ranks[r] is the value that rank r gives."""
    x = np.full(50_000, ranks[comm.rank] + 1.0, "f4")
    comm.all_reduce(x)
    assert (x == sum(ranks) + len(ranks)).all()
    assert comm.all_gather_object(ranks[comm.rank]) == list(ranks)
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = np.zeros(3)
    if comm.size > 1:
        comm.sendrecv(np.full(3, float(comm.rank)), to, got, source)
        assert (got == source).all()
    comm.barrier()


def write_to(path):
    """Return a function that passes a world to each new rank by a file."""

    def invite(world, rank):
        new = path.with_name(f"{path.name}.{world.nprocs - 1 - rank}")
        new.with_suffix(".new").write_bytes(pickle.dumps((world, rank)))
        new.with_suffix(".new").rename(new)

    return invite


def come(_, path, number, node=None):
    """A new rank, the number-th from the last: return its communicator."""
    os.environ.pop("SHMRING_NODE", None)
    if node is not None:
        os.environ["SHMRING_NODE"] = f"node {node}"
    invitation = path.with_name(f"{path.name}.{number}")
    until_there(invitation)
    comm = shmring.init(*pickle.loads(invitation.read_bytes()), timeout=LONG_S)
    path.with_name(f"{path.name}.{number}.came").touch()
    return comm


def fields_of(comm):
    check_works(comm, tuple(range(comm.size)))
    with comm:
        return comm.rank, comm.size, comm.epoch, comm.num_nodes


def come_and_work(_, path, number, node=None):
    return fields_of(come(None, path, number, node))


def grow_and_work(comm, path, count, address=None):
    old, arrays = comm, (comm.full(1000, 1.0), np.ones(1000))
    for array in arrays:
        comm.all_reduce(array)
    comm = comm.grow(count, write_to(path), address=address)
    with pytest.raises(shmring.Closed):
        old.barrier()
    assert all((array == old.size).all() for array in arrays)
    return fields_of(comm)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_new_ranks_come_to_a_host(tmp_path, size, count):
    with Ranks(size) as ranks, Ranks(count) as new:
        ranks.meet()
        new._order(lambda number: ("call", come_and_work, (tmp_path / "world", number)))
        found = ranks(grow_and_work, tmp_path / "world", count)
        came = new.answers()
    total = size + count
    assert found == [(rank, total, 1, 1) for rank in range(size)]
    assert came == [(total - 1 - number, total, 1, 1) for number in range(count)]


@pytest.mark.parametrize(
    ("nodes", "node", "has_address"),
    [(None, None, True), (None, 1, True), ([0, 1], 0, False), ([0, 1], 2, False), ([0, 1], 1, True)],
)
def test_new_ranks_come_over_hosts(tmp_path, nodes, node, has_address):
    address = f"127.0.0.1:{free_port()}" if has_address else None
    with Ranks(2, nodes=nodes) as ranks, Ranks(1) as new:
        if nodes is None:
            ranks.meet(SHMRING_NODE="node 0")
        else:
            ranks.meet()
        new.begin(come_and_work, tmp_path / "world", 0, 0 if node is None else node)
        found = ranks(grow_and_work, tmp_path / "world", 1, address)
        came = new.answers()
    hosts = len({*(nodes or [0]), node or 0})
    assert found == [(0, 3, 1, hosts), (1, 3, 1, hosts)]
    assert came == [(2, 3, 1, hosts)]


def replace_the_dead(comm, path):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(shmring.RankFailed):
        comm.barrier()
    comm = comm.shrink().grow(1, write_to(path))
    return fields_of(comm)


@pytest.mark.parametrize("nodes", [None, [0, 1, 1]], ids=str)
def test_a_dead_rank_is_replaced(tmp_path, nodes):
    with Ranks(3, nodes=nodes) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come_and_work, tmp_path / "world", 0, 1 if nodes else None)
        found = ranks.outcomes(replace_the_dead, tmp_path / "world")
        came = new.answers()
    hosts = 2 if nodes else 1
    assert (found[0], found[2]) == ((0, 3, 2, hosts), (1, 3, 2, hosts))
    assert came == [(2, 3, 2, hosts)]


def grow_in_vain(comm, path):
    """Grow for ranks of which one does not come; go on with the old communicator, and grow again."""
    begin_s, begin = time.monotonic(), counted_s()
    with pytest.raises(shmring.Timeout) as caught:
        comm.grow(2, write_to(path.with_name("first")), timeout=SHORT_S)
    assert time.monotonic() - begin_s >= SHORT_S
    assert counted_s() - begin < SOON_S
    check_works(comm, tuple(range(comm.size)))
    return caught.value.rank, fields_of(comm.grow(1, write_to(path)))


def come_twice(_, path, node):
    with pytest.raises(shmring.Timeout) as caught:
        come(None, path.with_name("first"), 0, node)
    return caught.value.rank, come_and_work(None, path, 0, node)


@pytest.mark.parametrize("nodes", [None, [0, 0, 1]], ids=str)
def test_a_rank_that_does_not_come_is_named(tmp_path, nodes):
    with Ranks(3, nodes=nodes) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come_twice, tmp_path / "world", 1 if nodes else None)
        found = ranks(grow_in_vain, tmp_path / "world")
        came = new.answers()
    hosts = 1 if nodes is None else 2
    assert found == [(3, (rank, 4, 1, hosts)) for rank in range(3)]
    assert came == [(3, (3, 4, 1, hosts))]


def grow_alone(comm, address):
    with pytest.raises(shmring.Timeout) as caught:
        comm.grow(1, lambda *_: None, address=address, timeout=SHORT_S)
    return str(caught.value)


@pytest.mark.parametrize("over_hosts", [False, True])
def test_a_rank_that_does_not_come_is_reported_with_the_timeout(over_hosts):
    address = f"127.0.0.1:{free_port()}" if over_hosts else None
    with Ranks(1) as ranks:
        text = ranks.meet()(grow_alone, address)[0]
    assert text.startswith("rank 1 of 2 did not come" + (f" to {address}" if address else "") + WITHIN)


def grow_without_a_start(comm, path):
    """Grow with a rank that joins and does not start; go on with the old communicator."""
    with pytest.raises(shmring.Timeout, match=WITHIN) as caught:
        comm.grow(1, write_to(path), timeout=SHORT_S)
    check_works(comm, tuple(range(comm.size)))
    path.with_name(f"{comm.rank}.over").touch()
    return caught.value.rank, "did not come to the start" in str(caught.value)


def come_and_not_start(_, path):
    def wait(*_, **__):
        for rank in (0, 1):
            until_there(path.with_name(f"{rank}.over"))

    known, startup._check_liveness = startup._check_liveness, wait
    try:
        with pytest.raises(shmring.Error):
            come(None, path, 0)
    finally:
        startup._check_liveness = known


def test_a_rank_that_joins_and_does_not_start_is_named(tmp_path):
    with Ranks(2) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come_and_not_start, tmp_path / "world")
        assert ranks(grow_without_a_start, tmp_path / "world") == [(2, True)] * 2
        assert new.answers() == [None]


def invite_late(comm, over):
    """Grow with a rank 0 whose invite takes longer than the timeout of the other rank."""
    with pytest.raises(shmring.Timeout) as caught:
        comm.grow(1, lambda *_: until_there(over), timeout=SHORT_S if comm.rank else LONG_S)
    if comm.rank:
        over.touch()
    return caught.value.rank, str(caught.value)


def test_an_invitation_that_takes_too_long_is_reported_with_the_timeout(tmp_path):
    with Ranks(2) as ranks:
        of_0, of_1 = ranks.meet()(invite_late, tmp_path / "over")
    assert of_0 == of_1
    assert of_0[0] == 0
    assert WITHIN in of_0[1]


def cannot_invite(comm, path):
    def refuse(world, rank):
        raise KeyError("no room")

    with pytest.raises(KeyError if comm.rank == 0 else shmring.Error, match="no room"):
        comm.grow(1, refuse)
    with pytest.raises(
        TypeError if comm.rank == 0 else shmring.Error, match="invite is None; give a function"
    ):
        comm.grow(1, None if comm.rank == 0 else refuse)
    for wrong, kind in ((0, ValueError), ("many", TypeError), (1 << 20, ValueError)):
        with pytest.raises(kind):
            comm.grow(wrong, refuse)
    check_works(comm, tuple(range(comm.size)))
    return fields_of(comm.grow(1, write_to(path)))


def test_an_invitation_that_fails_harms_nothing(tmp_path):
    with Ranks(2) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come_and_work, tmp_path / "world", 0)
        assert ranks(cannot_invite, tmp_path / "world") == [(0, 3, 1, 1), (1, 3, 1, 1)]
        assert new.answers() == [(2, 3, 1, 1)]


def fail_after_an_invitation(comm, path, address):
    """Fail after the invitation of the first of two new ranks."""
    write = write_to(path)

    def invite(world, rank):
        if rank > comm.size:
            raise KeyError("no room")
        write(world, rank)

    with pytest.raises(KeyError if comm.rank == 0 else shmring.Error, match="no room"):
        comm.grow(2, invite, address=address)
    check_works(comm, tuple(range(comm.size)))
    path.with_name(f"{comm.rank}.over").touch()


def come_to_a_failure(_, path, is_late, node):
    if is_late:
        until_there(path.with_name("0.over"))
    with pytest.raises(shmring.RankFailed, match=r"rank 0 (does not wait|ended)") as caught:
        come(None, path, 1, node)
    return caught.value.rank


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("nodes", "has_address"), [(None, False), (None, True), ([0, 1], False), ([0, 1], True)]
)
def test_a_new_rank_does_not_wait_for_a_meeting_that_has_failed(tmp_path, nodes, has_address, is_late):
    address = f"127.0.0.1:{free_port()}" if has_address else None
    with Ranks(2, nodes=nodes) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come_to_a_failure, tmp_path / "world", is_late, nodes and 1)
        ranks(fail_after_an_invitation, tmp_path / "world", address)
        assert new.answers() == [0]


def tell_how_it_ended(world, rank, pipe):
    pipe.send(raised(shmring.init, world, rank, timeout=LONG_S))


def fail_after_a_fork(comm):
    """Fail after a new rank has been forked, which inherits what this rank has open."""
    pipe, end = FORK.Pipe()

    def invite(world, rank):
        child = FORK.Process(target=tell_how_it_ended, args=(world, rank, end))
        child.start()
        raise KeyError("no room")

    with pytest.raises(KeyError if comm.rank == 0 else shmring.Error, match="no room"):
        comm.grow(1, invite)
    check_works(comm, tuple(range(comm.size)))
    return pipe.recv() if comm.rank == 0 else None


@pytest.mark.parametrize("nodes", [None, [0, 1]], ids=str)
def test_a_forked_rank_does_not_keep_the_meeting_open(nodes):
    with Ranks(2, nodes=nodes) as ranks:
        how, _ = ranks.meet()(fail_after_a_fork)
    assert how.startswith(("RankFailed: rank 0 does not wait", "RankFailed: rank 0 ended")), how


SETTINGS = {"linger_s": 0.001, "timeout_s": 7.0, "wire": "bf16"}


def is_settable(comm, name):
    try:
        setattr(comm, name, getattr(comm, name))
    except AttributeError:
        return False
    return True


def settings_of_made(comm, path):
    """Return what may be set of a communicator, and the settings of those that it makes."""
    settable = [name for name in dir(comm) if not callable(getattr(comm, name)) and is_settable(comm, name)]
    for name, value in SETTINGS.items():
        setattr(comm, name, value)
    to_shrink = comm.dup()
    to_shrink.wire = comm.wire
    made = [comm.split(0), comm.group([1, 0]), comm.dup(), to_shrink.shrink(), comm.grow(1, write_to(path))]
    return settable, [{name: getattr(each, name) for name in SETTINGS} for each in made]


@pytest.mark.parametrize("nodes", [None, [0, 1]], ids=str)
def test_a_communicator_has_the_settings_of_the_one_that_made_it(tmp_path, nodes):
    with Ranks(2, nodes=nodes) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come, tmp_path / "world", 0, nodes and 0)
        for settable, made in ranks(settings_of_made, tmp_path / "world"):
            assert settable == list(SETTINGS)
            assert made == [SETTINGS | {"wire": "native"}] * 3 + [SETTINGS] * 2


def cannot_join(comm, path):
    """Rank 1 fails at once, so nobody else can join."""
    join = startup.join
    if comm.rank == 1:
        startup.join = refuse_to_join
    kind, text = (shmring.Timeout, "ranks 1, 2 of 3") if comm.rank == 0 else (shmring.Error, "no socket")
    try:
        with pytest.raises(kind, match=text) as caught:
            comm.grow(1, lambda world, rank: None, timeout=SHORT_S)
    finally:
        startup.join = join
    check_works(comm, tuple(range(comm.size)))
    return caught.value.__notes__, fields_of(comm.grow(1, write_to(path)))


def refuse_to_join(*_, **__):
    raise OSError("no socket")


def test_a_rank_that_cannot_join_harms_nothing(tmp_path):
    with Ranks(2) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come_and_work, tmp_path / "world", 0)
        (of_0, fields_0), (of_1, fields_1) = ranks(cannot_join, tmp_path / "world")
        assert (fields_0, fields_1) == ((0, 3, 1, 1), (1, 3, 1, 1))
        assert new.answers() == [(2, 3, 1, 1)]
    assert of_0 == ["rank 1 could not join: Error: meeting as rank 1 of a communicator failed: no socket"]
    assert of_1[0].startswith("rank 0 could not join: Timeout: ")


def disagree(comm):
    comm.grow(1 + comm.rank, lambda world, rank: None)


def test_ranks_that_want_different_numbers_do_not_match():
    with Ranks(2) as ranks:
        outcomes = ranks.meet().outcomes(disagree)
    assert [type(outcome) for outcome in outcomes] == [shmring.Mismatch] * 2
    assert "grow" in str(outcomes[0])


def grow_beside_a_death(comm, path):
    """Rank 1 dies while the others wait for a new rank, which never comes."""
    begin = counted_s()
    if comm.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(shmring.RankFailed) as caught:
        comm.grow(1, write_to(path), timeout=LONG_S)
    assert counted_s() - begin < SOON_S
    with comm.shrink() as left:
        check_works(left, left.parent_ranks)
        return caught.value.rank, left.parent_ranks


@pytest.mark.parametrize("nodes", [None, [0, 0, 1], [0, 1, 1]], ids=str)
def test_a_death_meanwhile_is_no_timeout(tmp_path, nodes):
    with Ranks(3, nodes=nodes) as ranks:
        outcomes = ranks.meet().outcomes(grow_beside_a_death, tmp_path / "world")
    assert isinstance(outcomes[1], Died)
    assert [outcomes[0], outcomes[2]] == [(1, (0, 2))] * 2


def grow_for_a_victim(comm, path):
    begin = counted_s()
    with pytest.raises(shmring.Error) as caught:
        comm.grow(2, write_to(path), timeout=5.0)
    assert counted_s() - begin < SOON_S
    check_works(comm, tuple(range(comm.size)))
    return caught.value.rank


def die_while_joining(_, path):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    come(None, path, 0)


def test_a_new_rank_that_dies_is_named_and_the_others_go_on(tmp_path):
    with Ranks(2) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(die_while_joining, tmp_path / "world")
        found = ranks(grow_for_a_victim, tmp_path / "world")
        assert isinstance(new.answers()[0], Died)
    assert found in ([3, 3], [2, 2])  # the dead one if its connection was seen, else the one that is late


def fail_at_the_end(comm, path, victim):
    """One rank has no memory for its communicator after all have met; none goes on with the larger one."""
    if comm.rank == victim:
        begin = growing.join_and_begin

        def join_in_vain(*arguments, **keywords):
            parts = begin(*arguments, **keywords)
            parts.engine.abandon(parts)
            raise MemoryError("no room")

        growing.join_and_begin = join_in_vain
    with pytest.raises(MemoryError if comm.rank == victim else shmring.Error):
        comm.grow(1, write_to(path))
    if comm.rank == victim:
        growing.join_and_begin = begin
    check_works(comm, tuple(range(comm.size)))
    return fields_of(comm.grow(1, write_to(path.with_name("second"))))


def come_in_vain(_, path, node):
    comm = come(None, path, 0, node)
    with pytest.raises(shmring.RankFailed):
        comm.barrier()
    comm.close()
    return come_and_work(None, path.with_name("second"), 0, node)


@pytest.mark.parametrize("nodes", [None, [0, 0, 1]], ids=str)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_all_ranks_go_on_with_the_larger_communicator_or_none(tmp_path, nodes, victim):
    with Ranks(3, nodes=nodes) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come_in_vain, tmp_path / "world", 1 if nodes else None)
        found = ranks(fail_at_the_end, tmp_path / "world", victim)
        came = new.answers()
    hosts = 1 if nodes is None else 2
    assert found == [(rank, 4, 1, hosts) for rank in range(3)]
    assert came == [(3, 4, 1, hosts)]


def interrupt(comm, path):
    if comm.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda: comm.grow(1, write_to(path), timeout=LONG_S), 0.3)
        return shmring.Aborted
    with pytest.raises(shmring.Error) as caught:
        comm.grow(1, write_to(path), timeout=LONG_S)
    return type(caught.value)


def test_ctrl_c_on_one_rank_ends_the_wait_of_all(tmp_path):
    begin = counted_s()
    with Ranks(2) as ranks:
        assert ranks.meet()(interrupt, tmp_path / "world") == [shmring.Aborted] * 2
    assert counted_s() - begin < SOON_S


def let_two_handlers_raise(*_):
    """Receive two signals at once: the second handler runs where the first one's exception is handled."""

    def raise_from_handler(number, frame):
        raise KeyboardInterrupt if number == signal.SIGUSR1 else SystemExit

    both = int(signal.SIGUSR1), int(signal.SIGUSR2)
    for number in both:
        signal.signal(number, raise_from_handler)
    list(map(ctypes.CDLL(None)["raise"], both))  # no bytecode runs between the two


def what_shmring_has():
    """Return how many threads and descriptors of segments this process has."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    nsegments = sum("memfd:shmring" in os.readlink(link) for link in links if link.is_symlink())
    return leftovers.thread_names().count("shmring-life"), nsegments


def grow_with_two_signals(comm, path):
    """Rank 1 is interrupted twice when all have met. It has left the larger communicator then."""
    before = what_shmring_has()
    if comm.rank != 1:
        with pytest.raises(shmring.Error):
            comm.grow(1, write_to(path))
        return
    all_go_on, growing.Agreement.all_go_on = growing.Agreement.all_go_on, let_two_handlers_raise
    try:
        comm.grow(1, write_to(path))
    except SystemExit:  # here, while the traceback refers to everything that was made
        wait_until(lambda: what_shmring_has() == before, "no thread or descriptor is left")
    finally:
        growing.Agreement.all_go_on = all_go_on


@pytest.mark.parametrize("nodes", [None, [0, 1]], ids=str)
def test_two_signals_at_the_end_of_grow_leave_nothing(tmp_path, nodes):
    with Ranks(2, nodes=nodes) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come_for_nobody, tmp_path / "world", 1 if nodes else None)
        ranks(grow_with_two_signals, tmp_path / "world")
        assert new.answers() == [None]


def again_and_again(comm, folder, times, number=None):
    """Grow by one rank and go back by shrink: rank 2 of the larger communicator leaves."""
    counts = []
    for turn in range(times):
        comm = comm.grow(1, write_to(folder / str(turn)))
        comm.all_reduce(np.ones(10_000))
        until_there(folder / f"{turn}.0.came")
        with pytest.raises(shmring.RankFailed):
            comm.barrier()
        comm = comm.shrink()
        maps = Path("/proc/self/maps").read_text().count("memfd:shmring")
        counts.append((len(os.listdir("/proc/self/fd")), maps, threading.active_count()))
    comm.close()
    return comm.epoch, counts


def come_and_leave(_, folder, times):
    for turn in range(times):
        with come(None, folder / str(turn), 0) as comm:
            comm.all_reduce(np.ones(10_000))


def test_nothing_adds_up(tmp_path):
    with Ranks(2) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come_and_leave, tmp_path, 6)
        for epoch, counts in ranks(again_and_again, tmp_path, 6):
            assert epoch == 12
            assert len(set(counts[2:])) == 1, counts
        new.answers()


def die_in_the_vote(comm, path):
    """Rank 1 dies while it waits for ranks 2 and 3, which come later to the vote."""
    begin = growing.join_and_begin

    def come_late(*arguments, **keywords):
        parts = begin(*arguments, **keywords)
        if comm.rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif comm.rank > 1:
            time.sleep(0.5)
        return parts

    growing.join_and_begin = come_late
    try:
        with pytest.raises(shmring.RankFailed):
            comm.grow(1, write_to(path))
    finally:
        growing.join_and_begin = begin
    with comm.shrink() as left:
        check_works(left, left.parent_ranks)
        return left.parent_ranks


def come_for_nobody(_, path, node):
    """A new rank that the old ones have given up does not go on alone."""
    comm = come(None, path, 0, node)
    with pytest.raises(shmring.RankFailed):
        comm.barrier()
    with pytest.raises(shmring.RankFailed, match=f"have gone on without rank {comm.rank}"):
        comm.shrink()
    comm.close()


@pytest.mark.parametrize("nodes", [None, [0, 0, 1, 1]], ids=str)
def test_a_death_in_the_vote_does_not_divide_the_survivors(tmp_path, nodes):
    with Ranks(4, nodes=nodes) as ranks, Ranks(1) as new:
        ranks.meet()
        new.begin(come_for_nobody, tmp_path / "world", 1 if nodes else None)
        outcomes = ranks.outcomes(die_in_the_vote, tmp_path / "world")
        assert new.answers() == [None]
    assert isinstance(outcomes[1], Died)
    assert [outcomes[0], *outcomes[2:]] == [(0, 2, 3)] * 3
