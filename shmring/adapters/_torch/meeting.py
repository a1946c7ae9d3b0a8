"""Connect the ranks of a new group through torch's store. This module does not import torch."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import shmring

from ..._config.settings import address_text
from .._tasks import free_port
from .unfit import Unfit

_NOBODY = "192.0.2.1"  # a documentation address, RFC 5737: the route to it leaves this host
_ASKED = "asked by rank 0"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5e-3, 0.05
_LONGEST_PAUSE_FOR_KEYS_S = 0.005  # all ranks wait for rank 0, which waits for keys
_GRACE_S = 0.5  # rank 0 knows who is missing, and tells the others
_WORLD, _FAILED = "world", "failed"


def meet(
    store: Any,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    check: Callable[[], None] | None = None,
) -> shmring.Comm:
    """Return a communicator of the ranks that share the store. Collective.

    check: called while ranks are missing; it may raise.
    """
    with _named_by(check):
        return _init(_agree(store, rank, size, timeout, check), rank, timeout, check)


def meet_in_place_of_gloo(
    store: Any,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    check: Callable[[], None] | None = None,
) -> shmring.Comm:
    """Return a communicator as `meet`. Raises Unfit on all ranks if their versions of shmring differ."""
    try:
        with _named_by(check):
            fields = _agree(store, rank, size, timeout, check)
    except shmring.RankFailed:
        raise
    except Exception as error:
        error.add_note("shmring stands in gloo's place: set SHMRING_REPLACES=gloo for all ranks or for none")
        raise
    versions = sorted(set(fields["versions"]))
    if len(versions) > 1:
        raise Unfit(f"its ranks have different versions of shmring, {' and '.join(versions)}")
    with _named_by(check):
        return _init(fields, rank, timeout, check)


def meet_afresh(
    store: Any,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    check: Callable[[], None],
) -> shmring.Comm:
    """Return a communicator as `meet`, through a store that has no entries of an earlier meeting.

    Such a meeting takes one round, since no rank has to find out which of several meetings is the last one.
    check: called while ranks are missing; it may raise.
    """
    until = time.monotonic() + timeout.total_seconds()
    if rank > 0:
        store.set(_afresh_key(rank), json.dumps(_introduction()))

        def check_all() -> None:
            check()
            if store.check([_FAILED]):
                raise _unpack_error(store.get(_FAILED))

        _await(store, {_WORLD: 0}, until + _GRACE_S, check_all)
        return _init_until(until, json.loads(store.get(_WORLD)), rank, check_all)
    keys = [_afresh_key(other) for other in range(1, size)]
    try:
        _await(store, dict(zip(keys, range(1, size), strict=True)), until, check)
        fields = _make_world(size, [json.loads(store.get(key)) for key in keys])
        store.set(_WORLD, json.dumps(fields))
        return _init_until(until, fields, rank, check)
    except shmring.Error as error:
        # A rank that has not connected to this one has no other way to learn of it.
        store.set(_FAILED, _pack_error(error))
        raise


def _init_until(until: float, fields: dict[str, Any], rank: int, check: Callable[[], None]) -> shmring.Comm:
    return _init(fields, rank, datetime.timedelta(seconds=max(until - time.monotonic(), 1e-3)), check)


def _pack_error(error: shmring.Error) -> str:
    kinds = (shmring.RankFailed, shmring.Timeout, shmring.Error)
    kind = next(kind.__name__ for kind in kinds if isinstance(error, kind))
    return json.dumps({"kind": kind, "text": str(error), "rank": error.rank})


def _unpack_error(packed: bytes) -> shmring.Error:
    fields = json.loads(packed)
    error: shmring.Error = getattr(shmring, fields["kind"])(fields["text"], rank=fields["rank"])
    return error


def _await(
    store: Any,
    rank_of_key: dict[str, int],
    until: float,
    check: Callable[[], None] | None = None,
    mend: str = "call reconfigure with the same uuid and handles on all of them, or allow a longer timeout",
) -> None:
    """Wait until the store has all keys; each is set by a rank. mend: what to do about missing ranks."""
    pause_s, keys = _FIRST_PAUSE_S, list(rank_of_key)
    while keys and not store.check(keys):
        if check is not None:
            check()
        if time.monotonic() > until:
            ranks = [rank for key, rank in rank_of_key.items() if not store.check([key])]
            if ranks:
                named = ", ".join(map(str, ranks))
                raise shmring.Timeout(
                    f"rank(s) {named} of the new group did not come in time: {mend}", rank=ranks[0]
                )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_FOR_KEYS_S)


def _afresh_key(rank: int) -> str:
    return f"rank {rank}"


def _introduction() -> dict[str, Any]:
    return {"host": shmring.host_id(), "version": shmring.__version__}


def _agree(
    store: Any, rank: int, size: int, timeout: datetime.timedelta, check: Callable[[], None] | None
) -> dict[str, Any]:
    """Return what rank 0 tells all ranks of the world that it has made."""
    timeout_s = timeout.total_seconds()
    return _lead(store, size, timeout_s, check) if rank == 0 else _join(store, rank, size, timeout_s, check)


@contextlib.contextmanager
def _named_by(check: Callable[[], None] | None) -> Iterator[None]:
    """Let the check raise first after an error: one of the store, or of another rank, names no dead rank."""
    try:
        yield
    except Exception:
        if check is not None:
            check()
        raise


def _init(
    fields: dict[str, Any],
    rank: int,
    timeout: datetime.timedelta,
    check: Callable[[], None] | None = None,
) -> shmring.Comm:
    key = bytes.fromhex(fields["key"])
    world = shmring.World(fields["id"], key, fields["nprocs"], fields["address"])
    return shmring.init(world, rank, timeout=timeout.total_seconds(), check=check)


# The store may hold entries of earlier ranks: torchrun's store outlives the ranks that it restarts, and files
# persist. So rank 0 publishes a new world id; each other rank answers under that id with a new random key,
# and accepts only what rank 0 stores under that key.


def _lead(store: Any, size: int, timeout_s: float, check: Callable[[], None] | None) -> dict[str, Any]:
    """Make a new world, with an address if there are several hosts, and tell the other ranks. Rank 0 only.

    Returns what they are told.
    """
    asked = secrets.token_hex(16)
    store.set(_ASKED, asked)
    keys = [_answer_key(asked, other) for other in range(1, size)]
    # `get` and `wait` of the store would let no signal be handled, and `get` has the store's own timeout.
    until, mend = time.monotonic() + timeout_s, "start all ranks, or allow a longer timeout"
    _await(store, dict(zip(keys, range(1, size), strict=True)), until, check, mend)
    answers = [json.loads(store.get(key)) for key in keys]
    fields = _make_world(size, answers)
    for answer in answers:
        store.set(answer["reply key"], json.dumps(fields))
    return fields


def _make_world(size: int, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a new world as rank 0 tells it to the others, which have introduced themselves."""
    world = shmring.world(size)
    if any(answer["host"] != shmring.host_id() for answer in answers):
        world = dataclasses.replace(world, address=address_text(_own_address(), free_port()))
    return {
        "id": world.id,
        "key": world.key.hex(),
        "nprocs": size,
        "address": world.address,
        "versions": [shmring.__version__, *(answer["version"] for answer in answers)],
    }


