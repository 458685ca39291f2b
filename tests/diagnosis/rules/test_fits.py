from __future__ import annotations

import math

import numpy as np
import pytest

from normlab.diagnosis.laws import fits, fits_of_curves, half_width

DEPTHS = [2, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def noisy(y: np.ndarray, seed: int, size: float = 0.05) -> list[float]:
    return (y * np.exp(size * np.random.default_rng(seed).standard_normal(len(y)))).tolist()


def by_law(depths, values) -> dict:
    return {fit.law: fit for fit in fits(depths, values)}


@pytest.mark.parametrize(
    ("degrees", "level", "published"),
    [(1, 0.95, 12.706), (2, 0.95, 4.303), (9, 0.95, 2.262), (5, 0.99, 4.032), (2, 0.90, 2.920)],
)
def test_the_interval_of_a_mean_has_students_factor(degrees, level, published):
    values = np.random.default_rng(degrees).standard_normal(degrees + 1)
    expected = published * values.std(ddof=1) / math.sqrt(degrees + 1)
    assert half_width(values, level) == pytest.approx(expected, rel=3e-4)


@pytest.mark.parametrize("p", [-0.5, 0.3, 1.0, 2.4])
def test_a_power_is_found(p):
    fit = by_law(DEPTHS, [3 * n**p for n in DEPTHS])["power"]
    assert fit.coefficient == pytest.approx(3)
    assert fit.exponent == pytest.approx(p)
    assert fit.high - fit.low < 1e-6
    assert fit.r2 == pytest.approx(1)


@pytest.mark.parametrize(
    ("law", "values", "slope"),
    [
        ("log", [1 + 0.5 * math.log(n) for n in DEPTHS], 0.5),
        ("linear", [2 + 0.1 * n for n in DEPTHS], 0.1),
        ("constant", noisy(np.full(len(DEPTHS), 4.0), 3, 1e-3), 4.0),
    ],
)
def test_each_law_is_told_from_the_others(law, values, slope):
    found = fits(DEPTHS, values)
    assert min(found, key=lambda fit: fit.aic).law == law
    fit = {f.law: f for f in found}[law]
    assert fit.coefficient == pytest.approx(slope, rel=1e-3)
    assert fit.exponent is None
    assert fit.low <= fit.coefficient <= fit.high


def test_quality_and_intervals_are_those_of_numpy():
    n, y = np.array(DEPTHS, float), np.array(noisy(0.3 + 0.02 * np.array(DEPTHS), 1))
    found = by_law(DEPTHS, y.tolist())
    for law, x in (("linear", n), ("log", np.log(n))):
        (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
        residual = np.square(y - np.polyval(np.polyfit(x, y, 1), x)).sum()
        spread = 2.306 * math.sqrt(covariance[0, 0])  # Student's t of 8 degrees
        fit = found[law]
        assert fit.coefficient == pytest.approx(slope)
        assert (fit.low, fit.high) == pytest.approx((slope - spread, slope + spread), rel=1e-3)
        assert fit.r2 == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)
        assert fit.aic == pytest.approx(10 * math.log(residual / 10) + 6)
    p, intercept = np.polyfit(np.log(n), np.log(y), 1)
    residual = np.square(y - np.exp(intercept) * n**p).sum()
    assert found["power"].exponent == pytest.approx(p)
    assert found["power"].aic == pytest.approx(10 * math.log(residual / 10) + 6)
    assert found["power"].r2 == pytest.approx(1 - residual / np.square(y - y.mean()).sum())
    assert found["constant"].aic == pytest.approx(10 * math.log(y.var()) + 4)


def test_an_interval_holds_as_often_as_it_says():
    y = np.array(DEPTHS, float) ** 0.8
    found = [by_law(DEPTHS, noisy(y, seed, 0.2))["power"] for seed in range(100)]
    held = sum(fit.low <= 0.8 <= fit.high for fit in found)
    assert 88 <= held <= 99
    assert sum(fit.low <= 0.7 <= fit.high for fit in found) < 80


def test_curves_have_the_interval_of_their_spread():
    powers = [0.6, 0.7, 0.8, 0.9]
    found = fits_of_curves([(DEPTHS, [n**p for n in DEPTHS]) for p in powers])
    power = next(fit for fit in found if fit.law == "power")
    half = 3.182 * np.std(powers, ddof=1) / 2  # Student's t of 3 degrees
    mean = np.mean([[n**p for n in DEPTHS] for p in powers], 0)
    assert power.exponent == pytest.approx(np.mean(powers))
    assert power.high - power.exponent == pytest.approx(half, rel=1e-3)
    assert power.exponent - power.low == pytest.approx(half, rel=1e-3)
    line = next(fit for fit in found if fit.law == "linear")
    assert line.aic == by_law(DEPTHS, mean.tolist())["linear"].aic


def test_one_curve_has_its_own_interval():
    values = noisy(np.array(DEPTHS) ** 0.5, 2)
    assert fits_of_curves([(DEPTHS, values)]) == fits(DEPTHS, values)
    with pytest.raises(ValueError, match="different depths"):
        fits_of_curves([(DEPTHS, values), (DEPTHS[:-1], values[:-1])])


def test_no_power_goes_through_zero():
    found = by_law(DEPTHS, [0.0] * len(DEPTHS))
    assert set(found) == {"log", "linear", "constant"}
    assert all(fit.r2 == 0 and fit.coefficient == 0 and math.isfinite(fit.aic) for fit in found.values())


@pytest.mark.parametrize(
    ("depths", "values", "sentence"),
    [
        ([1, 2], [1.0, 2.0], "three different depths above 0"),
        ([2, 2, 4], [1.0, 2.0, 2.0], "three different depths above 0"),
        ([0, 2, 4], [1.0, 2.0, 2.0], "three different depths above 0"),
        ([1, 2, 3], [1.0, math.nan, 2.0], "the value at depth 2 is not finite"),
        ([1, 2, 3], [1.0, 2.0], "3 depths and 2 values"),
    ],
)
def test_what_cannot_be_fitted_says_why(depths, values, sentence):
    with pytest.raises(ValueError, match=sentence):
        fits(depths, values)


def test_the_exponent_of_several_curves_is_the_mean_of_theirs():
    """Not that of their mean curve, which the largest of skewed curves bends."""
    curves = [(DEPTHS, [b * n**p for n in DEPTHS]) for b, p in ((1.0, 0.5), (1.0, 0.6), (50.0, 1.5))]
    power = next(fit for fit in fits_of_curves(curves) if fit.law == "power")
    assert power.exponent == pytest.approx((0.5 + 0.6 + 1.5) / 3)
    assert power.coefficient == pytest.approx(50 ** (1 / 3))
    assert (power.low + power.high) / 2 == pytest.approx(power.exponent)
