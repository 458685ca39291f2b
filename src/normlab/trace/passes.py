"""The passes of one step: of the model as it was given, and of a copy that is awake and in float64."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any, Final

from torch import nn

from normlab.errors import in_one_line
from normlab.setups.setup import Loss, Setup
from normlab.trace.awake import awake_in_place, awake_step, why_inexact
from normlab.trace.copies import weights_apart
from normlab.trace.dry_run import SEED
from normlab.trace.facts.facts import Facts
from normlab.trace.model_copies import ModelCopies
from normlab.trace.parts import small_parts
from normlab.trace.rewrites import rewritten
from normlab.trace.tensors import unwrap
from normlab.trace.trace import Trace

LARGE_MODEL: Final = 50_000_000
"""Number of parameters up to which an optimizer's states are copied in float64."""


class Passes:
    """The passes of one step, which share copies of its model, and what they show of the step.

    ``unchanged`` runs a copy of the model as it was given. ``exact`` runs a copy in float64, awake, without
    dropout: parameters that are zero hold small draws there, so no branch is silent. Each is a ``Trace``:
    nothing runs before it is asked for.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.declare, self.batch = setup.by_wrapped(), setup.declare, setup.batch
        self.model = unwrap(setup.model)
        self.size = sum(p.numel() for p in self.model.parameters())
        self.loss_of = self.setup.loss_of
        self._traces: list[Trace] = []
        """Those that were asked for so far, whose records can be let go."""

    def _known(self, trace: Trace) -> Trace:
        self._traces.append(trace)
        return trace

    @property
    def large(self) -> bool:
        """Whether model and optimizer in float64 would take gigabytes."""
        return self.size > LARGE_MODEL

    # ------------------------------------------------------------------------------------- what they run on

    @cached_property
    def _parts(self) -> list[Any]:
        """Parts of the batch to try in its place; none if it is small enough for the model, or if the step
        does not allow another one.
        """
        if "batch" in self.setup.cannot:
            return []
        return small_parts(Trace(self.model, self.batch, self.loss_of), self.size)

    @cached_property
    def copies(self) -> ModelCopies:
        """The copies of the model, proved on a part of the batch if the model runs on one."""
        return ModelCopies(self.model, [*self._parts, self.batch], self.loss_of)

    @property
    def stepped(self) -> Any:
        """The batch of a whole step. The user's own step may need every row, as one that divides it does, and
        may have a batch of its own, as one of micro-batches of several shapes has; one that was recorded says
        which part of it has rows of every micro-batch.
        """
        if self.setup.step is None:
            return self.unchanged.batch
        if self.tests_a_part and not self.steps_another_batch:
            part_of_each = getattr(self.setup.step, "part_of_each", None)
            return self.batch if part_of_each is None else part_of_each(self.unchanged.batch)
        return getattr(self.setup.step, "batch", self.batch)

    @property
    def steps_another_batch(self) -> bool:
        """Whether the user's own step has a batch of its own."""
        return getattr(self.setup.step, "batch", self.batch) is not self.batch

    @property
    def stepped_loss(self) -> Loss:
        """The loss of that batch."""
        return getattr(self.setup.step, "loss", self.loss_of)

    # ------------------------------------------------------------------------------------- as it was given

    @cached_property
    def _first_trace(self) -> tuple[Trace, dict[bool, dict[str, str]]]:
        """``on_whole_batch`` and ``rewritten``.

        A large model runs itself: of two copies of it, in float32 and in float64, only the second pays.
        """
        if self.large or not self.copies.may_stand_in:
            model, other = self.model, self.copies.spare
        else:
            model, other = self.copies.make(), self.model
        # not kept: the spare copy's weights are to be freed as it is widened
        weights = weights_apart(model, other)
        trace = Trace(model, self.batch, self.loss_of, seed=SEED)
        writers: dict[bool, dict[str, str]] = {False: {}, True: {}}
        for training in writers:
            for batch in self._parts or [self.batch]:
                with suppress(Exception):  # a refusal, or a property, says what raises
                    writers[training] = rewritten(trace.again(batch=batch, training=training), weights)
                    break
        return trace.again(rewritten=frozenset(chain(*writers.values()))), writers

    @cached_property
    def on_whole_batch(self) -> Trace:
        """The model unchanged, in evaluation mode, on the whole batch. No pass of it was run yet."""
        return self._known(self._first_trace[0])

    @property
    def rewritten(self) -> dict[bool, dict[str, str]]:
        """By mode (True in training), the parameters that the forward pass writes to, and the modules that
        do so.
        """
        return self._first_trace[1]

    @cached_property
    def _unchanged_and_why(self) -> tuple[Trace, str]:
        """``unchanged`` and ``why_whole``."""
        why = ""
        for part in self._parts:
            trace = self.on_whole_batch.again(batch=part)
            try:
                _ = trace.loss
            except Exception as error:  # a model may accept no other number of rows or columns
                why = f"on a part of it, the model raises {in_one_line(error)}"
            else:
                return trace, ""
        return self.on_whole_batch, why

    @cached_property
    def unchanged(self) -> Trace:
        """The same, on a part of the batch if the whole one is too large and the model runs on that part."""
        return self._known(self._unchanged_and_why[0])

    @property
    def why_whole(self) -> str:
        """Why the whole batch is used although it is large; empty if a part is used, or it is not large."""
        return self._unchanged_and_why[1]

    @property
    def tests_a_part(self) -> bool:
        """Whether a part of the batch stands for all of it."""
        return self.unchanged is not self.on_whole_batch

    # ----------------------------------------------------------------------------------- awake, in float64

    @cached_property
    def _awake(self) -> Trace:
        """The model awake (see ``awake_step``) and without dropout, in float64 if possible.

        A model that no copy may stand in for gets these weights in each pass, and its own back after it. One
        that the loss does not run stays as it is.
        """
        if self.copies.may_stand_in:
            return self._known(awake_step(self.unchanged, self.copies.make))
        if self.copies.loss_runs_model:
            return self._known(awake_in_place(self.unchanged))
        return self._known(self.unchanged.again(dropout=False))

    @property
    def is_exact(self) -> bool:
        """Whether the model runs in float64."""
        return self._awake.exact

    @cached_property
    def why_inexact(self) -> str:
        """Why nothing is tested in float64; empty if the model runs there."""
        if self.is_exact:
            return ""
        return self.copies.refusal or why_inexact(self._awake)

    @cached_property
    def facts(self) -> Facts:
        """The facts of the step, read off the exact trace."""
        return Facts(self._awake, self.declare)

    @cached_property
    def exact(self) -> Trace:
        """The model in float64 if possible, awake and without dropout, in evaluation mode."""
        with suppress(Exception):  # the facts may not be readable; the step is the same without them
            return self._known(self.facts.tapped)
        return self._awake

    @property
    def exact_copy(self) -> nn.Module:
        """The model of the exact trace, if that is a copy. Raises Unknown if it is the user's own."""
        return self.exact.model if self.copies.may_stand_in else self.copies.make()

    @cached_property
    def training(self) -> Trace:
        """The exact step in training mode, without dropout."""
        return self._known(self.exact.again(training=True, taps=()))

    @cached_property
    def exact_as_given(self) -> Trace:
        """The exact step with the weights that the user gave, zeros too: not awake."""
        exact, weights = self.exact.parameters, dict[str, Any]()
        for name, p in self.unchanged.parameters.items():
            wide = p.to(exact[name])
            if not wide.equal(exact[name]):
                weights[name] = wide
        return self._known(self.exact.again(weights=weights, taps=()))

    @cached_property
    def moving(self) -> list[str]:
        """Buffers that a training pass changes, such as running statistics."""
        buffers = dict(self.exact.model.named_buffers())
        return [name for name in self.training.moving if buffers[name].is_floating_point()]

    # --------------------------------------------------------------------------------------- what they hold

    def forget_long_records(self) -> None:
        """Free the records of passes that take more memory than the weights; they are made again when they
        are asked for.
        """
        weights = sum(p.nbytes for p in self.model.parameters())
        for trace in self._traces:
            if trace.recorded_bytes > weights:
                trace.forget_events()

    def forget_training(self) -> None:
        """Free what training passes showed, such as gradients."""
        for trace in self._traces:
            if trace.training:
                trace.forget()
