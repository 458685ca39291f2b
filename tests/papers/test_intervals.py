"""Means, slopes and fits with their intervals, against NumPy and against how often they hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from normlab.papers import intervals
from normlab.papers.estimate import Estimate, jackknife, log_slope, mean, mean_ratio, slope
from normlab.papers.intervals import highest, laws, lowest, r_squared, simultaneous


def test_a_mean_has_student_s_interval():
    values = [1.0, 2.0, 4.0, 9.0]
    found = mean(values)
    half = 3.182446 * np.std(values, ddof=1) / 2
    assert found.value == pytest.approx(4.0)
    assert (found.low, found.high) == pytest.approx((4.0 - half, 4.0 + half))


def test_one_value_says_nothing_of_its_spread():
    assert mean([3.0]) == Estimate(3.0, -math.inf, math.inf, 1)
    assert mean([3.0]).mapped(lambda value: 1 / value) == Estimate(1 / 3, -math.inf, math.inf, 1)
    assert mean([3.0]).columns("bleu") == {"bleu": 3.0, "low": 3.0, "high": 3.0}
    assert simultaneous([[3.0, 4.0]]) == [Estimate.of_too_few(3.0, 1), Estimate.of_too_few(4.0, 1)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_leaves_no_ends(value):
    estimate = mean([1.0, value, 2.0])
    assert not math.isfinite(estimate.value)
    assert (estimate.low, estimate.high, estimate.runs) == (-math.inf, math.inf, 3)


def test_the_interval_of_a_mean_holds_as_often_as_it_says():
    random = np.random.default_rng(0)
    hits = [(m := mean(random.normal(5.0, 2.0, 4).tolist())).low <= 5.0 <= m.high for _ in range(600)]
    assert 0.93 <= np.mean(hits) <= 0.97


def test_a_slope_is_that_of_least_squares():
    x, random = [1.0, 2.0, 5.0, 7.0], np.random.default_rng(1)
    curves = random.normal(size=(3, 4)).tolist()
    expected = [np.polyfit(x, y, 1)[0] for y in curves]
    found = slope(x, curves)
    assert found.value == pytest.approx(np.mean(expected))
    assert found.high - found.low == pytest.approx(2 * 4.302653 * np.std(expected, ddof=1) / math.sqrt(3))


def test_an_exponent_is_found():
    depths = [6, 8, 10, 12, 14]
    found = log_slope(depths, [[b * n**-0.45 for n in depths] for b in (1.0, 3.0)])
    assert found.value == pytest.approx(-0.45)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-9)


def test_ratios_are_averaged_as_logarithms():
    found = mean_ratio([0.5, 2.0, 1.0])
    assert found.value == pytest.approx(1.0)
    assert found.low == pytest.approx(1 / found.high)


# --------------------------------------------------------------------------------- several at the same time


def test_one_quantity_alone_has_student_s_interval():
    values = [1.0, 2.0, 4.0, 9.0]
    (found,) = simultaneous([[v] for v in values])
    assert found == mean(values)


class FewDraws:
    """Draws 2,000 rows, whatever number is asked for: by them a quantile of 95% is one of 94 to 96%."""

    def __init__(self, seed):
        self.random = np.random.Generator(np.random.PCG64(seed))

    def standard_normal(self, shape):
        return self.random.standard_normal((2_000, *shape[1:]))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k", "together"), [(5, 3, 0.0), (10, 12, 0.0), (10, 12, 0.9), (20, 6, 0.5)])
def test_simultaneous_limits_hold_together_as_often_as_they_say(n, k, together, monkeypatch):
    random = np.random.default_rng(0)
    monkeypatch.setattr(intervals, "DRAWS", 1)
    monkeypatch.setattr(np.random, "default_rng", FewDraws)
    samples = 300
    hits = 0
    for _ in range(samples):
        shared = random.normal(size=(n, 1)) * together**0.5
        runs = 3.0 + np.arange(k) * (shared + random.normal(size=(n, k)) * (1 - together) ** 0.5 + 1)
        hits += all(m.low <= 3.0 + j <= m.high for j, m in enumerate(simultaneous(runs)))
    assert hits / samples >= 0.92


def test_alike_quantities_cost_less_than_unlike_ones():
    random = np.random.default_rng(0)
    shared, noise = random.normal(size=(40, 1)), random.normal(size=(40, 8))
    widths = []
    for weight in (0.05, 1.0):
        found = simultaneous(runs := shared * (1 - weight) + noise * weight)
        single = [mean(column) for column in runs.T]
        widths.append(
            np.mean([(a.high - a.low) / (b.high - b.low) for a, b in zip(found, single, strict=True)])
        )
    assert 1.0 < widths[0] < widths[1]
    bonferroni = stats.t.ppf(1 - 0.025 / 8, 39) / stats.t.ppf(0.975, 39)
    assert widths[1] < 1.02 * bonferroni


def test_a_quantity_that_does_not_vary_is_no_trouble():
    found = simultaneous([[1.0, 2.0], [1.0, 3.0], [1.0, 7.0]])
    assert (found[0].low, found[0].value, found[0].high) == (1.0, 1.0, 1.0)
    assert found[1].low < 4.0 < found[1].high


def test_a_bound_on_all_is_a_bound_on_the_extreme():
    some = [Estimate(1.0, 0.5, 1.5, 4), Estimate(2.0, 0.2, 3.8, 4)]
    assert lowest(some) == Estimate(1.0, 0.2, 1.5, 4)
    assert highest(some) == Estimate(2.0, 0.5, 3.8, 4)


# ------------------------------------------------------------------------------- statistics of a mean curve


def test_the_jackknife_of_a_mean_is_student_s():
    values = [1.0, 2.0, 4.0, 9.0]
    found, expected = jackknife(values, lambda x: float(x.mean())), mean(values)
    assert (found.value, found.low, found.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    assert found.runs == 4


def test_two_runs_have_no_jackknife():
    found = jackknife([1.0, 2.0], lambda x: float(x.mean()))
    assert found == Estimate(1.5, -math.inf, math.inf, 2)


def test_the_jackknifed_ratio_of_means_holds_as_often_as_it_says():
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        found = jackknife(
            random.normal([4.0, 2.0], 0.5, (12, 2)), lambda x: float(x.mean(0)[0] / x.mean(0)[1])
        )
        hits += found.low <= 2.0 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


def test_r_squared_stays_below_one():
    depths = np.arange(1.0, 7.0)
    curves = depths + np.random.default_rng(0).normal(0, 0.3, (8, 6))

    def quality(y):
        return stats.linregress(depths, y).rvalue ** 2

    found = r_squared(curves, quality)
    assert found.value == pytest.approx(quality(curves.mean(0)))
    assert found.low < found.value < found.high < 1


@pytest.mark.parametrize(("law", "other"), [("linear", "log"), ("log", "linear")])
def test_the_law_that_made_the_curves_is_found(law, other):
    depths = [6, 9, 12, 15, 18]
    x = np.array(depths, float) if law == "linear" else np.log(depths)
    curves = (
        1
        + x * np.random.default_rng(1).normal(1, 0.05, (6, 1))
        + np.random.default_rng(0).normal(0, 0.003, (6, 5))
    )
    found = laws(depths, curves.tolist())
    assert found[f"{law}_r2"].value > found[f"{other}_r2"].value
    assert found["log_over_linear_aic"].value * (1 if law == "log" else -1) > 0
