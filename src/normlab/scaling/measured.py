"""What one model shows in its first steps: starts, rates, activations, and what its updates change."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.base.reference import reference_arithmetic
from normlab.scaling.parametrisation import roles_in
from normlab.setups.setup import Setup
from normlab.trace.autograd import Weights
from normlab.trace.copies import copied_model
from normlab.trace.dry_run import SEED, groups_of
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.stacks import block_of, stream_of, within
from normlab.trace.facts.targets import Logits
from normlab.trace.facts.wiring import ATTENDED, MULTIPLIED, Scores, read_wiring
from normlab.trace.functions import FunctionCall, Functions, ParameterReading, Readings
from normlab.trace.optimizers import copied, held
from normlab.trace.restore import restored
from normlab.trace.tensors import Side, forward_hooks, tensors_in, unwrap
from normlab.trace.trace import Trace
from normlab.trials.attempts import batches_of
from normlab.trials.course import Course, read_course
from normlab.trials.training import Training, train

PRODUCTS: Final = (*MULTIPLIED, "conv1d", "conv2d", "grouped_mm", "_grouped_mm")
"""Functions of torch that sum over the features of what they read."""


class Key(NamedTuple):
    """What is measured, and where: layers of a stack are one place, with ``*`` for their number."""

    quantity: str
    role: str
    """The role of the parameter; or attention, stream, logits."""
    module: str
    parameter: str = ""


class Place(NamedTuple):
    """Where the first layer has what is measured."""

    path: str
    """A module."""
    time: int
    """When a pass reaches it."""
    in_block: bool = False
    product: bool = False
    """Whether the parameter is multiplied with features in a product that sums over them."""


@dataclass
class Measured:
    """What a model of one size and seed showed."""

    values: dict[tuple[Key, int], float] = field(default_factory=dict)
    """Root mean squares, and the optimizer's numbers, by the number of steps taken before."""
    places: dict[Key, Place] = field(default_factory=dict)
    step_s: float = 0.0
    """Seconds of the last step, with the look that follows it."""


Nth = tuple[str, int]
"""A parameter, and how many times a pass has read it before."""


class _SeenError(Exception):
    """Ends a pass when the rest of it is not needed."""


class WholePass:
    """What one pass shows, in its order."""

    def __init__(self, subject: WatchedModel) -> None:
        self.subject, self.time = subject, 0
        self.entering: dict[str, Tensor] = {}
        """The streams as they first enter each block."""
        self.shown: list[tuple[str, str, Tensor, int]] = []
        """Outputs of modules and scores of attention, each with its module and its time."""
        self.readings: list[tuple[ParameterReading, str, int]] = []
        self.scored: Tensor | None = None
        """The logits."""
        self._running: list[str] = []

    def module(self, path: str, side: Side, values: Any) -> None:
        x, blocks = stream_of(t for _, t in tensors_in(values)), self.subject.blocks
        if side == "input":
            self._running.append(path)
            if path in blocks and x is not None and path not in self.entering:
                self.entering[path] = x.detach().clone()
                if path in self.subject.entries:
                    self._show("entry", path, x)
            return
        while self._running and self._running.pop() != path:
            pass
        if x is not None:
            self._show("stream" if path in blocks else "activation", path, x)

    def call(self, call: FunctionCall) -> None:
        """Keep the scores before the softmax, with 0 for masked ones."""
        own = self._running[-1] if self._running else ""
        if call.name != "softmax":
            self._show("scores", own, call.products())
        elif own in self.subject.scores:
            self._show("scores", own, call.argument(0, "input").masked_fill(call.result == 0, 0.0))

    def _show(self, kind: str, path: str, x: Tensor) -> None:
        self.time += 1
        self.shown.append((kind, path, x.detach().clone(), self.time))

    def read(self, reading: ParameterReading) -> None:
        self.time += 1
        self.readings.append((reading, self._running[-1] if self._running else "", self.time))


