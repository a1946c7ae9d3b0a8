"""Wait for a Work in a coroutine: the event loop watches a descriptor, so no thread is needed."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collectives import Work


async def result_of(work: Work[Any]) -> Any:
    """Return the Work's result once it is finished."""
    if not work.done():
        loop = asyncio.get_running_loop()
        finished = loop.create_future()
        # Use a descriptor of this coroutine: several coroutines, in several loops, may await one Work.
        fd = os.dup(work.fileno())
        loop.add_reader(fd, _finish, finished)
        try:
            await finished
        finally:
            loop.remove_reader(fd)
            os.close(fd)
    return work.result()


def _finish(finished: asyncio.Future[None]) -> None:
    if not finished.done():
        finished.set_result(None)
