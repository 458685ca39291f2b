"""One pass of a model that several studies look at, so that each need not make its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.diagnosis.probing.stepping import Slope, trainable
from normlab.diagnosis.reading.kinds import Part, Width, kinds, measuring
from normlab.diagnosis.reading.parameters import Owner, owners
from normlab.diagnosis.reading.structure import Structure
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import Tap, capture
from normlab.diagnosis.reading.tokens import FROZEN, Real, real_tokens
from normlab.errors import UserError


@dataclass(frozen=True)
class Seen:
    """What a forward pass showed, without dropout."""

    tensors: Mapping[Tap, Tensor]
    """At every tap of every sublayer, without graphs."""
    owned: Mapping[str, Owner]
    """Parameters' owners, by path."""
    widths: Mapping[str, Width]
    """Of the modules that hold parameters."""


@dataclass(frozen=True)
class Pass:
    """What a pass forward and back showed, without dropout."""

    seen: Seen
    slope: Slope
    stream: Mapping[Tap, Tensor]
    """Gradients of the loss in the stream where each stack begins and after each sublayer; none for a tensor
    before which all is frozen.
    """


def look(subject: Subject) -> Seen:
    """A pass forward. Parameters have owners only where gradients are on."""
    model = subject.model
    with capture(model, _taps(subject.structure)) as caught, measuring(model) as widths:
        subject.forward()
    return _seen(subject, caught, widths)


def examine(subject: Subject) -> Pass:
    """A pass forward and one back, to the streams and to every trainable parameter.

    Raises UserError where every parameter is frozen.
    """
    model, weights = subject.model, trainable(subject.model)
    with capture(model, _taps(subject.structure)) as caught, measuring(model) as widths, torch.enable_grad():
        loss = subject.loss()
    if not loss.requires_grad:
        raise UserError(FROZEN)
    seen = _seen(subject, caught, widths)
    stacks = subject.structure.stacks
    taps = [t for s in stacks for t in (s.sublayers[0].before, *(v.after for v in s.sublayers))]
    inner = {tap: caught[tap] for tap in dict.fromkeys(taps) if caught[tap].requires_grad}
    found = torch.autograd.grad(loss, [*inner.values(), *weights.values()], materialize_grads=True)
    stream = dict(zip(inner, found, strict=False))
    gradients = dict(zip(weights, found[len(inner) :], strict=True))
    return Pass(seen, Slope(loss.item(), gradients), stream)


def real_of(subject: Subject, passed: Pass) -> Real:
    """``real_tokens``, from a pass that was made where it can tell.

    It can where every parameter has a gradient: a branch that adds nothing, as ReZero's at the start, leaves
    none in the parameters behind it, and hides which tokens they read.
    """
    stacks = subject.structure.stacks
    begun = {s.name: g for s in stacks if (g := passed.stream.get(s.sublayers[0].before)) is not None}
    awake = all(bool(g.to_dense().any()) for g in passed.slope.gradients.values())
    return real_tokens(subject, begun=begun if awake else {})


def parts_of(subject: Subject, seen: Seen) -> Mapping[str, tuple[Part, ...]]:
    """What every parameter does, by path: a packed matrix of queries, keys and values has a part for each."""
    stacks = subject.structure.stacks
    dims: dict[str | None, int] = {s.name: seen.tensors[s.sublayers[0].before].shape[-1] for s in stacks}
    return kinds(subject.model, seen.owned, seen.widths, dims)


def _seen(subject: Subject, caught: Mapping[Tap, Tensor], widths: Mapping[str, Width]) -> Seen:
    owned = owners(subject.model, subject.structure, caught)
    return Seen({tap: x.detach() for tap, x in caught.items()}, owned, dict(widths))


def _taps(structure: Structure) -> list[Tap]:
    views = [view for stack in structure.stacks for view in stack.sublayers]
    return [tap for v in views for tap in (v.before, v.branch, v.total, v.after, *v.beside)]
