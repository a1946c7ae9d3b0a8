"""Wait in a coroutine for a Work or a Transfer, without a thread.

asyncio is only imported by a program that awaits: it takes a quarter of the time of importing shmring.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from .endpoint import Transfer
    from .work import Work


async def result_of(work: Work[Any]) -> Any:
    """Return the Work's result once it is finished: the event loop watches a descriptor."""
    if not work.done():
        import asyncio

        loop = asyncio.get_running_loop()
        finished = loop.create_future()
        # Use a descriptor of this coroutine: several coroutines, in several loops, may await one Work.
        fd = os.dup(work.fileno())
        try:
            loop.add_reader(fd, _finish, finished)
            try:
                await finished
            finally:
                loop.remove_reader(fd)
        finally:
            os.close(fd)
    return work.result()


def _finish(finished: asyncio.Future[None]) -> None:
    if not finished.done():
        finished.set_result(None)


async def result_of_transfer(transfer: Transfer[Any]) -> Any:
    """Return the Transfer's result once it is complete. Other coroutines run between polls of it."""
    import asyncio

    pause_s, began_s = 0.0, time.monotonic()
    while not transfer.done():
        transfer._check_waited(time.monotonic() - began_s)
        await asyncio.sleep(pause_s)
        pause_s = min(0.002, 2 * pause_s + 0.00005)
    return transfer.result()
