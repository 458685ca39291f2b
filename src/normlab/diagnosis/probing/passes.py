"""Passes of a model that several studies share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.diagnosis.probing.stepping import LossGradients, trainable
from normlab.diagnosis.reading.kinds import Part, Width, kinds, measuring
from normlab.diagnosis.reading.parameters import Owner, owners
from normlab.diagnosis.reading.structure import Structure
from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.diagnosis.reading.taps import Tap, capture
from normlab.diagnosis.reading.tokens import FROZEN, PaddingMasks, find_padding_masks
from normlab.errors import UserError


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
    loss_gradients: LossGradients
    stream: Mapping[Tap, Tensor]
    """Gradients of the loss where each stack begins and after each sublayer, unless all before is frozen."""


def forward_pass(subject: Subject) -> ForwardPass:
    """Run a forward pass. Parameters have owners only if gradients are enabled."""
    model = subject.model
    with capture(model, _taps(subject.structure)) as caught, measuring(model) as widths:
        subject.forward()
    return _forward(subject, caught, widths)


def backward_pass(subject: Subject) -> BackwardPass:
    """Run a forward pass and a backward pass to the streams and to every trainable parameter.

    Raises UserError if every parameter is frozen.
    """
    model, weights = subject.model, trainable(subject.model)
    with capture(model, _taps(subject.structure)) as caught, measuring(model) as widths, torch.enable_grad():
        loss = subject.loss()
    if not loss.requires_grad:
        raise UserError(FROZEN)
    forward = _forward(subject, caught, widths)
    stacks = subject.structure.stacks
    taps = [t for s in stacks for t in (s.sublayers[0].before, *(v.after for v in s.sublayers))]
    inner = {tap: caught[tap] for tap in dict.fromkeys(taps) if caught[tap].requires_grad}
    with undisturbed(model):  # where a checkpoint computes activations again, they are those of the pass
        found = torch.autograd.grad(loss, [*inner.values(), *weights.values()], materialize_grads=True)
    stream = dict(zip(inner, found, strict=False))
    gradients = dict(zip(weights, found[len(inner) :], strict=True))
    return BackwardPass(forward, LossGradients(loss.item(), gradients), stream)


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


def _forward(subject: Subject, caught: Mapping[Tap, Tensor], widths: Mapping[str, Width]) -> ForwardPass:
    owned = owners(subject.model, subject.structure, caught)
    return ForwardPass({tap: x.detach() for tap, x in caught.items()}, owned, dict(widths))


def _taps(structure: Structure) -> list[Tap]:
    return [tap for _, view in structure.sublayers for tap in view.taps]
