"""Training methods from the literature, one module each: `from shmring.methods import sharded`."""
