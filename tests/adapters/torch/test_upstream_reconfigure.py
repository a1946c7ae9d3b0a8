"""torch's own tests of reconfigure for CPU backends: 12, with the one that only NCCL does left out."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist

from tests.adapters.torch import upstream_reconfigure as upstream

if not hasattr(dist, "_reconfigure"):
    pytest.skip("torch has no reconfigure before 2.14", allow_module_level=True)


@pytest.fixture(scope="module")
def torchs_tests(tmp_path_factory):
    try:
        return upstream.load(upstream.download(tmp_path_factory.mktemp("torch")))
    except OSError as error:
        pytest.skip(f"torch's file of tests cannot be downloaded: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shmring", upstream.IN_PLACE])
def test_torchs_own_tests_pass(torchs_tests, backend):
    table = upstream.run(torchs_tests, backend)
    assert {name: text for name, (outcome, text) in table.items() if outcome == upstream.FAILED} == {}
    assert [name for name, (outcome, _) in table.items() if outcome == upstream.SKIPPED] == [
        "test_reconfigure_after_timeout"
    ]
    assert len(table) >= 13


@pytest.mark.slow
def test_a_test_that_fails_on_one_rank_fails(torchs_tests, monkeypatch):
    def fail_on_one(case, uuid, handles):
        assert case.rank != 1

    monkeypatch.setattr(torchs_tests.AbstractFaultToleranceTest, "_reconfigure", fail_on_one)
    table = upstream.run(torchs_tests, "shmring", ["test_reconfigure_basic"])
    assert [outcome for outcome, _ in table.values()] == [upstream.FAILED]
