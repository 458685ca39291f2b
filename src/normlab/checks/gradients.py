"""Properties of gradients: they are the derivative of the loss, and every trainable part gets one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.errors import UserError
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.stacks import block_of, siblings
from normlab.trace.facts.unknown import Unknown
from normlab.trace.functions import OWN
from normlab.trace.trace import Trace
from normlab.trace.untouched import without_gradients

STEPS: Final = (1e-5, 1e-6, 1e-7)
"""Relative changes of the weights whose differences are taken, until two of them agree."""
FLOOR: Final = 1e-7
"""Relative error of a central difference in float64 that two step sizes need not show."""
HEAD: Final = 4
"""The least width of a part of a matrix: a head, a gate's half, a third of a fused projection."""


class Moved(NamedTuple):
    """How the loss moves along its gradient: as the gradient has it, as it does, and the error of that."""

    expected: float
    measured: float
    error: float

    @property
    def disagrees(self) -> bool:
        return abs(self.expected - self.measured) > 10 * self.error + FLOOR * abs(self.expected)


class Along:
    """Compares the gradient with central differences of the loss along it.

    Each parameter moves by the same share of its own size, along its own gradient, so that what is missing
    from any one of them shows. ``attached`` adds numbers that enter autograd functions and get a gradient
    without being part of the loss, as an auxiliary loss does that is attached to a router's weights.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace.again(taps=())
        found = trace.gradients.items()
        self.gradients = {n: g for n, g in found if g is not None and g.is_floating_point() and bool(g.any())}
        self.own = {n: p.detach() for n, p in trace.model.named_parameters() if n in self.gradients}
        self.attached: tuple[float, ...] = ()

    @cached_property
    def scale(self) -> dict[str, float]:
        return {n: float(self.own[n].norm() / g.norm()) for n, g in self.gradients.items()}

    def _values(self, names: Sequence[str], h: float) -> float:
        weights = {n: self.own[n] + h * self.scale[n] * self.gradients[n] for n in names}
        trace = self.trace.again(weights=weights)
        if not self.attached:
            return float(trace.loss)
        numbers = [float(x) for x in _numbers(trace.functions(OWN))]
        return float(trace.loss) + sum(c * x for c, x in zip(self.attached, numbers, strict=True))

    def compare(self, names: Sequence[str]) -> Moved:
        """Compare them in these parameters, by the smaller of two step sizes that agree best."""
        expected = sum(self.scale[n] * float(self.gradients[n].square().sum()) for n in names)
        start, best = self._values((), 0.0), Moved(expected, 0.0, float("inf"))
        for h in STEPS:
            (a, bend_a), (b, bend_b) = (self._difference(names, x, start) for x in (h, h / 2))
            error = abs(a - b) + abs(2 * bend_b - bend_a)
            if error < best.error:
                best = Moved(expected, (4 * b - a) / 3, error)
            if error <= 10 * FLOOR * abs(expected):
                break
        return best

    def _difference(self, names: Sequence[str], h: float, start: float) -> tuple[float, float]:
        up, down = self._values(names, h), self._values(names, -h)
        return (up - down) / (2 * h), (up + down - 2 * start) / h

    def disagree(self) -> bool:
        """Whether the gradient is not the derivative. Raises Untestable where neither is smooth enough."""
        moved = self.compare(list(self.gradients))
        if moved.disagrees and (numbers := self._attached()):
            self.attached = numbers
            attached = self.compare(list(self.gradients))
            if not attached.disagrees:
                return False
            self.attached = ()
        if moved.error > 1e-3 * abs(moved.expected):
            raise Untestable("the loss bends or jumps here at every step size, so that it has no derivative")
        return moved.disagrees

    def _attached(self) -> tuple[float, ...]:
        """The gradients that numbers get from autograd functions which they enter."""
        own = self.trace.with_graph(functions=lambda name: name == OWN)
        with without_gradients(self.trace.model), own as passed:
            found = arriving(passed.loss, _numbers(passed.functions))
        return tuple(0.0 if g is None else float(g) for g in found)

    def first_wrong(self, facts: Facts) -> str:
        """The first parameter, from the loss backwards, whose gradient is not the derivative."""
        names = ordered(facts, list(self.gradients))
        while len(names) > 1:
            late = names[len(names) // 2 :]
            names = late if self.compare(late).disagrees else names[: len(names) // 2]
        return names[0]


def _numbers(calls: Sequence[object]) -> list[Tensor]:
    inputs = [x for call in calls for x in call.args]  # type: ignore[attr-defined]
    return [x for x in inputs if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]


def arriving(loss: Tensor | None, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients that a backward pass brings to tensors, None where it does not reach them."""
    found: dict[int, Tensor] = {}
    for i, x in enumerate(tensors):
        if x.requires_grad:
            x.register_hook(lambda g, i=i: found.__setitem__(i, g.detach()))
    if loss is not None and tensors:
        loss.backward()
    return [found.get(i) for i in range(len(tensors))]


