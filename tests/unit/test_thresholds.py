"""Sizes that depend on the processor and on the number of ranks."""

import pytest

from shmring._config import thresholds, tuning_table

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [("AMD EPYC 9R14", 2 * MIB), ("Intel(R) Xeon(R) Processor", 512 * KIB), ("", 2 * MIB)],
)
def test_message_rings_depend_on_the_processor_among_few_ranks(monkeypatch, model, nbytes):
    monkeypatch.setattr(tuning_table, "cpu_model", lambda: model)

    def lengths(*sizes):
        return [thresholds.built_in(size)["message_ring_nbytes"] for size in sizes]

    assert lengths(1, 2, 4) == [nbytes] * 3
    assert lengths(5, 8) == [256 * KIB] * 2
    assert lengths(9, 64) == [64 * KIB] * 2
    assert lengths(65, 1000) == [16 * KIB] * 2
