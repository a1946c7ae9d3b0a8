"""mpi4py's interface on shmring: `MPI` is what `from shmring import MPI` gives.

MPI.py            the names, and joining at import
  environment     Init, Finalize, versions, time, memory
  intracomm       Intracomm, grids and graphs of ranks      windows   memory that other ranks access
  comm            communicators: how they are made and freed
  object_calls    send, recv, bcast ... of Python objects   objects   pickle
  collectives     Bcast, Allreduce ... in three forms (`forms`)
  point_to_point  Send, Recv, probes, Message
  requests        Request, Prequest, Grequest
  ops, folds      operations; reductions that shmring has no operation for
  types, groups, info, errhandlers, handles, errors, constants, rc, refused
  messages        specifications of messages; calls; handles (Cython)
  memory          MPI.buffer (Cython); device_arrays: DLPack and __cuda_array_interface__
"""
