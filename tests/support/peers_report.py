"""The JSON of bench/peers/peers.py, as far as `shmring bench --compare` reads it. test_bench.py checks it."""

FIGURES = (("mpich", "blocking", 1e6), ("mpich", "persistent", 2e6), ("copy", "plain", 1.0))
INPUTS, SIZES = ("reused", "written"), (8, 4096)


def peers_report(call="all_reduce", ranks=2, distance="near"):
    """One round of FIGURES: by contestant and variant, in microseconds."""
    medians = [
        {"ranks": ranks, "distance": distance, "input": given, "nbytes": nbytes}
        | {"contestant": who, "variant": variant, "us": us, "rounds": 1}
        for given in INPUTS
        for who, variant, us in FIGURES
        for nbytes in SIZES
    ]
    return {"schema": 1, "options": {"call": call}, "medians": medians}
