"""Which parameters a forward pass writes to, as a table with ``max_norm`` does to its rows, and where."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from normlab.trace.autograd import Weights
from normlab.trace.tensors import Side, forward_hooks, is_zero
from normlab.trace.trace import Trace
from normlab.trace.weights import put_back_weights, same_values, weights_apart


def rewritten(trace: Trace, weights: Weights | None = None) -> dict[str, str]:
    """Return the parameters that the pass of a step changes, each with the innermost module that was running.

    Values are compared, since a write through ``data`` leaves no other mark. Parameters that are zero have
    small draws in this pass, or a factor on them would not show. The model stays as it is: ``weights`` hold
    its parameters' values in tensors that the pass does not reach; without them, these are copied.
    """
    values = weights_apart(trace.model, None) if weights is None else weights
    draw = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.randn(x.shape, generator=draw).mul_(0.02).to(x)
        for name, x in values.items()
        if x.is_floating_point() and is_zero(x)
    }
    before = {**values, **drawn}
    # a pass may write to what was drawn, so each has a copy of it
    passing = trace.again(weights=drawn, rewritten=frozenset(drawn))
    written = values  # all of them, if the pass raises
    try:
        changed = _left_by(passing, before)
        written = {name: values[name] for name in changed}
        put_back_weights(trace.model, written)
        return _places(passing, before, changed) if changed else {}
    finally:
        put_back_weights(trace.model, written)


def _places(trace: Trace, before: Weights, changed: Collection[str]) -> dict[str, str]:
    """Return the module in which each of these parameters changes first."""
    places: dict[str, str] = {}
    running: list[str] = []
    now = dict(trace.model.named_parameters())

    def look(path: str, side: Side, _: Any) -> None:
        for name in set(changed) - places.keys():
            if not same_values(now[name], before[name]):
                places[name] = running[-1] if running else ""
        if side == "input":
            running.append(path)
        else:
            running.pop()

    with forward_hooks(dict(trace.model.named_modules()), look):
        trace.once()
    return {name: places.get(name, "") for name in changed}


def left_by(trace: Trace) -> dict[str, Tensor]:
    """Return the parameters that a pass changes, as it leaves them."""
    before = {name: p.data for name, p in trace.model.named_parameters() if name in trace.rewritten}
    return _left_by(trace, before) if before else {}


def _left_by(trace: Trace, before: Weights) -> dict[str, Tensor]:
    with trace.with_graph(graph=False):
        now = dict(trace.model.named_parameters())
        return {n: now[n].detach().clone() for n, x in before.items() if not same_values(now[n], x)}
