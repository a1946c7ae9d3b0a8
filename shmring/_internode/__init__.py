"""The collectives of ranks of several hosts: steps among the ranks of each host, and messages between hosts.

data_movement: choose_way(), called by the engine for every call
  |-- `_algorithms`       where all ranks are on one host
  |-- data_movement       gather, scatter, broadcast, all_gather, all_to_all, scans
  |-- allreduce           large all_reduce and reduce: every rank exchanges a slice
  |-- allreduce_small     small ones: one rank of each host exchanges all of it
  |-- reduce_scatter
         |
      partials            partial results of a host, what they are rounded to on the wire
         |
      local_step          a collective of the ranks of this host, as a part of a larger one
         |
      context             which rank is on which host, the connections, sending and receiving
"""
