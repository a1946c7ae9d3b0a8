"""The collectives among the ranks of one host, over shared memory and without the GIL.

choice: choose_local_algorithm(), for every call among the ranks of one host, and for local steps
  |-- staged    tiny and small messages, data movement
  |-- direct    large all_reduce and reduce
  |-- chain     reduce, scan and exscan with more ranks than CPUs
  |-- ring, halving, trees    the algorithms that run only if they are named
  |
in_place      zero copy and single copies; called by staged, direct and chain
  |
pieces        which rank takes what from which other rank; copying and folding it

Each is a .pxd file of inline functions, so that all are compiled into one extension. Those that are named are
from the literature: they do not fold in rank order, and they round at each hop. All go through the slots.

Each algorithm is a pair of C functions: `enter_x` prepares a call, `step_x` does what is possible now and
returns. A step never blocks: it records in `call.awaited` which flag it waits for. `_engine/wait` waits.
"""