def ordered(facts: Facts, names: Sequence[str]) -> list[str]:
    """Parameters in the order in which the modules that hold them are done."""
    done = {module: i for i, (module, _) in enumerate(facts.order)}
    return sorted(names, key=lambda n: done.get(n.rpartition(".")[0], -1))


@property_of("gradients", explains=["step", "overfit", "repeats"], passes=9)
def derivative(step: Step) -> Iterator[Violation | Note]:
    """The gradient is the derivative of the loss.

    Central differences of the loss in float64, along the gradient itself, at step sizes that agree with each
    other; parameters without a gradient are left to another property.
    """
    _ = step.exact
    if not step.is_exact:
        raise Untestable("the model does not run in float64")
    along = Along(_trainer(step))
    if not along.gradients:
        raise Untestable("no parameter gets a gradient")
    if not along.disagree():
        if along.attached:
            yield note("", f"{len(along.attached)} numbers get a gradient and are no part of the loss")
        return
    place = along.first_wrong(step.facts)
    moved = along.compare([place])
    if abs(moved.measured) <= 10 * moved.error:
        yield note(place, "it gets a gradient, and the loss does not move with it: a surrogate gradient")
        return
    yield fail(
        place,
        f"the loss moves by {moved.measured:.4g} along it where its gradient has {moved.expected:.4g}",
        "look for a detach(), a no_grad() or a backward of one's own between it and the loss",
    )


def _trainer(step: Step) -> Trace:
    """The step in training mode, in evaluation where running statistics move in training."""
    return step.exact if step.moving else step.training


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
    if any(g is not None and _none(g) for g in found.values()):  # the start's symmetry may cancel it
        more = step.training.again(weights=_moved(step.training, found)).gradients
        found = {n: more[n] if _none(g) else g for n, g in found.items()}
    dead = [n for n, g in found.items() if _none(g)]
    yield from _dead(step, dead, found)
    if dead:
        return
    yield from _stuck(step)
    yield from _lost(step)
    yield from _parts(step, found)


