"""Which parameters a forward pass writes to, as a table with ``max_norm`` does to its rows, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normlab.trace.tensors import Side, forward_hooks
from normlab.trace.trace import Trace


def rewritten(trace: Trace) -> dict[str, str]:
    """Return the parameters that the pass of a step changes, each with the innermost module that was running.

    The bits are compared, since a write through ``data`` leaves no other mark. Parameters that are zero have
    small draws in this pass, or a factor on them would not show. The model stays as it is.
    """
    draw = torch.Generator().manual_seed(0)
    before = {name: p.data for name, p in trace.model.named_parameters()}
    for name, x in before.items():
        if x.is_floating_point() and not x.any():
            before[name] = torch.randn(x.shape, generator=draw).mul_(0.02).to(x)
    guarded = trace.again(weights=before, rewritten=frozenset(before))
    changed = _left_by(guarded, before)
    if not changed:
        return {}

    places: dict[str, str] = {}
    running: list[str] = []
    now = dict(trace.model.named_parameters())

    def look(path: str, side: Side, _: Any) -> None:
        for name in changed.keys() - places.keys():
            if not _same(now[name], before[name]):
                places[name] = running[-1] if running else ""
        if side == "input":
            running.append(path)
        else:
            running.pop()

    with forward_hooks(dict(trace.model.named_modules()), look):
        guarded.once()
    return {name: places.get(name, "") for name in changed}


def left_by(trace: Trace) -> dict[str, Tensor]:
    """Return the parameters that a pass changes, as it leaves them."""
    before = {name: p.data for name, p in trace.model.named_parameters() if name in trace.rewritten}
    return _left_by(trace, before) if before else {}


def _left_by(trace: Trace, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with trace.with_graph(graph=False):
        now = dict(trace.model.named_parameters())
        return {n: now[n].detach().clone() for n, x in before.items() if not _same(now[n], x)}


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; what is not a number equals itself."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
