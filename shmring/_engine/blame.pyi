"""Types of Stalls, which warns about long waits."""

from .state import State

class Stalls:
    """The long waits of one rank, and the times when their next warnings are due."""

    def warn_after(self, state: State, limit_s: float) -> None:
        """Log a warning about waits longer than limit_s seconds from now on; 0 disables it."""
