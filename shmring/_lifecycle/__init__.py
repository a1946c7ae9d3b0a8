"""How a communicator comes to be: of a world, of another communicator, or of the ranks that are left of one.

_comm/init    groups        shrink -> membership     the ranks that are left agree on who they are
      |          |             |
      +----------+-------------+
                 |
              startup        share a segment, make an Engine, wait until all ranks have
                 |
              internode      the connections to ranks of other hosts
"""
