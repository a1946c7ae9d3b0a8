# Rank 0 chooses between slots and single copies by measurement. Which is faster depends on what the caches hold. A
# table of sizes cannot know this: slots are faster for data that were just written, single copies for data that were
# not. The results have the same bits either way.
#
# Rank 0 times the calls of each kind and size class. From time to time it tries the other path for a few calls, and
# keeps the faster one: after 16 calls, then after twice as many if the other path was slower, up to 512. It tries at
# once if the calls of the present path have become a quarter faster or a third slower. All ranks must take the same
# path, so rank 0 announces in its descriptor of each call the path of the next call of the class.

from libc.stdint cimport uint32_t, uint64_t

from .group cimport ALL_GATHER, ALL_TO_ALL, CHOICE_CLASSES, Call, Choice, Group


cdef enum:
    LEAST_MEASURED_NBYTES = 64 << 10   # of a piece
    WINDOW_CALLS = 16     # calls of the present path whose times are taken together
    TRIED_CALLS = 12      # of the other path in one trial: the caches take eight calls of 16 MiB to adapt to it
    HOPELESS_CALLS = 4    # in a trial; they suffice if the other path takes a third longer
    LEAST_GAIN = 32       # the other path is kept if it saves one part in so many, ...
    LEAST_SHARING_GAIN = 5   # ... if ranks share CPUs: their times differ more from call to call
    MOST_INTERVAL = 512   # calls between two trials
    NOT_TIMED = 0


# Return the size class of pieces of at least LEAST_MEASURED_NBYTES: each is twice as long as the one before.
cdef inline int size_class(size_t nbytes) noexcept nogil:
    cdef int found = 0
    while found < CHOICE_CLASSES - 1 and nbytes >= <size_t> 2 * LEAST_MEASURED_NBYTES << found:
        found += 1
    return found


# Return the choice that holds for the call, on all ranks alike, or NULL if its path is not measured. In measured calls
# every rank has something to copy, no byte is copied by two ranks, and every rank waits for the lines of all others.
cdef inline Choice *choice_of(Group *g, const Call *c) noexcept nogil:
    if (not g.single_copy or not g.tuning.single_copy_measured or c.given != NULL
            or c.nbytes < LEAST_MEASURED_NBYTES or (c.kind != ALL_TO_ALL and (c.kind != ALL_GATHER or g.size > 2))):
        return NULL
    return &g.choice[c.kind != ALL_TO_ALL][size_class(c.nbytes)]


# Rank 0: the path of the next call.
cdef inline bint next_path(const Choice *choice) noexcept nogil:
    return choice.best != choice.is_trial


# Rank 0: note a call that took `ns`. Times are in picoseconds a byte, since the calls of a class differ in length.
# Compare the fastest calls, since other processes disturb these least. If ranks share CPUs, compare the means: the
# number of switches between ranks depends on the path.
cdef inline void note_time(const Group *g, Choice *choice, const Call *c, bint single_copy, uint64_t ns) noexcept nogil:
    cdef uint64_t time = 1 + ns * 1000 // c.nbytes
    if single_copy == next_path(choice):
        if g.oversubscribed:
            choice.time = (choice.time * choice.timed + time) // (choice.timed + 1)
        elif choice.timed == 0 or time < choice.time:
            choice.time = time
        choice.timed += 1
    choice.count += 1
    if choice.is_trial:
        if choice.count == TRIED_CALLS or (choice.count == HOPELESS_CALLS and 3 * choice.time > 4 * choice.before):
            end_trial(choice, LEAST_SHARING_GAIN if g.oversubscribed else LEAST_GAIN)
    elif choice.count % WINDOW_CALLS == 0:
        end_window(choice, g.oversubscribed)


# Rank 0: keep the faster path.
cdef inline void end_trial(Choice *choice, uint64_t least_gain) noexcept nogil:
    choice.interval = min(2 * max(choice.interval, <uint32_t> WINDOW_CALLS), <uint32_t> MOST_INTERVAL)
    if choice.timed > 0 and least_gain * choice.time < (least_gain - 1) * choice.before:
        choice.best = not choice.best
        choice.before = choice.time
        choice.interval = WINDOW_CALLS
    choice.is_trial = False
    choice.count = choice.timed = 0


# Rank 0: begin a trial if it is time for one. If ranks share CPUs, the times of two windows differ too much to say
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
