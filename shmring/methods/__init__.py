"""Methods of the literature on the public API, each with its source; import the one that you want:
`from shmring.methods import sharded`.
"""
"""The literature's methods on a communicator, a module each: `from shmring.methods import server`."""
