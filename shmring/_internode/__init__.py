"""The collectives of ranks of several hosts: steps among the ranks of each host, and messages between hosts.

choice: choose_algorithm_across(), for every call over several hosts
  |-- `_algorithms`       the local steps, among the ranks of one host
  |-- data_movement       gather, scatter, broadcast, all_gather, all_to_all, scans
  |-- reductions          all_reduce, reduce: small ones by one rank of each host, large ones by all ranks in
         |                slices; reduce_scatter; `partials` are the results of one host, and their format
      context             which rank is on which host, the connections, sending and receiving; a collective of
                          this host's ranks within a larger one
"""
