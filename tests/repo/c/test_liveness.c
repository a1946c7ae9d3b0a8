/* Liveness between processes: a parked thread holds `holder` for its rank; others see its death, whatever it was, and
   nothing else. Asked, it tells. */
#include "sync/liveness.h"
#include "sync/stack_request.h"
#include "sync/waitset.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "check.h"

/* ---- the child: a rank whose thread is parked ----------------------------------------------------------------- */

struct nursery {
    struct sr_liveness liveness;
    struct sr_stack_request stack_request;
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
    sr_liveness_hold(&nursery->liveness, &hold);
    while (sr_stack_request_await(&nursery->stack_request, &leave)) {
        sr_stack_request_begin(&nursery->stack_request);
        memcpy(nursery->stacks, TOLD, sizeof TOLD);
        if (sr_flag_load(&nursery->order) == DIE_WHILE_TELLING)
            kill(getpid(), SIGKILL);
        sr_stack_request_end(&nursery->stack_request);
    }
    sr_liveness_let_go(&nursery->liveness);
    return unused;
}

static void *pass_by(void *unused) { return unused; }

static void doze(void)
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
        sr_liveness_set_state(&nursery->liveness, SR_CLOSED);
        sr_stack_request_leave(&nursery->stack_request, &leave);
        CHECK(pthread_join(parked, NULL) == 0);
    } else if (order == EXIT_WITHOUT_LEAVING) {
        _exit(0);
    } else if (order == BE_KILLED_SOON) {
        for (int i = 0; i < 100; i++)
            doze();
        kill(getpid(), SIGKILL);
    }
}

/* Never returns: lives until it is told to go, or killed, with its parent at the latest. */
static void live(void)
{
    pthread_t parked;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    CHECK(pthread_create(&parked, NULL, park, NULL) == 0);
    while (!sr_liveness_is_held(&nursery->liveness))
        doze();
    sr_liveness_set_state(&nursery->liveness, SR_JOINED);
    for (uint64_t done = NOTHING;;) {
        uint64_t order = sr_flag_load(&nursery->order);
        if (order != done)
            carry_out((enum order)order, parked);
        sr_flag_set(&nursery->obeyed, done = order);
        doze();
    }
}

/* ---- the parent: a rank that looks ----------------------------------------------------------------------------- */

