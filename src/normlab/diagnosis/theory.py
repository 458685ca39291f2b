"""Closed forms for a model at its initialisation, and laws of growth with depth, for comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normlab.diagnosis.structure import SublayerView
from normlab.errors import UserError

LEMMA_2 = "Xiong et al. 2020, Lemma 2 (arXiv 2002.04745)"


class ScaleBounds(NamedTuple):
    """A lower and an upper bound, which are equal if the number is known."""

    low: float
    high: float

    @property
    def known(self) -> float | None:
        return self.low if self.low == self.high else None


class _Scales(NamedTuple):
    """Mean squares of an element of the four tensors of a sublayer; None if theory says nothing."""

    before: ScaleBounds | None
    branch: ScaleBounds | None
    total: ScaleBounds | None
    after: ScaleBounds | None


UNIT = ScaleBounds(1.0, 1.0)


def relu_mean_square(variance: float) -> float:
    r"""Return :math:`\mathbb{E}\|\mathrm{ReLU}(X)\|^2 / d = \sigma^2 / 2` for :math:`X \sim N(0, \sigma^2
    I_d)`.

    Xiong et al. 2020, Lemma 1 (arXiv 2002.04745).
    """
    return variance / 2


def ffn_gain(dim: int, ffn_dim: int) -> float:
    r"""Return :math:`\mathbb{E}\|W_2 \mathrm{ReLU}(W_1 x)\|^2 / \|x\|^2 = 2 d d_{ff} / (d + d_{ff})^2`.

    Both matrices drawn by Xavier, :math:`N(0, 2/(d + d_{ff}))`. One half if :math:`d_{ff} = d`, which is
    the case of Xiong et al. 2020, Lemma 2 (arXiv 2002.04745); 4/9 for 2d, 8/25 for 4d.
    """
    variance = 2 / (dim + ffn_dim)
    return ffn_dim * variance * relu_mean_square(dim * variance)


def hidden_scales(
    sublayers: Sequence[SublayerView], *, start: float, ffn_gains: Sequence[float | None]
) -> Iterator[_Scales]:
    r"""Predict :math:`\mathbb{E}\|x + f(x)\|^2 = \mathbb{E}\|x\|^2 + \mathbb{E}\|f(x)\|^2`; d after a norm.

    Post-LN has :math:`(1 + g) d` after each feed-forward sum, :math:`3d/2` if its gain g is 1/2; Pre-LN lies
    between :math:`(1 + l/2) d` and :math:`(1 + 3l/2) d` after l encoder layers from a start of 1, since an
    attention adds at least nothing (it averages many tokens) and at most all it reads. ``start`` is the mean
    square before the first sublayer, ``ffn_gains`` are g for each sublayer, None if there is none. From a
    sublayer that is neither Post-LN nor Pre-LN until the next norm of the stream, nothing is predicted.

    Xiong et al. 2020, Lemma 2 (arXiv 2002.04745), plus cross-attention to a normed memory.
    """
    stream: ScaleBounds | None = ScaleBounds(start, start)
    for view, gain in zip(sublayers, ffn_gains, strict=True):
        read = UNIT if view.placement == "pre" else stream
        branch = _branch(view.role, read, gain) if view.placement in ("pre", "post") else None
        total = None
        if stream is not None and branch is not None:
            total = ScaleBounds(stream.low + branch.low, stream.high + branch.high)
        after = UNIT if view.placement == "post" else total
        yield _Scales(stream, branch, total, after)
        stream = after


def _branch(role: str, read: ScaleBounds | None, gain: float | None) -> ScaleBounds | None:
    if role == "cross_attention":
        return ScaleBounds(0.0, 1.0)
    if role == "self_attention" and read is not None:
        return ScaleBounds(0.0, read.high)
    if role == "ffn" and read is not None and gain is not None:
        return ScaleBounds(gain * read.low, gain * read.high)
    return None


def bounded_fraction(lengths: Tensor, epsilon: float = 0.1) -> Tensor:
    r"""Return :math:`P[(Z - \mathbb{E}Z)/\mathbb{E}Z \le \epsilon]`, at least :math:`1 - \delta` for a Z that
    is :math:`(\epsilon, \delta)`-bounded.

    ``lengths`` `[N]` are observations of Z, which give both the mean and the fraction. Xiong et al.
    2020, Definition 1 (arXiv 2002.04745).
    """
    return (lengths <= (1 + epsilon) * lengths.mean()).to(lengths.dtype).mean()


def chi_square_tail(dim: int, epsilon: float) -> float:
    r"""Return :math:`P[\|Y\|^2 \ge (1 + \epsilon) d] \le \exp(-d \epsilon^2 / 8)` for :math:`Y \sim N(0,
    I_d)`, :math:`0 < \epsilon < 1`.

    Raises UserError for another epsilon. Xiong et al. 2020, Appendix G (arXiv 2002.04745).
    """
    if not 0 < epsilon < 1:
        raise UserError(f"epsilon is {epsilon}; the bound holds between 0 and 1, try 0.1")
    return math.exp(-dim * epsilon**2 / 8)


def layer_norm_jacobian(x: Tensor) -> Tensor:
    r"""Return :math:`\|J_{LN}(x)\|_2 = \sqrt{d} / \|x - \bar x\|`, of a LayerNorm whose gain is 1, for
    :math:`d \ge 3`.

    `[..., D]` to `[...]`. :math:`J = \frac{\sqrt d}{\|y\|} (I - \frac{1}{d} 1 1^\top)(I - y y^\top/\|y\|^2)`
    with :math:`y = x - \bar x` is this number times a projection on d - 2 dimensions. The exact form of Xiong
    et al. 2020, Lemma 3 (arXiv 2002.04745), which has :math:`\|x\|` instead, as for a norm without a mean.
    """
    return rms_norm_jacobian(x - x.mean(-1, keepdim=True))


def rms_norm_jacobian(x: Tensor) -> Tensor:
    r"""Return :math:`\|J(x)\|_2 = \sqrt{d} / \|x\|`, of an RMSNorm whose gain is 1, for :math:`d \ge 2`.

    `[..., D]` to `[...]`. Xiong et al. 2020, Lemma 3 as published (arXiv 2002.04745).
    """
    return x.shape[-1] ** 0.5 / torch.linalg.vector_norm(x, dim=-1)


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


def fits(depths: Sequence[float], values: Sequence[float] | Array) -> tuple[LawFit, ...]:
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
    if len(n) != len(y):
        raise UserError(f"{len(n)} depths and {len(y)} values; give one value for each depth")
    if len(np.unique(n)) < 3 or not (n > 0).all():
        raise UserError(f"a law in N needs three different depths above 0, not {np.unique(n).tolist()}")
    if not np.isfinite(y).all():
        worst = n[~np.isfinite(y)][0]
        raise UserError(f"the value at depth {worst:g} is not finite; fit depths below it, or lower the size")
    from scipy import stats  # it takes a second, and a training that imports this module does not need it

    lines = [("log", np.log(n), y), ("linear", n, y)]
    if (y > 0).all():
        lines.insert(0, ("power", np.log(n), np.log(y)))
    laws = list[LawFit]()
    for law, x, target in lines:
        line, power = stats.linregress(x, target), law == "power"
        slope, spread = float(line.slope), _student(len(x) - 2) * float(line.stderr)
        b = math.exp(line.intercept) if power else slope
        fitted = b * n**slope if power else line.intercept + b * x
        ends = slope - spread, slope + spread
        laws.append(LawFit(law, b, slope if power else None, *ends, *_quality(y, fitted, parameters=2)))
    b, spread = float(y.mean()), half_width(y)
    fitted = np.full_like(y, b)
    laws.append(LawFit("constant", b, None, b - spread, b + spread, *_quality(y, fitted, parameters=1)))
    return tuple(laws)


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
    whole = fits(depths, values.mean(0))
    if len(curves) == 1:
        return whole
    alone = [{fit.law: fit for fit in fits(depths, row)} for row in values]
    of_law = ([f[fit.law] for f in alone if fit.law in f] for fit in whole)
    return tuple(
        _over_curves(fit, own, (np.asarray(depths, float), values.mean(0)))
        for fit, own in zip(whole, of_law, strict=True)
    )


def half_width(values: Sequence[float] | Array, level: float = 0.95) -> float:
    r"""Return :math:`t_{n-1} s / \sqrt n`, half the confidence interval of a mean of n independent values."""
    from scipy import stats

    return float(_student(len(values) - 1, level) * stats.sem(values))


def _student(degrees: int, level: float = 0.95) -> float:
    from scipy import stats

    return float(stats.t.ppf((1 + level) / 2, degrees))


def _over_curves(fit: LawFit, alone: Sequence[LawFit], curve: tuple[Array, Array]) -> LawFit:
    """Average the power laws of single curves, judged on the mean curve, and take any law's interval from
    theirs; it is infinite if only one of them has the law.
    """
    exponents = [one.exponent for one in alone if one.exponent is not None]
    if fit.exponent is not None and exponents:
        p = sum(exponents) / len(exponents)
        b = math.exp(sum(math.log(one.coefficient) for one in alone) / len(alone))
        n, y = curve
        r2, aic = _quality(y, b * n**p, parameters=2)
        fit = replace(fit, coefficient=b, exponent=p, r2=r2, aic=aic)
    own = [one.coefficient if one.exponent is None else one.exponent for one in alone]
    center = fit.coefficient if fit.exponent is None else fit.exponent
    spread = half_width(own) if len(own) > 1 else math.inf
    return replace(fit, low=center - spread, high=center + spread)


def _quality(y: Array, fitted: Array, *, parameters: int) -> tuple[float, float]:
    """Return R² and AIC. Residuals below the rounding of y count as that rounding, so AIC is finite."""
    exact = np.finfo(y.dtype)
    rounding = float(np.square(exact.eps * y).sum() + exact.tiny)
    residual, total = float(np.square(y - fitted).sum()), float(np.square(y - y.mean()).sum())
    aic = len(y) * math.log(max(residual, rounding) / len(y)) + 2 * (parameters + 1)
    return (1 - residual / total if total > rounding else 0.0), aic
