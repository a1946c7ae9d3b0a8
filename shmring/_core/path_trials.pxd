# Trials of the paths of calls or messages. Which path is fastest depends on what the caches hold and on how far apart
# the cores are, so one rank measures: it times the calls of each class. From time to time it tries the other path for a
# few calls, and keeps it if it is faster.
#
# The caller gives the interval before the first trial. After a trial that has changed the path, the interval is 16
# calls. After any other trial it is four times as long as before, at most 512 to 2048 calls: the more the trial has
# cost, the more. If calls of the present path have become a quarter faster or a third slower, the next trial comes
# after a quarter of an interval of 256 calls or more, as soon as calls are timed again. Among long calls it comes after
# 16 calls if the cores have moved.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from .segment cimport sr_now_ns


cdef enum:
    SIZE_CLASSES = 18     # number of classes of lengths
    FIRST_CLASS_NBYTES = 2 << 10   # the least length that is measured; the second class begins at twice this
    WINDOW_CALLS = 16     # calls of the present path whose times are taken together
    # A trial counts TRIED_CALLS calls; of long arrays only as many as move TRIED_NBYTES, but at least
    # LEAST_TRIED_CALLS: the caches take eight calls of 16 MiB to adapt to the other path. The trial ends after half of
    # the calls if that path takes a third longer, and after a quarter if it takes twice as long.
    TRIED_CALLS = 12
    TRIED_NBYTES = 192 << 20
    LEAST_TRIED_CALLS = 6
    # Through slots or the ring, settling calls come first, which do not count: as many as use each line once, since the
    # lines are not yet in the sender's cache (bench/peers/matrix.py, ping_pong of 64 KiB in shared arrays). The trial
    # ends after half of them if they take thrice as long.
    MOST_SETTLING_CALLS = 32
    CALLS_PER_LOST = 64   # the interval grows to so many calls for each call's time that the last trial has cost, ...
    LEAST_INTERVAL = 512  # ... but at least to this, ...
    MOST_INTERVAL = 2048  # ... and at most to this
    # The interval is divided by this if the times of calls have changed. Without it a scatter of 256 KiB in shared
    # arrays, written before each call, takes twice as long in bench/peers/matrix.py: reused ones come before it.
    SOONER = 4
    LEAST_SOONER = 256    # shorter intervals are not divided
    # One window in so many is timed, since the clock costs a tenth of a short call; of long calls every window is.
    TIMED_WINDOWS = 4
    LONG_CALL_NBYTES = 512 << 10
    # For short calls that are twice as fast on one path, the numbers of windows and of calls between trials are so many
    # times as large. All_reduces of 16 to 64 KiB in arrays that are reused then take a fiftieth less.
    MOST_PATIENCE = 4
    # The other path has to save one in so many of the time (bench/peers/matrix.py, as for the calls above).
    LEAST_GAIN = 32
    LEAST_MEAN_GAIN = 16
    LEAST_GAIN_ON_SHARED_CPUS = 8
    NOT_TIMED = 0


# The time that stands for several calls of one path. FASTEST_CALL: other processes disturb it least. MEAN_CALL: for a
# rank that alone gives data, since it may be ahead of the others in some calls; an interruption counts little, as each
# call counts at most twice the mean so far. MEAN_ON_SHARED_CPUS: the number of switches between ranks depends on the
# path, and times differ most from call to call.
cdef enum Timing:
    FASTEST_CALL
    MEAN_CALL
    MEAN_ON_SHARED_CPUS


# The two paths that trials compare. Those of group.pxd's Path are for stats.
cdef enum:
    THROUGH_SLOTS    # of the staging buffer; of a message: through the message ring
    READ_IN_PLACE


# The measured path of the calls of one class. Only the rank that chooses uses the members after `in_place`.
cdef struct PathTrials:
    bint used                  # there was such a call
    bint in_place              # of a collective: the path of the next call, as announced; 0: through slots
    bint far                   # the distance between the cores at the last call
    int best                   # the path that was faster when both were last tried
    int path                   # of the next call: `best`, in a trial the other one
    uint32_t count             # of calls since the trial began, or since the last one ended
    uint32_t interval          # calls between two trials
    uint32_t timed_windows     # one window in so many is timed
    uint32_t patience          # 1 to MOST_PATIENCE
    uint32_t most_gaps         # the gap before a call counts at most so many times the time of the call
    size_t buffer_nbytes       # length of the staging buffer, or of the message ring
    uint32_t settling, wanted  # calls of this trial that do not count, and those after them that do
    uint32_t timed             # calls of the present path in this trial or window
    uint64_t time              # their time, in ps a byte
    uint64_t before            # the same, of the last window of the best path
    uint64_t ended_ns          # time of the end of the last call; 0: it was not timed, or took another path


