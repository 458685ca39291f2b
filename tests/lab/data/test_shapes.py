"""Few shapes, little padding, and the same shapes whether lengths are seen at once or in parts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import each
from normlab.lab.data import ragged
from normlab.lab.data.ragged import Ragged, TokenPairs
from normlab.lab.data.shapes import Shape, _equal_shares, plan_shapes


def pairs_of(source, target):
    """Pairs of these lengths, without any token."""
    sides = (np.concatenate([[0], np.cumsum(side)]).astype(np.int64) for side in (source, target))
    return TokenPairs(*(Ragged(np.zeros(0, np.uint16), offsets) for offsets in sides))


def made_pairs(count=1000, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    source = rng.integers(1, longest, count)
    target = np.clip(np.round(source * rng.lognormal(0, 0.2, count)), 1, longest).astype(int)
    return pairs_of(source, target)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=120),
    st.sampled_from([1, 1, 1, 97]),
    st.integers(1, 16),
    st.integers(1, 40),
)
def test_the_shapes_are_the_same_whether_lengths_are_read_at_once_or_in_parts(lengths, scale, count, some):
    pairs = pairs_of(*(scale * side for side in np.array(lengths).T))
    at_once = plan_shapes(pairs, 4096, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "_PAIRS_AT_A_TIME", some)
        assert plan_shapes(pairs, 4096, count) == at_once


def test_the_search_begins_with_nine_tenths_of_equal_shares_of_the_tokens():
    lengths = np.array([[1] * 20 + [10] * 4, [1] * 10 + [2] * 10 + [10] * 4], np.int16)
    corners = _equal_shares(lengths, 3)  # parts of 17, 4 and 3 pairs
    assert np.array(corners).tolist() == [[1, 2], [7, 7], [10, 10]]


def naive_positions(corners, source, target):
    """Padded positions when every pair goes to the first corner that holds it."""
    return sum(
        next(s + t for s, t in corners if a + 1 <= s and b + 1 <= t)
        for a, b in zip(source, target, strict=True)
    )


@each("count", [1, 2, 16])
@each("max_tokens", [30, 4096])
def test_shapes(count, max_tokens):
    pairs = made_pairs()
    source, target = pairs.lengths
    shapes = plan_shapes(pairs, max_tokens, count)
    assert 1 <= len(shapes) <= count
    for small, large in itertools.pairwise(shapes):
        assert small.source <= large.source
        assert small.target <= large.target
        assert (small.source, small.target) != (large.source, large.target)
    assert (shapes[-1].source, shapes[-1].target) == (source.max() + 1, target.max() + 1)
    for shape in shapes:
        assert shape.rows == max(1, max_tokens // (shape.source + shape.target))


def test_two_shapes_are_the_best_two():
    # With two shapes there is one corner to place, and the search is exhaustive.
    pairs = made_pairs(200, longest=12)
    source, target = pairs.lengths
    last = (int(source.max()) + 1, int(target.max()) + 1)
    best = min(
        naive_positions([corner, last], source, target)
        for corner in itertools.product(range(1, last[0] + 1), range(1, last[1] + 1))
    )
    shapes = plan_shapes(pairs, 100, 2)
    assert naive_positions([(shape.source, shape.target) for shape in shapes], source, target) == best


def test_more_shapes_pad_less():
    pairs = made_pairs(3000, longest=80)
    source, target = pairs.lengths
    real = float((source + target + 2).sum())
    share = {}
    for count in (1, 4, 16):
        shapes = plan_shapes(pairs, 4096, count)
        share[count] = real / naive_positions([(s.source, s.target) for s in shapes], source, target)
    assert share[1] < share[4] < share[16]
    assert share[16] > 0.8


def test_shapes_of_odd_texts():
    one = [5]
    assert plan_shapes(pairs_of(one, one), 100) == [Shape(6, 6, 8)]
    assert plan_shapes(pairs_of([5] * 50, [7] * 50), 100) == [Shape(6, 8, 7)]
    assert plan_shapes(pairs_of(one, one), 4) == [Shape(6, 6, 1)]
    long = [3, 5000, 20_000]
    shapes = plan_shapes(pairs_of(long, long), 4096)
    assert (shapes[-1].source, shapes[-1].target, shapes[-1].rows) == (20_001, 20_001, 1)
    with pytest.raises(ValueError, match="no pair"):
        plan_shapes(pairs_of([], []), 100)
