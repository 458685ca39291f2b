r"""The rate with the lowest loss at each size, how it moves with the size, and intervals for both.

Let :math:`x = \log_2` of a rate. Near its minimum at :math:`x_s`, the loss of seed j at size s is

.. math:: y = \alpha_{sj} + C_s h_{\kappa_s}(x - x_s) + e, \quad C_s \ge 0, \quad
   h_\kappa(u) = 2 (e^{\kappa u} - 1 - \kappa u) / \kappa^2 \to u^2

a quadratic with a skew :math:`\kappa_s`, since too high a rate costs more than too low a one: without it the
optimum is off by more than its interval. Every size has a skew of its own: if all shared one, a skew that
changes with the size would be taken for an optimum that does. Five rates say little about it, so it gets a
normal prior with the mean and deviation of real curves, ``SKEWS``. The interval of an optimum holds each
:math:`x_s` that an F test does not reject, with the other parameters at their best (a profile likelihood); it
is open if it goes beyond the rates that were tried. Seeds have intercepts of their own, and the noise is
pooled over sizes. If losses are farther from the curve than seeds are from each other, by the F test for lack
of fit, the form does not describe them, and the interval reaches at least to the neighbours of the best rate.
The slope over :math:`\log_2` of the size is a regression weighted by these intervals, with the interval of
Hartung and Knapp (2001), but never narrower than the fixed-effect one. tests/scaling checks the coverage of
all these intervals by simulation; docs/transfer.md, "How the answer is found", says the same for users.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import f as fisher_f
from scipy.stats import t as student_t

from normlab.scaling import LEVEL

Array = NDArray[np.float64]
Losses = Mapping[tuple[float, int], float]
"""The losses of one size by octave of the rate and seed; infinite if a trial diverged."""
WINDOW: Final = 2.0
"""Octaves on each side of the best rate within which rates are tried and fitted."""
RATES: Final = int(2 * WINDOW) + 1
"""The number of rates around the best that are tried at each size."""
FEWEST: Final = 3
"""A curve is fitted only if at least so many rates train."""
SKEWS: Final = (0.5, 0.5)
"""Mean and standard deviation of the skew: 0.6 and 0.45 on 11 curves of small language models, rounded."""
SKEWEST: Final = 2.0
"""The largest skew that is tried, on both sides of 0."""
_COARSE: Final = 31
"""Optima that are tried to find a minimum, twice: the second time between the neighbours of the best one."""
_FINE: Final = 61
"""Optima that are tried to find the ends of an interval."""
_SKEWS: Final = np.linspace(-1, 1, 9)
"""Skews that are tried at once, relative to how far they reach; then again about the best one."""
_ZOOMS: Final = 8
"""How often that is done: each time they reach a quarter as far."""
_DRAWN: Final = 33
"""Points of a curve that is drawn."""
_NO_PRIOR: Final = 0.0
"""The weight of the prior of skews where it shall not count."""
_STRAIGHT: Final = 1e-5
"""A smaller skew counts as this one: the formula divides by its square."""
_TINY: Final = 1e-150
"""Keeps a division from one by 0; its square is not 0 yet."""
Lack = Literal["", "trials", "steps", "rates", "seeds"]


@dataclass(frozen=True)
class Optimum:
    """The best rate of one size, in octaves. An end is None if the interval is open there; the value is None
    if nothing but the ends is known.
    """

    size: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""
    """Why the interval is open, or why there is none."""
    lack: Lack = ""
    """What there must be more of to know it; empty if it is known."""
    rates: tuple[float, ...] = ()
    """Octaves at which trials would show more."""

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """The value and both ends; None unless all are known."""
        if self.value is None or self.low is None or self.high is None:
            return None
        return self.value, self.low, self.high

    @property
    def closed(self) -> bool:
        """Whether there is a value, with both ends."""
        return self.interval is not None


@dataclass(frozen=True)
class Trend:
    r"""The optimum over :math:`\log_2` of the size, in octaves: a regression on the closed optima."""

    middle: float
    r"""Where the line is best known, in :math:`\log_2` of the size."""
    height: float
    slope: float
    height_error: float
    slope_error: float
    factor: float
    """What errors are multiplied by to get an interval."""
    fixed_factor: float
    """The same, if only the noise of trials kept the optima off a line."""

    def at(self, size: float) -> tuple[float, float, float]:
        """The optimum at a size, with the ends of its interval."""
        far = math.log2(size) - self.middle
        half = self.factor * math.hypot(self.height_error, far * self.slope_error)
        value = self.height + far * self.slope
        return value, value - half, value + half

    def shift(self, doublings: float = 1.0) -> tuple[float, float, float]:
        """How far the optimum moves in so many doublings of the size, with the ends of its interval."""
        half = self.factor * self.slope_error * abs(doublings)
        return self.slope * doublings, self.slope * doublings - half, self.slope * doublings + half


@dataclass(frozen=True)
class Fit:
    """What was fitted to the losses of all sizes."""

    optima: Mapping[int, Optimum]
    """By size."""
    noise: float = math.nan
    """The standard deviation of a loss about its curve."""
    skews: Mapping[int, float] = field(default_factory=dict)
    misfit: bool = False
    """Whether losses are farther from their curves than seeds are from each other."""
    line: Trend | None = None
    """Through all optima that are closed, however few; None for fewer than two."""
    curves: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """By size, octaves and losses of the fitted curve, to draw it."""


def best_of(losses: Losses) -> float | None:
    """The octave with the lowest mean loss over seeds, of those that every seed has; None if all diverged."""
    means = means_of(losses)
    trained = [octave for octave, mean in means.items() if math.isfinite(mean)]
    return min(trained, key=means.__getitem__, default=None)


def means_of(losses: Losses) -> dict[float, float]:
    """The mean over seeds by octave, for the octaves that every seed has."""
    seeds = {seed for _, seed in losses}
    means: dict[float, float] = {}
    for octave in sorted({octave for octave, _ in losses}):
        if all((octave, seed) in losses for seed in seeds):
            means[octave] = sum(losses[octave, seed] for seed in seeds) / len(seeds)
    return means


class _Deviations(NamedTuple):
    """Sums of squares about a fitted curve, for the F test for lack of fit."""

    between: float
    """Of the means over seeds, from the curve."""
    between_freedom: int
    within: float
    """Of the seeds, from these means."""
    within_freedom: int


class _Minimum(NamedTuple):
    """Where the curve of least cost is lowest, its skew, and that cost."""

    x: float
    skew: float
    cost: float


@dataclass(frozen=True)
class _Curve:
    """The trials of one size that are fitted, with octaves counted from their middle."""

    size: int
    x: Array
    y: Array
    seed: Array
    centre: float
    low: float
    high: float
    """The lowest and the highest rate that the optimum may have, counted from the centre."""
    capped: bool
    """Whether the highest rate diverged."""

    @cached_property
    def within(self) -> Array:
        """`[N, N]`: subtracts from values their means by seed."""
        same = (self.seed[:, None] == self.seed).astype(float)
        return np.eye(self.x.size) - same / same.sum(0)

    @cached_property
    def spread(self) -> Array:
        """`[R, N]`: turns values by rate into those of every trial, minus their means by seed."""
        return (np.unique(self.x)[:, None] == self.x).astype(float) @ self.within

    @cached_property
    def losses(self) -> Array:
        """`[N]`: the losses minus their means by seed."""
        return self.within @ self.y

    @property
    def parameters(self) -> int:
        """The curve's number of parameters, besides the intercepts: as many as the rates can determine."""
        return min(3, len(self.spread) - 1)

    @property
    def freedom(self) -> int:
        """The degrees of freedom of the residuals."""
        return self.x.size - np.unique(self.seed).size - self.parameters

    def rise(self, best: Array, skew: Array) -> Array:
        """`[..., R]`: by rate, the loss above the minimum for curves with a curvature of 1."""
        return bent(np.unique(self.x) - best[..., None], skew[..., None])

    def cost(self, best: Array, skew: Array, prior_weight: float) -> Array:
        r"""What curves with these minima and skews cost, each at its best curvature and intercepts:
        :math:`\mathrm{RSS} + \sigma^2 ((\kappa - m) / s)^2`, in squares of losses.

        RSS is the residual sum of squares, :math:`\kappa` the skew, m and s the mean and the deviation of its
        prior, ``SKEWS``. For normal noise of the deviation :math:`\sigma`, which is ``prior_weight``, this is
        :math:`-2 \sigma^2` times the log of the posterior density, but for a constant. So the least cost is
        at the posterior mode. ``_NO_PRIOR`` leaves RSS alone.
        """
        # the losses projected on the rise give the best curvature: <rise, losses> / <rise, rise>, 0 at least
        rise = self.rise(best, skew)
        size = np.maximum(((rise @ (self.spread @ self.spread.T)) * rise).sum(-1), _TINY)
        along = np.maximum(rise @ (self.spread @ self.losses), 0.0)
        residual = self.losses @ self.losses - along**2 / size
        prior = (prior_weight * (skew - SKEWS[0]) / SKEWS[1]) ** 2
        return np.asarray(residual + prior, np.float64)

    def profile(self, best: Array, prior_weight: float) -> tuple[Array, Array]:
        """By optimum, the least cost over all skews, and the skew that has it."""
        skew, reach = np.zeros((best.size, 1)), SKEWEST
        for _ in range(_ZOOMS):
            near = np.clip(skew + reach * _SKEWS, -SKEWEST, SKEWEST)
            least = self.cost(best[:, None], near, prior_weight).argmin(1)[:, None]
            skew = np.take_along_axis(near, least, 1)
            reach *= float(_SKEWS[-1] - _SKEWS[-2])
        return self.cost(best, skew[:, 0], prior_weight), skew[:, 0]

    def minimum(self, prior_weight: float) -> _Minimum:
        """The minimum of the curve with the least cost."""
        grid = self.grid(_COARSE)
        before, _, after = _lowest(grid, self.profile(grid, prior_weight)[0])
        grid = np.linspace(before, after, _COARSE)
        _, x, _ = _lowest(grid, self.profile(grid, prior_weight)[0])
        cost, skew = self.profile(np.array([x]), prior_weight)
        return _Minimum(x, float(skew[0]), max(float(cost[0]), 0.0))

    def grid(self, points: int) -> Array:
        """Where to look for the optimum, which may lie beyond the rates that were tried."""
        return np.linspace(self.low - WINDOW, self.high + WINDOW, points)

    def fitted(self, minimum: _Minimum) -> tuple[float, Array]:
        """The curvature of the curve with this minimum, and its residuals."""
        rise = self.rise(np.array(minimum.x), np.array(minimum.skew)) @ self.spread
        curvature = max(float(rise @ self.losses), 0.0) / max(float(rise @ rise), _TINY)
        return curvature, self.losses - curvature * rise

    def deviations(self, residuals: Array) -> _Deviations:
        """How far means over seeds are from the curve, and seeds from them, at rates that every seed has."""
        seeds = np.unique(self.seed).size
        by_rate = [residuals[self.x == x] for x in np.unique(self.x)]
        shared = [at_rate for at_rate in by_rate if at_rate.size == seeds]
        return _Deviations(
            between=sum(float(at_rate.size * at_rate.mean() ** 2) for at_rate in shared),
            between_freedom=max(len(shared) - 1 - self.parameters, 0),
            within=sum(float(np.sum((at_rate - at_rate.mean()) ** 2)) for at_rate in shared),
            within_freedom=(len(shared) - 1) * (seeds - 1),
        )

    def drawn(self, minimum: _Minimum) -> list[tuple[float, float]]:
        """Points on the curve with this minimum, with the mean intercept of its seeds."""
        curvature, skew = self.fitted(minimum)[0], np.array(minimum.skew)
        level = float(np.mean(self.y - curvature * bent(self.x - minimum.x, skew)))
        x = np.linspace(self.low, float(self.x.max()), _DRAWN)
        y = level + curvature * bent(x - minimum.x, skew)
        return [(float(a) + self.centre, float(b)) for a, b in zip(x, y, strict=True)]