def _join(
    store: Any, rank: int, size: int, timeout_s: float, check: Callable[[], None] | None
) -> dict[str, Any]:
    """Return what rank 0 tells of the world that it has made."""
    reply_key = f"reply to rank {rank} {secrets.token_hex(8)}"
    answer = json.dumps({"reply key": reply_key, **_introduction()})
    until, pause_s, asked = time.monotonic() + timeout_s, _FIRST_PAUSE_S, b""
    while not store.check([reply_key]):
        if store.check([_ASKED]) and (latest := store.get(_ASKED)) != asked:
            asked, pause_s = latest, _FIRST_PAUSE_S
            store.set(_answer_key(asked.decode(), rank), answer)
        if check is not None:
            check()
        if time.monotonic() > until:
            raise shmring.Timeout(
                f"rank 0 did not tell rank {rank} of {size} where to meet within {timeout_s:g} s: start all "
                "ranks, or allow a longer timeout"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    fields: dict[str, Any] = json.loads(store.get(reply_key))
    return fields


def _answer_key(asked: str, rank: int) -> str:
    return f"answer of rank {rank} to {asked}"


def _own_address() -> str:
    """Return this host's address for other hosts: the source address on the route to MASTER_ADDR."""
    found = [*_ways_to(os.environ.get("MASTER_ADDR", "localhost")), *_ways_to(_NOBODY)]
    others = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    return (others or found or ["127.0.0.1"])[0]


def _ways_to(host: str) -> Iterator[str]:
    """Yield the source addresses on the route to `host`. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                yield str(probe.getsockname()[0]).partition("%")[0]
