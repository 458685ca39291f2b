from inspect import signature
from itertools import combinations, product

import pytest

from cases import each, pairwise

AXES = ["abcd", (1, None, "x"), (True, False), "xyz", range(3)]


def pairs_of(rows):
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_every_pair_occurs_in_few_rows():
    rows, every = pairwise(*AXES), list(product(*AXES))
    assert set(rows) <= set(every)
    assert pairs_of(rows) == pairs_of(every)
    assert len(set(rows)) == len(rows) < len(every) / 10


def test_the_same_rows_come_each_time_and_two_axes_are_a_product():
    assert pairwise(*AXES) == pairwise(*AXES)
    assert pairwise("ab", "cd") == list(product("ab", "cd"))
    assert pairwise("ab", []) == []


def test_each_value_is_tried_and_those_that_fail_are_named():
    tried = []

    @each(("a", "b"), [(1, 1), (1, 2)])
    @each("c", "xy")
    def check(a, b, c, fixture):
        tried.append((a, b, c, fixture))
        assert a == b
        if c == "y":
            pytest.fail("y")

    assert [*signature(check).parameters] == ["fixture"]
    with pytest.raises(BaseExceptionGroup, match=r"3 of 4: 1, 1, y; 1, 2, x; 1, 2, y") as failed:
        check(fixture=0)
    assert len(failed.value.exceptions) == 3
    assert tried == [(1, 1, "x", 0), (1, 1, "y", 0), (1, 2, "x", 0), (1, 2, "y", 0)]


def test_no_value_is_an_error():
    @each("nothing", [])
    def check(nothing):
        pass

    with pytest.raises(AssertionError, match="no nothing"):
        check()
