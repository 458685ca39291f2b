r"""What scores and outcomes by seed say about recipes: means, differences, and what so many seeds can tell.

Recipes are compared within seeds: runs of the same seed share the order of the data and, where shapes allow,
their initial weights. Let :math:`d_s` be the difference of two recipes at seed :math:`s`, on a scale without
edges (``MetricScale``). Its mean over the :math:`m` seeds at which both trained has the error
:math:`\tilde s/\sqrt m` with

.. math:: \tilde s^2 = \frac{d_0 \bar s^2 + (m - 1) s^2}{d_0 + m - 1}

and :math:`d_0 + m - 1` degrees of freedom: the pair's own variance, moderated by the typical one of all
pairs, :math:`\bar s^2` (Smyth 2004, Section 6). How much the others count, :math:`d_0`, is fitted to how much
variances differ between pairs: it is large if recipes spread alike; if they do not, it goes to 0, which
leaves each pair its own t. Bonferroni's correction for the number of pairs makes intervals and p hold for all
pairs together; both come from the same t, so that p is below 0.05 exactly when the interval excludes 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.special import digamma, expit, logit, polygamma
from scipy.stats import binomtest, fisher_exact, norm
from scipy.stats import t as student_t

from normlab.base.metric import Metric
from normlab.errors import UserError
from normlab.judging.difference import Interval

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Combine = Callable[[Array], Array]
"""Turns sums of statistics `[..., k]` into scores `[...]`."""
LEVEL = 0.05
"""The share of errors allowed: a p below it is significant, and intervals cover the rest."""
POWER = 0.8
"""A difference is called detectable if it is found with this probability."""
CAUTION = 2.0
"""The spread of variances over pairs is multiplied by this before it is put down to chance: pairs share
recipes, so their variances resemble each other, and a few pairs tell little. At 1, with three seeds, one
recipe of six that spreads five times as much as the others causes 9% false positives; at 2 at most 7%
(docs/statistics.md).
"""
MOST_DRAWN = 20
"""Up to so many seeds, what is detectable is found by simulation."""
MOST_SEEDS = 1000
"""More seeds than this are never suggested."""
_SEED = 20050629
_ROUNDING = 1e-9
"""Scores of the same examples in another order differ by rounding, far less than any exchange does."""
_CHUNK = 512
"""Exchanges drawn at a time, so that memory stays at some 10 kB per example."""


@dataclass(frozen=True)
class Contrasts:
    """Differences of every pair of recipes, ``[..., pairs]`` in the order of ``itertools.combinations``."""

    common: Array
    """The number of seeds at which both trained."""
    delta: Array
    """The mean difference over those seeds; NaN if there are none."""
    spread: Array
    """The moderated standard deviation of the difference at one seed; NaN if no interval is given."""
    freedom: Array
    """Degrees of freedom of ``spread``."""

    @property
    def given(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Whether an interval is given: at least two common seeds, whose differences vary."""
        return np.isfinite(self.spread)

    @property
    def pairs(self) -> Array:
        """The number of pairs with an interval, ``[..., 1]``: the number that corrects each of them."""
        return self.given.sum(axis=-1, keepdims=True)

    @property
    def error(self) -> Array:
        """The standard error of ``delta``."""
        return self.spread / np.sqrt(np.maximum(self.common, 1))

    @property
    def margin(self) -> Array:
        """Half the width of the interval; in 95% of cases intervals cover all true differences at once."""
        return self.error * student_t.isf(LEVEL / 2 / np.maximum(self.pairs, 1), self.freedom)

    @property
    def margin_of_one(self) -> Array:
        """Half the width of the interval of a pair that was named before; each covers its own difference in
        95% of cases.
        """
        return self.error * student_t.isf(LEVEL / 2, self.freedom)

    @property
    def p(self) -> Array:
        """The two-sided p of no difference, corrected for the number of pairs."""
        return np.minimum(1.0, 2 * self.pairs * student_t.sf(np.abs(self.delta) / self.error, self.freedom))


def contrasts(values: Array) -> Contrasts:
    """Compare all pairs of recipes by their values ``[..., recipes, seeds]``, NaN if a run failed."""
    first, second = np.triu_indices(values.shape[-2], 1)
    within = values[..., first, :] - values[..., second, :]
    common = np.isfinite(within).sum(axis=-1).astype(np.float64)
    with np.errstate(all="ignore"):  # pairs without common seeds
        delta = np.nansum(within, axis=-1) / common
        freedom = np.where(common > 1, common - 1, np.nan)
        variance = np.nansum((within - delta[..., None]) ** 2, axis=-1) / freedom
        typical, lent = _prior(variance, freedom)
        # pairs share recipes and seeds: all together they have no more freedom than their runs
        lent = np.fmin(lent, np.fmax(_residual_freedom(values) - freedom, 0))
        moderated = (lent * typical + freedom * variance) / (lent + freedom)
    spread = np.sqrt(np.where(moderated > 0, moderated, np.nan))
    return Contrasts(common, delta, spread, lent + freedom)


