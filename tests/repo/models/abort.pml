/* The abort word: src/sync/abort.h, set_abort of shmring/_core/group.pxd, and the sleeps that load the word. The
   first report counts, all ranks see the same word and its whole report, and no rank sleeps on. No sleep has a limit
   here, so a lost wake-up is a state without end. Read it together with sr_abort_set and with sleep_local of
   shmring/_engine/wait.pyx.

   Memory is that of x86, as in flag.pml: the plain stores of a rank wait in its buffer; locked operations and system
   calls wait until the buffer is empty.

   Bounds: REPORTERS ranks that give up at any time; SLEEPERS ranks that wait for a flag that is never published, each
   on the event of another rank; reports of two words.

   Each of these definitions breaks the model, and Spin must find it:
     STORE_WORD       the word is loaded and stored, not compared and swapped
     REPORT_LAST      the report is written after the word
     NO_SECOND_LOOK   a sleeper does not load the word again after S1
     NO_RING          the events are not signalled */
#ifndef REPORTERS
#define REPORTERS 2
#endif
#ifndef SLEEPERS
#define SLEEPERS 2
#endif
#define EITHER 2 /* words of a report */

byte abort_word;                 /* 0, or the reporter + 1 */
byte report[REPORTERS * EITHER];
byte event[SLEEPERS];             /* of the rank that this sleeper awaits */
bool asleep[SLEEPERS];
byte raised;                     /* the word that a rank has raised */
/* Place and value; the place is a word of the report, or EITHER for the abort word. */
chan stores[REPORTERS] = [3] of { byte, byte };

#define raise(word) \
    atomic { \
        assert((word) != 0 && (raised == 0 || raised == (word))); \
        assert(report[((word) - 1) * EITHER] && report[((word) - 1) * EITHER + 1]); \
        raised = (word) \
    }

proctype take_out(byte reporter)
{
    byte where, what;
end:
    do
    :: atomic { stores[reporter]?where, what ->
           if
           :: where == EITHER -> abort_word = what
           :: else -> report[reporter * EITHER + where] = what
           fi;
           where = 0; what = 0
       }
    od
}

/* set_abort */
proctype reporter(byte me)
{
    byte i, old, seen;
    if
    :: abort_word == 0 ->
#ifndef REPORT_LAST
        stores[me]!0, 1;
        stores[me]!1, 1;
#endif
#ifdef STORE_WORD
        if
        :: abort_word == 0 -> stores[me]!EITHER, me + 1
        :: else
        fi;
#else
        atomic { empty(stores[me]) ->
            if
            :: abort_word == 0 -> abort_word = me + 1
            :: else
            fi
        };
#endif
#ifdef REPORT_LAST
        stores[me]!0, 1;
        stores[me]!1, 1;
#endif
    :: else
    fi;
#ifndef NO_RING
    for (i : 0 .. SLEEPERS - 1) {
        old = event[i];
        do
        :: atomic { empty(stores[me]) && event[i] == old -> event[i] = (old | 1) + 1 }; break
        :: atomic { empty(stores[me]) && event[i] != old -> old = event[i] }
        od;
        asleep[i] = false
    };
#endif
    empty(stores[me]);
    seen = abort_word;
    raise(seen)
}

/* The end of wait_and_unpublish: poll_call, then a sleep on a flag that is never published. */
proctype sleeper(byte me)
{
    byte generation, seen;
    do
    :: seen = abort_word;
       if
       :: seen -> break
       :: else
       fi;
       atomic { generation = event[me] | 1; event[me] = generation }; /* S1 */
#ifndef NO_SECOND_LOOK
       seen = abort_word; /* S2 */
#endif
       if
       :: seen == 0 ->
           atomic {
               if
               :: event[me] == generation -> asleep[me] = true
               :: else
               fi
           };
           !asleep[me]
       :: else
       fi
    od;
    raise(seen)
}

init {
    byte i;
    atomic {
        for (i : 0 .. REPORTERS - 1) { run reporter(i); run take_out(i) }
        for (i : 0 .. SLEEPERS - 1) { run sleeper(i) }
    }
}
