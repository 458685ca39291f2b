"""Which law a quantity follows as the depth N grows: a power, the logarithm, a line, or none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from normlab.errors import UserError

LAWS = ("power", "log", "linear", "constant")
GRID = 200_000
Curve: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Depths and values."""


@dataclass(frozen=True)
class Fit:
    """One law with its least squares, named as in ``LAWS``.

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


def fits(depths: Sequence[float], values: Sequence[float], *, level: float = 0.95) -> tuple[Fit, ...]:
    r""":math:`y = b N^p,\quad y = a + b \ln N,\quad y = a + b N,\quad y = b`; with residuals r of n values
    and k parameters, :math:`R^2 = 1 - \sum r^2 / \sum (y - \bar y)^2` and
    :math:`\mathrm{AIC} = n \ln(\sum r^2 / n) + 2(k + 1)`.

    The power law is the least squares of :math:`\ln y = \ln b + p \ln N`, and is left out where a value is
    not positive. Intervals hold with probability ``level`` under Student's t of n - k degrees, which takes
    the values as independent: those of several seeds are, those of the prefixes of one model are not. R² is
    0 where all values are equal.

    Raises UserError for fewer than three depths, or values that are not finite.
    """
    n, y = torch.tensor(depths, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    _check(n, y)
    one, found = torch.ones_like(n), list[Fit]()
    if bool((y > 0).all()):
        (intercept, p), spread = _least_squares([one, n.log()], y.log(), level)
        b = math.exp(intercept)
        r2, aic = _quality(y, b * n**p, parameters=2)
        found.append(Fit("power", b, p, p - spread, p + spread, r2, aic))
    for law, columns in (("log", [one, n.log()]), ("linear", [one, n]), ("constant", [one])):
        solution, spread = _least_squares(columns, y, level)
        fitted = sum((s * c for s, c in zip(solution, columns, strict=True)), torch.zeros_like(y))
        b = solution[-1]
        found.append(Fit(law, b, None, b - spread, b + spread, *_quality(y, fitted, parameters=len(columns))))
    return tuple(found)


def fits_of_curves(curves: Sequence[Curve], *, level: float = 0.95) -> tuple[Fit, ...]:
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
    values = torch.tensor([y for _, y in curves], dtype=torch.float64)
    whole = fits(depths, values.mean(0).tolist(), level=level)
    if len(curves) == 1:
        return whole
    alone = [{fit.law: fit for fit in fits(depths, row.tolist(), level=level)} for row in values]
    mean_curve = torch.tensor(depths, dtype=torch.float64), values.mean(0)
    averaged = (_averaged(fit, [f[fit.law] for f in alone if fit.law in f], mean_curve) for fit in whole)
    return tuple(_spread_over(fit, [f[fit.law] for f in alone if fit.law in f], level) for fit in averaged)


def better(found: Iterable[Fit], *, among: Sequence[str] = ("log", "linear")) -> Fit:
    """The fit of the lowest AIC among these laws.

    Raises UserError where none of them was fitted.
    """
    known = {fit.law: fit for fit in found if fit.law in among}
    if not known:
        raise UserError(f"none of the laws {', '.join(among)} was fitted (there are {', '.join(LAWS)})")
    return min(known.values(), key=lambda fit: fit.aic)


@cache
def student(degrees: int, level: float = 0.95) -> float:
    r"""t with :math:`P(|T| \le t) = \text{level}`, by :math:`T = \sqrt\nu \tan\theta`, which makes the
    density proportional to :math:`\cos^{\nu - 1} \theta`.

    The integral is a sum of trapezia on a fixed grid, good to six digits. Raises UserError for a level
    outside 0 to 1, or no degree of freedom.
    """
    if degrees < 1 or not 0 < level < 1:
        raise UserError(f"Student's t needs degrees >= 1 and 0 < level < 1, not {degrees} and {level}")
    theta = torch.linspace(0, math.pi / 2, GRID + 1, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(theta.cos() ** (degrees - 1), dx=math.pi / 2 / GRID)
    share = torch.cat([torch.zeros(1, dtype=torch.float64), mass / mass[-1]])
    i = int((share < level).sum())
    part = (level - share[i - 1]) / (share[i] - share[i - 1])
    return math.sqrt(degrees) * math.tan(theta[i - 1] + part * (theta[i] - theta[i - 1]))


def _check(n: Tensor, y: Tensor) -> None:
    if len(n) != len(y):
        raise UserError(f"{len(n)} depths and {len(y)} values; give one value for each depth")
    if len(n.unique()) < 3 or not bool((n > 0).all()):
        raise UserError(f"a law in N needs three different depths above 0, not {n.unique().tolist()}")
    if not bool(y.isfinite().all()):
        worst = n[~y.isfinite()][0].item()
        raise UserError(
            f"the value at depth {worst:g} is not finite; fit the depths below, or lower the size"
        )


def _least_squares(columns: Sequence[Tensor], y: Tensor, level: float) -> tuple[list[float], float]:
    """The solution, and the half-width of the interval of its last coefficient."""
    x = torch.stack(list(columns), 1)
    inverse = torch.linalg.inv(x.T @ x)
    solution = inverse @ (x.T @ y)
    degrees = len(y) - x.shape[1]
    variance = (y - x @ solution).square().sum() / degrees
    return solution.tolist(), student(degrees, level) * math.sqrt(variance * inverse[-1, -1])


def _averaged(fit: Fit, alone: Sequence[Fit], curve: tuple[Tensor, Tensor]) -> Fit:
    """A power law as the mean of those of single curves, its quality that on the mean curve."""
    exponents = [one.exponent for one in alone if one.exponent is not None]
    if fit.exponent is None or not exponents:
        return fit
    p = sum(exponents) / len(exponents)
    b = math.exp(sum(math.log(one.coefficient) for one in alone) / len(alone))
    n, y = curve
    r2, aic = _quality(y, b * n**p, parameters=2)
    return replace(fit, coefficient=b, exponent=p, r2=r2, aic=aic)


def _spread_over(fit: Fit, alone: Sequence[Fit], level: float) -> Fit:
    """The interval of a fit from those of single curves; none where only one of them has the law."""
    of = [one.coefficient if one.exponent is None else one.exponent for one in alone]
    if len(of) < 2:
        return replace(fit, low=-math.inf, high=math.inf)
    center = fit.coefficient if fit.exponent is None else fit.exponent
    deviation = float(torch.tensor(of, dtype=torch.float64).std())
    spread = student(len(of) - 1, level) * deviation / math.sqrt(len(of))
    return replace(fit, low=center - spread, high=center + spread)


def _quality(y: Tensor, fitted: Tensor, *, parameters: int) -> tuple[float, float]:
    """R² and AIC. Residuals below the rounding of y count as that rounding: AIC stays a number."""
    rounding = float((torch.finfo(y.dtype).eps * y).square().sum()) + torch.finfo(y.dtype).tiny
    residual, total = float((y - fitted).square().sum()), float((y - y.mean()).square().sum())
    aic = len(y) * math.log(max(residual, rounding) / len(y)) + 2 * (parameters + 1)
    return (1 - residual / total if total > rounding else 0.0), aic
