"""Choose which combinations of values a plain `pytest` runs.

`each_value` and `each_pair` parametrize a test with all combinations. A plain `pytest` runs a few of them, in
which each value (or each pair of values) occurs; the others are marked slow, and `pytest -m slow` runs them.
"""

import itertools
import random

import pytest


def each_value(factors):
    """Parametrize with {names: values}; a name "a, b" has a tuple for each value.

    A plain run takes as many combinations as the longest list of values has entries.
    """
    lists = [list(values) for values in factors.values()]
    chosen = {tuple(at % len(values) for values in lists) for at in range(max(map(len, lists)))}
    return _parametrize(factors, chosen)


def each_pair(factors):
    """Parametrize like each_value, for three or more factors; a plain run has every pair of values of two."""
    rows = pairwise({name: range(len(list(values))) for name, values in factors.items()})
    return _parametrize(factors, {tuple(row[name] for name in factors) for row in rows})


def first(count, values):
    """Return values for parametrize; those after the first `count` are slow. A tuple is several arguments."""
    params = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        pytest.param(*param, marks=() if at < count else pytest.mark.slow) for at, param in enumerate(params)
    ]


def _parametrize(factors, chosen):
    names = [part for name in factors for part in name.split(", ")]
    params = []
    for places in itertools.product(*(range(len(list(values))) for values in factors.values())):
        values = []
        for (name, some), at in zip(factors.items(), places, strict=True):
            values += list(some)[at] if "," in name else [list(some)[at]]
        params.append(pytest.param(*values, marks=() if places in chosen else pytest.mark.slow))
    return pytest.mark.parametrize(names, params)


def pairwise(factors, allowed=lambda row: True, *, seed=1, tries=3):
    """Rows {factor: value} in which any two values of two factors meet that `allowed` lets meet.

    Greedy, after Cohen et al., "The AETG system", 1997: of a few rows the one that covers most is taken.
    """
    chance = random.Random(seed)
    names = list(factors)
    left = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
        if allowed({a: x, b: y})
    }
    pairs = sorted(left, key=repr)
    chance.shuffle(pairs)
    place = {name: at for at, name in enumerate(names)}

    def news(row, name, value):
        """Return the number of pairs that a value would cover for the first time, given the row."""
        mine = (name, value)
        return sum(
            ((mine, item) if place[name] < place[item[0]] else (item, mine)) in left for item in row.items()
        )

    def candidate(first):
        row = dict(first)
        others = [name for name in names if name not in row]
        chance.shuffle(others)
        for name in others:
            values = [value for value in factors[name] if allowed({**row, name: value})]
            chance.shuffle(values)
            row[name] = max(values, key=lambda value: news(row, name, value))
        covered = left.intersection(itertools.combinations([(name, row[name]) for name in names], 2))
        return len(covered), row, covered

    rows = []
    for pair in pairs:
        if pair in left:
            _, row, covered = max((candidate(pair) for _ in range(tries)), key=lambda found: found[0])
            left -= covered
            rows.append(row)
    return rows
