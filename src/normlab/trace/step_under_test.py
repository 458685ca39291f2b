"""One training step, prepared for tests: copies to run, facts, and the comparison of runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.errors import UserError, in_one_line
from normlab.setups.setup import Setup
from normlab.setups.step import plain_step, require_one_number
from normlab.trace.compare import (
    Located,
    Part,
    awake_in_place,
    awake_step,
    blame,
    distance,
    part_of,
    rounding_of,
    small_part,
    why_inexact,
)
from normlab.trace.copies import Proof, copied_model, proof_of
from normlab.trace.dry_run import SEED, DryRun, ObservedStep
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.stacks import Scaled, scaled_streams, stream_of
from normlab.trace.facts.targets import Targets, tapped
from normlab.trace.facts.wiring import Scores, Wiring, read_wiring
from normlab.trace.functions import Narrowings
from normlab.trace.optimizers import Rates, copied, held, made_by, rates_of, rebound
from normlab.trace.rewrites import rewritten
from normlab.trace.starts import Fresh, constant, parameters_of
from normlab.trace.tensors import Place, Tap, map_tensors, place_name, refusal, replaced, unwrap
from normlab.trace.trace import Trace

LARGE_MODEL: Final = 50_000_000
"""Number of parameters up to which an optimizer's states are copied in float64."""
EXACT: Final = 1e-9
"""Relative difference that rounding may leave in float64 after some hundred layers."""
SMALL: Final = 2.0**-40
"""Factor that makes gradients too small for any clipping; a power of two rounds nothing."""


