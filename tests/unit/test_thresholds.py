"""Sizes that depend on the machine."""

import pytest

from shmring._config.thresholds import message_ring_nbytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("1024K", 2 * MIB),
        ("2048K", 4 * MIB),
        ("1280K", 4 * MIB),
        ("4096K", 4 * MIB),
        ("256K", 1 * MIB),
        ("512K", 1 * MIB),
        ("0K", 1 * MIB),
        ("1M", 2 * MIB),
        ("", 2 * MIB),
        (None, 2 * MIB),
    ],
)
def test_few_ranks_have_message_rings_of_twice_the_l2(tmp_path, size, nbytes):
    cache = tmp_path / "cpu/cpu0/cache/index2"
    cache.mkdir(parents=True)
    if size is not None:
        (cache / "size").write_text(size + "\n")
    assert [message_ring_nbytes(nranks, str(tmp_path)) for nranks in (2, 4)] == [nbytes] * 2
    assert message_ring_nbytes(5, str(tmp_path)) == 256 << 10
    assert message_ring_nbytes(64, str(tmp_path)) == 64 << 10
    assert message_ring_nbytes(1000, str(tmp_path)) == 16 << 10
