"""The ranks of a world find each other and prove that they hold its key, before there is a segment.

join                     one rank joins a world; `init` and `spawn` call it
  |-- environment        which launcher started this process, as which rank
  |-- local              the ranks of one host meet on a Unix socket -> fd_passing
  |-- tcp                the ranks of several hosts come to rank 0 -> node_map, coordinator
  |-- mesh               a connection for every pair of ranks of different hosts

local, tcp, mesh  ->  acceptor, connector     the two sides of a connection that is made
                          |
                   world, framed_socket, handshake

`fd_passing` and `coordinator` are rank 0's connections to the other ranks afterwards, within a host and over
TCP. `handshake` has functions of bytes only: frames, proofs and errors.
"""
