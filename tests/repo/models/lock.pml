/* The lock of src/sync/lock.h (after U. Drepper, "Futexes are tricky", 2011, mutex 3): one owner at a time, and whoever waits
   gets it in the end. May know: nothing; read beside sr_lock_try, sr_lock_sleep and sr_lock_leave. No sleep has a limit
   here, so a lost wake-up is a state without end. All its operations are locked ones, so memory is that of one machine.

   Bounds: RANKS that take the lock TURNS times each; rank 0 never tries before it sleeps, the others may.

   Each of these breaks it, and has to be found:
     FORGETS          who took it after a sleep does not mark that others may be waiting
     LOOKS_FIRST      whether somebody waits is looked at before it is let go, not with it
     LOOKS_AND_TAKES  a free lock is taken by a load and a store
     NO_VALUE         the sleep does not compare the word */
#ifndef RANKS /* at most MOST_RANKS */
#define RANKS 3
#endif
#ifndef TURNS
#define TURNS 2
#endif
#define MOST_RANKS 3
#define AWAITED 128
#ifdef FORGETS
#define TAKEN_LATE(rank) ((rank) + 1)
#else
#define TAKEN_LATE(rank) (((rank) + 1) | AWAITED)
#endif

byte word;             /* 0: free; else the owner + 1, and AWAITED if somebody may sleep */
bool asleep[MOST_RANKS];
byte owners;

proctype rank(byte me)
{
    byte turn, seen, next;
    for (turn : 1 .. TURNS) {
        if
        :: me > 0 -> /* L1 */
#ifdef LOOKS_AND_TAKES
            seen = word;
            if
            :: seen == 0 -> word = me + 1; goto ours
            :: else
            fi
#else
            atomic {
                if
                :: word == 0 -> word = me + 1; goto ours
                :: else
                fi
            }
#endif
        :: skip
        fi;
        do /* L2 */
        :: seen = word;
           do
           :: atomic {
                  if
                  :: seen == 0 -> next = TAKEN_LATE(me)
                  :: else -> next = seen | AWAITED
                  fi
              };
              if
              :: next == seen -> break
              :: else ->
                  atomic {
                      if
                      :: word == seen -> word = next; break
                      :: else -> seen = word
                      fi
                  }
              fi
           od;
           if
           :: seen == 0 -> break
           :: else ->
               atomic {
                   if
#ifdef NO_VALUE
                   :: true -> asleep[me] = true
#else
                   :: word == next -> asleep[me] = true
                   :: else
#endif
                   fi
               };
               !asleep[me]
           fi
        od;
ours:
        owners++;
        assert(owners == 1 && (word & ~AWAITED) == me + 1);
        owners--;
#ifdef LOOKS_FIRST
        seen = word;
        word = 0;
#else
        atomic { seen = word; word = 0 }; /* U1 */
#endif
        if
        :: seen & AWAITED -> /* any one that sleeps */
            if
            :: atomic { asleep[0] -> asleep[0] = false }
            :: atomic { asleep[1] -> asleep[1] = false }
            :: atomic { asleep[2] -> asleep[2] = false }
            :: atomic { !asleep[0] && !asleep[1] && !asleep[2] -> skip }
            fi
        :: else
        fi;
        atomic { seen = 0; next = 0 }
    }
}

init {
    byte i;
    atomic {
        for (i : 0 .. RANKS - 1) { run rank(i) }
    }
}