def _lowest(x: Array, y: Array) -> tuple[float, float, float]:
    """Where y is lowest, by a parabola through its least value and both neighbours, and where these lie."""
    i = int(np.clip(y.argmin(), 1, y.size - 2))
    left, right = y[i - 1] - y[i], y[i + 1] - y[i]
    step = (left - right) / (2 * (left + right)) if left + right > 0 else 0.0
    lowest = x[i] + (x[i + 1] - x[i]) * min(max(step, -1.0), 1.0)
    return float(x[i - 1]), float(lowest), float(x[i + 1])


def bent(x: Array, skew: Array | float) -> Array:
    r""":math:`h_\kappa(x)`."""
    skew = np.where(np.abs(skew) < _STRAIGHT, _STRAIGHT, skew)
    return np.asarray(2 * (np.expm1(skew * x) - skew * x) / skew**2, np.float64)


def fit_curves(losses_by_size: Mapping[int, Losses]) -> Fit:
    """Fit a curve to the losses of each size, and a line to the minima.

    The noise is not known beforehand, and the prior of the skews is weighed by it. So every curve is fitted
    twice: first without the prior, which leaves the noise, and then with it.
    """
    prepared = {size: _prepared(size, losses) for size, losses in losses_by_size.items()}
    ready = [curve for curve in prepared.values() if isinstance(curve, _Curve)]
    optima = {size: optimum for size, optimum in prepared.items() if isinstance(optimum, Optimum)}
    freedom = sum(curve.freedom for curve in ready)
    if freedom < 1:
        for curve in ready:
            optima[curve.size] = Optimum(curve.size, why="so few trials show no noise", lack="seeds")
        return Fit({size: optima[size] for size in losses_by_size})
    without_prior = [curve.minimum(_NO_PRIOR) for curve in ready]
    rounding = float(np.finfo(np.float32).eps) * max(float(np.abs(curve.y).max()) for curve in ready)
    squares = sum(minimum.cost for minimum in without_prior)
    noise = max(math.sqrt(squares / freedom), rounding, _TINY)
    misfit = _misfit(ready, without_prior, rounding)
    minima = {curve.size: curve.minimum(prior_weight=noise) for curve in ready}
    for curve in ready:
        optimum = _optimum(curve, minima[curve.size], noise, freedom)
        optima[curve.size] = _between_neighbours(optimum, curve) if misfit else optimum
    known = [optima[size] for size in losses_by_size if optima[size].closed]
    return Fit(
        optima={size: optima[size] for size in losses_by_size},
        noise=noise,
        skews={size: minimum.skew for size, minimum in minima.items()},
        misfit=misfit,
        line=_trend(known, freedom) if len(known) > 1 else None,
        curves={curve.size: curve.drawn(minima[curve.size]) for curve in ready},
    )


