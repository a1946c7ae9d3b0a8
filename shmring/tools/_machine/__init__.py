"""Collect the facts about a machine that `shmring info` and `shmring doctor` report.

info, doctor
  |-- machine     CPUs, memory and limits, from files of the kernel
  |-- software    versions, launchers, settings, the tuning table
  |-- probes      experiments: segments, distance of cores, speed of copies
  |-- sections    prints the facts in sections of two columns
"""
