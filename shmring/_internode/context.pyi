"""Types of the connections to ranks of other hosts. The module has the docstrings."""

from collections.abc import Mapping, Sequence
from socket import socket
from typing import Self

from .._transport.channels import Channels

def most_parts(counts: Sequence[int]) -> int: ...

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
    def measure_out(self, slice_nbytes: int) -> None: ...
    def close(self) -> None: ...
