/* The blame for a wait, as poll_peers of shmring/_engine/wait.pyx finds it. A rank may end, in order or not, as soon as
   it has done its part of a call, and is blamed only for a part that it has not done. Read it together with is_missed.

   Bounds: one rank that does its part of CALLS calls and ends in between or after, by closing or by dying; one rank
   that waits for all of them.

   Each of these definitions breaks the model, and Spin must find it:
     FLAG_FIRST       the flag is loaded before the liveness word, not after it
     CLOSES_FIRST     the rank publishes that it has closed before its last flag */
#ifndef CALLS
#define CALLS 3
#endif

byte flag;
mtype = { JOINED, CLOSED, DIED };
mtype liveness = JOINED;

proctype rank()
{
    byte call = 0;
    do
    :: call < CALLS ->
#ifdef CLOSES_FIRST
        if
        :: call == CALLS - 1 -> liveness = CLOSED
        :: else
        fi;
#endif
        call++;
        flag = call
    :: liveness = DIED; break
    :: call > 0 -> liveness = CLOSED; break
    od
}

proctype waiter()
{
    byte call, seen;
    mtype found;
    for (call : 1 .. CALLS) {
        do
        :: flag >= call -> break
        :: flag < call ->
#ifdef FLAG_FIRST
            seen = flag;
            found = liveness;
#else
            found = liveness;
            seen = flag;
#endif
            if
            :: found != JOINED && seen < call -> assert(flag < call && liveness != JOINED); goto over
            :: else
            fi
        od
    };
over:
    skip
}

init {
    atomic { run rank(); run waiter() }
}
