"""The thread by which others know that a rank lives."""

class ParkedThread:
    """One rank's parked thread."""