def _prepared(size: int, losses: Losses) -> _Curve | Optimum:
    """The trials to fit: those near the best that train; an optimum without a value if they are too few.

    A trial that diverged is not fitted: it only says that the optimum lies below its rate.
    """
    best = best_of(losses)
    if best is None:
        lowest = min((octave for octave, _ in losses), default=0.0)
        return Optimum(size, why="no rate trains", lack="rates", rates=_beyond(lowest, -1))
    near = sorted(
        (octave, seed, y) for (octave, seed), y in losses.items() if abs(octave - best) <= WINDOW + 1e-9
    )
    trained = [trial for trial in near if math.isfinite(trial[2])]
    x, seed, y = (np.array(column) for column in zip(*trained, strict=True))
    if np.unique(x).size < FEWEST:
        few = f"{np.unique(x).size} rates near the best train, and {FEWEST} are needed"
        return Optimum(size, why=few, lack="rates", rates=(best - 0.5, best + 0.5))
    diverged = [octave for octave, _, loss in near if octave > best and not math.isfinite(loss)]
    if diverged:
        # a rate with which only some seeds diverge is too high as well
        below = x < diverged[0]
        x, seed, y = x[below], seed[below], y[below]
    return _Curve(
        size=size,
        x=x - best,
        y=y,
        seed=seed,
        centre=best,
        low=float(x.min()) - best,
        high=(diverged[0] if diverged else float(x.max())) - best,
        capped=bool(diverged),
    )


