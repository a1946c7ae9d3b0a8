/* Liveness between processes. A liveness thread holds `holder` for its rank. Other ranks see its death, whatever the
   cause, and nothing else counts as a death. A request for stacks is answered. */
#include "sync/liveness.h"
#include "sync/stack_request.h"
#include "sync/waitset.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "check.h"

/* ---- the child: a rank with a liveness thread ----------------------------------------------------------------- */

struct shared {
    struct sr_liveness liveness;
    struct sr_stack_request stack_request;
    char stacks[64];
    sr_flag order;  /* W parent: the next order for the child */
    sr_flag executed; /* W child: the last order that it has executed */
};

enum order { NOTHING, END_OTHER_THREADS, LEAVE, EXIT_WITHOUT_LEAVING, BE_KILLED_SOON, DIE_WHILE_WRITING };

#define STACKS "in main, in live"

static struct shared *shared;
static _Atomic uint32_t leave;

static void *park(void *unused)
{
    struct sr_hold hold;
    sr_liveness_hold(&shared->liveness, &hold);
    while (sr_stack_request_await(&shared->stack_request, &leave)) {
        sr_stack_request_begin(&shared->stack_request);
        memcpy(shared->stacks, STACKS, sizeof STACKS);
        if (sr_flag_load(&shared->order) == DIE_WHILE_WRITING)
            kill(getpid(), SIGKILL);
        sr_stack_request_end(&shared->stack_request);
    }
    sr_liveness_let_go(&shared->liveness);
    return unused;
}

static void *return_at_once(void *unused) { return unused; }

static void sleep_briefly(void)
{
    struct timespec moment = {0, 200000};
    nanosleep(&moment, NULL);
}

static void end_other_threads(void)
{
    pthread_t thread;
    for (int i = 0; i < 8; i++) {
        CHECK(pthread_create(&thread, NULL, return_at_once, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    }
}

static void execute(enum order order, pthread_t liveness)
{
    if (order == END_OTHER_THREADS) {
        end_other_threads();
    } else if (order == LEAVE) {
        sr_liveness_set_state(&shared->liveness, SR_CLOSED);
        sr_stack_request_leave(&shared->stack_request, &leave);
        CHECK(pthread_join(liveness, NULL) == 0);
    } else if (order == EXIT_WITHOUT_LEAVING) {
        _exit(0);
    } else if (order == BE_KILLED_SOON) {
        for (int i = 0; i < 100; i++)
            sleep_briefly();
        kill(getpid(), SIGKILL);
    }
}

/* Never returns: the child lives until it gets the order to end or is killed, at the latest with its parent. */
static void live(void)
{
    pthread_t liveness;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    CHECK(pthread_create(&liveness, NULL, park, NULL) == 0);
    while (!sr_liveness_is_held(&shared->liveness))
        sleep_briefly();
    sr_liveness_set_state(&shared->liveness, SR_JOINED);
    for (uint64_t done = NOTHING;;) {
        uint64_t order = sr_flag_load(&shared->order);
        if (order != done)
            execute((enum order)order, liveness);
        sr_flag_set(&shared->executed, done = order);
        sleep_briefly();
    }
}

/* ---- the parent: a rank that observes the child ------------------------------------------------------------------ */

static pid_t start_child(void)
{
    if (shared != NULL)
        CHECK(munmap(shared, sizeof *shared) == 0);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    CHECK(!sr_liveness_is_held(&shared->liveness) && !sr_liveness_died(&shared->liveness));
    CHECK(sr_liveness_state(&shared->liveness) == SR_ABSENT);
    pid_t child = fork();
    if (child == 0)
        live();
    CHECK(child > 0);
    while (sr_liveness_state(&shared->liveness) != SR_JOINED)
        sleep_briefly();
    CHECK(sr_liveness_is_held(&shared->liveness) && !sr_liveness_died(&shared->liveness));
    return child;
}

static void order(enum order order)
{
    sr_flag_set(&shared->order, order);
    while (sr_flag_load(&shared->executed) != order)
        sleep_briefly();
}

static void await_death(void)
{
    while (!sr_liveness_died(&shared->liveness))
        sleep_briefly();
    CHECK(sr_liveness_is_held(&shared->liveness)); /* the word of a dead rank stays held */
}

static void reap(pid_t child, int signal)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) ? WEXITSTATUS(status) == 0 && signal == 0 : WTERMSIG(status) == signal);
}

static void test_killed_rank_is_seen_as_dead(void)
{
    for (int i = 0; i < 10; i++) {
        pid_t child = start_child();
        kill(child, SIGKILL);
        await_death();
        reap(child, SIGKILL);
    }
}

/* The event is not signalled: only the death ends the sleep. */
static void test_death_ends_a_sleep(void)
{
    const uint64_t ten_minutes_ns = 600000000000u;
    static struct sr_event event;
    for (int i = 0; i < 5; i++) {
        pid_t child = start_child();
        struct sr_waitset waitset = {0};
        sr_waitset_watch(&waitset, &event);
        CHECK(sr_waitset_watch_liveness(&waitset, &shared->liveness) && waitset.n == 2);
        sr_flag_set(&shared->order, BE_KILLED_SOON);
        int woken = sr_waitset_try(&waitset, ten_minutes_ns);
        if (woken == SR_WAITSET_UNKNOWN)
            await_death(); /* before Linux 5.16 */
        else
            CHECK(woken == 1);
        CHECK(sr_liveness_died(&shared->liveness));
        CHECK(!sr_waitset_watch_liveness(&waitset, &shared->liveness) && waitset.n == 2);
        reap(child, SIGKILL);
    }
}

