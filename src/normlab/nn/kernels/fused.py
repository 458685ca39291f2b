"""Norms in few passes, from torch operators made for other purposes; each has a plain form."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normlab.nn.kernels import ops
from normlab.private_torch import weight_norm, weight_norm_backward


def scaled_to(x: Tensor, length: Tensor | float, least: float = 1e-5) -> Tensor:
    """Scale each vector of x `[..., D]` to a Euclidean length: a number, or a tensor of shape `[1]`.

    Vectors shorter than ``least`` stay below that length. On the CPU this is weight normalisation of the rows
    (Salimans and Kingma 2016, arXiv 1602.07868), which torch computes in one pass each way.
    """
    same = isinstance(length, float) or length.dtype == x.dtype
    if same and not ops.plain(x) and x.is_contiguous() and x.numel() and _normalises_rows():
        rows = x.view(-1, x.shape[-1])
        lengths = x.new_full((1, 1), length) if isinstance(length, float) else length.view(1, 1)
        y, norms = _RowsScaled.apply(rows, lengths.expand(len(rows), 1).contiguous())
        if not norms.amin() < least:
            return y.view_as(x)
    return x * (length / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=least))


@cache
def _normalises_rows() -> bool:
    """Return whether torch's private operator for weight normalisation exists and works as expected."""
    try:
        with torch.no_grad():
            y, norms = weight_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]]))
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(y, torch.tensor([[6.0, 8.0]])) and norms.item() == 5.0


class _RowsScaled(torch.autograd.Function):
    """Rows scaled to given lengths, by torch's weight normalisation.

    Differentiable only once, since the operator's derivative treats the norms as constants.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]
        y, norms = weight_norm(rows, lengths)
        ctx.save_for_backward(rows, lengths, norms)
        ctx.mark_non_differentiable(norms)
        return y, norms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]
        return weight_norm_backward(grad.contiguous(), *ctx.saved_tensors)


def root_mean_square_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    r"""Compute :math:`g_i x_i / \sqrt{\mathrm{mean}(x^2) + \epsilon}` for x `[..., D]` and g `[D]`."""
    if _plainly(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return _RootMeanSquareNorm.apply(x, weight, eps)


def _plainly(x: Tensor, weight: Tensor) -> bool:
    """Return whether x `[..., D]` with gains `[D]` takes the plain path, as halves and mixed dtypes do."""
    return ops.plain(x) or x.dtype != weight.dtype or not x.is_floating_point() or x.dtype.itemsize < 4


class _RootMeanSquareNorm(torch.autograd.Function):
    """Its gradient is a LayerNorm's with means of 0, plus the part that LayerNorm removes for the mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # pyrefly: ignore[bad-override]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = scale.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, weight, scale = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2], False]
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(scale), scale, weight, None, wanted
        )
        if wanted[0]:
            dx.add_((grad @ weight)[..., None].mul_(scale).div_(x.shape[-1]))
        return dx if wanted[0] else None, dw if wanted[1] else None, None


def _column_sums(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sum ``grad * x`` and ``grad`` `[..., D]` over all but the last axis, in one pass: the gradients of a
    LayerNorm's gain and bias, where each row's mean is 0 and its deviation 1.
    """
    means, width = x.new_zeros((*x.shape[:-1], 1)), x.shape[-1:]
    gain = x.new_ones(width)
    _, products, sums = torch.ops.aten.native_layer_norm_backward(
        grad, x, width, means, means + 1, gain, gain, [False, True, True]
    )
    return products, sums


def tanh_scaled(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""Compute :math:`w \odot \tanh(\alpha x) + b` for x `[..., D]`, :math:`\alpha` `[1]`, w and b `[D]`.

    On the CPU torch's tanh takes three times as long as its sigmoid :math:`\sigma`, and
    :math:`\tanh u = 2 \sigma(2 u) - 1`.
    """
    if _plainly(x, weight):
        return torch.tanh(alpha * x) * weight + bias
    return _TanhScaled.apply(x, alpha, weight, bias)


class _TanhScaled(torch.autograd.Function):
    r"""Keeps :math:`s = \sigma(2 \alpha x)`, by which the output is :math:`2 w s + (b - w)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        s = (x * (2 * alpha)).sigmoid_()
        ctx.save_for_backward(x, alpha, weight, s)
        return torch.addcmul(bias - weight, s, 2 * weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyrefly: ignore[bad-override]
        x, alpha, weight, s = ctx.saved_tensors
        with_s, db = _column_sums(grad, s)
        slope = torch.ops.aten.sigmoid_backward(grad, s)
        with_x, _ = _column_sums(slope, x)
        dx = slope.mul_(4 * alpha * weight)
        return dx, (4 * weight @ with_x).view_as(alpha), 2 * with_s - db, db


def erf_scaled(x: Tensor, alpha: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""Compute :math:`w \odot \mathrm{erf}(\alpha x + s) + b` for x `[..., D]`, :math:`\alpha` and s `[1]`,
    w and b `[D]`.
    """
    if _plainly(x, weight):
        return torch.erf(alpha * x + shift) * weight + bias
    return _ErfScaled.apply(x, alpha, shift, weight, bias)


class _ErfScaled(torch.autograd.Function):
    r"""Keeps the values of erf, whose derivative is :math:`2 e^{-u^2} / \sqrt{\pi}`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        values = (x * alpha).add_(shift).erf_()
        ctx.save_for_backward(x, alpha, shift, weight, values)
        return torch.addcmul(bias, values, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyrefly: ignore[bad-override]
        x, alpha, shift, weight, values = ctx.saved_tensors
        dw, db = _column_sums(grad, values)
        slope = (x * alpha).add_(shift).square_().neg_().exp_().mul_(grad)
        with_x, alone = _column_sums(slope, x)
        factors = 2 / math.sqrt(math.pi) * weight
        dx = slope.mul_(factors * alpha)
        return dx, (factors @ with_x).view_as(alpha), (factors @ alone).view_as(shift), dw, db