class WatchedModel:
    """A model at its start, whose later states are looked at on one batch."""

    def __init__(self, setup: Setup, batch: Any) -> None:
        self.model = copied_model(unwrap(setup.model))
        self.trace = Trace(self.model, batch, setup.loss_of, dropout=False, seed=SEED)
        self.weights: Weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.facts = Facts(self.trace, setup.declare)
        self.blocks = {b.path: re.sub(r"\d+$", "*", b.path) for b in self.facts.blocks}
        self.entries = {blocks[0].path for blocks in self.facts.stacks.values()}
        self.last = {blocks[-1].path for blocks in self.facts.stacks.values()}
        self.scores: dict[str, Scores] = {}
        with suppress(Exception):  # any model may raise anything
            self.scores = {s.module: s for s in read_wiring(self.trace, list(self.blocks)).scores}
        found = roles_in(self.model) or self.facts.roles
        # no parametrisation has a rule for tokens: how they are read tells whether they are a table
        self.roles = {name: "hidden" if role == "token" else role for name, role in found.items()}
        self.names = {id(p): n for n, p in self.model.named_parameters()}
        self.logits: Logits | None = None
        with suppress(Unknown):
            self.logits = self.facts.logits
        self.first = self.look(self.model)
        self._read_roles()

    def look(self, model: nn.Module) -> WholePass:
        """Run one pass of the model in some state."""
        seen = WholePass(self)
        scores = Functions(wanted=ATTENDED, see=seen.call)
        hooks = forward_hooks(dict(model.named_modules()), seen.module)
        seen.scored = self._run(model, hooks, scores, Readings(model, self.weights, seen.read))
        return seen

    def logits_with(self, model: nn.Module, first: Iterable[Nth]) -> Tensor | None:
        """The logits of the model in some state, when these readings get the weights of the start."""
        return self._run(model, self._other(model, first))

    def entries_with(self, model: nn.Module, first: Iterable[Nth]) -> list[Tensor]:
        """What enters the stacks under the same condition. The pass ends there."""
        entered: dict[str, Tensor] = {}

        def enter(path: str, side: Side, values: Any) -> None:
            x = stream_of(t for _, t in tensors_in(values))
            if side == "input" and x is not None:
                entered.setdefault(path, x.detach().clone())
            if len(entered) == len(self.entered(self.first.entering)):
                raise _SeenError

        modules = {path: model.get_submodule(path) for path in self.entries}
        with suppress(_SeenError):
            self._run(model, forward_hooks(modules, enter), self._other(model, first))
        return self.entered(entered)

    def entered(self, entering: Mapping[str, Tensor]) -> list[Tensor]:
        """The stream that enters each stack's first block, for the stacks where one did."""
        return [entering[path] for path in self.entries if path in entering]

    def _other(self, model: nn.Module, first: Iterable[Nth]) -> Readings:
        return Readings(model, self.weights, None, frozenset(first))

    def _run(self, model: nn.Module, *watches: AbstractContextManager[Any]) -> Tensor | None:
        """Run one pass of the model inside these watches, and return its logits."""
        loss_of = self.trace.loss_of

        def watched(model: nn.Module, batch: Any) -> Tensor:
            with reference_arithmetic(), ExitStack() as stack:
                for watch in watches:
                    stack.enter_context(watch)
                return loss_of(model, batch)

        step = self.trace.again(model=model, loss_of=watched)
        if self.logits is not None:
            return self.logits.of(step)
        step.once()
        return None

    def _read_roles(self) -> None:
        """Tell tables from matrices by how they are read, and find the product that makes the logits."""
        by_name: dict[str, list[ParameterReading]] = defaultdict(list)
        modules: dict[tuple[str, int], str] = {}
        for reading, path, _ in self.first.readings:
            by_name[reading.parameter].append(reading)
            modules[reading.parameter, reading.nth] = path
        for name, every in by_name.items():
            if self.roles.get(name) == "hidden" and not any(r.function in PRODUCTS for r in every):
                self.roles[name] = "embedding"
        self.lookups = {
            name: [(name, r.nth) for r in every if r.function not in PRODUCTS]
            for name, every in by_name.items()
            if self.roles.get(name) == "embedding" and self.entries
        }
        head = None
        with suppress(Unknown):
            head = self.facts.head
        made = [r for r in by_name.get(head or "", ()) if r.function in PRODUCTS]
        self.head = (made[-1].parameter, made[-1].nth) if made and self.logits is not None else None
        self.head_module = modules[self.head] if self.head else ""

    def role(self, path: str) -> tuple[str, str]:
        """The role of a module's only matrix, and its name; empty if it has none, or several. A module that
        holds the head has the head's role.
        """
        if self.head is not None and (not path or within(self.head_module, path)):
            return "head", self.head[0]
        own = self.model.get_submodule(path).parameters()
        matrices = [self.names[id(p)] for p in own if p.ndim > 1]
        return (self.roles[matrices[0]], matrices[0]) if len(matrices) == 1 else ("", "")

    def glob(self, path: str) -> str:
        """A path with ``*`` for the number of its block."""
        block = block_of(self.facts.stacks, path)
        return path if block is None else self.blocks[block.path] + path[len(block.path) :]