static void test_rank_that_left_ends_no_sleep(void)
{
    static struct sr_event event;
    struct sr_waitset waitset = {0};
    pid_t child = start_child();
    order(LEAVE);
    sr_waitset_watch(&waitset, &event);
    CHECK(sr_waitset_watch_liveness(&waitset, &shared->liveness) && waitset.n == 1);
    CHECK(!sr_waitset_sleep_until_death(&waitset, 1000000));
    kill(child, SIGKILL);
    reap(child, SIGKILL);
}

static void test_rank_that_exits_without_leaving_is_seen_as_dead(void)
{
    pid_t child = start_child();
    sr_flag_set(&shared->order, EXIT_WITHOUT_LEAVING);
    await_death();
    reap(child, 0);
}

static void test_rank_that_leaves_in_order_is_not_dead(void)
{
    pid_t child = start_child();
    order(LEAVE);
    CHECK(!sr_liveness_died(&shared->liveness) && !sr_liveness_is_held(&shared->liveness));
    CHECK(sr_liveness_state(&shared->liveness) == SR_CLOSED);
    kill(child, SIGKILL);
    reap(child, SIGKILL);
    CHECK(!sr_liveness_died(&shared->liveness)); /* not even after its end: the word was released */
}

static void test_end_of_other_threads_is_no_death(void)
{
    pid_t child = start_child();
    order(END_OTHER_THREADS);
    CHECK(!sr_liveness_died(&shared->liveness));
    kill(child, SIGKILL);
    await_death();
    reap(child, SIGKILL);
}

static void test_stopped_rank_is_not_dead(void)
{
    pid_t child = start_child();
    int status;
    kill(child, SIGSTOP);
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    CHECK(!sr_liveness_died(&shared->liveness));
    kill(child, SIGKILL);
    await_death();
    reap(child, SIGKILL);
}

/* Request the stacks until the rank has answered: at the first request it may have been about to sleep. */
static void request_stacks(const struct sr_stack_request *stack_request)
{
    uint64_t before = sr_flag_load(&stack_request->version) & ~(uint64_t)1;
    for (int i = 0; sr_flag_load(&stack_request->version) < before + 2; i++) {
        if (i % 100 == 0)
            CHECK(sr_stack_request_ask(stack_request));
        sleep_briefly();
    }
}

static void test_rank_answers_a_request_and_lives_on(void)
{
    pid_t child = start_child();
    for (uint64_t n = 1; n <= 50; n++) {
        request_stacks(&shared->stack_request);
        CHECK(sr_flag_load(&shared->stack_request.version) >= 2 * n);
        CHECK(memcmp(shared->stacks, STACKS, sizeof STACKS) == 0);
        CHECK(sr_liveness_is_held(&shared->liveness) && !sr_liveness_died(&shared->liveness));
    }
    order(LEAVE);
    CHECK(!sr_liveness_is_held(&shared->liveness));
    kill(child, SIGKILL);
    reap(child, SIGKILL);
}

static void test_request_needs_read_access_only(void)
{
    long page = sysconf(_SC_PAGESIZE);
    pid_t child = start_child();
    CHECK(mprotect(shared, (sizeof *shared + (size_t)page - 1) / (size_t)page * (size_t)page, PROT_READ) == 0);
    request_stacks(&shared->stack_request);
    CHECK(memcmp(shared->stacks, STACKS, sizeof STACKS) == 0);
    kill(child, SIGKILL);
    await_death();
    reap(child, SIGKILL);
}

static void test_rank_that_dies_while_it_writes_is_seen_as_dead(void)
{
    pid_t child = start_child();
    sr_flag_set(&shared->order, DIE_WHILE_WRITING);
    while (sr_flag_load(&shared->stack_request.version) == 0) {
        CHECK(sr_stack_request_ask(&shared->stack_request));
        sleep_briefly();
    }
    await_death();
    CHECK(sr_flag_load(&shared->stack_request.version) % 2 == 1); /* no reader takes the text for complete */
    reap(child, SIGKILL);
}

int main(void)
{
    check_begin("a killed rank is seen as dead");
    test_killed_rank_is_seen_as_dead();
    check_begin("a death ends the sleep of one rank");
    test_death_ends_a_sleep();
    check_begin("a rank that has left ends no sleep");
    test_rank_that_left_ends_no_sleep();
    check_begin("a rank that exits without leaving is seen as dead");
    test_rank_that_exits_without_leaving_is_seen_as_dead();
    check_begin("a rank that leaves in order is not dead");
    test_rank_that_leaves_in_order_is_not_dead();
    check_begin("the end of other threads is no death");
    test_end_of_other_threads_is_no_death();
    check_begin("a stopped rank is not dead");
    test_stopped_rank_is_not_dead();
    check_begin("a rank answers a request for stacks and lives on");
    test_rank_answers_a_request_and_lives_on();
    check_begin("a process that may only read can request the stacks");
    test_request_needs_read_access_only();
    check_begin("a rank that dies while it writes its stacks is seen as dead");
    test_rank_that_dies_while_it_writes_is_seen_as_dead();
    return 0;
}
