"""Carrying messages on: nothing of it is called from Python."""

from .fused import FusedCollectives

class PendingMessage:
    """A message that outlives the call which began it."""

class Endpoint(FusedCollectives):
    """What is posted on one communicator."""
