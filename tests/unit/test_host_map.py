"""The ranks that share a host, and the frames that describe this."""

import os

import pytest

from shmring._bootstrap import handshake, host_map
from shmring._bootstrap.handshake import BadFrame, Challenge
from shmring._bootstrap.host_map import Endpoint, Row
from shmring._bootstrap.world import world


def test_a_host_is_one_kernel_namespace_user_and_name(monkeypatch):
    own = host_map.identity("")
    assert own == host_map.identity("")
    assert len(own) == handshake.IDENTITY_NBYTES
    assert own != host_map.identity("a") != host_map.identity("b")
    for name, value in (("_read", "another boot"), ("_inode", "net:[1]")):
        with monkeypatch.context() as patch:
            patch.setattr(host_map, name, lambda path, value=value: value)
            assert host_map.identity("") != own
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert host_map.identity("") != own


def test_hosts_are_numbered_by_their_lowest_ranks():
    assert host_map.number_hosts(["x", "b", "x", "a", "b"]) == [0, 1, 0, 2, 1]


@pytest.mark.parametrize("nprocs", [1, 95, 96, 97, 4096])
def test_a_table_of_any_size_arrives(nprocs):
    rows = [Row(rank // 3, Endpoint("10.0.0.1" if rank % 2 else "fe80::1", rank)) for rank in range(nprocs)]
    read = []
    for packet in host_map.pack_table(rows, b"n" * 16):
        assert len(packet) <= handshake.FRAME_NBYTES
        nonce, page = host_map.unpack_page(packet, read, nprocs)
        assert nonce == b"n" * 16
        read += page
    assert read == rows


def test_a_table_that_cannot_be_is_refused():
    (page,) = host_map.pack_table(
        [Row(0, Endpoint("10.0.0.1", 1)), Row(1, Endpoint("10.0.0.2", 1))], bytes(16)
    )
    (jump,) = host_map.pack_table(
        [Row(0, Endpoint("10.0.0.1", 1)), Row(2, Endpoint("10.0.0.2", 1))], bytes(16)
    )
    for frame, rows, nprocs in (
        (page, [], 1),  # more ranks than there are
        (page, [Row(0, Endpoint("10.0.0.1", 1))], 3),  # the same ranks again
        (page[:-1], [], 2),
        (page + b"x", [], 2),
        (page[:-19] + b"\x05" + page[-18:], [], 2),  # no version of IP
        (jump, [], 2),
        (handshake.pack_frame(handshake.READY), [], 2),
    ):
        with pytest.raises(BadFrame):
            host_map.unpack_page(frame, rows, nprocs)


def test_an_endpoint_arrives():
    for endpoint in (Endpoint("192.168.7.9", 65535), Endpoint("2001:db8::7", 1)):
        assert host_map.unpack_endpoint(host_map.pack_endpoint(endpoint)) == endpoint
    assert host_map.unpack_endpoint(host_map.pack_endpoint(Endpoint("fe80::1%eth0", 7))).address == "fe80::1"
    with pytest.raises(BadFrame):
        host_map.unpack_endpoint(handshake.pack_frame(handshake.READY))


def test_a_tag_tells_worlds_apart():
    first, second = world(2), world(2)
    assert first.tag != second.tag
    assert Challenge.unpack(Challenge(0, bytes(32), bytes(32), first.tag).pack()).tag == first.tag
