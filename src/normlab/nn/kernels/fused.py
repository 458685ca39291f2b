"""Norms of rows in one pass, by torch operators made for other purposes; each has a plain form."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normlab.nn.kernels import ops


def scaled_to(x: Tensor, length: Tensor | float, least: float = 1e-5) -> Tensor:
    """Scale each vector of x `[..., D]` to a Euclidean length, a number or a tensor of shape `[1]`.

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
    """Whether torch's private operator of weight normalisation exists and gives the expected result."""
    try:
        with torch.no_grad():
            y, norms = torch._weight_norm_interface(torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]]), 0)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(y, torch.tensor([[6.0, 8.0]])) and norms.item() == 5.0


class _RowsScaled(torch.autograd.Function):
    """Torch differentiates the operator only once: its derivative treats the norms as constants."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]
        y, norms = torch._weight_norm_interface(rows, lengths, 0)
        ctx.save_for_backward(rows, lengths, norms)
        ctx.mark_non_differentiable(norms)
        return y, norms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]
        backward = torch.ops.aten._weight_norm_interface_backward
        return backward(grad.contiguous(), *ctx.saved_tensors, 0)


def root_mean_square_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    r"""Compute :math:`g_i x_i / \sqrt{\mathrm{mean}(x^2) + \epsilon}` for x `[..., D]` and g `[D]`."""
    if ops.plain(x) or x.dtype != weight.dtype or not x.is_floating_point() or x.dtype.itemsize < 4:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return _RootMeanSquareNorm.apply(x, weight, eps)


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
