/* Single copy: read the private memory of another process through the kernel. Staging would copy twice. */
#ifndef SR_SINGLE_COPY_H
#define SR_SINGLE_COPY_H

#include <errno.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* Copy nbytes from `address` of another process to `there`. `task` is the id of any living thread of that process.
   Return 0, or the errno of process_vm_readv. */
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