static pid_t bring_up(void)
{
    if (nursery != NULL)
        CHECK(munmap(nursery, sizeof *nursery) == 0);
    nursery = mmap(NULL, sizeof *nursery, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(nursery != MAP_FAILED);
    CHECK(!sr_liveness_is_held(&nursery->liveness) && !sr_liveness_died(&nursery->liveness));
    CHECK(sr_liveness_state(&nursery->liveness) == SR_ABSENT);
    pid_t child = fork();
    if (child == 0)
        live();
    CHECK(child > 0);
    while (sr_liveness_state(&nursery->liveness) != SR_JOINED)
        doze();
    CHECK(sr_liveness_is_held(&nursery->liveness) && !sr_liveness_died(&nursery->liveness));
    return child;
}

static void order(enum order order)
{
    sr_flag_set(&nursery->order, order);
    while (sr_flag_load(&nursery->obeyed) != order)
        doze();
}

static void await_death(void)
{
    while (!sr_liveness_died(&nursery->liveness))
        doze();
    CHECK(sr_liveness_is_held(&nursery->liveness)); /* nobody takes the place of the dead */
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

/* The event is signalled for nobody: what ends the sleep is the death. */
static void test_death_wakes_one_who_sleeps_until_it(void)
{
    const uint64_t ten_minutes_ns = 600000000000u;
    static struct sr_event event;
    for (int i = 0; i < 5; i++) {
        pid_t child = bring_up();
        struct sr_waitset waitset = {0};
        sr_waitset_watch(&waitset, &event);
        CHECK(sr_waitset_watch_liveness(&waitset, &nursery->liveness) && waitset.n == 2);
        sr_flag_set(&nursery->order, BE_KILLED_SOON);
        int woken = sr_waitset_try(&waitset, ten_minutes_ns);
        if (woken == SR_WAITSET_UNKNOWN)
            await_death(); /* before Linux 5.16 */
        else
            CHECK(woken == 1);
        CHECK(sr_liveness_died(&nursery->liveness));
        CHECK(!sr_waitset_watch_liveness(&waitset, &nursery->liveness) && waitset.n == 2);
        bury(child, SIGKILL);
    }
}

static void test_nobody_sleeps_until_the_death_of_one_that_left(void)
{
    static struct sr_event event;
    struct sr_waitset waitset = {0};
    pid_t child = bring_up();
    order(LEAVE);
    sr_waitset_watch(&waitset, &event);
    CHECK(sr_waitset_watch_liveness(&waitset, &nursery->liveness) && waitset.n == 1);
    CHECK(!sr_waitset_sleep_until_death(&waitset, 1000000));
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
    CHECK(!sr_liveness_died(&nursery->liveness) && !sr_liveness_is_held(&nursery->liveness));
    CHECK(sr_liveness_state(&nursery->liveness) == SR_CLOSED);
    kill(child, SIGKILL);
    bury(child, SIGKILL);
    CHECK(!sr_liveness_died(&nursery->liveness)); /* not even once it has died: it had let go */
}

static void test_end_of_other_threads_is_no_death(void)
{
    pid_t child = bring_up();
    order(END_OTHER_THREADS);
    CHECK(!sr_liveness_died(&nursery->liveness));
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
    CHECK(!sr_liveness_died(&nursery->liveness));
    kill(child, SIGKILL);
    await_death();
    bury(child, SIGKILL);
}

/* Until it has answered: it may have been about to sleep when it was asked first. */
static void ask(const struct sr_stack_request *stack_request)
{
    uint64_t before = sr_flag_load(&stack_request->version) & ~(uint64_t)1;
    for (int i = 0; sr_flag_load(&stack_request->version) < before + 2; i++) {
        if (i % 100 == 0)
            CHECK(sr_stack_request_ask(stack_request));
        doze();
    }
}

static void test_rank_that_is_asked_tells_and_lives_on(void)
{
    pid_t child = bring_up();
    for (uint64_t n = 1; n <= 50; n++) {
        ask(&nursery->stack_request);
        CHECK(sr_flag_load(&nursery->stack_request.version) >= 2 * n);
        CHECK(memcmp(nursery->stacks, TOLD, sizeof TOLD) == 0);
        CHECK(sr_liveness_is_held(&nursery->liveness) && !sr_liveness_died(&nursery->liveness));
    }
    order(LEAVE);
    CHECK(!sr_liveness_is_held(&nursery->liveness));
    kill(child, SIGKILL);
    bury(child, SIGKILL);
}

static void test_who_may_only_read_can_ask(void)
{
    long page = sysconf(_SC_PAGESIZE);
    pid_t child = bring_up();
    CHECK(mprotect(nursery, (sizeof *nursery + (size_t)page - 1) / (size_t)page * (size_t)page, PROT_READ) == 0);
    ask(&nursery->stack_request);
    CHECK(memcmp(nursery->stacks, TOLD, sizeof TOLD) == 0);
    kill(child, SIGKILL);
    await_death();
    bury(child, SIGKILL);
}

static void test_rank_that_dies_while_it_tells_is_seen_as_dead(void)
{
    pid_t child = bring_up();
    sr_flag_set(&nursery->order, DIE_WHILE_TELLING);
    while (sr_flag_load(&nursery->stack_request.version) == 0) {
        CHECK(sr_stack_request_ask(&nursery->stack_request));
        doze();
    }
    await_death();
    CHECK(sr_flag_load(&nursery->stack_request.version) % 2 == 1); /* nobody takes the text for whole */
    bury(child, SIGKILL);
}

int main(void)
{
    check_begin("killed rank is seen as dead");
    test_killed_rank_is_seen_as_dead();
    check_begin("death wakes one who sleeps until the death");
    test_death_wakes_one_who_sleeps_until_it();
    check_begin("nobody sleeps until the death of one that was left");
    test_nobody_sleeps_until_the_death_of_one_that_left();
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
