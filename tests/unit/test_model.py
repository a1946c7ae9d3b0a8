"""The cost model: the published formulas and examples, limits, and the engine's own counts."""

import itertools
import math
from dataclasses import astuple

import numpy as np
import pytest

from shmring import model
from shmring.model import Cost, Link, Training

WIRE = Link(50e-6, 125e6)
SIZES = (1, 1000, 1 << 20, 553_440_000)
RANKS = (1, 2, 3, 4, 5, 8, 13, 64, 1000)
OPTIMAL = ("direct", "ring", "bidirectional_ring")  # in bytes, for any number of ranks

# ---- algorithms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", model.ALGORITHMS)
def test_one_rank_has_nothing_to_send(algorithm):
    for nbytes in (0, *SIZES):
        assert model.all_reduce(algorithm, nbytes, 1, WIRE) == Cost(0, 0, 0, 0)
        assert model.seconds(algorithm, nbytes, 1, WIRE) == 0


@pytest.mark.parametrize("algorithm", model.ALGORITHMS)
def test_no_algorithm_is_faster_than_the_bound_of_both_phases(algorithm):
    for nbytes, ranks in itertools.product(SIZES, RANKS):
        bound_s = 2 * model.phase_bound_s(nbytes, ranks, WIRE.beta)
        assert model.seconds(algorithm, nbytes, ranks, WIRE) >= bound_s
        assert model.seconds(algorithm, nbytes, ranks, Link(0, WIRE.beta)) >= bound_s * (1 - 1e-12)


@pytest.mark.parametrize("algorithm", OPTIMAL)
def test_without_alpha_the_optimal_ones_reach_the_bound(algorithm):
    for nbytes, ranks in itertools.product(SIZES, RANKS):
        bound_s = 2 * model.phase_bound_s(nbytes, ranks, WIRE.beta)
        assert model.seconds(algorithm, nbytes, ranks, Link(0, WIRE.beta)) == pytest.approx(bound_s)


def test_halving_and_doubling_reaches_it_among_a_power_of_two():
    for ranks in (2, 4, 64, 1024):
        cost = model.halving_doubling(1000, ranks)
        assert cost.steps == 2 * math.log2(ranks)
        assert cost.nbytes == model.ring(1000, ranks).nbytes
    assert model.halving_doubling(1000, 7) == Cost(6, 3500, 1750, 2500)
    assert model.halving_doubling(1000, 8) == Cost(6, 1750, 875, 1750)


def test_a_ring_of_four_takes_six_steps():
    """2(N - 1), not the 7 that one of the sources counts."""
    assert model.ring(1000, 4) == Cost(6, 1500, 750, 1500)


def test_a_tree_of_1024_takes_ten_steps_up_and_as_many_down():
    assert model.tree(1000, 1024) == Cost(20, 20_000, 10_000, 10_000)


def test_two_links_halve_the_time_of_opposite_rings():
    bare = Link(0, 1e9)
    both = model.bidirectional_ring(1 << 20, 8, links=2).seconds(bare)
    assert both == model.ring(1 << 20, 8).seconds(bare) / 2
    assert model.bidirectional_ring(1 << 20, 8) == model.ring(1 << 20, 8)


def test_a_double_tree_in_one_chunk_is_a_tree_and_in_many_sends_each_byte_twice():
    for ranks in (3, 8, 100):
        one, many = model.double_tree(1 << 20, ranks), model.double_tree(1 << 20, ranks, 1 << 19)
        tree = model.tree(1 << 20, ranks)
        assert (one.steps, one.nbytes, one.folded_nbytes) == (tree.steps, tree.nbytes, tree.folded_nbytes)
        assert many.nbytes == pytest.approx(2 << 20, rel=1e-4)
    assert model.double_tree(1000, 2) == Cost(2, 1000, 500, 1000)


@pytest.mark.parametrize("link", [WIRE, Link(1e-6, 1e10, 5e9), Link(1e-3, 1e6)])
@pytest.mark.parametrize(("nbytes", "ranks"), [(1, 4), (1000, 3), (1 << 20, 8), (1 << 26, 64)])
def test_no_other_number_of_chunks_is_better(link, nbytes, ranks):
    chosen_s = model.seconds("double_tree", nbytes, ranks, link)
    for chunks in (1, 2, 3, 5, 10, 30, 100, 300, 1000, 3000, 10_000, 100_000):
        assert chosen_s <= model.double_tree(nbytes, ranks, chunks).seconds(link) * 1.01


def test_folding_takes_time_where_gamma_says_so():
    assert model.ring(1000, 4).seconds(Link(0, math.inf, 750)) == 1
    assert model.tree(1000, 4).seconds(Link(1, 1000, 2000)) == 4 + 4 + 1


