/* A probe that finds a TCP connection whose other end does not answer. The kernel's own limits do not serve:
   TCP_USER_TIMEOUT also ends a connection whose other end answers but has no room (tcp(7)), such as that of a rank that
   enters a call late, and keepalive probes only a connection on which no data are under way. */
#ifndef SR_TCP_PROBE_H
#define SR_TCP_PROBE_H

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <sys/socket.h>

#include "sync/clock.h"

#define SR_TCP_PROBE_JITTER_NS 50000000u /* the kernel counts the time since the last answer in ticks */

struct sr_tcp_probe {
    uint64_t asking_since_ns; /* since when the kernel sends again without an answer; 0: it does not */
    uint64_t answered_ns;     /* time of the last answer, as computed at asking_since_ns */
};

/* Return whether the kernel has retransmitted data, or probed a closed window, for limit_ns without any answer. To be
   called now and then while data are under way. */
static inline bool sr_tcp_probe_is_cut(struct sr_tcp_probe *probe, int fd, uint64_t limit_ns)
{
    struct tcp_info info;
    socklen_t nbytes = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &nbytes) != 0)
        return false;
    if (info.tcpi_retransmits == 0 && info.tcpi_probes == 0) {
        probe->asking_since_ns = 0;
        return false;
    }
    const uint64_t now = sr_now_ns();
    const uint64_t answered_ns = now - info.tcpi_last_ack_recv * (uint64_t)1000000;
    if (probe->asking_since_ns == 0 || answered_ns > probe->answered_ns + SR_TCP_PROBE_JITTER_NS) {
        probe->asking_since_ns = now;
        probe->answered_ns = answered_ns;
    }
    return now - probe->asking_since_ns > limit_ns;
}

#endif
