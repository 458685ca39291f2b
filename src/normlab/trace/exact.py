"""A copy of a model on which a change of any size shows: in float64, with every branch awake."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from normlab.trace.compare import distance
from normlab.trace.tensors import map_tensors
from normlab.trace.trace import Trace


def awake(model: nn.Module) -> nn.Module:
    """Give small draws to the parameters that are zero, in place: ReZero's scalars, FixUp's and LoRA's last
    matrices hide their branch at the start.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() and not bool(p.any()):
                p.copy_(0.02 * torch.randn(p.shape, generator=generator))
    return model


def in_float64(trace: Trace) -> Trace | None:
    """The same step on a copy in float64, None where that does not run or does not give the same loss."""
    try:
        batch = map_tensors(trace.batch, lambda _, x: x.double() if x.is_floating_point() else x)
        wide = replace(trace, model=copy.deepcopy(trace.model).double(), batch=batch, exact=True)
        a, b = float(wide.loss), float(trace.loss)
        if abs(a - b) <= 0.05 * abs(b) + 1e-3 or a != a:
            return wide
        drawn = max(abs(float(trace.again(seed=seed).loss) - b) for seed in (1, 2))
    except Exception:
        return None
    return wide if abs(a - b) <= 0.05 * abs(b) + 4 * drawn + 1e-3 else None


def rounding_of(trace: Trace, value: Callable[[Trace], Tensor]) -> float:
    """The relative difference of a value that rounding alone may make, in the model's own precision: the
    largest that a change of each parameter by one rounding makes.
    """
    base, worst = value(trace), 0.0
    own = {n: p.detach() for n, p in trace.model.named_parameters() if p.is_floating_point()}
    generator, eps = torch.Generator().manual_seed(0), max(torch.finfo(p.dtype).eps for p in own.values())
    for _ in range(2):
        moved = {
            n: p * (1 + eps * (torch.rand(p.shape, generator=generator) - 0.5).to(p)) for n, p in own.items()
        }
        worst = max(worst, distance(base, value(trace.again(weights=moved))))
    return 4 * worst + eps
