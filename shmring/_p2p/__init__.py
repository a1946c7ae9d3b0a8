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
ring_common               their common part in Python: memory, pickling, dtypes, errors
    |
ring_ends                 one call: putting, getting, places of readers, waiting; constants in ring_frames
"""
