"""Means, slopes and fits over independent runs, with the intervals that decide effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from normlab.diagnosis.laws import LawFit, fits
from normlab.papers.estimate import Array, Estimate, jackknife, log_slope

LEVEL: Final = 0.95
"""The probability that an interval, or a set of simultaneous ones, covers what it is for."""
DRAWS: Final = 20_000
"""Number of simulated samples for the quantile of a largest t."""
MOST_NUMBERS: Final = 2_000_000
"""Most numbers that are drawn at once, 16 MB."""


def simultaneous(runs: ArrayLike) -> list[Estimate]:
    r"""The means of the columns of ``runs`` `[n, k]`, n independent runs of k quantities, with limits that
    hold for all of them together: :math:`\bar x_j \pm c \, s_j / \sqrt n`, c the 95% quantile of
    :math:`\max_j |t_j|` (max-t).

    The quantile is that of n normal draws with the columns' correlations. These are shrunk towards 0 as far
    as n runs leave them uncertain (Schäfer and Strimmer 2005, Section 2.4): few runs give wider limits.
    """
    x = np.asarray(runs, float)
    n, k = x.shape
    if n < 2:
        return [Estimate.of_too_few(float(value), n) for value in x[0]]
    spread = x.std(0, ddof=1) / math.sqrt(n)
    factor = _largest_t(_correlations(x), n) if k > 1 else float(stats.t.ppf((1 + LEVEL) / 2, n - 1))
    return [
        Estimate(m, m - factor * s, m + factor * s, n)
        for m, s in zip(x.mean(0).tolist(), spread.tolist(), strict=True)
    ]


def _correlations(x: Array) -> Array:
    """The correlations of the columns, shrunk by their estimated variance over their squares."""
    centred = x - x.mean(0)
    length = np.linalg.norm(centred, axis=0)
    unit = centred / np.where(length > 0, length, 1.0)
    r = unit.T @ unit
    off_diagonal = ~np.eye(len(r), dtype=bool)
    variance = ((1 - r[off_diagonal] ** 2) ** 2).sum() / (len(x) - 1)
    weight = min(1.0, variance / max(float((r[off_diagonal] ** 2).sum()), 1e-300))
    return np.where(off_diagonal, (1 - weight) * r, 1.0)


def _largest_t(correlations: Array, n: int) -> float:
    """The quantile of the largest |t| of n normal draws with these correlations."""
    values, vectors = np.linalg.eigh(correlations)
    root = vectors * np.sqrt(values.clip(min=0))
    random = np.random.default_rng(0)
    largest: list[Array] = []
    part = max(1, MOST_NUMBERS // (n * len(root)))
    for _ in range(0, DRAWS, part):
        drawn = random.standard_normal((part, n, len(root))) @ root.T
        t = drawn.mean(1) / (drawn.std(1, ddof=1) / math.sqrt(n))
        largest.append(np.abs(t).max(1))
    return float(np.quantile(np.concatenate(largest), LEVEL))


def lowest(found: Iterable[Estimate], choose: Callable[[Iterable[float]], float] = min) -> Estimate:
    """Return the least of several simultaneous measures: a lower bound holds for it if it does for all."""
    measures = list(found)
    value, low, high = (
        choose(getattr(measure, end) for measure in measures) for end in ("value", "low", "high")
    )
    return Estimate(value, low, high, measures[0].runs)


def highest(found: Iterable[Estimate]) -> Estimate:
    """Return the largest of several simultaneous measures: an upper bound holds for it if it does for all."""
    return lowest(found, max)


def r_squared(runs: ArrayLike, quality: Callable[[Array], float]) -> Estimate:
    """Jackknife the R² that ``quality`` finds on the mean curve, as ln(1 − R²), which has no edge at 1."""
    log_missing = jackknife(runs, lambda x: math.log(max(1 - quality(x.mean(0)), 1e-12)))
    return log_missing.mapped(lambda value: 1 - math.exp(value))


def laws(depths: Sequence[float], curves: Sequence[Sequence[float]]) -> dict[str, Estimate]:
    """Return R² of a line in N and of one in log N on the mean curve, by how much AIC prefers log N to N
    there, and the exponent, which is the mean of those of the curves.
    """

    def fit(curve: Array) -> dict[str, LawFit]:
        return {one.law: one for one in fits(depths, curve)}

    def preference(x: Array) -> float:
        found = fit(x.mean(0))
        return found["linear"].aic - found["log"].aic

    return {
        "linear_r2": r_squared(curves, lambda y: fit(y)["linear"].r2),
        "log_r2": r_squared(curves, lambda y: fit(y)["log"].r2),
        "log_over_linear_aic": jackknife(curves, preference),
        "exponent": log_slope(depths, curves),
    }
