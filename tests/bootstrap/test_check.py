"""init(check=...): an error that a rank finds while others are missing ends the meeting of all."""

import time

import pytest
from ranks import Ranks, free_port
from waiting import counted_s

import shmring

SOON_S = 10  # far below the timeout, on a machine that stalls at times


def join_in_vain(_, world, number, finder, path):
    """The finder's check raises a moment after the other rank has come: rank 0 must not end before."""
    begin, seen = counted_s(), []

    def check():
        if number != finder:
            path.touch()
        elif path.exists():
            seen.append(time.monotonic())
            if seen[-1] - seen[0] > 0.3:
                raise shmring.RankFailed("rank 2 was not started", rank=2)

    with pytest.raises(shmring.RankFailed) as caught:
        shmring.init(world, number, timeout=30, check=check)
    assert counted_s() - begin < SOON_S
    return caught.value.rank


@pytest.mark.parametrize("has_address", [False, True])
@pytest.mark.parametrize("finder", [0, 1])
def test_an_error_of_the_check_ends_the_meeting(finder, has_address, tmp_path):
    address = f"127.0.0.1:{free_port()}" if has_address else None
    world = shmring.world(3, address=address)
    with Ranks(2) as ranks:
        ranks._order(lambda number: ("call", join_in_vain, (world, number, finder, tmp_path / "there")))
        answers = ranks.answers()
    assert answers == ([2, 2] if finder == 0 else [1, 2]), answers
