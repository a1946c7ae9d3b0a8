"""torch.distributed through its backends, inside the rank processes.

Contains one class for each backend, with the interface of peer_libraries. The timed code is the same for
both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.common.calls import Array
from bench.peers.peer_libraries import Job, Library, Prepared

SYNC, ASYNC, COMM = "sync", "async", "comm"
BARRIER = "barrier"


class TorchGloo(Library):
    """torch.distributed on gloo, whose threads may use every CPU."""

    backend = "gloo"
    pinned_with_its_threads = False

    def join(self, token: str | None) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self.torch, self.dist = torch, torch.distributed
        self.dist.init_process_group(
            self.backend, init_method=f"file://{self.seat.folder}/rendezvous", rank=self.seat.rank,
            world_size=self.seat.size)

    def versions(self) -> dict[str, str]:
        return {"library": f"{self.backend} of torch {self.torch.__version__}"}

    def prepare(self, job: Job) -> Prepared:
        x = np.empty(job.count, job.dtype)
        names: dict[str, Any] = {"f": getattr(self.dist, job.call), "t": self.torch.from_numpy(x)}
        arguments = {"all_reduce": "t", "broadcast": "t, 0", BARRIER: ""}[job.call]
        if job.variant != ASYNC:
            return Prepared(x, x, f"f({arguments})", names)
        separator = ", " if arguments else ""
        return Prepared(x, x, f"f({arguments}{separator}async_op=True).wait()", names)

    def wrong(self, job: Job, x: Array, y: Array) -> int:
        """A barrier has no result."""
        return 0 if job.call == BARRIER else super().wrong(job, x, y)

    def leave(self) -> None:
        self.dist.destroy_process_group()


class TorchShmring(TorchGloo):
    """torch.distributed on shmring, which needs no installation here."""

    backend = "shmring"
    pinned_with_its_threads = True

    def join(self, token: str | None) -> None:
        from shmring.adapters.torch import register_backend

        register_backend()
        super().join(token)

    def prepare(self, job: Job) -> Prepared:
        """Prepare the call of torch.distributed, or the communicator's own on the same tensor."""
        prepared = super().prepare(job)
        if job.variant == COMM:
            prepared.names["f"] = getattr(self.dist.group.WORLD.comm, job.call)
        return prepared

    def versions(self) -> dict[str, str]:
        import shmring

        return {"library": f"shmring {shmring.__version__} under torch {self.torch.__version__}",
                "file": str(shmring.__file__)}

    def facts(self) -> dict[str, Any]:
        plain = (str, int, float)
        stats = self.dist.group.WORLD.comm.stats()
        return {key: value for key, value in dict(stats).items() if isinstance(value, plain)}


TORCH_LIBRARIES: dict[str, type[Library]] = {"torch gloo": TorchGloo, "torch shmring": TorchShmring}
