"""Resources of the Linux kernel, and its facts about processes and CPUs.

segments           memfd segments: make, allocate, map    -> limits, procfs
file_descriptors   memory that a process opens through another one's /proc    -> procfs, limits
limits             the CPUs and the memory that this process may use: cgroups, affinity
procfs             /proc: whether a process is still the same one, and how it ended
processes          a child dies with its parent; how a process ended; standard streams
ended_ranks        the memfd in which shmrun and its ranks write how ranks have ended
deadline           deadlines that do not count the time in which the process was stopped
cpu_topology       CPUs by node, cache and core, and a share for each rank    -> cpulist
cpulist            lists of numbers as the kernel writes them: 0,2-3
"""
