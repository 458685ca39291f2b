"""Fit laws of growth with the depth N: a power, the logarithm, a line, a constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from normlab.errors import UserError

LAWS = ("power", "log", "linear", "constant")
Array: TypeAlias = NDArray[np.float64]
Curve: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Depths and values."""


@dataclass(frozen=True)
class LawFit:
    """A law of ``LAWS``, fitted by least squares.

    ``coefficient`` is b of :func:`fits`; ``exponent`` is p of the power law and None for the others. ``low``
    and ``high`` bound p where there is one, and else b. ``r2`` and ``aic`` are those of the values
    themselves under every law, so that laws can be compared.
    """

    law: str
    coefficient: float
    exponent: float | None
    low: float
    high: float
    r2: float
    aic: float


def fits(
    depths: Sequence[float], values: Sequence[float] | Array, *, level: float = 0.95
) -> tuple[LawFit, ...]:
    r"""Fit :math:`y = b N^p,\quad y = a + b \ln N,\quad y = a + b N,\quad y = b`; with residuals r of n
    values and k parameters, :math:`R^2 = 1 - \sum r^2 / \sum (y - \bar y)^2` and :math:`\mathrm{AIC} = n
    \ln(\sum r^2 / n) + 2(k + 1)`.

    The power law is the least squares of :math:`\ln y = \ln b + p \ln N`, and is left out where a value is
    not positive. Intervals hold with probability ``level`` under Student's t of n - k degrees, which takes
    the values as independent: those of several seeds are, those of the prefixes of one model are not. R² is
    0 where all values are equal.

    Raises UserError for fewer than three depths, or values that are not finite.
    """
    n, y = np.asarray(depths, float), np.asarray(values, float)
    if len(n) != len(y):
        raise UserError(f"{len(n)} depths and {len(y)} values; give one value for each depth")
    if len(np.unique(n)) < 3 or not (n > 0).all():
        raise UserError(f"a law in N needs three different depths above 0, not {np.unique(n).tolist()}")
    if not np.isfinite(y).all():
        worst = n[~np.isfinite(y)][0]
        raise UserError(f"the value at depth {worst:g} is not finite; fit depths below it, or lower the size")
    laws = list[LawFit]()
    if (y > 0).all():
        line, spread = _line(np.log(n), np.log(y), level)
        b, p = math.exp(line.intercept), float(line.slope)
        laws.append(LawFit("power", b, p, p - spread, p + spread, *_quality(y, b * n**p, parameters=2)))
    for law, x in (("log", np.log(n)), ("linear", n)):
        line, spread = _line(x, y, level)
        b = float(line.slope)
        fitted = line.intercept + b * x
        laws.append(LawFit(law, b, None, b - spread, b + spread, *_quality(y, fitted, parameters=2)))
    b, spread = float(y.mean()), half_width(y, level)
    fitted = np.full_like(y, b)
    laws.append(LawFit("constant", b, None, b - spread, b + spread, *_quality(y, fitted, parameters=1)))
    return tuple(laws)


def fits_of_curves(curves: Sequence[Curve], *, level: float = 0.95) -> tuple[LawFit, ...]:
    r"""The laws of the mean curve, :math:`\bar y_N = \frac{1}{c} \sum_s y_{N,s}` over c curves s of the same
    depths, such as seeds; an interval is :math:`\pm t_{c-1} \, \mathrm{sd}_s / \sqrt c` of what is fitted to
    each curve alone.

    The power law's p and :math:`\ln b` are the means of those of the curves, so that its interval is around
    the estimate that it belongs to; the other laws are linear in y, and need no such care. All that holds
    where the points of one curve depend on each other, as those of the prefixes of one model do.
    One curve alone has the intervals of :func:`fits`. Raises UserError for curves of different depths.
    """
    depths = list(curves[0][0])
    if any(list(n) != depths for n, _ in curves):
        raise UserError("curves of different depths have no mean; give each seed the same depths")
    values = np.array([y for _, y in curves], float)
    whole = fits(depths, values.mean(0), level=level)
    if len(curves) == 1:
        return whole
    alone = [{fit.law: fit for fit in fits(depths, row, level=level)} for row in values]
    mean_curve = np.asarray(depths, float), values.mean(0)
    averaged = (_averaged(fit, [f[fit.law] for f in alone if fit.law in f], mean_curve) for fit in whole)
    return tuple(_spread_over(fit, [f[fit.law] for f in alone if fit.law in f], level) for fit in averaged)


def half_width(values: Sequence[float] | Array, level: float = 0.95) -> float:
    r"""Return :math:`t_{n-1} s / \sqrt n`, half the confidence interval of a mean of n independent values."""
    return float(_student(len(values) - 1, level) * stats.sem(values))


def _student(degrees: int, level: float) -> float:
    return float(stats.t.ppf((1 + level) / 2, degrees))


def _line(x: Array, y: Array, level: float) -> tuple[Any, float]:
    """Return the line through the points, and the half-width of the interval of its slope."""
    line = stats.linregress(x, y)
    return line, _student(len(x) - 2, level) * float(line.stderr)


def _averaged(fit: LawFit, alone: Sequence[LawFit], curve: tuple[Array, Array]) -> LawFit:
    """Average the power laws of single curves, and judge the result on the mean curve."""
    exponents = [one.exponent for one in alone if one.exponent is not None]
    if fit.exponent is None or not exponents:
        return fit
    p = sum(exponents) / len(exponents)
    b = math.exp(sum(math.log(one.coefficient) for one in alone) / len(alone))
    n, y = curve
    r2, aic = _quality(y, b * n**p, parameters=2)
    return replace(fit, coefficient=b, exponent=p, r2=r2, aic=aic)


def _spread_over(fit: LawFit, alone: Sequence[LawFit], level: float) -> LawFit:
    """Take the interval of a fit from single curves; it is infinite if only one of them has the law."""
    of = [one.coefficient if one.exponent is None else one.exponent for one in alone]
    if len(of) < 2:
        return replace(fit, low=-math.inf, high=math.inf)
    center = fit.coefficient if fit.exponent is None else fit.exponent
    spread = half_width(of, level)
    return replace(fit, low=center - spread, high=center + spread)


def _quality(y: Array, fitted: Array, *, parameters: int) -> tuple[float, float]:
    """Return R² and AIC. Residuals below the rounding of y count as that rounding, so that AIC is finite."""
    exact = np.finfo(y.dtype)
    rounding = float(np.square(exact.eps * y).sum() + exact.tiny)
    residual, total = float(np.square(y - fitted).sum()), float(np.square(y - y.mean()).sum())
    aic = len(y) * math.log(max(residual, rounding) / len(y)) + 2 * (parameters + 1)
    return (1 - residual / total if total > rounding else 0.0), aic
