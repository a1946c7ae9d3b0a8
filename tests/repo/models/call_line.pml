/* The call lines of src/layout.h, as shmring/_core/group.pxd writes, reads and verifies them. Call k uses line k mod
   LINES, and a rank publishes call k only after it has seen every rank's line of call k - LINES / 2. So no line is
   written while a rank may still read it, and all ranks notice a rank that makes a different call. Read it together
   with publish_line, verify and limit_unverified.

   A line is torn from the moment that its owner begins to write it until it is whole. In every call each rank may see
   all lines, or go ahead: it reads one other line, or none, as in a broadcast, a reduction or a chain, and sees the
   rest later. Lines are read as late in a call as possible. To publish a sequence number is one step here; flag.pml is
   the model of that step.

   Bounds: RANKS ranks, LINES lines of each, CALLS successive calls. In at most one of them, any, rank 0 makes a
   different call.

   Each of these definitions breaks the model, and Spin must find it:
     AHEAD_BY_ONE     one more call may be unverified when a call ends
     SEQ_FIRST        the line is published before it is written
     NO_VERIFY        lines that were not read are never verified: a mismatch goes unnoticed
     NO_ABORT         a rank that finds a mismatch does not set the abort word: the others wait */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef LINES
#define LINES 4
#endif
#ifndef CALLS
#define CALLS 7
#endif
#ifdef AHEAD_BY_ONE
#define MOST_AHEAD (LINES / 2)
#else
#define MOST_AHEAD (LINES / 2 - 1)
#endif
#define AT(rank, call) ((rank) * LINES + (call) % LINES)
#define DIFFERS(one, other, call) ((call) == odd_call && ((one) == 0) != ((other) == 0))

byte seq[RANKS * LINES];     /* of each line, as published */
byte content[RANKS * LINES]; /* the call that the line describes; 0: torn */
byte odd_call;               /* the call in which rank 0 differs; 0: none */
byte differs;                /* the abort word: 0, or the call that was found to differ */

#ifdef NO_ABORT
#define set_abort(call) skip
#else
#define set_abort(call) atomic { if :: differs == 0 -> differs = (call) :: else fi }
#endif
#define report(call) \
    assert((call) == odd_call); \
    set_abort(call)

proctype rank(byte me)
{
    byte call, verified, peer, seen;
    bool reads_all;
    for (call : 1 .. CALLS) {
#ifdef SEQ_FIRST
        seq[AT(me, call)] = call;
        content[AT(me, call)] = 0;
        content[AT(me, call)] = call;
#else
        content[AT(me, call)] = 0;
        content[AT(me, call)] = call;
        seq[AT(me, call)] = call;
#endif
        if
        :: atomic { reads_all = true; seen = me }
        :: atomic { reads_all = false; select (seen : 0 .. RANKS - 1) }; /* the line that is read; me: none */
           if
           :: seen != me ->
               seq[AT(seen, call)] >= call || differs;
               if
               :: seq[AT(seen, call)] < call -> goto over
               :: else
               fi;
               if
               :: DIFFERS(me, seen, call) -> report(call); goto over
               :: else
               fi
           :: else
           fi
        fi;
#ifdef NO_VERIFY
        verified = call;
#endif
        /* limit_unverified, or await_lines */
        if
        :: reads_all || verified + MOST_AHEAD < call ->
            do
            :: verified < call ->
                peer = (me == 0);
                do
                :: peer < RANKS ->
                    seq[AT(peer, verified + 1)] >= verified + 1 || differs;
                    atomic {
                        if
                        :: seq[AT(peer, verified + 1)] < verified + 1 -> goto over
                        :: else
                        fi;
                        assert(content[AT(peer, verified + 1)] == verified + 1);
                        if
                        :: DIFFERS(me, peer, verified + 1) -> report(verified + 1); goto over
                        :: else
                        fi;
                        peer = peer + 1 + (peer + 1 == me)
                    }
                :: peer >= RANKS -> verified++; break
                od
            :: else -> break
            od
        :: else
        fi;
        skip;
        d_step { /* the contents of the lines are read only now */
            for (peer : 0 .. RANKS - 1) {
                assert(!(reads_all || peer == seen) || content[AT(peer, call)] == call)
            };
            assert(odd_call == 0 || call <= odd_call + LINES / 2 - 1);
            peer = 0
        }
    };
over:
    skip
}

init {
    byte i;
    atomic {
        select (i : 0 .. CALLS);
        odd_call = i;
        for (i : 0 .. RANKS - 1) { run rank(i) }
    }
}
