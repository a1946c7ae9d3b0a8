# Data that ranks move go through slots, or are read in place: shared arrays as other ranks map them, private ones by
# single copies through the kernel. Which is faster depends on what the caches hold. A table of sizes cannot know this:
# slots are faster for data that were just written, reading in place for data that were not. The results have the same
# bits either way. So one rank chooses by measurement.
#
# If one rank alone gives data, that rank chooses: it reads nothing, and its call line tells the others. In other calls
# rank 0 chooses. All ranks must take the same path, so the rank that chooses announces in its descriptor of each call
# the path of the next call of the class.
#
# That rank times the calls of each kind and size class. From time to time it tries the other path for a few calls, and
# keeps the faster one. The first trial comes after 16 calls (64 of shared arrays), the next after 16 if the path has
# changed, and else after twice as many as before, up to 512. A trial comes at once if the calls of the present path
# have become a quarter faster or a third slower.

from libc.stdint cimport uint32_t, uint64_t

from .group cimport (
    ALL_GATHER, ALL_TO_ALL, AUTO, BROADCAST, CHOICE_CLASSES, GATHER, REDUCE_SCATTER, SCATTER, Call, Choice, Group,
    is_moved, is_scan,
)
from .segment cimport sr_now_ns


cdef enum:
    LEAST_SHARED_NBYTES = 8 << 10     # of a piece in a shared array, ...
    LEAST_PRIVATE_NBYTES = 64 << 10   # ... and in a private one
    WINDOW_CALLS = 16     # calls of the present path whose times are taken together
    FIRST_SHARED_CALLS = 64   # shared arrays are read in place so often before the first trial
    HOPELESS_CALLS = 6    # in a trial; they suffice if the other path takes a third longer
    TRIED_CALLS = 12      # in a trial: the caches take eight calls of 16 MiB to adapt to the other path
    LEAST_GAIN = 32       # the other path is kept if it saves one part in so many, ...
    LEAST_MEAN_GAIN = 16  # ... if one rank alone gives data, ...
    LEAST_SHARING_GAIN = 5   # ... if ranks share CPUs: their times differ more from call to call
    MOST_INTERVAL = 512   # calls between two trials
    ALWAYS_TIMED_NBYTES = 64 << 10   # of shorter pieces every fourth window is timed: the clock costs a tenth of a call
    MOST_GAPS = 4         # the time before a call counts up to so many times the time of the call
    NOT_TIMED = 0
    NOBODY = -1


# Return the size class of pieces of at least LEAST_SHARED_NBYTES: each is twice as long as the one before.
cdef inline int size_class(size_t nbytes) noexcept nogil:
    cdef int found = 0
    while found < CHOICE_CLASSES - 1 and nbytes >= <size_t> 2 * LEAST_SHARED_NBYTES << found:
        found += 1
    return found


# True if one rank alone gives data.
cdef inline bint has_one_giver(const Group *g, const Call *c) noexcept nogil:
    return c.kind == BROADCAST or c.kind == SCATTER or (g.size == 2 and (c.kind == GATHER or is_scan(c)))


# Return the rank that chooses the path of a call: the one that alone gives data, or rank 0 if all ranks give data and
# await each other's lines.
cdef inline int chooser_of(const Group *g, const Call *c) noexcept nogil:
    if has_one_giver(g, c):
        return 1 - c.root if c.kind == GATHER else c.root   # the root of a scan is 0
    return 0 if c.kind == ALL_TO_ALL or c.kind == ALL_GATHER or c.kind == REDUCE_SCATTER else NOBODY


# Return the choice that holds for the call, or NULL if this rank knows none. Where ranks share CPUs, a rank that alone
# gives data may run many calls ahead of the others, so the time of its calls says little.
cdef inline Choice *choice_of(Group *g, const Call *c) noexcept nogil:
    cdef int chooser = chooser_of(g, c)
    cdef bint shared = c.x_block != 0
    if (chooser == NOBODY or c.given != NULL or c.algorithm != AUTO or not g.tuning.single_copy_measured
            or (has_one_giver(g, c) and (chooser != g.rank or g.oversubscribed))
            or c.nbytes < (LEAST_SHARED_NBYTES if shared else LEAST_PRIVATE_NBYTES)
            or not (shared or (g.single_copy and is_moved(g, c)))):
        return NULL
    return &g.choice[shared][c.kind - REDUCE_SCATTER][size_class(c.nbytes)]


# The chooser: the path of the next call; 1: in place.
cdef inline bint next_path(const Choice *choice) noexcept nogil:
    return choice.best != choice.is_trial


