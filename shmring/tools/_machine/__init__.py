"""What `shmring info` and `shmring doctor` find out about a machine.

info, doctor
  |-- machine     CPUs, memory and limits, from files of the kernel
  |-- software    versions, launchers, settings, the tuning table
  |-- probes      what has to be tried: segments, distance of cores, speed of copies
  |-- sections    prints it in sections of two columns
"""
