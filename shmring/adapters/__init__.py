"""shmring inside other packages.

`shmring.adapters.dask`, `.jax`, `.joblib`, `.keras`, `.pools`, `.ray`, `.sklearn`, `.torch`.
Each imports its package only when it is used, and is a user of the public API like any other.
"""
