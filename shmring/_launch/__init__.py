"""Starts ranks: `shmring.spawn` from Python, `shmrun` from a shell.

spawn              processes of multiprocessing; collects what the ranks return or raise

shmrun             one process of a script for each rank
  |-- options          the command line
  |-- cpu_binding      which CPUs a rank has with --bind, and how many threads
  |-- output_mux       the ranks' output on one terminal
  |     ^-- dedupe         --collapse: equal lines of several ranks are shown once
  |     |-- log_files      --log-dir: a file for each rank
  |-- traceback_tail   the traceback that a failed rank ended with
"""
