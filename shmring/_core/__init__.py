"""The structures and inline functions that every algorithm uses, without any Python object.

group            one communicator (Group), one collective in progress (Call), the call line
  |-- segment    the C declarations of the shared segment: layout.h, sync/
  |-- kernels    the reduction, copy and conversion loops; the only extension that links them

staging          chunks and slots in the staging buffer, and the credit for them
descriptor       what a call line says besides the fingerprint; uses core_distance and single_copy
schedule         who sends what in which step of a ring or a tree: schedule.h
spsc_ring        the C declarations of the ring of one producer and one consumer: spsc_ring.h
core_distance    the measurement of how far apart the cores of the ranks are
trace            the time slices of a call;    timeouts: seconds of Python to nanoseconds
segment_format   sizes and first values of a segment, for Python

All but `kernels`, `segment` and `schedule` use `group`. Nothing here uses another folder.
"""
