"""The optimum by size and its slope: exact where nothing is noisy, and covered by their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import binom

from cases import few
from normlab.scaling.optimum import Losses, Optimum, Trend, fit_curves
from scaling.curves import Shape, bent, cliff, draw, drifting, kinked, skewed

SIZES = (64, 128, 256, 512)


def exact(slope: float, shape: Shape, seeds: int = 2) -> dict[int, Losses]:
    optima = [0.3 + slope * i for i in range(4)]
    return draw(optima, shape, 1e-5, rng=np.random.default_rng(0), seeds=seeds)


@pytest.mark.parametrize("skew", [-0.7, 1e-3, 0.7])
def test_almost_without_noise_optimum_and_slope_are_exact(skew: float):
    found = fit_curves(exact(-0.4, skewed(skew)))
    assert [found.optima[size].value for size in SIZES] == pytest.approx([0.3, -0.1, -0.5, -0.9], abs=2e-3)
    assert found.line is not None
    assert found.line.shift() == pytest.approx((-0.4, -0.4, -0.4), abs=2e-3)
    assert found.line.at(1024)[0] == pytest.approx(-1.3, abs=5e-3)
    assert found.skews == pytest.approx(dict.fromkeys(SIZES, skew), abs=2e-2)


def one(losses: dict[float, tuple[float, float]]) -> Optimum:
    by_trial = {(x, seed): y for x, both in losses.items() for seed, y in enumerate(both)}
    return fit_curves({64: by_trial}).optima[64]


def test_an_optimum_at_the_edge_or_on_a_flat_curve_is_an_open_interval():
    falling = one({x: (3.0 - 0.1 * x, 3.01 - 0.1 * x) for x in range(5)})
    assert falling.value is falling.high is None
    assert "the highest" in falling.why
    rising = one({x: (3.0 + 0.1 * x, 3.01 + 0.1 * x) for x in range(5)})
    assert rising.value is rising.low is None
    assert "the lowest" in rising.why
    flat = one({x: (3.0 + 0.01 * (-1) ** x, 3.0 - 0.02 * (x % 3)) for x in range(5)})
    assert flat.value is flat.low is flat.high is None
    assert "hardly changes" in flat.why
    twice = one({x: (3.0 + y, 3.01 + y) for x, y in enumerate((0.2, 1.2, 0.1, 1.2, 0.2))})
    assert twice.value is twice.low is twice.high is None
    assert "too noisy" in twice.why


def test_what_diverged_is_above_everything_and_is_not_fitted():
    curves = exact(0.0, cliff)
    assert any(math.isinf(y) for losses in curves.values() for y in losses.values())
    found = fit_curves(curves)
    assert [found.optima[size].value for size in SIZES] == pytest.approx([0.3] * 4, abs=5e-3)
    until = one({x: (3.0 - 0.1 * x, 3.01 - 0.1 * x) if x < 4 else (math.inf, math.inf) for x in range(5)})
    assert (until.value, until.high) == (None, 4.0)
    assert "no rate" in one(dict.fromkeys(range(5), (math.inf, math.inf))).why
    assert "2 rates" in one({x: (2.0, 2.1) if x < 2 else (math.inf, math.inf) for x in range(5)}).why


def test_the_interval_of_the_slope_is_never_narrower_than_that_of_the_trials_noise():
    rng = np.random.default_rng(3)
    on_a_line = [fit_curves(draw([0.2] * 4, skewed(0.5), 0.01, rng=rng)).line for _ in range(12)]
    assert None not in on_a_line
    assert all(line.factor >= line.fixed_factor for line in on_a_line)
    losses = draw([0.4, -0.4, 0.4, -0.4], skewed(0.5), 0.002, rng=np.random.default_rng(4))
    scattered = fit_curves(losses).line
    assert scattered is not None
    assert scattered.factor > 3 * scattered.fixed_factor
    two = fit_curves(draw([0.0, 0.1], skewed(0.5), 0.005, rng=rng)).line
    assert isinstance(two, Trend)
    assert two.factor == two.fixed_factor


SLOPES = (0.0, -0.5)
GIVEN = 0.93
"""The least coverage of what is called 95%, as for comparisons (docs/statistics.md)."""


def coverage(
    shape: Shape | Sequence[Shape],
    noise: float,
    scatter: float,
    draws: int,
    sizes: int = 4,
    growth: float = 1,
) -> tuple[int, ...]:
    """How often the intervals of optima and of slopes hold the truth, and how many there are."""
    rng = np.random.default_rng(20)
    optima, slopes, known, lines = 0, 0, 0, 0
    for i in range(draws):
        slope = SLOPES[i % 2]
        first = rng.uniform(-0.5, 0.5)
        true = [first + slope * k + scatter * rng.normal() for k in range(sizes)]
        found = fit_curves(draw(true, shape, noise, rng=rng, growth=growth))
        for own, x in zip(found.optima.values(), true, strict=True):
            if own.low is not None and own.high is not None:
                known += 1
                optima += own.low <= x <= own.high
        if found.line is not None:
            lines += 1
            _, low, high = found.line.shift()
            slopes += low <= slope <= high
    return optima, known, slopes, lines


def least(draws: int, rate: float) -> int:
    """How many of these draws succeed at least, with a chance of 99.9%, if each succeeds at this rate."""
    return int(binom.ppf(0.001, draws, rate))


@pytest.mark.slow
def test_intervals_cover_the_optimum_and_the_slope():
    optima, known, slopes, lines = coverage(skewed(0.7), 0.01, 0.05, draws=30)
    assert known >= 0.95 * 4 * 30
    assert optima >= least(known, 0.95)
    assert slopes >= least(lines, 0.95)


@pytest.mark.parametrize(
    ("first", "last", "sizes", "draws"), [(0.01, 1.2, 4, 8), (0.3, 0.6, 4, 8), (0.01, 1.0, 2, 12)]
)
def test_a_skew_that_goes_with_the_size_is_not_taken_for_a_shift(
    first: float, last: float, sizes: int, draws: int
):
    _, _, slopes, lines = coverage(drifting(first, last, sizes), 0.003, 0.0, draws, sizes)
    assert lines == draws
    assert slopes >= least(lines, 0.95)


def test_intervals_of_the_slope_cover_it_where_noise_grows():
    _, _, slopes, lines = coverage(skewed(0.5), 0.003, 0.0, draws=8, growth=5.0)
    assert slopes >= least(lines, GIVEN)


def test_where_the_form_does_not_describe_the_curve_the_interval_reaches_to_the_next_rates():
    optima, known, _, _ = coverage(kinked, 0.003, 0.0, draws=15)
    assert known >= 0.9 * 4 * 15
    assert optima >= least(known, 0.98)


def test_where_the_form_does_not_describe_the_curve_the_slope_is_as_little_known():
    """An optimum that may lie an octave away on either side tells a slope no better than that."""
    found = fit_curves(draw([0.1] * 2, kinked, 0.003, rng=np.random.default_rng(1)))
    halves = [(one.high or 0.0) - (one.low or 0.0) for one in found.optima.values()]
    assert min(halves) >= 2
    assert found.line is not None
    value, low, high = found.line.shift()
    assert (high - low) == pytest.approx(math.hypot(*halves), rel=1e-6)
    assert low < value < high


@pytest.mark.slow
@pytest.mark.parametrize("scatter", [0.0, 0.1])
@pytest.mark.parametrize("noise", [0.003, 0.01])
@pytest.mark.parametrize("shape", few([skewed(0.7), bent, cliff], 1))
def test_intervals_of_the_slope_cover_it_whatever_the_shape(shape: Shape, noise: float, scatter: float):
    _, _, slopes, lines = coverage(shape, noise, scatter, draws=120)
    assert slopes >= least(lines, GIVEN)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.003, 0.01])
@pytest.mark.parametrize(("first", "last", "sizes"), [(0.01, 1.2, 4), (0.3, 0.9, 4), (1.0, 0.01, 2)])
def test_intervals_of_the_slope_cover_it_where_the_skew_goes_with_the_size(
    first: float, last: float, sizes: int, noise: float
):
    _, _, slopes, lines = coverage(drifting(first, last, sizes), noise, 0.0, 80, sizes)
    assert slopes >= least(lines, GIVEN)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.003, 0.01])
@pytest.mark.parametrize("sizes", [2, 4])
def test_intervals_of_the_slope_cover_it_where_noise_grows_above_the_best_rate(sizes: int, noise: float):
    _, _, slopes, lines = coverage(skewed(0.5), noise, 0.0, 80, sizes, growth=5.0)
    assert slopes >= least(lines, GIVEN)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.003, 0.01])
@pytest.mark.parametrize("shape", [skewed(1e-3), skewed(0.7)])
def test_intervals_of_optima_cover_them_on_skewed_curves(shape: Shape, noise: float):
    optima, known, _, _ = coverage(shape, noise, 0.0, draws=120)
    assert optima >= least(known // 4, GIVEN) * 4  # the four of a draw share their noise
