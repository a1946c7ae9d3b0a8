"""torch's reconfigure on gloo and on shmring, in turn: python bench/torch/bench_reconfigure.py --ranks 2,3,4

Needs torch 2.14. Each backend has ranks of its own. A time is from the moment that the last rank begins to
the moment that the last rank has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.append(str(CHECKOUT))  # for bench

import torch  # noqa: E402  (found by the line above)
import torch.distributed as dist  # noqa: E402

from bench.common.arguments import comma_separated  # noqa: E402
from bench.common.tables import aligned  # noqa: E402
from shmring.adapters.torch import register_backend  # noqa: E402

FORK = multiprocessing.get_context("fork")
STORES = ("tcp", "file")
BACKENDS = ("gloo", "shmring")
WARM_UP = 3
TARGET = 1.0  # of gloo's time


def serve_store(pipe: Any) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    pipe.recv()


def store_in(place: str | int, name: str) -> Any:
    """Return a rank's access to a store: of a folder, or of a server's port."""
    if isinstance(place, str):
        return dist.FileStore(f"{place}/{name}", -1)
    return dist.PrefixStore(name, dist.TCPStore("127.0.0.1", place, is_master=False))


def be_rank(pipe: Any, backend: str, rank: int, size: int, place: str | int, count: int) -> None:
    """Change members for a block of times at each order: send (begin, end, end of an all_reduce) of each."""
    torch.set_num_threads(1)
    register_backend()
    store = store_in(place, f"{backend} {size}")
    dist.init_process_group(backend, rank=rank, world_size=size, store=dist.PrefixStore("group", store),
                            enable_reconfigure=True)
    uuid = 0
    while pipe.recv():
        times = []
        for _ in range(count):
            uuid += 1
            pipe.send(dist._get_reconfigure_handle())
            handles = pipe.recv()
            begin_s = time.monotonic()
            dist._reconfigure(uuid, handles).wait()
            end_s = time.monotonic()
            x = torch.ones(2)
            dist.all_reduce(x)
            times.append((begin_s, end_s, time.monotonic()))
            assert x.tolist() == [size, size], x
        pipe.send(times)
    dist.destroy_process_group()


class Crew:
    """The ranks of one backend; each has its end of a pipe."""

    def __init__(self, backend: str, size: int, place: str | int, count: int) -> None:
        self._count, self._pipes, self._processes = count, [], []
        for rank in range(size):
            ours, theirs = FORK.Pipe()
            arguments = (theirs, backend, rank, size, place, count)
            process = FORK.Process(target=be_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def play(self) -> list[tuple[float, float]]:
        """Return the milliseconds of each change of a block: until reconfigure returns, and all_reduce."""
        self._tell(True)
        for _ in range(self._count):
            self._tell([pipe.recv() for pipe in self._pipes])
        by_change = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        found = []
        for ranks in by_change:
            begin_s, end_s, used_s = (max(moment) for moment in zip(*ranks, strict=True))
            found.append((1e3 * (end_s - begin_s), 1e3 * (used_s - begin_s)))
        return found

    def end(self) -> None:
        self._tell(False)
        for process in self._processes:
            process.join()

    def _tell(self, what: Any) -> None:
        for pipe in self._pipes:
            pipe.send(what)


def measure(size: int, place: str | int, rounds: int, count: int) -> dict[str, list[tuple[float, float]]]:
    """Return the times of all changes by backend. Each backend's ranks are idle in the other's turn."""
    found: dict[str, list[tuple[float, float]]] = {backend: [] for backend in BACKENDS}
    crews = {backend: Crew(backend, size, place, count) for backend in BACKENDS}
    for number in range(rounds + WARM_UP):
        for backend, crew in crews.items():
            times = crew.play()
            if number >= WARM_UP:
                found[backend] += times
    for crew in crews.values():
        crew.end()
    return found


@contextlib.contextmanager
def places(store: str) -> Iterator[str | int]:
    """Make the place of a store: a folder, or the port of a server."""
    if store == "file":
        with tempfile.TemporaryDirectory() as folder:
            yield folder
        return
    pipe, theirs = FORK.Pipe()
    server = FORK.Process(target=serve_store, args=(theirs,), daemon=True)
    server.start()
    yield pipe.recv()
    pipe.send(None)
    server.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=comma_separated(int), default=[2, 3, 4], help="2,3,4")
    add("--rounds", type=int, default=20, help="blocks of each backend (%(default)s)")
    add("--count", type=int, default=5, help="changes of a block (%(default)s)")
    add("--stores", type=comma_separated(str, list(STORES)), default=list(STORES), help="tcp,file")
    options = parser.parse_args()
    if not hasattr(dist, "_reconfigure"):
        raise SystemExit(f"torch {torch.__version__} has no reconfigure; it needs 2.14")
    lines = [["store", "ranks", "until", *BACKENDS, f"shmring / gloo (target {TARGET})", "changes"]]
    for store in options.stores:
        for size in options.ranks:
            with places(store) as place:
                found = measure(size, place, options.rounds, options.count)
            for column, what in enumerate(("reconfigured", "all_reduce")):
                gloo, ours = (statistics.median(one[column] for one in found[name]) for name in BACKENDS)
                lines.append([store, str(size), what, f"{gloo:.2f} ms", f"{ours:.2f} ms",
                              f"{ours / gloo:.2f}", str(len(found["gloo"]))])
    print(aligned(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
