"""The collectives among the ranks of one host, over shared memory and without the GIL.

choice: choose_local_algorithm(), for every call among the ranks of one host, and for local steps
  |-- staged    tiny and small messages, data movement, zero-copy, single copies
  |-- direct    large all_reduce and reduce
  |-- chain     reduce, scan and exscan with more ranks than CPUs
  |-- named     algorithms that the caller names: rings, halving and doubling, trees

direct and chain are inline functions of choice, hence .pxd files.

Each algorithm is a pair of C functions: `enter_x` prepares a call, `step_x` does what is possible now and
returns. A step never blocks: it records in `call.awaited` which flag it waits for. `_engine/wait` waits.
"""
