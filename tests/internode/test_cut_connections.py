"""Connections between hosts that are reset, cut or unplugged: calls end on both sides, and name the rank.

Hosts are stand-ins (tests/support/hosts.py), whose links can go down.
"""

import contextlib
import os
import socket
import struct

import pytest
from combinations import each_value, first
from ranks import Died, turns, when_there
from waiting import counted_s

import shmring
from shmring._diagnostics import failures
from tests.collectives.test_errors import assert_all, ones
from tests.internode.test_internode_failures import (
    LAYOUTS,
    SOON_S,
    across,
    in_background,
    large,
    moved,
    small,
    survivors,
)


def connections():
    """The TCP connections of this process, all of them the communicator's."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield from connection_at(int(name))


def connection_at(fd):
    with socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family == socket.AF_INET:
            yield fd, connection


def reset_all(comm, victim, ends):
    comm.barrier()
    if comm.rank == victim:
        nothing = os.open("/dev/null", os.O_RDWR)
        fds = []
        for fd, connection in connections():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            fds.append(fd)
        assert fds
        if ends:
            os._exit(3)
        for fd in fds:
            os.dup2(nothing, fd)
    comm.all_reduce(ones(60_000))


@each_value({"layout, victim": [("1+1", 1), ("2+2", 0), ("2+1+3", 2)], "ends": [False, True]})
def test_connections_that_are_reset_are_a_failure_on_all_sides(layout, victim, ends):
    with across(layout) as ranks:
        outcomes = ranks.meet().outcomes(reset_all, victim, ends)
    own = outcomes.pop(victim)
    assert isinstance(own, Died if ends else shmring.RankFailed), own
    assert ends or own.rank is not None
    for error in assert_all(outcomes, shmring.RankFailed):
        assert ends is False or error.rank == victim


def damage_all(comm, victim, call):
    """Put bytes that are no head between the messages of one rank, on all its connections."""
    comm.barrier()
    if comm.rank == victim:
        for _fd, connection in connections():
            connection.sendall(bytes(40))
    if call == "all_reduce":
        comm.all_reduce(ones(60_000))
    elif comm.rank == victim:
        comm.recv(ones(1), 1 - victim)
    else:
        comm.recv(ones(1), victim)


@each_value({"layout, victim": [("1+1", 1), ("2+2", 0)], "call": ["all_reduce", "recv"]})
def test_damaged_bytes_are_a_failure_of_their_sender_on_all_ranks(world_over_hosts, layout, victim, call):
    outcomes = world_over_hosts(LAYOUTS[layout]).outcomes(damage_all, victim, call)
    for error in assert_all(outcomes, shmring.RankFailed):
        assert error.rank == victim
        assert error.cause == failures.DAMAGED


def call_until(comm, call, path_when_running):
    call_of = {"small": small, "large": large, "moved": moved, "background": in_background}[call]
    for _ in turns(comm, path_when_running):
        call_of(comm)


CUT_TIMEOUT_S = 4


CUT = [("1+1", "background"), ("2+2", "large"), ("2+1+3", "moved")]
CUT += [("1+1", "small"), ("2+2", "small"), ("2+1+3", "small"), ("2+1+3", "large")]


@pytest.mark.parametrize(("layout", "call"), first(3, CUT))
def test_a_cut_link_ends_calls_on_both_sides(tmp_path, world_over, layout, call):
    nodes = LAYOUTS[layout]
    last = max(nodes)
    ranks = world_over(nodes, timeout_s=CUT_TIMEOUT_S)
    ranks.begin(call_until, call, str(tmp_path / "runs"))
    when_there(tmp_path / "runs", ranks)
    begin = counted_s()
    ranks.hosts[-1].down()
    outcomes = ranks.answers()
    took_s = counted_s() - begin
    ranks.hosts[-1].up()
    for rank, error in enumerate(outcomes):
        assert isinstance(error, (shmring.Timeout, shmring.RankFailed)), outcomes
        assert (nodes[error.rank] == last) != (nodes[rank] == last), (rank, outcomes)
    assert took_s < CUT_TIMEOUT_S + SOON_S


@each_value({"layout": ["1+1", "2+2", "2+1+3"], "pulled": [False, True]})
def test_a_host_that_dies_with_its_link_or_without(tmp_path, world_over, layout, pulled):
    """Kill a host; pulled: with its link down, so no peer is notified, and its connections stay half-open."""
    nodes = LAYOUTS[layout]
    ranks = world_over(nodes, timeout_s=CUT_TIMEOUT_S)
    ranks.begin(call_until, "large", str(tmp_path / "runs"))
    when_there(tmp_path / "runs", ranks)
    begin = counted_s()
    host = ranks.hosts[-1]
    if pulled:
        host.down()
    host.kill()
    dead = [rank for rank, node in enumerate(nodes) if node == max(nodes)]
    outcomes = survivors(ranks.answers(), *dead)
    took_s = counted_s() - begin
    for error in outcomes:
        assert isinstance(error, (shmring.Timeout, shmring.RankFailed) if pulled else shmring.RankFailed)
        assert error.rank in dead
    assert took_s < CUT_TIMEOUT_S + SOON_S


@pytest.mark.parametrize(
    ("text", "kind", "rank", "host"),
    [
        ("rank 3 on 10.0.0.1 failed: it was killed; more", shmring.RankFailed, 3, "10.0.0.1"),
        ("rank 3 on another host failed: it was killed", shmring.RankFailed, 3, "another host"),
        ("rank 3 gave up: it raised", shmring.Aborted, 3, None),
        ("no rank", shmring.Aborted, None, None),
    ],
)
def test_an_error_of_which_only_the_text_is_known_names_the_rank(text, kind, rank, host):
    found = failures._passed_on(text)
    assert (type(found), found.rank) == (kind, rank)
    assert host is None or found.host == host
