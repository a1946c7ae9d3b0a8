"""Settings, and the thresholds that shmring chooses by itself.

settings           every SHMRING_ variable: the only module that reads them
    ^
thresholds         the sizes from which each algorithm is used, and the wait policy
    |
tuning_table       the file of thresholds that `shmring tune` measured on this machine

optional_deps      imports packages that only some features need, or says how to install them
"""
