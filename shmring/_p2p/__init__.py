"""Point-to-point messages between ranks, and the queue between two processes.

_comm/point_to_point      send, recv, isend, probe: from arguments to posted messages
    |
_comm/endpoint            one thread at a time carries the messages of a communicator on
    |
delivery                  wait until a message is complete
    |
matching                  match tables, order, unexpected messages; within a host and between hosts
    ^
status                    description of a message, and the `Status` that a receiver gets

ring -> ring_ends         `shmring.Ring`, which needs no communicator
"""
