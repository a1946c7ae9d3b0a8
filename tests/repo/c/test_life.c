/* Life between processes: a parked thread holds `holder` for its rank; others see its death, whatever it was, and
   nothing else. Asked, it tells. */
#include "flag.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "check.h"

/* ---- the child: a rank whose thread is parked ----------------------------------------------------------------- */

struct nursery {
    struct sr_life life;
    struct sr_desk desk;
    char stacks[64];
    sr_flag order;  /* W parent: what the child is to do next */
    sr_flag obeyed; /* W child: the last order that it has carried out */
};

enum order { NOTHING, END_OTHER_THREADS, LEAVE, EXIT_WITHOUT_LEAVING, BE_KILLED_SOON, DIE_WHILE_TELLING };

#define TOLD "in main, in live"

static struct nursery *nursery;
static _Atomic uint32_t leave;

static void *park(void *unused)
{
    struct sr_hold hold;
    sr_life_hold(&nursery->life, &hold);
    while (sr_desk_await(&nursery->desk, &leave)) {
        sr_desk_begin_telling(&nursery->desk);
        memcpy(nursery->stacks, TOLD, sizeof TOLD);
        if (sr_flag_load(&nursery->order) == DIE_WHILE_TELLING)
            kill(getpid(), SIGKILL);
        sr_desk_end_telling(&nursery->desk);
    }
    sr_life_let_go(&nursery->life);
    return unused;
}

static void *pass_by(void *unused) { return unused; }

static void nap(void)
{
    struct timespec moment = {0, 200000};
    nanosleep(&moment, NULL);
}

static void end_other_threads(void)
{
    pthread_t thread;
    for (int i = 0; i < 8; i++) {
        CHECK(pthread_create(&thread, NULL, pass_by, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    }
}

static void carry_out(enum order order, pthread_t parked)
{
    if (order == END_OTHER_THREADS) {
        end_other_threads();
    } else if (order == LEAVE) {
        sr_life_set_state(&nursery->life, SR_CLOSED);
        sr_desk_leave(&nursery->desk, &leave);
        CHECK(pthread_join(parked, NULL) == 0);
    } else if (order == EXIT_WITHOUT_LEAVING) {
        _exit(0);
    } else if (order == BE_KILLED_SOON) {
        for (int i = 0; i < 100; i++)
            nap();
        kill(getpid(), SIGKILL);
    }
}

/* Never returns: lives until it is told to go, or killed, with its parent at the latest. */
static void live(void)
{
    pthread_t parked;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    CHECK(pthread_create(&parked, NULL, park, NULL) == 0);
    while (!sr_life_is_held(&nursery->life))
        nap();
    sr_life_set_state(&nursery->life, SR_JOINED);
    for (uint64_t done = NOTHING;;) {
        uint64_t order = sr_flag_load(&nursery->order);
        if (order != done)
            carry_out((enum order)order, parked);
        sr_flag_set(&nursery->obeyed, done = order);
        nap();
    }
}

/* ---- the parent: a rank that looks ----------------------------------------------------------------------------- */

static pid_t bring_up(void)
{
    if (nursery != NULL)
        CHECK(munmap(nursery, sizeof *nursery) == 0);
    nursery = mmap(NULL, sizeof *nursery, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(nursery != MAP_FAILED);
    CHECK(!sr_life_is_held(&nursery->life) && !sr_life_died(&nursery->life));
    CHECK(sr_life_state(&nursery->life) == SR_ABSENT);
    pid_t child = fork();
    if (child == 0)
        live();
    CHECK(child > 0);
    while (sr_life_state(&nursery->life) != SR_JOINED)
        nap();
    CHECK(sr_life_is_held(&nursery->life) && !sr_life_died(&nursery->life));
    return child;
}

static void order(enum order order)
{
    sr_flag_set(&nursery->order, order);
    while (sr_flag_load(&nursery->obeyed) != order)
        nap();
}

static void await_death(void)
{
    while (!sr_life_died(&nursery->life))
        nap();
    CHECK(sr_life_is_held(&nursery->life)); /* nobody takes the place of the dead */
}

static void bury(pid_t child, int signal)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) ? WEXITSTATUS(status) == 0 && signal == 0 : WTERMSIG(status) == signal);
}

static void test_killed_rank_is_seen_as_dead(void)
{
    for (int i = 0; i < 10; i++) {
        pid_t child = bring_up();
        kill(child, SIGKILL);
        await_death();
        bury(child, SIGKILL);
    }
}

/* The bell rings for nobody: what ends the nap is the death. */
static void test_death_wakes_one_who_naps_on_the_life(void)
{
    const uint64_t ten_minutes_ns = 600000000000u;
    static struct sr_bell bell;
    for (int i = 0; i < 5; i++) {
        pid_t child = bring_up();
        struct sr_nap nap = {0};
        sr_nap_watch(&nap, &bell);
        CHECK(sr_nap_watch_life(&nap, &nursery->life) && nap.n == 2);
        sr_flag_set(&nursery->order, BE_KILLED_SOON);
        int woken = sr_nap_try(&nap, ten_minutes_ns);
        if (woken == SR_NAP_UNKNOWN)
            await_death(); /* before Linux 5.16 */
        else
            CHECK(woken == 1);
        CHECK(sr_life_died(&nursery->life));
        CHECK(!sr_nap_watch_life(&nap, &nursery->life) && nap.n == 2);
        bury(child, SIGKILL);
    }
}

