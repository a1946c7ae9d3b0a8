/* One writer and one or several readers: src/broadcast.h. A reader gets every item from its first one on, no item is
   overwritten while a reader that has been admitted may read it, and no process sleeps on once it could go on. No sleep
   has a limit here, so a lost wake-up is a state without end.

   Memory is sequentially consistent: flag.pml checks the orders of a publish and a sleep.

   Bounds: READERS readers and one writer of ITEMS items, of one slot each in a ring of SLOTS. Reader 0 has a reserved
   place; the others take a free one, at any time, and may leave after any item.

   Each of these definitions breaks the model, and Spin must find it:
     IGNORES_RESERVED   the writer does not wait for the reader of a reserved place that has not come
     JOINS_ALONE        a reader takes the writer's position itself, without being admitted
     STATE_FIRST        the writer admits a reader before it has stored the reader's first position
     NO_SECOND_LOOK     the writer does not look again after it has announced its sleep
     OLD_SLOWEST        the writer sleeps though another reader is the slowest one now
     LEAVES_QUIETLY     a reader that leaves does not signal the event on which the writer may sleep
     ANNOUNCES_QUIETLY  the writer does not signal the readers' event when it puts an item in */
#ifndef READERS
#define READERS 2
#endif
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef ITEMS
#define ITEMS 3
#endif
#define WRITER READERS /* its index where processes sleep */

mtype = { FREE, RESERVED, JOINING, JOINED };
mtype place[READERS];
byte first[READERS], taken[READERS];
byte slot[SLOTS], begun[SLOTS]; /* the item in a slot + 1, and the word that announces it */
byte position;                  /* of the writer */
bool closed;
bool watching[READERS + 1];     /* the process has announced a sleep, and no signal has come since */
byte watched;                   /* the reader on whose event the writer sleeps */

/* sr_event_watch; `e` is the event of a reader, or WRITER for the one on which all readers sleep. flag.pml has events
   in detail. */
inline watch(me, e)
{
    atomic { watching[me] = true; watched = (me == WRITER -> e : watched) }
}

/* The end of sr_flag_publish, with sr_event_signal: wakes the writer, or all readers. */
inline signal(e, i)
{
    d_step {
        if
        :: e < READERS && watched == e -> watching[WRITER] = false
        :: e == WRITER ->
            for (i : 0 .. READERS - 1) { watching[i] = false }
            i = 0
        :: else
        fi
    }
}

/* sr_broadcast_find_slowest: each load is a step of its own. */
inline find_slowest(r, slowest, least, loaded)
{
    slowest = READERS;
    least = position;
    for (r : 0 .. READERS - 1) {
        atomic {
            loaded = position;
            if
            :: place[r] == JOINED -> loaded = taken[r]; slowest = (slowest == READERS -> r : slowest)
#ifndef IGNORES_RESERVED
            :: place[r] == RESERVED -> loaded = taken[r]; slowest = (slowest == READERS -> r : slowest)
#endif
            :: else
            fi;
            if
            :: loaded < least -> least = loaded; slowest = r
            :: else
            fi;
            loaded = 0
        }
    };
    r = 0
}

proctype writer()
{
    byte r, slowest, before, least, loaded;
    do
    :: position < ITEMS ->
        for (r : 0 .. READERS - 1) { /* sr_broadcast_admit */
            if
            :: place[r] == JOINING ->
#ifdef STATE_FIRST
                place[r] = JOINED;
                first[r] = position;
                taken[r] = position
#else
                first[r] = position;
                taken[r] = position;
                place[r] = JOINED
#endif
            :: else
            fi
        };
        find_slowest(r, slowest, least, loaded);
        do
        :: position - least < SLOTS -> break
        :: else ->
            before = slowest;
            watch(WRITER, before);
#ifndef NO_SECOND_LOOK
            find_slowest(r, slowest, least, loaded);
#endif
            if
            :: (position - least >= SLOTS
#ifndef OLD_SLOWEST
                && slowest == before
#endif
               ) -> !watching[WRITER]; find_slowest(r, slowest, least, loaded)
            :: else
            fi;
            d_step { watching[WRITER] = false; before = 0; watched = 0 }
        od;
        least = 0;
        slowest = 0;
        slot[position % SLOTS] = position + 1;
        begun[position % SLOTS] = position + 1;
#ifndef ANNOUNCES_QUIETLY
        signal(WRITER, r);
#endif
        position++
    :: else -> break
    od;
    closed = true;
    signal(WRITER, r)
}

proctype reader(byte me)
{
    byte at, i;
    bool ready, over;
    if
    :: me == 0 -> atomic { place[0] == RESERVED -> place[0] = JOINED }
    :: else ->
        if
        :: skip -> goto out; /* it never comes */
        :: skip
        fi;
#ifdef JOINS_ALONE
        first[me] = position;
        taken[me] = first[me];
        place[me] = JOINED
#else
        place[me] = JOINING;
        do
        :: place[me] == JOINED -> break
        :: closed && place[me] != JOINED -> goto out
        :: else ->
            watch(me, WRITER);
            if
            :: place[me] != JOINED && !closed -> !watching[me]
            :: else
            fi;
            watching[me] = false
        od
#endif
    fi;
    at = first[me];
    do
    :: atomic { over = closed; ready = begun[at % SLOTS] == at + 1 };
       if
       :: ready ->
            ready = false;
            assert(slot[at % SLOTS] == at + 1); /* the end of the copy */
            at++;
            taken[me] = at;
            signal(me, i);
            if
            :: me > 0 -> break /* it leaves early */
            :: skip
            fi
       :: !ready && over -> assert(at == ITEMS); break
       :: else ->
            watch(me, WRITER);
            if
            :: begun[at % SLOTS] != at + 1 && !closed -> !watching[me]
            :: else
            fi;
            watching[me] = false
       fi
    od;
out:
    place[me] = FREE; /* sr_broadcast_leave */
#ifndef LEAVES_QUIETLY
    signal(me, i)
#endif
}

init {
    byte i;
    atomic {
        for (i : 0 .. READERS - 1) {
            place[i] = (i == 0 -> RESERVED : FREE);
            run reader(i)
        };
        run writer()
    }
}
