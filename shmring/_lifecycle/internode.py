"""What a communicator of several hosts has beside its segment: the connections to ranks of other hosts.

It is handed an engine and what the meeting left.
"""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING

from .._bootstrap import framed_socket
from .._bootstrap.tcp import listen_nearby
from .._bootstrap.world import World
from .._config.settings import address_text
from .._internode.context import InterNodeConns
from .._system.limits import explain
from .._transport.channels import Channels
from .._transport.notifications import Notifications

if TYPE_CHECKING:
    from .._bootstrap.mesh import Mesh
    from .._bootstrap.node_map import Place
    from .._engine.engine import Engine

Invitation = tuple[str, str]  # a world's id and address

_VIEW_S = 1.0  # for the last view of those that go on to reach them


class InterNodeLinks:
    """One rank's connections; from its making on the engine's calls are of all ranks of all hosts."""

    def __init__(self, engine: Engine, place: Place, mesh: Mesh, key: bytes) -> None:
        self._mesh = mesh
        self._key = key
        try:
            self._channels = channels = Channels(mesh.control, *engine.message_rings())
            self._notifications = Notifications(mesh.control, channels)
            self._conns = InterNodeConns(
                rank=place.rank,
                nodes=place.ranks_of_node,
                data=mesh.data,
                channels=channels,
                cut_s=framed_socket.CUT_S,
            )
        except OSError as error:
            raise explain(error, "watching the connections to other hosts") from error
        engine.cross(self._conns, self._notifications)

    def agree(self, engine: Engine, slice_nbytes: int) -> None:
        """Collective: what goes over the wire at once is as long as rank 0 says; 0: as tuned."""
        if slice_nbytes := engine.broadcast_word(slice_nbytes):
            self._conns.measure_out(slice_nbytes)

    def listen(self, ports: tuple[int, int] | None) -> tuple[socket.socket, Invitation]:
        """For some of these ranks, of whose world this one is rank 0: on its own host."""
        connection = next(iter(self._mesh.data.values()))
        listener = listen_nearby(connection.family, connection.getsockname(), ports)
        host, port, *_ = listener.getsockname()
        return listener, (secrets.token_hex(16), address_text(host.partition("%")[0], port))

    def world(self, nprocs: int, invitation: Invitation) -> World:
        """What a rank is invited to: the key is this world's, and never sent."""
        world_id, address = invitation
        return World(world_id, self._key, nprocs, address)

    def notify_view(self, view: bytes) -> None:
        """Say to the ranks of other hosts who goes on. See membership."""
        self._channels.notify_view(view)

    def view_of(self, rank: int) -> bytes | None:
        """What a rank of another host has said so last."""
        return self._channels.view_of(rank)

    def has_gone(self, rank: int) -> bool:
        """Whether a rank of another host has ended, left, or is not to be reached any more."""
        return self._channels.has_ended(rank) or self._channels.has_left(rank)

    def poll_views(self) -> None:
        """Take in what they have said."""
        self._channels.poll(framed_socket.CUT_S)

    def await_news(self, within_s: float) -> None:
        """Wait for what they say, a little while."""
        self._channels.await_news(within_s)

    def deliver_view(self) -> None:
        """Wait until what was said last is there, as far as it can be: this rank is about to close."""
        self._channels.deliver(_VIEW_S, framed_socket.CUT_S, unless_over=False)

    @property
    def key(self) -> bytes:
        """The world's, which is never sent."""
        return self._key

    def close(self, within_s: float) -> None:
        """Close all connections; a second call does nothing. within_s: for messages to reach their hosts."""
        try:
            self._channels.deliver(within_s, framed_socket.CUT_S)
        finally:
            self._conns.close()
            self._notifications.close()
            self._mesh.close()

    def disown(self) -> None:
        """In a forked child: close what it inherited, and say nothing."""
        self._conns.close()
        self._notifications.disown()
        self._mesh.close()
