"""The literature's methods on a communicator, a module each: `from shmring.methods import sharded`."""
