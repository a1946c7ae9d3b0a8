"""Python stacks: format those of this process, and ask other ranks for theirs.

A rank is asked by waking its liveness thread, which writes the stacks down (`_engine/state`). `ask` takes a
`Flight`, the reader of a segment.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

from .._system import procfs

if TYPE_CHECKING:
    from .flight_recorder import Flight

_ANSWER_S = 1.0  # a rank may take this long to answer
_CUT = b"\n(and so on)\n"
_MOST_FRAMES = 200  # frames of one thread
_POLL_S, _ASK_AGAIN_S = 0.001, 0.05


def of_this_process(most_nbytes: int) -> bytes:
    """Return the stacks of the other threads, main thread first, innermost frames first. Never raise."""
    try:
        text = _all_stacks().encode("utf-8", "replace").replace(b"\0", b"?")
    except Exception as error:
        text = f"(its stacks cannot be read: {type(error).__name__})\n".encode()
    if len(text) <= most_nbytes:
        return text
    return text[: most_nbytes - len(_CUT)].decode(errors="ignore").encode() + _CUT


def _all_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda entry: (entry[0] != main, entry[0]))
    answers = [
        f"Thread {names.get(ident, ident)} (most recent call first):\n" + "".join(_lines(frame))
        for ident, frame in frames
        if ident != threading.get_ident()
    ]
    return "\n".join(answers)


def _lines(frame: FrameType | None) -> Iterable[str]:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}\n'
        frame = frame.f_back
    yield "  ...\n"


def ask(
    flight: Flight,
    ranks: Iterable[int],
    *,
    still: Callable[[], bool] = lambda: True,
) -> dict[int, str]:
    """Return for each local rank its stacks, or in brackets why there are none. Ask all ranks at once.

    still: called repeatedly; False ends the wait early.
    """
    answers = {rank: why for rank in ranks if (why := _cannot_answer(flight, rank))}
    asked = {rank: flight.stacks_version(rank) & ~1 for rank in ranks if rank not in answers}
    until = time.monotonic() + _ANSWER_S
    ask_again = 0.0
    while asked and time.monotonic() < until and still():
        if time.monotonic() >= ask_again:  # a thread that was about to sleep has missed the first request
            for rank in asked:
                if not flight.ask(rank):
                    return answers | dict.fromkeys(asked, "(the kernel does not wake it)")
            ask_again = time.monotonic() + _ASK_AGAIN_S
        time.sleep(_POLL_S)
        for rank, before in list(asked.items()):
            text = flight.stacks_of(rank) if flight.stacks_version(rank) > before else None
            if text is not None:
                answers[rank] = text
                del asked[rank]
    return answers | {rank: _has_not_answered(flight, rank) for rank in asked}


def _cannot_answer(flight: Flight, rank: int) -> str:
    presence = flight.presence_of(rank)
    state = procfs.state(*flight.liveness_of(rank))
    if presence != "here":
        return {"dead": "(it is dead)", "closed": "(it has closed this communicator)"}.get(
            presence, "(it has not come yet)"
        )
    if state in ("stopped", "traced"):
        return f"(it is {state})"
    return ""


def _has_not_answered(flight: Flight, rank: int) -> str:
    why = _cannot_answer(flight, rank)
    if why:
        return why
    state = procfs.state(*flight.liveness_of(rank))
    return f"(no answer within {_ANSWER_S:g} s: it is {state}; a library that holds the GIL?)"