def steps_and_bytes(comm, algorithm, count):
    before = comm.stats()
    comm.all_reduce(np.ones(count, "f4"), algorithm=algorithm)
    after = comm.stats()
    return after["steps"] - before["steps"], after["bytes_sent"] - before["bytes_sent"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_engine_takes_as_many_steps_and_sends_as_many_bytes(world_of, size):
    ranks, count = world_of(size), 12_000
    ring, tree = model.ring(4 * count, size), model.tree(4 * count, size)
    assert set(ranks(steps_and_bytes, "ring", count)) == {(ring.steps, ring.sent_nbytes)}
    assert {steps for steps, _ in ranks(steps_and_bytes, "tree", count)} == {tree.steps}


@pytest.mark.parametrize(
    "call",
    [
        *model.ALGORITHMS.values(),
        *(model.parameter_server, model.phase_nbytes, model.redundant_nbytes),
        lambda nbytes, ranks: model.parameter_server(nbytes, 8, ranks),
        lambda nbytes, ranks: model.bidirectional_ring(nbytes, 8, ranks),
        lambda nbytes, ranks: model.double_tree(nbytes, 8, ranks),
        lambda nbytes, ranks: model.hierarchical(nbytes, ranks, ranks),
    ],
)
def test_numbers_of_ranks_may_be_numpys_and_whole_floats(call):
    for ranks in (1, 100):
        for kind in (np.int8, np.float32, float):
            assert repr(call(1 << 40, kind(ranks))) == repr(call(1 << 40, ranks))


def test_links_need_not_be_a_whole_number():
    assert model.bidirectional_ring(1000, 4, links=1.5).nbytes == 1000
    with pytest.raises(TypeError, match=r"ranks is 2.5; it must be an integer"):
        model.ring(1000, 2.5)


# ---- ring or tree -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [4, 5, 8, 64, 1000])
@pytest.mark.parametrize("link", [WIRE, Link(1e-6, 1e10, 5e9)])
def test_at_the_crossover_ring_and_tree_take_as_long(link, ranks):
    nbytes = model.crossover(ranks, link)
    ring_s, tree_s = (model.seconds(name, nbytes, ranks, link) for name in ("ring", "tree"))
    assert ring_s == pytest.approx(tree_s)
    assert model.seconds("tree", nbytes / 2, ranks, link) < model.seconds("ring", nbytes / 2, ranks, link)
    assert model.seconds("ring", nbytes * 2, ranks, link) < model.seconds("tree", nbytes * 2, ranks, link)


def test_the_crossover_by_hand():
    """(N - 1 - L) alpha = (L - (N-1)/N) n / beta, for 8 ranks."""
    assert model.crossover(8, WIRE) == pytest.approx(4 * 50e-6 * 125e6 / (3 - 7 / 8))


def test_without_a_crossover_it_is_none_or_the_first_size():
    assert model.crossover(2, WIRE) == 0
    assert model.crossover(8, Link(0, 1e9)) == 0
    assert model.crossover(8, WIRE, short="direct") == math.inf
    assert model.crossover(8, WIRE, short="ring", long="direct") == 0
    assert model.crossover(8, WIRE, short="direct", long="direct") == 0
    with pytest.raises(ValueError, match="not linear"):
        model.crossover(8, WIRE, long="double_tree")


# ---- bounds and totals ------------------------------------------------------------------------------------


def test_the_bound_of_a_phase_does_not_grow_with_the_ranks():
    bounds_s = [model.phase_bound_s(1e9, ranks, 1e9) for ranks in RANKS]
    assert bounds_s == sorted(bounds_s)
    assert all(bound_s < 1 for bound_s in bounds_s)
    assert model.phase_bound_s(1e9, 10**6, 1e9) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_phase_moves_as_much_as_the_redundant_memory(ranks):
    moved = ranks * model.phase_nbytes(1000, ranks)
    assert moved == pytest.approx(model.redundant_nbytes(1000, ranks))
    assert model.redundant_nbytes(1000, ranks) == ranks * 1000 - 1000
    assert ranks * model.ring(1000, ranks).sent_nbytes == pytest.approx(2 * moved)


def test_the_published_server_and_ring():
    """VGG-16: 138.36 M float32 of 4 workers."""
    gradient_MB = 4 * 138.36
    assert gradient_MB == pytest.approx(553.44)
    assert model.parameter_server(gradient_MB, 4).nbytes == pytest.approx(4427.52)
    assert model.ring(gradient_MB, 4).nbytes == pytest.approx(830.16)


def test_as_many_servers_as_workers_take_no_longer_than_twice_the_message():
    one, four = model.parameter_server(1000, 4), model.parameter_server(1000, 4, servers=4)
    assert one == Cost(2, 8000, 4000, 4000)
    assert four == Cost(2, 2000, 1000, 1000)


@pytest.mark.parametrize(("workers", "servers"), [(4, 8), (1, 1), (1, 4), (3, 4)])
def test_more_servers_do_not_make_a_workers_own_message_shorter(workers, servers):
    cost = model.parameter_server(1000, workers, servers)
    assert cost == Cost(2, 2000, 1000 * workers / servers, 1000)


def test_a_host_sends_as_much_however_many_ranks_it_has():
    for ranks in (1, 2, 64):
        inside, between = model.hierarchical(1 << 20, 2, ranks)
        assert between == Cost(2, 1 << 20, 1 << 19, 1 << 20)
        assert inside == model.direct(1 << 20, ranks)


# ---- training ---------------------------------------------------------------------------------------------

PUBLISHED = Training(553.36e6, 0.55)
GIGABIT = 125e6


def test_the_published_step_of_four_workers():
    assert PUBLISHED.transfer_s(4, GIGABIT) == pytest.approx(6.64, abs=0.005)
    assert PUBLISHED.efficiency(4, GIGABIT) == pytest.approx(0.0765, abs=0.00005)
    assert PUBLISHED.step_s(4, GIGABIT) == pytest.approx(7.19, abs=0.005)
    measured_there_s = 7.628
    assert measured_there_s / PUBLISHED.step_s(4, GIGABIT) == pytest.approx(1.061, abs=0.0005)


def test_the_published_bandwidth_for_nine_tenths():
    beta = PUBLISHED.beta_for(0.9, 4)
    assert beta / 1e6 == pytest.approx(13_582, abs=0.5)
    assert 8 * beta / 1e6 == pytest.approx(108_660, abs=0.5)
    assert PUBLISHED.efficiency(4, beta) == pytest.approx(0.9)
    assert PUBLISHED.beta_for(0.9, math.inf) == pytest.approx(beta * 4 / 3)


def test_time_and_efficiency_follow_from_each_other():
    transfer_s = PUBLISHED.transfer_s(4, GIGABIT)
    assert PUBLISHED.transfer_s_at(PUBLISHED.efficiency(4, GIGABIT)) == pytest.approx(transfer_s)
    assert PUBLISHED.transfer_s_at(0.5) == 0.55
    assert transfer_s == pytest.approx(model.seconds("ring", 553.36e6, 4, Link(0, GIGABIT)))
    assert PUBLISHED.efficiency(1, GIGABIT) == 1


def test_with_the_one_left_out_it_is_no_efficiency():
    """P = 1/(T_t/T_s), as one of the sources has it: more than 1 as soon as the wire is fast."""
    assert 1 / (PUBLISHED.transfer_s(4, 1e12) / 0.55) > 1
    assert PUBLISHED.efficiency(4, 1e12) < 1


# ---- from measurements ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ring", "tree", "direct"])
def test_a_fit_finds_the_link_that_made_the_figures(algorithm):
    sizes = [8 << turn for turn in range(24)]
    took_s = [model.seconds(algorithm, nbytes, 5, WIRE) for nbytes in sizes]
    found = model.fit(sizes, took_s, lambda nbytes: model.ALGORITHMS[algorithm](nbytes, 5))
    assert astuple(found) == pytest.approx(astuple(WIRE))


def test_a_fit_of_messages_weighs_small_ones_as_much_as_large_ones():
    sizes = [1, 10**9]
    assert astuple(model.fit(sizes, [1e-6, 1.0]))[:2] == pytest.approx((1e-6, 1e9), rel=1e-2)
    noisy = model.fit([1, 1, 10**9, 10**9], [0.9e-6, 1.1e-6, 0.9, 1.1])
    assert noisy.alpha_s == pytest.approx(1e-6, rel=0.05)
    assert noisy.beta == pytest.approx(1e9, rel=0.05)


def test_a_fit_has_no_negative_numbers():
    assert model.fit([1, 2], [1.0, 3.0]).alpha_s == 0
    assert model.fit([1, 2], [3.0, 1.0]).beta == math.inf


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: model.ring(8, 0), "0 ranks"),
        (lambda: model.tree(8, -1), "-1 ranks"),
        (lambda: model.parameter_server(8, 2, 0), "0 servers"),
        (lambda: model.bidirectional_ring(8, 2, links=0), "0 links"),
        (lambda: model.double_tree(8, 2, chunks=0), "0 chunks"),
        (lambda: model.seconds("rong", 8, 2, WIRE), "'rong'; the model has direct, ring"),
        (lambda: Link(-1, 1), "alpha_s"),
        (lambda: Link(0, 0), "beta"),
        (lambda: Link(0, 1, math.nan), "gamma"),
        (lambda: Training(8, 0), "compute_s"),
        (lambda: PUBLISHED.beta_for(1, 4), "efficiency is 1"),
        (lambda: model.fit([8], [1.0]), "two sizes"),
        (lambda: model.fit([8, 8], [1.0, 1.0]), "two sizes"),
        (lambda: model.fit([8, 9], [1.0]), "two sizes"),
        (lambda: model.fit([8, 9], [1.0, 0.0]), "more than 0 seconds"),
        (lambda: model.fit([8, 9], [1.0, 2.0], lambda _: Cost(1, 8, 0, 8)), "cannot be separated"),
    ],
)
def test_meaningless_requests_are_refused(call, why):
    with pytest.raises(ValueError, match=why):
        call()
