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
all these intervals by simulation.
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
_COARSE: Final = 31
_FINE: Final = 61
_SKEWS: Final = np.linspace(-1, 1, 9)
_ZOOMS: Final = 8
_DRAWN: Final = 33
_STRAIGHT: Final = 1e-5
_TINY: Final = 1e-150
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
    """What more of is needed to know it."""
    rates: tuple[float, ...] = ()
    """Octaves at which trials would show more."""

    @property
    def closed(self) -> bool:
        """Whether there is a value, with both ends."""
        return None not in (self.value, self.low, self.high)


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
    """Optima by size, the noise of a loss, and the line through the optima; None for fewer than two."""

    optima: Mapping[int, Optimum]
    noise: float = math.nan
    skews: Mapping[int, float] = field(default_factory=dict)
    misfit: bool = False
    """Whether losses are farther from their curves than seeds are from each other."""
    trend: Trend | None = None
    curves: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """By size, octaves and losses of the fitted curve, to draw it."""


def best_of(losses: Losses) -> float | None:
    """The octave with the lowest mean loss over seeds, of those that every seed has; None if all diverged."""
    means = means_of(losses)
    return min((x for x in means if math.isfinite(means[x])), key=lambda x: means[x], default=None)


def means_of(losses: Losses) -> dict[float, float]:
    """The mean over seeds by octave, for the octaves that every seed has."""
    seeds = {seed for _, seed in losses}
    shared = [x for x in sorted({x for x, _ in losses}) if all((x, seed) in losses for seed in seeds)]
    return {x: sum(losses[x, seed] for seed in seeds) / len(seeds) for x in shared}


class _Minimum(NamedTuple):
    """Where a curve that fits best is lowest, its skew, and what it leaves."""

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

    def cost(self, best: Array, skew: Array, noise: float) -> Array:
        """The least residual sum of squares of curves with these minima and skews, plus what their skews cost
        at this noise.
        """
        rise = self.rise(best, skew)
        size = np.maximum(((rise @ (self.spread @ self.spread.T)) * rise).sum(-1), _TINY)
        along = np.maximum(rise @ (self.spread @ self.losses), 0.0)
        left = self.losses @ self.losses - along**2 / size
        return np.asarray(left + (noise * (skew - SKEWS[0]) / SKEWS[1]) ** 2, np.float64)

    def profile(self, best: Array, noise: float) -> tuple[Array, Array]:
        """By optimum, the least cost over all skews, and the skew that has it."""
        skew, reach = np.zeros((best.size, 1)), SKEWEST
        for _ in range(_ZOOMS):
            near = np.clip(skew + reach * _SKEWS, -SKEWEST, SKEWEST)
            least = self.cost(best[:, None], near, noise).argmin(1)[:, None]
            skew, reach = np.take_along_axis(near, least, 1), reach * float(_SKEWS[-1] - _SKEWS[-2])
        return self.cost(best, skew[:, 0], noise), skew[:, 0]

    def minimum(self, noise: float) -> _Minimum:
        """The minimum of the curve with the least cost."""
        grid = self.grid(_COARSE)
        before, _, after = _lowest(grid, self.profile(grid, noise)[0])
        grid = np.linspace(before, after, _COARSE)
        _, x, _ = _lowest(grid, self.profile(grid, noise)[0])
        cost, skew = self.profile(np.array([x]), noise)
        return _Minimum(x, float(skew[0]), max(float(cost[0]), 0.0))

    def grid(self, points: int) -> Array:
        """Where to look for the optimum, which may lie beyond the rates that were tried."""
        return np.linspace(self.low - WINDOW, self.high + WINDOW, points)

    def fitted(self, of: _Minimum) -> tuple[float, Array]:
        """The curvature, and the residuals."""
        rise = self.rise(np.array(of.x), np.array(of.skew)) @ self.spread
        curvature = max(float(rise @ self.losses), 0.0) / max(float(rise @ rise), _TINY)
        return curvature, self.losses - curvature * rise

    def of_means(self, rest: Array) -> tuple[float, int, float, int]:
        """The squared deviations of the means over seeds from the curve, and of the seeds from these means,
        each with its degrees of freedom, for the rates that every seed has.
        """
        rates, seeds = np.unique(self.x), np.unique(self.seed).size
        shared = [self.x == x for x in rates if np.count_nonzero(self.x == x) == seeds]
        within = sum(float(np.sum((rest[own] - rest[own].mean()) ** 2)) for own in shared)
        off = sum(float(np.sum(own) * rest[own].mean() ** 2) for own in shared)
        return off, max(len(shared) - 1 - self.parameters, 0), within, (len(shared) - 1) * (seeds - 1)

    def drawn(self, of: _Minimum) -> list[tuple[float, float]]:
        """Points on the fitted curve, with the mean intercept of its seeds."""
        curvature, skew = self.fitted(of)[0], np.array(of.skew)
        level = float(np.mean(self.y - curvature * bent(self.x - of.x, skew)))
        x = np.linspace(self.low, float(self.x.max()), _DRAWN)
        y = level + curvature * bent(x - of.x, skew)
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


