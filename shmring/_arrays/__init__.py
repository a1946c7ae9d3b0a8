"""Arrays that users pass to a call, and shared arrays that shmring allocates for them.

operands           an array of any library -> address, count and dtype; every call starts here
  |-- buffers      the slower protocols, and the errors for arrays that cannot be used

allocator          blocks of shared memory with a part for each rank; adopts mappings
shared_array       one array that all ranks see, with its fence and locks
  |-- onesided     get, put and accumulate: select elements, convert values
  |-- striped_locks    locks of the array's blocks, taken by one-sided access
         |-- locks     a lock in shared memory; a waiter detects the owner's death

shapes             shapes of the results of collectives that split or join arrays
"""
