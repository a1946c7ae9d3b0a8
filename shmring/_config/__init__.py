"""What can be set, and the numbers that shmring chooses by itself.

settings           every SHMRING_ variable: the only place that reads them
    ^
thresholds         from which size on which algorithm is used, and how long to wait in which way
    |
tuning_table       the file of thresholds that `shmring tune` measured on this machine

optional_deps      imports packages that only some features need, or says how to install them
"""
