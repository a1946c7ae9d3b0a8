"""What the Linux kernel gives to a process, and what it tells of processes and CPUs.

segments       memfd segments: make, allocate, map    -> limits
limits         how many CPUs and how much memory this process may use: cgroups, affinity
procfs         /proc: whether a process is still the same one, and how it ended
processes      a child dies with its parent; how a process ended
cpu_topology   which CPUs share what, and a share of them for each rank    -> cpulist
cpulist        lists of numbers as the kernel writes them: 0,2-3
"""