def _misfit(curves: Sequence[_Curve], minima: Sequence[_Minimum], rounding: float) -> bool:
    """Whether the means over seeds are farther from their curves than chance explains, by an F test."""
    by_curve = [
        curve.deviations(curve.fitted(minimum)[1]) for curve, minimum in zip(curves, minima, strict=True)
    ]
    total = _Deviations(*(sum(part) for part in zip(*by_curve, strict=True)))
    if total.between_freedom < 1 or total.within_freedom < 1:
        return False
    between = total.between / total.between_freedom
    within = max(total.within / total.within_freedom, rounding**2)
    return bool(between > within * fisher_f.ppf(LEVEL, total.between_freedom, total.within_freedom))


def _between_neighbours(optimum: Optimum, curve: _Curve) -> Optimum:
    """The optimum with an interval that reaches to the rates next to the best."""
    if optimum.low is None or optimum.high is None:
        return optimum
    below, above = curve.x[curve.x < 0], curve.x[curve.x > 0]
    low = min(optimum.low, curve.centre + float(below.max(initial=curve.low)))
    high = max(optimum.high, curve.centre + float(above.min(initial=curve.high)))
    return replace(optimum, low=low, high=high)


def _optimum(curve: _Curve, minimum: _Minimum, noise: float, freedom: int) -> Optimum:
    """The optimum of one curve, and where it may lie within the rates tried.

    These rates are, from the left::

        curve.low              curve.x.max()             curve.high
        |----------------------|-------------------------|
        the lowest that        the highest that          the lowest that diverges; if none
        trains                 trains                    does, the highest that trains

    - If the interval ends between the first and the last of them, the optimum has a value and both ends.
    - If it goes beyond the last, and rates diverge there, it ends at the last, since rates that diverge are
      no better. If the curve is lowest at a rate that trains, there is a value, too. If not, the optimum may
      be anywhere among rates that were not tried, and there is none.
    - If it goes beyond one of them otherwise, that end is open, and there is no value.
    - If it goes beyond both, the trials say nothing: they are too noisy, or the loss is flat.
    """
    low, high = _profile_interval(curve, minimum, noise, freedom)
    open_below, open_above = low < curve.low, high > curve.high
    lowest, highest = float(curve.x.min()), float(curve.x.max())
    if open_above and curve.capped and minimum.x <= highest:
        high, open_above = curve.high, False
    ends = np.clip([low, high], curve.low, curve.high) + curve.centre
    known_low = None if open_below else float(ends[0])
    known_high = None if open_above and not curve.capped else float(ends[1])
    if not (open_below or open_above):
        return Optimum(curve.size, minimum.x + curve.centre, known_low, known_high)
    if open_below and open_above:
        noisy, flat = "losses are too noisy to place the minimum", "the loss hardly changes with the rate"
        why = flat if _flat(curve) else noisy
        return Optimum(curve.size, None, known_low, known_high, why, "seeds")
    if open_below:
        where, rates = "below the lowest rate that was tried", _beyond(curve.centre + lowest, -1)
    elif curve.capped:
        where = "between the highest rate that trains and the lowest that diverges"
        rates = ((curve.centre + highest + curve.centre + curve.high) / 2,)
    else:
        where, rates = "above the highest rate that was tried", _beyond(curve.centre + highest, 1)
    return Optimum(curve.size, None, known_low, known_high, f"it may lie {where}", "rates", rates)


