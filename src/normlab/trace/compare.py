"""How two runs of a step are compared: how far they are apart, in which part, and from which module on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.trace.autograd import Weights
from normlab.trace.trace import Event, Trace
from normlab.trace.trail import note_tensors

Part = Callable[[Tensor], Tensor | None]
"""Selects the entries of a tensor to compare; None if it has no such entries."""


class Located(NamedTuple):
    """How large a difference or a share is, and the module where it begins."""

    size: float
    module: str


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, relative to their largest entry; equal non-finite entries
    agree. Nested tensors are compared row by row.
    """
    size = unnoted_distance(a, b)
    note_tensors(a, size)
    return size


def unnoted_distance(a: Tensor, b: Tensor) -> float:
    """Return the same ``distance``, but note nothing: it is part of a comparison that is noted as a whole."""
    if a.is_nested and b.is_nested:
        pairs = zip(a.unbind(), b.unbind(), strict=True)
        return max((unnoted_distance(x, y) for x, y in pairs), default=0.0)
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    are_equal = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().masked_fill(are_equal, 0.0)
    if not torch.isfinite(apart).all():
        return float("inf")
    size = torch.maximum(a.nan_to_num(0, 0, 0).abs().max(), b.nan_to_num(0, 0, 0).abs().max())
    return float(apart.max() / size.clamp_min(1e-300))


def blame(a: Trace, b: Trace, part: Part, limit: float) -> str:
    """Return the first module, in order of completion, whose inputs agree in the part but whose outputs do
    not, or in whose place the other run calls another module; "" if there is none.
    """
    for event, other in zip(a.events, b.events, strict=False):
        if event.module != other.module or part_ways(event, other, part, limit):
            return event.module
    return ""


def part_ways(a: Event, b: Event, part: Part, limit: float) -> bool:
    """Return whether two runs agree in the part of a module's inputs but not of its outputs."""
    # True > False: the outputs differ, and the inputs do not
    return _differ(a.outputs, b.outputs, part, limit) > _differ(a.inputs, b.inputs, part, limit)


def whole(x: Tensor) -> Tensor:
    """Select all of a tensor."""
    return x


def part_of(mask: Tensor, rows: Tensor | None = None) -> Part:
    """Select the entries where a mask over rows `[B]`, or rows and positions `[B, T]`, is True, in any tensor
    with the layout `[B, T, …]`, `[T, B, …]`, `[B, H, T, …]` or `[B·T, …]`.

    For a tensor without an axis for positions, ``rows`` are selected, or else those that are True throughout.
    """
    if rows is None:
        rows = mask if mask.ndim == 1 else mask.all(1)
    return lambda x: _selected(x, mask.to(x.device), rows.to(x.device))


def _differ(a: Sequence[Tensor], b: Sequence[Tensor], part: Part, limit: float) -> bool:
    pairs = ((part(x), part(y)) for x, y in zip(a, b, strict=False) if x.is_floating_point())
    return any(x is not None and y is not None and unnoted_distance(x, y) > limit for x, y in pairs)


def _selected(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor | None:
    """Return the entries that a part selects; None instead of a selection of nothing, which would agree with
    anything.
    """
    count = len(mask)
    if mask.ndim == 2 and (shown := laid_out(x, *mask.shape)) is not None:
        selected = shown[mask[:, : shown.shape[1]]]
    elif x.ndim and x.shape[0] == count:
        selected = x[rows]
    elif x.ndim >= 2 and x.shape[1] == count:
        selected = x[:, rows]
    else:
        return None
    return selected if selected.numel() else None


def laid_out(x: Tensor, rows: int, width: int) -> Tensor | None:
    """Return the tensor as `[B, T, …]`, perhaps one position shorter; None if it has no such axes."""
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


def rounding_of(trace: Trace, value: Callable[[Trace], Tensor]) -> float:
    """Return the relative difference in a value that rounding alone may cause, in the model's own precision:
    the largest that changing each parameter by one rounding causes.
    """
    base, worst, draw = value(trace), 0.0, torch.Generator().manual_seed(0)
    for _ in range(2):
        moved, eps = rounded(trace.parameters, draw)
        worst = max(worst, distance(base, value(trace.again(weights=moved))))
    return 4 * worst + eps


def rounded(parameters: Weights, draw: torch.Generator) -> tuple[dict[str, Tensor], float]:
    """Return the parameters, each changed by at most one rounding, and the largest relative rounding."""
    floating = {n: p.detach() for n, p in parameters.items() if p.is_floating_point()}
    eps = max(torch.finfo(p.dtype).eps for p in floating.values())
    return {n: shaken(p, eps, draw) for n, p in floating.items()}, eps


def shaken(x: Tensor, eps: float, draw: torch.Generator) -> Tensor:
    """Return the tensor with each entry changed by a relative eps at most."""
    return x * (1 + eps * (torch.rand(x.shape, generator=draw) - 0.5).to(x))
