"""Python objects between ranks: pickled by protocol 5 with their arrays' memory beside the pickle, so that an
object full of arrays travels at the speed of arrays.

A *frame* is an object as bytes: how many parts and how long each, then the parts, each on a cache line: the
pickle first, after it the buffers that it left out. Ranks have proven who they are when they met, and trust
each other's pickles. It is handed a communicator, and may know: collectives (types only).
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .collectives import Collectives

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_LINE_NBYTES = 64
# Up to here frames are padded to the longest and gathered at once; longer ones that differ go one by one.
_PADDED_NBYTES = 1 << 20


def pack(item: object) -> Bytes:
    """The object as a frame. Raises what pickle raises."""
    left_out: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(item, protocol=5, buffer_callback=left_out.append)
    parts = [memoryview(stream), *(buffer.raw() for buffer in left_out)]
    lengths = np.array([len(parts), *(part.nbytes for part in parts)], "i8")
    begins = _begins(lengths)
    frame = np.empty(begins[-1], np.uint8)
    frame[: lengths.nbytes] = lengths.view(np.uint8)
    for part, begin in zip(parts, begins, strict=False):
        frame[begin : begin + part.nbytes] = part
    return frame


def unpack(frame: Bytes) -> Any:
    """The object of a frame; its arrays are writable and lie in the frame's memory."""
    count = int(frame[:8].view("i8")[0])
    lengths = frame[: 8 * (count + 1)].view("i8")
    begins = _begins(lengths)
    parts = [frame[begin : begin + n] for begin, n in zip(begins, lengths[1:].tolist(), strict=False)]
    return pickle.loads(parts[0].data, buffers=parts[1:])


def _begins(lengths: np.ndarray[Any, Any]) -> list[int]:
    """Where each part begins, and where the frame ends."""
    begins = [_whole_lines(lengths.nbytes)]
    for nbytes in lengths[1:].tolist():
        begins.append(begins[-1] + _whole_lines(nbytes))
    return begins


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES


def broadcast(comm: Collectives, frame: Bytes | None, root: int, timeout: float | None) -> Bytes:
    """The root's frame, on every rank; the others give None."""
    length = np.array([0 if frame is None else len(frame)], "i8")
    comm.broadcast(length, root, timeout=timeout)
    if frame is None:
        frame = np.empty(int(length[0]), np.uint8)
    comm.broadcast(frame, root, timeout=timeout)
    return frame


def all_gather(comm: Collectives, frame: Bytes, rank: int, size: int, timeout: float | None) -> list[Bytes]:
    """Every rank's frame, by rank."""
    lengths = comm.all_gather(np.array(len(frame)), timeout=timeout).tolist()
    longest = max(lengths)
    if longest * size <= _PADDED_NBYTES or min(lengths) == longest:
        rows = comm.all_gather(_padded(frame, longest), timeout=timeout)
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]
    frames = [frame if giver == rank else np.empty(n, np.uint8) for giver, n in enumerate(lengths)]
    for giver in range(size):
        comm.broadcast(frames[giver], giver, timeout=timeout)
    return frames


def gather(comm: Collectives, frame: Bytes, root: int, timeout: float | None) -> list[Bytes] | None:
    """Every rank's frame by rank, on the root."""
    lengths = comm.all_gather(np.array(len(frame)), timeout=timeout).tolist()
    rows = comm.gather(_padded(frame, max(lengths)), root, timeout=timeout)
    return None if rows is None else [row[:n] for row, n in zip(rows, lengths, strict=True)]


def scatter(comm: Collectives, frames: list[Bytes] | None, root: int, timeout: float | None) -> Bytes:
    """The frame that the root has for this rank; the others give None."""
    longest = np.array([0 if frames is None else max(map(len, frames))], "i8")
    comm.broadcast(longest, root, timeout=timeout)
    rows = None if frames is None else np.stack([_padded(frame, int(longest[0])) for frame in frames])
    own: Bytes = comm.scatter(rows, root, like=np.empty(int(longest[0]), np.uint8), timeout=timeout)
    return own


def _padded(frame: Bytes, nbytes: int) -> Bytes:
    if len(frame) == nbytes:
        return frame
    padded = np.zeros(nbytes, np.uint8)
    padded[: len(frame)] = frame
    return padded
