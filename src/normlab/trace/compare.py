"""Compare two runs of a step in a part of their tensors, and find the module where they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normlab.trace.trace import Event, Trace

Part = Callable[[Tensor], Tensor | None]
"""Selects the entries of a tensor that are compared; None where it has no such entries."""


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors, relative to their largest entry; what is not finite in the same
    way agrees.
    """
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().masked_fill(same, 0.0)
    if not torch.isfinite(apart).all():
        return float("inf")
    size = torch.maximum(a.nan_to_num(0, 0, 0).abs().max(), b.nan_to_num(0, 0, 0).abs().max())
    return float(apart.max() / size.clamp_min(1e-300)) if float(apart.max()) else 0.0


def blame(a: Trace, b: Trace, part: Part, limit: float) -> str:
    """The first module, in order of completion, whose inputs agree in the part and whose outputs do not; ""
    if there is none.
    """
    for one, other in zip(a.events, b.events, strict=False):
        if one.module != other.module:
            return one.module
        if part_ways(one, other, part, limit):
            return one.module
    return ""


def part_ways(a: Event, b: Event, part: Part, limit: float) -> bool:
    """Whether the inputs of a module agree in the part, in two runs, and its outputs do not."""
    return _differ(a.outputs, b.outputs, part, limit) > _differ(a.inputs, b.inputs, part, limit)


def whole(x: Tensor) -> Tensor:
    """The part that is all of a tensor."""
    return x


def part_of(mask: Tensor, rows: Tensor | None = None) -> Part:
    """Select the entries at which a mask over rows `[B]`, or rows and positions `[B, T]`, is True, of any
    tensor with the layout `[B, T, …]`, `[T, B, …]`, `[B, H, T, …]` or `[B·T, …]`.

    Of a tensor without an axis for positions, these rows are compared, or those that the mask selects whole.
    """
    if rows is None:
        rows = mask if mask.ndim == 1 else mask.all(1)
    return lambda x: _selected(x, mask.to(x.device), rows.to(x.device))


def _differ(a: Sequence[Tensor], b: Sequence[Tensor], part: Part, limit: float) -> bool:
    pairs = ((part(x), part(y)) for x, y in zip(a, b, strict=False) if x.is_floating_point())
    return any(x is not None and y is not None and distance(x, y) > limit for x, y in pairs)


def _selected(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor | None:
    if mask.ndim == 2 and (shown := laid_out(x, *mask.shape)) is not None:
        return shown[mask[:, : shown.shape[1]]]
    count = len(mask)
    if x.ndim and x.shape[0] == count:
        return x[rows] if rows.any() else None
    return x[:, rows] if x.ndim >= 2 and x.shape[1] == count and rows.any() else None


def laid_out(x: Tensor, rows: int, width: int) -> Tensor | None:
    """The tensor as `[B, T, …]`, the last position cut off where it is; None where it has no such axes."""
    shape = x.shape
    if x.ndim >= 2 and shape[0] == rows and 0 <= width - shape[1] <= 1 and shape[1] > 0:
        return x
    if x.ndim >= 2 and shape[:2] == (width, rows):
        return x.transpose(0, 1)
    if x.ndim >= 4 and shape[0] == rows and shape[2] == width:
        return x.transpose(1, 2)
    if x.ndim >= 2 and rows > 1 and shape[0] in (rows * width, rows * (width - 1)):
        return x.reshape(rows, -1, *shape[1:])
    return None
