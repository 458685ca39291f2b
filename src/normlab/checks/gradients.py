"""Properties of gradients: they are the derivative of the loss, and every trainable part gets one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import Tensor

from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.errors import UserError
from normlab.trace.along import Along, arriving
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.stacks import block_of, siblings
from normlab.trace.functions import OWN
from normlab.trace.trace import Trace
from normlab.trace.untouched import without_gradients

HEAD: Final = 4
"""The least width of a part of a matrix: a head, a gate's half, a third of a fused projection."""
LOST: Final = (
    "the result of its autograd function, or a number that it keeps, has a graph and is no part of the loss, "
    "so that what it would add to the gradient is lost"
)
Found = Mapping[str, Tensor | None]


@property_of("gradients", explains=["step", "overfit", "repeats"], passes=9)
def derivative(step: Step) -> Iterator[Violation | Note]:
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
    place = along.first_wrong(ordered(step.facts, along.gradients))
    moved = along.compare([place])
    if abs(moved.measured) <= 10 * moved.error:
        yield note(place, "it gets a gradient, and the loss does not move with it: a surrogate gradient")
        return
    yield fail(
        place,
        f"the loss moves by {moved.measured:.4g} along it where its gradient has {moved.expected:.4g}",
        "look for a detach(), a no_grad() or a backward of one's own between it and the loss",
    )


def ordered(facts: Facts, names: Mapping[str, object]) -> list[str]:
    """Parameters in the order in which the modules that hold them are done."""
    done = {module: i for i, (module, _) in enumerate(facts.order)}
    return sorted(names, key=lambda n: done.get(n.rpartition(".")[0], -1))


@property_of("gradients", explains=["derivative", "step", "overfit", "repeats", "update"], passes=8)
def gradients(step: Step) -> Iterator[Violation | Note]:
    """Every trainable parameter, and every row and column of it, gets a gradient in a training step."""
    try:
        found = step.training.gradients
    except UserError as error:
        yield fail("loss", str(error), "keep the graph from the parameters to the loss")
        return
    if step.draws:  # a block that this draw leaves out gets one in evaluation
        more = step.exact.gradients
        found = {n: more[n] if _none(g) else g for n, g in found.items()}
    dead = _silent(step, found)
    if dead:  # the symmetry of a start may cancel it
        dead = _silent(step, step.training.again(weights=_moved(step.training)).gradients, dead)
    never = _never(step, dead)
    free = [n for n in never if not _none(found[n]) and not _moves_loss(step, n)]
    for names, why in (([n for n in dead if n not in never], "of this batch"), (free, "by symmetry")):
        if names:
            yield note(names[0], f"{len(names)} parameters get no gradient, {why}")
    dead = [n for n in never if n not in free]
    for answers in (_dead(step, dead, found), _stuck(step, dead), _lost(step), _parts(step, found)):
        for answer in answers:
            yield answer
            if isinstance(answer, Violation):
                return


