"""How a pass differs from the step that it was made from: batch, weights, mode, seed and so on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor

from normlab.trace.tensors import place_name, tensors_in
from normlab.trace.trace import Trace
from normlab.trace.trail import Change, Setting


def setting_among(shared: Mapping[str, Trace], trace: Trace) -> Setting:
    """Return which of these steps, by name, a pass was made from, and what was changed."""
    for name, step in shared.items():
        if step.model is trace.model and step.exact == trace.exact:
            return Setting(name, tuple(_changes(step, trace)))
    return Setting("another copy")


def _changes(step: Trace, trace: Trace) -> Iterator[Change]:
    """Yield how a pass differs from a step of the same model."""
    yield from _changes_of_batch(step.batch, trace.batch)
    yield from _changes_of_weights(step, trace)
    if trace.training != step.training:
        yield Change("mode", "", "training" if trace.training else "evaluation")
    if trace.dropout != step.dropout:
        yield Change("dropout", "", "on" if trace.dropout else "off")
    if trace.seed != step.seed:
        yield Change("seed", "", str(trace.seed))
    for module in trace.changed:
        yield Change("inputs", module, "changed as they enter")
    if trace.loss_of is not step.loss_of:
        yield Change("loss", "", "another function")
    if trace.undone is not step.undone:
        yield Change("graph", "", "some of its cuts are undone")


def _changes_of_batch(before: Any, after: Any) -> Iterator[Change]:
    if before is after:
        return
    earlier, later = dict(tensors_in(before)), dict(tensors_in(after))
    for place in dict.fromkeys((*earlier, *later)):
        if place not in later:
            how = "left out"
        elif place not in earlier:
            how = "added"
        else:
            how = _difference(earlier[place], later[place], places=True)
        if how:
            yield Change("batch", place_name(place), how)


def _changes_of_weights(step: Trace, trace: Trace) -> Iterator[Change]:
    for name, weight in trace.weights.items():
        earlier = step.weights.get(name)
        if earlier is None:
            earlier = attrgetter(name)(step.model)
        if how := _difference(earlier, weight):
            yield Change("weights", name, how)


def _difference(before: Tensor, after: Tensor, *, places: bool = False) -> str:
    """Say how a tensor differs from what it was, and where if asked; nothing if it holds the same numbers."""
    if before is after:
        return ""
    if before.is_nested or after.is_nested:
        return "other rows"
    if before.shape != after.shape:
        return f"{list(after.shape)} in place of {list(before.shape)}"
    try:
        changed = before.detach() != after.detach().to(before)
        number = int(changed.sum())
        where = changed.nonzero().tolist() if places and number else []
    except Exception:  # sparse, quantized or meta tensors; noting must not change what a test does
        return "another tensor"
    if not number:
        return ""
    how = f"{number:,} of {before.numel():,} numbers"
    return f"{how}, from {where[0]} to {where[-1]}" if where else how
