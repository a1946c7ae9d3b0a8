/* A thread that ends a long sleep when a process ends. A futex cannot wait for both an event and a process, and polls
   cost CPU time. The thread lives only as long as the sleep, never runs Python, and blocks all signals. */
#ifndef SR_SYNC_WATCHER_H
#define SR_SYNC_WATCHER_H

#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/eventfd.h>

#include "sync/event.h"

struct sr_watcher {
    pthread_t thread;
    int process; /* descriptor that becomes readable when the process ends (pidfd_open) */
    int stop;    /* descriptor by which the sleeper ends the thread */
    struct sr_event *event; /* on which the sleeper sleeps */
};

enum { SR_WATCHER_STACK_NBYTES = 128 << 10 };

static inline void *sr_watcher_run(void *argument)
{
    struct sr_watcher *watcher = argument;
    struct pollfd asked[] = {{watcher->stop, POLLIN, 0}, {watcher->process, POLLIN, 0}};
    while (poll(asked, 2, -1) <= 0)
        ;
    if (asked[0].revents == 0)
        sr_event_signal(watcher->event);
    return NULL;
}

/* Start the thread. Return false if there is no room for one; the caller then polls. */
static inline bool sr_watcher_start(struct sr_watcher *watcher, int process, struct sr_event *event)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    watcher->process = process;
    watcher->event = event;
    watcher->stop = eventfd(0, EFD_CLOEXEC);
    if (watcher->stop < 0)
        return false;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, SR_WATCHER_STACK_NBYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the thread inherits it */
    const bool started = pthread_create(&watcher->thread, &attributes, sr_watcher_run, watcher) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!started)
        close(watcher->stop);
    return started;
}

/* End the thread. */
static inline void sr_watcher_stop(struct sr_watcher *watcher)
{
    eventfd_write(watcher->stop, 1);
    pthread_join(watcher->thread, NULL);
    close(watcher->stop);
}

#endif
