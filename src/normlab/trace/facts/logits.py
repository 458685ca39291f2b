"""The logits that a loss scores."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from normlab.trace.facts.targets import Targets, read_targets
from normlab.trace.functions import FunctionCall
from normlab.trace.step import gradients_in
from normlab.trace.tensors import Tap
from normlab.trace.trace import Event, Pass, Trace

SCORED: Final = ("cross_entropy", "log_softmax", "nll_loss")
"""Functions of torch to whose input a cross-entropy's logits may go without being a module's output."""
CANDIDATES: Final = 16
"""Tensors that are tried as logits, from the loss backwards."""


class FunctionInput(NamedTuple):
    """The first argument of the ``index``-th call of a scoring function, whose classes lie along an axis."""

    index: int
    axis: int = -1


class Logits(NamedTuple):
    """The tensor that the targets are read off, and its layout."""

    where: Tap | FunctionInput
    shape: torch.Size
    value: Tensor

    @property
    def output(self) -> bool:
        """Whether the model itself puts them out."""
        return isinstance(self.where, Tap) and not self.where.module


def read_logits(trace: Trace, passed: Pass) -> list[tuple[Logits, Targets]]:
    """Find the logits of which the loss is a cross-entropy, and their targets, from a pass with its graph."""
    loss, found = passed.loss, list[tuple[Logits, Targets]]()
    if loss is None or not loss.requires_grad:
        return found
    precision = torch.float64 if trace.exact else loss.dtype
    candidates = _candidates(passed)
    for some in (candidates[:1], candidates[1:]):
        if not some or (found and all(x.shape != found[0][0].shape for _, x in some)):
            continue  # no other output may be another head's logits
        gradients = gradients_in(loss, [x for _, x in some], trace.model, retain_graph=True)
        for (where, x), gradient in zip(some, gradients, strict=True):
            if isinstance(where, FunctionInput) and gradient is not None:
                x, gradient = x.movedim(where.axis, -1), gradient.movedim(where.axis, -1)
            targets = None if gradient is None else read_targets(x, gradient, precision)
            logits = Logits(where, x.shape, x.detach())
            if targets is not None and (logits.output or not found):
                found.append((logits, targets))
    return found


def _candidates(passed: Pass) -> list[tuple[Tap | FunctionInput, Tensor]]:
    """Tensors `[..., V]` that may be logits, from the loss backwards."""
    scored = (f for f in passed.functions if f.name in SCORED)
    found = [
        *(pair for event in passed.events if event.module == "" for pair in _taps(event)),
        *((FunctionInput(i, _class_axis(f)), f.argument(0, "input")) for i, f in enumerate(scored)),
        *(pair for event in reversed(passed.events) if event.module for pair in _taps(event)),
    ]
    wide = ((w, x) for w, x in found if x.is_floating_point() and x.ndim >= 2 and x.shape[-1] > 1)
    return [(w, x) for w, x in wide if x.requires_grad][:CANDIDATES]


def _class_axis(call: FunctionCall) -> int:
    """Where the input of a scoring function has its classes: a cross-entropy's second axis, of three."""
    return 1 if call.name in ("cross_entropy", "nll_loss") and call.argument(0, "input").ndim > 2 else -1


def _taps(event: Event) -> list[tuple[Tap | FunctionInput, Tensor]]:
    pairs = zip(event.places, event.outputs, strict=True)
    return [(Tap(event.module, "output", place, event.call), x) for place, x in pairs]