# Return the size class of a length. Each class begins at twice the length of the one before; the last has no end.
cdef inline int size_class(size_t nbytes) noexcept nogil:
    cdef int found = 0
    while found < SIZE_CLASSES - 1 and nbytes >= <size_t> 2 * FIRST_CLASS_NBYTES << found:
        found += 1
    return found


# Begin to measure the class of a call of nbytes. interval: calls before the first trial.
cdef inline void init_trials(PathTrials *trials, int path, bint far, size_t nbytes, uint32_t interval,
                             uint32_t most_gaps, size_t buffer_nbytes, uint32_t patience=1) noexcept nogil:
    cdef bint is_long = nbytes >= LONG_CALL_NBYTES
    trials.used = True
    trials.patience = 1 if is_long else patience
    trials.timed_windows = 1 if is_long else TIMED_WINDOWS * patience
    trials.best = trials.path = path
    trials.far = far
    trials.interval = interval
    trials.most_gaps = most_gaps
    trials.buffer_nbytes = buffer_nbytes


# True if the call, which has not begun, is to be timed. The last window before a trial always is.
cdef inline bint is_timed(const PathTrials *trials) noexcept nogil:
    return (trials.path != trials.best or trials.count + WINDOW_CALLS >= trials.interval
            or trials.count % (trials.timed_windows * WINDOW_CALLS) >= (trials.timed_windows - 1) * WINDOW_CALLS)


# Note the time of a call, in picoseconds a byte, since the calls of a class differ in length. It includes the gap since
# the last call of its class: a rank writes its array more slowly after other ranks have read it in place. Most of a
# long gap says nothing about the path.
cdef inline void note_time(PathTrials *trials, Timing timing, size_t nbytes, uint64_t took_ns,
                           uint64_t gap_ns) noexcept nogil:
    cdef uint64_t time = 1 + (took_ns + min(gap_ns, trials.most_gaps * took_ns)) * 1000 // nbytes
    if trials.timed == 0:
        trials.time = time
    elif timing == MEAN_ON_SHARED_CPUS:
        trials.time = mean_with(trials, time)
    elif timing == MEAN_CALL:
        if trials.timed == 1:
            trials.time = min(trials.time, 2 * time)
        trials.time = mean_with(trials, min(time, 2 * trials.time))
    else:
        trials.time = min(trials.time, time)
    trials.timed += 1


# Return the mean of the calls so far and one more.
cdef inline uint64_t mean_with(const PathTrials *trials, uint64_t time) noexcept nogil:
    return (trials.time * trials.timed + time) // (trials.timed + 1)


# The part of the time that another path has to save: one in so many.
cdef inline uint64_t least_gain(Timing timing) noexcept nogil:
    if timing == MEAN_ON_SHARED_CPUS:
        return LEAST_GAIN_ON_SHARED_CPUS
    return LEAST_MEAN_GAIN if timing == MEAN_CALL else LEAST_GAIN


# Note a call that has ended. begin_ns: 0 if it was not timed. The first call on another path does not count, since it
# follows a call on the old one. If all ranks give data, the path is announced a call ahead: the first call of a trial
# still takes the old path, and the second one does not count.
cdef inline void note_call(PathTrials *trials, Timing timing, int path, size_t nbytes, uint64_t begin_ns,
                           uint64_t gap_ns) noexcept nogil:
    cdef bint follows_timed = trials.ended_ns != NOT_TIMED
    trials.ended_ns = NOT_TIMED
    if begin_ns and path == trials.path:
        trials.ended_ns = sr_now_ns()
        if follows_timed:
            note_time(trials, timing, nbytes, trials.ended_ns - begin_ns, gap_ns)
    trials.count += 1
    if trials.path == trials.best:
        if trials.count % WINDOW_CALLS == 0:
            end_window(trials, timing)
    else:
        step_trial(trials, timing, nbytes)


