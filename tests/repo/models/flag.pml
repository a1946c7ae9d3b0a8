/* Publish and sleep: src/sync/flag.h and event.h. No process sleeps on once its flag has reached the value. No sleep
   has a limit here, so a lost wake-up is a state without end, and Spin finds all of them.

   Memory is that of x86 (TSO): the plain stores of a process wait in its buffer, first in, first out, and leave it at
   any later time. Loads do not wait for the buffer; locked operations and system calls do. The code has no plain store
   in these places: -DSTORE_FLAG and -DSTORE_EVENT replace a locked operation by one.

   Bounds: WRITERS processes with a flag each and one event for all, SLEEPERS processes that wait for all flags; each
   flag goes from 0 to VALUES. Sleeper s waits for every (s + 1)th value, so it is also woken in vain. The event begins
   two signals before its word wraps.

   Each of these definitions breaks the model, and Spin must find it:
     STORE_FLAG       the flag is a release store, not a locked exchange (P1)
     STORE_EVENT      the sleeper's bit is a load and a store, not a locked or (S1)
     NO_SECOND_LOOK   the flag is not loaded again after S1 (S2)
     NO_GENERATION    a signal sets the event's word to 0, not to the next even number
     WAKE_ONE         a signal wakes one sleeper, not all */
#ifndef WRITERS
#define WRITERS 1
#endif
#ifndef SLEEPERS
#define SLEEPERS 2
#endif
#ifndef VALUES
#define VALUES 3
#endif

byte flag[WRITERS];
byte event = 252; /* a word of 8 bits: a generation | 1 if a process sleeps */
bool asleep[SLEEPERS];
chan flag_stores[WRITERS] = [2] of { byte };
chan event_stores[SLEEPERS] = [1] of { byte };

proctype take_out_flag(byte writer)
{
    byte value;
end:
    do
    :: atomic { flag_stores[writer]?value -> flag[writer] = value }
    od
}

proctype take_out_event(byte sleeper)
{
    byte value;
end:
    do
    :: atomic { event_stores[sleeper]?value -> event = value }
    od
}

/* sr_flag_publish, with sr_event_signal. */
proctype writer(byte me)
{
    byte value, old, i;
    for (value : 1 .. VALUES) {
#ifdef STORE_FLAG
        flag_stores[me]!value;
#else
        atomic { empty(flag_stores[me]) -> flag[me] = value }; /* P1 */
#endif
        old = event;
        if
        :: old & 1 ->
            old = event;
            do
            :: atomic { empty(flag_stores[me]) && event == old ->
#ifdef NO_GENERATION
                   event = 0
#else
                   event = (old | 1) + 1
#endif
               };
               break
            :: atomic { empty(flag_stores[me]) && event != old -> old = event }
            od;
            atomic {
                i = 0;
                do
                :: i < SLEEPERS && asleep[i] ->
                    asleep[i] = false;
#ifdef WAKE_ONE
                    break;
#endif
                    i++
                :: i < SLEEPERS && !asleep[i] -> i++
                :: i == SLEEPERS -> break
                od
            }
        :: else
        fi
    }
}

/* sr_flag_sleep in a loop; with several writers, the sleep on one event for messages. */
proctype sleeper(byte me)
{
    byte taken[WRITERS], generation, w;
    bool all, moved;
    do
    :: all = true; moved = false;
       for (w : 0 .. WRITERS - 1) { /* A1 */
           if
           :: taken[w] + me + 1 <= VALUES && flag[w] >= taken[w] + me + 1 -> taken[w] = taken[w] + me + 1; moved = true
           :: else
           fi;
           all = all && taken[w] + me + 1 > VALUES
       };
       if
       :: all -> break
       :: !all && !moved ->
#ifdef STORE_EVENT
           generation = event | 1;
           event_stores[me]!generation;
#else
           atomic { generation = event | 1; event = generation }; /* S1 */
#endif
#ifndef NO_SECOND_LOOK
           for (w : 0 .. WRITERS - 1) {
               moved = moved || (taken[w] + me + 1 <= VALUES && flag[w] >= taken[w] + me + 1) /* S2 */
           };
#endif
           if
           :: !moved ->
               atomic { empty(event_stores[me]) -> /* the kernel compares the word and enters the sleeper in one step */
                   if
                   :: event == generation -> asleep[me] = true
                   :: else
                   fi
               };
               !asleep[me]
           :: else
           fi
       :: else
       fi
    od
}

init {
    byte i;
    atomic {
        for (i : 0 .. WRITERS - 1) { run writer(i) }
        for (i : 0 .. SLEEPERS - 1) { run sleeper(i) }
#ifdef STORE_FLAG
        for (i : 0 .. WRITERS - 1) { run take_out_flag(i) }
#endif
#ifdef STORE_EVENT
        for (i : 0 .. SLEEPERS - 1) { run take_out_event(i) }
#endif
    }
}
