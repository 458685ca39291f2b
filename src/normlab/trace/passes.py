"""The passes of one step: of the model as it was given, and of a copy that is awake and in float64."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from normlab.errors import in_one_line
from normlab.setups.setup import Loss, Setup
from normlab.setups.window import WindowStep
from normlab.trace.awake import awake_in_place, awake_step, why_inexact
from normlab.trace.dry_run import SEED
from normlab.trace.facts.facts import Facts
from normlab.trace.model_copies import ModelCopies
from normlab.trace.parts import small_parts
from normlab.trace.rewrites import rewritten
from normlab.trace.tensors import unwrap
from normlab.trace.trace import Trace
from normlab.trace.weights import weights_apart

LARGE_MODEL: Final = 50_000_000
"""Number of parameters above which memory decides what is copied: 50M of them in float64 and the two moments
of Adam take 1.2 GB. A larger model runs itself in place of a copy in its own type, its whole step stays so,
and what one group of properties needed is freed before the next.
"""


class _FirstTrace(NamedTuple):
    """The model as it was given, and which weights its passes write to."""

    trace: Trace
    rewritten: dict[bool, dict[str, str]]
    """By mode (True in training), the modules that write to a parameter, by its path."""


class Passes:
    """The passes of one step, which share copies of its model, and what they show of the step.

    ``unchanged`` runs the model as it was given, ``exact`` the model awake, without dropout, and in float64
    if it runs there: parameters that are zero hold small draws, so no branch is silent. Each runs a copy if
    one may stand in for the model, and if memory allows. Each is a ``Trace``: nothing runs before it is asked
    for.
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
        """The batch of a whole step.

        Without a step of the user's own it is the batch of ``unchanged``, which may be a part of the whole.
        A step that a function of the user's makes gets the whole batch: it may need every row, as one does
        that divides it into micro-batches. A recorded step (``setups.window.WindowStep``) has a batch of its
        own where its micro-batches differ in shape; where they do not, it knows a part of the batch that
        holds rows of each of them.
        """
        if self.setup.step is None:
            return self.unchanged.batch
        recorded = self._recorded_step
        if recorded is None:
            return self.batch
        if self.steps_another_batch:
            return recorded.batch
        return recorded.part_of_each(self.unchanged.batch) if self.tests_a_part else self.batch

    @property
    def _recorded_step(self) -> WindowStep | None:
        """The step if it was recorded. What a step of the user's holds under the same names is the user's."""
        step = self.setup.step
        return step if isinstance(step, WindowStep) else None

    @property
    def steps_another_batch(self) -> bool:
        """Whether the step has a batch of its own."""
        return self._recorded_step is not None and self._recorded_step.batch is not self.batch

    @property
    def stepped_loss(self) -> Loss:
        """The loss of the batch of a whole step: a recorded step has its own."""
        return self.loss_of if self._recorded_step is None else self._recorded_step.loss

    # ------------------------------------------------------------------------------------- as it was given

    @cached_property
    def _first_trace(self) -> _FirstTrace:
        """The model on the whole batch, of which no pass was run, and the weights that passes write to.

        A large model runs itself. A copy of it in its own type would show no more, and the memory is needed
        for the one in float64.
        """
        if self.large or not self.copies.may_stand_in:
            model, other = self.model, self.copies.spare
        else:
            model, other = self.copies.make(), self.model
        # not kept on self: the spare copy's weights are to be freed as it is widened
        weights = weights_apart(model, other)
        trace = Trace(model, self.batch, self.loss_of, seed=SEED)
        writers = {
            training: self._writers(trace.again(training=training), weights) for training in (False, True)
        }
        written = frozenset(chain(*writers.values()))
        return _FirstTrace(trace.again(rewritten=written), writers)

    def _writers(self, trace: Trace, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the modules that write to parameters in a pass, by the parameter's path.

        The first part of the batch on which the model runs shows it; if it runs on none, nothing is said of
        it here, since a refusal or a property says what raises.
        """
        for batch in self._parts or [self.batch]:
            with suppress(Exception):
                return rewritten(trace.again(batch=batch), weights)
        return {}

    @cached_property
    def on_whole_batch(self) -> Trace:
        """The model unchanged, in evaluation mode, on the whole batch. No pass of it was run yet."""
        return self._known(self._first_trace.trace)

    @property
    def rewritten(self) -> dict[bool, dict[str, str]]:
        """By mode (True in training), the parameters that the forward pass writes to, and the modules that
        do so.
        """
        return self._first_trace.rewritten

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
        """The model as it was given, in evaluation mode, on a part of the batch if the whole one is too large
        and the model runs on that part.
        """
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
        """The exact step with the user's weights, zeros too; its counts stay late in a training."""
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
