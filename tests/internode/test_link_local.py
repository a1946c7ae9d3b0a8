"""Link-local IPv6 addresses, which are valid with an interface only. Each host names its own interfaces.

Hosts are stand-ins (tests/support/hosts.py).
"""

import dataclasses
import socket
from unittest import mock

import pytest
from hosts import INTERFACE, Hosts, NoHosts
from new_ranks import RIGHT, NewRanks, values_of
from ranks import CALL_TIMEOUT_S, Ranks

import shmring
from shmring._lifecycle import internode
from tests.collectives.test_groups import total

INTERFACES = INTERFACE, "net7"
ADDRESS = "fe80::1"
PORT = 4711


@pytest.fixture
def two_hosts():
    """Two hosts, each with a link-local address and another name of its interface."""
    try:
        with Hosts(2) as hosts:
            hosts[1].run("ip", "link", "set", INTERFACE, "down")
            hosts[1].run("ip", "link", "set", INTERFACE, "name", INTERFACES[1], "up")
            for host, interface in zip(hosts, INTERFACES, strict=True):
                host.run("ip", "addr", "add", f"fe80::{host.index + 1}/64", "dev", interface, "nodad")
            yield hosts
    except NoHosts as missing:
        pytest.skip(f"no stand-ins for hosts: {missing}")


def meet_again(_, world, first_host):
    """Meet, then as a copy, after an error, and with a new rank. Return the sums, and how the rank ended."""
    rank = 0 if first_host.is_here() else 1
    world = dataclasses.replace(world, address=f"[{ADDRESS}%{INTERFACES[rank]}]:{PORT}")
    new = NewRanks() if rank == 0 else None
    with shmring.init(world, rank=rank, timeout=CALL_TIMEOUT_S) as comm:
        with comm.dup() as same:
            found = [total(same)]
        if rank == 1:
            comm.abort("enough")
        with pytest.raises(shmring.Aborted):
            comm.barrier()
        left = comm.shrink()
    found.append(total(left))
    with left.grow(1, new and new.invite) as larger:
        larger.all_reduce(values_of(rank))
    return [*found, new.end(CALL_TIMEOUT_S) if new else RIGHT]


def test_ranks_at_link_local_addresses_meet_again(two_hosts):
    with Ranks(2, on=two_hosts) as ranks:
        assert ranks(meet_again, shmring.world(2), two_hosts[0]) == [[1, 1, RIGHT]] * 2


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (("fe80::1", PORT, 0, 1), f"[fe80::2%lo]:{PORT}"),
        (("fe80::1", PORT, 7, 0), f"[fe80::2]:{PORT}"),  # a flow label alone
        (("10.0.0.1", PORT), f"[fe80::2]:{PORT}"),
    ],
)
def test_the_interface_of_invitations_is_known_from_the_start(monkeypatch, own, expected):
    """A look-up in a group's start could fail on one rank alone."""
    for name in ("Channels", "InterNodeConns", "Notifications"):
        monkeypatch.setattr(internode, name, mock.Mock())
    connection = mock.Mock(getsockname=lambda: own)
    engine, mesh = mock.Mock(message_rings=tuple), mock.Mock(data={1: connection})
    links = internode.InterNodeLinks(engine, mock.Mock(), mesh, b"")
    monkeypatch.delattr(socket, "if_indextoname")
    assert links.address_here(f"[fe80::2]:{PORT}") == expected


def test_a_link_local_address_alone_is_refused():
    for address in (ADDRESS, f"[{ADDRESS.upper()}]:{PORT}"):
        with pytest.raises(ValueError, match="link-local address with an interface of this host"):
            shmring.world(2, address=address)
    shmring.world(2, address=f"[{ADDRESS}%{INTERFACE}]:{PORT}")
