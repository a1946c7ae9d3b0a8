"""Point-to-point messages between ranks, and the queue between two processes.

_comm/point_to_point      send, recv, isend, probe: from arguments to posted messages
    |
_comm/endpoint            one thread at a time advances the messages of a communicator
    |
matching                  match tables, order, unexpected messages; within a host and between hosts; waits

ring -> ring_ends         `shmring.Ring`, which needs no communicator
"""
