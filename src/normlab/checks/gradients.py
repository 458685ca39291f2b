"""Properties of gradients: they are the derivative of the loss, and every trainable part gets one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from normlab.checks.property import Answers, Untestable, fail, note, property_of
from normlab.checks.step import Step
from normlab.errors import UserError
from normlab.trace.along import Along
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.stacks import block_of, siblings
from normlab.trace.functions import OWN
from normlab.trace.step import gradients_in
from normlab.trace.trace import Trace

HEAD: Final = 4
"""The least width of a part of a matrix: a head, a gate's half, a third of a fused projection."""
Found = Mapping[str, Tensor | None]


@property_of("gradients", explains=["step", "overfit", "repeats"], passes=9)
def derivative(step: Step) -> Answers:
    """The gradient is the derivative of the loss.

    Central differences of the loss in float64, along the gradient itself, at step sizes that agree with each
    other; parameters without a gradient are left to another property.
    """
    along = Along(step.exact if step.moving else step.training)
    if not step.is_exact:
        raise Untestable("the model does not run in float64")
    if not along.gradients:
        raise Untestable("no parameter gets a gradient")
    if along.all.error > 1e-3 * along.all.expected:
        raise Untestable("the loss bends or jumps here at every step size, so that it has no derivative")
    if along.attached:
        yield note("", f"{len(along.attached)} numbers get a gradient and are no part of the loss")
    if not along.all.disagrees:
        return
    place = along.first_wrong(module for module, _ in step.facts.order)
    moved = along.compare([place])
    if abs(moved.measured) <= 10 * moved.error:
        yield note(place, "it gets a gradient, and the loss does not move with it: a surrogate gradient")
    else:
        say = f"the loss moves by {moved.measured:.4g} along it where its gradient has {moved.expected:.4g}"
        yield fail(place, say, "look for a detach(), a no_grad() or an own backward between it and the loss")


@property_of("gradients", explains=["derivative", "step", "overfit", "repeats", "update"], passes=8)
def gradients(step: Step) -> Answers:
    """Every trainable parameter, and every row and column of it, gets a gradient in a training step."""
    try:
        found = step.training.gradients
    except UserError as error:
        yield fail("loss", str(error), "keep the graph from the parameters to the loss")
        return
    if step.draws:  # a block that this draw leaves out gets one in evaluation
        found = {n: step.exact.gradients[n] if _none(g) else g for n, g in found.items()}
    dead = _silent(step, found, found)
    if dead:  # the symmetry of a start may cancel it
        dead = _silent(step, step.training.again(weights=_moved(step.training)).gradients, dead)
    never, own = dead, {n: p.detach() for n, p in step.exact.model.named_parameters()}
    for places in (1, 3, 5, 7):  # other weights route tokens otherwise
        if never:
            rolled = {n: p.roll(places) for n, p in own.items() if p.is_floating_point()}
            other = step.training.again(weights=rolled).gradients
            never = _silent(step, other, never)
            found = {n: other[n] if _none(g) else g for n, g in found.items()}
    free = [n for n in never if not _none(found[n]) and not _moves_loss(step, n, own[n])]
    cut = [n for n in never if n not in free]
    ran = {e.module for e in step.training.events if any(x.numel() for x in e.inputs)} if cut else set()
    idle = [n for n in cut if n.rpartition(".")[0] not in ran]
    experts = [n for n in idle if _expert(step, n, found)]
    spare = [n for n in cut if n not in experts and _of_library(step, n)]
    waiting = [n for n in dead if n not in never]
    reasons = ("from this batch", "by symmetry", "as experts of other tokens", "as a library builds them")
    for why, names in zip(reasons, (waiting, free, experts, spare), strict=True):
        if names:
            yield note(names[0], f"{len(names)} parameters get no gradient, {why}")
    if bad := [n for n in cut if n not in experts and n not in spare]:
        why = "its module never runs" if bad[0] in idle else "the loss does not depend on it, or is cut off"
        say = f"{len(bad)} of {len(found)} parameters get no gradient in training, up to {bad[-1]}: {why}"
        advice = "look for detach(), no_grad(), re-entrant checkpoints, a factor of 0; freeze what is spare"
        yield fail(bad[0], say, advice)
    yield from chain(_stuck(step, cut), _lost(step), _parts(step, found))


