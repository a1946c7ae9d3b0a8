"""The choice of combinations for a plain run: it has every value, or every pair; with the slow ones it has
all."""

import itertools

from combinations import each_pair, each_value, first

FACTORS = {"a": [1, 2, 3], "b": range(4), "c, d": [("x", 1), ("y", 2)]}
ALL = [(a, b, c, d) for a, b, (c, d) in itertools.product(*FACTORS.values())]


def plain_and_slow(params):
    plain = [param.values for param in params if not param.marks]
    return plain, [param.values for param in params if [mark.name for mark in param.marks] == ["slow"]]


def params_of(decorator):
    names, params = decorator.mark.args
    assert names == ["a", "b", "c", "d"]
    return params


def pairs(rows):
    return {(i, j, row[i], row[j]) for row in rows for i, j in itertools.combinations(range(4), 2)}


def test_each_value_occurs_in_a_plain_run():
    plain, slow = plain_and_slow(params_of(each_value(FACTORS)))
    assert [set(values) for values in zip(*plain, strict=True)] == [
        {1, 2, 3},
        {0, 1, 2, 3},
        {"x", "y"},
        {1, 2},
    ]
    assert len(plain) == 4
    assert sorted(plain + slow) == ALL


def test_each_pair_occurs_in_a_plain_run():
    plain, slow = plain_and_slow(params_of(each_pair(FACTORS)))
    assert pairs(plain) == pairs(ALL)
    assert len(plain) < len(ALL)
    assert sorted(plain + slow) == ALL


def test_the_first_are_in_a_plain_run():
    assert plain_and_slow(first(2, [1, (2, 3), 4, [5]])) == ([(1,), (2, 3)], [(4,), ([5],)])