def fit(curves: Mapping[int, Losses]) -> Fit:
    """Fit the losses of all sizes."""
    prepared = {size: _prepared(size, losses) for size, losses in curves.items()}
    ready = [one for one in prepared.values() if isinstance(one, _Curve)]
    optima = {size: one for size, one in prepared.items() if isinstance(one, Optimum)}
    freedom = sum(c.freedom for c in ready)
    if freedom < 1:
        few = {c.size: Optimum(c.size, why="so few trials show no noise", lack="seeds") for c in ready}
        return Fit({size: {**optima, **few}[size] for size in curves})
    free = [c.minimum(0.0) for c in ready]
    rounding = float(np.finfo(np.float32).eps) * max(float(np.abs(c.y).max()) for c in ready)
    noise = max(math.sqrt(sum(m.cost for m in free) / freedom), rounding, _TINY)
    misfit = _misfit(ready, free, rounding)
    minima = [c.minimum(noise) for c in ready]
    for curve, of in zip(ready, minima, strict=True):
        one = _optimum(curve, of, noise, freedom)
        optima[curve.size] = _between_neighbours(one, curve) if misfit else one
    known = [optima[size] for size in curves if optima[size].closed]
    return Fit(
        {size: optima[size] for size in curves},
        noise,
        {c.size: of.skew for c, of in zip(ready, minima, strict=True)},
        misfit,
        _trend(known, freedom) if len(known) > 1 else None,
        {c.size: c.drawn(of) for c, of in zip(ready, minima, strict=True)},
    )


def _prepared(size: int, losses: Losses) -> _Curve | Optimum:
    """The trials to fit: those that train, near the best. A diverged one counts as worse than all others."""
    best = best_of(losses)
    if best is None:
        lowest = min((x for x, _ in losses), default=0.0)
        return Optimum(size, why="no rate trains", lack="rates", rates=_beyond(lowest, -1))
    near = sorted((x, seed, y) for (x, seed), y in losses.items() if abs(x - best) <= WINDOW + 1e-9)
    x, seed, y = (np.array(column) for column in zip(*[p for p in near if math.isfinite(p[2])], strict=True))
    above = min((p[0] for p in near if p[0] > best and not math.isfinite(p[2])), default=None)
    if np.unique(x).size < FEWEST:
        few = f"{np.unique(x).size} rates near the best train, and {FEWEST} are needed"
        return Optimum(size, why=few, lack="rates", rates=(best - 0.5, best + 0.5))
    kept = x < (math.inf if above is None else above)
    x, seed, y = x[kept], seed[kept], y[kept]
    high = float(x.max()) if above is None else above
    return _Curve(size, x - best, y, seed, best, float(x.min()) - best, high - best, above is not None)


def _misfit(ready: Sequence[_Curve], minima: Sequence[_Minimum], rounding: float) -> bool:
    """Whether the means over seeds are farther from their curves than chance explains, by an F test."""
    every = [c.of_means(c.fitted(of)[1]) for c, of in zip(ready, minima, strict=True)]
    off, more, within, freedom = (sum(own) for own in zip(*every, strict=True))
    if more < 1 or freedom < 1:
        return False
    return bool(off / more > max(within / freedom, rounding**2) * fisher_f.ppf(LEVEL, more, freedom))


