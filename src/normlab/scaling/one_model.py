"""What one model shows in its first steps: starts, rates, activations, and what its updates change."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normlab.base.reference import reference_arithmetic
from normlab.private_torch import GROUPED_PRODUCTS
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

PRODUCTS: Final = (*MULTIPLIED, "conv1d", "conv2d", *GROUPED_PRODUCTS)
"""Functions of torch that sum over the features of what they read."""


class QuantityKey(NamedTuple):
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

    values: dict[tuple[QuantityKey, int], float] = field(default_factory=dict)
    """Root mean squares, and the optimizer's numbers, by the number of steps taken before."""
    places: dict[QuantityKey, Place] = field(default_factory=dict)
    step_s: float = 0.0
    """Seconds of the last step, with the look that follows it."""


NthReading = tuple[str, int]
"""A reading of a parameter in a pass: its name, and how many times the pass has read it before. A tied table
is read twice, first as the table and last as the head.
"""


class _SeenError(Exception):
    """Ends a pass when the rest of it is not needed."""


class Shown(NamedTuple):
    """A tensor that a pass shows."""

    kind: Literal["entry", "stream", "activation", "scores"]
    path: str
    """The module that has it."""
    nth: int
    """How many of the kind the module has shown before."""
    tensor: Tensor
    time: int

    @property
    def place(self) -> tuple[str, str, int]:
        """What identifies it in any pass of the model."""
        return self.kind, self.path, self.nth


class WholePass:
    """What one pass shows, in its order."""

    def __init__(self, subject: WatchedModel) -> None:
        self.subject, self.time = subject, 0
        self.entering: dict[str, Tensor] = {}
        """The streams as they first enter each block."""
        self.shown: list[Shown] = []
        self.readings: list[tuple[ParameterReading, str, int]] = []
        """Each with the module that runs, and its time."""
        self.logits: Tensor | None = None
        self._running: list[str] = []
        """The modules that have begun and not ended, from the outermost on."""
        self._number = Counter[tuple[str, str]]()
        """How many tensors were shown, by kind and module."""

    @property
    def innermost(self) -> str:
        """The module that runs now."""
        return self._running[-1] if self._running else ""

    def module(self, path: str, side: Side, values: Any) -> None:
        """Keep what enters a module, or what it returns."""
        x = stream_of(tensor for _, tensor in tensors_in(values))
        if side == "input":
            self._enter(path, x)
            return
        # a module that raised, and was caught by another, has not returned
        while self._running and self._running.pop() != path:
            pass
        if x is not None:
            self._show("stream" if path in self.subject.blocks else "activation", path, x)

    def _enter(self, path: str, x: Tensor | None) -> None:
        self._running.append(path)
        if x is None or path not in self.subject.blocks or path in self.entering:
            return
        self.entering[path] = x.detach().clone()
        if path in self.subject.entries:
            self._show("entry", path, x)

    def call(self, call: FunctionCall) -> None:
        """Keep the scores before the softmax, with 0 for masked ones."""
        if call.name != "softmax":
            self._show("scores", self.innermost, call.products())
        elif self.innermost in self.subject.scores:
            scores = call.argument(0, "input").masked_fill(call.result == 0, 0.0)
            self._show("scores", self.innermost, scores)

    def _show(self, kind: Literal["entry", "stream", "activation", "scores"], path: str, x: Tensor) -> None:
        self.time += 1
        self.shown.append(Shown(kind, path, self._number[kind, path], x.detach().clone(), self.time))
        self._number[kind, path] += 1

    def read(self, reading: ParameterReading) -> None:
        """Keep that a parameter is read."""
        self.time += 1
        self.readings.append((reading, self.innermost, self.time))


