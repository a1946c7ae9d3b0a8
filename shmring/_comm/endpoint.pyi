"""Types of the engine of point-to-point messages. Python calls none of its methods."""

class PendingMessage:
    """A message that outlives the call that began it, and the objects that it keeps alive until it is
    complete.
    """

class Endpoint:
    """The posted messages of one communicator. They never wait for a collective."""
