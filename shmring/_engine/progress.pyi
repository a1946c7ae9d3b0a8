"""Calls that run in the background, as Python sees them."""

class Issued:
    """A call in a queue, and what has to live as long as it is there."""
