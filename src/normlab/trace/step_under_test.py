"""One training step, prepared for tests: copies to run, facts, and the comparison of runs."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from normlab.base.memory import available_bytes, gibibytes
from normlab.base.units import count
from normlab.errors import UserError, in_one_line
from normlab.setups.setup import Loss, Setup
from normlab.setups.step import plain_step, require_one_number
from normlab.trace import compare
from normlab.trace.budget import Cost, Deadline, OutOfTimeError, passes_until
from normlab.trace.compare import (
    Located,
    Part,
    awake_in_place,
    awake_step,
    blame,
    distance,
    first_rows,
    positions_in,
    rounding_of,
    small_parts,
    why_inexact,
)
from normlab.trace.copies import Proof, copied_model, proof_of, weights_apart
from normlab.trace.dry_run import SEED, DryRun, ObservedStep
from normlab.trace.facts import Unknown
from normlab.trace.facts.compared import Compared, compared
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.stacks import Scaled, scaled_streams, stream_of
from normlab.trace.facts.targets import Logits, Targets, tapped
from normlab.trace.facts.twins import Twins, find_twins
from normlab.trace.facts.wiring import Scores, Wiring, read_wiring
from normlab.trace.functions import Narrowings
from normlab.trace.optimizers import Rates, copied, held, made_by, rates_of, rebound
from normlab.trace.restore import random_states, same_random_state
from normlab.trace.rewrites import rewritten
from normlab.trace.starts import Fresh, constant, parameters_of
from normlab.trace.tensors import (
    Place,
    Tap,
    map_tensors,
    numbers_in,
    place_name,
    refusal,
    replaced,
    rows_of,
    tensors_in,
    unwrap,
)
from normlab.trace.trace import Trace

LARGE_MODEL: Final = 50_000_000
"""Number of parameters up to which an optimizer's states are copied in float64."""
EXACT: Final = 1e-9
"""Relative difference that rounding may leave in float64 after some hundred layers."""
SEEDS: Final = tuple(range(1, 17))
"""The seeds by which a training pass that draws random numbers is run again."""
PASSES_OF_CHECK: Final = 250
"""About how many passes all properties take together."""
SMALL: Final = 2.0**-40
"""Factor that makes gradients too small for any clipping; a power of two rounds nothing."""


