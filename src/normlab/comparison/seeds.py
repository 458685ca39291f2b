r"""What scores by seed say of recipes: means, differences, and what a number of seeds can tell.

Recipes are compared within seeds: runs of the same seed share the order of the data and, where shapes allow,
their initial weights. Let :math:`d_s` be the difference of two recipes at seed :math:`s`, on a scale without
edges (``comparison.scale``). Its mean over the :math:`m` seeds at which both trained has the error
:math:`\tilde s/\sqrt m` with

.. math:: \tilde s^2 = \frac{d_0 \bar s^2 + (m - 1) s^2}{d_0 + m - 1}

and :math:`d_0 + m - 1` degrees of freedom: the pair's own variance, moderated by the typical one of all
pairs, :math:`\bar s^2` (Smyth 2004, Section 6). How much the others count, :math:`d_0`, is fitted to how much
variances differ between pairs: where recipes spread alike it is large, where they do not it goes to 0, which
leaves the pair its own t. Bonferroni's correction for the number of pairs makes intervals and p hold for all
of them together; both come from the same t, so that p is below 0.05 exactly where the interval leaves out 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import digamma, polygamma
from scipy.stats import norm
from scipy.stats import t as student_t

from normlab.comparison.scale import Array

LEVEL = 0.05
"""Errors that are allowed: a p below it is significant, and intervals cover the rest."""

POWER = 0.8
"""The probability with which a difference that is called detectable is found."""

CAUTION = 2.0
"""Factor on the spread of variances over pairs before it is believed to be chance: pairs share recipes, so
their variances resemble each other, and a few pairs tell little. At 1, one recipe of six that spreads five
times as much as the others makes false positives of 9% with three seeds; at 2 at most 7%
(docs/statistics.md).
"""

MOST_DRAWN = 20
"""Up to so many seeds, what is detectable is found by drawing."""

MOST_SEEDS = 1000
"""No larger number of seeds is suggested."""


@dataclass(frozen=True)
class Contrasts:
    """Differences of every pair of recipes, ``[..., pairs]`` in the order of ``itertools.combinations``."""

    common: Array
    """The number of seeds at which both trained."""
    delta: Array
    """The mean difference over those seeds; NaN where there are none."""
    spread: Array
    """The moderated standard deviation of the difference at one seed; NaN where no interval is given."""
    freedom: Array
    """Degrees of freedom of ``spread``."""

    @property
    def given(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Whether an interval is given: at least two common seeds, whose differences vary."""
        return np.isfinite(self.spread)

    @property
    def pairs(self) -> Array:
        """The number of pairs with an interval, ``[..., 1]``, for which all are corrected."""
        return self.given.sum(axis=-1, keepdims=True)

    @property
    def error(self) -> Array:
        """The standard error of ``delta``."""
        return self.spread / np.sqrt(np.maximum(self.common, 1))

    @property
    def margin(self) -> Array:
        """Half the width of the interval; with ``delta`` it covers all true differences at once in 95%."""
        return self.error * student_t.isf(LEVEL / 2 / np.maximum(self.pairs, 1), self.freedom)

    @property
    def p(self) -> Array:
        """The two-sided p of no difference, corrected for the number of pairs."""
        return np.minimum(1.0, 2 * self.pairs * student_t.sf(np.abs(self.delta) / self.error, self.freedom))


def contrasts(values: Array) -> Contrasts:
    """Compare all pairs of recipes by their values ``[..., recipes, seeds]``, NaN where a run failed."""
    first, second = np.triu_indices(values.shape[-2], 1)
    within = values[..., first, :] - values[..., second, :]
    common = np.isfinite(within).sum(axis=-1).astype(np.float64)
    with np.errstate(all="ignore"):  # pairs without common seeds
        delta = np.nansum(within, axis=-1) / common
        own = np.where(common > 1, common - 1, np.nan)
        variance = np.nansum((within - delta[..., None]) ** 2, axis=-1) / own
        typical, prior = _prior(variance, own)
        prior = np.fmin(prior, np.fmax(_residual_freedom(values) - own, 0))
        moderated = (prior * typical + own * variance) / (prior + own)
    return Contrasts(common, delta, np.sqrt(np.where(moderated > 0, moderated, np.nan)), prior + own)


