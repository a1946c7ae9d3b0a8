"""Send Python objects between ranks: pickle protocol 5 leaves the arrays' memory out of the pickle, so arrays
in an object are transferred as fast as plain arrays.

A *frame* is an object as bytes: the number and lengths of the parts, then the parts, each on a cache line.
The first part is the pickle; the buffers that it left out follow. Ranks authenticated each other when they
met, and trust each other's pickles. Functions take a communicator.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .vector import VectorCollectives

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

NO_FRAME: Bytes = np.empty(0, np.uint8)
_LINE_NBYTES = 64


def pack(item: object) -> Bytes:
    """Return the object as a frame. Raise the errors of pickle."""
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
    """Return the object of a frame. Its arrays are writable and use the frame's memory."""
    count = int(frame[:8].view("i8")[0])
    lengths = frame[: 8 * (count + 1)].view("i8")
    begins = _begins(lengths)
    parts = [frame[begin : begin + n] for begin, n in zip(begins, lengths[1:].tolist(), strict=False)]
    return pickle.loads(parts[0].data, buffers=parts[1:])


def _begins(lengths: np.ndarray[Any, Any]) -> list[int]:
    """Return the offset of each part, and the end of the frame."""
    begins = [_whole_lines(lengths.nbytes)]
    for nbytes in lengths[1:].tolist():
        begins.append(begins[-1] + _whole_lines(nbytes))
    return begins


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES


def broadcast(comm: VectorCollectives, frame: Bytes | None, root: int, timeout: float | None) -> Any:
    """Return the object in the root's frame on the other ranks, which pass None; None on the root."""
    length = np.array([0 if frame is None else len(frame)], "i8")
    comm.broadcast(length, root, timeout=timeout)
    if frame is not None:
        comm.broadcast(frame, root, timeout=timeout)
        return None
    received = np.empty(int(length[0]), np.uint8)
    comm.broadcast(received, root, timeout=timeout)
    return unpack(received)


def all_gather(comm: VectorCollectives, frame: Bytes, timeout: float | None) -> list[Any]:
    """Return the objects in all ranks' frames, by rank."""
    return [unpack(one) for one in comm.all_gather_v(frame, timeout=timeout)]


def gather(comm: VectorCollectives, frame: Bytes, root: int, timeout: float | None) -> list[Any] | None:
    """Return the objects in all ranks' frames, by rank, on the root; None on the others."""
    frames = comm.gather_v(frame, root, timeout=timeout)
    return None if frames is None else [unpack(one) for one in frames]


def scatter(comm: VectorCollectives, frames: list[Bytes] | None, root: int, timeout: float | None) -> Any:
    """Return the object in the root's frame for this rank. The other ranks pass None."""
    return unpack(comm.scatter_v(frames, root, like=NO_FRAME, timeout=timeout))
