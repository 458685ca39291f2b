"""Fit laws of growth with depth, with intervals: a power of N, its logarithm, a line, a constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from normlab.errors import UserError

Array: TypeAlias = NDArray[np.float64]
Curve: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Depths and values."""


@dataclass(frozen=True)
class LawFit:
    """The law ``power``, ``log``, ``linear`` or ``constant``, fitted by least squares.

    ``coefficient`` is b of :func:`fits`; ``exponent`` is p of the power law and None for the others. ``low``
    and ``high`` bound p if there is one, else b. ``r2`` and ``aic`` are those of the values themselves under
    every law, so that laws can be compared.
    """

    law: str
    coefficient: float
    exponent: float | None
    low: float
    high: float
    r2: float
    aic: float

    @property
    def estimate(self) -> float:
        """What ``low`` and ``high`` bound."""
        return self.coefficient if self.exponent is None else self.exponent


def fits(depths: Sequence[float] | Array, values: Sequence[float] | Array) -> tuple[LawFit, ...]:
    r"""Fit :math:`y = b N^p,\quad y = a + b \ln N,\quad y = a + b N,\quad y = b`; with residuals r of n
    values and k parameters, :math:`R^2 = 1 - \sum r^2 / \sum (y - \bar y)^2` and :math:`\mathrm{AIC} = n
    \ln(\sum r^2 / n) + 2(k + 1)`.

    The power law is the least-squares fit of :math:`\ln y = \ln b + p \ln N`, and is left out if a value is
    not positive. Intervals hold with probability 0.95 under Student's t with n - k degrees of freedom,
    which assumes independent values: those of several seeds are, those of the prefixes of one model are not.
    R² is 0 if all values are equal.

    Raises UserError for fewer than three depths, or values that are not finite.
    """
    n, y = np.asarray(depths, float), np.asarray(values, float)
    _require_curve(n, y)
    laws = list[LawFit]()
    if (y > 0).all():
        line = _line(np.log(n), np.log(y))
        b, p = math.exp(line.intercept), line.slope
        r2, aic = _quality(y, b * n**p, parameters=2)
        laws.append(LawFit("power", b, p, p - line.spread, p + line.spread, r2, aic))
    for law, x in (("log", np.log(n)), ("linear", n)):
        line = _line(x, y)
        r2, aic = _quality(y, line.intercept + line.slope * x, parameters=2)
        b = line.slope
        laws.append(LawFit(law, b, None, b - line.spread, b + line.spread, r2, aic))
    b, spread = float(y.mean()), half_width(y)
    r2, aic = _quality(y, np.full_like(y, b), parameters=1)
    laws.append(LawFit("constant", b, None, b - spread, b + spread, r2, aic))
    return tuple(laws)


def _require_curve(n: Array, y: Array) -> None:
    """Raise UserError unless laws can be fitted to the values y at the depths n."""
    if len(n) != len(y):
        raise UserError(f"{len(n)} depths and {len(y)} values; give one value for each depth")
    if len(np.unique(n)) < 3 or not (n > 0).all():
        raise UserError(f"a law in N needs three different depths above 0, not {np.unique(n).tolist()}")
    if not np.isfinite(y).all():
        worst = n[~np.isfinite(y)][0]
        raise UserError(f"the value at depth {worst:g} is not finite; fit depths below it, or lower the size")


class _Line(NamedTuple):
    """A least-squares line, and half the confidence interval of its slope."""

    slope: float
    intercept: float
    spread: float


def _line(x: Array, y: Array) -> _Line:
    from scipy import stats  # it takes a second, and a training that imports this module does not need it

    fitted = stats.linregress(x, y)
    spread = _student(len(x) - 2) * float(fitted.stderr)
    return _Line(float(fitted.slope), float(fitted.intercept), spread)


def fits_of_curves(curves: Sequence[Curve]) -> tuple[LawFit, ...]:
    r"""Fit laws to the mean curve, :math:`\bar y_N = \frac{1}{c} \sum_s y_{N,s}` over c curves s of the same
    depths, such as seeds; an interval is :math:`\pm t_{c-1} \, \mathrm{sd}_s / \sqrt c` of what is fitted to
    each curve alone.

    The power law's p and :math:`\ln b` are the means of those of the curves, so its interval is around the
    estimate that it belongs to; the other laws are linear in y and need no such care. All this holds even if
    the points of one curve depend on each other, as those of the prefixes of one model do.
    A single curve has the intervals of :func:`fits`. Raises UserError for curves of different depths.
    """
    depths = list(curves[0][0])
    if any(list(n) != depths for n, _ in curves):
        raise UserError("curves of different depths have no mean; give each seed the same depths")
    values = np.array([y for _, y in curves], float)
    mean_curve = np.asarray(depths, float), values.mean(0)
    fits_of_mean = fits(*mean_curve)
    if len(curves) == 1:
        return fits_of_mean
    by_curve = [{fit.law: fit for fit in fits(depths, row)} for row in values]
    joined = list[LawFit]()
    for fit in fits_of_mean:
        alone = [laws[fit.law] for laws in by_curve if fit.law in laws]
        joined.append(_over_curves(fit, alone, mean_curve))
    return tuple(joined)


def half_width(values: Sequence[float] | Array, level: float = 0.95) -> float:
    r"""Return :math:`t_{n-1} s / \sqrt n`, half the confidence interval of a mean of n independent values."""
    from scipy import stats

    return float(_student(len(values) - 1, level) * stats.sem(values))


def _student(degrees: int, level: float = 0.95) -> float:
    from scipy import stats

    return float(stats.t.ppf((1 + level) / 2, degrees))


def _over_curves(fit: LawFit, alone: Sequence[LawFit], mean_curve: tuple[Array, Array]) -> LawFit:
    """Average the power laws of single curves, judged on the mean curve, and take any law's interval from
    theirs; it is infinite if only one of them has the law.
    """
    exponents = [single.exponent for single in alone if single.exponent is not None]
    if fit.exponent is not None and exponents:
        p = sum(exponents) / len(exponents)
        b = math.exp(sum(math.log(single.coefficient) for single in alone) / len(alone))
        n, y = mean_curve
        r2, aic = _quality(y, b * n**p, parameters=2)
        fit = replace(fit, coefficient=b, exponent=p, r2=r2, aic=aic)
    spread = half_width([single.estimate for single in alone]) if len(alone) > 1 else math.inf
    return replace(fit, low=fit.estimate - spread, high=fit.estimate + spread)


def _quality(y: Array, fitted: Array, *, parameters: int) -> tuple[float, float]:
    """Return R² and AIC. Residuals below the rounding of y count as that rounding, so AIC is finite."""
    exact = np.finfo(y.dtype)
    rounding = float(np.square(exact.eps * y).sum() + exact.tiny)
    residual, total = float(np.square(y - fitted).sum()), float(np.square(y - y.mean()).sum())
    aic = len(y) * math.log(max(residual, rounding) / len(y)) + 2 * (parameters + 1)
    r2 = 1 - residual / total if total > rounding else 0.0
    return r2, aic
