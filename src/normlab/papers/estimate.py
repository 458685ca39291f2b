"""Estimates: numbers with their 95% interval, and means over independent runs; no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]
_LARGEST_LOGARITHM: Final = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval: the number itself if nothing was drawn at random."""

    value: float
    low: float
    high: float
    runs: int = 0
    """The number of independent runs behind it; 0 only if nothing was drawn, or if it is not known."""
    share: bool = False
    """Whether it is a share of the runs, with the exact interval of Clopper and Pearson (1934)."""
    unit: str = ""
    """Such as ``BLEU``; ``×`` for a ratio."""

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """Return a number that is computed and not drawn: measured again, it would be the same."""
        return cls(value, value, value)

    @classmethod
    def of_too_few(cls, value: float, runs: int) -> Estimate:
        """Return what too few runs gave to tell how they spread: its interval has no ends."""
        return cls(value, -math.inf, math.inf, runs)

    @property
    def has_ends(self) -> bool:
        """Whether the interval has at least one end."""
        return math.isfinite(self.low) or math.isfinite(self.high)

    def columns(self, name: str) -> dict[str, float]:
        """Return the value under a name, and the ends of its interval under ``low`` and ``high``. Without an
        interval both ends are the value, so that a chart draws none.
        """
        low, high = (self.low, self.high) if self.has_ends else (self.value, self.value)
        return {name: self.value, "low": low, "high": high}

    def of_unit(self, unit: str) -> Estimate:
        """Return it with its unit."""
        return replace(self, unit=unit)

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """Return the estimate of a monotonic function of the number; an interval without ends stays one."""
        if not self.has_ends:
            return replace(self, value=function(self.value))
        low, high = sorted((function(self.low), function(self.high)))
        return replace(self, value=function(self.value), low=low, high=high)


def mean(values: Iterable[float]) -> Estimate:
    r"""Return the mean of independent values, :math:`\pm t_{n-1} s / \sqrt n`. A single value, or one that is
    not finite, as of a run that diverged, leaves the interval no ends.
    """
    from scipy.special import stdtrit  # imported here, so that a list of papers does not wait for scipy

    sample = list(values)
    n, centre = len(sample), fmean(sample)
    if n < 2 or not math.isfinite(centre):
        return Estimate.of_too_few(centre, n)
    margin = float(stdtrit(n - 1, 0.975)) * stdev(sample) / math.sqrt(n)
    return Estimate(centre, centre - margin, centre + margin, n)


def mean_ratio(values: Iterable[float]) -> Estimate:
    """Return the geometric mean of independent ratios, with the interval of their mean logarithm."""
    return exponential(mean(math.log(v) for v in values))


def exponential(logarithm: Estimate) -> Estimate:
    """Turn the estimate of a logarithm into that of the number; an end too large for a float is infinite."""

    def number(end: float) -> float:
        return math.exp(end) if end < _LARGEST_LOGARITHM else math.inf

    return logarithm.mapped(number)


def slope(x: Sequence[float], curves: Iterable[Sequence[float]]) -> Estimate:
    """Return the least-squares slope of y over x, as a mean over independent curves y."""
    middle = fmean(x)
    squares = sum((a - middle) ** 2 for a in x)
    return mean(sum((a - middle) * b for a, b in zip(x, y, strict=True)) / squares for y in curves)


def log_slope(x: Sequence[float], curves: Iterable[Sequence[float]]) -> Estimate:
    """Return the exponent p of y = b x^p, as a mean over independent curves."""
    return slope([math.log(a) for a in x], ([math.log(b) for b in y] for y in curves))


def jackknife(runs: ArrayLike, statistic: Callable[[Array], float]) -> Estimate:
    r"""A statistic of all n runs `[n, ...]`, such as one of their mean curve, :math:`\pm t_{n-1}` times its
    standard error, :math:`\sqrt{\frac{n-1}{n} \sum_i (\theta_{-i} - \bar\theta)^2}` over the n samples that
    leave one run out. Fewer than three runs leave no samples to compare, and the interval no ends.
    """
    from scipy.special import stdtrit  # imported here, so that a list of papers does not wait for scipy

    x = np.asarray(runs, float)
    n, value = len(x), statistic(x)
    if n < 3:
        return Estimate.of_too_few(value, n)
    left_out = np.array([statistic(np.delete(x, i, axis=0)) for i in range(n)])
    error = math.sqrt((n - 1) / n * float(np.square(left_out - left_out.mean()).sum()))
    spread = float(stdtrit(n - 1, 0.975)) * error
    return Estimate(value, value - spread, value + spread, n)
