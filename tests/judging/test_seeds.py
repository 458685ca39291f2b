"""Means and differences over seeds, against hand-made numbers, scipy and slow loops."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import digamma

from normlab.judging.statistics import LEVEL, POWER, contrasts, detectable, mean_margin, seeds_needed

NAN = math.nan


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_two_recipes_are_compared_by_the_paired_t_test(seeds):
    a, b = drawn(2, seeds)
    found = contrasts(np.stack([a, b]))
    test = stats.ttest_rel(a, b)
    interval = test.confidence_interval(1 - LEVEL)
    assert found.p[0] == pytest.approx(test.pvalue)
    assert found.delta[0] - found.margin[0] == pytest.approx(interval.low)
    assert found.delta[0] + found.margin[0] == pytest.approx(interval.high)


def test_an_effect_of_the_seed_that_all_share_changes_nothing():
    values = drawn(4, 5)
    moved = contrasts(values + 100 * drawn(1, 5, seed=1))
    assert moved.p == pytest.approx(contrasts(values).p)


def test_p_is_below_the_level_exactly_where_the_interval_leaves_out_zero():
    values = drawn(2000, 4, 4) + np.array([0.0, 0.5, 1.5, 4.0])[:, None]
    values[np.random.default_rng(3).random(values.shape) < 0.2] = NAN
    found = contrasts(values)
    outside = np.abs(found.delta) > found.margin
    assert found.given.mean() < 1
    assert ((found.p < LEVEL) == outside)[found.given].all()
    assert 0.1 < outside[found.given].mean() < 0.9


def test_many_draws_at_once_are_each_as_alone():
    values = drawn(20, 5, 4)
    values[np.random.default_rng(1).random(values.shape) < 0.3] = NAN
    together = contrasts(values)
    for index, one in enumerate(values):
        alone = contrasts(one)
        for name in ("common", "delta", "spread", "freedom", "p", "margin"):
            assert np.allclose(getattr(alone, name), getattr(together, name)[index], equal_nan=True)


def test_pairs_with_fewer_than_two_common_seeds_get_no_interval_and_are_not_counted():
    values = np.array([[1.0, 2.1, 2.9], [2.0, 2.9, 4.1], [NAN, NAN, 5.0], [NAN, NAN, NAN]])
    found = contrasts(values)
    assert found.common.tolist() == [3, 1, 0, 1, 0, 0]
    assert found.given.tolist() == [True, *[False] * 5]
    assert found.p[0] == pytest.approx(stats.ttest_rel(*values[:2]).pvalue), (
        "the only pair needs no correction"
    )


def test_differences_that_do_not_vary_say_nothing_of_chance():
    assert not contrasts(np.array([[3.0, 3.0], [1.0, 1.0]])).given.any()


def test_pairs_that_spread_alike_lend_each_other_degrees_of_freedom_and_others_do_not():
    values = drawn(500, 4, 5)
    alike, apart = contrasts(values), contrasts(values * np.array([1, 1, 30, 1000])[:, None])
    assert (alike.freedom.max(axis=-1) <= 3 * 4).all(), "what recipes and seeds leave in all"
    assert np.median(alike.freedom) > 8
    assert np.median(apart.freedom) < 5
    quiet = (values[:, 0] - values[:, 1]).std(axis=-1, ddof=1)
    assert np.median(contrasts(values * np.array([1, 1, 1, 30])[:, None]).spread[:, 0] / quiet) < 3


def test_the_moderated_spread_lies_between_the_pairs_own_and_that_of_all():
    values = drawn(4, 4, seed=5) * np.array([1.0, 1.5, 2.0, 1.0])[:, None]
    own = np.array([(a - b).var(ddof=1) for a, b in itertools.combinations(values, 2)])
    moderated = contrasts(values).spread ** 2
    typical = np.exp(np.log(own).mean() - digamma(1.5) + math.log(1.5))
    low, high = np.minimum(own, typical), np.maximum(own, typical)
    assert ((low < moderated) & (moderated < high)).all()


def test_a_mean_has_students_t_and_none_from_a_single_seed():
    mean, margin = mean_margin(np.array([1.0, NAN, 4.0, 2.5]))
    low, high = stats.t.interval(0.95, 2, loc=2.5, scale=stats.sem([1.0, 4.0, 2.5]))
    assert (mean, mean - margin, mean + margin) == pytest.approx((2.5, low, high))
    assert np.isnan(mean_margin(np.array([NAN, 4.0]))[1])
    assert np.isnan(mean_margin(np.array([NAN, NAN]))[0])


@pytest.mark.parametrize(("recipes", "seeds"), [(2, 3), (4, 3), (4, 5)])
def test_a_detectable_difference_is_found_as_often_as_promised(recipes, seeds):
    values = drawn(4000, recipes, seeds, seed=7)
    values[:, 0] += detectable(recipes, seeds)
    assert (contrasts(values).p[:, 0] < LEVEL).mean() == pytest.approx(POWER, abs=0.03)


def test_more_seeds_detect_less_and_more_recipes_need_more():
    assert detectable(4, 1) == math.inf
    sizes = [detectable(4, n) for n in (2, 3, 5, 10, 30, 100, 400)]
    assert sizes == sorted(sizes, reverse=True)
    assert detectable(4, 21) == pytest.approx(detectable(4, 20), rel=0.12), (
        "drawn, and from there on by formula"
    )
    assert detectable(10, 5) > detectable(2, 5)


def test_the_seeds_needed_are_the_fewest_that_detect():
    for effect in (0.5, 1.3, 3.0):
        needed = seeds_needed(4, effect)
        assert needed is not None
        assert detectable(4, needed) <= effect < detectable(4, needed - 1)
    assert seeds_needed(4, 3.0, at_least=50) == 50
    assert seeds_needed(4, 1e-3) is None