class StepUnderTest:
    """The step that the properties are tested on.

    ``plain`` runs a copy of the model as it was given. ``exact`` runs a copy in float64, awake, without
    dropout: parameters that are zero hold small draws there, so no branch is silent.
    """

    def __init__(self, setup: Setup, *, budget_s: float = 60.0, started: float | None = None) -> None:
        self.setup, self.declare, self.batch = setup.by_wrapped(), setup.declare, setup.batch
        self.model = unwrap(setup.model)
        self.size = sum(p.numel() for p in self.model.parameters())
        self.started, self.budget_s = time.monotonic() if started is None else started, budget_s
        self.loss_of = self.setup.loss_of
        self.rewritten: dict[bool, dict[str, str]] = {False: {}, True: {}}
        """By mode, the parameters that the forward pass writes to, and the modules that do so."""
        self._why_whole = ""
        self._group = ""

    # ------------------------------------------------------------------------------------------- copies

    @cached_property
    def _parts(self) -> list[Any]:
        """Parts of the batch to try in its place; none if it is small enough for the model, or if the step
        does not allow another one.
        """
        if "batch" in self.setup.cannot:
            return []
        return small_parts(self.batch, self.size, self._positions)

    @cached_property
    def _positions(self) -> float:
        """How often a pass of the whole batch uses each parameter, on average.

        That is the number of ids, if the model reads ids. In what numbers are in a batch besides, such as the
        pixels of images, the model may see any number of positions: these are counted on a part.
        """
        known = float(positions_in(self.batch))
        most = numbers_in(self.batch) * self.size
        if known * self.size > compare.LARGE or most <= compare.LARGE or not self.size:
            return known
        counter = FlopCounterMode(display=False)
        every = frozenset(name for name, _ in self.model.named_parameters())
        with suppress(Exception), counter:  # the model may not run on two rows
            Trace(self.model, first_rows(self.batch), self.loss_of, rewritten=every).once()
        per_row = counter.get_total_flops() / 2 / min(2, rows_of(self.batch))
        return max(known, per_row * rows_of(self.batch) / self.size)

    @cached_property
    def proof(self) -> Proof:
        """Whether copies may stand in for the model: found once, on a part of the batch if that runs."""
        for part in self._parts:
            with suppress(Exception):
                return proof_of(self.model, part, self.loss_of)
        return proof_of(self.model, self.batch, self.loss_of)

    @property
    def copyable(self) -> bool:
        """Whether copies may stand in for the model. If not, passes are those of the model itself."""
        return not self.proof.refusal

    def copy(self) -> nn.Module:
        """Return a copy of the model, without gradients. Raises Unknown if it may not stand in for it."""
        if not self.copyable:
            raise Unknown(self.proof.refusal)
        twin = self.proof.twin
        if twin is None:
            twin = copied_model(self.model)
        self.proof = self.proof._replace(twin=None)  # it is handed out, and may be changed
        nn.Module.zero_grad(twin)  # also if the class has its own method by this name
        return twin

    @cached_property
    def whole(self) -> Trace:
        """The model unchanged, in evaluation mode, on the whole batch. No pass of it was run yet.

        A large model runs itself: of two copies of it, in float32 and in float64, only the second pays.
        """
        runs_itself = self.large or not self.copyable
        model, twin = (self.model, self.proof.twin) if runs_itself else (self.copy(), self.model)
        weights = weights_apart(model, twin)
        trace = Trace(model, self.batch, self.loss_of, seed=SEED)
        for training in (False, True):
            for batch in self._parts or [self.batch]:
                with suppress(Exception):  # a refusal, or a property, says what raises
                    changed = rewritten(trace.again(batch=batch, training=training), weights)
                    self.rewritten[training] |= changed
                    break
        return trace.again(rewritten=frozenset(chain(*self.rewritten.values())))

    @cached_property
    def plain(self) -> Trace:
        """The same, on a part of the batch if the whole one is too large and the model runs on that part."""
        for part in self._parts:
            trace = self.whole.again(batch=part)
            try:
                _ = trace.loss
            except Exception as error:  # a model may accept no other number of rows or columns
                self._why_whole = f"on a part of it, the model raises {in_one_line(error)}"
            else:
                self._why_whole = ""
                return trace
        return self.whole

    @property
    def why_whole(self) -> str:
        """Why the whole batch is used although it is large; empty if a part is used, or it is not large."""
        _ = self.plain
        return self._why_whole

    @cached_property
    def stepped(self) -> Any:
        """The batch of a whole step. The user's own step may need every row, as one that divides it does, and
        may have a batch of its own, as one of micro-batches of several shapes has; one that was recorded says
        which part of it has rows of every micro-batch.
        """
        if self.setup.step is None:
            return self.plain.batch
        if self.plain is not self.whole and not self.steps_another_batch:
            part_of_each = getattr(self.setup.step, "part_of_each", None)
            return self.batch if part_of_each is None else part_of_each(self.plain.batch)
        return getattr(self.setup.step, "batch", self.batch)

    @property
    def steps_another_batch(self) -> bool:
        """Whether the user's own step has a batch of its own."""
        return getattr(self.setup.step, "batch", self.batch) is not self.batch

    @property
    def stepped_loss(self) -> Loss:
        """The loss of that batch."""
        return getattr(self.setup.step, "loss", self.loss_of)

    @property
    def large(self) -> bool:
        """Whether model and optimizer in float64 would take gigabytes."""
        return self.size > LARGE_MODEL

    @cached_property
    def _awake(self) -> Trace:
        """The model awake (see ``awake_step``) and without dropout, in float64 if possible.

        A model that no copy may stand in for gets these weights in each pass, and its own back after it. One
        that the loss does not run stays as it is.
        """
        if self.copyable:
            return awake_step(self.plain, self.copy)
        return awake_in_place(self.plain) if self.proof.runs else self.plain.again(dropout=False)

    @property
    def is_exact(self) -> bool:
        """Whether the model runs in float64."""
        return self._awake.exact

    @cached_property
    def why_inexact(self) -> str:
        """Why nothing is tested in float64; empty if the model runs there."""
        if self.is_exact:
            return ""
        try:
            self.copy()
        except Unknown as reason:
            return str(reason)
        return why_inexact(self._awake)

    @cached_property
    def facts(self) -> Facts:
        """The facts of the step, read off the exact trace."""
        return Facts(self._awake, self.declare)

    @cached_property
    def exact(self) -> Trace:
        """The model in float64 if possible, awake and without dropout, in evaluation mode."""
        with suppress(Exception):
            tap = self.facts.output
            with suppress(Unknown):
                tap = self.facts.logits.where
            if isinstance(tap, Tap):
                self.facts.trace = self._awake.again(taps=(tap,))
                return self.facts.trace
        return self._awake

    @property
    def original(self) -> nn.Module:
        """The model of the exact trace, if that is a copy. Raises Unknown if it is the user's own."""
        return self.exact.model if self.copyable else self.copy()

    @cached_property
    def pass_s(self) -> float:
        """Seconds that one exact forward pass takes, on a part of the batch if it is large. The shorter of
        two: the first one may be cold.
        """
        exact, times = self.exact, [time.monotonic()]
        for _ in range(2):
            with suppress(Exception):
                _ = exact.again().loss
            times.append(time.monotonic())
        return min(b - a for a, b in pairwise(times))

    @property
    def step_s(self) -> float:
        """Seconds that a whole step may take, on a copy of the model: its backward passes take twice as long
        as its forward passes, which take as long for each number of the batch as an exact one.
        """
        passes = 3 * self.pass_s * numbers_in(self.stepped) / numbers_in(self.plain.batch)
        return self.proof.copy_s + passes

    def seconds_of(self, cost: Cost) -> float:
        """Return about how many seconds it takes to run so many passes and steps."""
        return cost.passes * self.pass_s + (cost.steps * self.step_s if cost.steps else 0.0)

    def bytes_of(self, cost: Cost, *, gradient: bool) -> float:
        """Return how many bytes of weights, gradients and states so many passes and steps hold at a time,
        beside the model, what it was, and the exact one.

        There may be three sets of exact gradients: of the loss, and of two sizes of one of its terms, or of
        weights that are moved along. A step has a copy with gradients and two states. What is on an
        accelerator is not counted: torch raises where it does not fit, which leaves out only that property.
        """
        own = [p for p in self.model.parameters() if p.device.type == "cpu"]
        exact = 3 * 8 * sum(p.numel() for p in own) * gradient
        return exact + (4 * sum(p.nbytes for p in own) if cost.steps else 0)

    @cached_property
    def reaches_whole(self) -> bool:
        """Whether passes of the whole batch, forward and backward, take at most a tenth of the budget."""
        if self.plain is self.whole:
            return True
        share = numbers_in(self.batch) / numbers_in(self.plain.batch)
        return 4 * self.pass_s * share <= self.budget_s / 10

    @cached_property
    def training(self) -> Trace:
        """The exact step in training mode, without dropout."""
        return self.exact.again(training=True, taps=())

    @cached_property
    def draws(self) -> bool:
        """Whether a training pass depends on the random state although every dropout of torch is off.

        A choice among a few may come out the same twice, so a pass that draws is run with several seeds.
        """
        seeds = SEEDS if self._takes_random_numbers else SEEDS[:1]
        losses = (self.training.again(seed=seed).loss for seed in seeds)
        return any(distance(self.training.loss, loss) > self.rounding for loss in losses)

    @property
    def _takes_random_numbers(self) -> bool:
        """Whether a training pass draws from the generators of torch, Python or numpy."""
        with same_random_state(self.training.seed):
            before = random_states()
        with self.training.with_graph(graph=False):
            return random_states() != before

    @cached_property
    def moving(self) -> list[str]:
        """Buffers that a training pass changes, such as running statistics."""
        own = dict(self.exact.model.named_buffers())
        return [n for n in self.training.moving if own[n].is_floating_point()]

    @cached_property
    def fresh(self) -> Fresh:
        """The model drawn afresh."""
        return Fresh(self.setup)

    # ----------------------------------------------------------------------------------- what was measured

    @cached_property
    def is_trained(self) -> bool:
        """Whether the weights are trained: the loss says so, or most of the initial constants are gone."""
        with suppress(Unknown):
            if self.facts.trained:
                return True
        with suppress(Unknown):
            fixed = {n for n, p in parameters_of(self.fresh.one).items() if p.ndim and constant(p)}
            live = parameters_of(self.model)
            moved = [n for n in fixed if n in live and live[n].numel() > 1 and not constant(live[n])]
            return len(moved) > len(fixed) / 2
        return False

    @cached_property
    def wiring(self) -> Wiring:
        """The wiring of the exact model."""
        return read_wiring(self.exact, [b.path for b in self.facts.blocks])

    def scales_by_class(self, one: Scores) -> bool:
        """Return whether the model's own class scales these scores this way."""
        trace = self.fresh.exact(self.plain)
        own = read_wiring(trace, [b.path for b in self.facts.blocks]).scores if trace is not None else ()
        return any(s.module == one.module and s.is_by(one.factor) for s in own)

    @cached_property
    def scaled(self) -> Scaled:
        """What streams of two sizes show; nothing if no block passes one on in float64."""
        hand_on = self.is_exact and self.facts.stacks
        return scaled_streams(self.exact, self.facts.entering) if hand_on else Scaled({}, frozenset(), ())

    @cached_property
    def narrowed(self) -> frozenset[torch.dtype]:
        """The types in which a pass in float64 computes in part, whatever is asked of it."""
        seen = Narrowings()
        for training in (False, True):
            with suppress(Exception), seen:  # what cannot be dispatched to Python
                self._awake.again(training=training).once()
        return frozenset(seen.types)

    @cached_property
    def rounding(self) -> float:
        """The relative difference that two runs may show by rounding alone."""
        if not self.is_exact:
            return rounding_of(self.exact, self.logits)
        return EXACT if not self.narrowed else max(EXACT, *map(self._off_in, self.narrowed))

    def _off_in(self, dtype: torch.dtype) -> float:
        """Return how far the whole step in a type may be from the same step in float64."""
        model = copied_model(self.exact.model).to(dtype)
        batch = map_tensors(self.exact.batch, lambda _, x: x.to(dtype) if x.is_floating_point() else x)
        apart = []
        for training in (False, True):
            wide = self.exact.again(training=training)
            if distance(wide.loss, wide.again(seed=1).loss):
                continue  # two types draw two sequences of random numbers
            narrow = wide.again(model=model, batch=batch, exact=False)
            apart.append(distance(self.logits(wide), self.logits(narrow)))
        return 4 * max(apart, default=0.0)

    def logits(self, trace: Trace) -> Tensor:
        """Return what the loss is computed from: the logits if they are known, else the main output."""
        try:
            logits = self.facts.logits
        except Unknown:
            return self._main_output(trace)
        if (value := logits.value if trace is self.exact else logits.of(trace)) is None:
            raise Unknown("the loss is computed differently after the change")
        return value

    def _main_output(self, trace: Trace) -> Tensor:
        """Return the first tensor that the model puts out or, if the loss calls only parts of it, the last
        that the loss gets from them.
        """
        if self.facts.output is not None:
            value = tapped(trace, self.facts.output)
        else:
            value = next(iter(trace.outputs[self._main_place :]), None)
        if value is None:
            raise Unknown("the loss gets no tensor from the model that could be compared")
        return value

    @cached_property
    def _main_place(self) -> int:
        """Which of the tensors that the loss gets from the model is the main output: the first that holds
        several numbers in the step itself. Of one row alone it may hold a single one, as a reward does.
        """
        outputs = self.exact.outputs
        several = (i for i, x in enumerate(outputs) if x.is_floating_point() and x.numel() > 1)
        return next(several, len(outputs))

    def difference(self, a: Trace, b: Trace, part: Part) -> Located | None:
        """Return the largest difference of two runs in a part of the logits, relative to the largest entry;
        None if they agree up to rounding.

        The module is the first, in order of completion, whose inputs agree in that part but whose outputs do
        not. Raises Unknown if the logits have no such part.
        """
        x, y = part(self.logits(a)), part(self.logits(b))
        if x is None or y is None:
            raise Unknown("the output has no axis for positions, or holds nothing that can be compared there")
        size = distance(x, y)
        return Located(size, blame(a, b, part, self.rounding)) if size > self.rounding else None

    def uses(self, path: str, call: int = 0) -> bool:
        """Return whether the loss depends on the output of a call of a module."""
        with self.exact.with_graph(events=True) as passed:
            here = (e for e in passed.events if (e.module, e.call) == (path, call))
            y = next((stream_of(e.outputs) for e in here), None)
            if y is None or not y.requires_grad or passed.loss is None:
                return True
            return torch.autograd.grad(passed.loss, y, allow_unused=True)[0] is not None

    def sees(self, ahead: int, scored: tuple[Logits, Targets] | None = None) -> bool:
        """Return whether a counted prediction depends on the token at this distance from its position; of
        these logits, or of the main ones.
        """
        facts, (rows, width) = self.facts, self.facts.tokens.ids.shape
        logits, asked = scored or facts.scored
        counted = asked.counted.any(0).nonzero()[:, 0]
        words = facts.exchangeable().any(0)
        there = counted - facts.before(asked) + ahead
        at_words = counted[words[there.clamp(0, width - 1)]]
        counted = at_words if len(at_words) else counted
        place = int(counted[len(counted) // 2])
        there = place - facts.before(asked) + ahead
        if not 0 <= there < width:
            return ahead <= 0
        at_token = (torch.arange(width) == there).expand(rows, width)
        changed = logits.of(self.exact.again(batch=facts.other_tokens(at_token)))
        if changed is None or changed.shape != logits.value.shape:
            raise Unknown("the loss is computed differently after the change")
        return distance(logits.value[:, place], changed[:, place]) > self.rounding

    def moves(self, place: Place, others: Iterable[Tensor] | None = None) -> bool | None:
        """Return whether an entry of the batch moves the outputs or the loss, if it has these or any other
        values; None if none of them runs.
        """
        base, ran = self.exact, False
        for other in self.facts.other_values(place) if others is None else others:
            with suppress(Exception):  # a value that the model does not accept
                changed = base.again(batch=replaced(base.batch, place, other))
                pairs = [(base.loss, changed.loss), *zip(base.outputs, changed.outputs, strict=False)]
                ran = True
                if any(x.is_floating_point() and distance(x, y) > 0 for x, y in pairs):
                    return True
        return False if ran else None

    @property
    def half(self) -> Targets | None:
        """The targets of the half of the rows with the most counted targets; None if that does not run."""
        return None if self.facts_of_half is None else self.facts_of_half.targets

    @cached_property
    def facts_of_half(self) -> Facts | None:
        """The facts of that half of the rows, whose targets are known; None if there are none."""
        asked, rows = self.facts.targets, self.facts.rows
        if rows > 1 and len(asked.ids) == rows:
            order = asked.counted.reshape(rows, -1).sum(1).argsort(descending=True, stable=True)
            with suppress(Exception):  # the model may insist on a batch size
                half = self.facts.with_rows(order[: rows // 2].sort().values)
                facts = Facts(self.exact.again(batch=half), self.declare)
                if facts.targets is not None:  # raises where there are none
                    return facts
        return None

    @cached_property
    def as_given(self) -> Trace:
        """The exact step with the weights that the user gave, zeros too: not awake."""
        values, given = self.exact.parameters, dict[str, Tensor]()
        for name, p in self.plain.parameters.items():
            wide = p.to(values[name])
            if not torch.equal(wide, values[name]):
                given[name] = wide
        return self.exact.again(weights=given, taps=())

    @cached_property
    def twins(self) -> Twins:
        """The twins of the model that the loss runs. Raises Unknown if there are none."""
        if isinstance(self._twins_or_why_none, str):
            raise Unknown(self._twins_or_why_none)
        return self._twins_or_why_none

    @cached_property
    def _twins_or_why_none(self) -> Twins | str:
        """What is kept of the search: several properties ask for it, and most models have no twin."""
        try:
            return find_twins(self.as_given)
        except Unknown as reason:
            return str(reason)

    @cached_property
    def compared(self) -> Compared:
        """What the loss compares of the model and its twins. Raises Unknown without twins."""
        return compared(self.as_given, self.twins)

    # ------------------------------------------------------------------------------------- the whole step

    def rehearsal(self, *, exact: bool = False, plain: bool = False) -> DryRun:
        """Return copies of model, optimizers and scheduler, and the user's step for them, or a plain one.

        Raises Unknown without an optimizer, or if they cannot be copied.
        """
        if not self.copyable and self.setup.optimizer is not None:
            self.copy()
        memo = dict[int, Any]()
        parts = copied(self.setup, memo=memo)
        whole = (not plain and rebound(self.setup.step, memo)) or plain_step(self.loss_of)
        several = isinstance(self.setup.optimizer, (list, tuple)) or len(parts[1]) > 1
        return DryRun(
            *parts, self.stepped_loss, whole, several, exact, self.whole.rewritten, original=self.model
        )

    @cached_property
    def handed(self) -> tuple[nn.Module, list[Optimizer]]:
        """The user's own model and optimizers, or copies if a function makes the optimizers.

        That function is given the model itself if copies may not stand in for it: nothing steps these.
        """
        if all(isinstance(o, Optimizer) for o in self.setup.optimizers):
            return self.model, self.setup.optimizers
        if self.setup.optimizer is not None and not self.copyable:
            made = made_by("optimizer(model)", self.setup.optimizer, self.model, "param_groups")
            return self.model, list(made) if isinstance(made, (list, tuple)) else [made]
        run = self.rehearsal()
        return run.model, run.optimizers

    @cached_property
    def twice(self) -> tuple[bool, ObservedStep, ObservedStep]:
        """Whether the step runs in float64, and what it shows twice, from equal weights, unclipped."""
        if self.is_exact and not self.large:
            with suppress(Exception):
                return self._twice(exact=True)
        return self._twice(exact=False)

    def _twice(self, *, exact: bool) -> tuple[bool, ObservedStep, ObservedStep]:
        run = self.rehearsal(exact=exact)
        held(run.model, run.optimizers)
        first = run.run(self.stepped, scale=SMALL)
        return exact, first, run.run(first.batch, scale=SMALL)

    @cached_property
    def gradient_rounding(self) -> float:
        """The share of a gradient that rounding may change, if the step runs as in ``twice``."""
        exact = self.twice[0] and not self.narrowed
        return self.rounding if exact else self.rehearsal().rounding(self.stepped)

    @cached_property
    def rates(self) -> Rates:
        """The rates that the schedule will give."""
        return rates_of(self.setup)

    # ------------------------------------------------------------------------------------------ the check

    def turn_to(self, group: str) -> None:
        """Free what is large and can be made again: records of passes, and copies of the model that another
        group's tests shared.
        """
        weights = sum(p.nbytes for p in self.model.parameters())
        for trace in {id(t): t for t in vars(self).values() if isinstance(t, Trace)}.values():
            events = trace.__dict__.get("events", ())
            if sum(x.nbytes for e in events for x in (*e.inputs, *e.outputs)) > weights:
                del trace.__dict__["events"]
        if self.large and group != self._group:
            for name in ("fresh", "training", "twice", "scaled", "handed"):
                self.__dict__.pop(name, None)
            gc.collect()
        self._group = group

    @property
    def left_s(self) -> float:
        """How many seconds of the budget are left."""
        return self.ends - time.monotonic()

    @property
    def ends(self) -> float:
        """When the budget is spent, by ``time.monotonic()``."""
        return self.started + self.budget_s

    def prepare(self) -> None:
        """Run the passes that every property builds on, and measure how long one takes.

        Raises UserError if the step cannot be run, or if the budget does not hold these passes.
        """
        deadline = Deadline(self.ends, free=1)
        try:
            with passes_until(deadline):
                self._refuse_what_cannot_run(lambda: self.plain)
                _ = self.pass_s
                if self.reaches_whole:
                    self._refuse_what_cannot_run(lambda: self.whole)
        except OutOfTimeError:
            now = time.monotonic()
            took = now - self.started
            enough = math.ceil(took + PASSES_OF_CHECK * deadline.pass_s(now))
            because = f"; the whole batch is used because, {self._why_whole}" if self._why_whole else ""
            raise UserError(
                f"budget_s={self.budget_s:g} is too short: one pass takes about {deadline.pass_s(now):.2g} "
                f"s, and {took:.2g} s were over after {count(deadline.begun, 'pass')}, before any property; "
                f"budget_s={enough} is enough for most of them{because}"
            ) from None

    def _refuse_what_cannot_run(self, trace_of: Callable[[], Trace]) -> None:
        """Raise UserError if the step cannot be run once or the loss is not one number."""
        try:
            loss = trace_of().loss
        except UserError:
            raise
        except Exception as error:
            own = self.setup.loss is None
            who, word = (type(self.model).__name__, "loss") if own else ("loss(model, batch)", "")
            sentence = refusal(who, self.batch, error, word)
            if isinstance(error, TypeError) and not own:  # as of a criterion of torch, which takes no model
                sentence += ". It is called with the model and the batch: loss=lambda model, batch: …"
            raise UserError(sentence) from error
        require_one_number(loss)
        try:
            _ = self.rates
        except UserError:
            raise
        except Exception:  # a property reports it
            return

    def described(self) -> dict[str, str]:
        """What the check took the step to be, for the reader to confirm or not, as far as time allows."""
        about = {"parameters": f"{self.size:,}"}
        with (
            suppress(Exception, OutOfTimeError),
            passes_until(Deadline(self.ends)),
        ):  # anybody's model: it may raise when it is called again
            facts = self.facts
            known: dict[str, Callable[[], str]] = {
                "tokens": lambda: f"{place_name(facts.tokens.place)} {list(facts.tokens.ids.shape)}",
                "logits": lambda: f"{facts.logits.where} {list(facts.logits.shape)}",
                "targets": lambda: f"{facts.shift} ahead" if facts.shift is not None else "no inputs",
                "padding": lambda: f"{facts.padding.side}, by {facts.padding.source}",
                "documents": lambda: f"{int(facts.documents.max()) + 1} in a row",
            }
            for name, fact in known.items():
                about[name] = "unknown"
                with suppress(Unknown):
                    about[name] = fact()
            root = type(self.model).__name__  # whose own children may be the blocks, as a Sequential's are
            stacks = [f"{name or root} × {len(blocks)}" for name, blocks in facts.stacks.items()]
            about["stacks"] = ", ".join(stacks) or "none"
            if self.why_whole:
                about["batch"] = f"all of it: {self.why_whole}"
            elif self.plain is not self.whole:
                about["batch"] = self._described_part()
            about["precision"] = "float64" if self.is_exact else "the model's own"
            if narrow := ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.narrowed)):
                about["precision"] += f", in part {narrow}" * self.is_exact
        return about

    def _described_part(self) -> str:
        """Say which part of the batch stands for all of it."""
        parts, all_of_it = (dict(tensors_in(trace.batch)) for trace in (self.plain, self.whole))
        place = max(parts, key=lambda place: all_of_it[place].numel())
        say = f"the part {list(parts[place].shape)} of {list(all_of_it[place].shape)}"
        return f"{say}, and once all of it" if self.reaches_whole else say


def require_memory(model: nn.Module) -> None:
    """Raise UserError if a large model's check needs more memory than is free: for its weights as they were,
    and in float64. The system would end the process without a word.
    """
    # those without numbers are refused, with the reason
    parameters = [p for p in model.parameters() if not (is_lazy(p) or p.is_meta)]
    size = sum(p.numel() for p in parameters)
    needed = sum(p.nbytes + 8 * p.numel() * (p.device.type == "cpu") for p in parameters)
    if size > LARGE_MODEL and needed > (free := available_bytes()):
        say = f"{type(model).__name__} has {size:,} parameters: a check needs about {gibibytes(needed)}"
        raise UserError(
            f"{say} of memory beside the model, and {gibibytes(free)} are free; check a smaller one"
        )
