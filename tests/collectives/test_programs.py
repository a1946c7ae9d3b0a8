"""Random programs (see programs.py) on worlds of several sizes: some here, thousands by `pytest -m soak`."""

import itertools
import random
import time

import pytest
from combinations import each_value, first
from programs import run_program, seeds_of

SETTINGS = (
    {},
    {"SHMRING_CHUNK": 1024, "SHMRING_DEPTH": 2},  # every pipeline wraps
    {"SHMRING_CHUNK": 256, "SHMRING_DEPTH": 3, "SHMRING_PATH": "far"},
    {"SHMRING_SINGLE_COPY": 64},
    {"SHMRING_SEGMENT": "posix", "SHMRING_FIRST_SEQ": (1 << 64) - 40},  # every counter wraps
)
PROGRAMS = {1: 5, 2: 16, 3: 12, 4: 10, 8: 3}  # for each of the settings, by ranks
PARTS = 2  # of the programs
SOAK_S = 900


@pytest.mark.limit(400)
@pytest.mark.parametrize("part", first(1, range(PARTS)))
@each_value({"size": PROGRAMS, "environ": SETTINGS})
def test_random_programs(world_of, size, environ, part):
    ranks = world_of(size, **environ)
    for seed in seeds_of((size, sorted(environ)), PROGRAMS[size])[part::PARTS]:
        ranks(run_program, seed)


@pytest.mark.soak
@pytest.mark.limit(2 * SOAK_S)
def test_random_programs_for_long(world_of, capsys):
    until = time.monotonic() + SOAK_S
    for begin in itertools.count(random.SystemRandom().randrange(1 << 31), 20):
        if time.monotonic() > until:
            break
        size, environ = random.choice((2, 3, 4, 5, 8)), random.choice(SETTINGS)
        with capsys.disabled():
            print(f"\nprograms {begin} to {begin + 19} of {size} ranks, {environ}", end="", flush=True)
        ranks = world_of(size, **environ)
        for seed in range(begin, begin + 20):
            ranks(run_program, seed)
