"""Types of calls that run in the background."""

class Issued:
    """A call in a queue, and the objects that must stay alive while it is there."""
