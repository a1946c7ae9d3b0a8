"""Estimate pi with Ray's actors, and sum the hits of another try by Ray's own call.

python examples/engines/ray_actors.py          it takes Ray: pip install '.[ray]'
"""

import numpy as np
import ray
from ray.util import collective

from shmring.adapters import ray as shmring_ray

POINTS = 1_000_000


@ray.remote
class Estimator:
    def hits(self, seed):
        x, y = np.random.default_rng(seed).random((2, POINTS))
        return np.array([np.count_nonzero(x * x + y * y < 1)])

    def estimate(self):
        hits = self.hits(self.comm.rank)  # the communicator is from shmring_ray.join
        self.comm.all_reduce(hits)
        return 4 * hits[0] / (POINTS * self.comm.size)

    def estimate_by_ray(self, rank):
        hits = self.hits(rank)
        collective.allreduce(hits, "pi")  # the backend is shmring
        return 4 * hits[0] / (POINTS * collective.get_collective_group_size("pi"))


if __name__ == "__main__":
    ray.init(include_dashboard=False)
    actors = [Estimator.options(num_cpus=0.5).remote() for _ in range(3)]

    shmring_ray.join(actors)
    pi = ray.get([actor.estimate.remote() for actor in actors])
    print(f"pi is about {pi[0]:.3f}, say {len(pi)} rank(s); all the same: {len(set(pi)) == 1}")

    shmring_ray.register_backend(actors)
    collective.create_collective_group(actors, 3, [0, 1, 2], backend="SHMRING", group_name="pi")
    again = ray.get([actor.estimate_by_ray.remote(rank) for rank, actor in enumerate(actors)])
    print(f"the same by Ray's call: {again == pi}")
    ray.shutdown()