class WatchedModel:
    """A model at its start, whose later states are looked at on one batch."""

    def __init__(self, setup: Setup, batch: Any) -> None:
        self.model = copied_model(unwrap(setup.model))
        self.trace = Trace(self.model, batch, setup.loss_of, dropout=False, seed=SEED)
        self.weights: Weights = {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters()
        }
        self.facts = Facts(self.trace, setup.declare)
        self.blocks = {block.path: re.sub(r"\d+$", "*", block.path) for block in self.facts.blocks}
        """By path, the same with ``*`` for the number of the block."""
        self.entries = {blocks[0].path for blocks in self.facts.stacks.values()}
        self.last = {blocks[-1].path for blocks in self.facts.stacks.values()}
        self.scores: dict[str, Scores] = {}
        with suppress(Exception):  # any model may raise anything
            wiring = read_wiring(self.trace, list(self.blocks))
            self.scores = {scores.module: scores for scores in wiring.scores}
        roles = roles_in(self.model) or self.facts.roles
        # no parametrisation has a rule for tokens: how they are read tells whether they are a table
        self.roles = {name: "hidden" if role == "token" else role for name, role in roles.items()}
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.logits: Logits | None = None
        with suppress(Unknown):
            self.logits = self.facts.logits
        self.first = self.look(self.model)
        """The pass of the model as it starts."""
        readings: dict[str, list[ParameterReading]] = defaultdict(list)
        for reading, _, _ in self.first.readings:
            readings[reading.parameter].append(reading)
        self._find_tables(readings)
        self.lookups = self._lookups_in(readings)
        """By table, the readings that look up its rows, if they make what enters the stacks."""
        self.head = self._head_in(readings)
        """The reading of the product that makes the logits, if that is known."""
        self.head_module = self._module_of(self.head)
        """The module that runs then; empty without a head."""

    def look(self, model: nn.Module) -> WholePass:
        """Run one pass of the model in some state."""
        seen = WholePass(self)
        scores = Functions(wanted=ATTENDED, see=seen.call)
        hooks = forward_hooks(dict(model.named_modules()), seen.module)
        seen.logits = self._run(model, hooks, scores, Readings(model, self.weights, seen.read))
        return seen

    def logits_with_start(self, model: nn.Module, readings: Iterable[NthReading]) -> Tensor | None:
        """The logits of the model in some state, if these readings return what they would with the weights of
        the start.
        """
        return self._run(model, self._with_start(model, readings))

    def entries_with_start(self, model: nn.Module, readings: Iterable[NthReading]) -> list[Tensor]:
        """What enters the stacks, if these readings see the weights of the start; the pass ends there."""
        entered: dict[str, Tensor] = {}

        def enter(path: str, side: Side, values: Any) -> None:
            x = stream_of(tensor for _, tensor in tensors_in(values))
            if side == "input" and x is not None:
                entered.setdefault(path, x.detach().clone())
            if len(entered) == len(self.entered(self.first.entering)):
                raise _SeenError

        modules = {path: model.get_submodule(path) for path in self.entries}
        with suppress(_SeenError):
            self._run(model, forward_hooks(modules, enter), self._with_start(model, readings))
        return self.entered(entered)

    def entered(self, entering: Mapping[str, Tensor]) -> list[Tensor]:
        """The stream that enters each stack's first block, for the stacks where one did."""
        return [entering[path] for path in self.entries if path in entering]

    def _with_start(self, model: nn.Module, readings: Iterable[NthReading]) -> Readings:
        """What replaces the weights in these readings by those of the start, while a pass runs inside it."""
        return Readings(model, self.weights, see=None, instead=frozenset(readings))

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

    def _find_tables(self, readings: Mapping[str, Sequence[ParameterReading]]) -> None:
        """Take a hidden matrix that no product reads for a table of embeddings: its rows are looked up."""
        for name, of_parameter in readings.items():
            in_products = any(reading.function in PRODUCTS for reading in of_parameter)
            if self.roles.get(name) == "hidden" and not in_products:
                self.roles[name] = "embedding"

    def _lookups_in(self, readings: Mapping[str, Sequence[ParameterReading]]) -> dict[str, list[NthReading]]:
        """By table, the readings that look up its rows; none if no stacks are known, into which they lead.

        A tied table's last reading is a product, which makes the logits, and not among them.
        """
        lookups: dict[str, list[NthReading]] = {}
        for name, of_parameter in readings.items():
            if self.roles.get(name) == "embedding" and self.entries:
                lookups[name] = [
                    (name, reading.nth) for reading in of_parameter if reading.function not in PRODUCTS
                ]
        return lookups

    def _head_in(self, readings: Mapping[str, Sequence[ParameterReading]]) -> NthReading | None:
        """The reading that makes the logits: the last product with the parameter of the head, since nothing
        comes after the logits but the loss.
        """
        head = None
        with suppress(Unknown):
            head = self.facts.head
        products = [reading for reading in readings.get(head or "", ()) if reading.function in PRODUCTS]
        if not products or self.logits is None:
            return None
        return products[-1].parameter, products[-1].nth

    def _module_of(self, wanted: NthReading | None) -> str:
        """The module that runs at a reading; empty for none."""
        path_at = {(reading.parameter, reading.nth): path for reading, path, _ in self.first.readings}
        return path_at[wanted] if wanted else ""

    def role(self, path: str) -> tuple[str, str]:
        """The role of a module's only matrix, and its name; empty if it has none, or several. A module that
        holds the head has the head's role.
        """
        if self.head is not None and (not path or within(self.head_module, path)):
            return "head", self.head[0]
        parameters = self.model.get_submodule(path).parameters()
        matrices = [self.names[id(parameter)] for parameter in parameters if parameter.ndim > 1]
        if len(matrices) != 1:
            return "", ""
        return self.roles[matrices[0]], matrices[0]

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

    def _add(self, step: int, values: Mapping[QuantityKey, list[float]]) -> None:
        for key, squares in values.items():
            self.measured.values[key, step] = (sum(squares) / len(squares)) ** 0.5

    def _key(self, quantity: str, role: str, path: str, parameter: str = "", **place: Any) -> QuantityKey:
        key = QuantityKey(quantity, role, self.subject.glob(path), self.subject.glob(parameter))
        in_block = block_of(self.subject.facts.stacks, path) is not None
        self.measured.places.setdefault(key, Place(path, in_block=in_block, **place))
        return key

    def hold(self, setup: Setup, course: Course) -> None:
        """Record the starts of the parameters, what their groups hold, and the scales of attention."""
        model, optimizers, _ = copied(setup, hollow=True)
        peaks = {id(g): peak for g, peak in zip(groups_of(optimizers), course.peaks, strict=True)}
        values: dict[QuantityKey, list[float]] = defaultdict(list)
        # reversed, so that the first reading of each parameter counts
        times = {reading.parameter: time for reading, _, time in reversed(self.subject.first.readings)}
        for parameter in held(model, optimizers):
            name, group = parameter.name, parameter.group
            numbers = {
                "start": float(self.subject.weights[name].double().square().mean().sqrt()),
                "rate": peaks[id(group)],
                "decay": parameter.decay,
                "eps": float(group.get("eps") or 0.0),
                **{f"beta{i}": 1 - float(beta) for i, beta in enumerate(group.get("betas") or (), 1)},
            }
            role = self.subject.roles.get(name, "hidden")
            time_read = times.get(name, self.subject.first.time)
            for quantity, number in numbers.items():
                key = self._key(quantity, role, name.rpartition(".")[0], name, time=time_read)
                values[key].append(number**2)
        self._add(0, values)
        # how attention is scaled tells something once queries and keys were updated
        self._add(1, self._attention_scales())

    def _attention_scales(self) -> dict[QuantityKey, list[float]]:
        values: dict[QuantityKey, list[float]] = defaultdict(list)
        times = {
            shown.path: shown.time for shown in reversed(self.subject.first.shown) if shown.kind == "scores"
        }
        for scores in self.subject.scores.values():
            if scores.free or scores.module not in times:
                continue
            numbers = {"attention scale": scores.factor, "head width": float(scores.width)}
            for quantity, number in numbers.items():
                key = self._key(quantity, "attention", scores.module, time=times[scores.module])
                values[key].append(number**2)
        return values

    def see(self, seen: WholePass, model: nn.Module, step: int) -> None:
        """Record what a pass shows, and what the updates so far change."""
        values: dict[QuantityKey, list[float]] = defaultdict(list)
        at_start = {shown.place: shown.tensor for shown in self.subject.first.shown}
        for shown in seen.shown:
            if shown.kind == "stream":
                self._branch(shown, seen, values)
                if shown.path not in self.subject.last:
                    continue  # of a stack, the stream behind it counts
            role, parameter = _ROLES.get(shown.kind, ""), ""
            if not role:
                role, parameter = self.subject.role(shown.path)
            key = self._key(shown.kind, role, shown.path, parameter, time=shown.time)
            values[key].append(square(shown.tensor))
            before = at_start.get(shown.place)
            if step and before is not None and before.shape == shown.tensor.shape:
                key = self._key(f"{shown.kind} change", role, shown.path, parameter, time=shown.time)
                values[key].append(square(shown.tensor - before))
        self._updates(seen, model, step, values)
        self._logits(seen, step, values)
        self._add(step, values)

    def _branch(self, shown: Shown, seen: WholePass, values: dict[QuantityKey, list[float]]) -> None:
        """What a block adds to its stream."""
        entered = seen.entering.get(shown.path)
        if entered is not None and entered.shape == shown.tensor.shape:
            key = self._key("branch", "stream", shown.path, time=shown.time)
            values[key].append(square(shown.tensor - entered))

    def _logits(self, seen: WholePass, step: int, values: dict[QuantityKey, list[float]]) -> None:
        """The logits, and by how much they differ from those of the start."""
        subject = self.subject
        if seen.logits is None or subject.first.logits is None:
            return
        where = None if subject.logits is None else subject.logits.where
        path = subject.head_module or getattr(where, "module", "")
        parameter = subject.head[0] if subject.head else ""
        values[self._key("logits", "logits", path, parameter, time=seen.time)].append(square(seen.logits))
        if step:
            key = self._key("logits change", "logits", path, parameter, time=seen.time)
            values[key].append(square(seen.logits - subject.first.logits))

    def _updates(
        self, seen: WholePass, model: nn.Module, step: int, values: dict[QuantityKey, list[float]]
    ) -> None:
        """What the updates of each parameter change: a table's in the stream, the head's in the logits, and
        the others' in what the function that reads them returns.
        """
        subject = self.subject
        for reading, path, time_read in seen.readings:
            name, nth_reading = reading.parameter, (reading.parameter, reading.nth)
            lookups = subject.lookups.get(name, [])
            is_head = nth_reading == subject.head
            role = "head" if is_head else subject.roles.get(name, "hidden")
            module = path or name.rpartition(".")[0]
            product = reading.function in PRODUCTS
            # this also notes the place, and does so at the start, where there is no update yet
            key = self._key("update", role, module, name, time=time_read, product=product)
            if not step:
                continue
            if is_head and seen.logits is not None:
                with_start = subject.logits_with_start(model, [nth_reading])
                if with_start is not None:
                    values[key].append(square(seen.logits - with_start))
            elif nth_reading not in lookups:
                values[key].append(square(reading.change))
            elif nth_reading == lookups[0]:  # one pass with the table of the start stands for all its lookups
                entered = subject.entries_with_start(model, lookups)
                pairs = zip(subject.entered(seen.entering), entered, strict=True)
                values[key].append(sum(square(now - before) for now, before in pairs))


_ROLES: Final = {"scores": "attention", "stream": "stream", "entry": "embedding"}
"""The role of what a pass shows by its kind; that of an activation is the role of its module."""


def square(x: Tensor) -> float:
    """The mean of the squares of a tensor's entries."""
    return float(x.detach().double().square().mean())
