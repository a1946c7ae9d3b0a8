"""The modules of `mpi4py.util`."""
