"""Carrying messages on: nothing of it is called from Python."""

from .fused import Fusion

class Begun:
    """A message that outlives the call which began it."""

class Carrier(Fusion):
    """What is posted on one communicator."""
