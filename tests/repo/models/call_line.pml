/* The call lines of src/layout.h, as shmring/_core/group.pxd writes, reads and verifies them: LINES take turns, and a rank
   publishes call k only after it has seen everyone's lines of call k - LINES / 2. So nobody's line is written while
   somebody may still read it, and a rank that calls something else is found out by all. May know: nothing; read beside
   publish_line, verify and see_calls_before.

   A line is torn from when its owner begins to write it until it is whole. In every call each rank may see all lines, or
   go ahead: it reads one other line, or none, as in a broadcast, a reduction or a chain, and sees the rest later. Lines
   are read as late in a call as may be. How sequence numbers are published is flag.pml's; here it is one step.

   Bounds: RANKS, LINES a rank, CALLS one after another. In at most one of them, any, rank 0 calls something else.

   Each of these breaks it, and has to be found:
     AHEAD_BY_ONE     a call more may be left unverified when one ends
     SEQ_FIRST        the line is published before it is written
     NO_VERIFY        what was passed over is never seen: a mismatch goes unnoticed
     NO_ABORT         who finds a mismatch tells nobody: the others wait */
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

byte seq[RANKS * LINES];     /* of each line, published */
byte content[RANKS * LINES]; /* the call of which it tells; 0: torn */
byte odd_call;               /* in which rank 0 calls something else; 0: in none */
byte differs;                /* the abort word: 0, or the call that was found to differ */

#ifdef NO_ABORT
#define tell(call) skip
#else
#define tell(call) atomic { if :: differs == 0 -> differs = (call) :: else fi }
#endif
#define part(call) \
    assert((call) == odd_call); \
    tell(call)

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
        :: atomic { reads_all = false; select (seen : 0 .. RANKS - 1) }; /* the one that is read; me: none */
           if
           :: seen != me ->
               seq[AT(seen, call)] >= call || differs;
               if
               :: seq[AT(seen, call)] < call -> goto over
               :: else
               fi;
               if
               :: DIFFERS(me, seen, call) -> part(call); goto over
               :: else
               fi
           :: else
           fi
        fi;
#ifdef NO_VERIFY
        verified = call;
#endif
        /* see_calls_before, or await_lines */
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
                        :: DIFFERS(me, peer, verified + 1) -> part(verified + 1); goto over
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
        d_step { /* what lies in the lines is read only now */
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
