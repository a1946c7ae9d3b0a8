"""The error by which all ranks of a new group learn that shmring cannot take gloo's place in it."""

from __future__ import annotations


class Unfit(RuntimeError):
    """The group has to be gloo's, on all of its ranks; the message says why."""
