"""How a coroutine waits for a Work: through a descriptor that the event loop watches, without a thread.

It is handed a Work.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .work import Work


async def result_of(work: Work[Any]) -> Any:
    """The Work's result, once it is finished."""
    if not work.done():
        loop = asyncio.get_running_loop()
        finished = loop.create_future()
        # A descriptor of this coroutine's own: several may await one Work, in several loops.
        fd = os.dup(work.fileno())
        loop.add_reader(fd, _tell, finished)
        try:
            await finished
        finally:
            loop.remove_reader(fd)
            os.close(fd)
    return work.result()


def _tell(finished: asyncio.Future[None]) -> None:
    if not finished.done():
        finished.set_result(None)