def _profile_interval(curve: _Curve, minimum: _Minimum, noise: float, freedom: int) -> tuple[float, float]:
    r"""The optima that an F test does not reject, from the centre; infinite where the grid ends before it.

    With one parameter in question, F is the square of t: :math:`(\mathrm{cost}(x) - \mathrm{cost}(\hat x)) /
    \sigma^2 \le t^2`.
    """
    grid = np.sort(np.append(curve.grid(_FINE), minimum.x))
    cost = curve.profile(grid, prior_weight=noise)[0]
    # the signed root of the excess cost is nearly linear, so that it can be interpolated between grid points
    root = np.sign(grid - minimum.x) * np.sqrt(np.maximum(cost - minimum.cost, 0.0)) / noise
    quantile = float(student_t.ppf((1 + LEVEL) / 2, freedom))
    inside = np.flatnonzero(np.abs(root) <= quantile)
    first, last = int(inside[0]), int(inside[-1])
    low, high = -math.inf, math.inf
    if first > 0:
        left = slice(first - 1, first + 1)
        low = float(np.interp(-quantile, root[left], grid[left]))
    if last < grid.size - 1:
        right = slice(last, last + 2)
        high = float(np.interp(quantile, root[right], grid[right]))
    return low, high


def _beyond(end: float, side: int) -> tuple[float, ...]:
    """The next octaves beyond those that were tried, on one side."""
    return tuple(sorted(end + side * k for k in range(1, int(WINDOW) + 1)))


