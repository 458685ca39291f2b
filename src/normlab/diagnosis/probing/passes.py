"""Passes of a model that several studies share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.diagnosis.reading.parameters import Owner, Part, Width, kinds, measuring, owners
from normlab.diagnosis.reading.structure import Structure
from normlab.diagnosis.reading.subject import PaddingMasks, Subject, find_padding_masks
from normlab.errors import UserError
from normlab.trace.step import FROZEN, Gradients, gradients_in, trainable, zeros_for_none
from normlab.trace.tensors import Tap


@dataclass(frozen=True)
class ForwardPass:
    """The activations of a forward pass without dropout, and what they tell about parameters."""

    tensors: Mapping[Tap, Tensor]
    """At every tap of every sublayer, without graphs."""
    owned: Mapping[str, Owner]
    """Parameters' owners, by path."""
    widths: Mapping[str, Width]
    """Input and output widths of the modules that hold parameters, by path."""


@dataclass(frozen=True)
class BackwardPass:
    """The activations and gradients of a forward and backward pass without dropout."""

    forward: ForwardPass
    loss_gradients: Gradients
    stream: Mapping[Tap, Tensor]
    """Gradients of the loss where each stack begins and after each sublayer, unless all before is frozen."""


def forward_pass(subject: Subject) -> ForwardPass:
    """Run a forward pass. Parameters have owners only if gradients are enabled."""
    with measuring(subject.model) as widths:
        passed = subject.calls(_taps(subject.structure)).once(graph=torch.is_grad_enabled())
    return _forward(subject, passed.taps, widths)


def backward_pass(subject: Subject) -> BackwardPass:
    """Run a forward pass and a backward pass to the streams and to every trainable parameter.

    Raises UserError if every parameter is frozen.
    """
    model, weights, stacks = subject.model, trainable(subject.model), subject.structure.stacks
    with measuring(model) as widths, subject.trace(_taps(subject.structure)).with_graph() as passed:
        if passed.loss is None or not passed.loss.requires_grad:
            raise UserError(FROZEN)
        forward = _forward(subject, passed.taps, widths)
        taps = [t for s in stacks for t in (s.sublayers[0].before, *(v.after for v in s.sublayers))]
        inner = {tap: passed.taps[tap] for tap in dict.fromkeys(taps) if passed.taps[tap].requires_grad}
        tensors = [*inner.values(), *weights.values()]
        gradients = zeros_for_none(gradients_in(passed.loss, tensors, model), tensors)
        loss = passed.loss.item()
    stream, own = gradients[: len(inner)], gradients[len(inner) :]
    slope = Gradients(loss, dict(zip(weights, own, strict=True)))
    return BackwardPass(forward, slope, dict(zip(inner, stream, strict=True)))


def padding_masks_of(subject: Subject, backward: BackwardPass) -> PaddingMasks:
    """Find the padding masks from a pass that was made, if its gradients are enough, or by one of their own.

    It can where every parameter has a gradient: a branch that adds nothing, as ReZero's at the start, leaves
    none in the parameters behind it, and hides which tokens they read.
    """
    stacks = subject.structure.stacks
    begun = {s.name: g for s in stacks if (g := backward.stream.get(s.sublayers[0].before)) is not None}
    awake = all(bool(g.to_dense().any()) for g in backward.loss_gradients.gradients.values())
    return find_padding_masks(subject, begun=begun if awake else {})


def parts_of(subject: Subject, forward: ForwardPass) -> Mapping[str, tuple[Part, ...]]:
    """Return the parts of every parameter by path; a packed matrix of queries, keys and values has three."""
    stacks = subject.structure.stacks
    dims: dict[str | None, int] = {s.name: forward.tensors[s.sublayers[0].before].shape[-1] for s in stacks}
    return kinds(subject.model, forward.owned, forward.widths, dims)


def _forward(subject: Subject, seen: Mapping[Tap, Tensor], widths: Mapping[str, Width]) -> ForwardPass:
    owned = owners(subject.model, subject.structure, seen)
    return ForwardPass({tap: x.detach() for tap, x in seen.items()}, owned, dict(widths))


def _taps(structure: Structure) -> list[Tap]:
    return [tap for _, view in structure.sublayers for tap in view.taps]
