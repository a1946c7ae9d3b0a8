"""Adapters to other packages.

`shmring.adapters.dask`, `.jax`, `.joblib`, `.keras`, `.pools`, `.ray`, `.sklearn`, `.torch`, `.vllm`.
Each module imports its package only when it is used. Of shmring it uses the public API, and the private
folders that `tests/repo/test_house.py` allows.
"""
