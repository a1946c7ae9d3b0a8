"""The arrays that users hand to a call, and those that shmring makes for them.

operands           an array of any library -> address, count and dtype; every call begins here
  |-- buffers      the slower protocols, and the errors for what cannot be taken

allocator          blocks of shared memory, of which each rank has a part; adopts mappings
shared_array       one array that all ranks see, with its fence and locks
  |-- onesided     get, put and accumulate: which elements, which values
  |-- striped_locks    the locks that these take, one for each block of elements
         |-- locks     a lock in shared memory that notices the death of its owner

shapes             the shapes of what the splitting and joining collectives return
"""
