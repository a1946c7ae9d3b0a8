"""InterNodeLinks: the connections of a communicator to ranks of other hosts.

It is constructed from an engine and the results of a meeting.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from typing import TYPE_CHECKING

from .._bootstrap import framed_socket
from .._bootstrap.tcp import listen_nearby
from .._bootstrap.world import World
from .._config.settings import address_text, with_interface
from .._internode.context import InterNodeConns
from .._system.limits import explain
from .._transport.channels import VIEW, Channels
from .._transport.notifications import Notifications
from ..errors import Error

if TYPE_CHECKING:
    from .._bootstrap.framed_socket import Address
    from .._bootstrap.host_map import Place
    from .._bootstrap.mesh import Mesh
    from .._engine.engine import Engine

Invitation = tuple[str, str]  # a world's id and address

_VIEW_S = 1.0  # limit for the last view to reach the other survivors
_LAST_S = 1.0  # limit for unsent notifications when a rank leaves


class InterNodeLinks:
    """One rank's connections. Once this is made, the engine's calls include all ranks of all hosts."""

    def __init__(self, engine: Engine, place: Place, mesh: Mesh, key: bytes) -> None:
        self._mesh = mesh
        self.key = key  # of the world; it is never sent
        connection = next(iter(mesh.data.values()))
        try:
            self._family, self._address = connection.family, connection.getsockname()
            self._interface = _interface_of(self._address)
            self._channels = channels = Channels(mesh.control, *engine.message_rings())
            self._conns = InterNodeConns(
                rank=place.rank,
                hosts=place.ranks_of_host,
                data=mesh.data,
                channels=channels,
                cut_s=framed_socket.CUT_S,
            )
        except OSError as error:
            raise explain(error, "watching the connections to other hosts") from error
        except MemoryError as error:
            raise _no_room() from error
        engine.attach_hosts(self._conns, Notifications(mesh.control, channels))

    def agree(self, engine: Engine, slice_nbytes: int) -> None:
        """Collective: use rank 0's slice size for transfers; 0: the tuned size."""
        if slice_nbytes := engine.broadcast_word(slice_nbytes):
            try:
                self._conns.measure_out(slice_nbytes)
            except MemoryError as error:
                raise _no_room() from error

    def listen(self, ports: tuple[int, int] | None) -> tuple[socket.socket, Invitation]:
        """Listen on this host as rank 0 of a new world of these ranks. Return listener and invitation."""
        listener = listen_nearby(self._family, self._address, ports)
        host, port, *_ = listener.getsockname()
        return listener, (secrets.token_hex(16), self.address_here(address_text(host, port)))

    def address_here(self, address: str) -> str:
        """Return the address of an invitation as this host writes it.

        A link-local IPv6 address is valid with an interface only, and each host names its own interfaces.
        """
        return address if self._interface is None else with_interface(address, self._interface)

    def world(self, nprocs: int, invitation: Invitation) -> World:
        """Return the world of an invitation. Its key is this world's key, which is never sent."""
        world_id, address = invitation
        return World(world_id, self.key, nprocs, self.address_here(address))

    def notify_view(self, view: bytes) -> None:
        """Send this rank's view to the ranks of other hosts. See membership."""
        self._channels.notify(VIEW, view)

    def view_of(self, rank: int) -> bytes | None:
        """Return the last view of a rank of another host."""
        return self._channels.view_of(rank)

    def has_gone(self, rank: int) -> bool:
        """True if a rank of another host has ended, left, or cannot be reached any more."""
        return self._channels.has_ended(rank) or self._channels.has_left(rank)

    def poll_views(self) -> None:
        """Receive views and other notifications."""
        self._channels.poll(framed_socket.CUT_S)

    def await_news(self, within_s: float) -> None:
        """Wait for notifications, at most `within_s`."""
        self._channels.await_news(within_s)

    def deliver_view(self) -> None:
        """Wait until the last view has been delivered, if it can be. Call this before close."""
        self._channels.deliver(_VIEW_S, framed_socket.CUT_S, unless_over=False)

    def close(self, within_s: float) -> None:
        """Close all connections. A second call does nothing. within_s: limit for delivering messages."""
        try:
            self._channels.deliver(within_s, framed_socket.CUT_S)
        finally:
            self._conns.close()
            self._channels.close(_LAST_S)
            self._mesh.close()

    def disown(self) -> None:
        """Close the inherited descriptors in a forked child, and notify no rank."""
        self._conns.close()
        self._channels.close_fds()
        self._mesh.close()


def _no_room() -> Error:
    error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return explain(error, "making the buffers for messages to other hosts")


def _interface_of(address: Address) -> str | None:
    """Return the interface of a link-local IPv6 address of this host; None for other addresses."""
    scope_id = address[3] if len(address) > 3 else 0
    return socket.if_indextoname(scope_id) if scope_id else None