def _prior(variance: Array, freedom: Array) -> tuple[Array, Array]:
    """Fit the typical variance of all pairs and the degrees of freedom that it lends to each, ``[..., 1]``.

    Uses the mean and the variance of log variances, as in Smyth 2004, Section 6.2. The typical variance is
    the geometric mean, which one wild recipe moves less than it would the arithmetic mean.
    """
    usable = np.where(
        (variance > 0) & (freedom > 1), freedom, np.nan
    )  # a single degree of freedom says too little
    logs = np.log(variance) - digamma(usable / 2) + np.log(usable / 2)
    number = np.isfinite(logs).sum(axis=-1, keepdims=True)
    middle = np.nansum(logs, axis=-1, keepdims=True) / number
    spread = np.nansum((logs - middle) ** 2, axis=-1, keepdims=True) / (number - 1)
    chance = np.nansum(polygamma(1, usable / 2), axis=-1, keepdims=True) / number
    excess = CAUTION * spread - chance
    table, trigamma = _trigamma_table()
    # both are negated because interp takes an ascending x, and trigamma falls
    fitted = np.interp(-excess, -trigamma, table, right=np.inf)
    lent = np.where(number < 2, 0.0, np.where(excess > 0, fitted, np.inf))
    return np.where(number < 2, 0.0, np.exp(middle)), lent


@cache
def _trigamma_table() -> tuple[Array, Array]:
    """Degrees of freedom d, and trigamma(d / 2), which falls as d grows."""
    freedom = np.geomspace(1e-3, 1e4, 20_000)
    return freedom, polygamma(1, freedom / 2)


def _residual_freedom(values: Array) -> Array:
    """The degrees of freedom that remain for all pairs together, given recipes and seeds, ``[..., 1]``."""
    trained = np.isfinite(values)
    spent = trained.any(axis=-1).sum(axis=-1) + trained.any(axis=-2).sum(axis=-1) - 1
    return (trained.sum(axis=(-2, -1)) - spent)[..., None].astype(np.float64)


def mean_margin(values: Array) -> tuple[Array, Array]:
    """Mean over the seeds that trained, ``[...]`` from ``[..., seeds]``, and half the width of its 95%
    interval.

    The margin is NaN for fewer than two seeds. It uses Student's t on the recipe's own seeds: variances of
    recipes that share seeds rise and fall together, so they cannot lend each other degrees of freedom.
    """
    number = np.isfinite(values).sum(axis=-1).astype(np.float64)
    with np.errstate(all="ignore"):
        mean = np.nansum(values, axis=-1) / number
        variance = np.nansum((values - mean[..., None]) ** 2, axis=-1) / (number - 1)
        margin = np.sqrt(variance / number) * student_t.isf(LEVEL / 2, number - 1)
    return mean, np.where(number > 1, margin, np.nan)


class _Pooled(NamedTuple):
    """What groups of at least two values say together."""

    variance: float
    """Within groups, pooled over them."""
    centre: float
    """The mean of the groups' means."""
    groups: int


def pooled(groups: Iterable[Array]) -> _Pooled | None:
    """Return the variance within groups of values, pooled over those of at least two; None without any."""
    several = [values for values in groups if len(values) > 1]
    if not several:
        return None
    freedom = sum(len(values) - 1 for values in several)
    variance = sum(float(((values - values.mean()) ** 2).sum()) for values in several) / freedom
    return _Pooled(variance, float(np.mean([values.mean() for values in several])), len(several))


@cache
def detectable(recipes: int, seeds: int) -> float:
    """The difference that is found with a probability of ``POWER`` between one pair of so many recipes, in
    standard deviations of a recipe over seeds; infinite for fewer than two seeds.

    It is found by drawing runs of recipes that spread alike and comparing them with ``contrasts``; beyond
    ``MOST_DRAWN`` seeds, from the quantiles of t and of the normal distribution.
    """
    if seeds < 2:
        return np.inf
    if seeds > MOST_DRAWN:
        pairs = recipes * (recipes - 1) / 2
        errors = student_t.isf(LEVEL / 2 / pairs, seeds - 1) + norm.isf(1 - POWER)
        return float(errors * np.sqrt(2 / seeds))
    draws = max(500, 400_000 // (recipes**2 * seeds))
    drawn = contrasts(np.random.default_rng(0).standard_normal((draws, recipes, seeds)))
    return float(np.quantile((drawn.margin - drawn.delta)[:, 0], POWER))


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
        if detectable(recipes, middle) <= effect:
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True)
class MetricScale:
    """A scale without edges, on which scores of different seeds are averaged and compared.

    The scale is the logit for scores between two ends, the logarithm for scores above a least value, and the
    score itself for those without ends. Results are carried back, so that no interval leaves the metric's
    range. A score at an end counts as half a unit away from it, in the last digit that its metric shows.
    """

    metric: Metric

    def values(self, scores: Array) -> Array:
        """Return scores on the scale."""
        low, high = self.metric.least, self.metric.most
        edge = 0.5 * 10.0**-self.metric.digits
        if low is not None and high is not None:
            return logit((np.clip(scores, low + edge, high - edge) - low) / (high - low))
        if low is not None:
            return np.log(np.maximum(scores - low, edge))
        return scores if high is None else -np.log(np.maximum(high - scores, edge))

    def scores(self, values: Array) -> Array:
        """Return values on the scale as scores."""
        low, high = self.metric.least, self.metric.most
        if low is not None and high is not None:
            return low + (high - low) * expit(values)
        if low is not None:
            return low + np.exp(values)
        return values if high is None else high - np.exp(-values)

    def difference(self, centre: Array, delta: Array) -> Array:
        """Return a difference between two values, which ``centre`` lies halfway between, as one between their
        scores.
        """
        return self.scores(centre + delta / 2) - self.scores(centre - delta / 2)


