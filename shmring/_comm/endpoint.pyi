"""Types of the engine of point-to-point messages. Python calls none of its methods."""

from .fused import FusedCollectives

class PendingMessage:
    """A message that outlives the call that began it."""

class Endpoint(FusedCollectives):
    """The posted messages of one communicator."""