class StepUnderTest:
    """The step that the properties are tested on.

    ``plain`` runs a copy of the model as it was given. ``exact`` runs a copy in float64, awake, without
    dropout: parameters that are zero hold small draws there, so no branch is silent.
    """

    def __init__(self, setup: Setup, *, budget_s: float = 60.0) -> None:
        self.setup, self.declare, self.batch = setup.by_wrapped(), setup.declare, setup.batch
        self.model = unwrap(setup.model)
        self.size = sum(p.numel() for p in self.model.parameters())
        self.started, self.budget_s = time.monotonic(), budget_s
        self.loss_of = self.setup.loss_of
        self.rewritten: dict[bool, dict[str, str]] = {False: {}, True: {}}
        """By mode, the parameters that the forward pass writes to, and the modules that do so."""
        self._group = ""

    # ------------------------------------------------------------------------------------------- copies

    @cached_property
    def proof(self) -> Proof:
        """Whether copies may stand in for the model: found once, on a part of the batch if that runs."""
        part = small_part(self.batch, self.size)
        if part is not self.batch:
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
        twin = copied_model(self.model)
        nn.Module.zero_grad(twin)  # also if the class has its own method by this name
        return twin

    @cached_property
    def whole(self) -> Trace:
        """The model unchanged, in evaluation mode, on the whole batch."""
        model = self.copy() if self.copyable else self.model
        trace = Trace(model, self.batch, self.loss_of, seed=SEED)
        part = trace.again(batch=small_part(self.batch, self.size))
        for training in (False, True):
            with suppress(Exception):  # a refusal, or a property, says what raises
                self.rewritten[training] |= rewritten(part.again(training=training))
        return trace.again(rewritten=frozenset(chain(*self.rewritten.values())))

    @cached_property
    def _part(self) -> Trace:
        """The same, on a part of the batch if the whole one is too large for the model."""
        part = small_part(self.batch, self.size)
        return self.whole if part is self.batch else self.whole.again(batch=part)

    @cached_property
    def why_whole(self) -> str:
        """Why the whole batch is used although it is large; empty if a part is used, or it is not large."""
        try:
            _ = self._part.loss
        except Exception as error:  # a model may accept no other number of rows or columns
            return f"on a part of it, the model raises {in_one_line(error)}"
        return ""

    @cached_property
    def plain(self) -> Trace:
        """The same, on a part of the batch if the whole one is too large and the model runs on that part."""
        return self.whole if self.why_whole else self._part

    @property
    def stepped(self) -> Any:
        """The batch of a whole step; the user's own step needs every row."""
        return self.batch if self.setup.step is not None else self.plain.batch

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
            return awake_step(self.plain, self.copy())
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
        """Seconds that one exact forward pass takes, the shorter of two: the first one may be cold."""
        exact, times = self.exact, [time.monotonic()]
        for _ in range(2):
            with suppress(Exception):
                _ = exact.again().loss
            times.append(time.monotonic())
        return min(b - a for a, b in pairwise(times))

    @cached_property
    def training(self) -> Trace:
        """The exact step in training mode, without dropout."""
        return self.exact.again(training=True, taps=())

    @cached_property
    def draws(self) -> bool:
        """Whether a training pass depends on the random state although every dropout of torch is off."""
        return distance(self.training.loss, self.training.again(seed=1).loss) > self.rounding

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
            value = next((x for x in trace.outputs if x.is_floating_point() and x.numel() > 1), None)
        if value is None:
            raise Unknown("the loss gets no tensor from the model that could be compared")
        return value

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

    def sees(self, ahead: int) -> bool:
        """Return whether a counted prediction depends on the token at this distance from its position."""
        facts, (rows, width) = self.facts, self.facts.tokens.ids.shape
        counted = facts.targets.counted.any(0).nonzero()[:, 0]
        place = int(counted[len(counted) // 2])
        if facts.targets.ids.shape[1] != width or not 0 <= place + ahead < width:
            return ahead <= 0
        here, there = ((torch.arange(width) == i).expand(rows, width) for i in (place, place + ahead))
        changed = self.exact.again(batch=facts.other_tokens(there))
        return self.difference(self.exact, changed, part_of(here)) is not None

    def moves(self, place: Place) -> bool | None:
        """Return whether an entry of the batch moves the outputs or the loss; None if no other value runs."""
        base, ran = self.exact, False
        for other in self.facts.other_values(place):
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
        asked, rows = self.facts.targets, self.facts.rows
        if rows > 1 and len(asked.ids) == rows:
            order = asked.counted.reshape(rows, -1).sum(1).argsort(descending=True, stable=True)
            with suppress(Exception):  # the model may insist on a batch size
                half = self.facts.with_rows(order[: rows // 2].sort().values)
                return Facts(self.exact.again(batch=half), self.declare).targets
        return None

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
        return DryRun(*parts, self.loss_of, whole, several, exact, self.whole.rewritten, original=self.model)

    @property
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
        if self.large:
            for name in ("fresh", "training", "twice", "scaled") if group != self._group else ():
                self.__dict__.pop(name, None)
            gc.collect()
        self._group = group

    @property
    def left_s(self) -> float:
        """How many seconds of the budget are left."""
        return self.budget_s - (time.monotonic() - self.started)

    def refuse_what_cannot_run(self) -> None:
        """Raise UserError if the step cannot be run once or the loss is not one number."""
        try:
            loss = self.whole.loss
        except UserError:
            raise
        except Exception as error:
            own = self.setup.loss is None
            who, word = (type(self.model).__name__, "loss") if own else ("loss(model, batch)", "")
            raise UserError(refusal(who, self.batch, error, word)) from error
        require_one_number(loss)
        try:
            _ = self.rates
        except UserError:
            raise
        except Exception:  # a property reports it
            return

    def described(self) -> dict[str, str]:
        """What the check took the step to be, for the reader to confirm or not."""
        about = {"parameters": f"{self.size:,}"}
        with suppress(Exception):  # anybody's model: it may raise when it is called again
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
            stacks = ", ".join(f"{name} × {len(blocks)}" for name, blocks in facts.stacks.items())
            about["stacks"] = stacks or "none"
            if self.why_whole:
                about["batch"] = f"all of it: {self.why_whole}"
            narrow = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.narrowed))
            wide = f"float64, in part {narrow}" if narrow else "float64"
            about["precision"] = wide if self.is_exact else "the model's own"
        return about