def share(trained: int, runs: int) -> Interval:
    """The share of runs that trained, 0 to 1, with its 95% interval (Clopper and Pearson 1934)."""
    return Interval(trained / runs, *_ends(trained, runs))


def share_gap(only_first: int, only_second: int, pairs: int) -> Interval:
    """The share of pairs in which only the first run trained minus the share in which only the second did.

    It lies between -1 and 1. Its sign is that of McNemar's exact test (1947): if the first run alone trained
    in half of the pairs whose runs differ, there is no gap. The ends of that share's exact interval are
    multiplied by the share of pairs that differ: by the end of its exact interval that widens the result.
    """
    differing = only_first + only_second
    first_low, first_high = _ends(only_first, differing) if differing else (0.0, 1.0)
    low, high = 2 * first_low - 1, 2 * first_high - 1
    few, many = _ends(differing, pairs)
    return Interval(
        value=(only_first - only_second) / pairs,
        low=low * (many if low < 0 else few),
        high=high * (many if high > 0 else few),
    )


def _ends(successes: int, runs: int) -> tuple[float, float]:
    ends = binomtest(successes, runs).proportion_ci(1 - LEVEL, method="exact")
    return float(ends.low), float(ends.high)


@cache
def fisher(a: tuple[int, int], b: tuple[int, int]) -> float:
    """The two-sided p of two recipes, each (trained, runs), training equally often."""
    return float(fisher_exact([[k, n - k] for k, n in (a, b)]).pvalue)


def seeds_for_shares(a: tuple[int, int], b: tuple[int, int], pairs: int) -> int | None:
    """The smallest number of seeds at which the same two shares would differ significantly among so many
    pairs; None if it takes more than ``MOST_SEEDS``.
    """
    for seeds in range(2, MOST_SEEDS + 1):
        counts = [(round(k / n * seeds), seeds) for k, n in (a, b)]
        if pairs * fisher(counts[0], counts[1]) < LEVEL:
            return seeds
    return None


def paired_randomisation(a: Array, b: Array, combine: Combine, *, trials: int) -> float:
    r"""Two-sided p of no difference, :math:`(1 + \#\{|d_r| \ge |d|\}) / (1 + R)`, d being the mean score of
    ``a`` minus that of ``b``.

    In each of R trials the outputs of ``a`` and of ``b`` for an example, of all seeds together, are exchanged
    with a probability of one half. Both are statistics `[seeds, examples, k]` of the same examples; the k-th
    seed of one is exchanged with the k-th of the other. Raises UserError for different numbers of seeds or
    examples. Riezler and Maxwell 2005, Figure 1 (W05-0908).
    """
    if a.shape != b.shape:
        raise UserError(
            f"a has {a.shape[0]} seeds of {a.shape[1]} examples and b {b.shape[0]} of {b.shape[1]}, but all "
            f"outputs for an example are exchanged at once; give as many seeds and examples of both"
        )
    seeds, examples, width = a.shape
    sum_a, sum_b = a.sum(axis=1), b.sum(axis=1)
    seen = abs(combine(sum_a).mean() - combine(sum_b).mean())
    surplus = (a - b).transpose(1, 0, 2).reshape(examples, seeds * width)
    as_large = 0
    for exchanged in _exchanges(examples, trials):
        moved = (exchanged @ surplus).reshape(-1, seeds, width)
        difference = combine(sum_a - moved).mean(axis=1) - combine(sum_b + moved).mean(axis=1)
        as_large += int((np.abs(difference) >= seen - _ROUNDING).sum())
    return (1 + as_large) / (1 + trials)


def _exchanges(examples: int, trials: int) -> Iterator[Array]:
    """Yield `[chunk, examples]`, 1 if an example's outputs are exchanged; the same for every pair."""
    random = np.random.default_rng(_SEED)
    for start in range(0, trials, _CHUNK):
        rows = min(_CHUNK, trials - start)
        yield random.integers(2, size=(rows, examples)).astype(np.float64)
