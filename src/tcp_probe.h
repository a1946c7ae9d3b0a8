/* Whether a TCP connection still has another end. The kernel's own limit, TCP_USER_TIMEOUT, will not do: it also ends
 * a connection whose other end answers, but has no room (tcp(7)), as that of a rank that comes late to a call. And its
 * keepalive asks only where nothing is under way. */
#ifndef SR_TCP_PROBE_H
#define SR_TCP_PROBE_H

#include "flag.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <sys/socket.h>

#define SR_LINK_JITTER_NS 50000000u /* the kernel counts in ticks */

struct sr_link {
    uint64_t asking_since_ns; /* 0: the kernel asks nothing again */
    uint64_t answered_ns;     /* when the other end did last, as seen then */
};

/* Whether the kernel has sent again, or asked for room, for limit_ns without any answer; to be called now and then
 * while something is under way. */
static inline bool sr_link_is_cut(struct sr_link *link, int fd, uint64_t limit_ns)
{
    struct tcp_info info;
    socklen_t nbytes = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &nbytes) != 0)
        return false;
    if (info.tcpi_retransmits == 0 && info.tcpi_probes == 0) {
        link->asking_since_ns = 0;
        return false;
    }
    const uint64_t now = sr_now_ns();
    const uint64_t answered_ns = now - info.tcpi_last_ack_recv * (uint64_t)1000000;
    if (link->asking_since_ns == 0 || answered_ns > link->answered_ns + SR_LINK_JITTER_NS) {
        link->asking_since_ns = now;
        link->answered_ns = answered_ns;
    }
    return now - link->asking_since_ns > limit_ns;
}

#endif
