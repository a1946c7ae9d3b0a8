/* Reading another process's private memory through the kernel: one copy where staging makes two. */
#ifndef SR_SINGLE_COPY_H
#define SR_SINGLE_COPY_H

#include <errno.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* `task` is any living thread of the process. 0, or the errno of what could not be read. */
static inline int sr_single_copy(pid_t task, void *there, uint64_t address, size_t nbytes)
{
    while (nbytes > 0) {
        struct iovec local = {there, nbytes}, remote = {(void *)(uintptr_t)address, nbytes};
        ssize_t moved = process_vm_readv(task, &local, 1, &remote, 1, 0);
        if (moved <= 0)
            return moved < 0 ? errno : EFAULT;
        there = (char *)there + moved;
        address += (uint64_t)moved;
        nbytes -= (size_t)moved;
    }
    return 0;
}

#endif