def _between_neighbours(one: Optimum, curve: _Curve) -> Optimum:
    """The optimum with an interval that reaches to the rates next to the best."""
    if one.low is None or one.high is None:
        return one
    below, above = (curve.x[curve.x < 0], curve.x[curve.x > 0])
    low = min(one.low, curve.centre + float(below.max(initial=curve.low)))
    high = max(one.high, curve.centre + float(above.min(initial=curve.high)))
    return replace(one, low=low, high=high)


def _optimum(curve: _Curve, of: _Minimum, noise: float, freedom: int) -> Optimum:
    """The optimum of one curve, and where it may lie within the rates tried."""
    grid = np.sort(np.append(curve.grid(_FINE), of.x))
    cost = curve.profile(grid, noise)[0]
    root = np.sign(grid - of.x) * np.sqrt(np.maximum(cost - of.cost, 0.0)) / noise  # almost a line
    quantile = float(student_t.ppf((1 + LEVEL) / 2, freedom))
    inside = np.flatnonzero(np.abs(root) <= quantile)
    first, last = int(inside[0]), int(inside[-1])
    low, high = -math.inf, math.inf
    if first:
        low = float(np.interp(-quantile, root[first - 1 : first + 1], grid[first - 1 : first + 1]))
    if last < grid.size - 1:
        high = float(np.interp(quantile, root[last : last + 2], grid[last : last + 2]))
    below, above = low < curve.low, high > curve.high
    if above and curve.capped and of.x <= curve.x.max():
        high, above = curve.high, False
    ends = np.clip([low, high], curve.low, curve.high) + curve.centre
    shown = None if below else float(ends[0]), None if above and not curve.capped else float(ends[1])
    if not (below or above):
        return Optimum(curve.size, of.x + curve.centre, *shown)
    if below and above:
        noisy, flat = "losses are too noisy to place the minimum", "the loss hardly changes with the rate"
        return Optimum(curve.size, None, *shown, flat if _flat(curve) else noisy, "seeds")
    lowest, highest = curve.centre + float(curve.x.min()), curve.centre + float(curve.x.max())
    if below:
        where, rates = "below the lowest rate that was tried", _beyond(lowest, -1)
    elif curve.capped:
        where = "between the highest rate that trains and the lowest that diverges"
        rates = ((highest + curve.centre + curve.high) / 2,)
    else:
        where, rates = "above the highest rate that was tried", _beyond(highest, 1)
    return Optimum(curve.size, None, *shown, f"it may lie {where}", "rates", rates)


def _beyond(end: float, side: int) -> tuple[float, ...]:
    """The next octaves beyond those that were tried, on one side."""
    return tuple(sorted(end + side * k for k in range(1, int(WINDOW) + 1)))


def _flat(curve: _Curve) -> bool:
    """Whether the means over seeds differ between rates no more than seeds do from them, by an F test."""
    means = curve.spread.T @ np.linalg.lstsq(curve.spread.T, curve.losses, rcond=None)[0]
    rest, more = curve.losses - means, len(curve.spread) - 1
    freedom = curve.freedom + curve.parameters - more
    if freedom < 1:
        return False
    return bool(means @ means / more <= rest @ rest / freedom * fisher_f.ppf(LEVEL, more, freedom))


def _trend(known: Sequence[Optimum], freedom: int) -> Trend:
    """The regression of optima on log2 of sizes, weighted by their intervals."""
    fixed = factor = float(student_t.ppf((1 + LEVEL) / 2, freedom))
    x = np.log2([one.size for one in known])
    y, low, high = (np.array([getattr(one, end) for one in known], float) for end in ("value", "low", "high"))
    weight = (2 * fixed / (high - low)) ** 2
    middle = float(weight @ x / weight.sum())
    spread = float(weight @ (x - middle) ** 2)
    height, slope = float(weight @ y / weight.sum()), float(weight @ ((x - middle) * y) / spread)
    rest = y - height - slope * (x - middle)
    if (more := len(known) - 2) > 0:
        factor = max(fixed, math.sqrt(weight @ rest**2 / more) * float(student_t.ppf((1 + LEVEL) / 2, more)))
    return Trend(middle, height, slope, float(weight.sum()) ** -0.5, spread**-0.5, factor, fixed)