def _none(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(gradient.any())


def _dead(step: Step, dead: list[str], found: Mapping[str, Tensor | None]) -> Iterator[Violation | Note]:
    """Say which parameters get no gradient: experts without a token are noted, and what a library left."""
    ran = {e.module for e in step.training.events if any(x.numel() for x in e.inputs)} if dead else set()
    experts = [n for n in dead if _expert(step, n, found, ran)]
    spare = [n for n in dead if n not in experts and _library(step.model, n, ran)]
    if experts:
        yield note(experts[0], f"{len(experts)} parameters of experts get no gradient from this batch")
    if spare:
        yield note(spare[0], f"{len(spare)} parameters of a library's class are not used by this step")
    bad = [n for n in dead if n not in experts and n not in spare]
    if not bad:
        return
    owner = bad[0].rpartition(".")[0]
    why = "its module never runs" if owner not in ran else "the loss does not depend on it, or is cut from it"
    yield fail(
        bad[0],
        f"{len(bad)} of {len(found)} trainable parameters get no gradient in training, to {bad[-1]}: {why}",
        "look for a detach(), a no_grad(), re-entrant checkpointing, a factor of 0 or a result that nobody "
        "reads; freeze what is left out on purpose",
    )


def _expert(step: Step, name: str, found: Mapping[str, Tensor | None], ran: set[str]) -> bool:
    """Whether it belongs to one of several numbered alternatives of which this one read no token."""
    owner, parts = name.rpartition(".")[0], name.split(".")
    if owner in ran:
        return False
    for i, part in enumerate(parts):
        path = ".".join(parts[: i + 1])
        if part.isdigit() and not any(b.path == path for b in step.facts.blocks):
            glob = ".".join([*parts[:i], "*", *parts[i + 1 :]])
            if any(fnmatchcase(n, glob) and not _none(g) for n, g in found.items()):
                return True
    return False


def _library(model: nn.Module, name: str, ran: set[str]) -> bool:
    """Whether the class that holds it, outside torch, is an installed library's and as the library has it."""
    parts = name.split(".")[:-1]
    for depth in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:depth]))
        home = type(module).__module__
        if home.split(".")[0] != "torch" or depth == 0:
            file = getattr(sys.modules.get(home), "__file__", None) or ""
            return "site-packages" in file and "forward" not in vars(module) and home.split(".")[0] != "torch"
    return False


def _stuck(step: Step) -> Iterator[Violation]:
    """Parameters that start at zero together with what multiplies them never move: neither wakes the other."""
    zero = [n for n, p in step.model.named_parameters() if p.requires_grad and p.numel() and not p.any()]
    if not any(step.facts.roles.get(n) != "bias" for n in zero):
        return
    trace = step.plain.again(training=not step.draws, dropout=False)
    dead: list[str] = []
    while True:
        found = trace.gradients
        now = [n for n, g in found.items() if _none(g)]
        if not now:
            return
        if now == dead:
            break
        dead, trace = now, trace.again(weights=_moved(trace, found))
    if asleep := [n for n in zero if n in dead]:
        yield fail(
            asleep[0],
            f"it starts at 0 and its gradient stays 0, as of {len(dead)} parameters: what multiplies it is 0, too",
            "draw one of the two at random",
        )


