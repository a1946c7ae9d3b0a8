"""The connections to ranks of other hosts, as the cold paths see them."""

from collections.abc import Mapping, Sequence
from socket import socket
from typing import Self

from .._transport.channels import Channels

class InterNodeConns:
    """One rank's connections to those of other hosts, and where all ranks are."""

    def __new__(
        cls,
        *,
        rank: int,
        nodes: Sequence[Sequence[int]],
        data: Mapping[int, socket],
        channels: Channels,
        cut_s: float,
    ) -> Self: ...
    def measure_out(self, slice_nbytes: int) -> None:
        """How long what goes over the wire at once may be, the same on all ranks; between calls."""

    def close(self) -> None:
        """Stop looking for news; the connections are their maker's."""
