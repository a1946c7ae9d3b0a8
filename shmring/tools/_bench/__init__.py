"""The parts of `shmring bench`, `shmring predict` and `shmring tune`.

bench, predict  ->  rank -> calls      in a rank: arrays, the call, the check against NumPy, the samples
    |-- table                          the figures as lines, while they are measured
    |-- compare                        figures of other runs
    |-- plot                           figures as a picture

tune            ->  trials             in a rank: communicators that differ in one threshold, timed in turn
"""