def _moved(trace: Trace, found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The weights after a short step down the gradient, by a hundredth of each one's size."""
    own, weights = dict(trace.model.named_parameters()), dict(trace.weights)
    for n, g in found.items():
        if g is not None and bool(g.any()):
            here = weights.get(n, own[n].detach())
            size = float(here.norm()) or here.numel() ** 0.5
            weights[n] = here - 0.01 * size / float(g.norm()) * g
    return weights


def _lost(step: Step) -> Iterator[Violation]:
    """What is computed with a graph for the loss, and is no part of it."""
    model = step.exact.model
    with without_gradients(model), step.training.with_graph(functions=lambda name: name == OWN) as passed:
        results = [(f.module, x) for f in passed.functions for x in _floats(f.result)]
        kept = [
            (path, x)
            for path, module in model.named_modules()
            for value in vars(module).values()
            for x in _floats(value)
            if x.numel() == 1 and x.grad_fn is not None
        ]
        reached = arriving(passed.loss, [x for _, x in results + kept]) if results + kept else []
    for (place, _), g in zip(results + kept, reached, strict=True):
        if g is None:
            yield fail(
                place,
                "the result of an autograd function, or a number that it keeps, has a graph and is no part of the "
                "loss: what it would add to the gradient is lost",
                "add it to the loss, or pass the result on",
            )
            return


def _floats(value: object) -> list[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]


def _parts(step: Step, found: Mapping[str, Tensor | None]) -> Iterator[Violation | Note]:
    """Rows or columns of matrices, in whole heads, that get no gradient."""
    roles = step.facts.roles
    lengths = {n for pair in step.facts.streams.values() for x in pair if x is not None for n in x.shape}
    with suppress(Unknown):  # a table of positions ends, for this batch, where its longest row does
        lengths.add(int(step.facts.padding.real.any(0).nonzero().max()) + 1)
    bad = [
        (name, axis, hole)
        for name, g in found.items()
        if g is not None and g.ndim == 2 and roles.get(name) == "matrix"
        for axis in (0, 1)
        if (hole := _hole(g.abs().sum(1 - axis) == 0)) and hole[0] not in lengths
    ]
    if not bad:
        return
    everywhere = torch.ones_like(step.facts.tokens.ids, dtype=torch.bool)
    other = step.training.again(batch=step.facts.other_tokens(everywhere)).gradients
    for name, axis, (start, end) in bad:
        g = other[name]
        what = f"{'columns' if axis else 'rows'} {start} to {end - 1} of {found[name].shape[axis]}"  # type: ignore[union-attr]
        if g is None or _hole(g.abs().sum(1 - axis) == 0) is None:
            yield note(name, f"{what} get no gradient from this batch")
            continue
        yield fail(name, f"{what} get no gradient, and the others do", "a head or a part of it is not used")
        return


def _hole(zero: Tensor) -> tuple[int, int] | None:
    """The first run of zeros, if they lie in whole parts of equal width that divide the length."""
    length = len(zero)
    if not bool(zero.any()) or bool(zero.all()):
        return None
    widths = [w for w in range(HEAD, length) if length % w == 0]
    if not any(bool((p := zero.view(-1, w)).eq(p[:, :1]).all()) for w in widths):
        return None
    start = int(zero.long().argmax())
    rest = (~zero[start:]).nonzero()
    return start, start + int(rest[0]) if len(rest) else length


@property_of("gradients", explains=["siblings"], passes=1)
def frozen(step: Step) -> Iterator[Violation | Note]:
    """Nothing is frozen between trained parts, unless it is declared."""
    own = dict(step.exact.model.named_parameters())
    held = [n for n, p in own.items() if not p.requires_grad]
    declared = [n for n in held if any(fnmatchcase(n, glob) for glob in step.declare.frozen)]
    for names in siblings(step.facts.stacks, own).values():
        trained = [own[n].requires_grad for n in names]
        bad = (
            [n for n in names[trained.index(True) :] if n in held and n not in declared]
            if any(trained)
            else []
        )
        if bad:
            yield fail(
                bad[0],
                f"frozen, and so are {len(bad) - 1} more like it, while {sum(trained)} of its siblings train",
                "set requires_grad, or declare frozen",
            )
            return
    yield from _drawn(step, [n for n in held if n not in declared])
    if held:
        yield note(held[0], f"{len(held)} of {len(own)} parameters are frozen")


def _drawn(step: Step, held: list[str]) -> Iterator[Violation]:
    """Tables and heads outside the blocks that are frozen as they were drawn while every block trains."""
    stacks = step.facts.stacks
    blocks = [p.requires_grad for n, p in step.exact.model.named_parameters() if block_of(stacks, n)]
    read = {
        id(f.argument(1, "weight"))
        for f in step.facts.lookups
        if any(torch.equal(f.argument(0, "input").cpu().long(), t.ids) for t in step.facts.sources)
    }
    own = dict(step.exact.model.named_parameters())
    tables = [n for n in held if id(own[n]) in read or step.facts.roles.get(n) == "head"]
    try:
        if not tables or not all(blocks) or step.facts.trained:
            return
    except Unknown:
        return
    yield fail(
        tables[0], "frozen as it was drawn, while every block trains", "set requires_grad, or declare frozen"
    )
