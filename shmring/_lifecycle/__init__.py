"""Construction of communicators: from a world, from another communicator, with more ranks or fewer, or
from the survivors of one.

_comm/init   grow   groups   shrink -> membership     the ranks agree who goes on; `grow` uses it, too
      |        |       |        |
      +--------+-------+--------+
                 |
              startup        share a segment, make an Engine, wait until all ranks have
                 |
              internode      connections to ranks of other hosts
"""