# Begin a trial if it is time for it. If ranks share CPUs, the times of two windows differ too much to say whether
# something has changed.
cdef inline void end_window(PathTrials *trials, Timing timing) noexcept nogil:
    cdef bint is_faster = 4 * trials.time < 3 * trials.before
    cdef bint is_slower = 3 * trials.time > 4 * trials.before
    cdef bint is_known = trials.timed > 0 and trials.before != NOT_TIMED
    cdef bint may_be_sooner = trials.interval >= LEAST_SOONER and timing != MEAN_ON_SHARED_CPUS
    cdef bint has_changed = is_known and may_be_sooner and (is_faster or is_slower)
    cdef bint is_due = trials.count >= (trials.interval // SOONER if has_changed else trials.interval)
    if trials.timed > 0 and (is_due or not has_changed):
        trials.before = trials.time
    if is_due:
        take_path(trials, 1 - trials.best)
    trials.timed = 0


# After a call of a trial: end the trial if it is long enough, or hopeless.
cdef inline void step_trial(PathTrials *trials, Timing timing, size_t nbytes) noexcept nogil:
    cdef bint takes_thrice, takes_twice, takes_a_third_more
    if trials.count == 1:
        begin_trial(trials, nbytes)
    takes_thrice = trials.timed > 1 and trials.time > 3 * trials.before
    takes_twice = trials.timed > 1 and trials.time > 2 * trials.before
    takes_a_third_more = trials.timed > 1 and 3 * trials.time > 4 * trials.before
    if trials.count < trials.settling:
        if takes_thrice and 2 * trials.count >= trials.settling:
            end_trial(trials, least_gain(timing))
    elif trials.count == trials.settling:
        trials.timed = 0
    elif (trials.count >= trials.settling + trials.wanted
            or (takes_twice and trials.count >= trials.settling + trials.wanted // 4)
            or (takes_a_third_more and trials.count >= trials.settling + trials.wanted // 2)):
        end_trial(trials, least_gain(timing))


# Set the length of a trial from that of its first call.
cdef inline void begin_trial(PathTrials *trials, size_t nbytes) noexcept nogil:
    cdef size_t calls_in_buffer = trials.buffer_nbytes // nbytes if trials.path == THROUGH_SLOTS else 0
    trials.settling = min(calls_in_buffer, <size_t> MOST_SETTLING_CALLS)
    trials.wanted = min(max(TRIED_NBYTES // nbytes, <size_t> LEAST_TRIED_CALLS), <size_t> TRIED_CALLS)


# End a trial: keep the path if it is faster.
cdef inline void end_trial(PathTrials *trials, uint64_t gain) noexcept nogil:
    cdef uint64_t lost_calls = 0   # what the trial has cost
    if trials.timed > 0 and gain * trials.time < (gain - 1) * trials.before:
        trials.best = trials.path
        trials.before = trials.time
        trials.interval = WINDOW_CALLS
    else:
        if trials.timed > 0 and trials.time > trials.before > 0:
            lost_calls = trials.count * (trials.time - trials.before) // trials.before
        trials.interval = min(4 * trials.interval, trials.patience * most_interval(lost_calls))
    take_path(trials, trials.best)


cdef inline uint32_t most_interval(uint64_t lost_calls) noexcept nogil:
    return max(min(lost_calls * CALLS_PER_LOST, <uint64_t> MOST_INTERVAL), <uint64_t> LEAST_INTERVAL)


# Note the distance between the cores. If it has changed, the times measured so far say nothing, and the next trial
# begins after a window (bench/peers/matrix.py, ping_pong of 64 MiB). A further change does not put it off. Short calls
# are so many that their next trial comes soon anyhow.
cdef inline void note_distance(PathTrials *trials, size_t nbytes, bint far) noexcept nogil:
    if trials.far != far and nbytes >= LONG_CALL_NBYTES:
        if trials.path != trials.best or trials.interval > WINDOW_CALLS:
            take_path(trials, trials.best)
            trials.interval = WINDOW_CALLS
        trials.timed = 0
        trials.before = NOT_TIMED
    trials.far = far


# Take a path from the next call on.
cdef inline void take_path(PathTrials *trials, int path) noexcept nogil:
    if path != trials.path:
        trials.ended_ns = NOT_TIMED   # the next call follows one of the other path
    trials.path = path
    trials.count = trials.timed = 0
