"""Point-to-point messages and notifications between ranks of different hosts, over TCP.

notifications   "it is over, because ...", "I leave", "I wait in call n", as Python objects
    |
channels        all channels of this rank: memory, descriptors, closing
    |
channel         the C declarations of one channel: channel.h, with a ring for each direction

`_p2p` sends its messages over the same channels. `_internode/context` has the connections of the collectives.
"""
