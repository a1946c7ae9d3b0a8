"""Point-to-point messages and notifications between ranks of different hosts, over TCP.

notifications   abort with its reason, leaving, the call in which a rank waits, as Python objects
    |
channels        all channels of this rank: memory, descriptors, closing
    |
channel         the C declarations of one channel: channel.h, with a ring for each direction

`_p2p` sends its messages over the same channels. `_internode/context` has the connections of the collectives.
"""
