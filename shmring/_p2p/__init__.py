"""Point-to-point messages between ranks, and the queue between two processes.

_comm/point_to_point      send, recv, isend, probe: from arguments to posted messages
    |
_comm/endpoint            one thread at a time advances the messages of a communicator
    |
matching                  match tables, order, unexpected messages; within a host and between hosts; waits
    |
message_path              through the ring or in place, by measurement
    |
offers                    messages that are copied once; `messages` has the structures of all

ring, broadcast           `shmring.Ring` and `shmring.Broadcast`, which need no communicator
    |
ring_common               what both do in Python: memory, pickling, dtypes
    |
ring_ends                 what both do in a call: putting, getting, waiting; constants in ring_frames
  ^-- broadcast_ends      a ring with several readers
"""
