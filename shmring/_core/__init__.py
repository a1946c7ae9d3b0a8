"""The structures and inline functions that every algorithm uses, without any Python object.

group            one communicator (Group), one collective in progress (Call), the call line
  |-- segment    the C declarations of the shared segment: layout.h, sync/
  |-- kernels    the reduction, copy and conversion loops; the only extension that links them

staging          chunks and slots in the staging buffer, and the credit for them
  ^-- transfers  algorithms that are a sequence of transfers
placement        the policy for caches: which slot, which order, what is streamed or prefetched
descriptor       places of the arrays, distance and next path, in a call line; uses:
  |-- core_distance    measures whether the ranks' cores are near or far
  |-- path_choice      chooses whether data are read in place or through slots
  |-- single_copy      decides whether private arrays are read through the kernel
path_trials      measures which of several paths is fastest, by trials
schedule         the C declarations of schedule.h: the steps of rings and trees
spsc_ring        the C declarations of spsc_ring.h: the ring of one producer and one consumer
trace            time slices of a call
timeouts         seconds of Python as nanoseconds
numpy_api        the C declarations of NumPy's arrays

No module here imports another folder.
"""