static void test_nobody_naps_on_a_life_that_was_left(void)
{
    static struct sr_bell bell;
    struct sr_nap nap = {0};
    pid_t child = bring_up();
    order(LEAVE);
    sr_nap_watch(&nap, &bell);
    CHECK(sr_nap_watch_life(&nap, &nursery->life) && nap.n == 1);
    CHECK(!sr_nap_sleep_among_lives(&nap, 1000000));
    kill(child, SIGKILL);
    bury(child, SIGKILL);
}

static void test_rank_that_exits_without_leaving_is_seen_as_dead(void)
{
    pid_t child = bring_up();
    sr_flag_set(&nursery->order, EXIT_WITHOUT_LEAVING);
    await_death();
    bury(child, 0);
}

static void test_rank_that_leaves_in_order_is_not_dead(void)
{
    pid_t child = bring_up();
    order(LEAVE);
    CHECK(!sr_life_died(&nursery->life) && !sr_life_is_held(&nursery->life));
    CHECK(sr_life_state(&nursery->life) == SR_CLOSED);
    kill(child, SIGKILL);
    bury(child, SIGKILL);
    CHECK(!sr_life_died(&nursery->life)); /* not even once it has died: it had let go */
}

static void test_end_of_other_threads_is_no_death(void)
{
    pid_t child = bring_up();
    order(END_OTHER_THREADS);
    CHECK(!sr_life_died(&nursery->life));
    kill(child, SIGKILL);
    await_death();
    bury(child, SIGKILL);
}

static void test_stopped_rank_is_not_dead(void)
{
    pid_t child = bring_up();
    int status;
    kill(child, SIGSTOP);
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    CHECK(!sr_life_died(&nursery->life));
    kill(child, SIGKILL);
    await_death();
    bury(child, SIGKILL);
}

/* Until it has answered: it may have been about to sleep when it was asked first. */
static void ask(const struct sr_desk *desk)
{
    uint64_t before = sr_flag_load(&desk->told) & ~(uint64_t)1;
    for (int i = 0; sr_flag_load(&desk->told) < before + 2; i++) {
        if (i % 100 == 0)
            CHECK(sr_desk_ask(desk));
        nap();
    }
}

static void test_rank_that_is_asked_tells_and_lives_on(void)
{
    pid_t child = bring_up();
    for (uint64_t n = 1; n <= 50; n++) {
        ask(&nursery->desk);
        CHECK(sr_flag_load(&nursery->desk.told) >= 2 * n);
        CHECK(memcmp(nursery->stacks, TOLD, sizeof TOLD) == 0);
        CHECK(sr_life_is_held(&nursery->life) && !sr_life_died(&nursery->life));
    }
    order(LEAVE);
    CHECK(!sr_life_is_held(&nursery->life));
    kill(child, SIGKILL);
    bury(child, SIGKILL);
}

static void test_who_may_only_read_can_ask(void)
{
    long page = sysconf(_SC_PAGESIZE);
    pid_t child = bring_up();
    CHECK(mprotect(nursery, (sizeof *nursery + (size_t)page - 1) / (size_t)page * (size_t)page, PROT_READ) == 0);
    ask(&nursery->desk);
    CHECK(memcmp(nursery->stacks, TOLD, sizeof TOLD) == 0);
    kill(child, SIGKILL);
    await_death();
    bury(child, SIGKILL);
}

static void test_rank_that_dies_while_it_tells_is_seen_as_dead(void)
{
    pid_t child = bring_up();
    sr_flag_set(&nursery->order, DIE_WHILE_TELLING);
    while (sr_flag_load(&nursery->desk.told) == 0) {
        CHECK(sr_desk_ask(&nursery->desk));
        nap();
    }
    await_death();
    CHECK(sr_flag_load(&nursery->desk.told) % 2 == 1); /* nobody takes the text for whole */
    bury(child, SIGKILL);
}

int main(void)
{
    check_begin("killed rank is seen as dead");
    test_killed_rank_is_seen_as_dead();
    check_begin("death wakes one who naps on the life");
    test_death_wakes_one_who_naps_on_the_life();
    check_begin("nobody naps on a life that was left");
    test_nobody_naps_on_a_life_that_was_left();
    check_begin("rank that exits without leaving is seen as dead");
    test_rank_that_exits_without_leaving_is_seen_as_dead();
    check_begin("rank that leaves in order is not dead");
    test_rank_that_leaves_in_order_is_not_dead();
    check_begin("end of other threads is no death");
    test_end_of_other_threads_is_no_death();
    check_begin("stopped rank is not dead");
    test_stopped_rank_is_not_dead();
    check_begin("rank that is asked tells and lives on");
    test_rank_that_is_asked_tells_and_lives_on();
    check_begin("who may only read can ask");
    test_who_may_only_read_can_ask();
    check_begin("rank that dies while it tells is seen as dead");
    test_rank_that_dies_while_it_tells_is_seen_as_dead();
    return 0;
}
