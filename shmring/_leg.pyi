"""The connections to ranks of other hosts, as the cold paths see them."""

from collections.abc import Mapping, Sequence
from socket import socket

class Wires:
    """One rank's connections to those of other hosts, and where all ranks are."""

    def __init__(
        self, *, rank: int, nodes: Sequence[Sequence[int]], data: Mapping[int, socket], mail_news: int
    ) -> None: ...
    def close(self) -> None:
        """Stop looking for news; the connections are their maker's."""
