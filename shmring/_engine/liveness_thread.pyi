"""The thread by which others know that a rank lives."""

class ParkedLife:
    """One rank's parked thread."""
