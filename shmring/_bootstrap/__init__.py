"""Connect the ranks of a world, and let them prove that they hold its key, before there is a segment.

join                     one rank joins a world; `init` calls it, and `_lifecycle` for groups
  |-- environment        the launcher of this process, and the rank that it gave
  |-- local              the ranks of one host connect over a Unix socket -> fd_passing
  |-- tcp                the ranks of several hosts connect to rank 0 -> host_map, coordinator
  |-- mesh               connections for every pair of ranks of different hosts

local, tcp, mesh  ->  acceptor, connector     the two sides of a new connection
                          |
                   world, framed_socket, handshake

`fd_passing` and `coordinator` use rank 0's connections to the other ranks afterwards, within a host and over
TCP. `handshake` has pure functions of bytes: frames, proofs and errors.
"""
