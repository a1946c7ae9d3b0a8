"""Batches of a DataLoader's workers that travel in shared memory, without names in /dev/shm."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import shmring


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return np.full((64, 1024), index, "f4")


def collate(items):
    return shmring.share(np.stack(items), writable=True), set(os.listdir("/dev/shm"))


def test_workers_return_shared_batches():
    before = set(os.listdir("/dev/shm"))
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, collate_fn=collate)
    batches = []
    for batch, names in loader:
        assert not {name for name in names - before if name.startswith("torch")}
        batches.append(torch.from_numpy(batch))
    assert [batch[:, 0, 0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    batches[0][0] = -1  # as writable as any batch
