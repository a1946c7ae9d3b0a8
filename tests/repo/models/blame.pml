/* Whose fault a wait is, as poll_peers of shmring/_engine/wait.pyx finds it: a rank may end, in order or not, as soon as it
   has done its part, and is blamed only for what it has not done. May know: nothing; read beside is_missed there.

   Bounds: one rank that does CALLS of them and ends in between or after, by closing or by dying; one that waits for all.

   Each of these breaks it, and has to be found:
     FLAG_FIRST       the flag is looked at before the liveness word instead of behind it
     CLOSES_FIRST     the rank says that it has closed before its last publish */
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
