r"""The rate with the lowest loss at each size, how it moves with the size, and intervals for both.

Let :math:`x = \log_2` of a rate. Near its minimum, the loss of seed j at size s is

.. math:: y = \alpha_{sj} + B_s x + C_s h_\kappa(x) + e, \quad
   h_\kappa(x) = 2 (e^{\kappa x} - 1 - \kappa x) / \kappa^2 \to x^2

a quadratic with a skew :math:`\kappa` that all sizes share, since too high a rate costs more than too low a
one: without it the optimum is off by more than its interval. For given :math:`\kappa` it is linear, and the
optimum, where :math:`B + 2 C (e^{\kappa x} - 1) / \kappa = 0`, is a ratio of coefficients: Fieller's theorem
gives its interval, which is open where the curvature may be 0. Where losses are farther from the curve than
seeds are from each other, by the F test for lack of fit, the form does not describe them, and the interval
reaches at least to the neighbours of the best rate. Seeds have intercepts of their own, and the
noise is pooled over sizes. The slope over :math:`\log_2` of the size is a regression weighted by the
covariance of the optima, with the interval of Hartung and Knapp (2001), never narrower than the fixed-effect
one. tests/scaling holds both to their coverage by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.stats import f as fisher_f
from scipy.stats import t as student_t

from normlab.scaling import LEVEL

Array = NDArray[np.float64]
Losses = Mapping[tuple[float, int], float]
"""Those of one size by octave of the rate and seed; infinite where a trial diverged."""
WINDOW: Final = 2.0
"""Octaves on each side of the best rate within which rates are tried and fitted."""
FEWEST: Final = 3
"""Rates that train, below which a curve is not fitted."""
SKEWEST: Final = 2.0
_POINTS: Final = 801
_DRAWN: Final = 33
_STEP: Final = 1e-3


@dataclass(frozen=True)
class Optimum:
    """The best rate of one size, in octaves; an end is None where the interval is open, and so is the value
    where nothing but the ends is known.
    """

    size: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""
    """Why the interval is open, or why there is none."""

    @property
    def closed(self) -> bool:
        """Whether there is a value, with both ends."""
        return None not in (self.value, self.low, self.high)


@dataclass(frozen=True)
class Trend:
    r"""The optimum over :math:`\log_2` of the size: a regression on those that are closed, in octaves."""

    middle: float
    r"""Where the line is best known, in :math:`\log_2` of the size."""
    height: float
    slope: float
    height_error: float
    slope_error: float
    factor: float
    """By which errors are multiplied for an interval."""
    fixed_factor: float
    """The same, were the optima on a line but for the noise of their trials."""

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
    skew: float = 0.0
    trend: Trend | None = None
    curves: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """By size, octaves and losses of the fitted curve, for a picture."""


def best_of(losses: Losses) -> float | None:
    """The octave with the lowest mean loss over the seeds that all have; None where each diverged."""
    means = means_of(losses)
    return min((x for x in means if math.isfinite(means[x])), key=lambda x: means[x], default=None)


def means_of(losses: Losses) -> dict[float, float]:
    """By octave, the mean over seeds, of octaves that every seed has."""
    seeds = {seed for _, seed in losses}
    shared = [x for x in sorted({x for x, _ in losses}) if all((x, seed) in losses for seed in seeds)]
    return {x: sum(losses[x, seed] for seed in seeds) / len(seeds) for x in shared}


@dataclass(frozen=True)
class _Curve:
    """The trials of one size that are fitted, with octaves from their middle."""

    size: int
    x: Array
    y: Array
    seed: Array
    centre: float
    low: float
    high: float
    """The lowest and the highest rate that the optimum may have, from the centre."""
    capped: bool
    """Whether the highest is one that diverged."""

    def without_seeds(self, values: Array) -> Array:
        """Values less their means by seed, along the last axis."""
        out = values.astype(float)
        for own in np.unique(self.seed):
            mine = self.seed == own
            out[..., mine] -= out[..., mine].mean(-1, keepdims=True)
        return out

    def solved(self, skew: float) -> tuple[Array, Array]:
        """B and C, and the residuals."""
        design = self.without_seeds(np.stack([self.x, bent(self.x, skew)]))
        y = self.without_seeds(self.y)
        found = np.asarray(np.linalg.lstsq(design.T, y, rcond=None)[0], np.float64)
        return found, y - found @ design

    def of_means(self, skew: float) -> tuple[float, int, float, int]:
        """The squares that the means over seeds are off the curve, and that seeds are off these means, each
        with its degrees of freedom, of the rates that every seed has.
        """
        rest = self.solved(skew)[1]
        rates, seeds = np.unique(self.x), np.unique(self.seed).size
        shared = [self.x == x for x in rates if np.count_nonzero(self.x == x) == seeds]
        within = sum(float(np.sum((rest[own] - rest[own].mean()) ** 2)) for own in shared)
        off = sum(float(np.sum(own) * rest[own].mean() ** 2) for own in shared)
        return off, len(shared) - 3, within, (len(shared) - 1) * (seeds - 1)

    def drawn(self, found: Array, skew: float) -> list[tuple[float, float]]:
        """Points of the fitted curve, at the mean of its seeds."""
        level = float(np.mean(self.y - found @ np.stack([self.x, bent(self.x, skew)])))
        x = np.linspace(self.low, float(self.x.max()), _DRAWN)
        y = level + found @ np.stack([x, bent(x, skew)])
        return [(float(a) + self.centre, float(b)) for a, b in zip(x, y, strict=True)]


def bent(x: Array, skew: float) -> Array:
    r""":math:`h_\kappa(x)`."""
    return x**2 if abs(skew) < 1e-4 else 2 * (np.expm1(skew * x) - skew * x) / skew**2


def _bent_slope(x: Array, skew: float) -> Array:
    return 2 * x if abs(skew) < 1e-4 else 2 * np.expm1(skew * x) / skew


def fit(curves: Mapping[int, Losses]) -> Fit:
    """Fit the losses of all sizes."""
    prepared = {size: _prepared(size, losses) for size, losses in curves.items()}
    ready = [one for one in prepared.values() if isinstance(one, _Curve)]
    optima = {size: one for size, one in prepared.items() if isinstance(one, Optimum)}
    freedom = sum(c.x.size - np.unique(c.seed).size - 2 for c in ready) - 1
    if freedom < 1:
        few = {c.size: Optimum(c.size, why="so few trials show no noise") for c in ready}
        return Fit({size: {**optima, **few}[size] for size in curves})

    def left(skew: float) -> float:
        return sum(float(np.sum(c.solved(skew)[1] ** 2)) for c in ready)

    skew = float(minimize_scalar(left, bounds=(-SKEWEST, SKEWEST), method="bounded").x)
    found = [c.solved(skew)[0] for c in ready]
    rounding = float(np.finfo(np.float32).eps) * max(float(np.abs(c.y).max()) for c in ready)
    noise = max(math.sqrt(left(skew) / freedom), rounding)
    covariance, misfit = noise**2 * _spread(ready, found, skew), _misfit(ready, skew)
    quantile, rows = float(student_t.ppf((1 + LEVEL) / 2, freedom)), dict[int, Array]()
    for i, (curve, own) in enumerate(zip(ready, found, strict=True)):
        mine = [2 * i, 2 * i + 1, len(covariance) - 1]
        one = _optimum(curve, own, covariance[np.ix_(mine, mine)], skew, quantile)
        one = _between_neighbours(one, curve) if misfit else one
        optima[curve.size] = one
        if one.value is not None:  # how the optimum goes with the coefficients
            x = np.array([one.value - curve.centre])
            rows[curve.size] = np.zeros(len(covariance))
            rows[curve.size][mine] = -_contrast(x, own, skew)[0] / (2 * own[1] * math.exp(skew * x[0]))
    trend, closed = None, [optima[size] for size in curves if size in rows]
    if len(closed) > 1:
        turned = np.stack([rows[one.size] for one in closed])
        values = np.array([one.value for one in closed], float)
        sizes = np.log2([one.size for one in closed])
        trend = _trend(sizes, values, turned @ covariance @ turned.T, freedom)
    drawn = {c.size: c.drawn(own, skew) for c, own in zip(ready, found, strict=True)}
    return Fit({size: optima[size] for size in curves}, noise, skew, trend, drawn)


def _prepared(size: int, losses: Losses) -> _Curve | Optimum:
    """The trials to fit: those that train, near the best. A diverged one is above all others."""
    best = best_of(losses)
    if best is None:
        return Optimum(size, why="no rate trains" if losses else "nothing was tried")
    near = sorted((x, seed, y) for (x, seed), y in losses.items() if abs(x - best) <= WINDOW + 1e-9)
    x, seed, y = (np.array(column) for column in zip(*[p for p in near if math.isfinite(p[2])], strict=True))
    above = min((p[0] for p in near if p[0] > best and not math.isfinite(p[2])), default=None)
    if np.unique(x).size < FEWEST:
        return Optimum(size, why=f"{np.unique(x).size} rates near the best train, and {FEWEST} are needed")
    kept = x < (math.inf if above is None else above)
    x, seed, y = x[kept], seed[kept], y[kept]
    high = float(x.max()) if above is None else above
    return _Curve(size, x - best, y, seed, best, float(x.min()) - best, high - best, above is not None)


def _spread(ready: Sequence[_Curve], found: Sequence[Array], skew: float) -> Array:
    """The covariance of all B, C and the skew, for a noise of 1."""
    width = 2 * len(ready) + 1
    blocks = []
    for i, (curve, own) in enumerate(zip(ready, found, strict=True)):
        turned = own[1] * (bent(curve.x, skew + _STEP) - bent(curve.x, skew - _STEP)) / (2 * _STEP)
        block = np.zeros((width, curve.x.size))
        design = curve.without_seeds(np.stack([curve.x, bent(curve.x, skew), turned]))
        block[[2 * i, 2 * i + 1, -1]] = design
        blocks.append(block)
    design = np.concatenate(blocks, axis=1)
    return np.asarray(np.linalg.pinv(design @ design.T, hermitian=True), np.float64)


def _misfit(ready: Sequence[_Curve], skew: float) -> bool:
    """Whether the means over seeds are farther from their curves than chance has it, by an F test."""
    off, more, within, freedom = (sum(own) for own in zip(*(c.of_means(skew) for c in ready), strict=True))
    more -= 1  # the skew
    if more < 1 or freedom < 1 or within == 0:
        return False
    return bool(off / more > within / freedom * fisher_f.ppf(LEVEL, more, freedom))


def _between_neighbours(one: Optimum, curve: _Curve) -> Optimum:
    """The optimum with an interval that reaches to the rates next to the best."""
    if one.low is None or one.high is None:
        return one
    below, above = (curve.x[curve.x < 0], curve.x[curve.x > 0])
    low = min(one.low, curve.centre + float(below.max(initial=curve.low)))
    high = max(one.high, curve.centre + float(above.min(initial=curve.high)))
    return replace(one, low=low, high=high)


def _contrast(x: Array, found: Array, skew: float) -> Array:
    """`[X, 3]`: the derivative of the loss at octaves x, in B, C and the skew."""
    turned = found[1] * (_bent_slope(x, skew + _STEP) - _bent_slope(x, skew - _STEP)) / (2 * _STEP)
    return np.stack([np.ones_like(x), _bent_slope(x, skew), turned], -1)


def _optimum(curve: _Curve, found: Array, covariance: Array, skew: float, quantile: float) -> Optimum:
    """The optimum of one curve: where its derivative is 0, and where it may be, within the rates tried."""
    grid = np.linspace(curve.low, curve.high, _POINTS)
    slope = found[0] + found[1] * _bent_slope(grid, skew)
    contrast = _contrast(grid, found, skew)
    error = quantile * np.sqrt(np.maximum(np.einsum("xi,ij,xj->x", contrast, covariance, contrast), 0.0))
    falls, rises = bool(slope[0] < -error[0]), bool(slope[-1] > error[-1])
    maybe = grid[np.abs(slope) <= error]
    ends = (float(maybe[0]), float(maybe[-1])) if maybe.size else (curve.high, curve.low)
    low = ends[0] + curve.centre if falls else None
    high = ends[1] + curve.centre if rises else curve.high + curve.centre if falls and curve.capped else None
    if falls and rises:
        value = float(np.interp(0.0, slope, grid)) + curve.centre
        return Optimum(curve.size, value, low, high)
    if falls == rises:
        why = "the loss hardly changes with the rate"
    else:
        why = f"it may lie {'above the highest' if falls else 'below the lowest'} rate that trains"
    return Optimum(curve.size, None, low, high, why)


def _trend(sizes: Array, optima: Array, covariance: Array, freedom: int) -> Trend:
    """The regression of optima on log2 of sizes, weighted by the inverse of their covariance."""
    weight = np.linalg.pinv(covariance, hermitian=True)
    ones = np.ones_like(sizes)
    middle = float(ones @ weight @ sizes / (ones @ weight @ ones))
    design = np.stack([ones, sizes - middle], -1)
    inner = np.linalg.inv(design.T @ weight @ design)
    height, slope = inner @ design.T @ weight @ optima
    rest = optima - design @ [height, slope]
    fixed = factor = float(student_t.ppf((1 + LEVEL) / 2, freedom))
    if (more := len(sizes) - 2) > 0:
        scatter = math.sqrt(max(float(rest @ weight @ rest), 0.0) / more)
        factor = max(fixed, scatter * float(student_t.ppf((1 + LEVEL) / 2, more)))
    errors = np.sqrt(np.diag(inner))
    return Trend(middle, float(height), float(slope), float(errors[0]), float(errors[1]), factor, fixed)
