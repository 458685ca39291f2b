"""One training step under test: copies of the model to run, its facts, and the comparison of two runs."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.checks.property import Untestable
from normlab.errors import UserError
from normlab.trace.compare import Part, blame, distance
from normlab.trace.exact import Fresh, awake, in_float64, rounding_of, small_part
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.logits import SCORED, FunctionInput
from normlab.trace.facts.wiring import Wiring, read_wiring
from normlab.trace.rehearsal import together
from normlab.trace.setup import Setup
from normlab.trace.tensors import Tap, forward_hooks, unwrap
from normlab.trace.trace import Trace, output_loss

SEED: Final = 20_011
"""Of the runs: not one with which a batch is drawn, or a loss would draw the same numbers again."""
LARGE_MODEL: Final = 50_000_000
"""Parameters up to which an optimizer's states are copied in float64."""
EXACT: Final = 1e-9
"""Relative difference that rounding may leave in float64 after some hundred layers."""


class Difference(NamedTuple):
    """The largest difference of two runs, relative to the largest entry, and the module where they part."""

    size: float
    module: str


class Step:
    """What the properties are tested on.

    ``plain`` runs a copy of the model as it was handed over. ``exact`` runs a copy in float64, awake, without
    dropout: parameters that are zero hold small draws there, so that no branch is silent.
    """

    def __init__(self, setup: Setup, *, budget_s: float = 60.0) -> None:
        self.setup, self.declare, self.batch = setup, setup.declare, setup.batch
        self.model = unwrap(setup.model)
        self.started, self.budget_s = time.monotonic(), budget_s
        self.pass_s = 0.0
        """Seconds that one exact forward pass takes."""
        self.loss_of = setup.loss or output_loss
        self.kept: dict[str, Any] = {}
        """What one property leaves for others."""

    @cached_property
    def copyable(self) -> bool:
        """Whether the loss runs the model that it is given, and that can be copied."""
        try:
            twin = copy.deepcopy(self.model)
        except Exception:
            return False
        called = []
        with forward_hooks({"": twin}, lambda *_: called.append(1)):
            Trace(twin, self.batch, self.loss_of).once()
        return bool(called)

    def copy(self) -> nn.Module:
        """Return a copy of the model, without gradients. Raises Untestable where that is not to be had."""
        if not self.copyable:
            why = "the loss runs another model than it is given, or the model cannot be copied"
            raise Untestable(f"{why}; call the model that loss(model, batch) receives")
        twin = copy.deepcopy(self.model)
        for p in twin.parameters():
            p.grad = None
        return twin

    @cached_property
    def whole(self) -> Trace:
        """The model as it is, in evaluation mode, on the whole batch."""
        return Trace(self.copy() if self.copyable else self.model, self.batch, self.loss_of, seed=SEED)

    @cached_property
    def plain(self) -> Trace:
        """The same on a part of the batch where the whole one is large for the model."""
        part = small_part(self.batch, sum(p.numel() for p in self.model.parameters()))
        small = self.whole if part is self.batch else self.whole.again(batch=part)
        with suppress(Exception):
            _ = small.loss
            return small
        return self.whole

    @property
    def stepped(self) -> Any:
        """The batch of a whole step, of which the user's own needs every row."""
        return self.batch if self.setup.step is not None else self.plain.batch

    @property
    def large(self) -> bool:
        """Whether model and optimizer in float64 would take gigabytes."""
        return sum(p.numel() for p in self.model.parameters()) > LARGE_MODEL

    @cached_property
    def exact(self) -> Trace:
        """The model in float64 where it can be had, awake, without dropout, in evaluation mode."""
        narrow = replace(self.plain, dropout=False)
        if self.copyable:
            narrow = replace(narrow, model=awake(self.copy()))
        wide = in_float64(narrow) if self.copyable else None
        trace, self.is_exact = wide or narrow, wide is not None
        with suppress(Exception):
            start = time.monotonic()
            _ = trace.again().loss
            self.pass_s = time.monotonic() - start
            where = Facts(trace, self.declare)
            self.__dict__["facts"] = where
            if isinstance(tap := where.logits.where, Tap):
                trace = trace.again(taps=(tap,))
                where.trace = trace
        return trace

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
        """Buffers that a training pass changes, as running statistics are."""
        own = dict(self.exact.model.named_buffers())
        return [n for n in self.training.moving if own[n].is_floating_point()]

    @cached_property
    def fresh(self) -> Fresh:
        """The model drawn anew."""
        return Fresh(self.setup)

    @cached_property
    def wiring(self) -> Wiring:
        """The wiring of the exact model."""
        return read_wiring(self.exact, [b.path for b in self.facts.blocks])

    @cached_property
    def facts(self) -> Facts:
        """The facts of the step, read off the exact trace."""
        _ = self.exact
        if "facts" not in self.__dict__:
            self.__dict__["facts"] = Facts(self.exact, self.declare)
        return self.__dict__["facts"]

    def release(self) -> None:
        """Give back what can be made again: drawn models, gradients, and copies that lie in cycles."""
        for name in ("fresh", "training"):
            self.__dict__.pop(name, None)
        self.kept.clear()
        gc.collect()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget_s - (time.monotonic() - self.started)

    def refuse_what_cannot_run(self) -> None:
        """Raise UserError for a step that cannot be run once."""
        try:
            _ = self.whole.loss
        except UserError:
            raise
        except Exception as error:
            words = isinstance(self.batch, Mapping)
            kind = f"keywords {', '.join(map(str, self.batch))}" if words else type(self.batch).__name__
            own = self.setup.loss is None
            who = type(self.model).__name__ if own else "loss(model, batch)"
            how = ". A dict is passed as keywords, a tuple or list as arguments, anything else as it is; "
            how += "loss=lambda model, batch: … calls the model in another way"
            what = f"{who} raised {type(error).__name__} on the batch ({kind}): {error}"
            raise UserError(what + how * own) from error

    def described(self) -> dict[str, str]:
        """What the check took the step to be, for the reader to agree or not."""

        def say(fact: Callable[[], str]) -> str:
            try:
                return fact()
            except Unknown:
                return "unknown"

        about = {"parameters": f"{sum(p.numel() for p in self.model.parameters()):,}"}
        try:
            facts = self.facts
        except Exception:  # anybody's model: it may raise when it is called again
            return about
        return {
            **about,
            "tokens": say(lambda: f"{'.'.join(map(str, facts.tokens.place))} {list(facts.tokens.ids.shape)}"),
            "logits": say(lambda: f"{facts.logits.where} {list(facts.logits.shape)}"),
            "targets": say(lambda: f"{facts.shift} ahead" if facts.shift is not None else "no inputs"),
            "padding": say(lambda: f"{facts.padding.side}, by {facts.padding.source}"),
            "documents": say(lambda: f"{int(facts.documents.max()) + 1} in a row"),
            "stacks": ", ".join(f"{name} × {len(blocks)}" for name, blocks in facts.stacks.items()) or "none",
            "precision": "float64" if self.is_exact else "the model's own",
        }

    @cached_property
    def rounding(self) -> float:
        """The relative difference that two runs may show by rounding alone."""
        return EXACT if self.exact and self.is_exact else rounding_of(self.exact, self.logits)

    def logits(self, trace: Trace) -> Tensor:
        """What the loss is computed from: the logits where they are known, else the main output."""
        try:
            where = self.facts.logits.where
        except Unknown:
            return self._main_output(trace)
        if trace is self.__dict__.get("exact"):
            return self.facts.logits.value
        if isinstance(where, FunctionInput):
            calls = trace.functions(*SCORED)
            if where.index >= len(calls):
                raise Untestable("the loss is computed in another way after the change")
            return calls[where.index].argument(0, "input").detach().movedim(where.axis, -1)
        if where not in trace.taps:
            trace = trace.again(taps=(*trace.taps, where))
        return trace[where]

    @staticmethod
    def _main_output(trace: Trace) -> Tensor:
        for x in trace.outputs:
            if x.is_floating_point() and x.numel() > 1:
                return x
        raise Untestable("the model puts out no tensor to compare")

    def difference(self, a: Trace, b: Trace, part: Part, *, least: float | None = None) -> Difference | None:
        """Compare two runs in a part of the logits; None where they agree up to rounding.

        The module is the first, in order of completion, whose inputs agree in that part and whose outputs do
        not. Raises Untestable where the logits have no such part.
        """
        limit = self.rounding if least is None else least
        x, y = part(self.logits(a)), part(self.logits(b))
        if x is None or y is None:
            raise Untestable("the output has no axis for positions")
        size = distance(x, y)
        return Difference(size, blame(a, b, part, limit)) if size > limit else None

    def together(self) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """A copy of the model with its optimizers and scheduler, still bound to each other.

        Raises Untestable without an optimizer, or where they cannot be copied.
        """
        if self.setup.optimizer is None:
            raise Untestable("no optimizer was handed over: pass optimizer=")
        if not self.copyable:
            self.copy()
        return together(self.setup)
