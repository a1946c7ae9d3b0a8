"""Programs for the machine that shmring runs on, each started by `python -m shmring.tools.NAME`."""
