"""Adapters to other packages.

`shmring.adapters.dask`, `.jax`, `.joblib`, `.keras`, `.pools`, `.ray`, `.sklearn`, `.torch`, `.vllm`.
Each module imports its package only when it is used, and uses only the public API of shmring.
"""