def _none(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(gradient.any())


def _silent(step: Step, found: Found, among: Iterable[str]) -> list[str]:
    """The parameters whose gradient is nothing but rounding."""
    sizes = {n: 0.0 if g is None else float(g.norm()) for n, g in found.items()}
    least = 1e-3 * step.rounding * max(sizes.values(), default=0.0)
    return [n for n in among if sizes[n] <= least]


def _moves_loss(step: Step, name: str, p: Tensor) -> bool:
    """Whether the loss depends on a parameter, as it does not on a bias of keys, which a softmax cancels."""
    moved = p + p.roll(1) + torch.linspace(-1, 1, p.numel()).reshape(p.shape).to(p)
    return distance(step.training.loss, step.training.again(weights={name: moved}).loss) > step.rounding


def _expert(step: Step, name: str, found: Found) -> bool:
    """Whether it belongs to one of several numbered alternatives, inside a block, of which others get one."""
    parts, blocks = name.split("."), {b.path for b in step.facts.blocks}
    numbers = [i for i, x in enumerate(parts) if x.isdigit() and ".".join(parts[: i + 1]) not in blocks]
    globs = [".".join([*parts[:i], "*", *parts[i + 1 :]]) for i in numbers]
    return any(fnmatchcase(n, glob) and not _none(g) for n, g in found.items() for glob in globs)


def _of_library(step: Step, name: str) -> bool:
    """Whether the class that holds it, outside torch, is an installed library's and as the library has it."""
    parts = name.split(".")[:-1]
    holders = [step.model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    holder = next((m for m in holders if type(m).__module__.split(".")[0] != "torch"), None)
    file = getattr(sys.modules.get(type(holder).__module__), "__file__", None) or ""
    return "site-packages" in file and "forward" not in vars(holder)


def _stuck(step: Step, idle: list[str]) -> Answers:
    """Parameters that start at zero together with what multiplies them: neither ever wakes the other."""
    zero = [n for n, p in step.model.named_parameters() if p.requires_grad and p.numel() and not p.any()]
    if all(step.facts.roles.get(n) == "bias" for n in zero):
        return
    trace, dead = step.plain.again(training=not step.draws, dropout=False), list[str]()
    while now := [n for n, g in trace.gradients.items() if _none(g) and n not in idle]:
        if now == dead:
            say = f"it starts at 0, and so does what multiplies it: {len(dead)} parameters never learn"
            yield fail(next((n for n in zero if n in dead), dead[0]), say, "draw one of the two at random")
            return
        dead, trace = now, trace.again(weights=_moved(trace))


def _moved(trace: Trace) -> dict[str, Tensor]:
    """The weights after a short step down the gradient, by a hundredth of each one's size."""
    own, weights = dict(trace.model.named_parameters()), dict(trace.weights)
    for n, g in trace.gradients.items():
        if g is not None and bool(g.any()):
            here = weights.get(n, own[n].detach())
            size = float(here.norm()) or here.numel() ** 0.5
            weights[n] = here - 0.01 * size / float(g.norm()) * g
    return weights


def _lost(step: Step) -> Answers:
    """What is computed with a graph for the loss, and is no part of it."""
    model = step.exact.model
    with step.training.with_graph(functions=lambda name: name == OWN) as passed:
        held = [(path, x) for path, m in model.named_modules() for x in vars(m).values()]
        kept = [(path, x) for path, value in held for x in _with_graph(value) if x.numel() == 1]
        live = [(f.module, x) for f in passed.functions for x in _with_graph(f.result)] + kept
        loss, tensors = passed.loss, [x for _, x in live]
        reached = gradients_in(loss, tensors, model) if loss is not None and live else []
    if place := [path for (path, _), g in zip(live, reached, strict=False) if g is None]:
        say = "a number or a result of its autograd function has a graph and is no part of the loss"
        yield fail(place[0], f"{say}: its gradient is lost", "add it to the loss, or pass the result on")


def _with_graph(value: object) -> list[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.grad_fn is not None]


def _parts(step: Step, found: Found) -> Answers:
    """Rows or columns of matrices, in whole heads, that get no gradient, from other tokens neither."""
    facts = step.facts
    lengths = {n for pair in facts.streams.values() for x in pair if x is not None for n in x.shape}
    with suppress(Unknown):  # a table of positions may be longer; for a batch, it ends where its rows do
        lengths.add(facts.tokens.ids.shape[1])
        lengths.add(int(facts.padding.real.any(0).nonzero().max()) + 1)
    matrices = {n: g for n, g in found.items() if g is not None and facts.roles.get(n) == "matrix"}
    holes = [(n, axis, _hole(g, axis)) for n, g in matrices.items() if g.ndim == 2 for axis in (0, 1)]
    bad = [(n, axis, hole) for n, axis, hole in holes if hole and hole[0] not in lengths]
    if not bad:
        return
    everywhere = torch.ones_like(facts.tokens.ids, dtype=torch.bool)
    other = step.training.again(batch=facts.other_tokens(everywhere)).gradients
    for name, axis, (start, end) in bad:
        g, what = other[name], f"{'columns' if axis else 'rows'} {start} to {end - 1}"
        if g is not None and _hole(g, axis) is None:
            yield note(name, f"{what} get no gradient from this batch")
        else:
            yield fail(name, f"{what} get no gradient, and others do", "a head or a part of it is not used")


def _hole(gradient: Tensor, axis: int) -> tuple[int, int] | None:
    """The first run of zeros, if they lie in whole parts of equal width that divide the length."""
    zero, length = ~gradient.any(1 - axis), gradient.shape[axis]
    widths = [w for w in range(HEAD, length) if length % w == 0]
    if not zero.any() or zero.all() or not any(zero.view(-1, w).eq(zero[::w, None]).all() for w in widths):
        return None
    start = int(zero.long().argmax())
    return start, start + int(zero[start:].long().cumprod(0).sum())


@property_of("gradients", explains=["siblings"], passes=1)
def frozen(step: Step) -> Answers:
    """Nothing is frozen between trained parts, unless it is declared."""
    facts, own = step.facts, dict(step.exact.model.named_parameters())
    held = [n for n, p in own.items() if not p.requires_grad]
    bad = [n for n in held if not any(fnmatchcase(n, glob) for glob in step.declare.frozen)]
    for names in siblings(facts.stacks, own).values():
        trained = [i for i, n in enumerate(names) if own[n].requires_grad]
        between = [n for i, n in enumerate(names) if n in bad and trained and i > trained[0]]
        if between:
            say = f"frozen, while {len(trained)} of its {len(names) - 1} siblings train, also before it"
            yield fail(between[0], say, "set requires_grad, or declare frozen")
    read = [(f.argument(0, "input").cpu(), f.argument(1, "weight")) for f in facts.lookups]
    tables = {id(w) for ids, w in read if any(torch.equal(ids.long(), t.ids) for t in facts.sources)}
    ends = [n for n in bad if id(own[n]) in tables or facts.roles.get(n) == "head"]
    blocks = [p.requires_grad for n, p in own.items() if block_of(facts.stacks, n)]
    with suppress(Unknown):
        if ends and all(blocks) and not facts.trained:
            say = "frozen as it was drawn while every block trains"
            yield fail(ends[0], say, "train it, or declare frozen")
    if held:
        yield note(held[0], f"{len(held)} of {len(own)} parameters are frozen")
