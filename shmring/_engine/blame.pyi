"""When a rank that waits long speaks of it."""

from .state import State

class Stalls:
    """What one rank has said of its waits, and when the next word is due."""

    def warn_after(self, state: State, limit_s: float) -> None:
        """From here on waits longer than that are told of; 0: none."""
