"""shmring inside other packages' engines: `shmring.adapters.dask`, `.joblib`, `.pools`, `.ray`, `.torch`.

Each imports its package only when it is used, and is a user of the public API like any other.
"""