def _flat(curve: _Curve) -> bool:
    """Whether the means over seeds differ between rates no more than seeds do from them, by an F test."""
    means = curve.spread.T @ np.linalg.lstsq(curve.spread.T, curve.losses, rcond=None)[0]
    residuals = curve.losses - means
    means_freedom = len(curve.spread) - 1
    freedom = curve.freedom + curve.parameters - means_freedom
    if freedom < 1:
        return False
    chance = residuals @ residuals / freedom * fisher_f.ppf(LEVEL, means_freedom, freedom)
    return bool(means @ means / means_freedom <= chance)


def _trend(known: Sequence[Optimum], freedom: int) -> Trend:
    r"""The regression of optima on log2 of sizes, weighted by their intervals.

    An interval is as wide as 2 t standard errors, so the weight of an optimum, one over its squared error,
    is :math:`w = (2 t / (\mathrm{high} - \mathrm{low}))^2`. The line's height at the mean size and its slope
    have the squared errors :math:`1 / \sum w` and :math:`1 / \sum w (x - \bar x)^2`.

    These hold if only the noise of trials keeps the optima off a line. If they scatter by more, the errors
    grow by :math:`\sqrt{\sum w r^2 / (k - 2)}`, r being the residuals of k optima, with k - 2 degrees of
    freedom. Hartung and Knapp 2001 (Statistics in Medicine 20).
    """
    fixed = factor = float(student_t.ppf((1 + LEVEL) / 2, freedom))
    x = np.log2([optimum.size for optimum in known])
    intervals = [optimum.interval for optimum in known if optimum.interval is not None]
    y, low, high = (np.array(ends) for ends in zip(*intervals, strict=True))
    weight = (2 * fixed / (high - low)) ** 2
    middle = float(weight @ x / weight.sum())
    spread = float(weight @ (x - middle) ** 2)
    height, slope = float(weight @ y / weight.sum()), float(weight @ ((x - middle) * y) / spread)
    residuals = y - height - slope * (x - middle)
    residual_freedom = len(known) - 2
    if residual_freedom > 0:
        scatter = math.sqrt(weight @ residuals**2 / residual_freedom)
        factor = max(fixed, scatter * float(student_t.ppf((1 + LEVEL) / 2, residual_freedom)))
    return Trend(
        middle=middle,
        height=height,
        slope=slope,
        height_error=float(weight.sum()) ** -0.5,
        slope_error=spread**-0.5,
        factor=factor,
        fixed_factor=fixed,
    )