def _none(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(gradient.any())


def _silent(step: Step, found: Found, among: list[str] | None = None) -> list[str]:
    """The parameters whose gradient is nothing but rounding."""
    sizes = {n: 0.0 if g is None else float(g.norm()) for n, g in found.items()}
    least = 1e-3 * step.rounding * max(sizes.values(), default=0.0)
    return [n for n in (sizes if among is None else among) if sizes[n] <= least]


def _never(step: Step, dead: list[str]) -> list[str]:
    """Those without a gradient also where all weights are rolled, and so route tokens otherwise."""
    own = {n: p.detach() for n, p in step.exact.model.named_parameters() if p.is_floating_point()}
    for places in (1, 3, 5, 7):
        if dead:
            trace = step.training.again(weights={n: p.roll(places) for n, p in own.items()})
            dead = _silent(step, trace.gradients, dead)
    return dead


def _moves_loss(step: Step, name: str) -> bool:
    """Whether the loss depends on a parameter, as it does not on a bias of keys, which a softmax cancels."""
    p = dict(step.training.model.named_parameters())[name].detach()
    other = step.training.again(
        weights={name: p + p.roll(1) + torch.linspace(-1, 1, p.numel()).reshape(p.shape).to(p)}
    )
    return distance(step.training.loss, other.loss) > step.rounding


def _dead(step: Step, dead: list[str], found: Found) -> Iterator[Violation | Note]:
    """Parameters without a gradient: experts without a token, and what a library leaves out, are noted."""
    ran = {e.module for e in step.training.events if any(x.numel() for x in e.inputs)} if dead else set()
    experts = [n for n in dead if n.rpartition(".")[0] not in ran and _expert(step, n, found)]
    spare = [n for n in dead if n not in experts and _of_library(step, n)]
    for names, what in ((experts, "experts"), (spare, "a library's class")):
        if names:
            yield note(names[0], f"{len(names)} parameters of {what} get no gradient from this batch")
    bad = [n for n in dead if n not in experts and n not in spare]
    if bad:
        idle = bad[0].rpartition(".")[0] not in ran
        why = "its module never runs" if idle else "the loss does not depend on it, or is cut from it"
        yield fail(
            bad[0],
            f"{len(bad)} of {len(found)} parameters get no gradient in training, up to {bad[-1]}: {why}",
            "look for a detach(), a no_grad(), re-entrant checkpointing, a factor of 0 or a result that "
            "nothing reads; freeze what is left out on purpose",
        )


def _expert(step: Step, name: str, found: Found) -> bool:
    """Whether it belongs to one of several numbered alternatives, inside a block, of which others get one."""
    parts, blocks = name.split("."), {b.path for b in step.facts.blocks}
    for i, part in enumerate(parts):
        if part.isdigit() and ".".join(parts[: i + 1]) not in blocks:
            glob = ".".join([*parts[:i], "*", *parts[i + 1 :]])
            if any(fnmatchcase(n, glob) and not _none(g) for n, g in found.items()):
                return True
    return False


def _of_library(step: Step, name: str) -> bool:
    """Whether the class that holds it, outside torch, is an installed library's and as the library has it."""
    parts = name.split(".")[:-1]
    holders = [step.model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    holder = next((m for m in holders if type(m).__module__.split(".")[0] != "torch"), None)
    file = getattr(sys.modules.get(type(holder).__module__), "__file__", None) or ""
    return holder is not None and "site-packages" in file and "forward" not in vars(holder)


def _stuck(step: Step, idle: list[str]) -> Iterator[Violation]:
    """Parameters that start at zero together with what multiplies them: neither ever wakes the other."""
    zero = [n for n, p in step.model.named_parameters() if p.requires_grad and p.numel() and not p.any()]
    if all(step.facts.roles.get(n) == "bias" for n in zero):
        return
    trace = step.plain.again(training=not step.draws, dropout=False)
    dead: list[str] = []
    while now := [n for n, g in trace.gradients.items() if _none(g) and n not in idle]:
        if now == dead:
            say = f"it starts at 0, and so does what multiplies it: {len(dead)} parameters never learn"
            asleep = next((n for n in zero if n in dead), dead[0])
            yield fail(asleep, say, "draw one of the two at random")
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


def _lost(step: Step) -> Iterator[Violation]:
    """What is computed with a graph for the loss, and is no part of it."""
    model = step.exact.model
    with without_gradients(model), step.training.with_graph(functions=lambda name: name == OWN) as passed:
        results = [(f.module, x) for f in passed.functions for x in _with_graph(f.result)]
        held = [(path, value) for path, m in model.named_modules() for value in vars(m).values()]
        kept = [(path, x) for path, value in held for x in _with_graph(value) if x.numel() == 1]
        reached = arriving(passed.loss, [x for _, x in results + kept]) if results + kept else []
    for (place, _), g in zip(results + kept, reached, strict=True):
        if g is None:
            yield fail(place, LOST, "add it to the loss, or pass the result on")
            return


def _with_graph(value: object) -> list[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.grad_fn is not None]


def _parts(step: Step, found: Found) -> Iterator[Violation | Note]:
    """Rows or columns of matrices, in whole heads, that get no gradient, from other tokens neither."""
    roles = step.facts.roles
    lengths = {n for pair in step.facts.streams.values() for x in pair if x is not None for n in x.shape}
    with suppress(Unknown):
        lengths.add(step.facts.tokens.ids.shape[1])
    with suppress(Unknown):  # a table of positions ends, for this batch, where its longest row does
        lengths.add(int(step.facts.padding.real.any(0).nonzero().max()) + 1)
    bad = [
        (name, axis, hole)
        for name, g in found.items()
        if g is not None and g.ndim == 2 and roles.get(name) == "matrix"
        for axis in (0, 1)
        if (hole := _hole(g, axis)) and hole[0] not in lengths  # a table of positions may be longer
    ]
    if not bad:
        return
    everywhere = torch.ones_like(step.facts.tokens.ids, dtype=torch.bool)
    other = step.training.again(batch=step.facts.other_tokens(everywhere)).gradients
    for name, axis, (start, end) in bad:
        g = other[name]
        what = f"{'columns' if axis else 'rows'} {start} to {end - 1}"
        if g is not None and _hole(g, axis) is None:
            yield note(name, f"{what} get no gradient from this batch")
        else:
            yield fail(name, f"{what} get no gradient, and others do", "a head or a part of it is not used")


def _hole(gradient: Tensor, axis: int) -> tuple[int, int] | None:
    """The first run of zeros, if they lie in whole parts of equal width that divide the length."""
    zero = gradient.abs().sum(1 - axis) == 0
    length = len(zero)
    widths = [w for w in range(HEAD, length) if length % w == 0]
    if not zero.any() or zero.all() or not any(zero.view(-1, w).eq(zero[::w, None]).all() for w in widths):
        return None
    start = int(zero.long().argmax())
    rest = (~zero[start:]).nonzero()
    return start, start + int(rest[0]) if len(rest) else length


@property_of("gradients", explains=["siblings"], passes=1)
def frozen(step: Step) -> Iterator[Violation | Note]:
    """Nothing is frozen between trained parts, unless it is declared."""
    own = dict(step.exact.model.named_parameters())
    held = [n for n, p in own.items() if not p.requires_grad]
    bad = [n for n in held if not any(fnmatchcase(n, glob) for glob in step.declare.frozen)]
    for names in siblings(step.facts.stacks, own).values():
        trained = [n for n in names if own[n].requires_grad]
        between = [n for n in names if n in bad and trained and names.index(n) > names.index(trained[0])]
        if between:
            yield fail(
                between[0],
                f"frozen, while {len(trained)} of its {len(names) - 1} siblings train, also before it",
                "set requires_grad, or declare frozen",
            )
            return
    yield from _drawn(step, bad)
    if held:
        yield note(held[0], f"{len(held)} of {len(own)} parameters are frozen")


def _drawn(step: Step, held: list[str]) -> Iterator[Violation]:
    """Tables of tokens, and heads, that are frozen as they were drawn while every block trains."""
    facts, own = step.facts, dict(step.exact.model.named_parameters())
    read = [(f.argument(0, "input").cpu(), f.argument(1, "weight")) for f in facts.lookups]
    tables = {id(w) for ids, w in read if any(torch.equal(ids.long(), t.ids) for t in facts.sources)}
    frozen = [n for n in held if id(own[n]) in tables or facts.roles.get(n) == "head"]
    blocks = [p.requires_grad for n, p in own.items() if block_of(facts.stacks, n)]
    try:
        if not frozen or not all(blocks) or facts.trained:
            return
    except Unknown:
        return
    yield fail(frozen[0], "frozen as it was drawn while every block trains", "train it, or declare frozen")
