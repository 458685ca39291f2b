"""The step that is tested: in float64, in which any change shows, awake, and small enough to run often."""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.trace.modules import LATER, counts
from normlab.trace.tensors import Place, map_tensors, rows_of, tensors_in
from normlab.trace.trace import Trace

LARGE: Final = 4_000_000_000
"""Positions times parameters for which a pass in float64 takes about a second on one core."""
COLUMNS: Final = 32
"""The fewest columns that a part of a batch keeps."""


def _awake(model: nn.Module) -> nn.Module:
    """Fill parameters that are zero with small draws, in place: ReZero's scalars and FixUp's and LoRA's last
    matrices hide their branch at the start. So do gates that open during training; their counts are advanced.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() and not bool(p.any()):
                p.copy_(0.02 * torch.randn(p.shape, generator=generator))
        for count in counts(model).values():
            count.clamp_(min=LATER)
    return model


def small_part(batch: Any, parameters: int) -> Any:
    """Return two rows, and the first columns, of a batch that is too large for that many parameters.

    Columns are dropped only if all integers have one width and none may be a mask, a position or a document,
    which would mean something else in a part.
    """
    rows = rows_of(batch)
    matrices = [x for _, x in tensors_in(batch) if x.ndim == 2 and x.shape[0] == rows]
    ids = [x for x in matrices if not x.is_floating_point()]
    widths = {x.shape[1] for x in ids}
    positions = rows * max(widths, default=1)
    if rows < 2 or positions * parameters <= LARGE:
        return batch
    falls = [float((x.diff(dim=1) < 0).float().mean()) for x in ids]  # a count rarely falls
    plain = len(widths) == 1 and min(falls) > 0.1 and all(len(torch.unique(x)) > 2 for x in ids)
    width = widths.pop() if plain else 0
    kept = max(COLUMNS, LARGE // parameters // 2)

    def cut(_: Place, x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] != rows:
            return x
        x = x[:2]
        for axis in range(1, x.ndim):
            if x.shape[axis] == width > kept:
                x = x.narrow(axis, 0, kept)
        return x

    return map_tensors(batch, cut)


def awake_step(trace: Trace, model: nn.Module) -> Trace:
    """Return the same step without dropout on this model, which is made awake: in float64, unless it does
    not run there or gives another loss.
    """
    own = trace.again(model=_awake(model), dropout=False)
    try:
        batch = map_tensors(own.batch, lambda _, x: x.double() if x.is_floating_point() else x)
        wide = own.again(model=copy.deepcopy(own.model).double(), batch=batch, exact=True)
        a, b = float(wide.loss), float(own.loss)
        if abs(a - b) <= 0.05 * abs(b) + 1e-3 or a != a:
            return wide
        drawn = max(abs(float(own.again(seed=seed).loss) - b) for seed in (1, 2))
    except Exception:
        return own
    return wide if abs(a - b) <= 0.05 * abs(b) + 4 * drawn + 1e-3 else own
