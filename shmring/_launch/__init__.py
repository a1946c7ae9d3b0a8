"""Start ranks: `shmring.spawn` from Python, `shmrun` from a shell.

spawn              processes of multiprocessing; collects what the ranks return or raise

shmrun             one process of a script for each rank
  |-- options          the command line
  |-- cpu_binding      the CPUs of each rank with --bind, and the number of threads
  |-- output_mux       the ranks' output on one terminal
  |     ^-- dedupe         --collapse: shows equal lines of several ranks once
  |     |-- log_files      --log-dir: a file for each rank
  |-- traceback_tail   the last traceback of a failed rank
  |-- stand_in         --mpi4py: where Python finds shmring's stand-in
"""
