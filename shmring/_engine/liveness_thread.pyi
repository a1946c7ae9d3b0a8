"""Types of the thread by which other ranks see that a rank is alive."""

class ParkedThread:
    """The parked thread of one rank."""