def measure(setup: Setup, steps: int, seed: int) -> Measured:
    """Train a copy of the setup's model for some steps at its peak rates, and measure it after each, on the
    first batch. The setup stays as it was. Raises UserError if it cannot be trained.
    """
    with restored(replace(setup, batches=())):
        batches = batches_of(setup, seed)(steps)
        subject, course = WatchedModel(setup, batches[0]), _course(setup, batches, seed)
        gauge = _Gauge(subject)
        gauge.hold(setup, course)
        gauge.see(subject.first, subject.model, 0)

        def enough(seen: Training) -> str:
            start = time.monotonic()
            if seen.model is not None and torch.isfinite(torch.tensor(seen.losses[-1])):
                gauge.see(subject.look(seen.model), seen.model, len(seen.losses))
                gauge.measured.step_s = seen.seconds[-1] + time.monotonic() - start
                return ""
            return "diverged"

        train(setup, batches, course.at(course.rate, steps), seed=seed, groups={}, enough=enough)
    return gauge.measured


def _course(setup: Setup, batches: Sequence[Any], seed: int) -> Course:
    """The peak rates by group, without the warm-up."""
    seen = Training(rates={0: [float(g["lr"]) for g in groups_of(copied(setup, hollow=True)[1])]})
    if setup.step is not None and setup.scheduler is None:
        seen = train(setup, batches[:2], None, seed=seed, groups={}, enough=lambda _: "")
    return replace(read_course(setup, seen), warmup=0.0)


