"""Arrays that users pass to a call, and shared arrays that shmring allocates for them.

operands           an array of any library -> address, count and dtype; every call starts here; `Arena`
  |                and `FileDescriptor`, an open file that is closed with its object
  |-- buffers      the slower protocols, and the errors for arrays that cannot be used

allocator          blocks of shared memory with a part for each rank; adopts mappings
shared_array       one array that all ranks see, with its fence and locks
  |-- onesided     get, put and accumulate: select elements, convert values
         |-- locks     a lock in shared memory, whose waiters detect its owner's death; locks of ranges

passing            arrays that travel between any processes as descriptors; needs no communicator
  |-- keeper       keeps their memory after a process that ended before they arrived

objects            frames: pickled objects as bytes, whose arrays are outside of the pickle
shapes             shapes of the results of collectives that split or join arrays
"""
