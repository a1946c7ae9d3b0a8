/* The lock of src/sync/lock.h (mutex 3 of U. Drepper, "Futexes are tricky", 2011): it has one owner at a time, and
   every rank that waits gets it in the end, unless it gives up. No other sleep has a limit here, so a lost wake-up is a
   state without end. All operations on the word are locked ones, so memory is sequentially consistent. Read it together
   with sr_lock_try_acquire, sr_lock_sleep, sr_lock_pass_on and sr_lock_release.

   Bounds: RANKS ranks that take the lock TURNS times each; rank 0 never tries before it sleeps, the others may; the
   last rank may give up in any sleep, and when it is woken.

   Each of these definitions breaks the model, and Spin must find it:
     FORGETS          a rank that takes the lock after a sleep does not mark it as awaited
     LOOKS_FIRST      the owner loads the awaited bit before it releases the lock, not in the same operation
     LOOKS_AND_TAKES  a free lock is taken by a load and a store
     NO_VALUE         the sleep does not compare the word
     TRIES_AGAIN      a rank that has slept may take the lock as one that has not
     KEEPS_WAKE_UP    a rank that gives up wakes no other */
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

byte word;             /* 0: free; else the owner + 1, and AWAITED if a rank may sleep */
bool asleep[MOST_RANKS];
byte owners;

inline wake_one() /* any one of the sleepers */
{
    if
    :: atomic { asleep[0] -> asleep[0] = false }
    :: atomic { asleep[1] -> asleep[1] = false }
    :: atomic { asleep[2] -> asleep[2] = false }
    :: atomic { !asleep[0] && !asleep[1] && !asleep[2] -> skip }
    fi
}

proctype rank(byte me)
{
    byte turn, seen, next;
    for (turn : 1 .. TURNS) {
again:
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
               if
               :: !asleep[me]
               :: me == RANKS - 1 -> asleep[me] = false; goto gives_up
               fi
#ifdef TRIES_AGAIN
               ; goto again
#endif
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
        :: seen & AWAITED -> wake_one()
        :: else
        fi;
        goto over;
gives_up:
        skip;
#ifndef KEEPS_WAKE_UP
        wake_one();
#endif
over:
        atomic { seen = 0; next = 0 }
    }
}

init {
    byte i;
    atomic {
        for (i : 0 .. RANKS - 1) { run rank(i) }
    }
}
