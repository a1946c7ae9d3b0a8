"""Types of the connections to ranks of other hosts, for cold paths."""

from collections.abc import Mapping, Sequence
from socket import socket
from typing import Self

from .._transport.channels import Channels

class InterNodeConns:
    """The connections of one communicator on one rank to ranks of other hosts, and the host of every rank."""

    def __new__(
        cls,
        *,
        rank: int,
        hosts: Sequence[Sequence[int]],
        data: Mapping[int, socket],
        channels: Channels,
        cut_s: float,
    ) -> Self: ...
    def measure_out(self, slice_nbytes: int) -> None:
        """Set the length of a slice, the same on all ranks. Call it between calls."""

    def close(self) -> None:
        """Close the epoll descriptor. The caller of the constructor closes the connections."""
