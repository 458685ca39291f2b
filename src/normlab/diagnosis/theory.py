"""Closed forms for a model at its initialisation, with which measurements are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
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