# On every rank: begin to measure a class: shared arrays are first read in place, private ones are not.
cdef inline void begin_choice(Choice *choice, bint shared) noexcept nogil:
    choice.used = True
    choice.best = choice.in_place = shared
    choice.interval = FIRST_SHARED_CALLS if shared else WINDOW_CALLS


# The chooser: True if the call, which has not begun, is to be timed. The last window before a trial always is.
cdef inline bint is_timed(const Choice *choice, const Call *c) noexcept nogil:
    return (choice.is_trial or c.nbytes >= ALWAYS_TIMED_NBYTES or choice.count + WINDOW_CALLS >= choice.interval
            or choice.count % (4 * WINDOW_CALLS) >= 3 * WINDOW_CALLS)


# The chooser: note the time of a call. It includes the gap since the last call of its class, since a rank writes its
# array more slowly after other ranks have read it in place. Most of a long gap says nothing about the path. Times are
# in picoseconds a byte, since the calls of a class differ in length.
#
# Keep the time of the fastest call, since other processes disturb it least. Keep the mean if ranks share CPUs, since
# the number of switches between ranks depends on the path, and if this rank alone gives data, since it may be ahead of
# the others in some calls; an interruption then counts little.
cdef inline void note_time(const Group *g, Choice *choice, const Call *c, uint64_t took_ns) noexcept nogil:
    cdef uint64_t time = 1 + (took_ns + min(c.gap_ns, MOST_GAPS * took_ns)) * 1000 // c.nbytes
    if choice.timed == 0:
        choice.time = time
    elif g.oversubscribed:
        choice.time = mean_with(choice, time)
    elif has_one_giver(g, c):
        if choice.timed == 1:
            choice.time = min(choice.time, 2 * time)
        choice.time = mean_with(choice, min(time, 2 * choice.time))
    else:
        choice.time = min(choice.time, time)
    choice.timed += 1


# Return the mean of the calls so far and one more.
cdef inline uint64_t mean_with(const Choice *choice, uint64_t time) noexcept nogil:
    return (choice.time * choice.timed + time) // (choice.timed + 1)


# The part of the time that the other path has to save: one in so many.
cdef inline uint64_t least_gain(const Group *g, const Call *c) noexcept nogil:
    if g.oversubscribed:
        return LEAST_SHARING_GAIN
    return LEAST_MEAN_GAIN if has_one_giver(g, c) else LEAST_GAIN


# The chooser: note a call that has ended. In a trial the first call still takes the path announced before, and the
# second one follows a call of that path, so neither counts.
cdef inline void note_call(const Group *g, Choice *choice, const Call *c, bint in_place) noexcept nogil:
    cdef bint follows_timed = choice.ended_ns != NOT_TIMED
    choice.ended_ns = NOT_TIMED
    if c.begin_ns and in_place == next_path(choice):
        choice.ended_ns = sr_now_ns()
        if follows_timed:
            note_time(g, choice, c, choice.ended_ns - c.begin_ns)
    choice.count += 1
    if choice.is_trial:
        if choice.count == TRIED_CALLS or (choice.count == HOPELESS_CALLS and choice.timed > 0
                                           and 3 * choice.time > 4 * choice.before):
            end_trial(choice, least_gain(g, c))
    elif choice.count % WINDOW_CALLS == 0:
        end_window(choice, g.oversubscribed)


# The chooser: keep the faster path.
cdef inline void end_trial(Choice *choice, uint64_t gain) noexcept nogil:
    choice.interval = min(2 * choice.interval, <uint32_t> MOST_INTERVAL)
    if choice.timed > 0 and gain * choice.time < (gain - 1) * choice.before:
        choice.best = not choice.best
        choice.before = choice.time
        choice.interval = WINDOW_CALLS
    choice.is_trial = False
    choice.count = choice.timed = 0


# The chooser: begin a trial if it is time for one. If ranks share CPUs, the times of two windows differ too much to say
# whether something has changed.
cdef inline void end_window(Choice *choice, bint oversubscribed) noexcept nogil:
    cdef bint is_faster = 4 * choice.time < 3 * choice.before
    cdef bint is_slower = 3 * choice.time > 4 * choice.before
    cdef bint is_known = choice.timed > 0 and choice.before != NOT_TIMED
    cdef bint has_changed = is_known and not oversubscribed and (is_faster or is_slower)
    if has_changed:
        choice.interval = WINDOW_CALLS
    if has_changed or choice.count >= choice.interval:
        choice.is_trial = True
        choice.count = 0
    if choice.timed > 0:
        choice.before = choice.time
    choice.timed = 0