def _prior(variance: Array, own: Array) -> tuple[Array, Array]:
    """Fit the typical variance of all pairs and the degrees of freedom that it lends to each, ``[..., 1]``.

    By the mean and the variance of log variances, as Smyth 2004, Section 6.2; the typical variance is the
    geometric mean, which a wild recipe moves less than an arithmetic one.
    """
    usable = np.where((variance > 0) & (own > 1), own, np.nan)  # a single degree of freedom says too little
    logs = np.log(variance) - digamma(usable / 2) + np.log(usable / 2)
    number = np.isfinite(logs).sum(axis=-1, keepdims=True)
    middle = np.nansum(logs, axis=-1, keepdims=True) / number
    spread = np.nansum((logs - middle) ** 2, axis=-1, keepdims=True) / (number - 1)
    chance = np.nansum(polygamma(1, usable / 2), axis=-1, keepdims=True) / number
    excess = CAUTION * spread - chance
    freedom, trigamma = _trigamma_table()
    fitted = np.interp(-excess, -trigamma, freedom, right=np.inf)
    lent = np.where(number < 2, 0.0, np.where(excess > 0, fitted, np.inf))
    return np.where(number < 2, 0.0, np.exp(middle)), lent


@cache
def _trigamma_table() -> tuple[Array, Array]:
    """Degrees of freedom d, and trigamma(d / 2), which falls with them."""
    freedom = np.geomspace(1e-3, 1e4, 20_000)
    return freedom, polygamma(1, freedom / 2)


def _residual_freedom(values: Array) -> Array:
    """The degrees of freedom that recipes and seeds leave to all pairs together, ``[..., 1]``."""
    trained = np.isfinite(values)
    spent = trained.any(axis=-1).sum(axis=-1) + trained.any(axis=-2).sum(axis=-1) - 1
    return (trained.sum(axis=(-2, -1)) - spent)[..., None].astype(np.float64)


def mean_margin(values: Array) -> tuple[Array, Array]:
    """Mean over the seeds that trained, ``[...]`` from ``[..., seeds]``, and half the width of its 95%
    interval.

    The margin is NaN for fewer than two seeds. It is Student's t on the recipe's own seeds: variances of
    recipes that share seeds rise and fall together and cannot lend each other degrees of freedom.
    """
    number = np.isfinite(values).sum(axis=-1).astype(np.float64)
    with np.errstate(all="ignore"):
        mean = np.nansum(values, axis=-1) / number
        variance = np.nansum((values - mean[..., None]) ** 2, axis=-1) / (number - 1)
        margin = np.sqrt(variance / number) * student_t.isf(LEVEL / 2, number - 1)
    return mean, np.where(number > 1, margin, np.nan)


@cache
def detectable(recipes: int, seeds: int) -> float:
    """The difference that is found with a probability of ``POWER`` between one pair of so many recipes, in
    standard deviations of a recipe over seeds; infinite for fewer than two seeds.

    By drawing runs of recipes that spread alike, and comparing them with ``contrasts``; beyond ``MOST_DRAWN``
    seeds by the quantiles of t and of the normal distribution.
    """
    if seeds < 2:
        return np.inf
    if seeds > MOST_DRAWN:
        pairs = recipes * (recipes - 1) / 2
        return float((student_t.isf(LEVEL / 2 / pairs, seeds - 1) + norm.isf(1 - POWER)) * np.sqrt(2 / seeds))
    draws = max(500, 400_000 // (recipes**2 * seeds))
    found = contrasts(np.random.default_rng(0).standard_normal((draws, recipes, seeds)))
    return float(np.quantile((found.margin - found.delta)[:, 0], POWER))


def seeds_needed(recipes: int, effect: float, at_least: int = 2) -> int | None:
    """The smallest number of seeds at which ``effect``, in standard deviations of a recipe over seeds, is
    detectable; None if that takes more than ``MOST_SEEDS``.
    """
    low, high = at_least - 1, at_least
    while detectable(recipes, high) > effect:
        if high >= MOST_SEEDS:
            return None
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if detectable(recipes, middle) <= effect else (middle, high)
    return high