class _Gauge:
    """Gathers root mean squares by place and step."""

    def __init__(self, subject: WatchedModel) -> None:
        self.subject, self.measured = subject, Measured()

    def _add(self, step: int, values: Mapping[Key, list[float]]) -> None:
        for key, squares in values.items():
            self.measured.values[key, step] = (sum(squares) / len(squares)) ** 0.5

    def _key(self, quantity: str, role: str, path: str, parameter: str = "", **place: Any) -> Key:
        key = Key(quantity, role, self.subject.glob(path), self.subject.glob(parameter))
        in_block = block_of(self.subject.facts.stacks, path) is not None
        self.measured.places.setdefault(key, Place(path, in_block=in_block, **place))
        return key

    def hold(self, setup: Setup, course: Course) -> None:
        """Record the starts of the parameters, what their groups hold, and the scales of attention."""
        model, optimizers, _ = copied(setup, hollow=True)
        peaks = {id(g): peak for g, peak in zip(groups_of(optimizers), course.peaks, strict=True)}
        values: dict[Key, list[float]] = defaultdict(list)
        times = {reading.parameter: time for reading, _, time in reversed(self.subject.first.readings)}
        for h in held(model, optimizers):
            numbers = {
                "start": float(self.subject.weights[h.name].double().square().mean().sqrt()),
                "rate": peaks[id(h.group)],
                "decay": h.decay,
                "eps": float(h.group.get("eps") or 0.0),
                **{f"beta{i}": 1 - float(b) for i, b in enumerate(h.group.get("betas") or (), 1)},
            }
            role, time = self.subject.roles.get(h.name, "hidden"), times.get(h.name, self.subject.first.time)
            for quantity, number in numbers.items():
                key = self._key(quantity, role, h.name.rpartition(".")[0], h.name, time=time)
                values[key].append(number**2)
        scales: dict[Key, list[float]] = defaultdict(list)  # which tell once queries and keys were updated
        scored = {p: time for kind, p, _, time in reversed(self.subject.first.shown) if kind == "scores"}
        for one in self.subject.scores.values():
            if not one.free and one.module in scored:
                for quantity, number in (("attention scale", one.factor), ("head width", float(one.width))):
                    key = self._key(quantity, "attention", one.module, time=scored[one.module])
                    scales[key].append(number**2)
        self._add(0, values)
        self._add(1, scales)

    def see(self, seen: WholePass, model: nn.Module, step: int) -> None:
        """Record what a pass shows, and what the updates so far change."""
        subject, first = self.subject, self.subject.first
        values: dict[Key, list[float]] = defaultdict(list)
        before = {place: x for place, x, _ in _numbered(first)}
        for (kind, path, nth), x, when in _numbered(seen):
            own = {"scores": "attention", "stream": "stream", "entry": "embedding"}.get(kind)
            role, parameter = subject.role(path) if own is None else (own, "")
            if kind == "stream":
                if path in seen.entering and seen.entering[path].shape == x.shape:
                    key = self._key("branch", "stream", path, time=when)
                    values[key].append(square(x - seen.entering[path]))
                if path not in subject.last:
                    continue
            values[self._key(kind, role, path, parameter, time=when)].append(square(x))
            x0 = before.get((kind, path, nth))
            if step and x0 is not None and x.shape == x0.shape:
                key = self._key(f"{kind} change", role, path, parameter, time=when)
                values[key].append(square(x - x0))
        self._updates(seen, model, step, values)
        if seen.scored is not None and first.scored is not None:
            where = None if subject.logits is None else subject.logits.where
            path = subject.head_module or getattr(where, "module", "")
            own = ("logits", path, subject.head[0] if subject.head else "")
            values[self._key("logits", *own, time=seen.time)].append(square(seen.scored))
            if step:
                key = self._key("logits change", *own, time=seen.time)
                values[key].append(square(seen.scored - first.scored))
        self._add(step, values)

    def _updates(self, seen: WholePass, model: nn.Module, step: int, values: dict[Key, list[float]]) -> None:
        """What the updates of each parameter change: a table's in the stream, the head's in the logits, and
        the others' in what the function that reads them returns.
        """
        subject = self.subject
        for reading, path, when in seen.readings:
            owner = reading.parameter.rpartition(".")[0]
            head = (reading.parameter, reading.nth) == subject.head
            table = (reading.parameter, reading.nth) in subject.lookups.get(reading.parameter, ())
            role = "head" if head else subject.roles.get(reading.parameter, "hidden")
            product = reading.function in PRODUCTS
            key = self._key("update", role, path or owner, reading.parameter, time=when, product=product)
            if not step:
                continue
            if head and seen.scored is not None:
                other = subject.logits_with(model, [(reading.parameter, reading.nth)])
                if other is not None:
                    values[key].append(square(seen.scored - other))
            elif not table:
                values[key].append(square(reading.change))
            elif reading.nth == subject.lookups[reading.parameter][0][1]:
                entered = subject.entries_with(model, subject.lookups[reading.parameter])
                pairs = zip(subject.entered(seen.entering), entered, strict=True)
                values[key].append(sum(square(a - b) for a, b in pairs))


def _numbered(seen: WholePass) -> Iterator[tuple[tuple[str, str, int], Tensor, int]]:
    """Yield what a pass shows: its kind, its module and a count of both; the tensor; and when."""
    calls = Counter[tuple[str, str]]()
    for kind, path, x, when in seen.shown:
        yield (kind, path, calls[kind, path]), x, when
        calls[kind, path] += 1


def square(x: Tensor) -> float:
    """The mean of the squares of a tensor's entries."""
    return float(x.detach().double().square().mean())
