"""Carrying messages on: nothing of it is called from Python."""

from .fused import Fusion

class PendingMessage:
    """A message that outlives the call which began it."""

class Endpoint(Fusion):
    """What is posted on one communicator."""
