"""A folder for PYTHONPATH: Python finds `mpi4py` in it before an installed mpi4py.

_launch/stand_in  puts the folder there
  mpi4py          replaces itself by shmring.mpi4py, and installs a finder for the modules of it
"""
