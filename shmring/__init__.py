"""Collectives between Python processes at the speed of shared memory."""

__version__ = "0.1.0"
