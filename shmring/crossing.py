"""What a communicator of several hosts has beside its segment: the connections to ranks of other hosts.

May know: _leg, _office, alarms, lines, rendezvous, settings, worlds; it is handed an engine and what the
meeting left.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from . import lines
from ._leg import Wires
from ._office import Office
from .alarms import Alarms
from .rendezvous import listen_nearby
from .settings import address_text
from .worlds import World

if TYPE_CHECKING:
    from ._engine import Engine
    from .mesh import Mesh
    from .nodes import Place


class Crossing:
    """One rank's connections; from its making on the engine's calls are of all ranks of all hosts."""

    def __init__(self, engine: Engine, place: Place, mesh: Mesh, key: bytes) -> None:
        self._mesh = mesh
        self._key = key
        office = Office(mesh.mail, *engine.message_rings())
        self._alarms = Alarms(mesh.mail, office)
        self._wires = Wires(
            rank=place.rank,
            nodes=place.ranks_of_node,
            data=mesh.data,
            office=office,
            cut_s=lines.CUT_S,
        )
        engine.cross(self._wires, self._alarms)

    def agree(self, engine: Engine, slice_nbytes: int) -> None:
        """Collective: what goes over the wire at once is as long as rank 0 says; 0: as tuned."""
        if slice_nbytes := engine.broadcast_word(slice_nbytes):
            self._wires.measure_out(slice_nbytes)

    def invite(self, nprocs: int, ports: tuple[int, int] | None) -> World:
        """A world of some of these ranks that this one, its rank 0, will listen for on its own host."""
        connection = next(iter(self._mesh.data.values()))
        with listen_nearby(connection.family, connection.getsockname(), ports) as listener:
            host, port, *_ = listener.getsockname()  # where it can listen again, if nobody is faster
        address = address_text(host.partition("%")[0], port)
        return World(secrets.token_hex(16), self._key, nprocs, address)

    def close(self) -> None:
        """Close all connections; a second call does nothing."""
        self._wires.close()
        self._alarms.close()
        self._mesh.close()

    def disown(self) -> None:
        """In a forked child: close what it inherited, and say nothing."""
        self._wires.close()
        self._alarms.disown()
        self._mesh.close()
