/* The abort word, as src/sync/abort.h and report_abort of shmring/_core/group.pxd set it and sleeps look at it: the first to come
   decides, everyone sees the same word and all of its report, and nobody sleeps on. May know: nothing; read beside
   sr_abort_set and the sleep of a wait. No sleep has a limit here, so who sleeps on is a state without end.

   Memory is that of x86, as in flag.pml: a rank's plain stores wait in its buffer, locked operations and system calls
   for the buffer.

   Bounds: REPORTERS that give up at any time, of their own accord; SLEEPERS that wait for what never comes, each on the
   event of another rank; reports of two words.

   Each of these breaks it, and has to be found:
     STORE_WORD       the word is looked at and stored instead of compared and swapped
     REPORT_LAST      the report is written behind the word
     NO_SECOND_LOOK   the word is not looked at again behind S1
     NO_RING          the events are not rung */
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
byte raised;                     /* the word that somebody has raised */
chan stores[REPORTERS] = [3] of { byte, byte }; /* where, what; where: a word of the own report, EITHER: the abort word */

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

/* report_abort */
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

/* The end of wait_long: poll_call, then a sleep for a flag that does not come. */
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
