# Runs the trials of paths (path_trials.pxd) on invented times; test_path_trials.py compiles it.

from libc.stdint cimport uint64_t
from libc.string cimport memset

from shmring._core.path_trials cimport (
    MEAN_CALL, THROUGH_SLOTS, WINDOW_CALLS, PathTrials, init_trials, is_timed, note_call, note_distance,
)
from shmring._core.segment cimport sr_now_ns


def paths_taken(phases, size_t nbytes):
    """Return the path of each call: 0 through the ring, 1 in place.

    phases: tuples of a number of calls, whether the cores are far apart, and the ns of a call on either path.
    """
    cdef PathTrials trials
    cdef uint64_t begin_ns
    cdef int path
    memset(&trials, 0, sizeof(trials))
    init_trials(&trials, THROUGH_SLOTS, phases[0][1], nbytes, WINDOW_CALLS, 32, 1 << 20)
    taken = []
    for ncalls, far, ns_of_path in phases:
        for _ in range(ncalls):
            note_distance(&trials, nbytes, far)
            path = trials.path
            begin_ns = sr_now_ns() - <uint64_t> ns_of_path[path] if is_timed(&trials) else 0
            note_call(&trials, MEAN_CALL, path, nbytes, begin_ns, 0)
            taken.append(path)
    return taken
