"""Command-line programs. Start each with `python -m shmring.tools.NAME`."""
