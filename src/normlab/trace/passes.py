"""The passes of one step: of the model as it was given, and of a copy that is awake and in float64."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
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


class _AsGiven(NamedTuple):
    """The model as it was given, on the whole batch, and the weights that its passes write to."""

    trace: Trace
    """No pass of it was run yet."""
    forward_writes: dict[bool, dict[str, str]]
    """By mode (True in training), the module that writes to a parameter, by the parameter's path."""


class _Tested(NamedTuple):
    """The model as it was given, on what is tested of the batch: a part of it, or all."""

    trace: Trace
    why_whole: str = ""
    """Why that is the whole batch although it is large; empty otherwise."""


class Passes:
    """The passes of one step, which share copies of its model, and what they show of the step.

    Each is a ``Trace``: nothing runs before it is asked for. Each runs a copy if one may stand in for the
    model, and if memory allows. The two that most properties begin with:

    - ``unchanged`` runs the model as it was given.
    - ``exact`` runs it awake (parameters that are zero hold small draws, so no branch is silent), without
      dropout, and in float64 if it runs there.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup.by_wrapped()
        self.declare = setup.declare
        self.batch = setup.batch
        self.model = unwrap(setup.model)
        self.loss_of = self.setup.loss_of
        self.size = sum(p.numel() for p in self.model.parameters())
        self._asked_for: list[Trace] = []
        """The traces that were asked for so far: what they recorded can be freed."""

    def _noted(self, trace: Trace) -> Trace:
        self._asked_for.append(trace)
        return trace

    @property
    def large(self) -> bool:
        """Whether model and optimizer in float64 would take gigabytes."""
        return self.size > LARGE_MODEL

    # ------------------------------------------------------------------------------------- what they run on

    @cached_property
    def _parts(self) -> list[Any]:
        """Parts of the batch to try in its place; none if a pass of all of it is quick, or if a recorded step
        allows no other batch.
        """
        if "batch" in self.setup.cannot:
            return []
        return small_parts(Trace(self.model, self.batch, self.loss_of), self.size)

    @cached_property
    def copies(self) -> ModelCopies:
        """The copies of the model, proved on a part of the batch if the model runs on one."""
        return ModelCopies(self.model, [*self._parts, self.batch], self.loss_of)

    @property
    def _recorded_step(self) -> WindowStep | None:
        """The step if it was recorded. What a step of the user's holds under the same names is the user's."""
        step = self.setup.step
        return step if isinstance(step, WindowStep) else None

    @property
    def has_own_step_batch(self) -> bool:
        """Whether the whole step has a batch of its own: that of a recorded one whose micro-batches differ in
        shape.
        """
        recorded = self._recorded_step
        return recorded is not None and recorded.batch is not self.batch

    @property
    def step_batch(self) -> Any:
        """The batch of the whole step.

        Without a step of the user's own it is the batch of ``unchanged``, which may be a part of the whole.
        A step that is a function of the user's gets the whole batch: it may need every row, as one does that
        divides it into micro-batches. A recorded step (``setups.window.WindowStep``) gets its own batch if it
        has one, and else, if a part is tested, a part that holds rows of each micro-batch.
        """
        recorded = self._recorded_step
        if recorded is not None:
            if self.has_own_step_batch:
                return recorded.batch
            return recorded.part_of_each(self.unchanged.batch) if self.tests_a_part else self.batch
        if self.setup.step is not None:
            return self.batch
        return self.unchanged.batch

    @property
    def step_loss(self) -> Loss:
        """The loss of ``step_batch``: a recorded step has its own."""
        return self.loss_of if self._recorded_step is None else self._recorded_step.loss

    # ------------------------------------------------------------------------------------- as it was given

    @cached_property
    def _as_given(self) -> _AsGiven:
        """The model on the whole batch, and the weights that passes write to.

        A large model runs itself. A copy of it in its own type would show no more, and the memory is needed
        for the one in float64.
        """
        if self.large or not self.copies.may_stand_in:
            model, other = self.model, self.copies.spare
        else:
            model, other = self.copies.make(), self.model
        # Not kept on self: these may be the weights of the spare copy, which is made float64 in place later,
        # and the memory of its old weights must be free by then.
        weights = weights_apart(model, other)
        trace = Trace(model, self.batch, self.loss_of, seed=SEED)
        in_evaluation = self._forward_writes(trace.again(training=False), weights)
        in_training = self._forward_writes(trace.again(training=True), weights)
        written_to = frozenset(in_evaluation) | frozenset(in_training)
        return _AsGiven(trace.again(rewritten=written_to), {False: in_evaluation, True: in_training})

    def _forward_writes(self, trace: Trace, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the module that writes to a parameter in a pass, by the parameter's path.

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
        return self._noted(self._as_given.trace)

    @property
    def forward_writes(self) -> dict[bool, dict[str, str]]:
        """By mode (True in training), the parameters to which the forward pass writes, each with the module
        that does so.
        """
        return self._as_given.forward_writes

    @cached_property
    def _tested(self) -> _Tested:
        """The first part of the batch on which the model runs, or else all of it."""
        why_whole = ""
        for part in self._parts:
            trace = self.on_whole_batch.again(batch=part)
            try:
                _ = trace.loss
            except Exception as error:  # a model may accept no other number of rows or columns
                why_whole = f"on a part of it, the model raises {in_one_line(error)}"
            else:
                return _Tested(trace)
        return _Tested(self.on_whole_batch, why_whole)

    @cached_property
    def unchanged(self) -> Trace:
        """The model as it was given, in evaluation mode, on a part of the batch if the whole one is too large
        and the model runs on that part.
        """
        return self._noted(self._tested.trace)

    @property
    def why_whole(self) -> str:
        """Why the whole batch is used although it is large; empty if a part is used, or it is not large."""
        return self._tested.why_whole

    @property
    def tests_a_part(self) -> bool:
        """Whether a part of the batch stands for all of it."""
        return self.unchanged is not self.on_whole_batch

    # ----------------------------------------------------------------------------------- awake, in float64

    @cached_property
    def _awake(self) -> Trace:
        """The model awake (see ``awake_step``) and without dropout, in float64 if possible."""
        if self.copies.may_stand_in:
            trace = awake_step(self.unchanged, self.copies.make)
        elif self.copies.loss_runs_model:
            trace = awake_in_place(self.unchanged)  # the model has its own weights back after each pass
        else:
            trace = self.unchanged.again(dropout=False)  # other weights would change nothing
        return self._noted(trace)

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
        try:
            return self._noted(self.facts.tapped)
        except Exception:  # the facts may not be readable; the step is the same without them
            return self._awake

    @property
    def exact_copy(self) -> nn.Module:
        """The model of the exact trace, if that is a copy. Raises Unknown if it is the user's own."""
        self.copies.require()
        return self.exact.model

    @cached_property
    def training(self) -> Trace:
        """The exact step in training mode, without dropout."""
        return self._noted(self.exact.again(training=True, taps=()))

    @cached_property
    def exact_as_given(self) -> Trace:
        """The exact step with the user's weights, zeros too.

        Buffers are those of ``exact``, so counters of steps stand late in a training.
        """
        exact_weights, weights = self.exact.parameters, dict[str, Any]()
        for name, p in self.unchanged.parameters.items():
            given = p.to(exact_weights[name])  # in the type of the exact one
            if not given.equal(exact_weights[name]):
                weights[name] = given
        return self._noted(self.exact.again(weights=weights, taps=()))

    @cached_property
    def running_statistics(self) -> list[str]:
        """Buffers that a training pass changes, without those that count in integers."""
        buffers = dict(self.exact.model.named_buffers())
        return [name for name in self.training.moving if buffers[name].is_floating_point()]

    # --------------------------------------------------------------------------------------- what is freed

    def forget_long_records(self) -> None:
        """Free the records of passes that take more memory than the weights; they are made again when they
        are asked for.
        """
        weights = sum(p.nbytes for p in self.model.parameters())
        for trace in self._asked_for:
            if trace.recorded_bytes > weights:
                trace.forget_events()

    def forget_training(self) -> None:
        """Free what training passes showed, such as gradients."""
        for trace in self._asked_for:
            if trace.training:
                trace.forget()
